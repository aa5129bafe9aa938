// `qgemm` of bf16 activations by AVX-512: vdpbf16ps, which adds the products of pairs of bf16 to f32 sums.
//
//   forward, few rows    Codes are looked up in registers and multiplied with x along k: 16 partial sums for
//                        each output. x is small and lies in the order of the codes.
//   forward, many rows   Two units at a time are decoded to the cache; 16 rows of x lie across the lanes, and
//                        pairs of weights are broadcast.
//   transposed           Units are decoded to pairs of rows of the weight; 16 columns lie across the lanes,
//                        and pairs of x are broadcast.
//
// Forward, sums of a group are of codes and multiplied with its scale in f32 (code_rounded); transposed, what
// is summed has many scales, so they are in the weights (weight_rounded). The order of a sum depends on
// neither threads nor what else is computed. vdpbf16ps takes denormal inputs as zeros and makes zeros of
// denormal sums.
#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/features.h"
#include "cpu/parallel.h"
#include "ops/qgemm/qgemm.h"

#ifdef __x86_64__
#include "ops/qgemm/qgemm_bf16_decode.h"
#endif

namespace halfbyte {
namespace {

#ifdef __x86_64__

using formats::kUnitCols;
using formats::kUnitRows;

constexpr int kLanes = 16;
constexpr int kUnitPairs = kUnitCols / 2;
constexpr int kFewRows = 8;  // that are multiplied without a decoded weight in memory

int64_t units_of(const formats::PackedLayout& p) { return p.blocks_per_strip * (p.block_cols / kUnitCols); }

// A run: the problem, its tensors, and what of the workspace is where.
struct Run {
  const QgemmProblem& problem;
  const QgemmTensors& tensors;
  uint16_t* x;         // forward: see arrange_x; transposed: [rows][row_stride], zeros beyond what is summed
  float* sums;         // forward: of x over groups: [groups][rows]
  int64_t rows;        // m, padded
  int64_t row_stride;  // transposed, in elements
};

HALFBYTE_AVX512 inline __mmask16 first_lanes(int64_t num) {
  return static_cast<__mmask16>((1u << std::clamp<int64_t>(num, 0, kLanes)) - 1);
}
HALFBYTE_AVX512 inline __mmask32 first_words(int64_t num) {
  return static_cast<__mmask32>((uint64_t{1} << std::clamp<int64_t>(num, 0, 32)) - 1);
}
HALFBYTE_AVX512 inline __m512 dot(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, __builtin_bit_cast(__m512bh, a), __builtin_bit_cast(__m512bh, b));
}

// Writes outputs [row, col .. col + 15], as many as there are.
HALFBYTE_AVX512 void store(const Run& run, int64_t row, int64_t col, __m512 sum) {
  const __mmask16 mask = first_lanes(run.problem.out_cols() - col);
  const auto load = [mask](const void* data, int64_t at) HALFBYTE_AVX512 {
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(data) + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  };
  const int64_t at = row * run.problem.out_cols() + col;
  if (run.problem.bias) sum = _mm512_add_ps(sum, load(run.tensors.bias, col));
  if (run.problem.accumulate) sum = _mm512_add_ps(sum, load(run.tensors.y, at));
  _mm256_mask_storeu_epi16(static_cast<uint16_t*>(run.tensors.y) + at, mask,
                           __builtin_bit_cast(__m256i, _mm512_cvtneps_pbh(sum)));
}

// ---- Forward: x

// The columns of a unit of a row of x in the order of decoded codes: two vectors of 16 pairs.
struct UnitOrder {
  alignas(64) uint16_t columns[2][32];
  explicit UnitOrder(int bits) {
    for (int j = 0; j < 2; ++j)
      for (int i = 0; i < 32; ++i)
        columns[j][i] = static_cast<uint16_t>(forward_column(bits, j, i / 2, i % 2));
  }
};
HALFBYTE_AVX512 inline void load_unit(const Run& run, const UnitOrder& order, int64_t row, int64_t unit,
                                      __m512i* vectors) {
  const int64_t k = run.problem.k, col = unit * kUnitCols;
  const auto* const x = static_cast<const uint16_t*>(run.tensors.x) + row * k + col;
  const int64_t num = row < run.problem.m ? k - col : 0;
  const __m512i low = _mm512_maskz_loadu_epi16(first_words(num), x);
  const __m512i high = _mm512_maskz_loadu_epi16(first_words(num - 32), x + 32);
  for (int j = 0; j < 2; ++j)
    vectors[j] = _mm512_permutex2var_epi16(low, _mm512_load_si512(order.columns[j]), high);
}

// The rows of x in the workspace for few rows: [unit][row][2 vectors].
HALFBYTE_AVX512 void arrange_rows(const Run& run, int64_t begin, int64_t end) {
  const UnitOrder order(run.problem.codec.bits);
  for (int64_t unit = begin; unit < end; ++unit)
    for (int64_t row = 0; row < run.rows; ++row) {
      __m512i vectors[2];
      load_unit(run, order, row, unit, vectors);
      uint16_t* const to = run.x + (unit * run.rows + row) * kUnitCols;
      _mm512_store_si512(to, vectors[0]);
      _mm512_store_si512(to + 32, vectors[1]);
    }
}

HALFBYTE_AVX512 void transpose(__m512i (&rows)[kLanes]) {
  __m512i t[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4)
    for (int j = 0; j < 2; ++j) {  // rows[i + c]: column c of each 128 bits, of four rows
      rows[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
  for (int c = 0; c < 4; ++c)
    for (int i = 0; i < kLanes; i += 8) {
      t[i + c] = _mm512_shuffle_i32x4(rows[i + c], rows[i + 4 + c], 0x88);
      t[i + 4 + c] = _mm512_shuffle_i32x4(rows[i + c], rows[i + 4 + c], 0xDD);
    }
  for (int c = 0; c < 8; ++c) {
    rows[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
    rows[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xDD);
  }
}

constexpr int kPanelBlocks = 4;  // of 16 rows of x
constexpr int kPanelRows = kPanelBlocks * kLanes;

// ... for many rows: panels of up to 64 rows, [unit][2][16 pairs][rows of the panel].
struct Panel {
  uint16_t* data;
  int blocks;
};
Panel panel_of(const Run& run, int64_t panel) {
  const int64_t cols = units_of(run.problem.weight) * kUnitCols, row = panel * kPanelRows;
  return {run.x + row * cols, static_cast<int>(std::min<int64_t>(kPanelRows, run.rows - row)) / kLanes};
}
HALFBYTE_AVX512 void arrange_panel(const Run& run, int64_t panel, int64_t unit) {
  const UnitOrder order(run.problem.codec.bits);
  const auto [data, blocks] = panel_of(run, panel);
  for (int block = 0; block < blocks; ++block) {
    __m512i vectors[2][kLanes];
    for (int i = 0; i < kLanes; ++i) {
      __m512i row[2];
      load_unit(run, order, panel * kPanelRows + block * kLanes + i, unit, row);
      vectors[0][i] = row[0];
      vectors[1][i] = row[1];
    }
    for (int j = 0; j < 2; ++j) {
      transpose(vectors[j]);
      for (int pair = 0; pair < kLanes; ++pair)
        _mm512_store_si512(data + (((unit * 2 + j) * kLanes + pair) * blocks + block) * 32, vectors[j][pair]);
    }
  }
}

HALFBYTE_AVX512 void sum_group(const Run& run, int64_t group) {
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

// ---- Forward, few rows

// The sum of each of 16 vectors: of vector i in lane i.
HALFBYTE_AVX512 __m512 sum_each(const float* vectors, int64_t stride) {
  __m512 v[kLanes];
  for (int i = 0; i < kLanes; ++i) v[i] = _mm512_load_ps(vectors + (i % 4 * 4 + i / 4) * stride);
  for (int i = 0; i < 8; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                         _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xEE));
  for (int i = 0; i < 4; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xDD));
  for (int i = 0; i < 2; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_ps(v[2 * i], v[2 * i + 1], 0x44),
                         _mm512_shuffle_ps(v[2 * i], v[2 * i + 1], 0xEE));
  return _mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xDD));
}

// What is added for a group beside scale * sum(x code): factor * sum(x).
HALFBYTE_AVX512 inline bool has_factors(const QgemmProblem& problem) {
  return problem.codec.asymmetric || problem.weight.has_biases;
}
HALFBYTE_AVX512 inline __m512 factors(const QgemmProblem& problem, const GroupParameters& group, int row) {
  if (problem.weight.has_biases) return _mm512_load_ps(group.biases + row);
  return _mm512_fnmadd_ps(_mm512_load_ps(group.scales + row), _mm512_load_ps(group.offsets + row),
                          _mm512_setzero_ps());
}

// Values of the codes of rows 2 * line and 2 * line + 1 of a tile, in the order of x.
template <int kBits>
struct LineDecoder {
  static constexpr int kVectors = kBits == 4 ? 2 : 1;  // of a row
  __m512i table;  // of 4 bits: values twice; of 8 bits: 2^23 plus the code that stands for 0

