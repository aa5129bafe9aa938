// dequantize: y = decoded codes.
//
// A thread decodes kBatch chunks of kChunk elements (16 bytes of y), 32 chunks apart, so that loads and
// stores of a warp are contiguous; all its codes and scales are on their way before the first is used.
// kAligned: rows are whole chunks of 8 elements and y is aligned to 16 bytes, so that the codes are one bit
// stream and stores are wide. kWholeGroups: rows are also whole groups of a power of two of chunks, so that
// groups are one sequence too. How scales are stored and the values of a table are arguments.
#include "cuda/device/chunk.cuh"
#include "cuda/device/codes.cuh"
#include "cuda/device/memory.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"
#include "formats/bits.h"
#include "formats/codec.h"
#include "halfbyte_config.h"
#include "ops/dequantize/dequantize_args.h"

namespace halfbyte::device {

using F = Element::Compute;
using Memory = Element::Memory;

constexpr int kThreads = kDequantizeThreads;
constexpr bool kTable = kKind == Kind::table;
constexpr bool kAffine = kKind == Kind::affine;
constexpr bool kFloating = kKind == Kind::floating;
constexpr int kChunk = dequantize_chunk(kAligned, sizeof(Memory));
constexpr int kChunkBits = kChunk * kBits;
constexpr int kBatch = dequantize_batch(kAligned, kWholeGroups, sizeof(Memory));

struct Group {
  F scale, bias;
  u32 zero;  // the code of 0 of integer formats
};
__device__ __forceinline__ Group load_group(const DequantizeArgs& args, i64 index, ScaleType type) {
  const float global_scale = type == ScaleType::e4m3 ? *args.global_scale : 1;
  Group group{load_scale<F>(args.scales, index, type, global_scale), 0, 1u << (kBits - 1)};
  if constexpr (kAffine) group.bias = load_scale<F>(args.biases, index, type);
  if constexpr (kAsymmetric) group.zero = args.zeros[index];
  return group;
}

// The codes of 8 elements from a byte on, of which `num_bytes` exist.
__device__ __forceinline__ u64 load_codes_unaligned(const u8* codes, i64 num_bytes) {
  u64 bits = 0;
#pragma unroll
  for (int i = 0; i < kBits; ++i)
    if (i < num_bytes) bits |= static_cast<u64>(codes[i]) << (8 * i);
  return bits;
}

// Element i of a chunk before the parameters of its group: the value of a table, else the code.
using Raw = Select<kTable, float, u32>;
__device__ __forceinline__ Raw raw_value(u64 codes, int i, float lane_value) {
  const u32 code = static_cast<u32>(codes >> (kBits * i));
  if constexpr (kTable)
    return shuffle(lane_value,
                   static_cast<int>(code));  // lanes have values by code, twice: bit 4 does not matter
  else
    return code & ((1u << kBits) - 1);
}

__device__ __forceinline__ F decode(Raw raw, const Group& group) {
  if constexpr (kTable) {
    return static_cast<F>(raw) * group.scale;
  } else if constexpr (kFloating) {
    return static_cast<F>(e4m3_to_f32(static_cast<u8>(raw))) * group.scale;
  } else if constexpr (sizeof(F) == 8) {
    const int q = static_cast<int>(raw) - static_cast<int>(kAffine ? 0 : group.zero);
    if constexpr (kAffine) return static_cast<F>(q) * group.scale + group.bias;
    return static_cast<F>(q) * group.scale;
  } else if constexpr (kAffine) {
    return __fadd_rn(__fmul_rn(__fsub_rn(above_2_23(raw), 0x1p23f), group.scale), group.bias);
  } else {
    return __fmul_rn(__fsub_rn(above_2_23(raw), above_2_23(group.zero)), group.scale);
  }
}

// Where a chunk lies: `group` is that of its first element, to which `in_first` of its n elements belong.
struct Place {
  i64 row, col, group;
  int n, in_first;
};
__device__ __forceinline__ Place place_of(const DequantizeArgs& args, i64 chunk) {
  Place place{};
  if constexpr (kWholeGroups) {
    place.group = chunk >> args.group_shift;
    place.n = place.in_first = kChunk;
  } else if (kAligned && args.chunks_per_group > 0) {
    place.group = static_cast<u32>(chunk) / static_cast<u32>(args.chunks_per_group);
    place.n = place.in_first = kChunk;
  } else {
    const i64 chunks_per_row = (args.cols + kChunk - 1) / kChunk;
    if (args.rows * chunks_per_row <= 0x7FFFFFFF) {  // 32-bit divisions are several times as fast
      place.row = static_cast<u32>(chunk) / static_cast<u32>(chunks_per_row);
    } else {
      place.row = chunk / chunks_per_row;
    }
    place.col = (chunk - place.row * chunks_per_row) * kChunk;
    const i64 in_row = args.cols <= 0x7FFFFFFF
                           ? static_cast<u32>(place.col) / static_cast<u32>(args.group_size)
                           : place.col / args.group_size;
    place.group = place.row * args.groups_per_row + in_row;
    place.n = kAligned ? kChunk : static_cast<int>(min<i64>(kChunk, args.cols - place.col));
    place.in_first = static_cast<int>(min<i64>(place.n, (in_row + 1) * args.group_size - place.col));
  }
  return place;
}

// The groups of a thread's chunks: of their first elements, and the next of those chunks that have several.
struct Groups {
  Group first[kBatch], second[kBatch];
};
template <ScaleType kType>
__device__ __forceinline__ void load_groups(const DequantizeArgs& args, const Place (&places)[kBatch],
                                            Groups& groups) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) groups.first[b] = load_group(args, places[b].group, kType);
  if constexpr (!kWholeGroups) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
      groups.second[b] =
          places[b].in_first < places[b].n ? load_group(args, places[b].group + 1, kType) : Group{};
  }
}
// A branch for all, so that all are on their way before one is converted.
__device__ __forceinline__ void load_groups(const DequantizeArgs& args, const Place (&places)[kBatch],
                                            Groups& groups) {
  switch (args.scale_type) {
    case ScaleType::f32:
      return load_groups<ScaleType::f32>(args, places, groups);
    case ScaleType::f16:
      return load_groups<ScaleType::f16>(args, places, groups);
    case ScaleType::bf16:
      return load_groups<ScaleType::bf16>(args, places, groups);
    case ScaleType::f64:
      return load_groups<ScaleType::f64>(args, places, groups);
    case ScaleType::e4m3:
      if constexpr (kTable) return load_groups<ScaleType::e4m3>(args, places, groups);
      break;
    case ScaleType::e8m0:
      if constexpr (kTable) return load_groups<ScaleType::e8m0>(args, places, groups);
      break;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kWholeGroups ? 4 : 2)
    dequantize(const __grid_constant__ DequantizeArgs args) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const i64 warp = block_index() * (kThreads / 32) + threadIdx.x / 32;
  const i64 first = warp * (32 * kBatch) + lane;
  const i64 num_chunks = args.rows * ((args.cols + kChunk - 1) / kChunk);
  const float lane_value = kTable ? args.values[lane % 16] : 0;

  u64 codes[kBatch];
  int before = 0;  // bits before the chunks in their codes
  Groups groups;
  Place places[kBatch];
  const i64 num_bytes = args.rows * args.row_bytes;
  if constexpr (kAligned && !is_word(kChunkBits))
    before = load_words<kChunkBits>(args.codes, first, num_bytes, codes);
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    // Behind the end the last chunk is decoded again, so that shuffles find all lanes.
    const i64 chunk = min(first + b * 32, num_chunks - 1);
    places[b] = place_of(args, chunk);
    if constexpr (kAligned && is_word(kChunkBits)) {
      codes[b] = load_codes<kChunkBits>(args.codes, chunk, num_bytes);
    } else if constexpr (!kAligned) {
      const i64 in_row = places[b].col / kChunk;
      codes[b] = load_codes_unaligned(args.codes + places[b].row * args.row_bytes + in_row * kBits,
                                      args.row_bytes - in_row * kBits);
    }
  }
  load_groups(args, places, groups);
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    Raw raw[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) raw[i] = raw_value(codes[b] >> before, i, lane_value);
    F values[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; ++i) values[i] = decode(raw[i], groups.first[b]);
    if constexpr (!kWholeGroups) {
      // The other groups of the chunk: no more than one where groups are not shorter than chunks.
      const int step = static_cast<int>(min<i64>(args.group_size, kChunk));
#pragma unroll 1
      for (int begin = places[b].in_first; begin < places[b].n; begin += step) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i)
          if (i >= begin) values[i] = decode(raw[i], groups.second[b]);
        if (begin + step < places[b].n)
          groups.second[b] = load_group(args, ++places[b].group + 1, args.scale_type);
      }
    }
    if (first + b * 32 >= num_chunks) continue;
    if constexpr (kAligned) {
      store_once(static_cast<Words4*>(args.y) + first + b * 32, round_chunk(Element(), values));
    } else {
      Memory* const y = static_cast<Memory*>(args.y) + places[b].row * args.cols + places[b].col;
#pragma unroll
      for (int i = 0; i < kChunk; ++i)
        if (i < places[b].n) y[i] = store(Element(), values[i]);
    }
  }
}

}  // namespace halfbyte::device
