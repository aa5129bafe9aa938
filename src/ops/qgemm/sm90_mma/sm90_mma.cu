// qgemm_sm90_mma: y[m, n] = x[m, k] . W^T of a packed weight, for m <= 8, by mma.sync with the weight as the
// operand of 16 rows and x as that of 8 columns.
//
// A block has whole strips of 32 rows, one a round; where strips do not divide evenly, two blocks share one
// in the last round, each with one tile of 16 rows. Its 16 warps divide k: a stage of the ring is 16 units,
// one bulk copy, and warp w multiplies unit w. What a warp needs of x stays in its registers: kUnits units.
// After each round the sums of the warps are added in order.
//
// What limits it: reads and writes of shared memory, a clock each 128 bytes. A unit of 4-bit codes takes 32
// for the table, 8 for the codes and 9 when they are copied, 2 to 4 for scales, 2 for sums: 53 to 55 of the
// 60 clocks in which the memory of an H200 brings the next; double quantization takes 7 to 8 for scales.
// About 117 instructions a unit are half of what the block can issue.
//
// Before the kernels before it have ended only the weight is read.
#include "cuda/device/bulk.cuh"
#include "cuda/device/codes.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"
#include "formats/codec.h"
#include "ops/qgemm/sm90_mma/sm90_mma_args.h"
#include "ops/qgemm/weight/output.cuh"
#include "ops/qgemm/weight/pairs.cuh"
#include "ops/qgemm/weight/scales.cuh"
#include "ops/qgemm/weight/table.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 900

// ---- 1. Shared memory, and what a block does.

constexpr int kWarps = kSm90MmaWarps, kThreads = kSm90MmaThreads;
constexpr bool kLookUp = kBits == 4;
constexpr PackedLayout kStage =
    sm90_mma_stage(kBits, kParameterBytes, kAsymmetric, kAffine, kGroup, kDoubleQuant);
constexpr int kStageBytes = static_cast<int>(kStage.strip_bytes);
constexpr Sm90MmaShared kShared = sm90_mma_shared(kBits, kStageBytes, kStages, kDoubleQuant);
// Copies that are asked for before x: on an H200 more of them delay x by as long as they take, none the
// weight.
constexpr int kFirst = 1, kFirstEarly = 2;
constexpr int kUnitBytes = kUnitRows * kUnitCols * kBits / 8;

extern __shared__ __align__(1024) u8 shared[];

// What a block does: the strips of its rounds, of which the last may be shared with another block. In shared
// memory: the registers are x's.
struct Work {
  int whole_rounds, rounds;  // with both tiles, in all
};
__device__ __forceinline__ Work& work() { return *reinterpret_cast<Work*>(shared + kShared.work); }
__device__ __forceinline__ Barrier* full(int slot) {
  return reinterpret_cast<Barrier*>(shared + kShared.barriers) + slot;
}
__device__ __forceinline__ Barrier* empty(int slot) { return full(kStages + slot); }

__device__ __forceinline__ Work make_work(const QgemmSm90MmaArgs& args) {
  const int index = static_cast<int>(blockIdx.x), num_blocks = static_cast<int>(gridDim.x);
  const bool halves = 2 * args.rest <= num_blocks;
  const int whole_rounds = args.rounds + (!halves && index < args.rest ? 1 : 0);
  return {whole_rounds, whole_rounds + (halves && index < 2 * args.rest ? 1 : 0)};
}
__device__ __forceinline__ int strip_of(int round, int whole_rounds) {
  const int index = static_cast<int>(blockIdx.x);
  return round * static_cast<int>(gridDim.x) + (round < whole_rounds ? index : index / 2);
}

// ---- 2. The ring is filled.

// Starts copy number `copy` of the block, in the order in which stages are used, if there are so many. By one
// thread.
__device__ __forceinline__ void start_copy(const QgemmSm90MmaArgs& args, const Work& w, int copy, int slot) {
  if (copy >= w.rounds * kUnits) return;
  const i64 begin = static_cast<i64>(copy % kUnits) * kStageBytes, rest = args.layout.strip_bytes - begin;
  const u32 num_bytes = rest < kStageBytes ? static_cast<u32>(rest) : kStageBytes;
  const u8* const strip = args.weight + strip_of(copy / kUnits, w.whole_rounds) * args.layout.strip_bytes;
  arrive_expecting(full(slot), num_bytes);
  copy_bulk_once(shared + kShared.ring + slot * kStageBytes, strip + begin, num_bytes, full(slot));
}
__device__ __forceinline__ void start_copies(const QgemmSm90MmaArgs& args, const Work& w, int from, int to) {
#pragma unroll 1
  for (int i = from; i < to; ++i) start_copy(args, w, i, i);
}

