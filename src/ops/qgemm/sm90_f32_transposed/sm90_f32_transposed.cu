// qgemm of f32, transposed, few rows of x, a packed weight of 4 bits in groups of 32 to 256 columns: sm_90.
//
// Work is dealt out in items: a unit of each strip, which is 64 columns of y, and as many strips as the sums
// of a part have. A block takes items in turn. Its warps take the strips of an item in turn, each by
// itself: its ring in shared memory is filled by its own bulk copies, of the items to come, too (1). Lane t +
// 4 a of a warp has pairs t of all words of rows 2 a, 2 a + 1, 2 a + 16 and 2 a + 17 (formats/packed.h): 16
// columns. x is multiplied by the scales of its rows, once for each group of columns; values come from a
// table of pairs (2). Sums stay in registers for all strips of an item, then are added over lanes and warps
// (3).
#include "cuda/device/bulk.cuh"
#include "cuda/device/sum.cuh"
#include "halfbyte_config.h"
#include "ops/qgemm/sm90_f32_transposed/sm90_f32_transposed_args.h"
#include "ops/qgemm/weight/f32_rows.cuh"
#include "ops/qgemm/weight/f32_table.cuh"
#include "ops/qgemm/weight/scales.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 900

using Args = QgemmSm90F32TransposedArgs;
constexpr int kWarps = f32_transposed_warps(kM), kThreads = kWarps * 32;
constexpr int kCodeBytes = kUnitRows * kUnitCols / 2;

// ---- 1. What a warp goes through: units, by item and strip

struct Cursor {
  int item, strip, last;  // the strip; behind the last one of the item

  __device__ __forceinline__ Cursor(const Args& args, int warp) {
    item = static_cast<int>(blockIdx.x);
    begin(args, warp);
  }
  __device__ __forceinline__ bool ends(const Args& args) const { return item >= args.items; }
  __device__ __forceinline__ int unit(const Args& args) const { return item % args.units; }
  // The next strip, which may be behind the last one: then next_item().
  __device__ __forceinline__ void next() { strip += kWarps; }
  __device__ __forceinline__ void next_item(const Args& args, int warp) {
    item += static_cast<int>(gridDim.x);
    begin(args, warp);
  }

 private:
  __device__ __forceinline__ void begin(const Args& args, int warp) {
    const int first = item / args.units * args.part_strips;
    strip = first + warp;
    last = min(first + args.part_strips, args.strips);
  }
};

// By one lane: copies what comes next to a slot.
struct Copies {
  const Args& args;
  u8* ring;
  Barrier* full;
  int warp;
  Cursor next;

  __device__ __forceinline__ void copy_next(int slot) {
    while (!next.ends(args) && next.strip >= next.last) next.next_item(args, warp);
    if (next.ends(args)) return;
    const int unit = next.unit(args), shift = args.block_units_shift;
    const u8* const block =
        args.weight + next.strip * args.strip_bytes + i64{unit >> shift} * args.block_bytes;
    u8* const to = ring + slot * args.slot_bytes;
    arrive_expecting(full + slot, static_cast<u32>(args.slot_bytes));
    copy_bulk_once(to, block + (unit & ((1 << shift) - 1)) * kCodeBytes, kCodeBytes, full + slot);
    copy_bulk_once(to + kCodeBytes, block + args.block_code_bytes,
                   static_cast<u32>(args.slot_bytes - kCodeBytes), full + slot);
    next.next();
  }
};

// ---- 2. Products

// Of each row of x the elements of rows 2 a and 2 a + 1 of a strip.
using PairsOfX = float[kM][2];
__device__ __forceinline__ void load_x(PairsOfX& x, const Args& args, int strip, int a) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      const i64 row = i64{strip} * kUnitRows + 2 * a + o;
      x[m][o] = row < args.n ? args.x[m * args.n + row] : 0.0f;
    }
}

// Of columns 16 w + 8 s + 2 t + e: number 4 w + 2 s + e.
struct Sums {
  float of[kM][16];
  float biases[kM][2];  // of affine formats: of columns 0 to 31, and of the others
};

// Adds the products of rows 2 a and 2 a + 1 of the unit whose codes begin at `slot`.
__device__ __forceinline__ void multiply_rows(Sums& sums, const Args& args, const u8* slot, const PairsOfX& x,
                                              int a, int lane) {
  const u32 lane_bytes = static_cast<u32>(lane * 8);
  const u8* const scales = slot + kCodeBytes;
  const u8* const seconds = scales + args.unit_groups * kUnitRows * kParameterBytes;
  const Words4 words = *reinterpret_cast<const Words4*>(slot + packed_slot(a, lane % 4) * 16);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = (args.unit_groups == 2 ? h : 0) * kUnitRows + 2 * a;
    float scale[2], bias[2] = {}, zero[2] = {};
    load_scales<kParameterBytes>(scale, scales + row * kParameterBytes, kBf16Scales);
    if constexpr (kAffine) load_scales<kParameterBytes>(bias, seconds + row * kParameterBytes, kBf16Scales);
    if constexpr (kAsymmetric) {
      const u32 both = *reinterpret_cast<const u16*>(seconds + row);
      zero[0] = static_cast<float>(both & 255);
      zero[1] = static_cast<float>(both >> 8);
    }
    PairsOfX scaled;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int o = 0; o < 2; ++o) {
        scaled[m][o] = __fmul_rn(x[m][o], scale[o]);
        if constexpr (kAffine) sums.biases[m][h] = __fmaf_rn(x[m][o], bias[o], sums.biases[m][h]);
      }
