// Products with packed weights by mma.sync, of any shape, forward and transposed.
//
// The weight is operand A: its rows (forward) or columns (transposed) are the rows of the matrix instruction,
// the features, and rows of x its columns, the tokens. A block makes kQgemmSm80Features features of kTokens
// tokens. Steps of 64 along the sum come by asynchronous copies: units as they lie in the weight, so that the
// words of a lane are its fragments, and x in rows of 128 bytes, whose 16-byte chunks are swizzled.
//
// Forward, each group of columns is summed by itself and its scale applied to the sum. Transposed, where a sum
// runs across groups, the scale goes into the weight.
#include "cuda/device/mma.cuh"
#include "ops/qgemm/qgemm_sm80.cuh"
#include "ops/qgemm/qgemm_table.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

constexpr int kBits = kCodec.bits, kThreads = kQgemmSm80Threads, kUnits = kQgemmSm80Units;
constexpr bool kZeros = kCodec.asymmetric, kBiases = kCodec.kind == Kind::affine;
constexpr int kScaleBytes = kDoubleQuant ? 1 : scale_bytes(kCodec.scale_type);
constexpr int kBiasBytes = kBiases ? scale_bytes(kCodec.scale_type) : 0;
constexpr QgemmSm80Stage kStage =
    qgemm_sm80_stage(kBits, kScaleBytes, kZeros, kBiasBytes, kDoubleQuant, kUnitGroups, kTokens);
static_assert(kStage.stages >= 2);

// A block of the packed weight; kGroup: columns of a group, 0 where parameters have sections of their own.
constexpr int kUnitBytes = kUnitRows * kUnitCols * kBits / 8;
constexpr int kUnitsPerBlock = max(kGroup, kUnitCols) / kUnitCols;
constexpr int kGroupsPerBlock = kGroup == 32 ? 2 : 1;
constexpr int kBlockCodeBytes = kUnitsPerBlock * kUnitBytes;
constexpr int kGroupBytes = kUnitRows * (kScaleBytes + kZeros + kBiasBytes);
constexpr int kBlockBytes = kBlockCodeBytes + (kGroup > 0 ? kGroupsPerBlock * kGroupBytes : 0);

// A warp has kWarpBlocks times 32 features, two tiles of 16 each, and kTokenTiles times 8 tokens.
constexpr int kWarpBlocks = kTokens == 128 ? 2 : 1;
constexpr int kFeatureWarps = kQgemmSm80Features / 32 / kWarpBlocks;
constexpr int kTokenTiles = min(kTokens, 64) / 8;
// Steps of 16 along the sum that are decoded at once: within a group, or a strip, and as registers allow.
constexpr int kDeep = min(kTransposed || kTokens == 128 ? 2 : 4, 4 / (kTransposed ? 1 : kUnitGroups));

// Between two branches, for the scheduler to mix: more would take more registers.
constexpr int kTilesTogether = kWarpBlocks == 2 ? 1 : 2;

extern __shared__ Words4 shared_words[];
__device__ __forceinline__ u8* shared_bytes() { return reinterpret_cast<u8*>(shared_words); }
__device__ __forceinline__ float* shared_map() {
  return reinterpret_cast<float*>(shared_bytes() + kStage.table_bytes);
}

// ---- Two values of the type of the products in a word

