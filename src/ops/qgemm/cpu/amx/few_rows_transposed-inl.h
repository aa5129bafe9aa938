// `qgemm_amx`, transposed, up to 16 rows of x: the sums of the 64 columns of a unit are four tiles, one chain
// of products each through all rows of the weight. Units side by side take turns, of some strips each, so
// that a thread reads more of what lies together, and x of one unit's scales is there for the next one.
//
// Up to 5 rows x is multiplied with the scales of a group, and codes are decoded by one table. Every row of
// the weight has a scale of its own in the sum, and a table of scaled values for each takes longer than all
// else. x of 32 rows times their scales for the columns of a unit, in f32, is split into three bf16, which
// hold its 24 bits: parts are lines of the tile of x, of which few rows leave most unused.
#pragma once

#include <algorithm>

#include "core/arithmetic.h"
#include "cpu/parallel.h"
#include "ops/qgemm/cpu/amx/tiles-inl.h"

namespace halfbyte {

// Sums of the 64 columns of a unit: of each 32 columns two tiles, whose lines are rows of x.
struct UnitSums {
  F32Tile of[2][2];
};

template <class Tiles>
class FewRowsTransposed {
 public:
  static constexpr int kParts = 3;

  explicit FewRowsTransposed(const QgemmProblem& problem)
      : problem_(problem),
        units_(ceil_div(problem.k, formats::kUnitCols)),
        units_per_group_(problem.weight.groups == 1 && !problem.weight.inlined
                             ? units_
                             : problem.weight.group / formats::kUnitCols) {}

  bool taken() const { return problem_.transposed && problem_.m <= kTileLines; }
  // Whether x is multiplied with scales: those of groups of one unit or more. Of fewer products, to round
  // three sums would take more than the bound of a product has for them.
  bool scales_x() const {
    return taken() && problem_.m <= kTileLines / kParts && problem_.n >= kParts && units_per_group_ > 0 &&
           !problem_.weight.has_biases && UnitDecoder::codes_have_one_table(problem_);
  }
  int64_t workspace_bytes() const {
    return problem_.weight.strips * (scales_x() ? problem_.m * formats::kUnitRows * int64_t{sizeof(float)}
                                                : int64_t{sizeof(Bf16Tile)});
  }

  // store(unit, sums): of the rows of x.
  template <class Store>
  void run(const QgemmTensors& tensors, uint8_t* workspace, int num_threads, const Store& store) const {
    scales_x() ? run<true>(tensors, reinterpret_cast<float*>(workspace), num_threads, store)
               : run<false>(tensors, reinterpret_cast<Bf16Tile*>(workspace), num_threads, store);
  }

 private:
  static constexpr int kX = 6, kWeight = 4;  // with the next one; sums: 0 to 3
  // That take turns, and after how many strips, which are prefetched ahead. 4096x4096, 4 rows: 1 and 8 units
  // take 1.12 and 0.97 times as long with groups of 128 columns, 1.0 times with 64; 16 strips 1.1 times.
  static constexpr int64_t kUnits = 4, kStrips = 4;

  template <bool kScalesX, class X, class Store>
  void run(const QgemmTensors& tensors, X* x, int num_threads, const Store& store) const {
    parallel_for(problem_.weight.strips, 256, problem_.num_threads, [&](int64_t first, int64_t last, int) {
      for (int64_t strip = first; strip < last; ++strip) pack(tensors, strip, x);
    });
    const int64_t grain = std::max<int64_t>(1, units_ / (8 * num_threads));
    parallel_for(units_, grain, problem_.num_threads, [&](int64_t first, int64_t last, int) {
      for (int64_t unit = first; unit < last; unit += kUnits) {
        UnitSums sums[kUnits];
        const int64_t num_units = std::min(kUnits, last - unit);
        multiply_units<kScalesX>(tensors, x, unit, num_units, sums);
        for (int64_t i = 0; i < num_units; ++i) store(unit + i, sums[i]);
      }
    });
  }

  HALFBYTE_AVX512 void pack(const QgemmTensors& tensors, int64_t strip, Bf16Tile* x) const {
    pack_rows(problem_, tensors, 0, strip, x[strip]);
  }
  // [strip][row of x][32], zeros beyond its columns.
  HALFBYTE_AVX512 void pack(const QgemmTensors& tensors, int64_t strip, float* x) const {
    const int64_t col = strip * formats::kUnitRows, cols = problem_.in_cols();
    for (int64_t row = 0; row < problem_.m; ++row)
      for (int64_t i = 0; i < formats::kUnitRows; i += kTileLines)
        _mm512_storeu_ps(x + (strip * problem_.m + row) * formats::kUnitRows + i,
                         load_bf16(row_of_x(problem_, tensors, row) + col + i, first_lanes(cols - col - i)));
  }

