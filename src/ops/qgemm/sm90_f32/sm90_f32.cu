// qgemm of f32, forward, few rows of x, a packed weight of 4 bits in groups of 32 to 256 columns: sm_90.
//
// A block has strips of 32 rows; its 16 warps take the units of a strip in turn, each its unit of a stage of
// 16, which one bulk copy brings into a ring in shared memory (1). Lane t + 4 h + 8 b of a warp has the
// columns of pairs t of words 2 h and 2 h + 1, of rows 2 a and 2 a + 1, a = b, b + 4, b + 8, b + 12
// (formats/packed.h): 8 columns, one group. So it needs 8 elements of each row of x and unit (2). Values come
// from a table of pairs; products of a unit are summed, then scaled (3), then summed over units, lanes and
// warps (4), in this order.
#include "cuda/device/bulk.cuh"
#include "cuda/device/sum.cuh"
#include "halfbyte_config.h"
#include "ops/qgemm/sm90_f32/sm90_f32_args.h"
#include "ops/qgemm/weight/byte_scales.cuh"
#include "ops/qgemm/weight/f32_rows.cuh"
#include "ops/qgemm/weight/f32_table.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 900

constexpr int kRegisterUnits = kXInRegisters ? f32_register_units(kM) : 0;

// ---- 1. Copies: the stages of this block, one strip after the other

struct Stages {
  const QgemmSm90F32Args& args;
  u8* ring;
  Barrier *full, *empty;  // [stages]
  int per_strip;
  int strip = static_cast<int>(blockIdx.x), stage = 0;  // what is to be copied next

  // By one thread.
  __device__ __forceinline__ void start() {
    for (int i = 0; i < args.stages; ++i) {
      init_barrier(full + i, 1);
      init_barrier(empty + i, kF32Warps);
    }
    fence_barrier_init();
    fence_proxy_async();
    for (int i = 0; i < args.stages; ++i) copy_next(i);
  }

  // By one thread: the next stage into a slot, which must be empty.
  __device__ __forceinline__ void copy_next(int to) {
    if (strip >= args.strips) return;
    const int units = min(kF32StageUnits, args.units - stage * kF32StageUnits);
    const u32 num_bytes = static_cast<u32>((units >> args.block_units_shift) * args.block_bytes);
    arrive_expecting(full + to, num_bytes);
    const u8* const from =
        args.weight + static_cast<i64>(strip) * args.strip_bytes + static_cast<i64>(stage) * args.stage_bytes;
    copy_bulk_once(ring + to * args.stage_bytes, from, num_bytes, full + to);
    if (++stage == per_strip) {
      stage = 0;
      strip += static_cast<int>(gridDim.x);
    }
  }

  // By one thread: fills the one before `slot`, which is empty by now, or soon.
  __device__ __forceinline__ void refill(const RingSlot& slot) {
    const bool wraps = slot.index == 0;
    const int last = (wraps ? args.stages : slot.index) - 1;
    wait(empty + last, wraps ? slot.parity ^ 1 : slot.parity);
    copy_next(last);
  }
};

// ---- 2. x: in registers where they hold it, else in shared memory

// The 8 elements that a lane needs of a row of x and a unit: pairs of word 0, columns 2 t and 2 t + 8, then
// word 1.
struct UnitOfX {
  float value[8];
};
__device__ __forceinline__ int column_of(int lane, int pair) {
  return (lane >> 2 & 1) * 32 + (pair >> 1) * 16 + (pair & 1) * 8 + (lane & 3) * 2;
}
// Where column c of x is in shared memory: lanes with h = 0 and h = 1 read different banks.
__device__ __forceinline__ int place_of_x(int c) { return c ^ (c >> 2 & 8); }

__device__ __forceinline__ float element_of_x(const QgemmSm90F32Args& args, int m, i64 col) {
  return m < args.m && col < args.k ? args.x[m * args.k + col] : 0.0f;
}
using RegistersOfX = UnitOfX[max(kRegisterUnits, 1)][kM];
__device__ __forceinline__ void load_x(RegistersOfX& x, const QgemmSm90F32Args& args, int warp, int lane) {
#pragma unroll
  for (int u = 0; u < kRegisterUnits; ++u)
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        x[u][m].value[i] =
            element_of_x(args, m, (u * kF32StageUnits + warp) * kUnitCols + column_of(lane, i / 2) + i % 2);
}