  HALFBYTE_AVX512 explicit LineDecoder(const formats::Codec& codec) {
    const int zero = codec.kind == formats::Kind::integer && !codec.asymmetric ? -codec.q_min : 0;
    if constexpr (kBits == 4) {
      alignas(64) uint16_t values[32];
      for (int i = 0; i < 32; ++i)
        values[i] = formats::to_bf16(codec.kind == formats::Kind::table ? codec.book.values[i % 16]
                                                                        : static_cast<float>(i % 16 - zero));
      table = _mm512_load_si512(values);
    } else {
      table = _mm512_castps_si512(_mm512_set1_ps(0x1p23f + static_cast<float>(zero)));
    }
  }

  HALFBYTE_AVX512 [[gnu::always_inline]] void decode(const uint8_t* tile, int line,
                                                     __m512i (&values)[2][kVectors]) const {
    __m512i codes = _mm512_loadu_si512(tile + line * 64);
    if ((line & 2) != 0) codes = _mm512_shuffle_i64x2(codes, codes, 0x4E);
    if constexpr (kBits == 4) {
      for (int i = 0; i < 4; ++i)
        values[i / 2][i % 2] =
            _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, static_cast<unsigned>(4 * i)), table);
    } else {
      __m512 bytes[4];
      for (int i = 0; i < 4; ++i)
        bytes[i] =
            _mm512_sub_ps(_mm512_castsi512_ps(_mm512_ternarylogic_epi32(
                              _mm512_srli_epi32(codes, static_cast<unsigned>(8 * i)), _mm512_set1_epi32(0xFF),
                              _mm512_castps_si512(_mm512_set1_ps(0x1p23f)), 0xEA)),
                          _mm512_castsi512_ps(table));
      for (int i = 0; i < 2; ++i)
        values[i][0] = __builtin_bit_cast(__m512i, _mm512_cvtne2ps_pbh(bytes[2 * i + 1], bytes[2 * i]));
    }
  }
};

