// qgemm_avx512, phase 4: transposed. Columns lie across the lanes, and pairs of x are broadcast.
#pragma once

#include "ops/qgemm/cpu/avx512/run-inl.h"

namespace halfbyte::avx512 {

// Rows of x that are multiplied as weights are looked up: 4 rows by 4 vectors of columns are 16 of the 32
// registers; more rows take half of the columns at a time. On a Zen 5, 4096x4096: 6 rows 1.40 ms, with 24
// registers 1.77, and decoded first 2.15; 8 rows 1.92 and 2.14.
inline constexpr int kFewTransposedRows = 4, kLookedUpRows = 8;
// So many rows are multiplied that way, 8 at a time and fewer: as long as looking up anew is less than
// decoding to the cache first.
inline constexpr int kMostLookedUpRows = 24;
inline constexpr int kFewDecodedRows = 8;  // of x, for which strips are decoded one at a time
inline constexpr int kStripBatch = 4;      // else so many: 16 KB of weights
// Of a task: units of columns, and rows of x, whose sums are 256 KB.
inline constexpr int kTaskUnits = 8, kTaskRows = 128;
inline constexpr int kRowStridePad = 32;  // elements: rows that are 4 KB apart would evict each other

HALFBYTE_AVX512 inline void copy_rows(const Run& run, int64_t begin, int64_t end) {
  const int64_t n = run.problem.n;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t col = 0; col < run.row_stride; col += 32)
      _mm512_store_si512(
          run.x + row * run.row_stride + col,
          _mm512_maskz_loadu_epi16(first_words(row < run.problem.m ? n - col : 0),
                                   static_cast<const uint16_t*>(run.tensors.x) + row * n + col));
}

// sums[row][64] += products of kRows rows of x and decoded units of strips.
template <int kRows>
HALFBYTE_AVX512 void multiply_units(const DecodedUnit* units, int num_strips, const uint16_t* x,
                                    int64_t stride, float* sums) {
  __m512 s[kRows][4];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) s[i][c] = _mm512_load_ps(sums + i * kUnitCols + c * kLanes);
  for (int strip = 0; strip < num_strips; ++strip)
    for (int line = 0; line < kTileLines; ++line) {
      __m512i weights[4];
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) weights[c] = _mm512_load_si512(units[strip][c / 2][c % 2].lines[line]);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        int pair = 0;
        std::memcpy(&pair, x + i * stride + strip * kUnitRows + line * 2, sizeof pair);
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) s[i][c] = dot(s[i][c], _mm512_set1_epi32(pair), weights[c]);
      }
    }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) _mm512_store_ps(sums + i * kUnitCols + c * kLanes, s[i][c]);
}

// Few rows of x and codes of 4 bits without biases: weights are multiplied as they are looked up, in one
// table of both rows of a pair. kTwoGroups: in a unit, the second one of lanes 4 i + 2 and 4 i + 3.
template <bool kTwoGroups>
class PairLookup {
 public:
  using Groups = GroupParameters[1 + kTwoGroups];
  using Tables = __m512i[1 + kTwoGroups];

  HALFBYTE_AVX512 explicit PairLookup(const formats::Codec& codec) : asymmetric_(codec.asymmetric) {
    const int zero = codec.kind == formats::Kind::integer && !codec.asymmetric ? -codec.q_min : 0;
    alignas(64) float values[16];
    for (int code = 0; code < 16; ++code)
      values[code] = codec.kind == formats::Kind::table
                         ? formats::bf16_to_f32(formats::to_bf16(codec.book.values[code]))
                         : static_cast<float>(code - zero);
    values_ = _mm512_load_ps(values);
    low_ = _mm512_set4_epi32(0x0D0D0C0C, 0x09090808, 0x05050404, 0x01010000);
    high_ = _mm512_add_epi8(low_, _mm512_set1_epi8(2));
    table_of_lane_ =
        _mm512_or_si512(_mm512_set1_epi32(0x00100000),
                        kTwoGroups ? _mm512_maskz_set1_epi32(0xCCCC, 0x00200020) : _mm512_setzero_si512());
  }