__device__ __forceinline__ u32 fma_pair(F16, u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 fma_pair(BF16, u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
HALFBYTE_FN u32 same_pair(float x) { return rounded(Element(), x) * 0x10001u; }
constexpr u32 kOnes = same_pair(1), kMinusZeros = 0x80008000u;

// The values of two bytes of a word of 8-bit codes.
[[maybe_unused]] constexpr int kLowestCode = kCodec.kind == Kind::integer && !kCodec.asymmetric ? kCodec.q_min : 0;
template <int kFirst, int kSecond>
__device__ __forceinline__ u32 byte_pair(F16, u32 word) {
  constexpr u32 kMinus = same_pair(static_cast<float>(kLowestCode - 1024));  // 0x6400 + code is 1024 + code
  return fma_pair(F16(), __byte_perm(word, 0x64646464u, 0x4040 | kFirst | kSecond << 8), kOnes, kMinus);
}
template <int kFirst, int kSecond>
__device__ __forceinline__ u32 byte_pair(BF16, u32 word) {
  constexpr float kMinus = static_cast<float>(8388608 - kLowestCode);  // 2^23: as above_2_23()
  const float first = bit_cast<float>(__byte_perm(word, 0x4B000000u, 0x7540 | kFirst)) - kMinus;
  const float second = bit_cast<float>(__byte_perm(word, 0x4B000000u, 0x7540 | kSecond)) - kMinus;
  return __byte_perm(bit_cast<u32>(first), bit_cast<u32>(second), 0x7632);  // 8 bits: exact
}

// The table of pairs: a row of 128 bytes for each byte of codes, 32 copies, one a lane.
__device__ __forceinline__ void build_table(int thread) {
#pragma unroll 4
  for (int i = thread; i < kStage.table_bytes / 16; i += kThreads) {
    const u32 pair = value_pair(i / 8);
    shared_words[i] = {{pair, pair, pair, pair}};
  }
}
template <int kByte>
__device__ __forceinline__ u32 look_up(u32 word, u32 lane_bytes) {
  const u32 row = (kByte == 0 ? word << 7 : word >> (8 * kByte - 7)) & 0x7F80u;
  return *reinterpret_cast<const u32*>(shared_bytes() + (row | lane_bytes));
}

// ---- Copies of a step

struct Place {
  i64 strip, unit;
};
// Of unit q of a step of a tile.
__device__ __forceinline__ Place place_of(int q, i64 tile, i64 step) {
  if (kTransposed) return {step * 2 + q / 4, tile * 4 + q % 4};
  return {tile * kUnits + q, step};
}
__device__ __forceinline__ i64 block_offset(const QgemmSm80Args& args, const Place& at) {
  return at.strip * args.strip_bytes + at.unit / kUnitsPerBlock * kBlockBytes;
}
__device__ __forceinline__ i64 group_of(const QgemmSm80Args& args, const Place& at, int group) {
  const i64 col = at.unit * kUnitCols + group * (kUnitCols / kUnitGroups);
  return min(kGroup > 0 ? col / max(kGroup, 1) : col / args.group, args.groups - 1);
}

__device__ __forceinline__ void load_codes(const QgemmSm80Args& args, u8* stage, i64 tile, i64 step) {
  constexpr int kChunks = kUnitBytes / 16;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kUnits * kChunks; i += kThreads) {
    const Place at = place_of(i / kChunks, tile, step);
    const bool valid = at.strip < args.strips && at.unit < args.units_per_strip;
    const i64 offset = block_offset(args, at) + at.unit % kUnitsPerBlock * kUnitBytes + i % kChunks * 16;
    copy_async_or_zero(stage + i * 16, args.weight + (valid ? offset : 0), valid);
  }
}

// Group `group` of unit q: 32 scales, then 32 zero points or biases, then 32 absmax.
__device__ __forceinline__ u8* params_of(u8* stage, int q, int group) {
  return stage + kStage.code_bytes + kStage.x_bytes + (q * kUnitGroups + group) * kStage.param_bytes;
}
__device__ __forceinline__ void load_params(const QgemmSm80Args& args, u8* stage, i64 tile, i64 step) {
  constexpr int kScaleChunks = kUnitRows * kScaleBytes / 16, kChunks = kGroupBytes / 16;
  for (int i = static_cast<int>(threadIdx.x); i < kUnits * kUnitGroups * kChunks; i += kThreads) {
    const int chunk = i % kChunks, group = i / kChunks % kUnitGroups, q = i / (kChunks * kUnitGroups);
    const Place at = place_of(q, tile, step);
    const bool valid = at.strip < args.strips && at.unit < args.units_per_strip, scale = chunk < kScaleChunks;
    const int size = scale ? kScaleBytes : kZeros ? 1 : kBiasBytes, first = scale ? 0 : kScaleChunks;
    i64 offset;
    if (kGroup > 0) {
      offset = block_offset(args, at) + kBlockCodeBytes + (scale ? 0 : kGroupsPerBlock * kUnitRows * kScaleBytes) +
               group * kUnitRows * size;
    } else {
      offset = (scale ? args.scales : kZeros ? args.zeros : args.biases) +
               (at.strip * args.groups + group_of(args, at, group)) * kUnitRows * size;
    }
    offset += (chunk - first) * 16;
    copy_async_or_zero(params_of(stage, q, group) + chunk * 16, args.weight + (valid ? offset : 0), valid);
  }
  if (!kDoubleQuant) return;
  const u8* const absmax = args.weight + args.absmax;
  for (int i = static_cast<int>(threadIdx.x); i < kUnits * kUnitGroups * kUnitRows; i += kThreads) {
    const int row = i % kUnitRows, group = i / kUnitRows % kUnitGroups, q = i / (kUnitRows * kUnitGroups);
    const Place at = place_of(q, tile, step);
    const i64 index = (at.strip * kUnitRows + row) * args.groups + group_of(args, at, group);
    copy_async(reinterpret_cast<u32*>(params_of(stage, q, group) + kGroupBytes) + row,
               absmax + min(index >> 8, args.last_absmax) * 4);
  }
}

__device__ __forceinline__ u32 x_chunk(int token, int chunk) {  // where it lies, in bytes
  return static_cast<u32>(token * 128 + (chunk ^ (token & 7)) * 16);
}
__device__ __forceinline__ void load_x(const QgemmSm80Args& args, u8* stage, i64 first_token, i64 step) {
  const u16* const x = static_cast<const u16*>(args.x);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kTokens * 8; i += kThreads) {
    const i64 row = first_token + i / 8, col = step * kQgemmSm80Step + i % 8 * 8;
    u8* const to = stage + kStage.code_bytes + x_chunk(i / 8, i % 8);
    const bool valid = row < args.m && col < args.in_cols;
    const u16* const from = x + (valid ? row * args.in_cols + col : 0);
    if (kAligned) {
      copy_async_or_zero(to, from, valid);
    } else {
      Words4 chunk = {};
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (valid && col + j < args.in_cols) chunk.word[j / 2] |= static_cast<u32>(from[j]) << (j % 2 * 16);
      *reinterpret_cast<Words4*>(to) = chunk;
    }
  }
}