  HALFBYTE_AVX512 static __m512 as_f32(__m256i values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
  }
  // x of a strip times its scales, as lines of kParts bf16: part, then row of x. Of what is not finite, the
  // first part alone.
  HALFBYTE_AVX512 void scale(const QgemmTensors& tensors, const float* x, int64_t strip, int64_t group,
                             Bf16Tile& to) const {
    constexpr int kNotFinite = 0x99;  // NaN and infinity
    GroupParameters parameters;
    if (problem_.double_quant)
      parameters.load(problem_, tensors, strip, group);
    else
      parameters.load_scales(
          static_cast<const uint8_t*>(tensors.weight) + GroupPlaces(problem_.weight, strip, group).scales,
          problem_.weight.scale_bytes, problem_.codec.scale_type);
    x += strip * problem_.m * formats::kUnitRows;
    const float* const scales = parameters.scales;
    const __m512 first = _mm512_load_ps(scales), second = _mm512_load_ps(scales + kTileLines);
    for (int64_t row = 0; row < problem_.m; ++row) {
      __m512 low = _mm512_mul_ps(_mm512_loadu_ps(x + row * formats::kUnitRows), first);
      __m512 high = _mm512_mul_ps(_mm512_loadu_ps(x + row * formats::kUnitRows + kTileLines), second);
      __mmask16 low_is_finite = 0, high_is_finite = 0;
#pragma GCC unroll 3
      for (int part = 0; part < kParts; ++part) {
        const auto line = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        _mm512_store_si512(to.lines[part * problem_.m + row], line);
        const __m512 low_part = as_f32(_mm512_castsi512_si256(line)),
                     high_part = as_f32(_mm512_extracti64x4_epi64(line, 1));
        if (part == 0) {
          low_is_finite = _knot_mask16(_mm512_fpclass_ps_mask(low_part, kNotFinite));
          high_is_finite = _knot_mask16(_mm512_fpclass_ps_mask(high_part, kNotFinite));
        }
        low = _mm512_maskz_sub_ps(low_is_finite, low, low_part);
        high = _mm512_maskz_sub_ps(high_is_finite, high, high_part);
      }
    }
  }

  // The turns of units, strip by strip.
  struct Turn {
    int64_t num_units, num_strips;
    int64_t unit = 0, strip = 0, first = 0;  // unit: of those; first: strip of the turn

    int64_t last() const { return std::min(first + kStrips, num_strips); }
    void advance() {
      if (++strip < last()) return;
      if (++unit == num_units) unit = 0, first = last();
      strip = first;
    }
  };

  template <bool kScalesX, class X>
  HALFBYTE_AVX512 void multiply_units(const QgemmTensors& tensors, const X* x, int64_t first_unit,
                                      int64_t num_units, UnitSums* sums) const {
    Tiles tiles;
    UnitDecoder decoder(problem_, tensors,
                        kScalesX ? WeightRounding::code_rounded : WeightRounding::weight_rounded);
    Bf16Tile weights[2][2][2];  // [the one that is multiplied, the next, by turns]
    Bf16Tile scaled[kScalesX ? kStrips : 1] = {};
    const auto begin = [&](const Turn& turn) HALFBYTE_AVX512 {
      const int64_t unit = first_unit + turn.unit;
      decoder.select(turn.strip, unit);
      decoder.prefetch(kStrips * problem_.weight.strip_bytes);
      if constexpr (kScalesX) {
        const int64_t group = unit / units_per_group_;
        if (turn.unit == 0 || (unit - 1) / units_per_group_ != group)
          scale(tensors, x, turn.strip, group, scaled[turn.strip % kStrips]);
      }
    };
    Turn turn{num_units, problem_.weight.strips}, next = turn;
    begin(turn);
    decoder.template decode<true>(0, 4, weights[0][0], weights[0][1]);
    for (int now = 0; turn.strip < turn.num_strips; turn = next, now ^= 1) {
      auto& of = sums[turn.unit].of;
      if (turn.strip == 0) {
        tiles.template zero<0>();
        tiles.template zero<1>();
        tiles.template zero<2>();
        tiles.template zero<3>();
      } else if (turn.strip == turn.first && num_units > 1) {
        tiles.template load<0>(of[0][0]);
        tiles.template load<1>(of[0][1]);
        tiles.template load<2>(of[1][0]);
        tiles.template load<3>(of[1][1]);
      }
      if constexpr (kScalesX)
        tiles.template load<kX>(scaled[turn.strip % kStrips]);
      else
        tiles.template load<kX>(x[turn.strip]);
      next.advance();
      const bool has_next = next.strip < next.num_strips;
      if (has_next) begin(next);
      const auto step = [&]<int kStep>() HALFBYTE_AVX512 {
        tiles.template load<kWeight + kStep % 2>(weights[now][kStep / 2][kStep % 2]);
        tiles.template multiply<kStep, kX, kWeight + kStep % 2>();
        if (has_next)
          decoder.template decode<true>(kStep, kStep + 1, weights[now ^ 1][0], weights[now ^ 1][1]);
      };
      step.template operator()<0>();
      step.template operator()<1>();
      step.template operator()<2>();
      step.template operator()<3>();
      if (!has_next || next.unit != turn.unit) {
        tiles.template store<0>(of[0][0]);
        tiles.template store<1>(of[0][1]);
        tiles.template store<2>(of[1][0]);
        tiles.template store<3>(of[1][1]);
      }
    }
    if constexpr (kScalesX)
      for (int64_t i = 0; i < num_units; ++i) add_parts(sums[i]);
  }
  HALFBYTE_AVX512 void add_parts(UnitSums& sums) const {
    for (auto& pair : sums.of)
      for (F32Tile& tile : pair)
        for (int64_t row = 0; row < problem_.m; ++row) {
          __m512 sum = _mm512_load_ps(tile.lines[(kParts - 1) * problem_.m + row]);
          for (int part = kParts - 2; part >= 0; --part)
            sum = _mm512_add_ps(sum, _mm512_load_ps(tile.lines[part * problem_.m + row]));
          _mm512_store_ps(tile.lines[row], sum);
        }
  }

  const QgemmProblem& problem_;
  const int64_t units_, units_per_group_;  // units_per_group: 0 where a unit has several groups
};

}  // namespace halfbyte
