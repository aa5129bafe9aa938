// A slice of a packed weight as a dense matrix of 16-bit values, row-major: value, scale and bias are
// rounded, then what they make.
//
// 64 threads have a unit of 32 rows by 64 columns (packed.h), a thread two rows of it, and of their columns
// two chunks of 8: one half h of two steps of 16. It reads them from the slots of all four pairs of columns,
// or from the bit streams of its rows, and with the thread that has the other half it writes whole sectors.
#include "cuda/device/codes.cuh"
#include "ops/qgemm/cublas/cublas_args.h"
#include "ops/qgemm/weight/pairs.cuh"
#include "ops/qgemm/weight/table.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

[[maybe_unused]] constexpr u32 kOnes = same_pair(Element(), 1), kMinusZeros = same_pair(Element(), -0.0f);

// ---- 1. Codes of a chunk: from the words of a unit

// The codes of a chunk: column i at bits 4 * i, or in byte i where codes do not have 4 bits.
constexpr int kChunkWords = kBits == 4 ? 1 : 2;
struct ChunkCodes {
  u32 word[kChunkWords];
};
// Of the first column of chunk `i`.
__device__ __forceinline__ u32 column_of(u32 i, u32 p, u32 h) {
  return (kBits == 8 ? 32 * i + 16 * p : 32 * p + 16 * i) + 8 * h;
}
// The words that chunk i of both rows is in, of each pair of columns t; of bit streams two for each row.
__device__ __forceinline__ void load_words(u32 (&words)[2][4], const u8* unit, u32 a, u32 p, u32 h) {
  if constexpr (in_fragments(kBits)) {
#pragma unroll
    for (u32 t = 0; t < 4; ++t) {
      const u8* const steps = unit + packed_slot(static_cast<int>(a), static_cast<int>(t)) * 16 + p * 8;
      if constexpr (kBits == 4) {
        const u64 both = *reinterpret_cast<const u64*>(steps);
        words[0][t] = static_cast<u32>(both);
        words[1][t] = static_cast<u32>(both >> 32);
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          words[i][t] = *reinterpret_cast<const u32*>(steps + i * kTileBytes + 4 * h);
      }
    }
  } else {
    constexpr int kRowBytes = kUnitCols * kBits / 8;
#pragma unroll
    for (u32 i = 0; i < 2; ++i)
#pragma unroll
      for (u32 r = 0; r < 2; ++r) {
        const u64 stream = load_codes<8 * kBits>(unit + (2 * a + r) * kRowBytes, column_of(i, p, h) / 8,
                                                 kUnitRows * kRowBytes);
        words[i][2 * r] = static_cast<u32>(stream);
        words[i][2 * r + 1] = static_cast<u32>(stream >> 32);
      }
  }
}
// The chunk of the even row and that of the odd one.
__device__ __forceinline__ void make_chunks(ChunkCodes (&codes)[2], const u32 (&words)[4], u32 h) {
  if constexpr (!in_fragments(kBits)) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u64 bytes = unpack8(words[2 * r] | static_cast<u64>(words[2 * r + 1]) << 32, kBits);
      codes[r].word[0] = static_cast<u32>(bytes);
      codes[r].word[kChunkWords - 1] = static_cast<u32>(bytes >> 32);
    }
  } else if constexpr (kBits == 4) {
    const u32 half = h == 0 ? 0x5410 : 0x7632;
    const u32 first = __byte_perm(words[0], words[1], half), second = __byte_perm(words[2], words[3], half);
    codes[0].word[0] = __byte_perm(first, second, 0x6420);
    codes[1].word[0] = __byte_perm(first, second, 0x7531);
  } else {
#pragma unroll
    for (int i = 0; i < kChunkWords; ++i) {
      codes[0].word[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
      codes[1].word[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
    }
  }
}

// ---- 2. Parameters of two neighbouring rows

// The parameters of two neighbouring rows, as stored.
template <int kSize>
__device__ __forceinline__ void load_two(u32 (&stored)[2], const u8* from) {
  constexpr int kShift = 8 * kSize;
  using Both = Select<kSize == 4, u64, Select<kSize == 2, u32, u16>>;
  const Both both = *reinterpret_cast<const Both*>(from);
  stored[0] = static_cast<u32>(both) & static_cast<u32>((u64{1} << kShift) - 1);
  stored[1] = static_cast<u32>(both >> kShift);
}
__device__ __forceinline__ float from_stored(u32 bits, ScaleType type) {
  if (kParameterBytes == 1) return e8m0_to_f32(static_cast<u8>(bits));
  if (kParameterBytes == 4) return bit_cast<float>(bits);
  const u16 half = static_cast<u16>(bits);
  return type == ScaleType::f16 ? f16_to_f32(half) : bf16_to_f32(half);
}

// Of a row, each of them twice.
struct PairParameters {
  u32 scale, added, minus_zero;
};
// Of rows `row`, which is even, and the next.
__device__ __forceinline__ void load_pair_parameters(PairParameters (&rows)[2], const WeightArgs& w, u32 row,
                                                     u32 col) {
  const u32 group = w.group_chunks.divide(col / 8), block = group >> w.group_shift;
  const u32 at = (group & ((1u << w.group_shift) - 1)) * kUnitRows + row % kUnitRows;
  const auto address = [&](const void* section, const PackedParameterArgs& p, u32 size) {
    return static_cast<const u8*>(section) + p.base + row / kUnitRows * p.strip_bytes +
           static_cast<u64>(block) * static_cast<u32>(p.block_bytes) + at * size;
  };
  const auto type = static_cast<ScaleType>(w.scale_type);
  u32 scales[2], others[2];
  load_two<kDoubleQuant ? 1 : kParameterBytes>(
      scales, address(w.scales, w.scale, kDoubleQuant ? 1 : kParameterBytes));
  if constexpr (kAffine) load_two<kParameterBytes>(others, address(w.biases, w.other, kParameterBytes));
  if constexpr (kAsymmetric) load_two<1>(others, address(w.zeros, w.other, 1));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float scale = from_stored(scales[r], type);
    if constexpr (kDoubleQuant) {
      const float absmax = w.absmax[(static_cast<u64>(row + r) * static_cast<u32>(w.groups) + group) / 256];
      scale = __fadd_rn(__fmul_rn(w.map[scales[r]], absmax), *w.offset);
    }
    rows[r].scale = store_pair(Element(), scale, scale);
    rows[r].added = kMinusZeros;
    if constexpr (kAffine)
      rows[r].added = store_pair(Element(), from_stored(others[r], type), from_stored(others[r], type));
    if constexpr (kAsymmetric) {
      const float minus_zero = -static_cast<float>(others[r]);
      rows[r].minus_zero = store_pair(Element(), minus_zero, minus_zero);
    }
  }
}