// ---- Fragments

template <int n>
struct alignas(4 * n) WordsOf {
  u32 word[n];
};

struct Lane {
  int index, g, t;
  u32 table;     // bytes from the begin of a row of the table
  float offset;  // of double quantization
};

__device__ __forceinline__ float scale_at(const u8* params, int row, const Lane& lane) {
  if (!kDoubleQuant) return load_scale<float>(params, row, kCodec.scale_type);
  const float absmax = reinterpret_cast<const float*>(params + kGroupBytes)[row];
  return shared_map()[params[row]] * absmax + lane.offset;
}
__device__ __forceinline__ float bias_at(const u8* params, int row) {
  return load_scale<float>(params + kUnitRows * kScaleBytes, row, kCodec.scale_type);
}
__device__ __forceinline__ float zero_at(const u8* params, int row) {
  return static_cast<float>(params[kUnitRows * kScaleBytes + row]);
}

// Tile `half` of 16 rows of unit `unit` for steps chunk * kDeep and on.
__device__ __forceinline__ void forward_fragments(u32 (&a)[kDeep][4], const u8* unit, const u8* params, int half,
                                                  int chunk, const Lane& lane) {
  const u8* const slot = unit + packed_slot(8 * half + lane.g, lane.t) * 16;
  if constexpr (kBits == 4) {
    const auto words = *reinterpret_cast<const WordsOf<kDeep>*>(slot + chunk * kDeep * 4);
#pragma unroll
    for (int j = 0; j < kDeep; ++j) {
      a[j][0] = look_up<0>(words.word[j], lane.table);
      a[j][1] = look_up<1>(words.word[j], lane.table);
      a[j][2] = look_up<2>(words.word[j], lane.table);
      a[j][3] = look_up<3>(words.word[j], lane.table);
    }
  } else {
    constexpr int kWide = min(kDeep, 2);  // steps in 16 bytes
#pragma unroll
    for (int j = 0; j < kDeep; ++j) {
      const int step = chunk * kDeep + j;
      const auto words =
          *reinterpret_cast<const WordsOf<2 * kWide>*>(slot + step / 2 * 1024 + (kWide == 2 ? 0 : step % 2 * 8));
      const int first = kWide == 2 ? j % 2 * 2 : 0;
      a[j][0] = byte_pair<0, 1>(Element(), words.word[first]);
      a[j][1] = byte_pair<2, 3>(Element(), words.word[first]);
      a[j][2] = byte_pair<0, 1>(Element(), words.word[first + 1]);
      a[j][3] = byte_pair<2, 3>(Element(), words.word[first + 1]);
    }
  }
  if (kZeros) {
    const int row = 16 * half + 2 * lane.g;
    const u32 even = same_pair(-zero_at(params, row)), odd = same_pair(-zero_at(params, row + 1));
#pragma unroll
    for (int j = 0; j < kDeep; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[j][i] = fma_pair(Element(), a[j][i], kOnes, i % 2 ? odd : even);
  }
}

// The 32 columns of half `half` of a unit, 16 a tile, for the 32 rows of its strip. Lane (g, t) has of tile i
// columns 16 (g / 4) + 2 (g % 4) + 8 i and the next, its fragments' rows g and g + 8.
__device__ __forceinline__ void transposed_fragments(u32 (&a)[2][kDeep][4], const u8* unit, const u8* params,
                                                     int half, const Lane& lane) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int second = 0; second < 2; ++second) {  // half of the 16 rows
      const int pair = 8 * j + 4 * second + lane.t;
      const u8* const slot = unit + packed_slot(pair, lane.g % 4) * 16;
      u32 values[2][2];  // [tile][column]
      if constexpr (kBits == 4) {
        u32 word = *reinterpret_cast<const u32*>(slot + (2 * half + lane.g / 4) * 4);
        // From pairs of columns to pairs of rows: the high code of each even byte and the low one of the next
        // change places.
        word ^= ((word ^ word >> 4) & 0x00F000F0u) * 17;
        values[0][0] = look_up<0>(word, lane.table);
        values[0][1] = look_up<1>(word, lane.table);
        values[1][0] = look_up<2>(word, lane.table);
        values[1][1] = look_up<3>(word, lane.table);
      } else {
        const auto words = *reinterpret_cast<const WordsOf<2>*>(slot + half * 1024 + lane.g / 4 * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          values[i][0] = byte_pair<0, 2>(Element(), words.word[i]);
          values[i][1] = byte_pair<1, 3>(Element(), words.word[i]);
        }
      }
      const int row = 2 * pair;
      const u32 scales = store_pair(Element(), scale_at(params, row, lane), scale_at(params, row + 1, lane));
      const u32 biases =
          kBiases ? store_pair(Element(), bias_at(params, row), bias_at(params, row + 1)) : kMinusZeros;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 value = values[i / 2][i % 2];
        if (kZeros)
          value = fma_pair(Element(), value, kOnes,
                           store_pair(Element(), -zero_at(params, row), -zero_at(params, row + 1)));
        a[i / 2][j][2 * second + i % 2] = fma_pair(Element(), value, scales, biases);
      }
    }
  }
}

