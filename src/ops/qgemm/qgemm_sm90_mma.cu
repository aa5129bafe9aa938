// qgemm_sm90_mma: y[m, n] = x[m, k] . W^T of a packed weight, for m <= 8, by mma.sync with the weight as the operand
// of 16 rows and x as that of 8 columns.
//
// A block has whole strips of 32 rows, one a round; where strips do not divide evenly, two blocks share one in the
// last round, each with one tile of 16 rows. Its 16 warps divide k: a stage of the ring is 16 units, one bulk copy, and
// warp w multiplies unit w. What a warp needs of x stays in its registers: kUnits units, a slice of k; where k has more,
// the rounds are repeated for each slice, and sums are kept in shared memory. After each round the sums of the warps
// are added in order.
//
// Before the kernels before it have ended only the weight is read.
#include "cuda/device/bulk.cuh"
#include "cuda/device/codes.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/reduce.cuh"
#include "cuda/device/types.cuh"
#include "formats/codec.h"
#include "ops/qgemm/qgemm_sm90_mma_args.h"
#include "ops/qgemm/qgemm_table.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 900

constexpr int kWarps = kSm90MmaWarps, kThreads = kSm90MmaThreads;
constexpr bool kLookUp = kCodec.bits == 4, kAffine = kCodec.kind == Kind::affine;
constexpr PackedLayout kStage = sm90_mma_stage(kCodec, kGroup, kDoubleQuant);
constexpr int kStageBytes = static_cast<int>(kStage.strip_bytes);
constexpr Sm90MmaShared kShared = sm90_mma_shared(kCodec.bits, kStageBytes, kStages, kSliced, kDoubleQuant);
constexpr int kUnitBytes = kUnitRows * kUnitCols * kCodec.bits / 8;
constexpr int kGroupsPerUnit = kGroup == 32 ? 2 : 1;

extern __shared__ __align__(1024) u8 shared[];

// What a block does: the strips of its rounds, of which the last may be shared with another block; and how far thread 0
// is that fills the ring, in the order in which it is used. In shared memory: the registers are x's.
struct Work {
  int num_stages;  // of a strip
  int whole_rounds, rounds;
  int first, round, stage;  // of the next copy: the first stage of its slice, its round, its stage
};
__device__ __forceinline__ Work& work() { return *reinterpret_cast<Work*>(shared + kShared.work); }
__device__ __forceinline__ Barrier* full(int slot) {
  return reinterpret_cast<Barrier*>(shared + kShared.barriers) + slot;
}
__device__ __forceinline__ Barrier* empty(int slot) { return full(kStages + slot); }

__device__ __forceinline__ void begin_work(const QgemmSm90MmaArgs& args) {
  const int index = static_cast<int>(blockIdx.x), num_blocks = static_cast<int>(gridDim.x);
  const int strips = static_cast<int>(args.layout.strips), rest = strips % num_blocks;
  const bool halves = 2 * rest <= num_blocks;
  const int whole_rounds = strips / num_blocks + (!halves && index < rest ? 1 : 0);
  work() = {kSliced ? (args.units + kWarps - 1) / kWarps : kUnits, whole_rounds,
            whole_rounds + (halves && index < 2 * rest ? 1 : 0)};
}
__device__ __forceinline__ int strip_of(int round) {
  const int index = static_cast<int>(blockIdx.x);
  return round * static_cast<int>(gridDim.x) + (round < work().whole_rounds ? index : index / 2);
}

__device__ __forceinline__ bool has_next_copy() {
  return work().first < work().num_stages && work().round < work().rounds;
}
__device__ __forceinline__ void copy_next(const QgemmSm90MmaArgs& args, int slot) {
  Work& w = work();
  const i64 begin = static_cast<i64>(w.stage) * kStageBytes, rest = args.layout.strip_bytes - begin;
  const u32 num_bytes = rest < kStageBytes ? static_cast<u32>(rest) : kStageBytes;
  arrive_expecting(full(slot), num_bytes);
  copy_bulk_once(shared + kShared.ring + slot * kStageBytes,
                 args.weight + strip_of(w.round) * args.layout.strip_bytes + begin, num_bytes, full(slot));
  if (++w.stage < min(w.first + kUnits, w.num_stages)) return;
  ++w.round;
  if (kSliced && w.round == w.rounds) {
    w.round = 0;
    w.first += kUnits;
  }
  w.stage = w.first;
}

