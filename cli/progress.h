// The progress bar and cancellation by signals.
#pragma once

#include <chrono>
#include <string>

#include "halfbyte/checkpoint.hpp"

namespace halfbyte::cli {

// SIGINT, SIGTERM and SIGHUP ask the running work to stop; a second one kills at once.
// A failed write is reported by its errno, not by SIGPIPE or SIGXFSZ.
void install_signal_handlers();

// One line on stderr, rewritten in place, while it exists; nothing where stderr is not a terminal.
class ProgressBar {
 public:
  explicit ProgressBar(bool enabled);
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ~ProgressBar();
  // For the library: draws, and stops the work where a signal has asked for it.
  ProgressFunction function();

 private:
  using Clock = std::chrono::steady_clock;
  void draw(const Progress& progress);

  bool visible_;
  std::string phase_;
  Clock::time_point phase_start_, last_draw_;
};

}  // namespace halfbyte::cli
