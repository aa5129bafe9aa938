// Checks whose errors have fields beside the text: which argument, what it must be, what it is.
#pragma once

#include <string>
#include <string_view>

#include "core/checks.h"

namespace halfbyte {

// "{op}: {argument} must {verb} {expected}, got {actual}". The argument's field is its first word.
[[noreturn]] void throw_unexpected(ErrorKind kind, std::string_view op, std::string_view argument,
                                   std::string_view verb, std::string expected, std::string actual);

}  // namespace halfbyte

// Text and fields of the Error(usage) are made of the same values, which {fmt} prints.
// HALFBYTE_MUST(cols >= 0, invalid_problem, "quantize", "cols", "be", ">= 0", cols);
#define HALFBYTE_MUST(condition, kind, op, argument, verb, expected, actual)                \
  do {                                                                                      \
    if (!(condition)) [[unlikely]]                                                          \
      ::halfbyte::throw_unexpected(::halfbyte::ErrorKind::kind, op, argument, verb,         \
                                   fmt::format("{}", expected), fmt::format("{}", actual)); \
  } while (false)

// Of a text of another form. `details` is an ErrorDetails, made only where the check fails.
#define HALFBYTE_CHECK_AS(condition, code, details, ...)                                       \
  do {                                                                                         \
    if (!(condition)) [[unlikely]]                                                             \
      throw ::halfbyte::Error(::halfbyte::ErrorCode::code, fmt::format(__VA_ARGS__), details); \
  } while (false)