// Outputs of a strip. The sums of an output are 16 lanes, each of them scaled at the end of a group, or of a
// chunk of 256 columns, which stays in the first cache while pairs of rows are multiplied one after the
// other.
template <int kBits, int kRows>
HALFBYTE_AVX512 void multiply_strip(const Run& run, int64_t strip) {
  constexpr int kVectors = LineDecoder<kBits>::kVectors, kTileCols = 256 / kBits, kChunk = kBits;
  const QgemmProblem& problem = run.problem;
  const formats::PackedLayout& p = problem.weight;
  const auto* const memory = static_cast<const uint8_t*>(run.tensors.weight);
  const LineDecoder<kBits> decoder(problem.codec);
  const int64_t tiles = p.tiles_per_strip();
  const int64_t group_tiles = p.groups == 1 ? tiles : std::max<int64_t>(1, p.group / kTileCols);
  const bool two_groups = p.groups > 1 && p.group < kTileCols;  // in a tile: its lanes 4 i + 2 and 4 i + 3
  const int64_t ahead = p.tile(0, kChunk);                      // bytes, about a chunk

  alignas(64) float totals[kUnitRows][kRows][kLanes] = {};
  alignas(64) float added[kRows][kUnitRows] = {};
  for (int64_t first = 0; first < tiles; first += kChunk) {
    const int num_tiles = static_cast<int>(std::min<int64_t>(kChunk, tiles - first));
    const uint8_t* codes[kChunk];
    int ends[kChunk], folds = 0;  // parts of the chunk that have one scale
    alignas(64) float scales[kChunk][kUnitRows][4];
    for (int tile = 0; tile < num_tiles; ++tile) codes[tile] = memory + p.tile(strip, first + tile);
    for (int tile = 0; tile < num_tiles; tile = ends[folds++]) {
      const int64_t at = first + tile, group = at / group_tiles * (two_groups ? 2 : 1);
      ends[folds] =
          static_cast<int>(std::min<int64_t>(num_tiles, (at / group_tiles + 1) * group_tiles - first));
      GroupParameters groups[2];
      for (int i = 0; i <= two_groups; ++i) {
        groups[i].load(problem, run.tensors, strip, group + i);
        if (!has_factors(problem) || at % group_tiles != 0 || group + i >= p.groups) continue;
        for (int row = 0; row < kUnitRows; row += kLanes) {
          const __m512 factor = factors(problem, groups[i], row);
          for (int m = 0; m < kRows; ++m)
            _mm512_store_ps(added[m] + row,
                            _mm512_fmadd_ps(factor, _mm512_set1_ps(run.sums[(group + i) * kRows + m]),
                                            _mm512_load_ps(added[m] + row)));
        }
      }
      const __m512i spread = _mm512_set_epi32(19, 19, 3, 3, 18, 18, 2, 2, 17, 17, 1, 1, 16, 16, 0, 0);
      for (int row = 0; row < kUnitRows; row += 4)
        _mm512_store_ps(scales[folds][row],
                        _mm512_permutex2var_ps(
                            _mm512_castps128_ps512(_mm_load_ps(groups[0].scales + row)), spread,
                            _mm512_castps128_ps512(_mm_load_ps(groups[two_groups ? 1 : 0].scales + row))));
    }
    for (int line = 0; line < kUnitRows / 2; ++line) {
      int tile = 0;
      for (int fold = 0; fold < folds; ++fold) {
        __m512 sums[2][kRows];
        for (int m = 0; m < kRows; ++m) sums[0][m] = sums[1][m] = _mm512_setzero_ps();
        for (; tile < ends[fold]; ++tile) {
          __m512i values[2][kVectors];
          _mm_prefetch(codes[tile] + ahead + line * 64, _MM_HINT_T0);
          decoder.decode(codes[tile], line, values);
          const uint16_t* const x =
              run.x + (kBits == 4 ? (first + tile) * kRows * kUnitCols
                                  : (first + tile) / 2 * kRows * kUnitCols + (first + tile) % 2 * 32);
          for (int m = 0; m < kRows; ++m)
            for (int i = 0; i < kVectors; ++i) {
              const __m512i pairs = _mm512_load_si512(x + m * kUnitCols + i * 32);
              sums[0][m] = dot(sums[0][m], values[0][i], pairs);
              sums[1][m] = dot(sums[1][m], values[1][i], pairs);
            }
        }
        for (int i = 0; i < 2; ++i) {
          const int row = 2 * line + i;
          const __m512 scale = _mm512_broadcast_f32x4(_mm_load_ps(scales[fold][row]));
          for (int m = 0; m < kRows; ++m)
            _mm512_store_ps(totals[row][m],
                            _mm512_fmadd_ps(sums[i][m], scale, _mm512_load_ps(totals[row][m])));
        }
      }
    }
  }
  for (int m = 0; m < problem.m; ++m)
    for (int row = 0; row < kUnitRows && strip * kUnitRows + row < problem.n; row += kLanes)
      store(run, m, strip * kUnitRows + row,
            _mm512_add_ps(sum_each(totals[row][m], kRows * kLanes), _mm512_load_ps(added[m] + row)));
}

