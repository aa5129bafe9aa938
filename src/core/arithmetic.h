// Arithmetic of extents, on the host.
#pragma once

#include <cstdint>

namespace halfbyte {

// a / b, rounded up: a >= 0, b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Whether numbers of so many pieces of work need 64 bits on a device.
constexpr bool is_wide(int64_t count) { return count >= int64_t{1} << 31; }

}  // namespace halfbyte
