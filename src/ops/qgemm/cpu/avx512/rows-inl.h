// qgemm_avx512, phase 2: forward, some rows of x and codes of 4 bits. Rows of the weight lie across the
// lanes, and pairs of x are broadcast, so that sums need no adding up and are scaled 16 at a time.
#pragma once

#include "ops/qgemm/cpu/avx512/strips-inl.h"

namespace halfbyte::avx512 {

// Where it is faster than multiplying along k. Decoding takes 200 instructions for a unit, of which 72
// transpose it, beside 112; scaling sums takes 2 for a row of x beside 32, in groups of 64 columns for each
// unit. Along k, shorter groups are scaled with their codes, longer ones less often, and odd numbers of rows
// are padded.
inline bool has_lane_rows(const QgemmProblem& problem) {
  const int64_t m = problem.m;
  if (problem.transposed || problem.codec.bits != 4 || m > kFewRows) return false;
  const formats::PackedLayout& p = problem.weight;
  if (!p.inlined || p.group > kUnitCols) return m == 5 || m == 7;
  return m >= (p.group == kUnitCols ? 3 : 5);
}

// The rows of x in the workspace: [unit][row][column], zeros behind the last column.
HALFBYTE_AVX512 inline void copy_units(const Run& run, int64_t begin, int64_t end) {
  for (int64_t unit = begin; unit < end; ++unit)
    for (int64_t row = 0; row < run.rows; ++row)
      for (int64_t col = 0; col < kUnitCols; col += 32) {
        const int64_t left = row < run.problem.m ? run.problem.k - unit * kUnitCols - col : 0;
        _mm512_store_si512(run.x + (unit * run.rows + row) * kUnitCols + col,
                           _mm512_maskz_loadu_epi16(first_words(left), unit_of_x(run, row, unit) + col));
      }
}

// The words of a unit: of word 4 t + j of each of the 16 lines, which have two rows each, to words[j][t].
struct LaneWords {
  __m512i words[4][4];

  [[gnu::always_inline]] HALFBYTE_AVX512 void load(const uint8_t* codes) {
    __m512i quads[4][4];  // [four lines][j]: block t has word j of each
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      __m512i lines[4];
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) lines[i] = load_line(codes + (4 * q + i) * 64, (i & 2) != 0);
      const __m512i low01 = _mm512_unpacklo_epi32(lines[0], lines[1]),
                    low23 = _mm512_unpacklo_epi32(lines[2], lines[3]),
                    high01 = _mm512_unpackhi_epi32(lines[0], lines[1]),
                    high23 = _mm512_unpackhi_epi32(lines[2], lines[3]);
      quads[q][0] = _mm512_unpacklo_epi64(low01, low23);
      quads[q][1] = _mm512_unpackhi_epi64(low01, low23);
      quads[q][2] = _mm512_unpacklo_epi64(high01, high23);
      quads[q][3] = _mm512_unpackhi_epi64(high01, high23);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m512i low01 = _mm512_shuffle_i32x4(quads[0][j], quads[1][j], 0x44),
                    low23 = _mm512_shuffle_i32x4(quads[2][j], quads[3][j], 0x44),
                    high01 = _mm512_shuffle_i32x4(quads[0][j], quads[1][j], 0xEE),
                    high23 = _mm512_shuffle_i32x4(quads[2][j], quads[3][j], 0xEE);
      words[j][0] = _mm512_shuffle_i32x4(low01, low23, 0x88);
      words[j][1] = _mm512_shuffle_i32x4(low01, low23, 0xDD);
      words[j][2] = _mm512_shuffle_i32x4(high01, high23, 0x88);
      words[j][3] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
    }
  }
};

// Sums of a strip: of its even rows, and of its odd ones.
template <int kRows>
struct LaneSums {
  __m512 of[2][kRows];

  [[gnu::always_inline]] HALFBYTE_AVX512 void clear() {
    for (int m = 0; m < kRows; ++m) of[0][m] = of[1][m] = _mm512_setzero_ps();
  }
  // Adds the products with 16 columns, of which `x` has the first: rows are kUnitCols apart.
  [[gnu::always_inline]] HALFBYTE_AVX512 void add(const __m512i (&words)[4], __m512i table,
                                                  const uint16_t* x) {
    // Where the nibbles of two columns of a row begin in a word, in both words of 8 bytes.
    const __m512i nibbles = _mm512_set1_epi64(0x0024'0020'0004'0000);
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t)
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        __m512i weights[2];
        for (int e = 0; e < 2; ++e)
          weights[e] = _mm512_permutexvar_epi16(
              _mm512_multishift_epi64_epi8(
                  _mm512_add_epi8(nibbles, _mm512_set1_epi8(static_cast<char>(16 * p + 8 * e))), words[t]),
              table);  // which repeats: the fifth bit of an index is the next nibble's
#pragma GCC unroll 8
        for (int m = 0; m < kRows; ++m) {
          int pair = 0;
          std::memcpy(&pair, x + m * kUnitCols + 2 * t + 8 * p, sizeof pair);
          const __m512i both = _mm512_set1_epi32(pair);
          of[0][m] = dot(of[0][m], weights[0], both);
          of[1][m] = dot(of[1][m], weights[1], both);
        }
      }
  }
};

