// The progress bar and cancellation by signals.
#pragma once

#include <chrono>
#include <string>

#include "halfbyte/checkpoint.hpp"
#include "output.h"

namespace halfbyte::cli {

// SIGINT, SIGTERM and SIGHUP ask the running work to stop; a second one kills at once.
// A failed write is reported by its errno, not by SIGPIPE or SIGXFSZ.
void install_signal_handlers();
bool is_cancelled();  // one has come

// One line on stderr, rewritten in place, while it exists; nothing where stderr is not a terminal.
class ProgressBar {
 public:
  // `quantity` prints what is done: bytes, where nothing else is said.
  explicit ProgressBar(bool enabled, std::string (*quantity)(uint64_t) = format_bytes);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar();
  // For the library: draws, and stops the work where a signal has asked for it.
  ProgressFunction function();

 private:
  using Clock = std::chrono::steady_clock;
  void draw(const Progress& progress);

  bool visible_;
  std::string (*quantity_)(uint64_t);
  std::string phase_;
  Clock::time_point phase_start_, last_draw_;
};

}  // namespace halfbyte::cli