using StripFunction = void (*)(const Run&, int64_t);
template <int kBits>
StripFunction strip_function(int64_t rows) {
  return rows == 1   ? multiply_strip<kBits, 1>
         : rows == 2 ? multiply_strip<kBits, 2>
         : rows == 4 ? multiply_strip<kBits, 4>
                     : multiply_strip<kBits, 8>;
}

// ---- Forward, many rows

constexpr int kChunkUnits = 2;       // decoded at a time
constexpr int kTaskPanels = 4;       // that a decoded unit is used for
using DecodedUnit = Bf16Tile[2][2];  // [j][i], see qgemm_bf16_decode.h

// Where the pairs of a group lie in parts of 16 pairs, [unit][j]: parts of them, and within each `runs` times
// `length` pairs, 4 apart.
struct Fold {
  int begin, end;  // parts
  int first, runs, length;
};

// totals[row][..] += scale of the row * products of kWeights rows of the weight and a panel.
template <int kWeights, int kBlocks>
HALFBYTE_AVX512 void multiply_fold(const DecodedUnit* units, const uint16_t* x, const Fold& fold, int row,
                                   const float* scales, float* totals) {
  __m512 sums[kWeights][kBlocks];
#pragma GCC unroll 16
  for (int i = 0; i < kWeights; ++i)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sums[i][b] = _mm512_setzero_ps();
  for (int part = fold.begin; part < fold.end; ++part) {
    const uint16_t* const weights = units[part / 2][part % 2][row / kTileLines].lines[row % kTileLines];
    for (int run = 0; run < fold.runs; ++run) {
      const int begin = fold.first + 4 * run;
      for (int pair = begin; pair < begin + fold.length; ++pair) {
        const uint16_t* const at = x + (part * kLanes + pair) * kBlocks * 32;
        __m512i pairs[kBlocks];
#pragma GCC unroll 4
        for (int b = 0; b < kBlocks; ++b) pairs[b] = _mm512_load_si512(at + b * 32);
#pragma GCC unroll 16
        for (int i = 0; i < kWeights; ++i) {
          int weight = 0;
          std::memcpy(&weight, weights + i * kTileValues + pair * 2, sizeof weight);
#pragma GCC unroll 4
          for (int b = 0; b < kBlocks; ++b) sums[i][b] = dot(sums[i][b], _mm512_set1_epi32(weight), pairs[b]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kWeights; ++i)
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      float* const total = totals + ((row + i) * kBlocks + b) * kLanes;
      _mm512_store_ps(total,
                      _mm512_fmadd_ps(sums[i][b], _mm512_set1_ps(scales[row + i]), _mm512_load_ps(total)));
    }
}

template <int kBlocks>
HALFBYTE_AVX512 void multiply_rows(const DecodedUnit* units, const uint16_t* x, const Fold& fold,
                                   const float* scales, float* totals) {
  constexpr int kWeights = kBlocks == 1 ? 16 : kBlocks == 4 ? 4 : 8;
  for (int row = 0; row < kUnitRows; row += kWeights)
    multiply_fold<kWeights, kBlocks>(units, x, fold, row, scales, totals);
}

HALFBYTE_AVX512 void multiply_panels(const Run& run, int64_t strip, int64_t panel, int num_panels) {
  const QgemmProblem& problem = run.problem;
  const formats::PackedLayout& p = problem.weight;
  const int64_t units = units_of(p);
  UnitDecoder decoder(problem, run.tensors, WeightRounding::code_rounded);
  alignas(64) float totals[kTaskPanels][kUnitRows * kPanelRows] = {};
  DecodedUnit decoded[kChunkUnits];
  for (int64_t unit = 0; unit < units; unit += kChunkUnits) {
    const int num_units = static_cast<int>(std::min<int64_t>(kChunkUnits, units - unit));
    for (int i = 0; i < num_units; ++i) {
      decoder.select(strip, unit + i);
      decoder.decode<false>(0, kTileLines, decoded[i][0], decoded[i][1]);
    }
    // Columns of the chunk that have one scale, one after the other.
    const int64_t begin = unit * kUnitCols, end = begin + num_units * kUnitCols;
    for (int64_t col = begin; col < end;) {
      const int64_t group = p.groups == 1 ? 0 : col / p.group;
      const int64_t next = p.groups == 1 ? end : std::min<int64_t>(end, (group + 1) * p.group);
      const int first = static_cast<int>(col - begin), last = static_cast<int>(next - begin);
      Fold fold{first / 32, last / 32, 0, 1, kLanes};
      if (problem.codec.bits == 4 && next - col < kUnitCols)
        fold = {first / kUnitCols * 2, first / kUnitCols * 2 + 2, first % kUnitCols / 16, 4, 2};
      GroupParameters parameters;
      parameters.load(problem, run.tensors, strip, group);
      for (int i = 0; i < num_panels; ++i) {
        const auto [data, blocks] = panel_of(run, panel + i);
        const uint16_t* const x = data + begin * blocks * kLanes;
        if (p.has_biases && col == group * p.group && group < p.groups)
          for (int row = 0; row < kUnitRows; ++row)
            for (int b = 0; b < blocks; ++b) {
              float* const total = totals[i] + (row * blocks + b) * kLanes;
              const float* const sums = run.sums + group * run.rows + (panel + i) * kPanelRows + b * kLanes;
              _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_set1_ps(parameters.biases[row]),
                                                     _mm512_loadu_ps(sums), _mm512_load_ps(total)));
            }
        constexpr decltype(&multiply_rows<1>) kMultiply[] = {multiply_rows<1>, multiply_rows<2>,
                                                             multiply_rows<3>, multiply_rows<4>};
        kMultiply[blocks - 1](decoded, x, fold, parameters.scales, totals[i]);
      }
      col = next;
    }
  }
  for (int i = 0; i < num_panels; ++i) {
    const int64_t first = (panel + i) * kPanelRows;
    const int stride = panel_of(run, panel + i).blocks * kLanes;
    const __m512i index = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(stride));
    for (int64_t m = first; m < std::min(problem.m, first + kPanelRows); ++m)
      for (int row = 0; row < kUnitRows && strip * kUnitRows + row < problem.n; row += kLanes)
        store(run, m, strip * kUnitRows + row,
              _mm512_i32gather_ps(index, totals[i] + row * stride + (m - first), 4));
  }
}

