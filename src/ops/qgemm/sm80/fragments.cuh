// qgemm_sm80, phase 3: fragments of a step, and their products.
#pragma once

#include "ops/qgemm/sm80/copies.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

template <int n>
struct alignas(4 * n) WordsOf {
  u32 word[n];
};

struct Lane {
  int index, g, t;
  u32 table;     // see look_up()
  float offset;  // of double quantization
  bool bf16_scales;
};

// The parameters of two neighbouring rows in one group, the first of which is even.
struct RowPair {
  float scale[2], zero[2], bias[2];
};
template <class S>
__device__ __forceinline__ RowPair load_rows(S, const u8* params, int row, const Lane& lane, bool bf16) {
  RowPair rows;
  if constexpr (S::kDoubleQuant) {
    const float* const absmax = reinterpret_cast<const float*>(params + S::kGroupBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) rows.scale[i] = shared_map()[params[row + i]] * absmax[row + i] + lane.offset;
  } else {
    load_scales<S::kScaleBytes>(rows.scale, params + row * S::kScaleBytes, bf16);
  }
  const u8* const others = params + kUnitRows * S::kScaleBytes;
  if constexpr (kAsymmetric) {
    const u16 zeros = *reinterpret_cast<const u16*>(others + row);
    rows.zero[0] = static_cast<float>(zeros & 0xFF);
    rows.zero[1] = static_cast<float>(zeros >> 8);
  }
  if constexpr (kAffine) load_scales<S::kParameterBytes>(rows.bias, others + row * S::kParameterBytes, bf16);
  return rows;
}

// Of the two weights of a word of a fragment.
struct Factors {
  Pair scale, added, minus_zero;
};
// Of rows i and j of a pair.
__device__ __forceinline__ Factors make_factors(const RowPair& rows, int i, int j) {
  Factors f = {make_pair(Decoded(), rows.scale[i], rows.scale[j]), kMinusZeros, kMinusZeros};
  if (kAffine) f.added = make_pair(Decoded(), rows.bias[i], rows.bias[j]);
  if (kAsymmetric) f.minus_zero = make_pair(Decoded(), -rows.zero[i], -rows.zero[j]);
  return f;
}
// Of both. Parameters that are stored as elements are pairs already.
template <class S>
__device__ __forceinline__ Factors load_factors(S, const u8* params, int row, const Lane& lane) {
  constexpr bool kMayBePairs = may_have_bf16_scales(Element()) && S::kScaleBytes == 2;
  Factors f = make_factors(load_rows(S(), params, row, lane, !kMayBePairs && lane.bf16_scales), 0, 1);
  if constexpr (kMayBePairs) {
    const u8* const others = params + kUnitRows * 2;
    if (lane.bf16_scales) f.scale = *reinterpret_cast<const Pair*>(params + row * 2);
    if (kAffine && lane.bf16_scales) f.added = *reinterpret_cast<const Pair*>(others + row * 2);
  }
  return f;
}
__device__ __forceinline__ Pair less_zero(Pair value, const Factors& f) {
  return kAsymmetric ? fma_pair(Decoded(), value, kOnes, f.minus_zero) : value;
}
__device__ __forceinline__ Pair scaled(Pair value, const Factors& f) {
  return fma_pair(Decoded(), less_zero(value, f), f.scale, f.added);
}
// What is multiplied, from a pair of values: scaled where the scale goes into the weight.
template <class W>
__device__ __forceinline__ void make_weight(W& to, const Pair& value, const Factors& f) {
  to_operand(to, kScaledWeight ? scaled(value, f) : less_zero(value, f));
}
// Parts of a table have neither scale nor zero point here.
template <class W>
__device__ __forceinline__ void make_weight(W& to, const Parts<3>& parts, const Factors&) {
  to = parts;
}