  // The parameters of a unit; scales rounded to bf16.
  HALFBYTE_AVX512 static void load(const Run& run, int64_t strip, int64_t unit, Groups& groups) {
    const formats::PackedLayout& p = run.problem.weight;
    const int64_t group = kTwoGroups ? 2 * unit : p.groups == 1 ? 0 : unit * kUnitCols / p.group;
    for (int i = 0; i <= kTwoGroups; ++i) {
      groups[i].load(run.problem, run.tensors, strip, group + i);
      groups[i].round_to_bf16(false);
    }
  }

  // The weights of the codes of the two rows of a line.
  [[gnu::always_inline]] HALFBYTE_AVX512 void make_tables(const Groups& groups, int line,
                                                          Tables& tables) const {
    for (int i = 0; i <= kTwoGroups; ++i) {
      __m512 rows[2] = {values_, values_};
      for (int j = 0; j < 2; ++j) {
        const int row = 2 * line + j;
        if (asymmetric_) rows[j] = _mm512_sub_ps(values_, _mm512_set1_ps(groups[i].offsets[row]));
        rows[j] = _mm512_mul_ps(rows[j], _mm512_set1_ps(groups[i].scales[row]));
      }
      tables[i] = __builtin_bit_cast(__m512i, _mm512_cvtne2ps_pbh(rows[1], rows[0]));
    }
  }

  // Pairs of weights from the bytes of a line: of columns as transposed_column(c % 2, c / 2, lane) has them.
  [[gnu::always_inline]] HALFBYTE_AVX512 __m512i look_up(const Tables& tables, __m512i bytes, int c) const {
    __m512i index = _mm512_shuffle_epi8(bytes, c < 2 ? low_ : high_);
    if (c % 2 == 1) index = _mm512_srli_epi16(index, 4);
    index = _mm512_ternarylogic_epi32(index, _mm512_set1_epi16(15), table_of_lane_, 0xEA);
    return kTwoGroups ? _mm512_permutex2var_epi16(tables[0], index, tables[kTwoGroups])
                      : _mm512_permutexvar_epi16(index, tables[0]);
  }

 private:
  bool asymmetric_;
  __m512 values_;
  // Bytes 0 and 1, or 2 and 3, of each word of 4, in words of 2: the rows of a pair.
  __m512i low_, high_;
  __m512i table_of_lane_;
};

// Of the block of a unit.
HALFBYTE_AVX512 inline void prefetch_parameters(const Run& run, int64_t strip, int64_t unit) {
  const formats::PackedLayout& p = run.problem.weight;
  const uint8_t* const block = static_cast<const uint8_t*>(run.tensors.weight) + strip * p.strip_bytes +
                               unit * kUnitCols / p.block_cols * p.block_bytes;
  for (int at = p.block_code_bytes; at < p.block_bytes; at += 64) _mm_prefetch(block + at, _MM_HINT_T0);
}

// Adds the products of kRows rows of x and vectors kFirst to kLast of a unit, whose codes and x are those of
// its first row. `next_strip`: bytes to the unit that is fetched meanwhile.
template <int kRows, bool kTwoGroups, int kFirst, int kLast>
[[gnu::always_inline]] HALFBYTE_AVX512 inline void multiply_looked_up(
    const PairLookup<kTwoGroups>& lookup, const typename PairLookup<kTwoGroups>::Groups& groups,
    const uint8_t* codes, int64_t next_strip, const uint16_t* x, int64_t row_stride, float* sums) {
  constexpr int kVectors = kLast - kFirst;
  __m512 s[kRows][kVectors];
  for (int i = 0; i < kRows; ++i)
    for (int c = 0; c < kVectors; ++c) s[i][c] = _mm512_load_ps(sums + i * kUnitCols + (kFirst + c) * kLanes);
  for (int quad = 0; quad < kUnitRows / 2; quad += 4)
#pragma GCC unroll 4
    for (int of_quad = 0; of_quad < 4; ++of_quad) {
      const int line = quad + of_quad;
      if (kFirst == 0) _mm_prefetch(codes + next_strip + line * 64, _MM_HINT_T0);
      typename PairLookup<kTwoGroups>::Tables tables;
      lookup.make_tables(groups, line, tables);
      const __m512i bytes = load_line(codes + line * 64, (of_quad & 2) != 0);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; ++c) {
        const __m512i weights = lookup.look_up(tables, bytes, kFirst + c);
#pragma GCC unroll 8
        for (int i = 0; i < kRows; ++i) {
          int pair = 0;
          std::memcpy(&pair, x + i * row_stride + 2 * line, sizeof pair);
          s[i][c] = dot(s[i][c], _mm512_set1_epi32(pair), weights);
        }
      }
    }
  for (int i = 0; i < kRows; ++i)
    for (int c = 0; c < kVectors; ++c) _mm512_store_ps(sums + i * kUnitCols + (kFirst + c) * kLanes, s[i][c]);
}