using Sums = float[kWarpBlocks][2][kTokenTiles][4];

// Adds a step. `warp_feature`, `warp_token`: where the warp begins, in blocks of 32 features and in tokens of the tile;
// `tokens`: how many it has.
__device__ __forceinline__ void multiply(Sums& sums, u8* stage, int warp_feature, int warp_token, int tokens,
                                         const Lane& lane) {
#pragma unroll kTokens == 128 ? 1 : 4 / kDeep
  for (int chunk = 0; chunk < 4 / kDeep; ++chunk) {
    u32 a[kWarpBlocks][2][kDeep][4];
    float scales[kWarpBlocks][2][2], biases[kWarpBlocks][2][2];
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
      const int feature = warp_feature + block;
      if constexpr (kTransposed) {
        const int q = chunk * 4 + feature / 2, half = feature % 2;
        const int group = kUnitGroups == 1 ? 0 : kUnitGroups == 2 ? half : 2 * half + lane.g / 4;
        transposed_fragments(a[block], stage + q * kUnitBytes, params_of(stage, q, group), half, lane);
      } else {
        const u8* const params = params_of(stage, feature, chunk * kDeep * kUnitGroups / 4);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          forward_fragments(a[block][half], stage + feature * kUnitBytes, params, half, chunk, lane);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int row = 16 * half + 2 * lane.g + i;
            scales[block][half][i] = scale_at(params, row, lane);
            biases[block][half][i] = kBiases ? bias_at(params, row) : 0;
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; ++tile) {
      if (tile % kTilesTogether == 0 && tile * 8 >= tokens) break;
      const int token = warp_token + tile * 8 + lane.index % 8;
      u32 b[kDeep][2];
#pragma unroll
      for (int i = 0; i < (kDeep + 1) / 2; ++i) {
        u32 m[4];
        load_matrices(
            m, stage + kStage.code_bytes + x_chunk(token, (chunk * kDeep / 2 + i) * 4 + lane.index / 8));
        if constexpr (kDeep == 1) {
          b[0][0] = chunk % 2 ? m[2] : m[0];
          b[0][1] = chunk % 2 ? m[3] : m[1];
        } else {
          b[2 * i][0] = m[0];
          b[2 * i][1] = m[1];
          b[2 * i + 1][0] = m[2];
          b[2 * i + 1][1] = m[3];
        }
      }
      float x_sums[4] = {};  // of the tokens 2t and 2t + 1 over the group
      if (kBiases && !kTransposed) {
        const u32 ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
        for (int j = 0; j < kDeep; ++j) mma(Element(), x_sums, ones, b[j]);
      }
#pragma unroll
      for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float(&sum)[4] = sums[block][half][tile];
          if constexpr (kTransposed) {
#pragma unroll
            for (int j = 0; j < kDeep; ++j) mma(Element(), sum, a[block][half][j], b[j]);
          } else {
            float group_sum[4] = {};
#pragma unroll
            for (int j = 0; j < kDeep; ++j) mma(Element(), group_sum, a[block][half][j], b[j]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sum[i] = __fmaf_rn(scales[block][half][i / 2], group_sum[i], sum[i]);
              if (kBiases) sum[i] = __fmaf_rn(biases[block][half][i / 2], x_sums[i], sum[i]);
            }
          }
        }
      }
    }
  }
}

