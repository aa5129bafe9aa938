// Percentiles: keys of elements, which order like them.
#pragma once

#include "ops/observe/range_search.cuh"

namespace halfbyte::device {

using Key = Select<sizeof(Memory) == 2, u16, Float<F>::Bits>;
constexpr int kKeyBits = 8 * sizeof(Key);
constexpr Key kSign = static_cast<Key>(static_cast<Key>(1) << (kKeyBits - 1));
constexpr Key kNoKey = static_cast<Key>(~static_cast<Key>(0));  // behind all others: not finite

__device__ __forceinline__ Key key_of(Memory x) {
  if (!formats::is_finite(load(Element(), x))) return kNoKey;
  const Key bits = bit_cast<Key>(x);
  if (bits == kSign) return kSign;  // -0 is +0
  return static_cast<Key>(bits ^ ((bits & kSign) != 0 ? kNoKey : kSign));
}
__device__ __forceinline__ F value_of(Key key) {
  return load(Element(), bit_cast<Memory>(static_cast<Key>(key ^ ((key & kSign) != 0 ? kSign : kNoKey))));
}

}  // namespace halfbyte::device