template <int kRows, bool kTwoGroups>
HALFBYTE_AVX512 void multiply_few(const Run& run, int64_t begin, int64_t end, float* sums) {
  const formats::PackedLayout& p = run.problem.weight;
  const PairLookup<kTwoGroups> lookup(run.problem.codec);
  // Of two units in turn, loaded one unit ahead: a single scale cannot be read soon after it was stored with
  // others.
  typename PairLookup<kTwoGroups>::Groups parameters[2];
  lookup.load(run, 0, begin, parameters[0]);
  int current = 0;
  for (int64_t strip = 0; strip < p.strips; ++strip)
    for (int64_t unit = begin; unit < end; ++unit, current ^= 1) {
      const bool last = unit + 1 == end;
      if (!last || strip + 1 < p.strips)
        lookup.load(run, last ? strip + 1 : strip, last ? begin : unit + 1, parameters[current ^ 1]);
      prefetch_parameters(run, strip + 1, unit);
      const uint8_t* const codes = static_cast<const uint8_t*>(run.tensors.weight) + p.unit(strip, unit);
      const uint16_t* const x = run.x + strip * kUnitRows;
      float* const to = sums + (unit - begin) * kRows * kUnitCols;
      if constexpr (kRows <= 4) {
        multiply_looked_up<kRows, kTwoGroups, 0, 4>(lookup, parameters[current], codes, p.strip_bytes, x,
                                                    run.row_stride, to);
      } else {
        multiply_looked_up<kRows, kTwoGroups, 0, 2>(lookup, parameters[current], codes, p.strip_bytes, x,
                                                    run.row_stride, to);
        multiply_looked_up<kRows, kTwoGroups, 2, 4>(lookup, parameters[current], codes, p.strip_bytes, x,
                                                    run.row_stride, to);
      }
    }
}

template <bool kTwoGroups>
constexpr auto few_function(int num_rows) {
  return num_rows == 1   ? multiply_few<1, kTwoGroups>
         : num_rows == 2 ? multiply_few<2, kTwoGroups>
         : num_rows == 3 ? multiply_few<3, kTwoGroups>
         : num_rows == 4 ? multiply_few<4, kTwoGroups>
         : num_rows == 6 ? multiply_few<6, kTwoGroups>
                         : multiply_few<8, kTwoGroups>;
}
inline bool is_looked_up(const QgemmProblem& problem) {
  const formats::PackedLayout& p = problem.weight;
  return problem.transposed && problem.m <= kMostLookedUpRows && p.bits == 4 && !p.has_biases &&
         BlockGroups(p).num <= 2;
}

// Weights of nvfp4, of its E4M3 scales and codes: exact in bf16. Without the global scale, which sums have.
struct BlockFloats {
  alignas(64) uint16_t weights[256][16];  // [scale][code]

  static const BlockFloats& of(const formats::Codec& codec) {
    static const BlockFloats table = [&] {
      BlockFloats t;
      for (int scale = 0; scale < 256; ++scale)
        for (int code = 0; code < 16; ++code)
          t.weights[scale][code] =
              formats::to_bf16(formats::e4m3_to_f32(static_cast<uint8_t>(scale)) * codec.book.values[code]);
      return t;
    }();
    return table;
  }
};
inline bool is_block_float(const QgemmProblem& problem) {
  return problem.transposed && problem.m <= kMostLookedUpRows &&
         problem.codec.scale_type == formats::ScaleType::e4m3;
}