// ---- 3. The parameters of a lane's rows.

// A lane of a warp, in the terms of mma.cuh: it has rows 2 * row and 2 * row + 1 of each tile (g and g + 8 of
// the fragments), and pairs of columns `pair` of 8.
struct Lane {
  int warp, lane, row, pair;
  u32 table;
  int codes, scales, zeros;  // in a stage: of its first 16 bytes; of its first row and the warp's first group

  __device__ __forceinline__ explicit Lane(u32 thread)
      : warp(static_cast<int>(thread / 32)),
        lane(static_cast<int>(thread % 32)),
        row(static_cast<int>(thread / 4 % 8)),
        pair(static_cast<int>(thread % 4)),
        table(pair_table_lane(lane)) {
    const i64 group = kGroup > 0 ? warp * kUnitCols / max(kGroup, 1) : 0;
    codes = static_cast<int>(kStage.unit(0, warp)) + packed_slot(row, pair) * 16;
    scales = static_cast<int>(kStage.scale(0, group)) + 2 * row * kStage.scale_bytes;
    zeros = static_cast<int>(kStage.zero(0, group)) + 2 * row;
  }
};

// From a scale to the bias beside it: they are of one size.
constexpr int kBiases = static_cast<int>(kStage.bias(0, 0) - kStage.scale(0, 0));

// What is subtracted from codes: a pair of zero points, or 2^23 and the code of 0.
using Zero = Select<kLookUp, u32, float>;
template <int kTiles>
struct Zeros {
  Zero zero[kTiles][2];
};

// Double quantization: each of the four lanes that need the scales of the same four rows decodes one of them.
// An absmax is that of 256 scales in the order of rows, and a row has no more: it has two absmax at most,
// which come to shared memory some strips before they are needed.
constexpr bool kNested = kDoubleQuant && kGroup > 0;
constexpr int kAbsmaxAhead = kSm90MmaAbsmaxStrips - 1;
constexpr int kStageGroups = kWarps * kUnitCols / max(kGroup, 1);
static_assert(!kNested || kUnits * kStageGroups <= 256);

// The absmax of the row, and the one after, of strip `number` of the block.
__device__ __forceinline__ u32* absmax_at(int number, int row) {
  return reinterpret_cast<u32*>(shared + kShared.absmax) + number % kSm90MmaAbsmaxStrips * 2 * kUnitRows +
         row;
}
// Starts the copies of these of a strip, in the order in which the block has them, if there are so many. By
// 64 threads.
__device__ __forceinline__ void start_absmax(const QgemmSm90MmaArgs& args, const Work& w, int number,
                                             int thread) {
  if (number >= w.rounds) return;
  const i64 groups = args.layout.groups;
  const i64 row = static_cast<i64>(strip_of(number, w.whole_rounds)) * kUnitRows + thread % kUnitRows;
  const i64 first = row * groups / 256, last = (args.layout.n * groups - 1) / 256;
  const float* const absmax = reinterpret_cast<const float*>(args.weight + args.layout.absmax);
  copy_async(absmax_at(number, thread), absmax + min(first + thread / kUnitRows, last));
}
// Starts the copies of the map and of the first absmax; returns the offset.
__device__ __forceinline__ float start_scales(const QgemmSm90MmaArgs& args, const Work& w, int thread) {
  const auto floats_at = [&](i64 at) { return reinterpret_cast<const float*>(args.weight + at); };
  const float offset = load_early(floats_at(args.layout.offset));
  if (thread < 256)
    copy_async(reinterpret_cast<u32*>(shared + kShared.map) + thread, floats_at(args.layout.map) + thread);
  else if (kNested && thread < 256 + 64 * kAbsmaxAhead)
    start_absmax(args, w, (thread - 256) / 64, thread % 64);
  return offset;
}
__device__ __forceinline__ float decode_scale(u8 code, float absmax, float offset) {
  return reinterpret_cast<const float*>(shared + kShared.map)[code] * absmax + offset;
}
// The row of which this lane decodes the scale, after its first.
template <int kTiles>
__device__ __forceinline__ int nested_row(const Lane& lane, int tile) {
  return 16 * (kTiles == 2 ? lane.pair / 2 : tile) + lane.pair % 2;
}

