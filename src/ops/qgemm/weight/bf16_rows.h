// Rows of bf16 activations, for products with the units that weight/bf16_decode.h makes.
#pragma once

#include "ops/qgemm/weight/bf16_decode.h"

namespace halfbyte {

// The first `count` of 16 or 32 lanes; all or none of them where there are fewer.
inline __mmask16 first_lanes(int64_t count) {
  return static_cast<__mmask16>((1u << formats::clamp<int64_t>(count, 0, 16)) - 1);
}
inline __mmask32 first_words(int64_t count) {
  return static_cast<__mmask32>((uint64_t{1} << formats::clamp<int64_t>(count, 0, 32)) - 1);
}

// Transposes 16 rows of 16 words of 32 bits.
HALFBYTE_AVX512 inline void transpose(__m512i (&rows)[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {  // rows[i + c]: column c of each 128 bits, of four rows
      rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int c = 0; c < 4; ++c)
    for (int i = 0; i < 16; i += 8) {
      t[i + c] = _mm512_shuffle_i32x4(rows[i + c], rows[i + 4 + c], 0x88);
      t[i + 4 + c] = _mm512_shuffle_i32x4(rows[i + c], rows[i + 4 + c], 0xDD);
    }
  for (int c = 0; c < 8; ++c) {
    rows[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    rows[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xDD);
  }
}

// The columns of a unit of x in the order of forward_column().
class UnitOrder {
 public:
  explicit UnitOrder(int bits) {
    for (int j = 0; j < 2; ++j)
      for (int i = 0; i < kTileValues; ++i)
        columns_[j][i] = static_cast<uint16_t>(forward_column(bits, j, i / 2, i % 2));
  }

  // Of a row: 16 pairs for tiles [0] and 16 for tiles [1]. x: its first column of the unit; zeros for all but
  // the first `num_cols`.
  HALFBYTE_AVX512 void load(const uint16_t* x, int64_t num_cols, __m512i (&pairs)[2]) const {
    const __m512i low = _mm512_maskz_loadu_epi16(first_words(num_cols), x);
    const __m512i high = _mm512_maskz_loadu_epi16(first_words(num_cols - 32), x + 32);
    for (int j = 0; j < 2; ++j)
      pairs[j] = _mm512_permutex2var_epi16(low, _mm512_load_si512(columns_[j]), high);
  }

  // Of 16 rows, `stride` elements apart, of which there are num_rows: pairs[j][p] has pair p of each row.
  HALFBYTE_AVX512 void load_transposed(const uint16_t* x, int64_t stride, int64_t num_rows, int64_t num_cols,
                                       __m512i (&pairs)[2][16]) const {
    // Rows beyond x are not read at all: a load of which nothing is valid takes 100 clocks where there is no
    // page.
    for (int i = 0; i < 16; ++i) {
      __m512i row[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
      if (i < num_rows) load(x + i * stride, num_cols, row);
      pairs[0][i] = row[0];
      pairs[1][i] = row[1];
    }
    transpose(pairs[0]);
    transpose(pairs[1]);
  }

 private:
  alignas(64) uint16_t columns_[2][kTileValues];
};

}  // namespace halfbyte
