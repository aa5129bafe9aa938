// quantize_linear, dequantize_linear, quantize_linear_backward and fake_quantize of any tensors: a thread has
// an element, or those of a byte of packed codes or of the mask.
#include "grouped/linear.cuh"

namespace halfbyte::device {

struct Position {
  i64 o, a, i;
};
__device__ __forceinline__ i64 offset(const LinearStrides64& strides, const Position& at) {
  return at.o * strides.outer + at.a * strides.axis + at.i * strides.inner;
}

__device__ __forceinline__ Position position_of(const LinearElementsArgs& args, i64 index) {
  if ((index | args.axis | args.inner) >> 32 == 0) {  // 32-bit divisions are several times as fast
    const u32 n = static_cast<u32>(index), inner = static_cast<u32>(args.inner),
              axis = static_cast<u32>(args.axis);
    const u32 row = n / inner;
    return {row / axis, row % axis, n % inner};
  }
  const i64 row = index / args.inner;
  return {row / args.axis, row % args.axis, index % args.inner};
}

__device__ __forceinline__ Group group_of(const LinearElementsArgs& args, const Position& at) {
  const i64 in_axis = at.a / args.group;
  const LinearStrides64& strides = args.scale_strides;
  return load_group(args.common, at.o * strides.outer + in_axis * strides.axis + at.i * strides.inner, [&] {
    return at.a == in_axis * args.group && (strides.outer != 0 || at.o == 0) &&
           (strides.inner != 0 || at.i == 0);
  });
}

// The code at an index; packed: of the byte that holds it.
__device__ __forceinline__ int code_of(const LinearElementsArgs& args, const Position& at, int nibble,
                                       u8 byte) {
  const bool is_signed = args.common.code_min < 0;
  if constexpr (kBits == 4) {
    const int code = byte >> (4 * nibble) & 15;
    return is_signed ? (code ^ 8) - 8 : code;
  } else {
    const u8 code = static_cast<const u8*>(args.common.data.codes)[offset(args.codes, at)];
    return is_signed ? static_cast<signed char>(code) : code;
  }
}

extern "C" __global__ void __launch_bounds__(kLinearThreads)
    HALFBYTE_KERNEL(const __grid_constant__ LinearElementsArgs args) {
  constexpr bool kPacked = kMask || (kBits == 4 && kOp != LinearOp::backward);
  constexpr int kPerByte = kMask ? 8 : 2;
  const i64 item = block_index() * kLinearThreads + threadIdx.x;
  if (item >= args.num_items) return;
  i64 index = item;
  int n = 1;
  u8 byte = 0;
  if constexpr (kPacked) {
    const i64 row = item / args.code_row_bytes, column = (item - row * args.code_row_bytes) * kPerByte;
    index = row * args.code_cols + column;
    n = static_cast<int>(min<i64>(kPerByte, args.code_cols - column));
    if constexpr (kOp == LinearOp::dequantize) byte = static_cast<const u8*>(args.common.data.codes)[item];
  }
#pragma unroll 1
  for (int k = 0; k < n; ++k) {
    const Position at = position_of(args, index + k);
    const Group group = group_of(args, at);
    if constexpr (kOp == LinearOp::fake_quantize) {
      const Memory element = static_cast<const Memory*>(args.common.data.x)[index + k];
      static_cast<Memory*>(args.common.data.y)[index + k] =
          fake_element(element, group, args.common, index + k);
      if constexpr (kMask)
        byte =
            static_cast<u8>(byte | (is_within(load(Element(), element), group, args.common) ? 1u : 0u) << k);
    } else if constexpr (kOp == LinearOp::quantize) {
      const F x = load_element(args.common.data.x, offset(args.x, at));
      const u32 code = encode_element(x, group, args.common, index + k);
      if constexpr (kPacked)
        byte = static_cast<u8>(byte | (code & 15) << (4 * k));
      else
        static_cast<u8*>(args.common.data.codes)[offset(args.codes, at)] = static_cast<u8>(code);
    } else if constexpr (kOp == LinearOp::dequantize) {
      const F value = decode_element(code_of(args, at, k, byte), group);
      static_cast<Memory*>(args.common.data.y)[offset(args.y, at)] = store(Element(), value);
    } else {
      const F x = load_element(args.common.data.x, offset(args.x, at));
      const Memory dy = static_cast<const Memory*>(args.common.data.dy)[offset(args.dy, at)];
      static_cast<Memory*>(args.common.data.y)[offset(args.y, at)] =
          is_within(x, group, args.common) ? dy : Memory{};
    }
  }
  if constexpr (kPacked && kOp == LinearOp::quantize) static_cast<u8*>(args.common.data.codes)[item] = byte;
  if constexpr (kMask) static_cast<u8*>(args.common.data.mask)[item] = byte;
}

}  // namespace halfbyte::device