// `scales`: from that of the lane's first row on; of double quantization `decoded`: that of nested_row().
template <int kTiles>
__device__ __forceinline__ void load_tile_scales(float (&scale)[kTiles][2], const Lane& lane, int tile,
                                                 const u8* scales, float decoded) {
  if constexpr (kDoubleQuant) {
    // Three shuffles, where one for each of the four scales were four.
    const bool odd = lane.pair & 1, upper = lane.pair & 2;
    const float beside = shuffle_xor(decoded, 1);
    const float two[2] = {odd ? beside : decoded, odd ? decoded : beside};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (kTiles == 1) {
        scale[0][i] = two[i];
      } else {
        const float other = shuffle_xor(two[i], 2);
        scale[0][i] = upper ? other : two[i];
        scale[1][i] = upper ? two[i] : other;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      load_scales<kParameterBytes>(scale[i], scales + 16 * (tile + i) * kStage.scale_bytes, kBf16Scales);
  }
}
template <int kTiles>
__device__ __forceinline__ void load_tile_biases(float (&bias)[kTiles][2], int tile, const u8* biases) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    load_scales<kParameterBytes>(bias[i], biases + 16 * (tile + i) * kStage.bias_bytes, kBf16Scales);
}

// `zeros`: from that of the lane's first row on.
template <int kTiles>
__device__ __forceinline__ Zeros<kTiles> load_zeros(int tile, const u8* zeros) {
  Zeros<kTiles> result;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    u32 rows = static_cast<u32>(-kLowestCode) * 0x101u;
    if constexpr (kAsymmetric) rows = *reinterpret_cast<const u16*>(zeros + 16 * (tile + i));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float zero = above_2_23(rows >> (8 * r) & 0xFF);
      if constexpr (kLookUp)
        result.zero[i][r] = store_pair(Element(), zero - above_2_23(0), zero - above_2_23(0));
      else
        result.zero[i][r] = zero;
    }
  }
  return result;
}

// ---- 4. Codes become fragments, and are multiplied.

// The fragment of columns 16 * kStep to 16 * kStep + 15 of a unit, for one tile, of which `words` has the
// lane's codes.
template <int kStep>
__device__ __forceinline__ void make_fragment(u32 (&a)[4], const u32 (&words)[kBits], u32 table,
                                              const Zero (&zero)[2]) {
  if constexpr (kLookUp) {
    a[0] = look_up_pair<0>(words[kStep], table);
    a[1] = look_up_pair<1>(words[kStep], table);
    a[2] = look_up_pair<2>(words[kStep], table);
    a[3] = look_up_pair<3>(words[kStep], table);
    if constexpr (kAsymmetric) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = subtract_pair(Element(), a[i], zero[i % 2]);
    }
  } else {
    a[0] = decode_bytes<0, 1>(words[2 * kStep], words[2 * kStep], zero[0]);
    a[1] = decode_bytes<2, 3>(words[2 * kStep], words[2 * kStep], zero[1]);
    a[2] = decode_bytes<0, 1>(words[2 * kStep + 1], words[2 * kStep + 1], zero[0]);
    a[3] = decode_bytes<2, 3>(words[2 * kStep + 1], words[2 * kStep + 1], zero[1]);
  }
}

template <int kTiles, int kStep>
__device__ __forceinline__ void multiply_step(float (&sums)[kTiles][4], const u32 (&words)[kTiles][kBits],
                                              u32 table, const Zeros<kTiles>& zeros, const u32 (&x)[8]) {
  const u32 b[2] = {x[2 * kStep], x[2 * kStep + 1]};
  u32 a[kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) make_fragment<kStep>(a[i], words[i], table, zeros.zero[i]);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) mma(Element(), sums[i], a[i], b);
}

