#include <algorithm>
#include <array>
#include <cmath>

#include "core/arithmetic.h"
#include "core/checks.h"
#include "core/tensor_check.h"
#include "formats/dynamic_map.h"
#include "halfbyte/ops.hpp"

namespace halfbyte {
namespace {

// Sum in the documented order: blocks of 4096, in each 32 strided partial sums joined by a halving tree.
double ordered_sum(const float* values, int64_t n) {
  double total = 0;
  for (int64_t block = 0; block < n; block += 4096) {
    const int64_t end = std::min<int64_t>(n, block + 4096);
    double lanes[32] = {};
    for (int64_t i = block; i < end; ++i) lanes[(i - block) % 32] += static_cast<double>(values[i]);
    for (int width = 16; width > 0; width /= 2)
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    total += lanes[0];
  }
  return total;
}

// Of n scales, whose codes are written, or of codes, whose scales are.
std::array<ArgumentMemory, 3> memory_of(const float* scales, const uint8_t* codes, const float* absmax,
                                        int64_t n, bool scales_written) {
  return {{{"scales", scales, n * int64_t{sizeof(float)}, -1, 1, false, scales_written},
           {"codes", codes, n, -1, 1, false, !scales_written},
           {"absmax", absmax, ceil_div(n, kDoubleQuantBlock) * int64_t{sizeof(float)}, -1, 1, false,
            !scales_written}}};
}

}  // namespace

const float* double_quant_map() { return formats::kDynamicMap.values; }

void double_quantize(const float* scales, int64_t n, DoubleQuantizedView& out) {
  HALFBYTE_CHECK(n >= 0, usage, "double_quantize: n must not be negative, got {}", n);
  check_all_apart("double_quantize", memory_of(scales, out.codes, out.absmax, n, false));
  out.offset = n == 0 ? 0.0f : static_cast<float>(ordered_sum(scales, n) / static_cast<double>(n));
  for (int64_t begin = 0; begin < n; begin += kDoubleQuantBlock) {
    const int64_t end = std::min(n, begin + kDoubleQuantBlock);
    float absmax = 0;
    for (int64_t i = begin; i < end; ++i) absmax = std::max(absmax, std::fabs(scales[i] - out.offset));
    out.absmax[begin / kDoubleQuantBlock] = absmax;
    for (int64_t i = begin; i < end; ++i) {
      const float y = absmax == 0 ? 0.0f : (scales[i] - out.offset) / absmax;
      out.codes[i] = static_cast<uint8_t>(formats::dynamic_encode(formats::kDynamicMap.values, y));
    }
  }
}

void double_dequantize(const ConstDoubleQuantizedView& in, int64_t n, float* scales, const float* map) {
  HALFBYTE_CHECK(n >= 0, usage, "double_dequantize: n must not be negative, got {}", n);
  check_all_apart("double_dequantize", memory_of(scales, in.codes, in.absmax, n, true));
  if (map == nullptr) map = double_quant_map();
  for (int64_t i = 0; i < n; ++i) scales[i] = map[in.codes[i]] * in.absmax[i / kDoubleQuantBlock] + in.offset;
}

}  // namespace halfbyte