// Tile `half` of 16 rows of unit `unit` for steps chunk * kDeep and on.
template <class S>
__device__ __forceinline__ void forward_fragments(S, Weights (&a)[kDeep][4], const u8* unit, const u8* params,
                                                  int half, int chunk, const Lane& lane) {
  const u8* const slot = unit + packed_slot(8 * half + lane.g, lane.t) * 16;
  const RowPair rows = load_rows(S(), params, 16 * half + 2 * lane.g, lane, lane.bf16_scales);
  const Factors factors[2] = {make_factors(rows, 0, 0), make_factors(rows, 1, 1)};
  const auto make = [&](int j, const auto& v0, const auto& v1, const auto& v2, const auto& v3) {
    make_weight(a[j][0], v0, factors[0]);
    make_weight(a[j][1], v1, factors[1]);
    make_weight(a[j][2], v2, factors[0]);
    make_weight(a[j][3], v3, factors[1]);
  };
  if constexpr (kBits == 4) {
    const auto words = *reinterpret_cast<const WordsOf<kDeep>*>(slot + chunk * kDeep * 4);
#pragma unroll
    for (int j = 0; j < kDeep; ++j) {
      const u32 word = words.word[j];
      make(j, look_up<0>(word, lane.table), look_up<1>(word, lane.table), look_up<2>(word, lane.table),
           look_up<3>(word, lane.table));
    }
  } else {
    constexpr int kWords = 2 * min(kDeep, 2);  // of the steps in 16 bytes
#pragma unroll
    for (int j = 0; j < kDeep; ++j) {
      const int step = chunk * kDeep + j;
      const auto words = *reinterpret_cast<const WordsOf<kWords>*>(slot + step / 2 * 1024 +
                                                                   (kWords == 4 ? 0 : step % 2 * 8));
      const int first = kWords == 4 ? j % 2 * 2 : 0;
      make(j, byte_pair<0, 1>(Decoded(), words.word[first]), byte_pair<2, 3>(Decoded(), words.word[first]),
           byte_pair<0, 1>(Decoded(), words.word[first + 1]),
           byte_pair<2, 3>(Decoded(), words.word[first + 1]));
    }
  }
}

// From pairs of columns to pairs of rows: the high code of each even byte and the low one of the next change
// places.
__device__ __forceinline__ u32 pair_rows(u32 word) { return word ^ ((word ^ word >> 4) & 0x00F000F0u) * 17; }

// Rows 2 * pair and the next of half `half` of a unit: [tile][column] of this lane, see
// transposed_fragments().
template <class V>
__device__ __forceinline__ void load_row_pairs(V (&values)[2][2], const u8* unit, int pair, int half,
                                               const Lane& lane) {
  const u8* const slot = unit + packed_slot(pair, lane.g % 4) * 16;
  if constexpr (kBits == 4) {
    const u32 word = pair_rows(*reinterpret_cast<const u32*>(slot + (2 * half + lane.g / 4) * 4));
    values[0][0] = look_up<0>(word, lane.table);
    values[0][1] = look_up<1>(word, lane.table);
    values[1][0] = look_up<2>(word, lane.table);
    values[1][1] = look_up<3>(word, lane.table);
  } else {
    const auto words = *reinterpret_cast<const WordsOf<2>*>(slot + half * 1024 + lane.g / 4 * 8);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      values[i][0] = byte_pair<0, 2>(Decoded(), words.word[i]);
      values[i][1] = byte_pair<1, 3>(Decoded(), words.word[i]);
    }
  }
}

// The 32 columns of half `half` of a unit, 16 a tile, for the 32 rows of its strip. Lane (g, t) has of tile i
// columns 16 (g / 4) + 2 (g % 4) + 8 i and the next, its fragments' rows g and g + 8.
template <class S>
__device__ __forceinline__ void transposed_fragments(S, Weights (&a)[2][kDeep][4], const u8* unit,
                                                     const u8* params, int half, const Lane& lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {  // half of the 16 rows
      const int pair = 8 * j + 4 * second + lane.t;
      Entry values[2][2];
      load_row_pairs(values, unit, pair, half, lane);
      const Factors factors = load_factors(S(), params, 2 * pair, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) make_weight(a[i / 2][j][2 * second + i % 2], values[i / 2][i % 2], factors);
    }
  }
}

// Columns of operand B, the tokens of an eight, for steps of 16 from `step` on.
__device__ __forceinline__ void load_tokens(u32 (&b)[kDeep][2], const u8* x, int first_token, int step,
                                            const Lane& lane) {
#pragma unroll
  for (int i = 0; i < (kDeep + 1) / 2; ++i) {
    u32 m[4];
    load_matrices(m, x + x_chunk(first_token + lane.index % 8, (step / 2 + i) * 4 + lane.index / 8));
    if constexpr (kDeep == 1) {
      b[0][0] = step % 2 ? m[2] : m[0];
      b[0][1] = step % 2 ? m[3] : m[1];
    } else {
      b[2 * i][0] = m[0];
      b[2 * i][1] = m[1];
      b[2 * i + 1][0] = m[2];
      b[2 * i + 1][1] = m[3];
    }
  }
}
__device__ __forceinline__ void token_fragments(u32 (&b)[kDeep][2], const u8* x, int first_token, int step,
                                                const Lane& lane) {
  load_tokens(b, x, first_token, step, lane);
}
__device__ __forceinline__ void token_fragments(Parts<3> (&b)[kDeep][2], const u8* x, int first_token,
                                                int step, const Lane& lane) {
#pragma unroll
  for (int part = 0; part < 3; ++part) {
    u32 of_part[kDeep][2];
    load_tokens(of_part, x + part * kXPartBytes, first_token, step, lane);
#pragma unroll
    for (int j = 0; j < kDeep; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) b[j][i].part[part] = of_part[j][i];
  }
}
__device__ __forceinline__ void token_fragments(FloatPair (&b)[kDeep][2], const u8* x, int first_token,
                                                int step, const Lane& lane) {
#pragma unroll
  for (int j = 0; j < kDeep; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 chunk = x_chunk(first_token + lane.g, (step + j) * 4 + 2 * i + lane.t / 2);
      to_operand(b[j][i], *reinterpret_cast<const FloatPair*>(x + chunk + lane.t % 2 * 8));
    }
  }
}