// Sums of x over steps of a unit, in all rows.
__device__ __forceinline__ void sum_x(float (&sums)[4], const u32 (&x)[8], int first_step, int num_steps) {
  const u32 one = store_pair(Element(), 1, 1), ones[4] = {one, one, one, one};
#pragma unroll
  for (int step = first_step; step < first_step + num_steps; ++step) {
    const u32 b[2] = {x[2 * step], x[2 * step + 1]};
    mma(Element(), sums, ones, b);
  }
}

// total += factor * sum, and a new sum begins; one sum, that of x alone, is for both tiles.
template <int kTiles, int kSums>
__device__ __forceinline__ void add_scaled(float (&total)[kTiles][4], const float (&factor)[kTiles][2],
                                           float (&sum)[kSums][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      total[i][j] = __fmaf_rn(factor[i][j / 2], sum[min(i, kSums - 1)][j], total[i][j]);
#pragma unroll
  for (int i = 0; i < kSums; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) sum[i][j] = 0;
}

// ---- 5. What a warp does: declared here, the steps follow.

// threadIdx.x, read again: what follows from it does not stay in registers over the loops before.
__device__ __forceinline__ u32 thread_again() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// What a warp has of a strip, both tiles or one.
template <int kTiles>
struct Strip {
  int tile;  // the first, or the only one
  // Of nested_row(): its absmax, and the number of the scale of the warp's first group among those of the
  // first absmax.
  float absmax[2] = {};
  int nested_index = 0;
  float total[kTiles][4] = {};
  float part[kTiles][4] = {}, x[1][4] = {};  // of the group: codes by x, and x alone
  Zeros<kTiles> zeros{};
};

// Multiplies what is in the ring, and adds up.
struct Consumer {
  const QgemmSm90MmaArgs& args;
  const Lane& lane;
  const float& offset;  // of double quantization
  int slot = 0;
  u32 parity = 0;
  int count = 0;  // stages used

  __device__ __forceinline__ void load_x(u32 (&x)[kUnits][8]) const;
  __device__ __forceinline__ void arrange_x(u32 (&x)[kUnits][8]) const;
  template <int kTiles, int kFirstStep, int kSteps>
  __device__ __forceinline__ void multiply_group(Strip<kTiles>& strip, const u32 (&words)[kTiles][kBits],
                                                 const u32 (&x)[8], const u8* stage, int u) const;
  template <int kTiles>
  __device__ __forceinline__ void multiply_unit(Strip<kTiles>& strip, const u32 (&x)[8], int u) const;
  __device__ __forceinline__ void release_stage();
  template <int kTiles>
  __device__ __forceinline__ void take_absmax(Strip<kTiles>& strip, int round) const;
  template <int kTiles>
  __device__ __forceinline__ void load_row_parameters(Strip<kTiles>& strip, float (&scale)[kTiles][2],
                                                      float (&bias)[kTiles][2], int round) const;
  template <int kTiles>
  __device__ __forceinline__ void multiply_strip(const u32 (&x)[kUnits][8], int round, int tile);
  template <int kTiles>
  __device__ __forceinline__ void add_warps(u32 thread, int round, int only_tile) const;
  __device__ __forceinline__ void store_rows(float (&sum)[2], int token, i64 row) const;

  // The sums of a warp in a round: 16 bytes a tile and lane.
  __device__ __forceinline__ u8* sums_at(int round, int warp, int tile, int of_lane) const {
    const int row = (round % 2 * kWarps + warp) * 8 + tile * 4 + of_lane / 8;
    return shared + row * kShared.sum_stride + kShared.sum_begin + of_lane % 8 * 16;
  }
};

// ---- 6. Operand B: x, in registers.

// The fragments of the warp's units: zeros beyond m and k. Where rows of x are whole chunks of 16
// bytes, a lane loads chunks, and arrange_x() makes them fragments: loads of single words would take three
// times as long.
__device__ __forceinline__ void Consumer::load_x(u32 (&x)[kUnits][8]) const {
  const i64 begin = static_cast<i64>(lane.warp) * kUnitCols;
  const int rest = static_cast<int>(min<i64>(args.layout.k - begin, kUnits * kWarps * kUnitCols));
  const int num_cols = lane.row < args.m ? rest : 0;
  const u16* const from = static_cast<const u16*>(args.x) + lane.row * args.layout.k + begin;
#pragma unroll
  for (int u = 0; u < kUnits; ++u)
#pragma unroll
    for (int i = 0; i < 8; ++i) x[u][i] = 0;
  if (args.whole_chunks) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int col = u * kWarps * kUnitCols + half * 32 + lane.pair * 8;
        if (col >= num_cols) continue;
        const Words4 chunk = load_to_write(reinterpret_cast<const Words4*>(from + col));
#pragma unroll
        for (int i = 0; i < 4; ++i) x[u][half * 4 + i] = chunk.word[i];
      }
  } else {
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int col = u * kWarps * kUnitCols + 8 * i + 2 * lane.pair;
        if (col < num_cols) x[u][i] = *reinterpret_cast<const u32*>(from + col);
      }
  }
}

