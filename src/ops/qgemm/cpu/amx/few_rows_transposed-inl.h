// `qgemm_amx`, transposed, few rows of x: x is multiplied with the scales of a group, codes are decoded by
// one table.
//
// Transposed, every row of the weight has a scale of its own in the sum, so that a table of scaled values for
// each takes longer than all else. Here x of 32 rows is multiplied with their scales for the columns of a
// unit, in f32, and split into three bf16, which hold its 24 bits: parts are lines of the tile of x, of which
// few rows leave most unused. Products of four tiles of columns add to the same sums through all rows of the
// weight.
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
  static constexpr int kParts = 3, kMaxRows = kTileLines / kParts;

  explicit FewRowsTransposed(const QgemmProblem& problem)
      : problem_(problem),
        units_(ceil_div(problem.k, formats::kUnitCols)),
        units_per_group_(problem.weight.groups == 1 && !problem.weight.inlined
                             ? units_
                             : problem.weight.group / formats::kUnitCols) {}

  // Groups are of one unit or more. Of fewer products, to round three sums would take more than the bound of
  // a product has for them.
  bool taken() const {
    return problem_.transposed && problem_.m <= kMaxRows && problem_.n >= kParts && units_per_group_ > 0 &&
           !problem_.weight.has_biases && UnitDecoder::codes_have_one_table(problem_);
  }
  int64_t workspace_bytes() const {
    return problem_.weight.strips * problem_.m * formats::kUnitRows * int64_t{sizeof(float)};
  }

  // store(unit, sums): of the rows of x.
  template <class Store>
  void run(const QgemmTensors& tensors, uint8_t* workspace, int num_threads, const Store& store) const {
    auto* const x = reinterpret_cast<float*>(workspace);
    parallel_for(problem_.weight.strips, 256, problem_.num_threads, [&](int64_t first, int64_t last, int) {
      for (int64_t strip = first; strip < last; ++strip) pack(tensors, strip, x);
    });
    const int64_t grain = std::max<int64_t>(1, units_ / (8 * num_threads));
    parallel_for(units_, grain, problem_.num_threads, [&](int64_t first, int64_t last, int) {
      for (int64_t unit = first; unit < last; ++unit) {
        UnitSums sums;
        multiply_unit(tensors, x, unit, sums);
        store(unit, sums);
      }
    });
  }

 private:
  static constexpr int kX = 6, kWeight = 4;      // with the next one; sums: 0 to 3
  static constexpr int64_t kPrefetchStrips = 8;  // ahead of the decoder

  // [strip][row of x][32], zeros beyond its columns.
  HALFBYTE_AVX512 void pack(const QgemmTensors& tensors, int64_t strip, float* x) const {
    const int64_t col = strip * formats::kUnitRows, cols = problem_.in_cols();
    for (int64_t row = 0; row < problem_.m; ++row)
      for (int64_t i = 0; i < formats::kUnitRows; i += kTileLines)
        _mm512_storeu_ps(x + (strip * problem_.m + row) * formats::kUnitRows + i,
                         load_bf16(static_cast<const uint16_t*>(tensors.x) + row * cols + col + i,
                                   first_lanes(cols - col - i)));
  }

  HALFBYTE_AVX512 static __m512 as_f32(__m256i values) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
  }
  // x of a strip times its scales, as lines of kParts bf16: part, then row of x. Of what is not finite, the
  // first part alone.
  HALFBYTE_AVX512 void scale(const float* x, const float* scales, Bf16Tile& to) const {
    constexpr int kNotFinite = 0x99;  // NaN and infinity
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

  HALFBYTE_AVX512 void multiply_unit(const QgemmTensors& tensors, const float* x, int64_t unit,
                                     UnitSums& sums) const {
    Tiles tiles;
    UnitDecoder decoder(problem_, tensors, WeightRounding::code_rounded);
    GroupParameters parameters;
    Bf16Tile weights[2][2][2];  // [the one that is multiplied, the next, by turns]
    Bf16Tile scaled[2] = {};
    const int64_t group = unit / units_per_group_, strips = problem_.weight.strips;
    const auto begin = [&](int64_t strip, int to) HALFBYTE_AVX512 {
      decoder.select(strip, unit);
      decoder.prefetch(kPrefetchStrips * problem_.weight.strip_bytes);
      if (problem_.double_quant)
        parameters.load(problem_, tensors, strip, group);
      else
        parameters.load_scales(
            static_cast<const uint8_t*>(tensors.weight) + GroupPlaces(problem_.weight, strip, group).scales,
            problem_.weight.scale_bytes, problem_.codec.scale_type);
      scale(x + strip * problem_.m * formats::kUnitRows, parameters.scales, scaled[to]);
    };
    begin(0, 0);
    decoder.template decode<true>(0, 4, weights[0][0], weights[0][1]);
    tiles.template zero<0>();
    tiles.template zero<1>();
    tiles.template zero<2>();
    tiles.template zero<3>();
    for (int64_t strip = 0, now = 0; strip < strips; ++strip, now ^= 1) {
      const bool has_next = strip + 1 < strips;
      const int64_t next = now ^ 1;
      if (has_next) begin(strip + 1, static_cast<int>(next));
      tiles.template load<kX>(scaled[now]);
      const auto step = [&]<int kStep>() HALFBYTE_AVX512 {
        tiles.template load<kWeight + kStep % 2>(weights[now][kStep / 2][kStep % 2]);
        tiles.template multiply<kStep, kX, kWeight + kStep % 2>();
        if (has_next) decoder.template decode<true>(kStep, kStep + 1, weights[next][0], weights[next][1]);
      };
      step.template operator()<0>();
      step.template operator()<1>();
      step.template operator()<2>();
      step.template operator()<3>();
    }
    tiles.template store<0>(sums.of[0][0]);
    tiles.template store<1>(sums.of[0][1]);
    tiles.template store<2>(sums.of[1][0]);
    tiles.template store<3>(sums.of[1][1]);
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