// A lane of a warp, in the terms of mma.cuh: it has rows 2 * row and 2 * row + 1 of each tile (g and g + 8 of the
// fragments), and pairs of columns `pair` of 8.
struct Lane {
  int warp, lane, row, pair;
  u32 table;
  int codes, scales, zeros, biases;  // in a stage: of its first 16 bytes; of row 0 and the warp's first group

  __device__ __forceinline__ explicit Lane(int thread)
      : warp(thread / 32), lane(thread % 32), row(lane / 4), pair(lane % 4), table(pair_table_lane(lane)) {
    const i64 group = kGroup > 0 ? warp * kUnitCols / max(kGroup, 1) : 0;
    codes = static_cast<int>(kStage.unit(0, warp)) + packed_slot(row, pair) * 16;
    scales = static_cast<int>(kStage.scale(0, group));
    zeros = static_cast<int>(kStage.zero(0, group));
    biases = static_cast<int>(kStage.bias(0, group));
  }
};

// The parameters of a group that a lane needs.
template <int kTiles>
struct Params {
  float scale[kTiles][2], bias[kTiles][2];
};
// What is subtracted from codes: a pair of zero points, or 2^23 and the code of 0.
using Zero = Select<kLookUp, u32, float>;
template <int kTiles>
struct Zeros {
  Zero zero[kTiles][2];
};

// Two neighbouring rows of scales or biases.
__device__ __forceinline__ void load_two(float (&to)[2], const u8* from) {
  if constexpr (kCodec.scale_type == ScaleType::f32) {
    const u64 words = *reinterpret_cast<const u64*>(from);
    to[0] = bit_cast<float>(static_cast<u32>(words));
    to[1] = bit_cast<float>(static_cast<u32>(words >> 32));
  } else {
    using Stored = Select<kCodec.scale_type == ScaleType::f16, F16, BF16>;
    const u32 word = *reinterpret_cast<const u32*>(from);
    to[0] = load(Stored(), static_cast<u16>(word));
    to[1] = load(Stored(), static_cast<u16>(word >> 16));
  }
}

// Of double quantization. What is padding has the absmax of what is not.
struct NestedScales {
  const float* absmax;
  float offset;
  i64 groups, last_row;

  __device__ __forceinline__ float decode(u8 code, i64 row, i64 group) const {
    const i64 index = min(row, last_row) * groups + min(group, groups - 1);
    return reinterpret_cast<const float*>(shared + kShared.map)[code] * absmax[index / 256] + offset;
  }
};

// `scales`, `biases`: those of row 0 of the strip.
template <int kTiles>
__device__ __forceinline__ Params<kTiles> load_params(const Lane& lane, int tile, const u8* scales, const u8* biases,
                                                      const NestedScales& nested, i64 strip_row, i64 group) {
  Params<kTiles> params;
  if constexpr (kDoubleQuant) {
    const int row = 16 * (kTiles == 2 ? lane.pair / 2 : tile) + 2 * lane.row + lane.pair % 2;
    const float scale = nested.decode(scales[row], strip_row + row, group);
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) params.scale[i / 2][i % 2] = shuffle(scale, (lane.lane & ~3) + i);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int row = 16 * (tile + i) + 2 * lane.row;
    if constexpr (!kDoubleQuant) load_two(params.scale[i], scales + row * kStage.scale_bytes);
    if constexpr (kAffine) load_two(params.bias[i], biases + row * kStage.bias_bytes);
  }
  return params;
}