template <int kRows>
HALFBYTE_AVX512 void multiply_lane_rows(const Run& run, int64_t strip) {
  const formats::PackedLayout& p = run.problem.weight;
  const LineDecoder<4, false> decoder(run.problem.codec);  // for its table of values
  const BlockGroups block_groups(p);
  const int units_per_block = p.block_cols / kUnitCols;
  const int part_words = 4 / block_groups.num;  // of a unit: 16 columns each; of one group
  alignas(64) int rows[2][kLanes];              // of lanes
  for (int lane = 0; lane < kLanes; ++lane)
    for (int e = 0; e < 2; ++e) rows[e][lane] = 2 * lane + e;
  const __m512i even_rows = _mm512_load_si512(rows[0]), odd_rows = _mm512_load_si512(rows[1]);
  alignas(64) float totals[2][kRows][kLanes] = {}, added[kRows][kUnitRows] = {};
  GroupParameters groups[4];
  const uint16_t* x = run.x;
  for (int64_t block = 0; block < p.blocks_per_strip; ++block) {
    for (int i = 0; i < block_groups.num; ++i) {
      const int64_t group = block_groups.load(groups[i], run, strip, block, i);
      if (has_factors(run.problem) && group >= 0) add_factors(run, groups[i], group, added);
    }
    const uint8_t* const codes =
        static_cast<const uint8_t*>(run.tensors.weight) + strip * p.strip_bytes + block * p.block_bytes;
    for (int at = p.block_code_bytes; at < p.block_bytes; at += 64)
      _mm_prefetch(codes + at + kAhead, _MM_HINT_T1);
    LaneSums<kRows> sums;
    sums.clear();
    for (int unit = 0; unit < units_per_block; ++unit, x += kUnitCols * kRows) {
      LaneWords words;
      words.load(codes + unit * formats::kTileBytes);
      for (int j = 0; j < 4; ++j) {
        for (int line = 0; line < 4; ++line)
          _mm_prefetch(codes + unit * formats::kTileBytes + (4 * j + line) * 64 + kAhead, _MM_HINT_T1);
        sums.add(words.words[j], decoder.table, x + 16 * j);
        const bool ends =
            block_groups.num > 1 ? (j + 1) % part_words == 0 : unit + 1 == units_per_block && j == 3;
        if (!ends) continue;
        const float* const scales = groups[block_groups.num > 1 ? j / part_words : 0].scales;
        const __m512 low = _mm512_load_ps(scales), high = _mm512_load_ps(scales + kLanes);
        const __m512 of_rows[2] = {_mm512_permutex2var_ps(low, even_rows, high),
                                   _mm512_permutex2var_ps(low, odd_rows, high)};
        for (int e = 0; e < 2; ++e)
          for (int m = 0; m < kRows; ++m)
            _mm512_store_ps(totals[e][m],
                            _mm512_fmadd_ps(sums.of[e][m], of_rows[e], _mm512_load_ps(totals[e][m])));
        sums.clear();
      }
    }
  }
  alignas(64) float y[kUnitRows];
  for (int m = 0; m < run.problem.m; ++m) {
    for (int e = 0; e < 2; ++e)
      _mm512_i32scatter_ps(y, _mm512_load_si512(rows[e]), _mm512_load_ps(totals[e][m]), 4);
    for (int row = 0; row < kUnitRows && strip * kUnitRows + row < run.problem.n; row += kLanes)
      store(run, m, strip * kUnitRows + row,
            _mm512_add_ps(_mm512_load_ps(y + row), _mm512_load_ps(added[m] + row)));
  }
}

inline StripFunction lane_function(int64_t rows) {
  return rows == 3   ? multiply_lane_rows<3>
         : rows == 4 ? multiply_lane_rows<4>
         : rows == 5 ? multiply_lane_rows<5>
         : rows == 6 ? multiply_lane_rows<6>
         : rows == 7 ? multiply_lane_rows<7>
                     : multiply_lane_rows<8>;
}

}  // namespace halfbyte::avx512
