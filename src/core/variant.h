// A kernel variant of an op: a row of the op's table. The dispatcher takes the first variant of the
// device that does not refuse the problem.
#pragma once

#include <span>
#include <string>

#include "core/checks.h"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

template <class Problem, class Result>
struct Variant {
  const char* name;  // "quantize_cpu"
  DeviceKind device;
  // Why this variant cannot take the problem; empty if it can.
  std::string (*refuse)(const Problem& problem);
  Result (*run)(const Problem& problem);
};

template <class Problem, class Result>
const Variant<Problem, Result>& choose(const char* op, std::span<const Variant<Problem, Result>> variants,
                                       const Problem& problem, DeviceKind device) {
  std::string reasons;
  for (const auto& variant : variants) {
    if (variant.device != device) continue;
    const std::string reason = variant.refuse(problem);
    if (reason.empty()) return variant;
    reasons += fmt::format("; {}: {}", variant.name, reason);
  }
  throw Error(
      ErrorCode::device,
      fmt::format("{}: no variant for this device{}", op, reasons.empty() ? "; none is built in" : reasons),
      ErrorDetails{ErrorKind::unsupported});
}

}  // namespace halfbyte
