// `qgemm_amx`, forward, few rows of x: the sums of each group are multiplied with its scales.
//
// A column of a tile of sums, [16 rows of the weight][columns], is of a row of x and of one of `slots`
// groups: x is packed to the columns of the group that a pair belongs to, and there are zeros in those of the
// other slots. So groups of a part of a unit have sums of their own, and with one or two rows of x a tile has
// those of several units when it is stored, which takes as long as 16 lines of codes. Zeros add nothing to a
// sum: it is that of the products of its group.
#pragma once

#include <algorithm>

#include "core/arithmetic.h"
#include "cpu/parallel.h"
#include "ops/qgemm/cpu/amx/tiles-inl.h"

namespace halfbyte {

struct FewRowsLayout {
  static constexpr int kMaxColumns = 16, kMaxTiles = 2;  // more tiles of sums would take more than there are

  int64_t units = 0, units_per_group = 0;  // units_per_group: 0 where a unit has several groups
  int groups_per_unit = 1;
  int slots = 1, rows = 1;  // of a tile: groups at once, rows of x
  int64_t m_tiles = 0;
  int64_t tile_units = 0, sum_tiles = 0;  // units whose sums are in a tile at a time; how many times

  explicit FewRowsLayout(const QgemmProblem& problem) {
    const formats::PackedLayout& p = problem.weight;
    units = ceil_div(problem.k, formats::kUnitCols);
    if (p.inlined) groups_per_unit = formats::unit_groups(static_cast<int>(p.group));
    units_per_group = p.groups == 1 && !p.inlined ? units : p.group / formats::kUnitCols;
    slots = groups_per_unit;
    while (rows < problem.m && rows * slots < kMaxColumns) rows *= 2;
    // Four columns at least. Of large groups in one: sums of 8 units at once take a tenth longer from memory.
    while (rows * slots < 4) (units_per_group > 1 ? rows : slots) *= 2;
    m_tiles = ceil_div(problem.m, rows);
    tile_units = groups_per_unit > 1 ? slots / groups_per_unit : slots * units_per_group;
    sum_tiles = ceil_div(units, tile_units);
  }

  bool takes(const QgemmProblem& problem) const { return !problem.transposed && m_tiles <= kMaxTiles; }
  int columns() const { return rows * slots; }
  // In pairs of bf16: a tile of x, [16 pairs][columns]; those of one unit lie beside each other.
  int64_t x_tile_pairs() const { return kTileLines * columns(); }
  int64_t x_tile(int64_t unit, int j, int64_t m_tile) const {
    return ((2 * unit + j) * m_tiles + m_tile) * x_tile_pairs();
  }
  int64_t x_pairs() const { return 2 * units * m_tiles * x_tile_pairs(); }
  int64_t first_group(int64_t unit) const {
    return groups_per_unit > 1 ? unit * groups_per_unit : unit / units_per_group;
  }
};

template <class Tiles>
class FewRows {
 public:
  explicit FewRows(const QgemmProblem& problem)
      : problem_(problem),
        layout_(problem),
        order_(problem.codec.bits),
        columns_(layout_.columns()),
        has_one_table_(UnitDecoder::codes_have_one_table(problem)),
        has_scales_only_(!problem.weight.has_biases && !problem.double_quant) {
    for (int v = 0; v < columns_; ++v)
      for (int lane = 0; lane < kTileLines; ++lane) {
        const int place = v * kTileLines + lane, slot = place % columns_ / layout_.rows;
        rows_[v][lane] = place / columns_ + slot % 2 * kTileLines;
        if (slot >= 2) later_slots_ |= static_cast<uint16_t>(1u << lane);
      }
    if (layout_.groups_per_unit == 1) return;
    for (int j = 0; j < 2; ++j)
      for (int pair = 0; pair < kTileLines; ++pair)
        pair_groups_[j][pair] = static_cast<uint8_t>(forward_column(problem.codec.bits, j, pair, 0) /
                                                     static_cast<int>(problem.weight.group));
  }

  bool taken() const { return layout_.takes(problem_); }
  int64_t workspace_bytes() const { return 4 * layout_.x_pairs() + sums_bytes(); }

