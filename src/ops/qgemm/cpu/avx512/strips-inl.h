// qgemm_avx512, phase 2: forward, few rows of x. Codes are looked up in registers and multiplied with x along
// k.
#pragma once

#include "ops/qgemm/cpu/avx512/run-inl.h"

namespace halfbyte::avx512 {

// Rows of x at most: of two rows of the weight their sums are 16 of the 32 registers.
inline constexpr int kFewRows = 8;
// Of m rows, with those of padding. The time grows with them.
constexpr int64_t strip_rows(int64_t m) { return m <= 4 ? m : (m + 1) / 2 * 2; }

// The rows of x in the workspace for few rows: [unit][row][2 vectors].
HALFBYTE_AVX512 inline void arrange_rows(const Run& run, int64_t begin, int64_t end) {
  const UnitOrder order(run.problem.codec.bits);
  for (int64_t unit = begin; unit < end; ++unit)
    for (int64_t row = 0; row < run.rows; ++row) {
      __m512i vectors[2];
      order.load(unit_of_x(run, row, unit), row < run.problem.m ? run.problem.k - unit * kUnitCols : 0,
                 vectors);
      uint16_t* const to = run.x + (unit * run.rows + row) * kUnitCols;
      _mm512_store_si512(to, vectors[0]);
      _mm512_store_si512(to + 32, vectors[1]);
    }
}

// The sum of each of 16 vectors: of vector i in lane i. Not inlined, as store().
[[gnu::noinline]] HALFBYTE_AVX512 inline __m512 sum_each(const float* vectors, int64_t stride) {
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

// Adds it for a group to what outputs of a strip have beside their products.
HALFBYTE_AVX512 inline void add_factors(const Run& run, const GroupParameters& parameters, int64_t group,
                                        int num_rows, float (*added)[kUnitRows]) {
  for (int row = 0; row < kUnitRows; row += kLanes) {
    const __m512 factor = factors(run.problem, parameters, row);
    for (int m = 0; m < num_rows; ++m)
      _mm512_store_ps(added[m] + row, _mm512_fmadd_ps(factor, _mm512_set1_ps(run.sums[group * num_rows + m]),
                                                      _mm512_load_ps(added[m] + row)));
  }
}

inline constexpr int kStreamBits = 0;  // stands for 2, 3, 5 and 6 bits

// Values of the codes of rows 2 * line and 2 * line + 1 of a tile, in the order of x; a tile of 4 bits is a
// unit, others are half of one.
template <int kBits, bool kFloating>
struct LineDecoder {
  static constexpr int kVectors = kBits == 4 ? 2 : 1;  // of a row
  // Values, repeated; of 8 bits: 2^23 plus the code that stands for 0. last: of 6 bits, those from 32 on.
  __m512i table, last;
  StreamWords streams;

  int tile_bytes() const {
    return kBits == kStreamBits ? kUnitRows * streams.half_bytes() : formats::kTileBytes;
  }

  HALFBYTE_AVX512 explicit LineDecoder(const formats::Codec& codec) : streams(codec.bits) {
    const int zero = codec.kind == formats::Kind::integer && !codec.asymmetric ? -codec.q_min : 0;
    if constexpr (kBits != 8) {
      constexpr int kValues = kBits == 4 ? 32 : 64;
      alignas(64) uint16_t values[kValues];
      for (int i = 0; i < kValues; ++i) {
        const int code = i % (1 << codec.bits);
        values[i] = formats::to_bf16(codec.kind == formats::Kind::table ? codec.book.values[code]
                                                                        : static_cast<float>(code - zero));
      }
      table = _mm512_load_si512(values);
      last = _mm512_load_si512(values + kValues - 32);
    } else {
      table = _mm512_castps_si512(_mm512_set1_ps(0x1p23f + static_cast<float>(zero)));
    }
  }

  // `swapped`: of lines 2 and 3 of 4 of fragments, whose halves are the other way round.
  [[gnu::always_inline]] HALFBYTE_AVX512 void decode(const uint8_t* codes_of_block, int tile, int line,
                                                     bool swapped, __m512i (&values)[2][kVectors]) const {
    if constexpr (kBits == kStreamBits) {
      for (int i = 0; i < 2; ++i)
        values[i][0] = _mm512_permutex2var_epi16(
            table,
            streams.load(streams.at(codes_of_block + tile / 2 * 2 * tile_bytes(), 2 * line + i, tile % 2)),
            last);
      return;
    }
    const __m512i codes = load_line(codes_of_block + tile * tile_bytes() + line * 64, swapped);
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

// Of 8 bits that are numbers of E4M3.
template <>
struct LineDecoder<8, true> {
  static constexpr int kVectors = 1;
  E4m3Lookup e4m3;
  __m512i columns[2];  // of a row: where their bytes lie in both vectors

  static constexpr int tile_bytes() { return formats::kTileBytes; }

  HALFBYTE_AVX512 explicit LineDecoder(const formats::Codec&) {
    alignas(64) uint8_t order[2][64];
    for (int row = 0; row < 2; ++row) {
      for (int i = 0; i < 64; ++i)
        order[row][i] = static_cast<uint8_t>(i % 2 * 64 + i / 2 % 16 * 4 + i / 32 + 2 * row);
      columns[row] = _mm512_load_si512(order[row]);
    }
  }

  [[gnu::always_inline]] HALFBYTE_AVX512 void decode(const uint8_t* codes_of_block, int tile, int line,
                                                     bool swapped, __m512i (&values)[2][kVectors]) const {
    __m512i low, high;
    e4m3.look_up(load_line(codes_of_block + tile * tile_bytes() + line * 64, swapped), low, high);
    for (int row = 0; row < 2; ++row) values[row][0] = _mm512_permutex2var_epi8(low, columns[row], high);
  }
};

// The parameters of the groups of a block.
struct BlockParameters {
  GroupParameters groups[4];
  LaneScales lanes;  // of several groups of 4 bits
};

// What is summed for the outputs of a strip: 16 lanes for each, and what groups add beside.
template <int kRows>
struct StripSums {
  alignas(64) float totals[kUnitRows][kRows][kLanes] = {};
  alignas(64) float added[kRows][kUnitRows] = {};

  // Loads the parameters of a block's groups, and adds factors of sums of x where there are any.
  [[gnu::always_inline]] HALFBYTE_AVX512 void begin_block(const Run& run, BlockGroups& block_groups,
                                                          int64_t strip, int64_t block,
                                                          BlockParameters& parameters) {
    const formats::PackedLayout& p = run.problem.weight;
    if (!p.inlined || !has_scales_only(run.problem))
      return load_groups(run, block_groups, strip, block, parameters);
    const uint8_t* const at =
        static_cast<const uint8_t*>(run.tensors.weight) + inlined_parameters(p, strip, block);
    const formats::ScaleType type = run.problem.codec.scale_type;
    if (block_groups.num == 1)
      parameters.groups[0].load_scales(at, p.scale_bytes, type);
    else if (p.bits == 4)
      parameters.lanes.load(at, p.scale_bytes, type, block_groups.num);
    else
      for (int i = 0; i < block_groups.num; ++i)
        parameters.groups[i].load_scales(at + i * kUnitRows * p.scale_bytes, p.scale_bytes, type);
  }
  HALFBYTE_AVX512 void load_groups(const Run& run, BlockGroups& block_groups, int64_t strip, int64_t block,
                                   BlockParameters& parameters) {
    GroupParameters(&groups)[4] = parameters.groups;
    for (int i = 0; i < block_groups.num; ++i) {
      const int64_t group = block_groups.load(groups[i], run, strip, block, i);
      if (has_factors(run.problem) && group >= 0) add_factors(run, groups[i], group, kRows, added);
    }
    if (run.problem.weight.bits == 4 && block_groups.num > 1) parameters.lanes.make(groups, block_groups.num);
  }
  HALFBYTE_AVX512 void finish(const Run& run, int64_t strip) const {
    for (int m = 0; m < run.problem.m; ++m)
      for (int row = 0; row < kUnitRows && strip * kUnitRows + row < run.problem.n; row += kLanes)
        store(run, m, strip * kUnitRows + row,
              _mm512_add_ps(sum_each(totals[row][m], kRows * kLanes), _mm512_load_ps(added[m] + row)));
  }
};

// Where tile `tile` of a block lies in x, for the line of a row.
template <int kBits, int kRows>
constexpr int tile_of_x(int tile) {
  return kBits == 4 ? tile * kRows * kUnitCols : tile / 2 * kRows * kUnitCols + tile % 2 * 32;
}

// The rows of x for the tiles of a block from `first` on. kHeld: for that one, in registers.
template <int kBits, int kRows, bool kHeld>
struct TilesOfX {
  static constexpr int kVectors = kBits == 4 ? 2 : 1;
  const uint16_t* x;                 // of the block
  __m512i held[2][kRows][kVectors];  // [swapped], in the order of the codes of such lines

  [[gnu::always_inline]] HALFBYTE_AVX512 TilesOfX(const uint16_t* x, int first) : x(x) {
    if constexpr (kHeld)
      for (int m = 0; m < kRows; ++m)
        for (int j = 0; j < kVectors; ++j) {
          held[0][m][j] = load(first, m, j);
          // Values of 8 bits have both halves of the codes in each of theirs; streams are not exchanged.
          held[1][m][j] = kBits == kStreamBits
                              ? held[0][m][j]
                              : _mm512_shuffle_i64x2(held[0][m][j], held[0][m][j], kBits == 4 ? 0x4E : 0xB1);
        }
  }
  // swapped: in the order of the codes of such lines, where it is held.
  [[gnu::always_inline]] HALFBYTE_AVX512 __m512i operator()(int tile, int m, int j, bool swapped) const {
    if constexpr (kHeld) return held[swapped][m][j];
    return load(tile, m, j);
  }

 private:
  [[gnu::always_inline]] HALFBYTE_AVX512 __m512i load(int tile, int m, int j) const {
    return _mm512_load_si512(x + tile_of_x<kBits, kRows>(tile) + m * kUnitCols + j * 32);
  }
};

// Adds line `line` of tiles that have one scale, or several in lanes, to the totals of its two rows. ahead:
// where what is fetched meanwhile begins.
template <int kBits, bool kFloating, int kRows, bool kInLanes, bool kHeld>
[[gnu::always_inline]] HALFBYTE_AVX512 inline void multiply_line(
    const LineDecoder<kBits, kFloating>& decoder, const uint8_t* codes, const uint8_t* ahead,
    const TilesOfX<kBits, kRows, kHeld>& x, int line, bool swapped, int first, int num_tiles,
    const BlockParameters& parameters, int group, StripSums<kRows>& to) {
  constexpr int kVectors = LineDecoder<kBits, kFloating>::kVectors, kLines = kUnitRows / 2;
  __m512 sums[2][kRows];
  for (int m = 0; m < kRows; ++m) sums[0][m] = sums[1][m] = _mm512_setzero_ps();
  for (int tile = first; tile < first + (kHeld ? 1 : num_tiles); ++tile) {
    __m512i values[2][kVectors];
    _mm_prefetch(ahead + (line * num_tiles + tile - first) * (decoder.tile_bytes() / kLines), _MM_HINT_T0);
    decoder.decode(codes, tile, line, swapped && !kHeld, values);
    for (int m = 0; m < kRows; ++m)
      for (int j = 0; j < kVectors; ++j) {
        const __m512i pairs = x(tile, m, j, swapped);
        sums[0][m] = dot(sums[0][m], values[0][j], pairs);
        sums[1][m] = dot(sums[1][m], values[1][j], pairs);
      }
  }
  for (int j = 0; j < 2; ++j) {
    const int row = 2 * line + j;
    const __m512 scale =
        kInLanes ? parameters.lanes.of(row) : _mm512_set1_ps(parameters.groups[group].scales[row]);
    for (int m = 0; m < kRows; ++m)
      _mm512_store_ps(to.totals[row][m],
                      _mm512_fmadd_ps(sums[j][m], scale, _mm512_load_ps(to.totals[row][m])));
  }
}

// Outputs of strips [begin, end). The sums of an output are 16 lanes, scaled at the end of a tile or of the
// tiles of a group. kInLanes: blocks are one tile of several groups, each of lanes of its own. kHeld: a tile
// of x stays in registers for all lines. Codes are then read in their order, which takes up to a tenth less
// time from memory than a line of each tile of a group in turn, although sums are scaled more often.
template <int kBits, bool kFloating, int kRows, bool kInLanes, bool kHeld>
HALFBYTE_AVX512 void multiply_strips(const Run& run, int64_t begin, int64_t end) {
  const formats::PackedLayout& p = run.problem.weight;
  const LineDecoder<kBits, kFloating> decoder(run.problem.codec);
  BlockGroups block_groups(p);
  const int block_tiles = p.block_code_bytes / decoder.tile_bytes();
  const int fold_tiles = kHeld || block_groups.num > 1 ? 1 : block_tiles;
  BlockParameters parameters;
  for (int64_t strip = begin; strip < end; ++strip) {
    StripSums<kRows> sums;
    const uint16_t* x = run.x;
    for (int64_t block = 0; block < p.blocks_per_strip; ++block) {
      sums.begin_block(run, block_groups, strip, block, parameters);
      const uint8_t* codes =
          static_cast<const uint8_t*>(run.tensors.weight) + strip * p.strip_bytes + block * p.block_bytes;
      for (int at = p.block_code_bytes; at < p.block_bytes; at += 64)
        _mm_prefetch(codes + at + kAhead, _MM_HINT_T0);
      for (int first = 0; first < block_tiles; first += fold_tiles) {
        const uint8_t* const ahead = codes + first * decoder.tile_bytes() + kAhead;
        const int group = !kInLanes && block_groups.num > 1 ? first : 0;  // then tiles are half a unit
        const TilesOfX<kBits, kRows, kHeld> tiles(x, first);
        for (int quad = 0; quad < kUnitRows / 2; quad += 4)
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i)
            multiply_line<kBits, kFloating, kRows, kInLanes, kHeld>(decoder, codes, ahead, tiles, quad + i,
                                                                    (i & 2) != 0, first, fold_tiles,
                                                                    parameters, group, sums);
      }
      x += p.block_cols * kRows;
    }
    sums.finish(run, strip);
  }
}

using StripsFunction = void (*)(const Run&, int64_t begin, int64_t end);
template <int kBits, bool kFloating, bool kInLanes, bool kHeld>
StripsFunction strips_function(int64_t rows) {
  if (rows == 1) return multiply_strips<kBits, kFloating, 1, kInLanes, kHeld>;
  if constexpr (kBits != 4 || kInLanes) {  // others have lanes for more rows, see has_lane_rows
    if (rows == 3) return multiply_strips<kBits, kFloating, 3, kInLanes, kInLanes>;
    if (rows == 4) return multiply_strips<kBits, kFloating, 4, kInLanes, kInLanes>;
  }
  if constexpr (kBits != 4) {
    if (rows == 6) return multiply_strips<kBits, kFloating, 6, kInLanes, false>;
    if (rows == 8) return multiply_strips<kBits, kFloating, 8, kInLanes, false>;
  }
  return multiply_strips<kBits, kFloating, 2, kInLanes, kHeld>;
}
inline StripsFunction strips_function(const QgemmProblem& problem, int64_t rows) {
  const formats::PackedLayout& p = problem.weight;
  const bool has_several = BlockGroups(p).num > 1;
  if (problem.codec.kind == formats::Kind::floating)
    return has_several ? strips_function<8, true, false, true>(rows)
                       : strips_function<8, true, false, false>(rows);
  if (p.bits == 8)
    return has_several ? strips_function<8, false, false, true>(rows)
                       : strips_function<8, false, false, false>(rows);
  if (p.bits != 4) return strips_function<kStreamBits, false, false, true>(rows);
  return has_several ? strips_function<4, false, true, true>(rows)
                     : strips_function<4, false, false, true>(rows);
}

}  // namespace halfbyte::avx512