// `zeros`: of row 0 of the strip.
template <int kTiles>
__device__ __forceinline__ Zeros<kTiles> load_zeros(const Lane& lane, int tile, const u8* zeros) {
  Zeros<kTiles> result;
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    u32 rows = kCodec.kind == Kind::integer ? static_cast<u32>(-kCodec.q_min) * 0x101u : 0;
    if constexpr (kCodec.asymmetric)
      rows = *reinterpret_cast<const u16*>(zeros + 16 * (tile + i) + 2 * lane.row);
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

__device__ __forceinline__ u32 subtract(F16, u32 a, u32 b) {
  u32 d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 subtract(BF16, u32 a, u32 b) {
  u32 d;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// Codes kByte and kByte + 1 of a word of 8-bit codes: exact.
template <int kByte>
__device__ __forceinline__ u32 decode_pair(u32 word, float zero) {
  const float low = bit_cast<float>(__byte_perm(word, 0x4B000000u, 0x7440 | kByte));
  const float high = bit_cast<float>(__byte_perm(word, 0x4B000000u, 0x7440 | (kByte + 1)));
  return store_pair(Element(), low - zero, high - zero);
}

// The fragment of columns 16 * kStep of a unit, and of one tile, of which `codes` has the lane's first 16 bytes.
template <int kStep>
__device__ __forceinline__ void make_fragment(u32 (&a)[4], const u32 (&words)[kCodec.bits], u32 table,
                                              const Zero (&zero)[2]) {
  if constexpr (kLookUp) {
    a[0] = look_up_pair<0>(words[kStep], table);
    a[1] = look_up_pair<1>(words[kStep], table);
    a[2] = look_up_pair<2>(words[kStep], table);
    a[3] = look_up_pair<3>(words[kStep], table);
    if constexpr (kCodec.asymmetric) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = subtract(Element(), a[i], zero[i % 2]);
    }
  } else {
    a[0] = decode_pair<0>(words[2 * kStep], zero[0]);
    a[1] = decode_pair<2>(words[2 * kStep], zero[1]);
    a[2] = decode_pair<0>(words[2 * kStep + 1], zero[0]);
    a[3] = decode_pair<2>(words[2 * kStep + 1], zero[1]);
  }
}

// The sums of a lane: of each tile, as mma.cuh has them; `x`: of x alone, in all rows.
template <int kTiles>
struct Sums {
  float tile[kTiles][4] = {};
  float x[4] = {};
};

template <int kTiles, int kStep>
__device__ __forceinline__ void multiply_step(Sums<kTiles>& sums, const u32 (&words)[kTiles][kCodec.bits], u32 table,
                                              const Zeros<kTiles>& zeros, const u32 (&x)[8]) {
  const u32 b[2] = {x[2 * kStep], x[2 * kStep + 1]};
  u32 a[kTiles][4];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) make_fragment<kStep>(a[i], words[i], table, zeros.zero[i]);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) mma(Element(), sums.tile[i], a[i], b);
}
// The sums of x over steps of a unit. By themselves, when the registers of the weight are free.
template <int kTiles>
__device__ __forceinline__ void sum_x(Sums<kTiles>& sums, const u32 (&x)[8], int first_step, int num_steps) {
  const u32 one = store_pair(Element(), 1, 1), ones[4] = {one, one, one, one};
#pragma unroll
  for (int step = first_step; step < first_step + num_steps; ++step) {
    const u32 b[2] = {x[2 * step], x[2 * step + 1]};
    mma(Element(), sums.x, ones, b);
  }
}

// total += scale * (sums since the last) + bias * (sums of x).
template <int kTiles>
__device__ __forceinline__ void add_group(float (&total)[kTiles][4], Sums<kTiles>& sums, const Params<kTiles>& params) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      total[i][j] = __fmaf_rn(params.scale[i][j / 2], sums.tile[i][j], total[i][j]);
      if constexpr (kAffine) total[i][j] = __fmaf_rn(params.bias[i][j / 2], sums.x[j % 2], total[i][j]);
    }
  sums = {};
}

// Multiplies what is in the ring, and adds up.
struct Consumer {
  const QgemmSm90MmaArgs& args;
  const Lane& lane;
  const NestedScales& nested;
  int slot = 0;
  u32 parity = 0;
  int buffer = 0;  // of the two of sums

  __device__ __forceinline__ void load_x(u32 (&x)[kUnits][8], int first) const;
  template <int kTiles>
  __device__ __forceinline__ void multiply_unit(float (&total)[kTiles][4], Sums<kTiles>& sums, Zeros<kTiles>& zeros,
                                                const u32 (&x)[8], int tile, int strip, int unit) const;
  template <int kTiles>
  __device__ __forceinline__ void multiply_strip(const u32 (&x)[kUnits][8], int first, int round, int tile);
  template <int kTiles>
  __device__ __forceinline__ void add_warps(int first, int round, int only_tile) const;
  __device__ __forceinline__ void store_rows(float (&sum)[2], int token, i64 row) const;

  // The sums of a warp in this round: 16 bytes a tile and lane.
  __device__ __forceinline__ u8* sums_at(int warp, int tile, int of_lane) const {
    const int row = (buffer * kWarps + warp) * 8 + tile * 4 + of_lane / 8;
    return shared + row * kShared.sum_stride + kShared.sum_begin + of_lane % 8 * 16;
  }
};