// Four words of each lane of a quad, transposed: lane t gets word t of every lane.
__device__ __forceinline__ void transpose_quad(u32 (&words)[8], int at, int t) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = t & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      u32 &low = words[at + i], &high = words[at + i + step];
      const u32 other = shuffle_xor(upper ? low : high, step);
      low = upper ? other : low;
      high = upper ? high : other;
    }
  }
}
__device__ __forceinline__ void Consumer::arrange_x(u32 (&x)[kUnits][8]) const {
  if (!args.whole_chunks) return;
#pragma unroll
  for (int u = 0; u < kUnits; ++u)
#pragma unroll
    for (int at = 0; at < 8; at += 4) transpose_quad(x[u], at, lane.pair);
}

// ---- 7. A unit, a stage, a strip.

// The steps of a unit that have one group: all four, or two.
template <int kTiles, int kFirstStep, int kSteps>
__device__ __forceinline__ void Consumer::multiply_group(Strip<kTiles>& strip,
                                                         const u32 (&words)[kTiles][kBits], const u32 (&x)[8],
                                                         const u8* stage, int u) const {
  constexpr int kIndex = kFirstStep / 2;  // of the group in the unit
  const u8* const scales = stage + lane.scales + kIndex * kUnitRows * kStage.scale_bytes;
  float decoded = 0;
  if constexpr (kNested) {  // early: one load after the other
    const bool second = strip.nested_index + u * kStageGroups + kIndex >= 256;
    decoded = decode_scale(scales[nested_row<kTiles>(lane, strip.tile)],
                           second ? strip.absmax[1] : strip.absmax[0], offset);
  }
  if constexpr (kGroup > 0 && kAsymmetric)
    strip.zeros = load_zeros<kTiles>(strip.tile, stage + lane.zeros + kIndex * kUnitRows);
  multiply_step<kTiles, kFirstStep>(strip.part, words, lane.table, strip.zeros, x);
  multiply_step<kTiles, kFirstStep + 1>(strip.part, words, lane.table, strip.zeros, x);
  if constexpr (kSteps == 4) {
    multiply_step<kTiles, kFirstStep + 2>(strip.part, words, lane.table, strip.zeros, x);
    multiply_step<kTiles, kFirstStep + 3>(strip.part, words, lane.table, strip.zeros, x);
  }
  float factor[kTiles][2];
  if constexpr (kGroup > 0) {
    load_tile_scales<kTiles>(factor, lane, strip.tile, scales, decoded);
    add_scaled(strip.total, factor, strip.part);
  }
  if constexpr (kAffine) sum_x(strip.x[0], x, kFirstStep, kSteps);
  if constexpr (kAffine && kGroup > 0) {
    load_tile_biases<kTiles>(factor, strip.tile,
                             stage + lane.scales + kBiases + kIndex * kUnitRows * kStage.bias_bytes);
    add_scaled(strip.total, factor, strip.x);
  }
}

template <int kTiles>
__device__ __forceinline__ void Consumer::multiply_unit(Strip<kTiles>& strip, const u32 (&x)[8],
                                                        int u) const {
  const u8* const stage = shared + kShared.ring + slot * kStageBytes;
  u32 words[kTiles][kBits];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < kBits; j += 4) {
      const Words4 four = *reinterpret_cast<const Words4*>(stage + lane.codes + (strip.tile + i) * 512 +
                                                           j / 4 * (kUnitBytes / 2));
#pragma unroll
      for (int w = 0; w < 4; ++w) words[i][j + w] = four.word[w];
    }
  if constexpr (kGroup == 32) {
    multiply_group<kTiles, 0, 2>(strip, words, x, stage, u);
    multiply_group<kTiles, 2, 2>(strip, words, x, stage, u);
  } else {
    multiply_group<kTiles, 0, 4>(strip, words, x, stage, u);
  }
}