#pragma unroll
    for (int w = 2 * h; w < 2 * h + 2; ++w) {
      const u32 word = words.word[w];
      const FloatPair pairs[4] = {look_up_floats<0>(word, lane_bytes), look_up_floats<1>(word, lane_bytes),
                                  look_up_floats<2>(word, lane_bytes), look_up_floats<3>(word, lane_bytes)};
#pragma unroll
      for (int byte = 0; byte < 4; ++byte) {
        const int odd = byte % 2, at = 4 * w + byte / 2 * 2;
        const float low = pairs[byte].first - zero[odd], high = pairs[byte].second - zero[odd];
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          sums.of[m][at] = __fmaf_rn(scaled[m][odd], low, sums.of[m][at]);
          sums.of[m][at + 1] = __fmaf_rn(scaled[m][odd], high, sums.of[m][at + 1]);
        }
      }
    }
  }
}

// ---- 3. Sums of lanes, then of warps

// to[m][column] = the sums of the 8 lanes of a column: each keeps half of the columns until it has two.
__device__ __forceinline__ void add_lanes(const Sums& sums, float* to, int lane) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    float of[16];
#pragma unroll
    for (int c = 0; c < 16; ++c) of[c] = kAffine ? sums.of[m][c] + sums.biases[m][c / 8] : sums.of[m][c];
#pragma unroll
    for (int c = 0; c < 8; ++c) of[c] = fold_sums(of[c], of[c + 8], 16);
#pragma unroll
    for (int c = 0; c < 4; ++c) of[c] = fold_sums(of[c], of[c + 4], 8);
#pragma unroll
    for (int c = 0; c < 2; ++c) of[c] = fold_sums(of[c], of[c + 2], 4);
    const int pair = lane / 4;  // of columns, by the bits that were folded: 4 w + 2 s = 2 * pair
    float* const two = to + m * kUnitCols + pair / 2 * 16 + pair % 2 * 8 + lane % 4 * 2;
    two[0] = of[0];
    two[1] = of[1];
  }
}

// An output from the sums of the warps, [warp][kM][64].
__device__ __forceinline__ void finish(const Args& args, const float* sums, int item, int thread) {
  const int m = thread / kUnitCols;
  const i64 col = i64{item % args.units} * kUnitCols + thread % kUnitCols;
  if (col >= args.k) return;
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum = sum + sums[w * kM * kUnitCols + thread];
  if (args.partials != nullptr) {
    args.partials[(i64{item / args.units} * kM + m) * args.k + col] = sum;
    return;
  }
  store_sum(args, args.y[m * args.k + col], col, sum);
}
#endif

// ---- 4. The kernel

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    qgemm_sm90_f32_transposed(const __grid_constant__ QgemmSm90F32TransposedArgs args) {
#if HALFBYTE_DEVICE_ARCH >= 900
  extern __shared__ u8 memory[];
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  float* const partials = reinterpret_cast<float*>(memory + args.shared.sums);  // [2][warp][kM][64]
  Barrier* const full = reinterpret_cast<Barrier*>(memory + args.shared.barriers) + warp * args.slots;
  u8* const ring = memory + args.shared.rings + warp * args.slots * args.slot_bytes;
  Copies copies{args, ring, full, warp, Cursor(args, warp)};
  if (lane == 0) {
    for (int i = 0; i < args.slots; ++i) init_barrier(full + i, 1);
    fence_barrier_init();
    fence_proxy_async();
    for (int i = 0; i < args.slots; ++i) copies.copy_next(i);
  }
  build_float_table<kThreads>(args.values, thread);
  let_next_start();
  wait_for_earlier();
  __syncthreads();  // table, barriers

  const int a = lane / 4;
  RingSlot slot;
  int half = 0;  // of the partial sums
  for (Cursor at(args, warp); !at.ends(args); at.next_item(args, warp)) {
    Sums sums = {};
    PairsOfX first, second;  // while they are multiplied, those of the next strip are loaded
    load_x(first, args, at.strip, a);
    load_x(second, args, at.strip, a + 8);
    for (; at.strip < at.last; at.next()) {
      const u8* const unit = ring + slot.index * args.slot_bytes;
      wait(full + slot.index, slot.parity);
      multiply_rows(sums, args, unit, first, a, lane);
      load_x(first, args, at.strip + kWarps, a);
      multiply_rows(sums, args, unit, second, a + 8, lane);
      load_x(second, args, at.strip + kWarps, a + 8);
      __syncwarp();
      if (lane == 0) copies.copy_next(slot.index);
      slot.advance(args.slots);
    }
    float* const sums_to = partials + half * kWarps * kM * kUnitCols;
    half ^= 1;
    add_lanes(sums, sums_to + warp * kM * kUnitCols, lane);
    __syncthreads();
    if (thread < kM * kUnitCols) finish(args, sums_to, at.item, thread);
    // The next item leaves its sums in the other half; the one after that comes after the next barrier.
  }
#endif
}

}  // namespace halfbyte::device
