// Arithmetic of extents, on the host.
#pragma once

#include <cstdint>

namespace halfbyte {

// a / b, rounded up: a >= 0, b > 0.
constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Rows [begin, end) that a column has among elements [begin, end) of a row-major matrix.
struct RowRange {
  int64_t begin, end;
};
constexpr RowRange rows_of_column(int64_t begin, int64_t end, int64_t column, int64_t cols) {
  const auto first = [&](int64_t element) {
    return element <= column ? 0 : ceil_div(element - column, cols);
  };
  return {first(begin), first(end)};
}

// Whether numbers of so many pieces of work need 64 bits on a device.
constexpr bool is_wide(int64_t count) { return count >= int64_t{1} << 31; }

}  // namespace halfbyte
