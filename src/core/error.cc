#include "halfbyte/error.hpp"

#include <cstddef>
#include <new>

#include "core/expect.h"

namespace halfbyte {

const char* to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::ok:
      return "OK";
    case ErrorCode::bug:
      return "BUG";
    case ErrorCode::usage:
      return "USAGE";
    case ErrorCode::bad_input:
      return "BAD_INPUT";
    case ErrorCode::verify:
      return "VERIFY";
    case ErrorCode::device:
      return "DEVICE";
    case ErrorCode::io:
      return "IO";
    case ErrorCode::no_memory:
      return "NO_MEMORY";
    case ErrorCode::exists:
      return "EXISTS";
    case ErrorCode::corrupt:
      return "CORRUPT";
    case ErrorCode::cancelled:
      return "CANCELLED";
  }
  return "BUG";
}

const char* to_string(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::general:
      return "general";
    case ErrorKind::invalid_argument:
      return "invalid-argument";
    case ErrorKind::invalid_problem:
      return "invalid-problem";
    case ErrorKind::unsupported:
      return "unsupported";
    case ErrorKind::misaligned:
      return "misaligned";
    case ErrorKind::buffer_too_small:
      return "buffer-too-small";
    case ErrorKind::workspace_too_small:
      return "workspace-too-small";
    case ErrorKind::compilation_failed:
      return "compilation-failed";
    case ErrorKind::launch_failed:
      return "launch-failed";
  }
  return "general";
}

const ErrorDetails& Error::details() const noexcept {
  alignas(ErrorDetails) static std::byte memory[sizeof(ErrorDetails)];
  static const ErrorDetails& none = *new (memory) ErrorDetails;  // never destroyed, and takes no memory
  return details_ ? *details_ : none;
}

void throw_unexpected(ErrorKind kind, std::string_view op, std::string_view argument, std::string_view verb,
                      std::string expected, std::string actual) {
  const std::string text = fmt::format("{}: {} must {} {}, got {}", op, argument, verb, expected, actual);
  if (verb == "not be") expected = "not " + expected;
  throw Error(
      ErrorCode::usage, text,
      {kind, std::string(argument.substr(0, argument.find(' '))), std::move(expected), std::move(actual)});
}

}  // namespace halfbyte
