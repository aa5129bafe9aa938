// qgemm_sm80, phase 3 for many tokens: 64 features and 64 tokens a warp.
#pragma once

#include "ops/qgemm/sm80/fragments.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

// Fragments of the weight for the four tiles of 16 features of a warp, for one 16 of a step after the other.
class WideWeight {
 public:
  __device__ __forceinline__ WideWeight(u8* stage, int warp_feature, const Lane& lane)
      : stage_(stage), warp_feature_(warp_feature), lane_(lane) {}

  // Those number `step`, 0 to 3: in order, as some of what is loaded serves several.
  __device__ __forceinline__ void load(Weights (&a)[4][4], int step) {
    if constexpr (kTransposed)
      load_transposed(a, step / 2, step % 2);
    else
      load_forward(a, step);
  }

 private:
  __device__ __forceinline__ void load_forward(Weights (&a)[4][4], int step) {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const int feature = warp_feature_ + tile / 2, row = 16 * (tile % 2) + 2 * lane_.g;
      const u8* const slot =
          stage_ + feature * kUnitBytes + packed_slot(8 * (tile % 2) + lane_.g, lane_.t) * 16;
      if (kBits == 4 && step == 0) words_[tile] = *reinterpret_cast<const Words4*>(slot);
      if (step * kUnitGroups % 4 == 0) {
        const u8* const params = params_of(KnownScales(), stage_, feature, step * kUnitGroups / 4);
        const RowPair rows = load_rows(KnownScales(), params, row, lane_, lane_.bf16_scales);
#pragma unroll
        for (int i = 0; i < 2; ++i) factors_[tile][i] = make_factors(rows, i, i);
      }
      const auto& factors = factors_[tile];
      if constexpr (kBits == 4) {
        const u32 word = words_[tile].word[step];
        make_weight(a[tile][0], look_up<0>(word, lane_.table), factors[0]);
        make_weight(a[tile][1], look_up<1>(word, lane_.table), factors[1]);
        make_weight(a[tile][2], look_up<2>(word, lane_.table), factors[0]);
        make_weight(a[tile][3], look_up<3>(word, lane_.table), factors[1]);
      } else {
        const auto words = *reinterpret_cast<const WordsOf<2>*>(slot + step / 2 * kTileBytes + step % 2 * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          make_weight(a[tile][2 * i], byte_pair<0, 1>(Decoded(), words.word[i]), factors[0]);
          make_weight(a[tile][2 * i + 1], byte_pair<2, 3>(Decoded(), words.word[i]), factors[1]);
        }
      }
    }
  }

  // As transposed_fragments(), of rows 16 * j and up of a strip.
  __device__ __forceinline__ void load_transposed(Weights (&a)[4][4], int strip, int j) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int feature = warp_feature_ + block, q = strip * 4 + feature / 2, half = feature % 2;
      const int group = kUnitGroups == 1 ? 0 : kUnitGroups == 2 ? half : 2 * half + lane_.g / 4;
      const u8* const params = params_of(KnownScales(), stage_, q, group);
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int pair = 8 * j + 4 * second + lane_.t;
        Entry values[2][2];
        load_row_pairs(values, stage_ + q * kUnitBytes, pair, half, lane_);
        const Factors factors = load_factors(KnownScales(), params, 2 * pair, lane_);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          make_weight(a[2 * block + i / 2][2 * second + i % 2], values[i / 2][i % 2], factors);
      }
    }
  }

  u8* stage_;
  int warp_feature_;
  const Lane& lane_;
  Words4 words_[4];  // of each tile, the four steps of 4-bit codes
  Factors factors_[4][2];
};

// Adds a step, as multiply(). The weight of the next 16 is decoded while these are multiplied; not that of
// 8-bit codes, which needs no table. Unrolled as far as registers allow.
template <class T>
__device__ __forceinline__ void multiply_wide(T element, Sums& sums, u8* stage, int warp_feature,
                                              int warp_token, const Lane& lane) {
  WideWeight weight(stage, warp_feature, lane);
  constexpr int kAhead = kBits == 4 ? 1 : 0;
  Weights a[1 + kAhead][4][4];
  if (kAhead == 1) weight.load(a[0], 0);
  const u8* const x = stage + kStage.code_bytes;
  const int token = warp_token + lane.index / 16 * 8 + lane.index % 8, chunk = lane.index / 8 % 2;
#pragma unroll kBits == 8 ? 1 : kTransposed&& kStored.double_quant ? 2 : 4
  for (int step = 0; step < 4; ++step) {
    if (step + kAhead < 4) weight.load(a[(step + kAhead) % (1 + kAhead)], step + kAhead);
#pragma unroll
    for (int tiles = 0; tiles < kTokenTiles; tiles += 2) {
      u32 m[4];
      load_matrices(m, x + x_chunk(token + tiles * 8, step * 2 + chunk));
      const u32 b[2][2] = {{m[0], m[1]}, {m[2], m[3]}};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Weights(&tile)[4] = a[step % (1 + kAhead)][i];
        mma(element, sums[i / 2][i % 2][tiles], tile, b[0]);
        mma(element, sums[i / 2][i % 2][tiles + 1], tile, b[1]);
      }
    }
  }
}

#endif

}  // namespace halfbyte::device
