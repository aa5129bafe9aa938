// What a report says of the time of a run.
#include <algorithm>
#include <array>
#include <utility>

#include "halfbyte/checkpoint.hpp"

namespace halfbyte {

const char* bottleneck(const CheckpointReport& report) {
  if (report.run_seconds + report.verify_seconds + report.sync_seconds <= 0) return "";
  if (report.verify_seconds + report.sync_seconds > report.run_seconds)
    return report.verify_seconds >= report.sync_seconds ? "verify" : "sync";
  const std::array<std::pair<double, const char*>, 4> stages = {{{report.compute_seconds, "compute"},
                                                                 {report.copy_seconds, "copy"},
                                                                 {report.read_seconds, "read"},
                                                                 {report.write_seconds, "write"}}};
  return std::ranges::max_element(stages, {}, [](const auto& stage) { return stage.first; })->second;
}

}  // namespace halfbyte