// ---- Transposed

constexpr int kStripBatch = 4;     // strips that are decoded at a time, where there are many rows of x
constexpr int kTaskUnits = 8;      // of columns
constexpr int kTaskRows = 128;     // of x
constexpr int kRowStridePad = 32;  // elements: rows that are 4 KB apart would evict each other

HALFBYTE_AVX512 void copy_rows(const Run& run, int64_t begin, int64_t end) {
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

constexpr int64_t transposed_rows(int64_t m) { return m <= 2 ? m : (m + 3) / 4 * 4; }

// Columns of units [begin, end) of rows [row, row + num_rows) of y.
HALFBYTE_AVX512 void multiply_columns(const Run& run, int64_t begin, int64_t end, int64_t row, int num_rows) {
  const QgemmProblem& problem = run.problem;
  const formats::PackedLayout& p = problem.weight;
  const auto* const memory = static_cast<const uint8_t*>(run.tensors.weight);
  const int step = num_rows <= 2 ? num_rows : 4;
  const int batch = num_rows <= kFewRows ? 1 : kStripBatch;
  UnitDecoder decoder(problem, run.tensors, WeightRounding::weight_rounded);
  alignas(64) float sums[kTaskUnits][kTaskRows * kUnitCols];
  for (int64_t unit = begin; unit < end; ++unit) std::fill_n(sums[unit - begin], num_rows * kUnitCols, 0.0F);
  DecodedUnit decoded[kStripBatch];
  for (int64_t strip = 0; strip < p.strips; strip += batch) {
    const int num_strips = static_cast<int>(std::min<int64_t>(batch, p.strips - strip));
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t ahead = p.unit(strip + batch, unit);
      for (int64_t i = 0; i < kUnitRows * kUnitCols * p.bits / 8; i += 64)
        _mm_prefetch(memory + ahead + i, _MM_HINT_T0);
      for (int i = 0; i < num_strips; ++i) {
        decoder.select(strip + i, unit);
        decoder.decode<true>(0, kTileLines, decoded[i][0], decoded[i][1]);
      }
      const auto multiply = step == 1 ? multiply_units<1> : step == 2 ? multiply_units<2> : multiply_units<4>;
      for (int i = 0; i < num_rows; i += step)
        multiply(decoded, num_strips, run.x + (row + i) * run.row_stride + strip * kUnitRows, run.row_stride,
                 sums[unit - begin] + i * kUnitCols);
    }
  }
  alignas(64) int places[kUnitCols];  // of columns of a unit in the sums
  for (int i = 0; i < kUnitCols; ++i) places[transposed_column(i / 32, i / 16 % 2, i % 16)] = i;
  for (int i = 0; i < num_rows && row + i < problem.m; ++i)
    for (int64_t col = begin * kUnitCols; col < std::min(problem.k, end * kUnitCols); col += kLanes)
      store(run, row + i, col,
            _mm512_i32gather_ps(_mm512_load_si512(places + col % kUnitCols),
                                sums[col / kUnitCols - begin] + i * kUnitCols, 4));
}

