// The weight of variant qgemm_simt, decoded chunk by chunk: packed, or in the arrays of a view.
#pragma once

#include "cuda/device/codes.cuh"
#include "cuda/device/reduce.cuh"
#include "formats/packed.h"
#include "ops/qgemm/qgemm_simt.cuh"

namespace halfbyte::device {

constexpr int kChunk = kSimtChunk;
constexpr bool kTable = kKind == Kind::table, kAffine = kKind == Kind::affine;

// Of a group, as they are stored and as they are computed with; other: the zero point or the bias.
struct StoredParameters {
  u32 scale, other;
};
struct Parameters {
  F scale, other;
};

__device__ __forceinline__ u32 load_stored(const void* scales, i64 index, ScaleType type) {
  return type == ScaleType::f32 ? static_cast<const u32*>(scales)[index] : static_cast<const u16*>(scales)[index];
}
__device__ __forceinline__ F from_stored(u32 bits, ScaleType type) {
  if (type == ScaleType::f32) return static_cast<F>(bit_cast<float>(bits));
  const u16 half = static_cast<u16>(bits);
  return static_cast<F>(type == ScaleType::f16 ? f16_to_f32(half) : bf16_to_f32(half));
}

// `group`: of the row; where groups run across rows, of all, and row 0.
__device__ __forceinline__ StoredParameters load_parameters(const SimtWeight& w, i64 row, i64 group) {
  const auto type = static_cast<ScaleType>(w.scale_type);
  const void *scales = w.scales, *biases = w.biases;
  const u8* zeros = static_cast<const u8*>(w.zeros);
  i64 at = row * w.groups + group;
  if constexpr (kPacked) {
    const i64 strip = row / kUnitRows, block = group >> w.group_shift;
    at = (group & ((1 << w.group_shift) - 1)) * kUnitRows + row % kUnitRows;
    scales = static_cast<const u8*>(scales) + w.scale.base + strip * w.scale.strip_bytes + block * w.scale.block_bytes;
    const i64 other = w.other.base + strip * w.other.strip_bytes + block * w.other.block_bytes;
    zeros += other;
    biases = static_cast<const u8*>(biases) + other;
  }
  StoredParameters p{};
  p.scale = w.absmax != nullptr ? static_cast<const u8*>(scales)[at] : load_stored(scales, at, type);
  if constexpr (kAffine) p.other = load_stored(biases, at, type);
  if constexpr (kKind == Kind::integer) {
    p.other = static_cast<u32>(w.zero);
    if (w.zeros != nullptr && w.zero_words) {
      constexpr int kPerWord = 32 / kBits;
      const u32 word = static_cast<const u32*>(w.zeros)[row / kPerWord * w.groups + group];
      p.other = word >> (row % kPerWord * kBits) & ((1u << kBits) - 1);
    } else if (w.zeros != nullptr) {
      p.other = zeros[at];
    }
  }
  return p;
}
__device__ __forceinline__ Parameters convert(const SimtWeight& w, StoredParameters stored, i64 row, i64 group) {
  const auto type = static_cast<ScaleType>(w.scale_type);
  Parameters p{};
  if (w.absmax != nullptr) {
    const float absmax = w.absmax[(row * w.groups + group) / 256];
    p.scale = static_cast<F>(__fadd_rn(__fmul_rn(w.map[stored.scale], absmax), *w.offset));
  } else {
    p.scale = from_stored(stored.scale, type);
  }
  if constexpr (kAffine) p.other = from_stored(stored.other, type);
  if constexpr (kKind == Kind::integer) p.other = static_cast<F>(static_cast<int>(stored.other));
  return p;
}

// The codes of a chunk: code i at bits kBits * place_of(i).
using Codes = Select<kBits == 8, u64, u32>;
__device__ __forceinline__ constexpr int place_of(int i) { return kHighFirst ? i ^ 1 : i; }

__device__ __forceinline__ u64 swap_halves(u64 bytes) {
  return (bytes & 0x0F0F0F0F0F0F0F0Full) << 4 | (bytes >> 4 & 0x0F0F0F0F0F0F0F0Full);
}

// `col`: a multiple of kChunk. What lies behind the row is undefined. kWide: w.wide is known to be set.
template <bool kWide = false>
__device__ __forceinline__ Codes load_codes(const SimtWeight& w, i64 row, i64 col) {
  Codes codes = 0;
  if constexpr (kPacked) {
    constexpr int kUnitBytes = kUnitRows * kUnitCols * kBits / 8;
    const i64 block = col >> w.block_shift;
    const int in_block = static_cast<int>(col - (block << w.block_shift)), c = in_block % kUnitCols;
    const u8* const unit = w.codes + row / kUnitRows * w.strip_bytes + block * w.block_bytes + in_block / kUnitCols * kUnitBytes;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const u8* const pair = unit + code_place(static_cast<int>(row % kUnitRows), c + 2 * t, kBits).byte;
      if constexpr (kBits == 4)
        codes |= static_cast<Codes>(*pair) << (8 * t);
      else
        codes |= static_cast<Codes>(*reinterpret_cast<const u16*>(pair)) << (16 * t);
    }
  } else {
    const i64 bit = (row * w.row_codes + col) * kBits, byte = bit / 8;
    const u32* const words = reinterpret_cast<const u32*>(w.codes + byte);
    if (kWide || w.wide) {
      codes = load_once(words);
      if constexpr (kBits == 8)
        if (col + 4 < w.k) codes |= static_cast<Codes>(load_once(words + 1)) << 32;
    } else {
      u64 bytes = 0;
#pragma unroll 1
      for (int i = 0; i < (kBits == 4 ? 5 : 8); ++i)
        if (byte + i < w.num_bytes) bytes |= static_cast<u64>(w.codes[byte + i]) << (8 * i);
      // A row may begin amid a byte.
      if (kHighFirst && bit % 8 != 0)
        codes = static_cast<Codes>(swap_halves(swap_halves(bytes) >> 4));
      else
        codes = static_cast<Codes>(bytes >> (bit % 8));
    }
  }
  return codes;
}

