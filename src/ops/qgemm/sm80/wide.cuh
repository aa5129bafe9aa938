// qgemm_sm80, phase 3 for many tokens: a loop over steps that loads and decodes ahead of what it multiplies.
#pragma once

#include "ops/qgemm/sm80/fragments.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

// Fragments of the weight for the two tiles of 16 features of a warp, 16 of a step at a time. They have two
// parts, which differ in the features or, transposed, in what is summed.
class WideWeight {
 public:
  __device__ __forceinline__ WideWeight(int warp, const Lane& lane) : warp_(warp), lane_(lane) {
    const int unit = kTransposed ? warp / 2 : warp;
    const int slot = kTransposed ? packed_slot(lane.t, lane.g % 4) : packed_slot(lane.g, lane.t);
    place_ = unit * kUnitBytes + slot * 16;
    if (kTransposed) place_ += warp % 2 * (kBits == 4 ? 8 : kTileBytes) + lane.g / 4 * kBits;
  }

  // The codes of 16 number `step` of a step; forward, of 4 bits those of all four come with the first.
  __device__ __forceinline__ void load_codes(const u8* stage, int step) {
    if (!kTransposed && kBits == 4 && step > 0) return;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const int moved = kTransposed ? step / 2 * 4 * kUnitBytes + (2 * (step % 2) + part) * 256
                                    : part * 512 + step / 2 * kTileBytes + step % 2 * 8;
      codes_[part] = *reinterpret_cast<const Codes*>(stage + place_ + moved);
    }
  }
  // Their parameters, where they are not those of the 16 before.
  __device__ __forceinline__ void load_parameters(u8* stage, int step) {
    if (!kTransposed && step * kUnitGroups % 4 != 0) return;
    const int half = warp_ % 2;
    const int unit = kTransposed ? step / 2 * 4 + warp_ / 2 : warp_;
    const int group = !kTransposed       ? step * kUnitGroups / 4
                      : kUnitGroups == 4 ? 2 * half + lane_.g / 4
                      : kUnitGroups == 2 ? half
                                         : 0;
    const u8* const params = params_of(KnownScales(), stage, unit, group);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      if constexpr (kTransposed) {
        const int row = 16 * (step % 2) + 8 * part + 2 * lane_.t;
        factors_[part][0] = load_factors(KnownScales(), params, row, lane_);
      } else {
        const RowPair rows =
            load_rows(KnownScales(), params, 16 * part + 2 * lane_.g, lane_, lane_.bf16_scales);
#pragma unroll
        for (int i = 0; i < 2; ++i) factors_[part][i] = make_factors(rows, i, i);
      }
    }
  }

  // Makes fragments of them.
  __device__ __forceinline__ void decode(Weights (&a)[2][4], int step) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const auto make = [&](int i, const auto& values) {
        Weights& to = kTransposed ? a[i / 2][2 * part + i % 2] : a[part][i];
        make_weight(to, values, factors_[part][kTransposed ? 0 : i % 2]);
      };
      const Codes& codes = codes_[part];
      if constexpr (kBits == 4) {
        const u32 word = kTransposed ? pair_rows(codes.word[0]) : codes.word[step];
        make(0, look_up<0>(word, lane_.table));
        make(1, look_up<1>(word, lane_.table));
        make(2, look_up<2>(word, lane_.table));
        make(3, look_up<3>(word, lane_.table));
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 word = codes.word[i];
          make(2 * i, kTransposed ? byte_pair<0, 2>(Decoded(), word) : byte_pair<0, 1>(Decoded(), word));
          make(2 * i + 1, kTransposed ? byte_pair<1, 3>(Decoded(), word) : byte_pair<2, 3>(Decoded(), word));
        }
      }
    }
  }

 private:
  using Codes = WordsOf<kTransposed ? kBits / 4 : kBits == 4 ? 4 : 2>;

  int warp_, place_;  // place_: where the codes of the lane begin
  const Lane& lane_;
  Codes codes_[2];
  Factors factors_[2][2];
};

// The products of steps `begin` to `end`. While 16 of a step are multiplied, the codes of the next 16 are
// decoded, those after it come from shared memory, and so do tokens, kAhead pairs of eights before they are
// used. The loop begins where the next step must be there for this: with what is left of the step before, at
// first zeros.
template <class T, class StepCopies>
__device__ __forceinline__ void multiply_wide(T element, Sums& sums, StepCopies& copies, u8* stages,
                                              i64 begin, i64 end, int warp, const Lane& lane) {
  constexpr int kStages = kStage.stages, kPairs = kTokenTiles / 2;
  constexpr int kAhead = kFloating ? 6 : 7;  // as registers allow
  // The 16 of a step during which copies begin. They have at least a step to come, or what is left of one.
  constexpr int kCopyWeight = kStages > 2 ? 1 : 0, kCopyX = kCopyWeight + 1;
  const int x_lane = kStage.code_bytes + x_chunk(lane.index / 16 * 8 + lane.index % 8, lane.index / 8 % 2);
  WideWeight weight(warp, lane);
  Weights a[2][2][4] = {};
  u32 b[kPairs][4] = {};
  u8 *stage = stages, *free = stages + (kStages - 1) * kStage.bytes();
  const auto load_weight = [&](int step) {
    weight.load_codes(stage, step);
    weight.load_parameters(stage, step);
  };
  const auto load_pair = [&](int i) {
    const u32 row = shared_address(stage + (x_lane ^ i / kPairs * 32));
    load_matrices(b[i % kPairs], row + x_chunk(i % kPairs * 16, 0));
  };
  const auto multiply_pair = [&](const Weights(&tiles)[2][4], int pair) {
    const u32 tokens[2][2] = {{b[pair][0], b[pair][1]}, {b[pair][2], b[pair][3]}};
#pragma unroll
    for (int i = 0; i < 4; ++i) mma(element, sums[i / 2][2 * pair + i % 2], tiles[i / 2], tokens[i % 2]);
  };
#pragma unroll 1
  for (i64 next = begin + kStages - 1; next < end + kStages - 1; ++next) {
    wait_copies<kStages - 2>();
    __syncthreads();  // the step is there, and all have loaded the one before
    load_weight(0);
    weight.decode(a[0], 0);
    load_weight(1);
#pragma unroll
    for (int pair = kPairs - kAhead; pair < kPairs; ++pair) {
      load_pair(pair + kAhead - kPairs);
      multiply_pair(a[1], pair);
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (step < 3) weight.decode(a[(step + 1) % 2], step + 1);
      if (step < 2) load_weight(step + 2);
      if (step == kCopyWeight) copies.load_weight(free, next);
      if (step == kCopyX) copies.load_x(free, next);
#pragma unroll
      for (int pair = 0; pair < (step < 3 ? kPairs : kPairs - kAhead); ++pair) {
        load_pair(step * kPairs + pair + kAhead);
        multiply_pair(a[step % 2], pair);
      }
    }
    commit_copies();
    free = stage;
    stage = stage == stages + (kStages - 1) * kStage.bytes() ? stages : stage + kStage.bytes();
  }
#pragma unroll
  for (int pair = kPairs - kAhead; pair < kPairs; ++pair) multiply_pair(a[1], pair);
}

#endif

}  // namespace halfbyte::device
