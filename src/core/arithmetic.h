// Arithmetic of extents, on the host.
#pragma once

#include <cstdint>

namespace halfbyte {

// a / b, rounded up: a >= 0, b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace halfbyte
