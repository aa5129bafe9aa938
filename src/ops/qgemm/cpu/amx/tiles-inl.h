// What the parts of `qgemm_amx` share: tiles, and y from tiles of sums.
#pragma once

#include "ops/qgemm/weight/bf16_rows.h"

namespace halfbyte {

struct alignas(64) F32Tile {
  float lines[kTileLines][16];
};

inline const uint16_t* row_of_x(const QgemmProblem& problem, const QgemmTensors& tensors, int64_t row) {
  return static_cast<const uint16_t*>(tensors.x) + row * problem.in_cols();
}
// Transposed: the tile of 16 rows of x and 32 columns, those of the rows of a strip; zeros beyond x.
HALFBYTE_AVX512 inline void pack_rows(const QgemmProblem& problem, const QgemmTensors& tensors,
                                      int64_t m_tile, int64_t strip, Bf16Tile& to) {
  const int64_t col = strip * formats::kUnitRows;
  for (int line = 0; line < kTileLines; ++line) {
    const int64_t row = m_tile * kTileLines + line;
    const __mmask32 valid = first_words(row < problem.m ? problem.in_cols() - col : 0);
    _mm512_store_si512(to.lines[line],
                       _mm512_maskz_loadu_epi16(valid, row_of_x(problem, tensors, row) + col));
  }
}

// The bf16 that are valid as f32, the others 0.
HALFBYTE_AVX512 inline __m512 load_bf16(const uint16_t* from, __mmask16 valid) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(valid, from)), 16));
}
// Half to even, small values too, which the instruction for it would make 0.
HALFBYTE_AVX512 inline void store_bf16(uint16_t* to, __m512 values, __mmask16 valid) {
  const __m512i bits = _mm512_castps_si512(values), high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF))), 16);
  const __m512i result = _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), high,
                                              _mm512_set1_epi32(0x40));
  _mm256_mask_storeu_epi16(to, valid, _mm512_cvtepi32_epi16(result));
}
// Outputs [row, col .. col + 15], as many as there are, from their complete sums. factor: global_factor().
HALFBYTE_AVX512 inline void store_outputs(const QgemmProblem& problem, const QgemmTensors& tensors,
                                          float factor, int64_t row, int64_t col, __m512 sums) {
  const __mmask16 valid = first_lanes(problem.out_cols() - col);
  if (valid == 0) return;
  __m512 value = _mm512_mul_ps(sums, _mm512_set1_ps(factor));
  const int64_t at = row * problem.out_cols() + col;
  if (problem.f32_sums) {
    _mm512_mask_storeu_ps(static_cast<float*>(tensors.y) + at, valid, value);
    return;
  }
  if (problem.bias)
    value = _mm512_add_ps(value, load_bf16(static_cast<const uint16_t*>(tensors.bias) + col, valid));
  uint16_t* const y = static_cast<uint16_t*>(tensors.y) + at;
  if (problem.accumulate) value = _mm512_add_ps(value, load_bf16(y, valid));
  store_bf16(y, value, valid);
}

}  // namespace halfbyte
