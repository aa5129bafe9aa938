// `qgemm` of bf16 activations by AVX-512: vdpbf16ps, which adds the products of pairs of bf16 to f32 sums.
//
//   forward, few rows     Codes are looked up in registers and multiplied with x along k: 16 partial sums for
//                         each output. x is small and lies in the order of the codes.
//   forward, more rows    Units are decoded to the cache; 16 rows of x lie across the lanes, and pairs of
//                         weights are broadcast.
//   transposed            Units are decoded to pairs of rows of the weight, for few rows of x in registers,
//                         else to the cache; 16 columns lie across the lanes, and pairs of x are broadcast.
//
// Forward, sums of a group are of codes and multiplied with its scale in f32 (code_rounded); transposed, what
// is summed has many scales, so they are in the weights (weight_rounded). The order of a sum depends on
// neither threads nor what else is computed. vdpbf16ps takes denormal inputs as zeros and makes zeros of
// denormal sums.
#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>

#include "cpu/features.h"
#include "cpu/parallel.h"
#include "ops/qgemm/qgemm.h"

#ifdef __x86_64__
#include "ops/qgemm/weight/bf16_decode.h"
#endif

namespace halfbyte {
namespace {

#ifdef __x86_64__

using formats::kUnitCols;
using formats::kUnitRows;

constexpr int kLanes = 16;
constexpr int kAhead = 8192;           // bytes of the weight that are fetched before they are used
constexpr int kFewRows = 8;            // that are multiplied without a decoded weight in memory
constexpr int kFewTransposedRows = 4;  // likewise

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

// ... for more rows: panels of up to 4 blocks of 16 rows, [unit][2][16 pairs][block][row of the block].
constexpr int kPanelBlocks = 4;
constexpr int kPanelRows = kPanelBlocks * kLanes;

struct Panel {
  uint16_t* x;
  int blocks;
  int64_t row;  // the first
};
Panel panel_of(const Run& run, int64_t panel) {
  const int64_t row = panel * kPanelRows;
  return {run.x + row * units_of(run.problem.weight) * kUnitCols,
          static_cast<int>(std::min<int64_t>(kPanelRows, run.rows - row) / kLanes), row};
}
HALFBYTE_AVX512 void arrange_panel(const Run& run, int64_t panel, int64_t unit) {
  const UnitOrder order(run.problem.codec.bits);
  const auto [x, blocks, first] = panel_of(run, panel);
  for (int block = 0; block < blocks; ++block) {
    __m512i vectors[2][kLanes];
    for (int i = 0; i < kLanes; ++i) {
      __m512i row[2];
      load_unit(run, order, first + block * kLanes + i, unit, row);
      vectors[0][i] = row[0];
      vectors[1][i] = row[1];
    }
    for (int j = 0; j < 2; ++j) {
      transpose(vectors[j]);
      for (int pair = 0; pair < kLanes; ++pair)
        _mm512_store_si512(x + (((unit * 2 + j) * kLanes + pair) * blocks + block) * 32, vectors[j][pair]);
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

// The groups that the columns of a block belong to: two of 32 columns, or one.
struct BlockGroups {
  int num;
  explicit BlockGroups(const formats::PackedLayout& p) : num(p.inlined && p.group < kUnitCols ? 2 : 1) {}

  // Loads the parameters of group `i` of a block. Returns its number if it begins there, else -1.
  HALFBYTE_AVX512 int64_t load(GroupParameters& parameters, const Run& run, int64_t strip, int64_t block,
                               int i) const {
    const formats::PackedLayout& p = run.problem.weight;
    const int64_t group = p.inlined ? block * num + i : p.groups == 1 ? 0 : block * p.block_cols / p.group;
    parameters.load(run.problem, run.tensors, strip, group);
    return group < p.groups && group * p.group >= block * p.block_cols ? group : -1;
  }
};

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

  // `swapped`: of lines 2 and 3 of 4, whose halves are the other way round.
  [[gnu::always_inline]] HALFBYTE_AVX512 void decode(const uint8_t* line, bool swapped,
                                                     __m512i (&values)[2][kVectors]) const {
    __m512i codes = _mm512_loadu_si512(line);
    if (swapped) codes = _mm512_shuffle_i64x2(codes, codes, 0x4E);
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

// Outputs of a strip. The sums of an output are 16 lanes, scaled at the end of a block of the layout.
// kTwoInLanes: blocks are one tile of two groups, the second one of lanes 4 i + 2 and 4 i + 3.
template <int kBits, int kRows, bool kTwoInLanes>
HALFBYTE_AVX512 void multiply_strip(const Run& run, int64_t strip) {
  constexpr int kVectors = LineDecoder<kBits>::kVectors;
  const QgemmProblem& problem = run.problem;
  const formats::PackedLayout& p = problem.weight;
  const LineDecoder<kBits> decoder(problem.codec);
  const BlockGroups block_groups(p);
  const int block_tiles = p.block_code_bytes / formats::kTileBytes;
  const int fold_tiles = block_groups.num == 2 ? 1 : block_tiles;  // that have one scale
  GroupParameters groups[2];
  alignas(64) float totals[kUnitRows][kRows][kLanes] = {};
  alignas(64) float added[kRows][kUnitRows] = {};
  const uint16_t* x = run.x;
  for (int64_t block = 0; block < p.blocks_per_strip; ++block) {
    for (int i = 0; i < block_groups.num; ++i) {
      const int64_t group = block_groups.load(groups[i], run, strip, block, i);
      if (!has_factors(problem) || group < 0) continue;
      for (int row = 0; row < kUnitRows; row += kLanes) {
        const __m512 factor = factors(problem, groups[i], row);
        for (int m = 0; m < kRows; ++m)
          _mm512_store_ps(added[m] + row, _mm512_fmadd_ps(factor, _mm512_set1_ps(run.sums[group * kRows + m]),
                                                          _mm512_load_ps(added[m] + row)));
      }
    }
    const uint8_t* codes =
        static_cast<const uint8_t*>(run.tensors.weight) + strip * p.strip_bytes + block * p.block_bytes;
    for (int at = p.block_code_bytes; at < p.block_bytes; at += 64)
      _mm_prefetch(codes + at + kAhead, _MM_HINT_T1);
    for (int first = 0; first < block_tiles; first += fold_tiles) {
      const uint8_t* const ahead = codes + first * formats::kTileBytes + kAhead;
      const GroupParameters& scales = groups[kTwoInLanes ? 0 : first / fold_tiles];
      for (int quad = 0; quad < kUnitRows / 2; quad += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const int line = quad + i;
          __m512 sums[2][kRows];
          for (int m = 0; m < kRows; ++m) sums[0][m] = sums[1][m] = _mm512_setzero_ps();
          for (int tile = first; tile < first + fold_tiles; ++tile) {
            const uint8_t* const at = codes + tile * formats::kTileBytes + line * 64;
            const uint16_t* const at_x =
                x + (kBits == 4 ? tile * kRows * kUnitCols : tile / 2 * kRows * kUnitCols + tile % 2 * 32);
            __m512i values[2][kVectors];
            _mm_prefetch(ahead + (line * fold_tiles + tile - first) * 64, _MM_HINT_T1);
            decoder.decode(at, (i & 2) != 0, values);
            for (int m = 0; m < kRows; ++m)
              for (int j = 0; j < kVectors; ++j) {
                const __m512i pairs = _mm512_load_si512(at_x + m * kUnitCols + j * 32);
                sums[0][m] = dot(sums[0][m], values[0][j], pairs);
                sums[1][m] = dot(sums[1][m], values[1][j], pairs);
              }
          }
          for (int j = 0; j < 2; ++j) {
            const int row = 2 * line + j;
            __m512 scale = _mm512_set1_ps(scales.scales[row]);
            if (kTwoInLanes)
              scale = _mm512_mask_blend_ps(0xCCCC, scale, _mm512_set1_ps(groups[1].scales[row]));
            for (int m = 0; m < kRows; ++m)
              _mm512_store_ps(totals[row][m],
                              _mm512_fmadd_ps(sums[j][m], scale, _mm512_load_ps(totals[row][m])));
          }
        }
    }
    x += p.block_cols * kRows;
  }
  for (int m = 0; m < problem.m; ++m)
    for (int row = 0; row < kUnitRows && strip * kUnitRows + row < problem.n; row += kLanes)
      store(run, m, strip * kUnitRows + row,
            _mm512_add_ps(sum_each(totals[row][m], kRows * kLanes), _mm512_load_ps(added[m] + row)));
}

using StripFunction = void (*)(const Run&, int64_t);
template <int kBits, bool kTwoInLanes = false>
StripFunction strip_function(int64_t rows) {
  return rows == 1   ? multiply_strip<kBits, 1, kTwoInLanes>
         : rows == 2 ? multiply_strip<kBits, 2, kTwoInLanes>
         : rows == 4 ? multiply_strip<kBits, 4, kTwoInLanes>
                     : multiply_strip<kBits, 8, kTwoInLanes>;
}

// ---- Forward, many rows

constexpr int kChunkUnits = 1;                   // decoded at a time
constexpr int kTaskPanels = 4, kTaskStrips = 4;  // at most
using DecodedUnit = Bf16Tile[2][2];              // [j][i], see weight/bf16_decode.h

// Pairs of a unit that have one scale: in parts [begin, end) of 16 pairs, `runs` times `length` of them, the
// first at `first`, 4 apart.
struct Fold {
  int begin, end;
  int first, runs, length;
};

HALFBYTE_AVX512 inline __m512i broadcast(const uint16_t* pair) {
  int bits = 0;
  std::memcpy(&bits, pair, sizeof bits);
  return _mm512_set1_epi32(bits);
}

// totals[row][block] += scale of the row * products of a unit and a panel. `next` is the unit of a panel that
// comes after x.
template <int kBlocks>
HALFBYTE_AVX512 void multiply_unit(const DecodedUnit& unit, const uint16_t* x, const uint16_t* next,
                                   const Fold& fold, const float* scales, float* totals) {
  constexpr int kRows = kBlocks == 1 ? 16 : kBlocks == 4 ? 4 : 8;
  for (int row = 0; row < kUnitRows; row += kRows) {
    __m512 sums[kRows][kBlocks];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) sums[i][b] = _mm512_setzero_ps();
    const uint16_t* const ahead = next + row / kRows % kBlocks * 32;
    for (int part = fold.begin; part < fold.end; ++part) {
      const uint16_t* const weights = unit[part][row / kTileLines].lines[row % kTileLines];
      for (int run = 0; run < fold.runs; ++run) {
        const int begin = fold.first + 4 * run;
        for (int pair = begin; pair < begin + fold.length; ++pair) {
          const int at = (part * kLanes + pair) * kBlocks * 32;
          _mm_prefetch(ahead + at, _MM_HINT_T0);
          __m512i pairs[kBlocks];
#pragma GCC unroll 4
          for (int b = 0; b < kBlocks; ++b) pairs[b] = _mm512_load_si512(x + at + b * 32);
#pragma GCC unroll 16
          for (int i = 0; i < kRows; ++i) {
            const __m512i weight = broadcast(weights + i * kTileValues + pair * 2);
#pragma GCC unroll 4
            for (int b = 0; b < kBlocks; ++b) sums[i][b] = dot(sums[i][b], weight, pairs[b]);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) {
        float* const total = totals + ((row + i) * kBlocks + b) * kLanes;
        _mm512_store_ps(total,
                        _mm512_fmadd_ps(sums[i][b], _mm512_set1_ps(scales[row + i]), _mm512_load_ps(total)));
      }
  }
}

using UnitFunction = void (*)(const DecodedUnit&, const uint16_t*, const uint16_t*, const Fold&, const float*,
                              float*);
UnitFunction unit_function(int blocks) {
  return blocks == 1   ? multiply_unit<1>
         : blocks == 2 ? multiply_unit<2>
         : blocks == 3 ? multiply_unit<3>
                       : multiply_unit<4>;
}

// totals[row][block] += bias of the row * sums of x over a group.
HALFBYTE_AVX512 void add_biases(const float* biases, const float* sums, int blocks, float* totals) {
  for (int b = 0; b < blocks; ++b) {
    const __m512 x = _mm512_loadu_ps(sums + b * kLanes);
    for (int row = 0; row < kUnitRows; ++row) {
      float* const total = totals + (row * blocks + b) * kLanes;
      _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_set1_ps(biases[row]), x, _mm512_load_ps(total)));
    }
  }
}

// Outputs of a strip and of rows of x, from their totals.
HALFBYTE_AVX512 void store_panel(const Run& run, int64_t strip, const Panel& panel, const float* totals) {
  for (int b = 0; b < panel.blocks; ++b)
    for (int row = 0; row < kUnitRows && strip * kUnitRows + row < run.problem.n; row += kLanes) {
      __m512i lanes[kLanes];
      for (int i = 0; i < kLanes; ++i)
        lanes[i] = _mm512_load_si512(totals + ((row + i) * panel.blocks + b) * kLanes);
      transpose(lanes);
      const int64_t first = panel.row + b * kLanes;
      for (int i = 0; i < kLanes && first + i < run.problem.m; ++i)
        store(run, first + i, strip * kUnitRows + row, _mm512_castsi512_ps(lanes[i]));
    }
}

// Outputs of strips and panels: decoded units are used for all the panels, and a unit of x for all the
// strips.
HALFBYTE_AVX512 void multiply_panels(const Run& run, int64_t first_strip, int num_strips, int64_t first_panel,
                                     int num_panels) {
  const QgemmProblem& problem = run.problem;
  const formats::PackedLayout& p = problem.weight;
  Panel panels[kTaskPanels];
  alignas(64) float totals[kTaskPanels][kTaskStrips][kUnitRows * kPanelBlocks * kLanes];
  for (int i = 0; i < num_panels; ++i) {
    panels[i] = panel_of(run, first_panel + i);
    for (int strip = 0; strip < num_strips; ++strip)
      std::fill_n(totals[i][strip], kUnitRows * panels[i].blocks * kLanes, 0.0F);
  }
  const BlockGroups block_groups(p);
  const int block_units = p.block_cols / kUnitCols;
  UnitDecoder decoder(problem, run.tensors, WeightRounding::code_rounded);
  DecodedUnit decoded[kTaskStrips];
  GroupParameters parameters[kTaskStrips][2];
  int64_t groups[2] = {-1, -1};  // that begin in a unit, else -1
  const int64_t units = units_of(p);
  for (int64_t unit = 0; unit < units; ++unit) {
    const int64_t block = unit / block_units, unit_of_block = unit % block_units;
    for (int i = 0; i < num_strips; ++i) {
      const int64_t strip = first_strip + i;
      decoder.select(strip, unit);
      decoder.prefetch(kAhead);
      decoder.decode<false>(0, kTileLines, decoded[i][0], decoded[i][1]);
      for (int half = 0; half < block_groups.num; ++half) {
        const int64_t group = block_groups.load(parameters[i][half], run, strip, block, half);
        groups[half] = unit_of_block == 0 ? group : -1;
      }
    }
    for (int panel = 0; panel < num_panels; ++panel) {
      const int blocks = panels[panel].blocks;
      const int64_t x_unit = kUnitCols * blocks * kLanes;  // elements
      const uint16_t* const x = panels[panel].x + unit * x_unit;
      const uint16_t* const next =
          panel + 1 < num_panels ? panels[panel + 1].x + unit * x_unit : panels[0].x + (unit + 1) * x_unit;
      const auto multiply = unit_function(blocks);
      for (int i = 0; i < num_strips; ++i)
        for (int half = 0; half < block_groups.num; ++half) {
          const Fold fold = block_groups.num == 1 ? Fold{0, 2, 0, 1, kLanes}
                            : p.bits == 4         ? Fold{0, 2, 2 * half, 4, 2}
                                                  : Fold{half, half + 1, 0, 1, kLanes};
          if (p.has_biases && groups[half] >= 0)
            add_biases(parameters[i][half].biases, run.sums + groups[half] * run.rows + panels[panel].row,
                       blocks, totals[panel][i]);
          multiply(decoded[i], x, next, fold, parameters[i][half].scales, totals[panel][i]);
        }
    }
  }
  for (int panel = 0; panel < num_panels; ++panel)
    for (int i = 0; i < num_strips; ++i) store_panel(run, first_strip + i, panels[panel], totals[panel][i]);
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

// Few rows of x and codes of 4 bits without biases: weights are multiplied as they are looked up, in one
// table of both rows of a pair. kTwoGroups: in a unit, the second one of lanes 4 i + 2 and 4 i + 3.
template <int kRows, bool kTwoGroups>
HALFBYTE_AVX512 void multiply_few(const Run& run, int64_t begin, int64_t end, float* sums) {
  const QgemmProblem& problem = run.problem;
  const formats::PackedLayout& p = problem.weight;
  const formats::Codec& codec = problem.codec;
  const int zero = codec.kind == formats::Kind::integer && !codec.asymmetric ? -codec.q_min : 0;
  alignas(64) float code_values[16];
  for (int code = 0; code < 16; ++code)
    code_values[code] = codec.kind == formats::Kind::table
                            ? formats::bf16_to_f32(formats::to_bf16(codec.book.values[code]))
                            : static_cast<float>(code - zero);
  // Bytes 0 and 1, or 2 and 3, of each word of 4, in words of 2: the rows of a pair.
  const __m512i low = _mm512_set4_epi32(0x0D0D0C0C, 0x09090808, 0x05050404, 0x01010000);
  const __m512i high = _mm512_add_epi8(low, _mm512_set1_epi8(2));
  const __m512i table_of_lane =
      _mm512_or_si512(_mm512_set1_epi32(0x00100000),
                      kTwoGroups ? _mm512_maskz_set1_epi32(0xCCCC, 0x00200020) : _mm512_setzero_si512());
  const __m512 values = _mm512_load_ps(code_values);
  // Of two units in turn, loaded one unit ahead: a single scale cannot be
  // read soon after it was stored with others.
  GroupParameters parameters[2][1 + kTwoGroups];
  const auto load = [&](int64_t strip, int64_t unit, GroupParameters* groups) HALFBYTE_AVX512 {
    const int64_t group = kTwoGroups ? 2 * unit : p.groups == 1 ? 0 : unit * kUnitCols / p.group;
    for (int i = 0; i <= kTwoGroups; ++i) {
      groups[i].load(problem, run.tensors, strip, group + i);
      for (int row = 0; row < kUnitRows; row += kLanes) {
        const auto scales = _mm512_cvtneps_pbh(_mm512_load_ps(groups[i].scales + row));
        _mm512_store_ps(groups[i].scales + row, load_parameters(&scales, formats::ScaleType::bf16));
      }
    }
  };
  load(0, begin, parameters[0]);
  int current = 0;
  for (int64_t strip = 0; strip < p.strips; ++strip) {
    for (int64_t unit = begin; unit < end; ++unit, current ^= 1) {
      const GroupParameters* const groups = parameters[current];
      const bool last = unit + 1 == end;
      if (!last || strip + 1 < p.strips)
        load(last ? strip + 1 : strip, last ? begin : unit + 1, parameters[current ^ 1]);
      const uint8_t* const codes = static_cast<const uint8_t*>(run.tensors.weight) + p.unit(strip, unit);
      const uint16_t* const x = run.x + strip * kUnitRows;
      float* const unit_sums = sums + (unit - begin) * kRows * kUnitCols;
      __m512 s[kRows][4];
      for (int i = 0; i < kRows; ++i)
        for (int c = 0; c < 4; ++c) s[i][c] = _mm512_load_ps(unit_sums + i * kUnitCols + c * kLanes);
      for (int quad = 0; quad < kUnitRows / 2; quad += 4)
#pragma GCC unroll 4
        for (int of_quad = 0; of_quad < 4; ++of_quad) {
          const int line = quad + of_quad;
          _mm_prefetch(codes + p.strip_bytes + line * 64, _MM_HINT_T0);
          __m512i tables[1 + kTwoGroups];
          for (int i = 0; i <= kTwoGroups; ++i) {
            __m512 rows[2] = {values, values};
            for (int j = 0; j < 2; ++j) {
              const int row = 2 * line + j;
              if (codec.asymmetric) rows[j] = _mm512_sub_ps(values, _mm512_set1_ps(groups[i].offsets[row]));
              rows[j] = _mm512_mul_ps(rows[j], _mm512_set1_ps(groups[i].scales[row]));
            }
            tables[i] = __builtin_bit_cast(__m512i, _mm512_cvtne2ps_pbh(rows[1], rows[0]));
          }
          __m512i bytes = _mm512_loadu_si512(codes + line * 64);
          if ((of_quad & 2) != 0) bytes = _mm512_shuffle_i64x2(bytes, bytes, 0x4E);
          for (int c = 0; c < 4; ++c) {  // as transposed_column(c % 2, c / 2, lane) has it
            __m512i index = _mm512_shuffle_epi8(bytes, c < 2 ? low : high);
            if (c % 2 == 1) index = _mm512_srli_epi16(index, 4);
            index = _mm512_ternarylogic_epi32(index, _mm512_set1_epi16(15), table_of_lane, 0xEA);
            const __m512i weights = kTwoGroups
                                        ? _mm512_permutex2var_epi16(tables[0], index, tables[kTwoGroups])
                                        : _mm512_permutexvar_epi16(index, tables[0]);
            for (int i = 0; i < kRows; ++i) {
              int pair = 0;
              std::memcpy(&pair, x + i * run.row_stride + 2 * line, sizeof pair);
              s[i][c] = dot(s[i][c], _mm512_set1_epi32(pair), weights);
            }
          }
        }
      for (int i = 0; i < kRows; ++i)
        for (int c = 0; c < 4; ++c) _mm512_store_ps(unit_sums + i * kUnitCols + c * kLanes, s[i][c]);
    }
  }
}

constexpr int64_t transposed_rows(int64_t m) { return m <= 2 ? m : (m + 3) / 4 * 4; }

// The same of any rows and codes.
HALFBYTE_AVX512 void multiply_decoded(const Run& run, int64_t begin, int64_t end, int64_t row, int num_rows,
                                      float* sums) {
  const QgemmProblem& problem = run.problem;
  const formats::PackedLayout& p = problem.weight;
  const auto* const memory = static_cast<const uint8_t*>(run.tensors.weight);
  const int step = num_rows <= 2 ? num_rows : 4;
  const int batch = num_rows <= kFewRows ? 1 : kStripBatch;
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
        decoder.decode<true>(0, kTileLines, decoded[i][0], decoded[i][1]);
      }
      const auto multiply = step == 1 ? multiply_units<1> : step == 2 ? multiply_units<2> : multiply_units<4>;
      for (int i = 0; i < num_rows; i += step)
        multiply(decoded, num_strips, run.x + (row + i) * run.row_stride + strip * kUnitRows, run.row_stride,
                 sums + ((unit - begin) * num_rows + i) * kUnitCols);
    }
  }
}

// Columns of units [begin, end) of rows [row, row + num_rows) of y.
HALFBYTE_AVX512 void multiply_columns(const Run& run, int64_t begin, int64_t end, int64_t row, int num_rows) {
  const QgemmProblem& problem = run.problem;
  const formats::PackedLayout& p = problem.weight;
  alignas(64) float sums[kTaskUnits * kTaskRows * kUnitCols];  // [unit][row][columns in another order]
  std::fill_n(sums, (end - begin) * num_rows * kUnitCols, 0.0F);
  alignas(64) int places[kUnitCols];  // of columns of a unit in the sums
  if (problem.m <= kFewTransposedRows && p.bits == 4 && !p.has_biases) {
    const bool two_groups = p.inlined && p.group < kUnitCols;
    const auto multiply = num_rows == 1   ? two_groups ? multiply_few<1, true> : multiply_few<1, false>
                            : num_rows == 2 ? two_groups ? multiply_few<2, true> : multiply_few<2, false>
                            : two_groups ? multiply_few<4, true>
                                          : multiply_few<4, false>;
    multiply(run, begin, end, sums);
    for (int i = 0; i < kUnitCols; ++i) places[forward_column(4, i / 16 % 2, i % 16, i / 32)] = i;
  } else {
    multiply_decoded(run, begin, end, row, num_rows, sums);
    for (int i = 0; i < kUnitCols; ++i) places[transposed_column(i / 32, i / 16 % 2, i % 16)] = i;
  }
  for (int i = 0; i < num_rows && row + i < problem.m; ++i)
    for (int64_t col = begin * kUnitCols; col < std::min(problem.k, end * kUnitCols); col += kLanes)
      store(run, row + i, col,
            _mm512_i32gather_ps(_mm512_load_si512(places + col % kUnitCols),
                                sums + ((col / kUnitCols - begin) * num_rows + i) * kUnitCols, 4));
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
    rows_ = m <= kFewRows ? static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(m)))
                          : (m + kLanes - 1) / kLanes * kLanes;
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
      const StripFunction multiply = p.bits == 8               ? strip_function<8>(rows_)
                                     : BlockGroups(p).num == 2 ? strip_function<4, true>(rows_)
                                                               : strip_function<4>(rows_);
      // Strips behind each other: what a thread fetches ahead is its own.
      const int64_t grain = std::clamp<int64_t>(p.strips / (16 * effective_threads(threads)), 1, 8);
      parallel_for(p.strips, grain, threads, [&](int64_t begin, int64_t end, int) {
        for (int64_t strip = begin; strip < end; ++strip) multiply(run, strip);
      });
      return;
    }
    parallel_for(units * panels, 16, threads, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) arrange_panel(run, i / units, i % units);
    });
    const int64_t batches = (panels + kTaskPanels - 1) / kTaskPanels;
    const int64_t step =
        std::clamp<int64_t>(p.strips * batches / (8 * effective_threads(threads)), 1, kTaskStrips);
    const int64_t tasks = (p.strips + step - 1) / step;
    parallel_for(batches * tasks, 1, threads, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t strip = i % tasks * step, panel = i / tasks * kTaskPanels;
        multiply_panels(run, strip, static_cast<int>(std::min<int64_t>(step, p.strips - strip)), panel,
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
