// Errors of the library: one exception class with a code.
#pragma once

#include <stdexcept>
#include <string>

#include "halfbyte/export.h"

namespace halfbyte {

// The same numbers are the exit codes of the command line tool and the status codes of the C ABI.
enum class ErrorCode : int {
  ok = 0,
  bug = 1,          // an internal invariant failed
  usage = 2,        // wrong arguments, unknown names
  bad_input = 3,    // malformed, unsupported or non-finite data
  verify = 4,       // a result failed its own check
  device = 5,       // no capable device, driver or NVRTC; device memory
  io = 6,           // a file operation failed (including no space, no permission)
  no_memory = 7,    // host memory
  exists = 8,       // the output exists, or is being written by another process
  corrupt = 9,      // halfbyte's own files (kernel packs) are damaged
  cancelled = 130,  // stopped on request
};

// "USAGE", "BAD_INPUT", ...
HALFBYTE_API const char* to_string(ErrorCode code);

// what() names the operation, the argument, the rule and the actual values.
class HALFBYTE_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace halfbyte