// The stage is used up. Not this one, which other warps may still read, but the one before is filled again;
// by the warps in turn: it takes as long as a third of a unit.
__device__ __forceinline__ void Consumer::release_stage() {
  __syncwarp();
  if (lane.lane == 0) arrive(empty(slot));
  if (lane.lane == 0 && count % kWarps == lane.warp && count > 0) {
    const int before = slot == 0 ? kStages - 1 : slot - 1;
    wait(empty(before), slot == 0 ? parity ^ 1 : parity);
    start_copy(args, work(), count - 1 + kStages, before);
  }
  ++count;
  if (++slot == kStages) slot = 0, parity ^= 1;
}

// Double quantization of groups: the absmax of a strip, which are in shared memory; those of a later one are
// copied there.
template <int kTiles>
__device__ __forceinline__ void Consumer::take_absmax(Strip<kTiles>& strip, int round) const {
  const int row = 2 * lane.row + nested_row<kTiles>(lane, strip.tile);
  const u32 of_weight =
      static_cast<u32>(strip_of(round, work().whole_rounds)) * kUnitRows + static_cast<u32>(row);
  strip.absmax[0] = bit_cast<float>(*absmax_at(round, row));
  strip.absmax[1] = bit_cast<float>(*absmax_at(round, row + kUnitRows));
  strip.nested_index = static_cast<int>(of_weight * static_cast<u32>(args.layout.groups) % 256) +
                       lane.warp * kUnitCols / max(kGroup, 1);
  if (const u32 thread = thread_again(); thread < 64)
    start_absmax(args, work(), round + kAbsmaxAhead, static_cast<int>(thread));
  commit_copies();
}

// The parameters of rows that have one scale.
template <int kTiles>
__device__ __forceinline__ void Consumer::load_row_parameters(Strip<kTiles>& strip, float (&scale)[kTiles][2],
                                                              float (&bias)[kTiles][2], int round) const {
  const int tile = strip.tile;
  const i64 row = static_cast<i64>(strip_of(round, work().whole_rounds)) * kUnitRows + 2 * lane.row;
  const u8* const scales = args.weight + args.layout.scale(row, 0);
  float decoded = 0;
  if constexpr (kDoubleQuant) {
    const int nested = nested_row<kTiles>(lane, tile);
    const float* const absmax = reinterpret_cast<const float*>(args.weight + args.layout.absmax);
    decoded = decode_scale(scales[nested], absmax[min(row + nested, args.layout.n - 1) / 256], offset);
  }
  load_tile_scales<kTiles>(scale, lane, tile, scales, decoded);
  if constexpr (kAffine) load_tile_biases<kTiles>(bias, tile, args.weight + args.layout.bias(row, 0));
  strip.zeros = load_zeros<kTiles>(tile, args.weight + args.layout.zero(row, 0));
}

// Both tiles of a strip, or one: the units of the warp.
template <int kTiles>
__device__ __forceinline__ void Consumer::multiply_strip(const u32 (&x)[kUnits][8], int round, int tile) {
  Strip<kTiles> strip{tile};
  float scale[kTiles][2], bias[kTiles][2];
  if constexpr (kNested) take_absmax(strip, round);
  if constexpr (kGroup == 0)
    load_row_parameters(strip, scale, bias, round);
  else if constexpr (!kAsymmetric)
    strip.zeros = load_zeros<kTiles>(tile, nullptr);
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    wait(full(slot), parity);
    if (u < kUnits - 1 || u * kWarps + lane.warp < args.units) multiply_unit(strip, x[u], u);
    release_stage();
  }
  if constexpr (kGroup == 0) add_scaled(strip.total, scale, strip.part);
  if constexpr (kGroup == 0 && kAffine) add_scaled(strip.total, bias, strip.x);
  const u32 thread = thread_again();
  const int warp = static_cast<int>(thread / 32), of_lane = static_cast<int>(thread % 32);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    *reinterpret_cast<Words4*>(sums_at(round, warp, tile + i, of_lane)) = {
        bit_cast<u32>(strip.total[i][0]), bit_cast<u32>(strip.total[i][2]), bit_cast<u32>(strip.total[i][1]),
        bit_cast<u32>(strip.total[i][3])};
  if constexpr (kNested) wait_copies<kAbsmaxAhead - 1>();  // of the next strip
  __syncthreads();
  add_warps<kTiles>(thread, round, tile);
  __syncwarp();  // lanes that store and those that do not
}

