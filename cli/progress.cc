#include "progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>

#include "output.h"

namespace halfbyte::cli {

namespace {

std::atomic<bool> cancelled = false;
static_assert(std::atomic<bool>::is_always_lock_free, "set by a signal handler");

size_t terminal_columns() {
  struct winsize size;
  if (::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 80;
  return size.ws_col;
}

std::string format_duration(double seconds) {
  const int64_t s = static_cast<int64_t>(std::min(seconds + 0.5, 359999.0));
  return s < 3600 ? fmt::format("{}:{:02}", s / 60, s % 60)
                  : fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

}  // namespace

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = [](int) { cancelled = true; };
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction previous;
    ::sigaction(signal, nullptr, &previous);
    // Under nohup, or in the background of a script, the parent has asked that it be ignored.
    if (previous.sa_handler != SIG_IGN) ::sigaction(signal, &action, nullptr);
  }
  struct sigaction ignore = {};
  ignore.sa_handler = SIG_IGN;
  for (const int signal : {SIGPIPE, SIGXFSZ}) ::sigaction(signal, &ignore, nullptr);
}

bool is_cancelled() { return cancelled; }

ProgressBar::ProgressBar(bool enabled, std::string (*quantity)(uint64_t))
    : visible_(enabled && ::isatty(STDERR_FILENO)), quantity_(quantity) {}

ProgressBar::~ProgressBar() {
  if (visible_ && !phase_.empty()) write_stderr(fmt::format("\r{:{}}\r", "", terminal_columns() - 1));
}

ProgressFunction ProgressBar::function() {
  return [this](const Progress& progress) {
    if (visible_) draw(progress);
    return !is_cancelled();
  };
}

void ProgressBar::draw(const Progress& progress) {
  const Clock::time_point now = Clock::now();
  const bool new_phase = phase_ != progress.phase;
  if (new_phase) {
    phase_ = progress.phase;
    phase_start_ = now;
  }
  const bool done = progress.done_bytes >= progress.total_bytes;
  if (!new_phase && !done && now - last_draw_ < std::chrono::milliseconds(100)) return;
  last_draw_ = now;

  // The last column stays free: writing there can wrap the line.
  const size_t width = terminal_columns() - 1;
  std::string line = phase_;
  if (progress.total_bytes > 0) {
    const double total = static_cast<double>(progress.total_bytes);
    const double fraction = std::min(1.0, static_cast<double>(progress.done_bytes) / total);
    const double seconds = std::chrono::duration<double>(now - phase_start_).count();
    const double rate = seconds > 0 ? static_cast<double>(progress.done_bytes) / seconds : 0;
    const std::string head = fmt::format("{:<10} {:>3.0f}%", phase_, 100 * fraction);
    const std::string tail =
        fmt::format("{} / {}  {}/s  ETA {}", quantity_(progress.done_bytes), quantity_(progress.total_bytes),
                    quantity_(static_cast<uint64_t>(rate)),
                    rate > 0 ? format_duration(total * (1 - fraction) / rate) : "-:--");
    const size_t used = head.size() + tail.size() + std::string_view(" []  ").size();
    constexpr size_t kMinBar = 5;
    if (used + kMinBar <= width) {
      const size_t bar = width - used;
      const size_t filled = static_cast<size_t>(fraction * static_cast<double>(bar));
      line = fmt::format("{} [{:#<{}}{:.<{}}]  {}", head, "", filled, "", bar - filled, tail);
    } else {
      line = fmt::format("{}  {}", head, tail);
    }
  }
  write_stderr(fmt::format("\r{:<{}.{}}", line, width, width));
}

}  // namespace halfbyte::cli
