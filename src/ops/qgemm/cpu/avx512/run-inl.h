// qgemm_avx512, phase 1: a run, and the rows of x that it reads.
#pragma once

#include <algorithm>
#include <cstring>

#include "ops/qgemm/weight/bf16_rows.h"

namespace halfbyte::avx512 {

using formats::kUnitCols;
using formats::kUnitRows;

inline constexpr int kLanes = 16;
inline constexpr int kAhead = 8192;  // bytes of the weight that are fetched before they are used

inline int64_t units_of(const formats::PackedLayout& p) {
  return p.blocks_per_strip * (p.block_cols / kUnitCols);
}

// A run: the problem, its tensors, and what of the workspace is where.
struct Run {
  const QgemmProblem& problem;
  const QgemmTensors& tensors;
  uint16_t* x;         // forward: see arrange_x; transposed: [rows][row_stride], zeros beyond what is summed
  float* sums;         // forward: of x over groups: [groups][rows]
  int64_t rows;        // m, padded
  int64_t row_stride;  // transposed, in elements
  float factor;        // of complete sums
};

HALFBYTE_AVX512 inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, a), __builtin_bit_cast(__m512bh, b));
}

// Writes outputs [row, col .. col + 15], as many as there are. Not inlined, for the loops before it to have
// all registers.
[[gnu::noinline]] HALFBYTE_AVX512 inline void store(const Run& run, int64_t row, int64_t col, __m512 sum) {
  const __mmask16 mask = first_lanes(run.problem.out_cols() - col);
  const auto load = [mask](const void* data, int64_t at) HALFBYTE_AVX512 {
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(data) + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  };
  const int64_t at = row * run.problem.out_cols() + col;
  sum = _mm512_mul_ps(sum, _mm512_set1_ps(run.factor));
  if (run.problem.f32_sums) return _mm512_mask_storeu_ps(static_cast<float*>(run.tensors.y) + at, mask, sum);
  if (run.problem.bias) sum = _mm512_add_ps(sum, load(run.tensors.bias, col));
  if (run.problem.accumulate) sum = _mm512_add_ps(sum, load(run.tensors.y, at));
  _mm256_mask_storeu_epi16(static_cast<uint16_t*>(run.tensors.y) + at, mask,
                           __builtin_bit_cast(__m256i, _mm512_cvtneps_pbh(sum)));
}

using DecodedUnit = Bf16Tile[2][2];  // [j][i], see weight/bf16_decode.h

inline const uint16_t* unit_of_x(const Run& run, int64_t row, int64_t unit) {
  return static_cast<const uint16_t*>(run.tensors.x) + row * run.problem.k + unit * kUnitCols;
}

// The codes of a line of fragments, in one order: halves of lines 2 and 3 of 4 are exchanged.
[[gnu::always_inline]] HALFBYTE_AVX512 inline __m512i load_line(const uint8_t* line, bool exchanged) {
  if (!exchanged) return _mm512_loadu_si512(line);
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line) + 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(high),
                            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line)), 1);
}

// The sums of x over a group.
HALFBYTE_AVX512 inline void sum_group(const Run& run, int64_t group) {
  const QgemmProblem& problem = run.problem;
  const int64_t begin = group * problem.weight.group,
                end = std::min<int64_t>(problem.k, begin + problem.weight.group);
  const __m512i ones = _mm512_set1_epi16(0x3F80);
  for (int64_t row = 0; row < run.rows; ++row) {
    __m512 sum = _mm512_setzero_ps();
    if (row < problem.m)
      for (int64_t col = begin; col < end; col += 32)
        sum =
            dot(sum,
                _mm512_maskz_loadu_epi16(first_words(end - col),
                                         static_cast<const uint16_t*>(run.tensors.x) + row * problem.k + col),
                ones);
    run.sums[group * run.rows + row] = _mm512_reduce_add_ps(sum);
  }
}

// The groups that the columns of a block belong to: four of 16 columns, two of 32, or one.
class BlockGroups {
 public:
  const int num;
  explicit BlockGroups(const formats::PackedLayout& p)
      : num(p.inlined ? formats::unit_groups(static_cast<int>(p.group)) : 1) {}

  // Loads the parameters of group `i` of a block, if they are others than those loaded last. Returns its
  // number if it begins there, else -1.
  HALFBYTE_AVX512 int64_t load(GroupParameters& parameters, const Run& run, int64_t strip, int64_t block,
                               int i) {
    const formats::PackedLayout& p = run.problem.weight;
    if (p.inlined) {
      const int64_t group = block * num + i;
      parameters.load(run.problem, run.tensors, strip, group);
      return group < p.groups ? group : -1;
    }
    if (strip == strip_ && begin_ <= block * p.block_cols && block * p.block_cols < end_) return -1;
    const int64_t group = p.groups == 1 ? 0 : block * p.block_cols / p.group;
    parameters.load(run.problem, run.tensors, strip, group);
    strip_ = strip;
    begin_ = group * p.group;
    end_ = begin_ + p.group;
    return group < p.groups && begin_ >= block * p.block_cols ? group : -1;
  }

