// What the wgmma kernels for packed weights share: codes and the parameters of their group become registers
// of matrix operand A. sm_90a.
#pragma once

#include "cuda/device/codes.cuh"
#include "cuda/device/wgmma.cuh"
#include "formats/packed.h"
#include "ops/qgemm/weight/cluster_sum.cuh"
#include "ops/qgemm/weight/pairs.cuh"
#include "ops/qgemm/weight/ring.cuh"
#include "ops/qgemm/weight/scales.cuh"
#include "ops/qgemm/weight/table.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  float d;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

// ---- Parameters of the rows 2a and 2a + 1 in one group.
constexpr int kScaleBytes = kDoubleQuant ? 1 : kParameterBytes;
constexpr int kSecondBytes = kAsymmetric ? 1 : kAffine ? kParameterBytes : 0;
// Columns that have one scale; where a row has one, kGroup is 0 and this is not used.
constexpr int kGroupSize = kGroup == 0 ? 64 : kGroup;
// Forward with few rows of x: whether weights are scaled, else their sums. Of groups of 16, sums would be as
// many as instructions.
constexpr bool kScalesWeights = kAffine || kGroup == 16;

struct RowPair {
  float scale[2];
  // Of what the codes are decoded to: zero points as pairs of twice the same value (of 8 bits: as f32, with
  // 2^23 added), scales and biases of what is scaled before it is multiplied as such pairs.
  u32 zero_pair[2], scale_pair[2], bias_pair[2];
  float zero[2];
};

// Of double quantization: the scales of two neighbouring rows from their codes, the first in the low byte.
__device__ __forceinline__ void decode_scales(float (&to)[2], u32 codes, const float* map,
                                              const float (&absmax)[2], float offset) {
  to[0] = map[codes & 255] * absmax[0] + offset;
  to[1] = map[codes >> 8] * absmax[1] + offset;
}

// ---- Codes.
__device__ __forceinline__ Words4 load_words(const u8* shared) {
  return *reinterpret_cast<const Words4*>(shared);
}

// A pair of values from the pair that the table has; `odd`: of the row 2a + 1.
template <int kOdd>
__device__ __forceinline__ u32 finish_pair(u32 pair, const RowPair& rows) {
  if constexpr (kAsymmetric && kBits == 4) pair = subtract_pair(Element(), pair, rows.zero_pair[kOdd]);
  if constexpr (kAffine) return fma_pair(Element(), pair, rows.scale_pair[kOdd], rows.bias_pair[kOdd]);
  if constexpr (kScalesWeights) return multiply_pair(Element(), pair, rows.scale_pair[kOdd]);
  return pair;
}
// Of 8-bit codes: bytes kFirst and kFirst + 1 of a word.
template <int kFirst, int kOdd>
__device__ __forceinline__ u32 pair_of_bytes(u32 word, const RowPair& rows) {
  const float offset = kAsymmetric ? rows.zero[kOdd] : kMagic - kLowestCode;
  return finish_pair<kOdd>(decode_bytes<kFirst, kFirst + 1>(word, word, offset), rows);
}

// ---- Weights rounded to elements.
// Of the rows 2a and 2a + 1 of a strip, in one group.
struct RowParameters {
  float scale[2] = {}, zero[2] = {}, bias[2] = {};
};
// Of two rows of the weight, as elements.
struct ParameterPairs {
  u32 scale = 0, zero = 0, bias = 0;
};
__device__ __forceinline__ ParameterPairs pair_rows(const RowParameters& low, int i,
                                                    const RowParameters& high, int j) {
  ParameterPairs pairs;
  pairs.scale = store_pair(Element(), low.scale[i], high.scale[j]);
  if constexpr (kAsymmetric) pairs.zero = store_pair(Element(), low.zero[i], high.zero[j]);
  if constexpr (kAffine) pairs.bias = store_pair(Element(), low.bias[i], high.bias[j]);
  return pairs;
}

// Two weights from the values of their codes.
__device__ __forceinline__ u32 weight_pair(u32 values, const ParameterPairs& parameters) {
  if constexpr (kAsymmetric) values = subtract_pair(Element(), values, parameters.zero);  // exact
  if constexpr (kAffine) return fma_pair(Element(), values, parameters.scale, parameters.bias);
  return multiply_pair(Element(), values, parameters.scale);
}

// The values of a byte of each word, as elements; exact: integers up to 256. Asymmetric: of the codes.
template <int kLow, int kHigh>
__device__ __forceinline__ u32 byte_values(u32 low, u32 high) {
  return decode_bytes<kLow, kHigh>(low, high, kMagic - kLowestCode);
}

// Of all lanes' parameters those of rows 2a and 2a + 1 of strip kFirst / 16, a = kFirst % 16 + t', where lane
// l has those of strip l / 16, a = l % 16. By PTX ISA, "shfl.sync": with a segment mask of 3 the lane that is
// read has the low two bits of one's own.
template <int kFirst>
__device__ __forceinline__ u32 shuffle(u32 pair) {
  u32 result;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x31f, 0xffffffff;" : "=r"(result) : "r"(pair), "n"(kFirst));
  return result;
}
template <int kFirst>
__device__ __forceinline__ ParameterPairs shuffle(const ParameterPairs& pairs) {
  ParameterPairs result;
  result.scale = shuffle<kFirst>(pairs.scale);
  if constexpr (kAsymmetric) result.zero = shuffle<kFirst>(pairs.zero);
  if constexpr (kAffine) result.bias = shuffle<kFirst>(pairs.bias);
  return result;
}

__device__ __forceinline__ ParameterPairs select(bool second, const ParameterPairs& a,
                                                 const ParameterPairs& b) {
  return {second ? a.scale : b.scale, second ? a.zero : b.zero, second ? a.bias : b.bias};
}

// Columns whose codes are 16 bytes of a lane.
constexpr int kWordsCols = 256 / kBits;

// The fragment of A of 16 columns, number `step` of those of the words.
__device__ __forceinline__ void decode(u32 (&a)[4], const Words4& words, int step, const RowPair& rows,
                                       u32 table_lane) {
  if constexpr (kBits == 4) {
    const u32 word = words.word[step];
    a[0] = finish_pair<0>(look_up_pair<0>(word, table_lane), rows);
    a[1] = finish_pair<1>(look_up_pair<1>(word, table_lane), rows);
    a[2] = finish_pair<0>(look_up_pair<2>(word, table_lane), rows);
    a[3] = finish_pair<1>(look_up_pair<3>(word, table_lane), rows);
  } else {
    const u32 first = words.word[2 * step], second = words.word[2 * step + 1];
    a[0] = pair_of_bytes<0, 0>(first, rows);
    a[1] = pair_of_bytes<2, 1>(first, rows);
    a[2] = pair_of_bytes<0, 0>(second, rows);
    a[3] = pair_of_bytes<2, 1>(second, rows);
  }
}

#endif

}  // namespace halfbyte::device