using Sums = float[2][kTokenTiles][4];

// The weight of steps of 16 number chunk * kDeep and on, for the 32 features of a warp; the scales and biases
// of its sums, where these are scaled.
struct Weight {
  Weights a[2][kDeep][4];
  float scales[2][2], biases[2][2];

  // `block`: of 32 features of the tile.
  __device__ __forceinline__ void load(const QgemmSm80Args& args, u8* stage, int block, int chunk,
                                       const Lane& lane) {
    if constexpr (kTransposed) {
      const int q = chunk * 4 + block / 2, half = block % 2;
      const int group = kUnitGroups == 1 ? 0 : kUnitGroups == 2 ? half : 2 * half + lane.g / 4;
      with_scales(args, [&](auto kind) {
        transposed_fragments(kind, a, stage + q * kUnitBytes, params_of(kind, stage, q, group), half, lane);
      });
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        with_scales(args, [&](auto kind) {
          const u8* const params = params_of(kind, stage, block, chunk * kDeep * kUnitGroups / 4);
          forward_fragments(kind, a[half], stage + block * kUnitBytes, params, half, chunk, lane);
          if (kScaledWeight) return;
          const RowPair rows = load_rows(kind, params, 16 * half + 2 * lane.g, lane, lane.bf16_scales);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            scales[half][i] = rows.scale[i];
            biases[half][i] = kAffine ? rows.bias[i] : 0;
          }
        });
      }
    }
  }

  // sum += the products of 16 features and eight tokens b; x_sums: of the tokens 2t and 2t + 1 over the
  // group. What is split has short sums of its own, which f32 adds up: matrix instructions do not round.
  __device__ __forceinline__ void multiply(float (&sum)[4], int half, const Xs (&b)[kDeep][2],
                                           const float (&x_sums)[4]) const {
    if constexpr (kScaledWeight && !kSplit) {
#pragma unroll
      for (int j = 0; j < kDeep; ++j) multiply_add(Decoded(), sum, a[half][j], b[j]);
    } else {
      float group_sum[4] = {};
#pragma unroll
      for (int j = 0; j < kDeep; ++j) multiply_add(Decoded(), group_sum, a[half][j], b[j]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[i] = kScaledWeight ? sum[i] + group_sum[i] : __fmaf_rn(scales[half][i / 2], group_sum[i], sum[i]);
        if (kAffine && !kScaledWeight) sum[i] = __fmaf_rn(biases[half][i / 2], x_sums[i], sum[i]);
      }
    }
  }
};

// Adds a step, for block `warp` of 32 features and `tokens` tokens.
__device__ __forceinline__ void multiply(const QgemmSm80Args& args, Sums& sums, u8* stage, int warp,
                                         int tokens, const Lane& lane) {
#pragma unroll
  for (int chunk = 0; chunk < 4 / kDeep; ++chunk) {
    Weight weight;
    weight.load(args, stage, warp, chunk, lane);
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      if (tile % kTilesTogether == 0 && tile * 8 >= tokens) break;
      Xs b[kDeep][2];
      token_fragments(b, stage + kStage.code_bytes, tile * 8, chunk * kDeep, lane);
      float x_sums[4] = {};
      if constexpr (kAffine && !kScaledWeight) {
        Weights ones[4];
#pragma unroll
        for (Weights& of_row : ones) to_operand(of_row, kOnes);
#pragma unroll
        for (int j = 0; j < kDeep; ++j) multiply_add(Decoded(), x_sums, ones, b[j]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) weight.multiply(sums[half][tile], half, b, x_sums);
    }
  }
}

#endif

}  // namespace halfbyte::device