// Few rows of x and weights of nvfp4, looked up in the tables of two groups of a pair of rows. Vector c of a
// unit has in lane 4 t + 2 h + i the column 16 (2 h + c / 2) + 8 (c % 2) + 2 t + i.
constexpr int block_float_column(int c, int lane) {
  return 16 * (lane / 2 % 2 * 2 + c / 2) + c % 2 * 8 + lane / 4 * 2 + lane % 2;
}
template <int kRows, int kFirst, int kLast>
[[gnu::always_inline]] HALFBYTE_AVX512 inline void multiply_block_floats(
    const BlockFloats& table, const uint8_t* codes, const uint8_t* scales, int64_t next_strip,
    const uint16_t* x, int64_t row_stride, float* sums) {
  constexpr int kVectors = kLast - kFirst;
  // Of 8 bytes of codes, where the nibbles of two columns of both rows begin; the row and the table of a
  // word.
  const __m512i nibbles = _mm512_set1_epi64(0x000C'0004'0008'0000);
  const __m512i place = _mm512_set4_epi32(0x00300020, 0x00300020, 0x00100000, 0x00100000);
  __m512 s[kRows][kVectors];
  for (int i = 0; i < kRows; ++i)
    for (int c = 0; c < kVectors; ++c) s[i][c] = _mm512_load_ps(sums + i * kUnitCols + (kFirst + c) * kLanes);
  for (int quad = 0; quad < kUnitRows / 2; quad += 4)
#pragma GCC unroll 4
    for (int of_quad = 0; of_quad < 4; ++of_quad) {
      const int line = quad + of_quad;
      if (kFirst == 0) _mm_prefetch(codes + next_strip + line * 64, _MM_HINT_T0);
      const __m512i bytes = load_line(codes + line * 64, (of_quad & 2) != 0);
#pragma GCC unroll 4
      for (int c = 0; c < kVectors; c += 2) {
        __m512i tables[2];
        for (int h = 0; h < 2; ++h) {
          const uint8_t* const of_rows = scales + (2 * h + (kFirst + c) / 2) * kUnitRows + 2 * line;
          const auto of_row = [&](int row) HALFBYTE_AVX512 {
            return _mm256_load_si256(reinterpret_cast<const __m256i*>(table.weights[of_rows[row]]));
          };
          tables[h] = _mm512_inserti64x4(_mm512_castsi256_si512(of_row(0)), of_row(1), 1);
        }
        for (int p = 0; p < 2; ++p) {
          const __m512i begins =
              _mm512_add_epi8(nibbles, _mm512_set1_epi8(static_cast<char>((kFirst + c) / 2 * 32 + p * 16)));
          const __m512i index = _mm512_ternarylogic_epi32(_mm512_multishift_epi64_epi8(begins, bytes),
                                                          _mm512_set1_epi16(15), place, 0xEA);
          const __m512i weights = _mm512_permutex2var_epi16(tables[0], index, tables[1]);
#pragma GCC unroll 8
          for (int i = 0; i < kRows; ++i) {
            int pair = 0;
            std::memcpy(&pair, x + i * row_stride + 2 * line, sizeof pair);
            s[i][c + p] = dot(s[i][c + p], _mm512_set1_epi32(pair), weights);
          }
        }
      }
    }
  for (int i = 0; i < kRows; ++i)
    for (int c = 0; c < kVectors; ++c) _mm512_store_ps(sums + i * kUnitCols + (kFirst + c) * kLanes, s[i][c]);
}
template <int kRows>
HALFBYTE_AVX512 void multiply_block_floats(const Run& run, int64_t begin, int64_t end, float* sums) {
  const formats::PackedLayout& p = run.problem.weight;
  const BlockFloats& table = BlockFloats::of(run.problem.codec);
  for (int64_t strip = 0; strip < p.strips; ++strip)
    for (int64_t unit = begin; unit < end; ++unit) {
      prefetch_parameters(run, strip + 1, unit);
      const uint8_t* const codes = static_cast<const uint8_t*>(run.tensors.weight) + p.unit(strip, unit);
      const uint8_t* const scales = codes + p.block_code_bytes;
      const uint16_t* const x = run.x + strip * kUnitRows;
      float* const to = sums + (unit - begin) * kRows * kUnitCols;
      if constexpr (kRows <= 4) {
        multiply_block_floats<kRows, 0, 4>(table, codes, scales, p.strip_bytes, x, run.row_stride, to);
      } else {
        multiply_block_floats<kRows, 0, 2>(table, codes, scales, p.strip_bytes, x, run.row_stride, to);
        multiply_block_floats<kRows, 2, 4>(table, codes, scales, p.strip_bytes, x, run.row_stride, to);
      }
    }
}

// Few rows of x, and units of four groups that have nothing but scales.
inline bool has_short_groups(const QgemmProblem& problem) {
  return problem.transposed && problem.m <= kFewTransposedRows && BlockGroups(problem.weight).num == 4 &&
         has_scales_only(problem);
}
// The products of these, in f32: a weight is its code's value times what its lane has of x times
// scale. sums[row][64]: of column column_order(4)[i] at i.
template <int kRows>
HALFBYTE_AVX512 void multiply_short_groups(const Run& run, int64_t begin, int64_t end, float* sums) {
  const QgemmProblem& problem = run.problem;
  const formats::PackedLayout& p = problem.weight;
  alignas(64) float values[16];
  for (int code = 0; code < 16; ++code) {
    values[code] = problem.codec.kind == formats::Kind::table
                       ? formats::bf16_to_f32(formats::to_bf16(problem.codec.book.values[code]))
                       : static_cast<float>(code + problem.codec.q_min);
  }
  const __m512 table = _mm512_load_ps(values);
  LaneScales scales;
  alignas(64) float x[kRows][kUnitRows];  // of the rows of a strip
  for (int64_t strip = 0; strip < p.strips; ++strip) {
    for (int i = 0; i < kRows; ++i)
      for (int row = 0; row < kUnitRows; row += kLanes)
        _mm512_store_ps(x[i] + row, load_parameters(run.x + i * run.row_stride + strip * kUnitRows + row,
                                                    formats::ScaleType::bf16));
    for (int64_t unit = begin; unit < end; ++unit) {
      scales.load(static_cast<const uint8_t*>(run.tensors.weight) + inlined_parameters(p, strip, unit),
                  p.scale_bytes, problem.codec.scale_type, 4);
      const uint8_t* const codes = static_cast<const uint8_t*>(run.tensors.weight) + p.unit(strip, unit);
      float* const to = sums + (unit - begin) * kRows * kUnitCols;
      prefetch_parameters(run, strip + 1, unit);
      __m512 s[kRows][4];
      for (int i = 0; i < kRows; ++i)
        for (int v = 0; v < 4; ++v) s[i][v] = _mm512_load_ps(to + i * kUnitCols + v * kLanes);
      for (int line = 0; line < kTileLines; ++line) {
        _mm_prefetch(codes + p.strip_bytes + line * 64, _MM_HINT_T0);
        __m512i words = load_line(codes + line * 64, (line & 2) != 0);
        for (int odd = 0; odd < 2; ++odd, words = _mm512_srli_epi32(words, 8)) {
          const int row = 2 * line + odd;
          const __m512 scale = scales.of(row);
          __m512 factors[kRows];
          for (int i = 0; i < kRows; ++i) factors[i] = _mm512_mul_ps(scale, _mm512_set1_ps(x[i][row]));
          for (int v = 0; v < 4; ++v) {
            const auto shift = static_cast<unsigned>(v / 2 * 16 + v % 2 * 4);
            const __m512 value = _mm512_permutexvar_ps(_mm512_srli_epi32(words, shift), table);
            for (int i = 0; i < kRows; ++i) s[i][v] = _mm512_fmadd_ps(value, factors[i], s[i][v]);
          }
        }
      }
      for (int i = 0; i < kRows; ++i)
        for (int v = 0; v < 4; ++v) _mm512_store_ps(to + i * kUnitCols + v * kLanes, s[i][v]);
    }
  }
}

// Rows of x that are multiplied together: of a task, and in all with those of padding.
constexpr int64_t padded_rows(int64_t m) { return m <= 3 ? m : m == 5 || m == 6 ? 6 : (m + 3) / 4 * 4; }
struct TransposedRows {
  int64_t of_task, all;
};
inline TransposedRows transposed_rows(const QgemmProblem& problem) {
  const int64_t m = problem.m;
  if (!is_looked_up(problem) && !is_block_float(problem)) return {kTaskRows, padded_rows(m)};
  const int64_t tasks = (m + kLookedUpRows - 1) / kLookedUpRows,
                of_task = padded_rows((m + tasks - 1) / tasks);
  const int64_t last = (m - 1) / of_task * of_task;
  return {of_task, last + padded_rows(m - last)};
}

// The same of any rows and codes.
HALFBYTE_AVX512 inline void multiply_decoded(const Run& run, int64_t begin, int64_t end, int num_rows,
                                             float* sums) {
  const QgemmProblem& problem = run.problem;
  const formats::PackedLayout& p = problem.weight;
  const auto* const memory = static_cast<const uint8_t*>(run.tensors.weight);
  const int step = num_rows <= 3 ? num_rows : num_rows == 6 ? 2 : 4;
  const int batch = num_rows <= kFewDecodedRows ? 1 : kStripBatch;
  UnitDecoder decoder(problem, run.tensors, WeightRounding::weight_rounded);
  DecodedUnit decoded[kStripBatch];
  for (int64_t strip = 0; strip < p.strips; strip += batch) {
    const int num_strips = static_cast<int>(std::min<int64_t>(batch, p.strips - strip));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t ahead = p.unit(strip + batch, unit);
      for (int64_t i = 0; i < kUnitRows * kUnitCols * p.bits / 8; i += 64)
        _mm_prefetch(memory + ahead + i, _MM_HINT_T0);
      for (int i = 0; i < num_strips; ++i) {
        decoder.select(strip + i, unit);
        decoder.decode<true>(0, 4, decoded[i][0], decoded[i][1]);
      }
      const auto multiply = step == 1   ? multiply_units<1>
                            : step == 2 ? multiply_units<2>
                            : step == 3 ? multiply_units<3>
                                        : multiply_units<4>;
      for (int i = 0; i < num_rows; i += step)
        multiply(decoded, num_strips, run.x + i * run.row_stride + strip * kUnitRows, run.row_stride,
                 sums + ((unit - begin) * num_rows + i) * kUnitCols);
    }
  }
}

