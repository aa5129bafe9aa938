// The weight of variant qgemm_simt, decoded chunk by chunk: packed, or in the arrays of a view.
#pragma once

#include "cuda/device/codes.cuh"
#include "cuda/device/reduce.cuh"
#include "formats/weight_view.h"
#include "ops/qgemm/simt/simt.cuh"

namespace halfbyte::device {

constexpr int kChunk = kSimtChunk;
constexpr int kRowsPerWord = 32 / kBits;  // of zero points, where they are in words
constexpr bool kStreams = !in_fragments(kBits);
constexpr u32 kCodeMask = (1u << kBits) - 1;
constexpr bool kTable = kKind == Kind::table, kAffine = kKind == Kind::affine;

// ---- 1. Parameters of a group

// Of a group, as they are stored and as they are computed with; other: the zero point or the bias.
struct StoredParameters {
  u32 scale, other;
};
struct Parameters {
  F scale, other;
};

// How scales and biases are stored: a constant where the kernel is made for it, kScales.
enum class Storage { f32, f16, bf16, e4m3, e8m0, double_quant };
__device__ __forceinline__ Storage storage_of(const WeightArgs& w) {
  if (kScales ? kDoubleQuant : !kAffine && w.absmax != nullptr) return Storage::double_quant;
  const auto type = kScales ? kScaleType : static_cast<ScaleType>(w.scale_type);
  if (kTable && type == ScaleType::e4m3) return Storage::e4m3;
  if (kTable && type == ScaleType::e8m0) return Storage::e8m0;
  return type == ScaleType::f32 ? Storage::f32 : type == ScaleType::f16 ? Storage::f16 : Storage::bf16;
}
// use(storage), where it is a constant: what it does has one branch for all.
template <class Use>
__device__ __forceinline__ void with_constant(Storage storage, const Use& use) {
  if (storage == Storage::f32)
    use(Storage::f32);
  else if (storage == Storage::f16)
    use(Storage::f16);
  else if (kAffine || storage == Storage::bf16)
    use(Storage::bf16);
  else if (kTable && storage == Storage::e4m3)
    use(Storage::e4m3);
  else if (kTable && storage == Storage::e8m0)
    use(Storage::e8m0);
  else
    use(Storage::double_quant);
}

__device__ __forceinline__ int bytes_of(Storage storage) {
  return storage == Storage::f32 ? 4 : storage == Storage::f16 || storage == Storage::bf16 ? 2 : 1;
}
__device__ __forceinline__ u32 load_stored(const void* scales, i64 index, Storage storage) {
  if (bytes_of(storage) == 1) return static_cast<const u8*>(scales)[index];
  return storage == Storage::f32 ? static_cast<const u32*>(scales)[index]
                                 : static_cast<const u16*>(scales)[index];
}
__device__ __forceinline__ F from_stored(u32 bits, Storage storage) {
  if (storage == Storage::f32) return static_cast<F>(bit_cast<float>(bits));
  if (storage == Storage::e4m3) return static_cast<F>(e4m3_to_f32(static_cast<u8>(bits)));
  if (storage == Storage::e8m0) return static_cast<F>(e8m0_to_f32(static_cast<u8>(bits)));
  const u16 half = static_cast<u16>(bits);
  return static_cast<F>(storage == Storage::f16 ? f16_to_f32(half) : bf16_to_f32(half));
}

// Where the parameters of a group lie: `index` counts from these bytes of their arrays. `group`: of the row;
// where groups run across rows, of all, and row 0.
struct GroupPlace {
  i64 index, scales, others;
};
__device__ __forceinline__ GroupPlace group_place(const WeightArgs& w, i64 row, i64 group) {
  if constexpr (kPacked) {
    const i64 strip = row / kUnitRows, block = group >> w.group_shift;
    return {(group & ((1 << w.group_shift) - 1)) * kUnitRows + row % kUnitRows,
            w.scale.base + strip * w.scale.strip_bytes + block * w.scale.block_bytes,
            w.other.base + strip * w.other.strip_bytes + block * w.other.block_bytes};
  } else {
    return {row * w.groups + group, 0, 0};
  }
}
// But for zero points, which do not depend on the storage.
__device__ __forceinline__ StoredParameters load_scale(const WeightArgs& w, Storage storage, i64 row,
                                                       i64 group) {
  const GroupPlace at = group_place(w, row, group);
  const u8* const scales = static_cast<const u8*>(w.scales) + at.scales;
  StoredParameters p{};
  p.scale = load_stored(scales, at.index, storage);
  if constexpr (kAffine)
    p.other = load_stored(static_cast<const u8*>(w.biases) + at.others, at.index, storage);
  return p;
}
__device__ __forceinline__ u32 load_zero(const WeightArgs& w, i64 row, i64 group) {
  if (w.zeros == nullptr) return static_cast<u32>(w.zero);
  if (w.zero_words)
    return static_cast<u32>(zero_of_words(static_cast<const u32*>(w.zeros), w.groups, row, group, kBits));
  const GroupPlace at = group_place(w, row, group);
  return static_cast<const u8*>(w.zeros)[at.others + at.index];
}
__device__ __forceinline__ StoredParameters load_parameters(const WeightArgs& w, i64 row, i64 group) {
  StoredParameters p = load_scale(w, storage_of(w), row, group);
  if constexpr (kKind == Kind::integer) p.other = load_zero(w, row, group);
  return p;
}
__device__ __forceinline__ Parameters convert(const WeightArgs& w, Storage storage, StoredParameters stored,
                                              i64 row, i64 group) {
  Parameters p{};
  if (storage == Storage::double_quant) {
    const float absmax = w.absmax[(row * w.groups + group) / 256];
    p.scale = static_cast<F>(__fadd_rn(__fmul_rn(w.map[stored.scale], absmax), *w.offset));
  } else {
    p.scale = from_stored(stored.scale, storage);
    if (storage == Storage::e4m3) p.scale = p.scale / static_cast<F>(*w.global_scale);
  }
  if constexpr (kAffine) p.other = from_stored(stored.other, storage);
  if constexpr (kKind == Kind::integer) p.other = static_cast<F>(static_cast<int>(stored.other));
  return p;
}

// ---- 2. Codes of a chunk

// The codes of a chunk: code i at bits kBits * place_of(i).
using Codes = Select<(kBits > 4), u64, u32>;
__device__ __forceinline__ constexpr int place_of(int i) { return kHighFirst ? i ^ 1 : i; }

__device__ __forceinline__ u64 swap_halves(u64 bytes) {
  return (bytes & 0x0F0F0F0F0F0F0F0Full) << 4 | (bytes >> 4 & 0x0F0F0F0F0F0F0F0Full);
}

// Of a bit stream of `num_bytes` bytes, which is aligned to 4: chunk number `chunk`.
__device__ __forceinline__ Codes load_chunk(const u8* stream, i64 chunk, i64 num_bytes) {
  return static_cast<Codes>(load_codes<kChunk * kBits>(stream, chunk, num_bytes));
}

// `col`: a multiple of kChunk. What lies behind the row is undefined.
__device__ __forceinline__ Codes load_codes(const WeightArgs& w, i64 row, i64 col) {
  Codes codes = 0;
  if constexpr (kPacked) {
    constexpr int kUnitBytes = kUnitRows * kUnitCols * kBits / 8;
    const i64 block = col >> w.block_shift;
    const int in_block = static_cast<int>(col - (block << w.block_shift)), c = in_block % kUnitCols;
    const u8* const unit =
        w.codes + row / kUnitRows * w.strip_bytes + block * w.block_bytes + in_block / kUnitCols * kUnitBytes;
    if constexpr (kStreams) {
      codes = load_chunk(unit + row % kUnitRows * (kUnitCols * kBits / 8), c / kChunk, kUnitBytes);
    } else {
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        const u8* const pair = unit + code_place(static_cast<int>(row % kUnitRows), c + 2 * t, kBits).byte;
        if constexpr (kBits == 4)
          codes |= static_cast<Codes>(*pair) << (8 * t);
        else
          codes |= static_cast<Codes>(*reinterpret_cast<const u16*>(pair)) << (16 * t);
      }
    }
  } else {
    const i64 bit = row * w.row_bits + col * kBits, byte = bit / 8;
    const u32* const words = reinterpret_cast<const u32*>(w.codes + byte);
    if (kStreams && w.wide) {
      const i64 first = row * (w.row_bits / 8);
      codes = load_chunk(w.codes + first, col / kChunk, w.num_bytes - first);
    } else if (w.wide) {
      codes = load_once(words);
      if constexpr (kBits == 8)
        if (col + 4 < w.k) codes |= static_cast<Codes>(load_once(words + 1)) << (4 * kBits);
    } else {
      u64 bytes = 0;
#pragma unroll 1
      for (int i = 0; i < (kBits == 8 ? 8 : kBits + 1); ++i)
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
__device__ __forceinline__ i64 group_of(const WeightArgs& w, i64 col) {
  return w.group_chunks.divide(static_cast<u32>(col / kChunk));
}

// ---- 3. Both, of the rows of a block

// The rows of a block, of whole chunks that are aligned and of one group; row r, or the last there is.
// Offsets within them have 32 bits.
class WholeRows {
 public:
  __device__ __forceinline__ WholeRows(const WeightArgs& w, i64 first)
      : w_(w),
        storage_(storage_of(w)),
        first_(first),
        last_(static_cast<u32>(min<i64>(w.n - 1 - first, kSimtRows - 1))) {
    if constexpr (!kPacked) {
      first_group_ = first * w.groups;
      const int size = bytes_of(storage_);
      codes_ = w.codes + first * (w.row_bits / 8);
      scales_ = static_cast<const u8*>(w.scales) + first_group_ * size;
      if constexpr (kAffine) others_ = static_cast<const u8*>(w.biases) + first_group_ * size;
      // All rows are in one row of words, but for bit streams that these do not divide.
      if constexpr (kKind == Kind::integer)
        others_ = static_cast<const u8*>(w.zeros) +
                  (w.zero_words ? first / kRowsPerWord * w.groups * 4 : first_group_);
    }
  }
  __device__ __forceinline__ Codes codes(u32 r, u32 chunk) const {
    if constexpr (kPacked) return load_codes(w_, row(r), static_cast<i64>(chunk) * kChunk);
    const u32 row_offset = min(r, last_) * static_cast<u32>(w_.row_bits / 8);
    if constexpr (kStreams)
      return load_chunk(codes_ + row_offset, chunk, w_.codes + w_.num_bytes - (codes_ + row_offset));
    const u32* const words = reinterpret_cast<const u32*>(codes_ + row_offset + chunk * kBits);
    Codes codes = load_once(words);
    if constexpr (kBits == 8) codes |= static_cast<Codes>(load_once(words + 1)) << (4 * kBits);
    return codes;
  }
  // Of all rows: one branch for how they are stored, so that all are on their way before one is used.
  __device__ __forceinline__ void parameters(u32 group, StoredParameters (&to)[kSimtRows]) const {
    with_constant(storage_, [&](Storage storage) {
#pragma unroll
      for (u32 r = 0; r < kSimtRows; ++r) to[r] = scale(storage, r, group);
    });
    if constexpr (kKind == Kind::integer)
#pragma unroll
      for (u32 r = 0; r < kSimtRows; ++r) to[r].other = zero(r, group);
  }
  __device__ __forceinline__ void convert(const StoredParameters (&stored)[kSimtRows], u32 group,
                                          Parameters (&to)[kSimtRows]) const {
    with_constant(storage_, [&](Storage storage) {
#pragma unroll
      for (u32 r = 0; r < kSimtRows; ++r) to[r] = device::convert(w_, storage, stored[r], row(r), group);
    });
  }

 private:
  __device__ __forceinline__ i64 row(u32 r) const { return first_ + min(r, last_); }
  __device__ __forceinline__ u32 index(u32 r, u32 group) const {
    return min(r, last_) * static_cast<u32>(w_.groups) + group;
  }

  __device__ __forceinline__ StoredParameters scale(Storage storage, u32 r, u32 group) const {
    if constexpr (kPacked) return load_scale(w_, storage, row(r), group);
    const u32 at = index(r, group);
    StoredParameters p{};
    p.scale = load_stored(scales_, at, storage);
    if constexpr (kAffine) p.other = load_stored(others_, at, storage);
    return p;
  }
  __device__ __forceinline__ u32 zero(u32 r, u32 group) const {
    if constexpr (kPacked) return load_zero(w_, row(r), group);
    if (w_.zeros == nullptr) return static_cast<u32>(w_.zero);
    if (32 % kBits != 0 && w_.zero_words) return load_zero(w_, row(r), group);
    if (w_.zero_words)
      return reinterpret_cast<const u32*>(others_)[group] >> (row(r) % kRowsPerWord * kBits) & kCodeMask;
    return others_[index(r, group)];
  }

  const WeightArgs& w_;
  Storage storage_;
  i64 first_, first_group_ = 0;
  u32 last_;
  const u8 *codes_ = nullptr, *scales_ = nullptr, *others_ = nullptr;
};

// ---- 4. Decoding

// The value of table code i, in lanes i and 16 + i.
__device__ __forceinline__ float lane_value(const WeightArgs& w) {
  return kTable ? w.values[threadIdx.x % 16] : 0;
}

// Before scale and bias.
__device__ __forceinline__ F code_value(Codes codes, int i, float table_value) {
  const u32 code = static_cast<u32>(codes >> (kBits * place_of(i)));
  if constexpr (kKind == Kind::floating)
    return static_cast<F>(e4m3_to_f32(static_cast<u8>(code)));
  else if constexpr (kTable)
    return static_cast<F>(shuffle(table_value, static_cast<int>(code)));  // bit 4 and up do not matter
  else
    return static_cast<F>(__fsub_rn(above_2_23(code & kCodeMask), 0x1p23f));
}

// Of a chunk within one group. The weights are values[i] times the result. By all lanes of a warp.
__device__ __forceinline__ F decode(Codes codes, const Parameters& p, float table_value,
                                    F (&values)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    values[i] = code_value(codes, i, table_value);
    if constexpr (kKind == Kind::integer) values[i] = values[i] - p.other;
    if constexpr (kAffine) values[i] = values[i] * p.scale + p.other;
  }
  return kAffine ? F{1} : p.scale;
}

// Of any chunk: the weights. By all lanes of a warp.
__device__ __forceinline__ void decode_any(const WeightArgs& w, Codes codes, i64 row, i64 col,
                                           float table_value, F (&values)[kChunk]) {
  const i64 first = w.flat ? row * w.k + col : col, in = w.flat ? 0 : row;
  i64 group = first / w.group, left = (group + 1) * w.group - first;  // left: columns of this group
  const auto parameters = [&] { return convert(w, storage_of(w), load_parameters(w, in, group), in, group); };
  Parameters p = parameters();
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (left-- == 0 && col + i < w.k) {
      ++group;
      p = parameters();
      left = w.group - 1;
    }
    values[i] = code_value(codes, i, table_value);
    if constexpr (kKind == Kind::integer) values[i] = values[i] - p.other;
    values[i] = values[i] * p.scale;
    if constexpr (kAffine) values[i] = values[i] + p.other;
  }
}

}  // namespace halfbyte::device
