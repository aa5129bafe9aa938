// qgemm_avx512, phase 3: forward, many rows of x. Units are decoded to the cache; rows of x lie across the
// lanes.
#pragma once

#include "ops/qgemm/cpu/avx512/run-inl.h"

namespace halfbyte::avx512 {

// The rows of x in the workspace: panels of up to 4 blocks of 16 rows, [unit][2][16 pairs][block][row of the
// block].
inline constexpr int kPanelBlocks = 4;
inline constexpr int kPanelRows = kPanelBlocks * kLanes;

struct Panel {
  uint16_t* x;
  int blocks;
  int64_t row;  // the first
};
inline Panel panel_of(const Run& run, int64_t panel) {
  const int64_t row = panel * kPanelRows;
  return {run.x + row * units_of(run.problem.weight) * kUnitCols,
          static_cast<int>(std::min<int64_t>(kPanelRows, run.rows - row) / kLanes), row};
}
HALFBYTE_AVX512 inline void arrange_panel(const Run& run, int64_t panel, int64_t unit) {
  const UnitOrder order(run.problem.codec.bits);
  const auto [x, blocks, first] = panel_of(run, panel);
  for (int block = 0; block < blocks; ++block) {
    const int64_t row = first + block * kLanes;
    __m512i pairs[2][kLanes];
    order.load_transposed(unit_of_x(run, row, unit), run.problem.k, run.problem.m - row,
                          run.problem.k - unit * kUnitCols, pairs);
    for (int j = 0; j < 2; ++j)
      for (int pair = 0; pair < kLanes; ++pair)
        _mm512_store_si512(x + (((unit * 2 + j) * kLanes + pair) * blocks + block) * 32, pairs[j][pair]);
  }
}

// Of a task, at most: its totals are 128 KB, its decoded units 16 KB.
inline constexpr int kTaskPanels = 4, kTaskStrips = 4;

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
inline UnitFunction unit_function(int blocks) {
  return blocks == 1   ? multiply_unit<1>
         : blocks == 2 ? multiply_unit<2>
         : blocks == 3 ? multiply_unit<3>
                       : multiply_unit<4>;
}

// totals[row][block] += bias of the row * sums of x over a group.
HALFBYTE_AVX512 inline void add_biases(const float* biases, const float* sums, int blocks, float* totals) {
  for (int b = 0; b < blocks; ++b) {
    const __m512 x = _mm512_loadu_ps(sums + b * kLanes);
    for (int row = 0; row < kUnitRows; ++row) {
      float* const total = totals + (row * blocks + b) * kLanes;
      _mm512_store_ps(total, _mm512_fmadd_ps(_mm512_set1_ps(biases[row]), x, _mm512_load_ps(total)));
    }
  }
}

// Outputs of a strip and of rows of x, from their totals.
HALFBYTE_AVX512 inline void store_panel(const Run& run, int64_t strip, const Panel& panel,
                                        const float* totals) {
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

// Groups of 16 columns are too few for sums of their own: their scales are in the weights.
inline WeightRounding panel_rounding(const QgemmProblem& problem) {
  return BlockGroups(problem.weight).num > 2 ? WeightRounding::weight_rounded : WeightRounding::code_rounded;
}

// Outputs of strips and panels: decoded units are used for all the panels, and a unit of x for all the
// strips.
class PanelTask {
 public:
  HALFBYTE_AVX512 PanelTask(const Run& run, int64_t first_strip, int num_strips, int64_t first_panel,
                            int num_panels)
      : run_(run),
        block_groups_(run.problem.weight),
        scales_weights_(panel_rounding(run.problem) == WeightRounding::weight_rounded),
        folds_(scales_weights_ ? 1 : block_groups_.num),
        decoder_(run.problem, run.tensors, panel_rounding(run.problem)),
        first_strip_(first_strip),
        num_strips_(num_strips),
        num_panels_(num_panels) {
    if (scales_weights_)
      for (auto& parameters : parameters_) std::ranges::fill(parameters[0].scales, 1.0F);
    for (int i = 0; i < num_panels; ++i) {
      panels_[i] = panel_of(run, first_panel + i);
      for (int strip = 0; strip < num_strips; ++strip)
        std::fill_n(totals_[i][strip], kUnitRows * panels_[i].blocks * kLanes, 0.0F);
    }
  }

  HALFBYTE_AVX512 void multiply() {
    const int64_t units = units_of(run_.problem.weight);
    for (int64_t unit = 0; unit < units; ++unit) {
      decode(unit);
      for (int panel = 0; panel < num_panels_; ++panel) multiply(unit, panel);
    }
    for (int panel = 0; panel < num_panels_; ++panel)
      for (int i = 0; i < num_strips_; ++i)
        store_panel(run_, first_strip_ + i, panels_[panel], totals_[panel][i]);
  }

 private:
  // A unit of every strip, and the parameters of its groups.
  HALFBYTE_AVX512 void decode(int64_t unit) {
    const int block_units = run_.problem.weight.block_cols / kUnitCols;
    for (int i = 0; i < num_strips_; ++i) {
      const int64_t strip = first_strip_ + i;
      decoder_.select(strip, unit);
      decoder_.prefetch(kAhead);
      decoder_.decode<false>(0, 4, decoded_[i][0], decoded_[i][1]);
      for (int half = 0; half < folds_ && !scales_weights_; ++half) {
        const int64_t group = block_groups_.load(parameters_[i][half], run_, strip, unit / block_units, half);
        groups_[half] = unit % block_units == 0 ? group : -1;
      }
    }
  }

  Fold fold_of(int half) const {
    if (folds_ == 1) return {0, 2, 0, 1, kLanes};
    return run_.problem.weight.bits == 4 ? Fold{0, 2, 2 * half, 4, 2} : Fold{half, half + 1, 0, 1, kLanes};
  }

  HALFBYTE_AVX512 void multiply(int64_t unit, int number) {
    const Panel& panel = panels_[number];
    const int64_t x_unit = kUnitCols * panel.blocks * kLanes;  // elements
    const uint16_t* const x = panel.x + unit * x_unit;
    const uint16_t* const next =
        number + 1 < num_panels_ ? panels_[number + 1].x + unit * x_unit : panels_[0].x + (unit + 1) * x_unit;
    const auto multiply = unit_function(panel.blocks);
    for (int i = 0; i < num_strips_; ++i)
      for (int half = 0; half < folds_; ++half) {
        if (run_.problem.weight.has_biases && groups_[half] >= 0)
          add_biases(parameters_[i][half].biases, run_.sums + groups_[half] * run_.rows + panel.row,
                     panel.blocks, totals_[number][i]);
        multiply(decoded_[i], x, next, fold_of(half), parameters_[i][half].scales, totals_[number][i]);
      }
  }

  const Run& run_;
  BlockGroups block_groups_;
  const bool scales_weights_;
  const int folds_;  // of a unit: groups whose sums are scaled
  UnitDecoder decoder_;
  const int64_t first_strip_;
  const int num_strips_, num_panels_;
  int64_t groups_[2] = {-1, -1};  // that begin in the unit, else -1
  Panel panels_[kTaskPanels];
  DecodedUnit decoded_[kTaskStrips];
  GroupParameters parameters_[kTaskStrips][2];
  alignas(64) float totals_[kTaskPanels][kTaskStrips][kUnitRows * kPanelBlocks * kLanes];
};

}  // namespace halfbyte::avx512