// `x`: [kM][num_cols] of shared memory.
__device__ __forceinline__ void store_x(float* x, const QgemmSm90F32Args& args, int num_cols, int thread) {
  for (int i = thread; i < kM * num_cols; i += kF32Threads)
    x[i / num_cols * num_cols + place_of_x(i % num_cols)] = element_of_x(args, i / num_cols, i % num_cols);
}
// Of a unit.
__device__ __forceinline__ void load_unit_of_x(UnitOfX (&to)[kM], const float* x, int num_cols, int unit,
                                               int lane) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int col = unit * kUnitCols + column_of(lane, i);
      const u64 pair = *reinterpret_cast<const u64*>(x + m * num_cols + place_of_x(col));
      to[m].value[2 * i] = bit_cast<float>(static_cast<u32>(pair));
      to[m].value[2 * i + 1] = bit_cast<float>(static_cast<u32>(pair >> 32));
    }
}

// ---- 3. Products

// Of rows 2 a and 2 a + 1, from where the parameter of row 0 is.
struct TwoFloats {
  float first, second;
};
__device__ __forceinline__ TwoFloats load_two(const u8* from, int a) {
  if constexpr (kParameterBytes == 1) {
    float both[2];
    unpack_byte_scales(both, reinterpret_cast<const u16*>(from)[a]);
    return {both[0], both[1]};
  } else if constexpr (kParameterBytes == 4) {
    const u64 both = reinterpret_cast<const u64*>(from)[a];
    return {bit_cast<float>(static_cast<u32>(both)), bit_cast<float>(static_cast<u32>(both >> 32))};
  } else {
    const u32 both = reinterpret_cast<const u32*>(from)[a];
    const u16 first = static_cast<u16>(both), second = static_cast<u16>(both >> 16);
    if constexpr (kBf16Scales) return {bf16_to_f32(first), bf16_to_f32(second)};
    return {f16_to_f32(first), f16_to_f32(second)};
  }
}

// part[o][m] += products of the codes of rows 2 a + o, of which `zero` is subtracted.
__device__ __forceinline__ void multiply_words(float (&part)[2][kM], u64 words, const float (&zero)[2],
                                               const UnitOfX (&x)[kM], u32 lane_bytes) {
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    const u32 word = static_cast<u32>(words >> (32 * w));
    const FloatPair pairs[4] = {look_up_floats<0>(word, lane_bytes), look_up_floats<1>(word, lane_bytes),
                                look_up_floats<2>(word, lane_bytes), look_up_floats<3>(word, lane_bytes)};
#pragma unroll
    for (int byte = 0; byte < 4; ++byte) {
      const int odd = byte & 1, at = 4 * w + (byte >> 1) * 2;
      const float low = pairs[byte].first - zero[odd], high = pairs[byte].second - zero[odd];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        part[odd][m] = __fmaf_rn(x[m].value[at], low, part[odd][m]);
        part[odd][m] = __fmaf_rn(x[m].value[at + 1], high, part[odd][m]);
      }
    }
  }
}

// sums[2 i + o][m] += of row 2 (b + 4 i) + o and the unit whose codes begin at `codes`; `parameters`: of its
// groups.
__device__ __forceinline__ void multiply_unit(const QgemmSm90F32Args& args, const u8* codes,
                                              const u8* parameters, const UnitOfX (&x)[kM], int lane,
                                              float (&sums)[8][kM]) {
  const int t = lane & 3, h = lane >> 2 & 1, b = lane >> 3;
  const u32 lane_bytes = static_cast<u32>(lane * 8);
  const int group_rows = (args.unit_groups == 2 ? h : 0) * kUnitRows;
  const u8* const scales = parameters + group_rows * kParameterBytes;
  const u8* const others = parameters + args.unit_groups * kUnitRows * kParameterBytes +
                           group_rows * (kAffine ? kParameterBytes : 1);
  float total[kM];
  if constexpr (kAffine) {
#pragma unroll
    for (int m = 0; m < kM; ++m) total[m] = tree_sum(x[m].value);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int a = b + 4 * i;
    const u64 words = *reinterpret_cast<const u64*>(codes + packed_slot(a, t) * 16 + h * 8);
    float zero[2] = {};
    if constexpr (kAsymmetric) {
      const u32 both = reinterpret_cast<const u16*>(others)[a];
      zero[0] = static_cast<float>(both & 255);
      zero[1] = static_cast<float>(both >> 8);
    }
    float part[2][kM] = {};
    multiply_words(part, words, zero, x, lane_bytes);
    const TwoFloats scale = load_two(scales, a);
    TwoFloats bias{};
    if constexpr (kAffine) bias = load_two(others, a);
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      sums[2 * i][m] = __fmaf_rn(part[0][m], scale.first, sums[2 * i][m]);
      sums[2 * i + 1][m] = __fmaf_rn(part[1][m], scale.second, sums[2 * i + 1][m]);
      if constexpr (kAffine) {
        sums[2 * i][m] = __fmaf_rn(total[m], bias.first, sums[2 * i][m]);
        sums[2 * i + 1][m] = __fmaf_rn(total[m], bias.second, sums[2 * i + 1][m]);
      }
    }
  }
}

