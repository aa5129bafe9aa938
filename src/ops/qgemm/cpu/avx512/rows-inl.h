// qgemm_avx512, phase 2: forward, some rows of x and codes of 4 bits. Rows of the weight lie across the
// lanes, and pairs of x are broadcast, so that sums need no adding up and are scaled 16 at a time.
#pragma once

#include "ops/qgemm/cpu/avx512/strips-inl.h"

namespace halfbyte::avx512 {

// Rows of x whose sums are in registers at a time, and at most.
inline constexpr int kPassRows = 8, kMostLaneRows = 68;
inline constexpr int kMostPasses = (kMostLaneRows + kPassRows - 1) / kPassRows;

// Where it is faster than multiplying along k, or than decoding strips first. Decoding takes 184 instructions
// for a unit, of which 72 transpose it, beside 112 along k; but sums need no adding up. In groups of 16
// columns they are scaled four times as often. Strips that are decoded first have 16 rows at a time, and cost
// as much as 6 rows.
inline bool has_lane_rows(const QgemmProblem& problem) {
  const int64_t m = problem.m;
  if (problem.transposed || problem.codec.bits != 4 || m > kMostLaneRows) return false;
  if (m > 28) return 10 * m <= 9 * ((m + kLanes - 1) / kLanes * kLanes);
  return m >= (BlockGroups(problem.weight).num > 2 ? 5 : 3);
}

// The rows of x in the workspace: [unit][row][column], zeros behind the last column. Columns that a word of
// codes has 16 bits apart lie side by side: of 16 columns 0 8, 1 9, 2 10 and so on.
HALFBYTE_AVX512 inline void copy_units(const Run& run, int64_t begin, int64_t end) {
  alignas(64) uint16_t columns[32];
  for (int i = 0; i < 32; ++i) columns[i] = static_cast<uint16_t>(i / 16 * 16 + i % 16 / 2 + i % 2 * 8);
  const __m512i order = _mm512_load_si512(columns);
  for (int64_t unit = begin; unit < end; ++unit)
    for (int64_t row = 0; row < run.rows; ++row)
      for (int64_t col = 0; col < kUnitCols; col += 32) {
        const int64_t left = row < run.problem.m ? run.problem.k - unit * kUnitCols - col : 0;
        _mm512_store_si512(
            run.x + (unit * run.rows + row) * kUnitCols + col,
            _mm512_permutexvar_epi16(
                order, _mm512_maskz_loadu_epi16(first_words(left), unit_of_x(run, row, unit) + col)));
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

// A unit of a strip, for all passes over rows of x.
struct LaneUnit {
  const uint8_t* codes;
  __m512i table;                // of values, which repeats
  int num_parts;                // that have scales: of as many words each
  LaneWords words;              // of the codes
  __m512i decoded[4][4][2][2];  // of each word, as they are multiplied: of the even rows and of the odd ones
  __m512 scales[4][2];          // of each part, likewise
};

enum class Pass : uint8_t { only, first, next };

// totals[row] += scales * products with rows of x, which are kUnitCols apart. The first pass decodes for the
// next ones.
template <int kRows, Pass kPass>
HALFBYTE_AVX512 void multiply_pass(LaneUnit& unit, const uint16_t* x, float (*totals)[2][kLanes]) {
  const __m512i table = unit.table;
  const int part_words = 4 / unit.num_parts;
  // A product waits for the one before of its sum: of few rows there are two sums.
  constexpr int kSets = kRows <= (kPass == Pass::next ? 5 : 4) ? 2 : 1;
  for (int part = 0, j = 0; part < unit.num_parts; ++part) {
    __m512 sums[kSets][2][kRows];
#pragma GCC unroll 2
    for (int set = 0; set < kSets; ++set)
#pragma GCC unroll 8
      for (int m = 0; m < kRows; ++m) sums[set][0][m] = sums[set][1][m] = _mm512_setzero_ps();
    for (const int end = j + part_words; j < end; ++j, x += 16) {
      if (kPass != Pass::next)
        for (int line = 0; line < 4; ++line)
          _mm_prefetch(unit.codes + (4 * j + line) * 64 + kAhead, _MM_HINT_T1);
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t)
#pragma GCC unroll 2
        for (int c = 0; c < 2; ++c) {
          __m512i weights[2];
#pragma GCC unroll 2
          for (int e = 0; e < 2; ++e) {
            __m512i& decoded = unit.decoded[j][t][c][e];
            if constexpr (kPass == Pass::next) {
              weights[e] = decoded;
            } else {
              // Of two columns of a row. Of an index, which has more bits, the table takes the nibble.
              weights[e] = _mm512_permutexvar_epi16(
                  _mm512_srli_epi16(unit.words.words[j][t], static_cast<unsigned>(8 * e + 4 * c)), table);
              if constexpr (kPass == Pass::first) decoded = weights[e];
            }
          }
#pragma GCC unroll 8
          for (int m = 0; m < kRows; ++m) {
            int pair = 0;
            std::memcpy(&pair, x + m * kUnitCols + 4 * t + 2 * c, sizeof pair);
            const __m512i both = _mm512_set1_epi32(pair);
            __m512(&to)[2][kRows] = sums[c % kSets];
            to[0][m] = dot(to[0][m], weights[0], both);
            to[1][m] = dot(to[1][m], weights[1], both);
          }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 2
      for (int e = 0; e < 2; ++e) {
        const __m512 sum = kSets == 1 ? sums[0][e][m] : _mm512_add_ps(sums[0][e][m], sums[kSets - 1][e][m]);
        _mm512_store_ps(totals[m][e],
                        _mm512_fmadd_ps(sum, unit.scales[part][e], _mm512_load_ps(totals[m][e])));
      }
  }
}

using PassFunction = void (*)(LaneUnit&, const uint16_t*, float (*)[2][kLanes]);
template <Pass kPass>
PassFunction pass_function(int rows) {
  return rows == 3   ? multiply_pass<3, kPass>
         : rows == 4 ? multiply_pass<4, kPass>
         : rows == 5 ? multiply_pass<5, kPass>
         : rows == 6 ? multiply_pass<6, kPass>
         : rows == 7 ? multiply_pass<7, kPass>
                     : multiply_pass<8, kPass>;
}

// Outputs of strips [begin, end).
HALFBYTE_AVX512 inline void multiply_lane_rows(const Run& run, int64_t begin, int64_t end) {
  const formats::PackedLayout& p = run.problem.weight;
  BlockGroups block_groups(p);
  const int num_rows = static_cast<int>(run.rows), num_passes = (num_rows + kPassRows - 1) / kPassRows;
  struct {
    int row;  // the first
    PassFunction multiply;
  } passes[kMostPasses];
  for (int i = 0; i < num_passes; ++i) {
    const int first = num_rows * i / num_passes, rows = num_rows * (i + 1) / num_passes - first;
    passes[i] = {first, num_passes == 1 ? pass_function<Pass::only>(rows)
                        : i == 0        ? pass_function<Pass::first>(rows)
                                        : pass_function<Pass::next>(rows)};
  }
  alignas(64) int rows[2][kLanes];  // of lanes
  for (int lane = 0; lane < kLanes; ++lane)
    for (int e = 0; e < 2; ++e) rows[e][lane] = 2 * lane + e;
  const __m512i of_lanes[2] = {_mm512_load_si512(rows[0]), _mm512_load_si512(rows[1])};
  alignas(64) float totals[kMostLaneRows][2][kLanes], added[kMostLaneRows][kUnitRows];
  GroupParameters groups[4];
  LaneUnit unit;
  unit.table = LineDecoder<4, false>(run.problem.codec).table;
  unit.num_parts = block_groups.num;
  for (int64_t strip = begin; strip < end; ++strip) {
    std::memset(totals, 0, sizeof(totals[0]) * static_cast<size_t>(num_rows));
    std::memset(added, 0, sizeof(added[0]) * static_cast<size_t>(num_rows));
    const uint16_t* x = run.x;
    for (int64_t block = 0; block < p.blocks_per_strip; ++block) {
      for (int i = 0; i < block_groups.num; ++i) {
        const int64_t group = block_groups.load(groups[i], run, strip, block, i);
        if (has_factors(run.problem) && group >= 0) add_factors(run, groups[i], group, num_rows, added);
        const __m512 low = _mm512_load_ps(groups[i].scales), high = _mm512_load_ps(groups[i].scales + kLanes);
        for (int e = 0; e < 2; ++e) unit.scales[i][e] = _mm512_permutex2var_ps(low, of_lanes[e], high);
      }
      unit.codes =
          static_cast<const uint8_t*>(run.tensors.weight) + strip * p.strip_bytes + block * p.block_bytes;
      for (int at = p.block_code_bytes; at < p.block_bytes; at += 64)
        _mm_prefetch(unit.codes + at + kAhead, _MM_HINT_T1);
      for (int i = 0; i < p.block_cols / kUnitCols; ++i, x += kUnitCols * num_rows) {
        unit.words.load(unit.codes);
        for (int pass = 0; pass < num_passes; ++pass)
          passes[pass].multiply(unit, x + passes[pass].row * kUnitCols, totals + passes[pass].row);
        unit.codes += formats::kTileBytes;
      }
    }
    alignas(64) float y[kUnitRows];
    for (int m = 0; m < run.problem.m; ++m) {
      for (int e = 0; e < 2; ++e) _mm512_i32scatter_ps(y, of_lanes[e], _mm512_load_ps(totals[m][e]), 4);
      for (int row = 0; row < kUnitRows && strip * kUnitRows + row < run.problem.n; row += kLanes)
        store(run, m, strip * kUnitRows + row,
              _mm512_add_ps(_mm512_load_ps(y + row), _mm512_load_ps(added[m] + row)));
    }
  }
}

}  // namespace halfbyte::avx512
