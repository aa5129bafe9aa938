// INT4 and NF4 of flat buffers: four functions, and nothing to set but the length of a group.
//
// A buffer of n elements is cut into groups of group_size consecutive elements, of which the last may be
// short. Element 2i is in the low half of byte i, element 2i + 1 in the high half; behind an odd n the high
// half of the last byte is the code of zero. Any n is fine, 0 too. The numbers are those of quantize() and
// dequantize() with Granularity::flat (<halfbyte/ops.hpp>), the same for every device, SIMD target and number
// of threads.
#pragma once

#include <cstdint>

#include "halfbyte/export.h"
#include "halfbyte/ops.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

struct HALFBYTE_API Int4Config {
  int64_t group_size = 64;  // elements, > 0
  // true: scale = absmax / 7, codes -8 ... 7, stored as code + 8; no zero points.
  // false: scale = (max - min) / 15 over the range extended to contain 0, codes 0 ... 15, zero points 0
  // ... 15.
  bool symmetric = true;

  // Groups of n elements: ceil(n / group_size). Throws Error(usage) where n < 0 or group_size <= 0.
  int64_t num_groups(int64_t n) const;
  // Bytes of the codes of n elements: ceil(n / 2). Throws as above.
  int64_t packed_bytes(int64_t n) const;
};

// Buffers of all four functions are contiguous, of any shape, on one device, and may be longer than needed;
// none that is written overlaps another:
//   x, y    n elements: f32, f16, bf16 or f64
//   codes   u8, ceil(n / 2) bytes
//   scales  f32, f16, bf16 or (quantizing: where x is) f64, one element a group
//   zeros   u8, one element a group; not looked at where config.symmetric: pass {}
// The length of a buffer is the number of its elements, or what fits into TensorView::num_bytes where that is
// known and less. A buffer that needs no element may be null.
//
// Throws Error(usage) naming the argument, its unit and the values, Error(device) where the device cannot be
// used, and when quantizing Error(bad_input) naming how many elements of x are not finite, and the first, or
// how many scales their dtype cannot hold: then codes, scales and zeros are written, but not to be used.
// Quantizing waits for Execution::stream; dequantizing on a CUDA device is enqueued there and returns at
// once.

// code = clamp(rne(x / scale) + zero), where rne rounds half to even; decoded to (code - zero) * scale.
HALFBYTE_API void quantize_int4(const TensorView& x, const TensorView& codes, const TensorView& scales,
                                const TensorView& zeros, int64_t n, const Int4Config& config = {},
                                Execution execution = {});
HALFBYTE_API void dequantize_int4(const TensorView& codes, const TensorView& scales, const TensorView& zeros,
                                  const TensorView& y, int64_t n, const Int4Config& config = {},
                                  Execution execution = {});

// scale = absmax; code = the nearest of the sixteen values of NF4 to x / scale, of two the lower; decoded to
// value * scale.
HALFBYTE_API void quantize_nf4(const TensorView& x, const TensorView& codes, const TensorView& scales,
                               int64_t n, int64_t group_size = 64, Execution execution = {});
HALFBYTE_API void dequantize_nf4(const TensorView& codes, const TensorView& scales, const TensorView& y,
                                 int64_t n, int64_t group_size = 64, Execution execution = {});

}  // namespace halfbyte