#endif

extern "C" __global__ void __launch_bounds__(kQgemmSm80Threads, qgemm_sm80_blocks(kTokens))
    qgemm_sm80(const __grid_constant__ QgemmSm80Args args) {
#if HALFBYTE_DEVICE_ARCH >= 800
  i64 block = block_index();
  const i64 first_token = block % args.token_tiles * kTokens;
  block /= args.token_tiles;
  const i64 tile = block % args.feature_tiles, split = block / args.feature_tiles;
  if (split >= args.splits) return;
  const i64 begin = split * args.steps / args.splits, end = (split + 1) * args.steps / args.splits;
#if HALFBYTE_DEVICE_ARCH >= 900
  let_next_start();
#endif

  u8* const stages = shared_bytes() + kStage.table_bytes + kStage.map_bytes;
  constexpr int kAhead = kStage.stages - 1;
  // The weight is there before earlier kernels have ended; x may not be.
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i >= end) break;
    load_codes(args, stages + i * kStage.bytes(), tile, begin + i);
    load_params(args, stages + i * kStage.bytes(), tile, begin + i);
  }
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  build_table(thread);
  Lane lane = {thread % 32, thread % 32 / 4, thread % 4, static_cast<u32>(thread % 32 * 4), 0};
  if (kDoubleQuant) {
    static_assert(kThreads == 256);
    shared_map()[thread] = reinterpret_cast<const float*>(args.weight + args.map)[thread];
    lane.offset = *reinterpret_cast<const float*>(args.weight + args.offset);
  }
  wait_for_earlier();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (begin + i < end) load_x(args, stages + i * kStage.bytes(), first_token, begin + i);
    commit_copies();
  }

  const int warp_feature = warp % kFeatureWarps * kWarpBlocks, warp_token = warp / kFeatureWarps * 64;
  const int tokens = static_cast<int>(min<i64>(args.m - first_token - warp_token, 64));
  Sums sums = {};
  int slot = 0;
#pragma unroll 1
  for (i64 next = begin + kAhead; next < end + kAhead; ++next) {
    wait_copies<kAhead - 1>();
    __syncthreads();  // the step is there, and all are done with the one before
    if (next < end) {
      u8* const stage = stages + (slot == 0 ? kAhead : slot - 1) * kStage.bytes();
      load_codes(args, stage, tile, next);
      load_params(args, stage, tile, next);
      load_x(args, stage, first_token, next);
    }
    commit_copies();
    multiply(sums, stages + slot * kStage.bytes(), warp_feature, warp_token, tokens, lane);
    slot = slot == kAhead ? 0 : slot + 1;
  }

#pragma unroll
  for (int block_of_warp = 0; block_of_warp < kWarpBlocks; ++block_of_warp) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int in_block =
          kTransposed ? 16 * (lane.g / 4) + 2 * (lane.g % 4) + 8 * half : 16 * half + 2 * lane.g;
      const i64 col = tile * kQgemmSm80Features + (warp_feature + block_of_warp) * 32 + in_block;
      if (col >= args.out_cols) continue;
#pragma unroll
      for (int i = 0; i < kTokenTiles * 2; ++i) {
        const i64 row = first_token + warp_token + i / 2 * 8 + 2 * lane.t + i % 2;
        if (row >= args.m) continue;
        const float(&sum)[4] = sums[block_of_warp][half][i / 2];
        const float first = sum[i % 2], second = sum[2 + i % 2];
        if (args.partials != nullptr) {
          float* const to = args.partials + (split * args.m + row) * args.out_stride + col;
          asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(first), "f"(second) : "memory");
        } else {
          finish(args, row, col, first, second);
        }
      }
    }
  }
#endif
}

}  // namespace halfbyte::device
