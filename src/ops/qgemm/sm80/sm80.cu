// Products with packed weights by mma.sync, of any shape, forward and transposed.
//
// The weight is operand A: its rows (forward) or columns (transposed) are the rows of the matrix instruction,
// the features, and rows of x its columns, the tokens. A block makes kQgemmSm80Features features of kTokens
// tokens. Steps of 64 along the sum come by asynchronous copies: units as they lie in the weight, so that the
// words of a lane are its fragments, and x in rows whose 16-byte chunks are swizzled.
//
// Forward, each group of columns is summed by itself and its scale applied to the sum. Transposed, where a
// sum runs across groups, the scale goes into the weight. So it does where f32 is multiplied as tf32, and for
// many tokens, where sums that are not interrupted matter more than what it takes to scale a weight.
//
// f32 is otherwise split into three parts of bf16 each, x and what of the weight is no integer, and six
// products of parts, of integers three, make one of f32.
//
// How groups of 64 columns and more lie in the weight is an argument. A kernel for what is common is made for
// one way to store scales. Those for what is rare (is_rare() of sm80_cuda.cc) take it as an argument, and
// branch where parameters are copied and where they are read.
//
// Up to 64 tokens, a weight is used for few products, and two blocks share a multiprocessor where registers
// allow. For more (wide.cuh), one block loads and decodes ahead of its products all the time.
//
// Phases: pair.cuh, types and the table of codes (1); copies.cuh, what a step brings to shared memory (2);
// fragments.cuh and, for many tokens, wide.cuh, its products (3); outputs (4) and the kernel (5) are here.
#include "ops/qgemm/sm80/wide.cuh"

namespace halfbyte::device {

#if HALFBYTE_DEVICE_ARCH >= 800

// ---- 4. Outputs

// Lane (g, t) has two neighbours in a row of y, of rows 2t, 2t + 1 of every eight.
__device__ __forceinline__ void store_sums(const QgemmSm80Args& args, const Sums& sums, const Tile& at,
                                           const TokenRows* rows, int warp, const Lane& lane) {
  const float factor = global_factor(at.weight, args.global_scale);
  const bool has_weight = !kExperts || at.expert < args.experts.num;
  const i64 first = kExperts ? 0 : at.first_token + 2 * lane.t;  // row of the first of the lane
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int in_block = kTransposed ? 16 * (lane.g / 4) + 2 * (lane.g % 4) + 8 * i : 16 * i + 2 * lane.g;
    const i64 col = at.tile * kQgemmSm80Features + warp * 32 + in_block;
    if (col >= args.out_cols) continue;
    // store(address, first, second, row), `to` being where the sums of row `first` go.
    const auto each = [&](auto* to, i64 stride, auto&& store) {
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
        float sum[4];
#pragma unroll
        for (int l = 0; l < 4; ++l) sum[l] = kGlobalScale ? sums[i][j][l] * factor : sums[i][j][l];
        const int token = 2 * lane.t + 8 * j;
        if constexpr (kExperts) {
#pragma unroll
          for (int l = 0; l < 2; ++l) {
            const i32 row = token + l < at.num_tokens ? rows->y[token + l] : -1;
            if (row >= 0) store(to + row * stride, sum[l], sum[2 + l], row);
          }
        } else {
          if (token < at.num_tokens) store(to, sum[0], sum[2], 0);
          if (token + 1 < at.num_tokens) store(to + stride, sum[1], sum[3], 0);
          to += 8 * stride;
        }
      }
    };
    FloatPair bias = {0, 0};
    if (has_weight && (args.partials == nullptr || (kExperts && at.split == 0)))
      bias = load_bias(args, col, kExperts ? at.expert * args.out_cols : 0);
    if (args.partials != nullptr) {
      each(args.partials + (at.split * args.m + first) * args.out_stride + col, args.out_stride,
           [&](float* to, float one, float other, i32) {
             if (kExperts)
               store_neighbours(F32(), to, {one + bias.first, other + bias.second});
             else
               store_neighbours(F32(), to, {one, other});
           });
      continue;
    }
    Memory* const y = static_cast<Memory*>(args.y);
    const auto weighted = [&](float one, float other, i32 row) {
      FloatPair pair = {one + bias.first, other + bias.second};
      if (kExperts && args.experts.routing_weights != nullptr) {
        const float weight = args.experts.routing_weights[row];
        pair = {pair.first * weight, pair.second * weight};
      }
      return pair;
    };
    if (args.pairs && !args.accumulate) {
      each(y + first * args.out_cols + col, args.out_cols, [&](Memory* to, float one, float other, i32 row) {
        store_neighbours(Element(), to, weighted(one, other, row));
      });
    } else {
      const bool two = col + 1 < args.out_cols;
      each(y + first * args.out_cols + col, args.out_cols, [&](Memory* to, float one, float other, i32 row) {
        finish(args, to - y, two, {0, 0}, weighted(one, other, row));
      });
    }
  }
}