  void run(const QgemmTensors& tensors, uint8_t* workspace, int num_threads) const {
    auto* const x = reinterpret_cast<uint32_t*>(workspace);
    auto* const x_sums = reinterpret_cast<float*>(x + layout_.x_pairs());
    const int threads = problem_.num_threads;
    parallel_for(layout_.units, 32, threads, [&](int64_t first, int64_t last, int) {
      for (int64_t unit = first; unit < last; ++unit)
        for (int64_t m = 0; m < layout_.m_tiles; ++m) pack(tensors, unit, m, x);
    });
    if (problem_.weight.has_biases)
      parallel_for(layout_.sum_tiles, 16, threads, [&](int64_t first, int64_t last, int) {
        for (int64_t tile = first; tile < last; ++tile)
          for (int64_t m = 0; m < layout_.m_tiles; ++m) sum_x(x, tile, m, sums_of(x_sums, tile, m));
      });
    // Runs of strips, which lie one behind the other: fewer starts without anything in the cache.
    const int64_t grain = std::max<int64_t>(1, problem_.weight.strips / (8 * num_threads));
    parallel_for(problem_.weight.strips, grain, threads, [&](int64_t first, int64_t last, int) {
      const auto multiply = [&]<int kMTiles>() {
        has_one_table_ ? multiply_strips<kMTiles, true>(tensors, x, x_sums, first, last)
                       : multiply_strips<kMTiles, false>(tensors, x, x_sums, first, last);
      };
      layout_.m_tiles == 1 ? multiply.template operator()<1>() : multiply.template operator()<2>();
    });
  }

 private:
  static constexpr int64_t kPrefetchBytes = 8192;      // ahead of the decoder
  static constexpr int kXTile = 2, kWeightTile = 3;    // with the next one; sums: 0 and 1
  static constexpr int kSecondSums = 5, kSecondX = 7;  // of the second tile of x

  int64_t sums_bytes() const {
    return problem_.weight.has_biases ? layout_.sum_tiles * layout_.m_tiles * 64 : 0;
  }
  template <class Float>
  Float* sums_of(Float* x_sums, int64_t tile, int64_t m_tile) const {
    return x_sums + (tile * layout_.m_tiles + m_tile) * kTileLines;
  }

  HALFBYTE_AVX512 void pack(const QgemmTensors& tensors, int64_t unit, int64_t m_tile, uint32_t* x) const {
    const int64_t row = m_tile * layout_.rows, col = unit * formats::kUnitCols;
    __m512i pairs[2][kTileLines];
    order_.load_transposed(row_of_x(problem_, tensors, row) + col, problem_.k,
                           std::min<int64_t>(layout_.rows, problem_.m - row), problem_.k - col, pairs);
    const auto first_group = static_cast<int>(layout_.first_group(unit) % layout_.slots);
    for (int j = 0; j < 2; ++j) {
      uint32_t* const tile = x + layout_.x_tile(unit, j, m_tile);
      std::fill_n(tile, layout_.x_tile_pairs(), 0);
      for (int pair = 0; pair < kTileLines; ++pair) {
        const int slot = (first_group + pair_groups_[j][pair]) & (layout_.slots - 1);
        _mm512_mask_storeu_epi32(tile + pair * columns_ + slot * layout_.rows, first_lanes(layout_.rows),
                                 pairs[j][pair]);
      }
    }
  }