// The fragments of the warp's units of a slice: zeros beyond m and k.
__device__ __forceinline__ void Consumer::load_x(u32 (&x)[kUnits][8], int first) const {
  const i64 k = args.layout.k, begin = (static_cast<i64>(first) * kWarps + lane.warp) * kUnitCols + 2 * lane.pair;
  const u16* const from = static_cast<const u16*>(args.x) + lane.row * k + begin;
#pragma unroll
  for (int u = 0; u < kUnits; ++u)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int col = u * kWarps * kUnitCols + 8 * i;
      x[u][i] = lane.row < args.m && begin + col < k ? *reinterpret_cast<const u32*>(from + col) : 0;
    }
}

template <int kTiles>
__device__ __forceinline__ void Consumer::multiply_unit(float (&total)[kTiles][4], Sums<kTiles>& sums,
                                                        Zeros<kTiles>& zeros, const u32 (&x)[8], int tile, int strip,
                                                        int unit) const {
  const u8* const stage = shared + kShared.ring + slot * kStageBytes;
  u32 words[kTiles][kCodec.bits];
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (int j = 0; j < kCodec.bits; j += 4) {
      const Words4 four =
          *reinterpret_cast<const Words4*>(stage + lane.codes + (tile + i) * 512 + j / 4 * (kUnitBytes / 2));
#pragma unroll
      for (int w = 0; w < 4; ++w) words[i][j + w] = four.word[w];
    }
  const auto begin_group = [&](int group) {
    if constexpr (kGroup > 0 && kCodec.asymmetric)
      zeros = load_zeros<kTiles>(lane, tile, stage + lane.zeros + group * kUnitRows);
  };
  const auto end_group = [&](int group) {
    if constexpr (kAffine) sum_x(sums, x, group * 2, 4 / kGroupsPerUnit);
    if constexpr (kGroup > 0) {
      const Params<kTiles> params = load_params<kTiles>(
          lane, tile, stage + lane.scales + group * kUnitRows * kStage.scale_bytes,
          stage + lane.biases + group * kUnitRows * kStage.bias_bytes, nested, static_cast<i64>(strip) * kUnitRows,
          static_cast<i64>(unit) * kUnitCols / max(kGroup, 1) + group);
      add_group(total, sums, params);
    }
  };
  begin_group(0);
  multiply_step<kTiles, 0>(sums, words, lane.table, zeros, x);
  multiply_step<kTiles, 1>(sums, words, lane.table, zeros, x);
  if constexpr (kGroupsPerUnit == 2) {
    end_group(0);
    begin_group(1);
  }
  multiply_step<kTiles, 2>(sums, words, lane.table, zeros, x);
  multiply_step<kTiles, 3>(sums, words, lane.table, zeros, x);
  end_group(kGroupsPerUnit - 1);
}

// Both tiles of a strip, or one: the units of the warp in a slice, whose first stage is `first`.
template <int kTiles>
__device__ __forceinline__ void Consumer::multiply_strip(const u32 (&x)[kUnits][8], int first, int round, int tile) {
  const int strip = strip_of(round);
  const i64 row = static_cast<i64>(strip) * kUnitRows;
  float total[kTiles][4] = {};
  Sums<kTiles> sums;
  Zeros<kTiles> zeros{};
  Params<kTiles> params;
  if constexpr (kGroup == 0) {
    params = load_params<kTiles>(lane, tile, args.weight + args.layout.scale(row, 0),
                                 args.weight + args.layout.bias(row, 0), nested, row, 0);
    zeros = load_zeros<kTiles>(lane, tile, args.weight + args.layout.zero(row, 0));
  } else if constexpr (!kCodec.asymmetric) {
    zeros = load_zeros<kTiles>(lane, tile, nullptr);
  }
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int stage = first + u, unit = stage * kWarps + lane.warp;
    if (!kSliced || stage < work().num_stages) {
      wait(full(slot), parity);
      const bool may_end = kSliced || u == kUnits - 1;
      if (!may_end || unit < args.units) multiply_unit(total, sums, zeros, x[u], tile, strip, unit);
      __syncwarp();
      if (lane.lane == 0) arrive(empty(slot));
      // Not this stage, which other warps may still read, but the one before.
      if (threadIdx.x == 0 && (u > 0 || first + round > 0) && has_next_copy()) {
        const int before = slot == 0 ? kStages - 1 : slot - 1;
        wait(empty(before), slot == 0 ? parity ^ 1 : parity);
        copy_next(args, before);
      }
      if (++slot == kStages) slot = 0, parity ^= 1;
    }
  }
  if constexpr (kGroup == 0) add_group(total, sums, params);
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
    *reinterpret_cast<Words4*>(sums_at(lane.warp, tile + i, lane.lane)) = {
        bit_cast<u32>(total[i][0]), bit_cast<u32>(total[i][2]), bit_cast<u32>(total[i][1]),
        bit_cast<u32>(total[i][3])};
  __syncthreads();
  add_warps<kTiles>(first, round, tile);
  buffer ^= 1;
}