 private:
  int64_t strip_ = -1, begin_ = 0, end_ = 0;  // columns of what is loaded, where it is not inlined
};

// Whether groups have nothing but scales, as they are stored.
inline bool has_scales_only(const QgemmProblem& problem) {
  return !problem.weight.has_biases && !problem.codec.asymmetric && !problem.double_quant;
}

// Of the bytes of two or four groups of 32 rows: those of 16 rows, of each row those of its four quarters;
// rows 4 apart beside each other, which widening bytes to words of 32 bits in blocks of 128 puts in order.
struct BytesOfQuarters {
  alignas(64) uint8_t at[2][2][64] = {};  // [four groups][rows 16 to 31]
  constexpr BytesOfQuarters() {
    for (int num_groups = 2; num_groups <= 4; num_groups += 2)
      for (int row = 0; row < kUnitRows; ++row)
        for (int quarter = 0; quarter < 4; ++quarter)
          at[num_groups / 4][row / 16][row % 4 * 16 + row / 4 % 4 * 4 + quarter] =
              static_cast<uint8_t>(quarter * num_groups / 4 * kUnitRows + row);
  }
};
inline constexpr BytesOfQuarters kBytesOfQuarters;

// The scales of the groups of a unit, two or four, for the lanes of 16 words of codes of a row: lane l has
// columns of quarter l % 4.
struct LaneScales {
  alignas(64) float scales[kUnitRows][4];  // of the quarters of each row

  HALFBYTE_AVX512 void make(const GroupParameters (&groups)[4], int num_groups) {
    for (int row = 0; row < kUnitRows; row += kLanes)
      put(row, num_groups,
          [&](int group) HALFBYTE_AVX512 { return _mm512_load_ps(groups[group].scales + row); });
  }
  // As they are stored at `at`, of codes that have no other parameters.
  HALFBYTE_AVX512 void load(const uint8_t* at, int bytes, formats::ScaleType type, int num_groups) {
    if (bytes == 1) return load_bytes(at, type, num_groups);
    for (int row = 0; row < kUnitRows; row += kLanes)
      put(row, num_groups, [&](int group) HALFBYTE_AVX512 {
        return load_parameters(at + (group * kUnitRows + row) * bytes, type);
      });
  }
  [[gnu::always_inline]] HALFBYTE_AVX512 __m512 of(int row) const {
    return _mm512_broadcast_f32x4(_mm_load_ps(scales[row]));
  }

 private:
  HALFBYTE_AVX512 void load_bytes(const uint8_t* at, formats::ScaleType type, int num_groups) {
    const __m512i first = _mm512_loadu_si512(at),
                  second = num_groups == 4 ? _mm512_loadu_si512(at + 64) : first,
                  zero = _mm512_setzero_si512();
    for (int half = 0; half < 2; ++half) {
      __m512i low, high;
      look_up_byte_scales(_mm512_permutex2var_epi8(
                              first, _mm512_load_si512(kBytesOfQuarters.at[num_groups / 4][half]), second),
                          type, low, high);
      const __m512i words[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
      for (int r = 0; r < 4; ++r)
        _mm512_store_si512(scales[16 * half + 4 * r], r % 2 == 0 ? _mm512_unpacklo_epi16(zero, words[r / 2])
                                                                 : _mm512_unpackhi_epi16(zero, words[r / 2]));
    }
  }
  // Of 16 rows.
  template <class OfGroup>
  [[gnu::always_inline]] HALFBYTE_AVX512 void put(int row, int num_groups, const OfGroup& of_group) {
    // Rows 4 apart beside each other: interleaving in blocks of 128 bits puts them in order.
    const __m512i apart = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const auto rows_of = [&](int group)
                             HALFBYTE_AVX512 { return _mm512_permutexvar_ps(apart, of_group(group)); };
    const __m512 g0 = rows_of(0), g1 = rows_of(1);
    if (num_groups == 4)
      put(row, g0, g1, rows_of(2), rows_of(3));
    else
      put(row, g0, g0, g1, g1);
  }
  [[gnu::always_inline]] HALFBYTE_AVX512 void put(int row, __m512 g0, __m512 g1, __m512 g2, __m512 g3) {
    const __m512d pairs[4] = {
        _mm512_castps_pd(_mm512_unpacklo_ps(g0, g1)), _mm512_castps_pd(_mm512_unpackhi_ps(g0, g1)),
        _mm512_castps_pd(_mm512_unpacklo_ps(g2, g3)), _mm512_castps_pd(_mm512_unpackhi_ps(g2, g3))};
    for (int r = 0; r < 4; ++r)
      _mm512_store_pd(scales[row + 4 * r], r % 2 == 0 ? _mm512_unpacklo_pd(pairs[r / 2], pairs[2 + r / 2])
                                                      : _mm512_unpackhi_pd(pairs[r / 2], pairs[2 + r / 2]));
  }
};

}  // namespace halfbyte::avx512