  // The sums of x over what is summed in a tile, for each lane of columns.
  HALFBYTE_AVX512 void sum_x(const uint32_t* x, int64_t tile, int64_t m_tile, float* sums) const {
    const int64_t begin = tile * layout_.tile_units,
                  end = std::min(begin + layout_.tile_units, layout_.units);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t unit = begin; unit < end; ++unit)
      for (int j = 0; j < 2; ++j)
        for (int at = 0; at < columns_; ++at) {
          const __m512i pairs = _mm512_loadu_si512(x + layout_.x_tile(unit, j, m_tile) + at * kTileLines);
          sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
          sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(-65536))));
        }
    if (columns_ <= 8) sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0x4E));
    if (columns_ <= 4) sum = _mm512_add_ps(sum, _mm512_shuffle_f32x4(sum, sum, 0xB1));
    _mm512_storeu_ps(sums, sum);
  }

  // Sums of [16 rows of the weight][columns], of both tiles of a strip.
  struct alignas(64) Sums {
    float of[2][kTileLines * FewRowsLayout::kMaxColumns];
  };

  // kOneTable: UnitDecoder::codes_have_one_table().
  template <int kMTiles, bool kOneTable>
  HALFBYTE_AVX512 void multiply_strips(const QgemmTensors& tensors, const uint32_t* x, const float* x_sums,
                                       int64_t first_strip, int64_t last_strip) const {
    Tiles tiles(4 * columns_);
    UnitDecoder decoder(problem_, tensors, WeightRounding::code_rounded);
    GroupParameters groups[4];  // of the slots
    Bf16Tile weights[2][2][2];  // [the one that is multiplied, the next, by turns][j][i]
    int now = 0;
    decoder.select(first_strip, 0);
    decoder.template decode<false>(0, 4, weights[0][0], weights[0][1]);
    for (int64_t strip = first_strip; strip < last_strip; ++strip) {
      Sums totals[kMTiles] = {};
      Sums sums[2][kMTiles];  // by turns; added a tile later, when they have arrived
      int64_t tile = 0, unit_of_tile = 0;
      for (int64_t unit = 0; unit < layout_.units; ++unit, now ^= 1) {
        const bool is_last = unit + 1 == layout_.units, has_next = !is_last || strip + 1 < last_strip;
        const bool begins = unit_of_tile == 0, ends = ++unit_of_tile == layout_.tile_units || is_last;
        if (has_next) decoder.select(strip + is_last, is_last ? 0 : unit + 1);
        if (begins) zero_sums<kMTiles>(tiles);
        const uint32_t* const x_of_unit = x + layout_.x_tile(unit, 0, 0);
        if (!kOneTable && has_next) {
          decoder.prefetch(kPrefetchBytes);
          decoder.template decode<false>(0, 4, weights[now ^ 1][0], weights[now ^ 1][1]);
        }
        const auto step = [&]<int kStep>() HALFBYTE_AVX512 {
          product<kMTiles, kStep / 2, kStep % 2>(tiles, x_of_unit, weights[now]);
          if (!kOneTable || !has_next) return;
          decoder.prefetch(kPrefetchBytes, kStep, 4);
          decoder.decode_by_one_table(kStep, weights[now ^ 1][0], weights[now ^ 1][1]);
        };
        step.template operator()<0>();
        step.template operator()<1>();
        step.template operator()<2>();
        step.template operator()<3>();
        if (!ends) continue;
        store_sums<kMTiles>(tiles, sums[tile % 2]);
        if (tile > 0) add<kMTiles>(tensors, strip, tile - 1, sums[(tile - 1) % 2], x_sums, groups, totals);
        ++tile;
        unit_of_tile = 0;
      }
      add<kMTiles>(tensors, strip, tile - 1, sums[(tile - 1) % 2], x_sums, groups, totals);
      for (int m = 0; m < kMTiles; ++m) finish(tensors, totals[m], m, strip);
    }
  }

  template <int kMTiles>
  static void zero_sums(Tiles& tiles) {
    tiles.template zero<0>();
    tiles.template zero<1>();
    if constexpr (kMTiles == 2) {
      tiles.template zero<kSecondSums>();
      tiles.template zero<kSecondSums + 1>();
    }
  }
  template <int kMTiles, int kJ, int kI>
  void product(Tiles& tiles, const uint32_t* x, const Bf16Tile (&weights)[2][2]) const {
    const uint32_t* const x_tile = x + kJ * kMTiles * layout_.x_tile_pairs();
    if constexpr (kI == 0) tiles.template load_columns<kXTile>(x_tile);
    tiles.template load<kWeightTile + kI>(weights[kJ][kI]);
    tiles.template multiply<kI, kWeightTile + kI, kXTile>();
    if constexpr (kMTiles == 2) {
      if constexpr (kI == 0) tiles.template load_columns<kSecondX>(x_tile + layout_.x_tile_pairs());
      tiles.template multiply<kSecondSums + kI, kWeightTile + kI, kSecondX>();
    }
  }
  template <int kMTiles>
  static void store_sums(Tiles& tiles, Sums (&to)[kMTiles]) {
    tiles.template store_columns<0>(to[0].of[0]);
    tiles.template store_columns<1>(to[0].of[1]);
    if constexpr (kMTiles == 2) {
      tiles.template store_columns<kSecondSums>(to[1].of[0]);
      tiles.template store_columns<kSecondSums + 1>(to[1].of[1]);
    }
  }

  // totals += sums of the groups of a tile times their scales, and their biases times the sums of x.
  template <int kMTiles>
  HALFBYTE_AVX512 void add(const QgemmTensors& tensors, int64_t strip, int64_t tile,
                           const Sums (&sums)[kMTiles], const float* x_sums, GroupParameters (&groups)[4],
                           Sums (&totals)[kMTiles]) const {
    const int64_t first = tile * layout_.slots;
    for (int slot = 0; slot < layout_.slots; ++slot)
      if (first + slot >= problem_.weight.groups)
        groups[slot] = {};
      else if (has_scales_only_)
        groups[slot].load_scales(static_cast<const uint8_t*>(tensors.weight) +
                                     GroupPlaces(problem_.weight, strip, first + slot).scales,
                                 problem_.weight.scale_bytes, problem_.codec.scale_type);
      else
        groups[slot].load(problem_, tensors, strip, first + slot);
    for (int m = 0; m < kMTiles; ++m) {
      if (problem_.weight.has_biases)
        add_groups<true>(groups, sums[m], sums_of(x_sums, tile, m), totals[m]);
      else
        add_groups<false>(groups, sums[m], nullptr, totals[m]);
    }
  }
  template <bool kBiases>
  HALFBYTE_AVX512 void add_groups(const GroupParameters (&groups)[4], const Sums& sums, const float* x_sums,
                                  Sums& totals) const {
    if (columns_ == FewRowsLayout::kMaxColumns && layout_.slots == 1)
      return add_vectors<kBiases>(sums, x_sums, totals, kTileLines,
                                  [&](auto values, int i, int v) HALFBYTE_AVX512 {
                                    return _mm512_set1_ps((groups[0].*values)[i * kTileLines + v]);
                                  });
    if (layout_.slots == 1)
      return add_vectors<kBiases>(
          sums, x_sums, totals, columns_, [&](auto values, int i, int v) HALFBYTE_AVX512 {
            return _mm512_permutexvar_ps(_mm512_load_si512(rows_[v]), load(groups[0].*values, i));
          });
    add_vectors<kBiases>(sums, x_sums, totals, columns_, [&](auto values, int i, int v) HALFBYTE_AVX512 {
      const __m512i rows = _mm512_load_si512(rows_[v]);
      const __m512 two = _mm512_permutex2var_ps(load(groups[0].*values, i), rows, load(groups[1].*values, i));
      if (layout_.slots == 2) return two;
      return _mm512_mask_mov_ps(
          two, later_slots_,
          _mm512_permutex2var_ps(load(groups[2].*values, i), rows, load(groups[3].*values, i)));
    });
  }
  [[gnu::always_inline]] HALFBYTE_AVX512 static __m512 load(const float (&values)[formats::kUnitRows],
                                                            int i) {
    return _mm512_load_ps(values + i * kTileLines);
  }
  // of_rows: what rows of tile i have for the lanes of vector v of its sums.
  template <bool kBiases, class OfRows>
  [[gnu::always_inline]] HALFBYTE_AVX512 static void add_vectors(const Sums& sums, const float* x_sums,
                                                                 Sums& totals, int num_vectors,
                                                                 const OfRows& of_rows) {
    const __m512 x_sum = kBiases ? _mm512_loadu_ps(x_sums) : _mm512_setzero_ps();
    for (int i = 0; i < 2; ++i)
      for (int v = 0; v < num_vectors; ++v) {
        float* const to = totals.of[i] + v * kTileLines;
        __m512 total = _mm512_fmadd_ps(_mm512_load_ps(sums.of[i] + v * kTileLines),
                                       of_rows(&GroupParameters::scales, i, v), _mm512_load_ps(to));
        if (kBiases) total = _mm512_fmadd_ps(x_sum, of_rows(&GroupParameters::biases, i, v), total);
        _mm512_store_ps(to, total);
      }
  }

  // y of a strip, from the totals of all slots.
  HALFBYTE_AVX512 void finish(const QgemmTensors& tensors, const Sums& totals, int64_t m_tile,
                              int64_t strip) const {
    const float factor = global_factor(problem_, tensors);
    const int64_t first_row = m_tile * layout_.rows;
    const __m512i rows = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(columns_));
    for (int m = 0; m < layout_.rows && first_row + m < problem_.m; ++m)
      for (int i = 0; i < 2; ++i) {
        __m512 sum = _mm512_setzero_ps();
        for (int slot = 0; slot < layout_.slots; ++slot)
          sum = _mm512_add_ps(sum, _mm512_i32gather_ps(rows, totals.of[i] + slot * layout_.rows + m, 4));
        store_outputs(problem_, tensors, factor, first_row + m, strip * formats::kUnitRows + i * kTileLines,
                      sum);
      }
  }

  const QgemmProblem& problem_;
  const FewRowsLayout layout_;
  const UnitOrder order_;
  const int columns_;
  const bool has_one_table_, has_scales_only_;
  // Of the lanes of vector v of a tile of sums: the row, and 16 more in slots 1 and 3; which are in slots 2
  // and 3.
  alignas(64) int32_t rows_[FewRowsLayout::kMaxColumns][kTileLines];
  uint16_t later_slots_ = 0;
  uint8_t pair_groups_[2][kTileLines] = {};  // of a unit: the group of each pair of columns
};

}  // namespace halfbyte
