// Errors of the library: one exception class with a code, a kind, and what was wrong as fields.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

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

// Finer than the code, for programs that react to an error.
enum class ErrorKind : uint8_t {
  general,              // none of the others: the code says what there is to know
  invalid_argument,     // usage: an argument is not what the plan or the function asks for
  invalid_problem,      // usage: a description that is never right, or whose fields do not fit together
  unsupported,          // usage, device: a right description that nothing here takes
  misaligned,           // usage: an address
  buffer_too_small,     // usage: the memory of an argument
  workspace_too_small,  // usage
  compilation_failed,   // device, bug: a kernel did not compile or load
  launch_failed,        // device: the driver did not take the work, or the work failed
};
HALFBYTE_API const char* to_string(ErrorKind kind);  // "general", "invalid-argument", ...

// What an error says besides its text. Empty: not known.
struct ErrorDetails {
  ErrorKind kind = ErrorKind::general;
  std::string argument = {};  // "codes", "descriptor.alignment"
  std::string expected = {};  // "[2, 3]"
  std::string actual = {};
};

// what() names the operation, the argument, the rule and the actual values.
class HALFBYTE_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Error(ErrorCode code, const std::string& message, ErrorDetails details)
      : Error(code, message, std::make_shared<const ErrorDetails>(std::move(details))) {}
  // With the details of another.
  Error(ErrorCode code, const std::string& message, const Error& of) : Error(code, message, of.details_) {}
  ErrorCode code() const noexcept { return code_; }
  ErrorKind kind() const noexcept { return details().kind; }
  const std::string& argument() const noexcept { return details().argument; }
  const std::string& expected() const noexcept { return details().expected; }
  const std::string& actual() const noexcept { return details().actual; }

 private:
  Error(ErrorCode code, const std::string& message, std::shared_ptr<const ErrorDetails> details)
      : std::runtime_error(message), code_(code), details_(std::move(details)) {}
  const ErrorDetails& details() const noexcept;

  ErrorCode code_;
  std::shared_ptr<const ErrorDetails> details_;  // shared, as copies of exceptions must not throw; null: none
};

}  // namespace halfbyte