// Columns of units [begin, end) of rows [row, row + num_rows) of y.
HALFBYTE_AVX512 inline void multiply_columns(Run run, int64_t begin, int64_t end, int64_t row, int num_rows) {
  const QgemmProblem& problem = run.problem;
  run.x += row * run.row_stride;
  const formats::PackedLayout& p = problem.weight;
  alignas(64) float sums[kTaskUnits * kTaskRows * kUnitCols];  // [unit][row][columns in another order]
  std::fill_n(sums, (end - begin) * num_rows * kUnitCols, 0.0F);
  alignas(64) int places[kUnitCols];  // of columns of a unit in the sums
  if (is_block_float(problem)) {
    const auto multiply = num_rows == 1   ? multiply_block_floats<1>
                          : num_rows == 2 ? multiply_block_floats<2>
                          : num_rows == 3 ? multiply_block_floats<3>
                          : num_rows == 4 ? multiply_block_floats<4>
                          : num_rows == 6 ? multiply_block_floats<6>
                                          : multiply_block_floats<8>;
    multiply(run, begin, end, sums);
    for (int i = 0; i < kUnitCols; ++i) places[block_float_column(i / 16, i % 16)] = i;
  } else if (has_short_groups(problem)) {
    const auto multiply = num_rows == 1   ? multiply_short_groups<1>
                          : num_rows == 2 ? multiply_short_groups<2>
                          : num_rows == 3 ? multiply_short_groups<3>
                                          : multiply_short_groups<4>;
    multiply(run, begin, end, sums);
    constexpr auto kOrder = column_order(4);
    for (int i = 0; i < kUnitCols; ++i) places[kOrder[static_cast<size_t>(i)]] = i;
  } else if (is_looked_up(problem)) {
    const auto multiply =
        BlockGroups(p).num == 2 ? few_function<true>(num_rows) : few_function<false>(num_rows);
    multiply(run, begin, end, sums);
    for (int i = 0; i < kUnitCols; ++i) places[forward_column(4, i / 16 % 2, i % 16, i / 32)] = i;
  } else {
    multiply_decoded(run, begin, end, num_rows, sums);
    for (int i = 0; i < kUnitCols; ++i) places[transposed_column(i / 32, i / 16 % 2, i % 16)] = i;
  }
  for (int i = 0; i < num_rows && row + i < problem.m; ++i)
    for (int64_t col = begin * kUnitCols; col < std::min(problem.k, end * kUnitCols); col += kLanes)
      store(run, row + i, col,
            _mm512_i32gather_ps(_mm512_load_si512(places + col % kUnitCols),
                                sums + ((col / kUnitCols - begin) * num_rows + i) * kUnitCols, 4));
}

}  // namespace halfbyte::avx512
