// What 4-bit codes stand for, in the type of the products.
#pragma once

#include "cuda/device/types.cuh"

#include "halfbyte_config.h"

namespace halfbyte::device {

// What a code stands for but for the scale; of asymmetric integers the stored code, of which the zero point
// is yet to be subtracted.
HALFBYTE_FN float code_value(int code) {
  if (kCodec.kind == Kind::table) return kCodec.book.values[code];
  return static_cast<float>(kCodec.kind == Kind::integer && !kCodec.asymmetric ? code + kCodec.q_min : code);
}

HALFBYTE_FN float rounded(F32, float x) { return x; }
HALFBYTE_FN u16 rounded(F16, float x) { return f32_to_f16(x); }
HALFBYTE_FN u16 rounded(BF16, float x) { return f32_to_bf16(x); }

template <class T>
struct CodeValues {
  typename T::Memory values[16] = {};
};
template <class T>
HALFBYTE_FN CodeValues<T> make_code_values() {
  CodeValues<T> result;
  for (int code = 0; code < 16; ++code) result.values[code] = rounded(T(), code_value(code));
  return result;
}
// In constant memory: indexed by a register, an array in registers would go to the stack.
__constant__ CodeValues<Element> kCodeValues = make_code_values<Element>();

}  // namespace halfbyte::device