// ---- 3. Weights

__device__ __forceinline__ Words4 decode_chunk(const QgemmCublasArgs& args, const ChunkCodes& codes,
                                               const PairParameters& p) {
  Words4 values;
  if constexpr (kBits == 4) {
    compute_pairs(values.word, codes.word[0], args.values);
  } else {
#pragma unroll
    for (int i = 0; i < kChunkWords; ++i) {
      values.word[2 * i] = byte_pair<0, 1>(Element(), codes.word[i]);
      values.word[2 * i + 1] = byte_pair<2, 3>(Element(), codes.word[i]);
    }
  }
#pragma unroll
  for (u32& pair : values.word) {
    if (kAsymmetric) pair = fma_pair(Element(), pair, kOnes, p.minus_zero);
    pair = fma_pair(Element(), pair, p.scale, p.added);
  }
  return values;
}

#endif

// ---- 4. The kernel

extern "C" __global__ void __launch_bounds__(kQgemmCublasThreads)
    qgemm_cublas_decode(const __grid_constant__ QgemmCublasArgs args) {
#if HALFBYTE_DEVICE_ARCH >= 800
  wait_for_earlier();
  const WeightArgs& w = args.weight;
  const u32 thread = threadIdx.x % kQgemmCublasUnitThreads, a = thread / 4, p = thread / 2 % 2,
            h = thread % 2;
  const u32 strip_of_slice = args.blocks_per_strip.divide(blockIdx.x);
  const u32 block = blockIdx.x - strip_of_slice * args.blocks_per_strip.divisor;
  const u32 strip = args.row / kUnitRows + strip_of_slice, row = strip * kUnitRows + 2 * a;
  const u32 unit = args.col / kUnitCols + block * kQgemmCublasUnits + threadIdx.x / kQgemmCublasUnitThreads;
  const u32 cols[2] = {unit * kUnitCols + column_of(0, p, h), unit * kUnitCols + column_of(1, p, h)};
  if (row >= args.end_row || cols[0] >= args.end_col) return;

  const int units_shift = w.block_shift - 6;  // units of a block of the packed weight
  static_assert(kUnitCols == 1 << 6);
  const u32 in_block = unit & ((1u << units_shift) - 1);
  u32 words[2][4];
  load_words(words,
             w.codes + strip * w.strip_bytes +
                 static_cast<u64>(unit >> units_shift) * static_cast<u32>(w.block_bytes) +
                 in_block * (kUnitRows * kUnitCols * kBits / 8),
             a, p, h);
  PairParameters parameters[2];
  load_pair_parameters(parameters, w, row, cols[0]);
  u16* const to = static_cast<u16*>(args.to) + static_cast<u64>(row - args.row) * args.stride;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (i > 0 && cols[i] >= args.end_col) break;
    if (i > 0 && !kWideGroups) load_pair_parameters(parameters, w, row, cols[i]);
    ChunkCodes codes[2];
    make_chunks(codes, words[i], h);
#pragma unroll
    for (int r = 0; r < 2; ++r)
      *reinterpret_cast<Words4*>(to + r * args.stride + (cols[i] - args.col)) =
          decode_chunk(args, codes[r], parameters[r]);
  }
#endif
}

}  // namespace halfbyte::device