// ---- 8. The sums of the warps are added up and stored.

// Four warps, other ones each round: a thread has two neighbouring rows and a row of x. No warp writes these
// sums again before all have met after the next round.
template <int kTiles>
__device__ __forceinline__ void Consumer::add_warps(u32 thread, int round, int only_tile) const {
  constexpr int kPairs = kUnitRows / 2 * kSm90MmaTokens;
  const int pair = static_cast<int>((thread - static_cast<u32>(round) * kPairs) % kThreads);
  const int tile = pair / 64, of_lane = pair / 2 % 32, odd = pair % 2;
  if (pair >= kPairs || (kTiles == 1 && tile != only_tile)) return;
  float sum[2] = {};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const u64 two = *reinterpret_cast<const u64*>(sums_at(round, warp, tile, of_lane) + odd * 8);
    sum[0] += bit_cast<float>(static_cast<u32>(two));
    sum[1] += bit_cast<float>(static_cast<u32>(two >> 32));
  }
  const i64 row =
      static_cast<i64>(strip_of(round, work().whole_rounds)) * kUnitRows + 16 * tile + of_lane / 4 * 2;
  store_rows(sum, of_lane % 4 * 2 + odd, row);
}

__device__ __forceinline__ void Consumer::store_rows(float (&sum)[2], int token, i64 row) const {
  const i64 n = args.layout.n;
  if (token >= args.m || row >= n) return;
  const bool two = row + 1 < n;
  const u16* const bias = static_cast<const u16*>(args.bias);
  u16* const y = static_cast<u16*>(args.y) + token * n + row;
  if (bias != nullptr) {
    sum[0] += load(Element(), bias[row]);
    if (two) sum[1] += load(Element(), bias[row + 1]);
  }
  store_two(y, sum, two, args.accumulate, n % 2 == 0);
}

#endif

}  // namespace halfbyte::device

extern "C" __global__ void __launch_bounds__(halfbyte::kSm90MmaThreads, 1)
    qgemm_sm90_mma(const __grid_constant__ halfbyte::QgemmSm90MmaArgs args) {
#if HALFBYTE_DEVICE_ARCH >= 900
  using namespace halfbyte::device;
  const int thread = static_cast<int>(threadIdx.x);
  const Work of_block = make_work(args);
  const Lane lane(threadIdx.x);
  float offset = 0;
  Consumer consumer{args, lane, offset};
  u32 x[kUnits][8];

  if (thread < kStages) {
    init_barrier(full(thread), 1);
    init_barrier(empty(thread), kWarps);
    fence_barrier_init();
  }
  __syncwarp();
  // What is asked for first comes first: x behind little of the weight, or, where it may not be read yet,
  // behind what comes while the kernel before ends.
  const int num_first = min(args.early_start ? kFirstEarly : kFirst, kStages);
  if constexpr (kDoubleQuant) offset = start_scales(args, of_block, thread);
  if (thread == 0) {
    work() = of_block;
    start_copies(args, of_block, 0, num_first);
  }
  if (!args.early_start) {
    consumer.load_x(x);
    if (thread == 0) start_copies(args, of_block, num_first, kStages);
  }
  if constexpr (kLookUp) build_pair_table<kThreads>(args.values, thread);
  if constexpr (kDoubleQuant) wait_copies();
  __syncthreads();
  let_next_start();
  if (args.early_start) {
    wait_for_earlier();
    consumer.load_x(x);
    if (thread == 0) start_copies(args, of_block, num_first, kStages);
  }

  consumer.arrange_x(x);
  int round = 0;
  for (; round < work().whole_rounds; ++round) consumer.multiply_strip<2>(x, round, 0);
  if (round < work().rounds) consumer.multiply_strip<1>(x, round, static_cast<int>(blockIdx.x % 2));
#endif
}