// ---- 4. Sums of lanes, then of warps

// to[m][row] = the sums of the 8 lanes of a row: each keeps half of the rows until it has one, number
// 4 h + t % 4 of the 8.
__device__ __forceinline__ void add_lanes(const float (&sums)[8][kM], float* to, int warp, int lane) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    float of_row[8];
#pragma unroll
    for (int r = 0; r < 8; ++r) of_row[r] = sums[r][m];
#pragma unroll
    for (int count = 4; count > 0; count /= 2)
#pragma unroll
      for (int r = 0; r < count; ++r) of_row[r] = fold_sums(of_row[r], of_row[r + count], count);
    const int r = lane & 7, row = 2 * ((lane >> 3) + 4 * (r >> 1)) + (r & 1);
    to[(warp * kM + m) * kUnitRows + row] = of_row[0];
  }
}

// An output from the sums of the warps, [warp][kM][32].
__device__ __forceinline__ void finish(const QgemmSm90F32Args& args, const float* sums, int strip,
                                       int thread) {
  const int m = thread / kUnitRows;
  const i64 row = static_cast<i64>(strip) * kUnitRows + thread % kUnitRows;
  if (m >= args.m || row >= args.n) return;
  float sum = 0;
  for (int w = 0; w < kF32Warps; ++w) sum = sum + sums[w * kM * kUnitRows + thread];
  store_sum(args, args.y[m * args.n + row], row, sum);
}
#endif

// ---- 5. The kernel

extern "C" __global__ void __launch_bounds__(kF32Threads, 1)
    qgemm_sm90_f32(const __grid_constant__ QgemmSm90F32Args args) {
#if HALFBYTE_DEVICE_ARCH >= 900
  extern __shared__ u8 memory[];
  float* const partials = reinterpret_cast<float*>(memory + args.shared.sums);  // [2][warp][kM][32]
  float* const x_in_memory = reinterpret_cast<float*>(memory + args.shared.x);
  Barrier* const full = reinterpret_cast<Barrier*>(memory + args.shared.barriers);
  Barrier* const empty = full + kF32MaxStages;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int per_strip = (args.units + kF32StageUnits - 1) / kF32StageUnits;
  Stages stages{args, memory + args.shared.ring, full, empty, per_strip};
  if (thread == 0) stages.start();
  build_float_table<kF32Threads>(args.values, thread);
  let_next_start();
  wait_for_earlier();

  const int x_cols = args.units * kUnitCols;
  RegistersOfX x;
  if constexpr (kXInRegisters)
    load_x(x, args, warp, lane);
  else
    store_x(x_in_memory, args, x_cols, thread);
  __syncthreads();  // table, barriers and x

  RingSlot slot;
  int half = 0;  // of the partial sums
  for (int strip = static_cast<int>(blockIdx.x); strip < args.strips; strip += static_cast<int>(gridDim.x)) {
    float sums[8][kM] = {};
    const auto multiply_stage = [&](int u) {
      wait(stages.full + slot.index, slot.parity);
      const int units = args.units - u * kF32StageUnits;
      if (warp < units) {
        const u8* const block = memory + args.shared.ring + slot.index * args.stage_bytes +
                                (warp >> args.block_units_shift) * args.block_bytes;
        const u8* const codes =
            block + (warp & ((1 << args.block_units_shift) - 1)) * (kUnitRows * kUnitCols / 2);
        const u8* const parameters = block + args.block_code_bytes;
        if constexpr (kXInRegisters) {
          multiply_unit(args, codes, parameters, x[u], lane, sums);
        } else {
          UnitOfX of_unit[kM];
          load_unit_of_x(of_unit, x_in_memory, x_cols, u * kF32StageUnits + warp, lane);
          multiply_unit(args, codes, parameters, of_unit, lane, sums);
        }
      }
      __syncwarp();
      if (lane == 0) arrive(stages.empty + slot.index);
      if (thread == 0 && (u > 0 || strip >= static_cast<int>(gridDim.x))) stages.refill(slot);
      slot.advance(args.stages);
    };
    if constexpr (kXInRegisters) {
#pragma unroll
      for (int u = 0; u < kRegisterUnits; ++u)
        if (u < per_strip) multiply_stage(u);
    } else {
#pragma unroll 1
      for (int u = 0; u < per_strip; ++u) multiply_stage(u);
    }

    float* const sums_to = partials + half * kF32Warps * kM * kUnitRows;
    half ^= 1;
    add_lanes(sums, sums_to, warp, lane);
    __syncthreads();
    if (thread < kM * kUnitRows) finish(args, sums_to, strip, thread);
    // The next strip leaves its sums in the other half; the one after that comes after the next barrier.
  }
#endif
}

}  // namespace halfbyte::device
