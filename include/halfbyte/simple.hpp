// INT4 and NF4 of flat buffers in four functions. The length of a group is nearly all there is to set.
//
// A buffer of n elements is cut into groups of group_size consecutive elements; the last group may be short.
// Element 2i is in the low half of byte i, element 2i + 1 in the high half. If n is odd, the high half of the
// last byte is the code of zero. n may be 0. The results are those of quantize() and dequantize() with
// Granularity::flat (<halfbyte/ops.hpp>). They are the same for every device, SIMD target and number of
// threads.
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

// The buffers of all four functions are contiguous, have any shape, lie on one device, and may be longer than
// needed. A buffer that is written must not overlap another:
//   x, y    n elements: f32, f16, bf16 or f64
//   codes   u8, ceil(n / 2) bytes
//   scales  f32, f16, bf16 or (quantizing: where x is) f64, one element a group
//   zeros   u8, one element a group; not looked at where config.symmetric: pass {}
// The length of a buffer is the number of its elements, or of those that fit into TensorView::num_bytes if
// that is known and less. A buffer that needs no element may be null.
//
// All throw Error(usage), naming the argument, its unit and the values, and Error(device) if the device
// cannot be used. Quantizing throws Error(bad_input) if elements of x are not finite, naming how many and the
// first, or if scales do not fit their dtype, naming how many. Codes, scales and zeros are then written, but
// must not be used. Quantizing waits for Execution::stream. Dequantizing on a CUDA device is enqueued there
// and returns at once.

// code = clamp(rne(x / scale) + zero), where rne rounds half to even; decoded to (code - zero) * scale.
HALFBYTE_API void quantize_int4(const ConstTensorView& x, const TensorView& codes, const TensorView& scales,
                                const TensorView& zeros, int64_t n, const Int4Config& config = {},
                                Execution execution = {});
HALFBYTE_API void dequantize_int4(const ConstTensorView& codes, const ConstTensorView& scales,
                                  const ConstTensorView& zeros, const TensorView& y, int64_t n,
                                  const Int4Config& config = {}, Execution execution = {});

// scale = absmax. The code is that of the NF4 value nearest to x / scale; ties go to the lower value. It
// decodes to value * scale.
HALFBYTE_API void quantize_nf4(const ConstTensorView& x, const TensorView& codes, const TensorView& scales,
                               int64_t n, int64_t group_size = 64, Execution execution = {});
HALFBYTE_API void dequantize_nf4(const ConstTensorView& codes, const ConstTensorView& scales,
                                 const TensorView& y, int64_t n, int64_t group_size = 64,
                                 Execution execution = {});

}  // namespace halfbyte
