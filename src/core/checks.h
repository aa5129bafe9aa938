// Checks that print what was wrong. Formats with {fmt}.
#pragma once

#include <fmt/format.h>

#include "halfbyte/error.hpp"

// HALFBYTE_CHECK(cols >= 0, usage, "quantize: cols must not be negative, got {}", cols);
#define HALFBYTE_CHECK(condition, code, ...)                                          \
  do {                                                                                \
    if (!(condition)) [[unlikely]]                                                    \
      throw ::halfbyte::Error(::halfbyte::ErrorCode::code, fmt::format(__VA_ARGS__)); \
  } while (false)

#define HALFBYTE_FAIL(code, ...) \
  throw ::halfbyte::Error(::halfbyte::ErrorCode::code, fmt::format(__VA_ARGS__))