// ----

class QgemmAvx512 : public QgemmKernel {
 public:
  explicit QgemmAvx512(const QgemmProblem& problem) : problem_(problem) {
    const formats::PackedLayout& p = problem.weight;
    const int64_t m = problem.m;
    if (problem.transposed) {
      rows_ = transposed_rows(m);
      row_stride_ = p.strips * kUnitRows + kRowStridePad;
      x_bytes_ = rows_ * row_stride_ * 2;
      return;
    }
    rows_ = m <= 2 ? m : m <= 4 ? 4 : m <= kFewRows ? kFewRows : (m + kLanes - 1) / kLanes * kLanes;
    x_bytes_ = rows_ * units_of(p) * kUnitCols * 2;
    if (p.has_biases || (problem.codec.asymmetric && m <= kFewRows)) sums_ = p.groups;
  }

  std::string name() const override { return "qgemm_avx512"; }
  std::string backend() const override { return "cpu AVX512_BF16"; }
  PrecisionGuarantee guarantee() const override {
    return {DType::f32, DType::f32, true, false,
            problem_.transposed ? WeightRounding::weight_rounded : WeightRounding::code_rounded};
  }
  int64_t workspace_bytes() const override {
    return x_bytes_ + sums_ * rows_ * static_cast<int64_t>(sizeof(float)) + kAlignment;
  }