// Of a chunk within one group.
__device__ __forceinline__ i64 group_of(const SimtWeight& w, i64 col) {
  return w.group_chunks.divide(static_cast<u32>(col / kChunk));
}

// The value of table code i, in lanes i and 16 + i.
__device__ __forceinline__ float lane_value(const SimtWeight& w) { return kTable ? w.values[threadIdx.x % 16] : 0; }

// Before scale and bias.
__device__ __forceinline__ F code_value(Codes codes, int i, float table_value) {
  const u32 code = static_cast<u32>(codes >> (kBits * place_of(i)));
  if constexpr (kTable)
    return static_cast<F>(shuffle(table_value, static_cast<int>(code)));  // bit 4 and up do not matter
  else
    return static_cast<F>(__fsub_rn(above_2_23(code & ((1u << kBits) - 1)), 0x1p23f));
}

// Of a chunk within one group. The weights are values[i] times the result. By all lanes of a warp.
__device__ __forceinline__ F decode(Codes codes, const Parameters& p, float table_value, F (&values)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    values[i] = code_value(codes, i, table_value);
    if constexpr (kKind == Kind::integer) values[i] = values[i] - p.other;
    if constexpr (kAffine) values[i] = values[i] * p.scale + p.other;
  }
  return kAffine ? F{1} : p.scale;
}

// Of any chunk: the weights. By all lanes of a warp.
__device__ __forceinline__ void decode_any(const SimtWeight& w, Codes codes, i64 row, i64 col, float table_value,
                                           F (&values)[kChunk]) {
  const i64 first = w.flat ? row * w.k + col : col, in = w.flat ? 0 : row;
  i64 group = first / w.group, left = (group + 1) * w.group - first;  // left: columns of this group
  Parameters p = convert(w, load_parameters(w, in, group), in, group);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (left-- == 0 && col + i < w.k) {
      ++group;
      p = convert(w, load_parameters(w, in, group), in, group);
      left = w.group - 1;
    }
    values[i] = code_value(codes, i, table_value);
    if constexpr (kKind == Kind::integer) values[i] = values[i] - p.other;
    values[i] = values[i] * p.scale;
    if constexpr (kAffine) values[i] = values[i] + p.other;
  }
}

}  // namespace halfbyte::device