// Four warps, other ones each round: a thread has two neighbouring rows and a row of x. No warp writes these sums
// again before all have met after the next round.
template <int kTiles>
__device__ __forceinline__ void Consumer::add_warps(int first, int round, int only_tile) const {
  constexpr int kPairs = kUnitRows / 2 * kSm90MmaTokens;
  const int pair = static_cast<int>(threadIdx.x + kThreads - round * kPairs % kThreads) % kThreads;
  const int tile = pair / 64, of_lane = pair / 2 % 32, odd = pair % 2;
  if (pair >= kPairs || (kTiles == 1 && tile != only_tile)) return;
  float sum[2] = {};
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const u64 two = *reinterpret_cast<const u64*>(sums_at(warp, tile, of_lane) + odd * 8);
    sum[0] += bit_cast<float>(static_cast<u32>(two));
    sum[1] += bit_cast<float>(static_cast<u32>(two >> 32));
  }
  float* const kept = reinterpret_cast<float*>(shared + kShared.kept) + (round * kPairs + pair) * 2;
  if (first > 0) {
    sum[0] += kept[0];
    sum[1] += kept[1];
  }
  if (first + kUnits < work().num_stages) {
    kept[0] = sum[0];
    kept[1] = sum[1];
    return;
  }
  const i64 row = static_cast<i64>(strip_of(round)) * kUnitRows + 16 * tile + of_lane / 4 * 2;
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
  if (args.accumulate) {
    sum[0] += load(Element(), y[0]);
    if (two) sum[1] += load(Element(), y[1]);
  }
  const u32 pair = store_pair(Element(), sum[0], sum[1]);
  if (n % 2 == 0) {
    *reinterpret_cast<u32*>(y) = pair;
  } else {
    y[0] = static_cast<u16>(pair);
    if (two) y[1] = static_cast<u16>(pair >> 16);
  }
}

#endif

}  // namespace halfbyte::device

extern "C" __global__ void __launch_bounds__(halfbyte::kSm90MmaThreads, 1)
    qgemm_sm90_mma(const __grid_constant__ halfbyte::QgemmSm90MmaArgs args) {
#if HALFBYTE_DEVICE_ARCH >= 900
  using namespace halfbyte::device;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      init_barrier(full(i), 1);
      init_barrier(empty(i), kWarps);
    }
    fence_barrier_init();
    begin_work(args);
#pragma unroll 1
    for (int i = 0; i < kStages && has_next_copy(); ++i) copy_next(args, i);
  }
  if constexpr (kLookUp) build_pair_table<kThreads>(thread);
  NestedScales nested{};
  if constexpr (kDoubleQuant) {
    const auto floats_at = [&](i64 offset) { return reinterpret_cast<const float*>(args.weight + offset); };
    nested = {floats_at(args.layout.absmax), *floats_at(args.layout.offset), args.layout.groups, args.layout.n - 1};
    if (thread < 256) reinterpret_cast<float*>(shared + kShared.map)[thread] = floats_at(args.layout.map)[thread];
  }
  const Lane lane(thread);
  __syncthreads();
  wait_for_earlier();
  let_next_start();

  Consumer consumer{args, lane, nested};
  for (int first = 0; first < (kSliced ? work().num_stages : 1); first += kUnits) {
    u32 x[kUnits][8];
    consumer.load_x(x, first);
    int round = 0;
    for (; round < work().whole_rounds; ++round) consumer.multiply_strip<2>(x, first, round, 0);
    if (round < work().rounds) consumer.multiply_strip<1>(x, first, round, static_cast<int>(blockIdx.x % 2));
  }
#endif
}