// ---- 5. The kernel

// The table and, of double quantization, the map; and what a lane needs of them.
__device__ __forceinline__ Lane make_tables(const QgemmSm80Args& args, const u8* weight, int thread) {
  build_table(args, thread);
  const u32 table = shared_address(shared_words) + static_cast<u32>(thread * sizeof(Entry) % 128);
  Lane lane = {
      thread % 32, thread % 32 / 4, thread % 4, table, 0, kRare ? args.bf16_scales : has_bf16_scales(args)};
  if (Traits(args).stored.double_quant) {
    static_assert(kThreads == 256);
    shared_map()[thread] = reinterpret_cast<const float*>(weight + args.map)[thread];
    lane.offset = *reinterpret_cast<const float*>(weight + args.offset);
  }
  return lane;
}

// The rows of the tokens of a tile. Those of x are some row where a token has none.
__device__ __forceinline__ void find_rows(const QgemmSm80Args& args, TokenRows& rows, const Tile& at,
                                          int thread) {
  if (thread < kTokens) {
    const i32 slot = thread < at.num_tokens ? slot_of(args.experts, at.first_token + thread) : -1;
    rows.x[thread] = max(slot, 0) / args.experts.slots_per_x;
    rows.y[thread] = slot;
  }
  __syncthreads();
}

// Until no more than the last `pending` steps are under way.
__device__ __forceinline__ void wait_steps(int pending) {
  if (pending == 2)
    wait_copies<2>();
  else if (pending == 1)
    wait_copies<1>();
  else
    wait_copies<0>();
}

// The products of steps `begin` to `end`, of tiles that are not the widest.
__device__ __forceinline__ void multiply_steps(const QgemmSm80Args& args, Sums& sums, const Copies& copies,
                                               u8* stages, i64 begin, i64 end, int warp, int tokens,
                                               const Lane& lane) {
  const Traits traits(args);
  const int ahead = traits.stages - 1;
  int slot = 0;
#pragma unroll 1
  for (i64 next = begin + ahead; next < end + ahead; ++next) {
    wait_steps(ahead - 1);
    __syncthreads();  // the step is there, and all are done with the one before
    if (next < end) {
      u8* const free = stages + (slot == 0 ? ahead : slot - 1) * traits.stage_bytes;
      copies.load_weight(free, next);
      copies.load_x(free, next);
    }
    commit_copies();
    multiply(args, sums, stages + slot * traits.stage_bytes, warp, tokens, lane);
    slot = slot == ahead ? 0 : slot + 1;
  }
}

#endif

extern "C" __global__ void
#if HALFBYTE_DEVICE_ARCH >= 800
__launch_bounds__(kQgemmSm80Threads, kBlocks)
#endif
    qgemm_sm80(const __grid_constant__ QgemmSm80Args args) {
#if HALFBYTE_DEVICE_ARCH >= 800
#if HALFBYTE_DEVICE_ARCH >= 900
  let_next_start();
#endif
  if (kExperts) wait_for_earlier();  // for who gets which row
  const Tile at(args);
  if (at.split >= args.splits || at.num_tokens <= 0) return;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const TokenRows* rows = nullptr;
  i64 begin = at.split * args.steps / args.splits, end = (at.split + 1) * args.steps / args.splits;
  if constexpr (kExperts) {
    __shared__ TokenRows shared_rows;
    find_rows(args, shared_rows, at, thread);
    rows = &shared_rows;
    if (at.expert >= args.experts.num) end = begin;  // no expert: sums of nothing
  }

  const Traits traits(args);
  u8* const stages = shared_bytes() + kStage.table_bytes + traits.map_bytes;
  const int ahead = traits.stages - 1;
  auto copies = [&] {
    if constexpr (kWide)
      return MovingCopies(args, at, rows, begin, end);
    else
      return Copies(args, at, rows);
  }();
  // The weight is there before earlier kernels have ended; x may not be.
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    if (begin + i >= end) break;
    copies.load_weight(stages + i * traits.stage_bytes, begin + i);
  }
  const Lane lane = make_tables(args, at.weight, thread);
  if (!kExperts) wait_for_earlier();
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) {
    if (begin + i < end) copies.load_x(stages + i * traits.stage_bytes, begin + i);
    commit_copies();
  }

  Sums sums = {};
  if constexpr (kWide)
    multiply_wide(Element(), sums, copies, stages, begin, end, warp, lane);
  else
    multiply_steps(args, sums, copies, stages, begin, end, warp, at.num_tokens, lane);
  store_sums(args, sums, at, rows, warp, lane);
#endif
}

}  // namespace halfbyte::device