  void run(const QgemmTensors& tensors, void*, void* workspace) const override {
    const auto address = reinterpret_cast<uintptr_t>(workspace);
    auto* const memory = static_cast<uint8_t*>(workspace) + (kAlignment - address % kAlignment) % kAlignment;
    const Run run{problem_,
                  tensors,
                  reinterpret_cast<uint16_t*>(memory),
                  reinterpret_cast<float*>(memory + x_bytes_),
                  rows_,
                  row_stride_};
    if (problem_.transposed)
      run_transposed(run);
    else
      run_forward(run);
  }

 private:
  static constexpr int kAlignment = 64;

  void run_forward(const Run& run) const {
    const int threads = problem_.num_threads;
    const formats::PackedLayout& p = problem_.weight;
    const int64_t units = units_of(p), panels = (rows_ + kPanelRows - 1) / kPanelRows;
    const bool few = problem_.m <= kFewRows;
    if (sums_ > 0)
      parallel_for(sums_, 64, threads, [&](int64_t begin, int64_t end, int) {
        for (int64_t group = begin; group < end; ++group) sum_group(run, group);
      });
    if (few) {
      parallel_for(units, 64, threads,
                   [&](int64_t begin, int64_t end, int) { arrange_rows(run, begin, end); });
      const StripFunction multiply =
          problem_.codec.bits == 4 ? strip_function<4>(rows_) : strip_function<8>(rows_);
      parallel_for(p.strips, 1, threads, [&](int64_t begin, int64_t end, int) {
        for (int64_t strip = begin; strip < end; ++strip) multiply(run, strip);
      });
      return;
    }
    parallel_for(units * panels, 16, threads, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) arrange_panel(run, i / units, i % units);
    });
    const int64_t batches = (panels + kTaskPanels - 1) / kTaskPanels;
    parallel_for(batches * p.strips, 1, threads, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t panel = i / p.strips * kTaskPanels;
        multiply_panels(run, i % p.strips, panel,
                        static_cast<int>(std::min<int64_t>(kTaskPanels, panels - panel)));
      }
    });
  }

  void run_transposed(const Run& run) const {
    const int threads = problem_.num_threads;
    parallel_for(rows_, 4, threads, [&](int64_t begin, int64_t end, int) { copy_rows(run, begin, end); });
    const int64_t units = (problem_.k + kUnitCols - 1) / kUnitCols;
    const int64_t tasks = (units + kTaskUnits - 1) / kTaskUnits;
    const int64_t batches = (rows_ + kTaskRows - 1) / kTaskRows;
    parallel_for(tasks * batches, 1, threads, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t unit = i % tasks * kTaskUnits, row = i / tasks * kTaskRows;
        multiply_columns(run, unit, std::min(units, unit + kTaskUnits), row,
                         static_cast<int>(std::min<int64_t>(kTaskRows, rows_ - row)));
      }
    });
  }

  QgemmProblem problem_;
  int64_t rows_ = 0, row_stride_ = 0, x_bytes_ = 0;
  int64_t sums_ = 0;  // groups whose sums of x are needed
};

std::string refuse(const QgemmProblem& problem) {
  if (!cpu_features().avx512_bf16) return "the CPU does not have AVX-512 with products of bf16";
  if (problem.in_cols() == 0) return "there is nothing to sum";
  return refuse_bf16_decode(problem);
}
std::shared_ptr<const QgemmKernel> make(const QgemmProblem& problem) {
  return std::make_shared<QgemmAvx512>(problem);
}

#else

std::string refuse(const QgemmProblem&) { return "the CPU does not have AVX-512 with products of bf16"; }
std::shared_ptr<const QgemmKernel> make(const QgemmProblem&) { return nullptr; }

#endif

}  // namespace

const QgemmVariant kQgemmAvx512 = {"qgemm_avx512", DeviceKind::cpu, &refuse, &make};

}  // namespace halfbyte
