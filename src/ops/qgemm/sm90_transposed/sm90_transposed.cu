// y[m, k] = x[m, n] W of a packed weight, m <= 64: sm_90a.
//
// A cluster makes tiles of 64 or 128 columns of the weight. Its blocks share the rows, and so do the teams of
// a block: its warps or, where there are more tokens, its warpgroups.
//   1. stream.cuh: a team streams its own rows. Bulk copies bring the codes and parameters of a step, one
//      strip or two, and the box of x for them, several stages ahead.
//   2. parameters.cuh: scales, zero points and biases of a lane.
//   3. warp_product.cuh, warpgroup_product.cuh: codes become 16-bit weights in registers. They are operand A
//      of the matrix instructions: its rows are columns of the weight, its k runs along rows of the weight.
//      Operand B is the box of x.
//   4. At the end of a tile the sums of the teams meet in shared memory, then those of the blocks of the
//      cluster, and are added in a fixed order.
//   5. The kernel.
//   6. Of experts, the rings of stages go on from tile to tile, and sums meet beside them. Of few rows a
//   block finds the tiles by itself, and each team gathers its rows of x.
//
// A word of 4-bit codes has rows 2a and 2a + 1 of the columns 16j + 8 * second + 2t + e, e and second 0 or 1.
// Lane (g, t') has the words of a = 8i + t' and 8i + t' + 4 for the 16 rows i of a strip; e = 0 is fragment
// row g, e = 1 row g + 8.
#include "ops/qgemm/sm90_transposed/warp_product.cuh"
#include "ops/qgemm/sm90_transposed/warpgroup_product.cuh"
#include "ops/qgemm/weight/experts.cuh"
#include "ops/qgemm/weight/finish.cuh"
#include "ops/qgemm/weight/output.cuh"

namespace halfbyte::device {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

using Product = Select<kTokens <= 16, WarpProduct, WarpgroupProduct>;
static_assert(kTeams * Product::kTeamWords * 4 == kTiling.exchange_bytes());

// ---- 4. The sums meet

struct Pair {
  float even = 0, odd = 0;
};

// The sums of all teams of this block, of a pair of columns.
__device__ __forceinline__ Pair add_teams(const float* sums) {
  Pair sum;
#pragma unroll
  for (int team = 0; team < kTeams; ++team) {
    sum.even += sums[team * Product::kTeamWords];
    sum.odd += sums[team * Product::kTeamWords + Product::kOdd];
  }
  return sum;
}

// Stores them, of row `row` of y, of experts with its weight; column + 1 may lie beyond y.
__device__ __forceinline__ void store_pair(const QgemmSm90TransposedArgs& args, i64 row, i64 column,
                                           Pair sum) {
  if constexpr (kExperts) {
    if (args.partials != nullptr) {
      *reinterpret_cast<FloatPair*>(args.partials + row * args.partial_stride + column) = {sum.even, sum.odd};
      return;
    }
    const float* const weights = args.experts.routing_weights;
    if (weights != nullptr) sum.even *= weights[row], sum.odd *= weights[row];
  }
  float v[2] = {sum.even, sum.odd};
  store_two(static_cast<u16*>(args.y) + row * args.k + column, v, column + 1 < args.k, args.accumulate,
            args.pairs);
}

// Adds up the sums of a tile over teams and blocks, and stores y. Of a cluster each block finishes half of
// the sums, and sends its part of the other half to the other block.
class Meeting {
 public:
  // `sums`: of the teams. `parity`: of the number of the tile: what is sent stays until the other block has
  // come to the end of the next tile.
  __device__ __forceinline__ Meeting(const QgemmSm90TransposedArgs& args, const float* sums, const Tile& tile,
                                     int rank, int parity)
      : args_(args),
        sums_(sums),
        tile_(tile),
        rank_(rank),
        parity_(parity),
        count_(kPairs / args.cluster),
        thread_(static_cast<int>(threadIdx.x)) {
    asm volatile(""
                 : "+r"(thread_));  // places are not made before the products, in registers that those need
  }

  __device__ __forceinline__ void send() const {
    const int other = 1 - rank_;
    for (int at = thread_; at < count_; at += kTransposedThreads) {
      const SumPlace place = Product::place(at, other, 2);
      if (place.token >= num_rows()) continue;
      const Pair sum = add_teams(sums_ + place.word);
      store_cluster(address_in(static_cast<u32>(other), sent(at)), sum.even, sum.odd);
    }
    cluster_arrive();
  }
  __device__ __forceinline__ void add_own() {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = thread_ + i * kTransposedThreads;
      const SumPlace place = Product::place(at, rank_, args_.cluster);
      const bool inside = at < count_ && place.token < num_rows();
      if constexpr (kExperts) rows_[i] = inside ? slot_of(args_.experts, tile_.first_row + place.token) : -1;
      if (inside) own_[i] = add_teams(sums_ + place.word);
    }
  }
  __device__ __forceinline__ void store() const {
    const float factor = global_factor(weight_of(args_, tile_), args_.global_scale);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = thread_ + i * kTransposedThreads;
      const SumPlace place = Product::place(at, rank_, args_.cluster);
      const i64 column = static_cast<i64>(tile_.columns) * kUnits * kUnitCols + place.pair * 2;
      if (at >= count_ || place.token >= num_rows() || column >= args_.k) continue;
      const i64 row = kExperts ? rows_[i] : place.token;
      if (kExperts && row < 0) continue;
      float even = own_[i].even, odd = own_[i].odd;
      if (args_.cluster == 2) {  // the sum of two does not depend on their order
        even += load_shared(sent(at));
        odd += load_shared(sent(at) + 4);
      }
      store_pair(args_, row, column, {even * factor, odd * factor});
    }
  }

 private:
  static constexpr int kPairs = kTokens * kUnits * kUnitCols / 2;  // as many words are sent
  static constexpr int kOwn = (kPairs + kTransposedThreads - 1) / kTransposedThreads;

  __device__ __forceinline__ int num_rows() const { return kExperts ? tile_.num_rows : args_.m; }
  // Where pair number `at` of those that a block finishes comes from the other block.
  __device__ __forceinline__ u32 sent(int at) const {
    const int word = parity_ * kPairs + 2 * at;
    return scratch_address(word / 32, word % 32, static_cast<u32>(rank_));
  }

  const QgemmSm90TransposedArgs& args_;
  const float* sums_;
  const Tile& tile_;
  int rank_, parity_, count_, thread_;
  Pair own_[kOwn];
  i32 rows_[kExperts ? kOwn : 1];  // of y, of experts
};

// ---- 5. The kernel

// Who a thread is: its lane, its warp of the team, its team of the block, its block of the cluster.
struct Position {
  int lane, warp, team, rank, cluster, num_clusters;
  bool copies;  // it starts the copies of its team

  __device__ __forceinline__ explicit Position(const QgemmSm90TransposedArgs& args) {
    const int thread = static_cast<int>(threadIdx.x);
    lane = thread & 31;
    const int warp_of_block = __shfl_sync(~0u, thread >> 5, 0);  // known to be the same in all lanes
    warp = warp_of_block % kTeamWarps;
    team = warp_of_block / kTeamWarps;
    const int shift = args.cluster - 1;  // of 1 or 2
    cluster = static_cast<int>(blockIdx.x) >> shift;
    num_clusters = static_cast<int>(gridDim.x) >> shift;
    rank = static_cast<int>(blockIdx.x) & shift;
    copies = warp == 0 && lane == 0;
  }
};

// The stage of a team that comes next, and the parity of its phase.
struct TeamStage {
  int stage;
  u32 parity = 0;
};

__device__ __forceinline__ void fill_tables(const QgemmSm90TransposedArgs& args, u8* shared, int rank) {
  const int thread = static_cast<int>(threadIdx.x);
  if constexpr (kBits == 4) build_pair_table<kTransposedThreads>(args.values, thread, static_cast<u32>(rank));
  if constexpr (kDoubleQuant) {
    if (thread < 256)
      reinterpret_cast<float*>(shared + kTiling.map())[thread] =
          reinterpret_cast<const float*>(args.weight + args.map)[thread];
  }
}

// refill(step, stage, whether this lane starts copies): where warps multiply, when a stage is free.
template <class P, class F>
__device__ __forceinline__ void multiply_tile(P& product, const Stream& stream, const Tile& tile,
                                              TeamStage& ring, const F& refill) {
  product.set_tile(tile.columns, stream.strip_of(0));
  for (int step = 0; step < stream.steps(); ++step) {
    wait(stream.full(ring.stage), ring.parity);
    if constexpr (kTiling.by_warp())
      product.multiply(stream, ring.stage, [&](int stage, bool starts) { refill(step, stage, starts); });
    else
      product.multiply(stream, step, ring.stage);
    ring.stage = stream.next(ring.stage);
    if (ring.stage == stream.first()) ring.parity ^= 1;
  }
  product.finish();
}

// `number`: of the tile, of those of this cluster.
__device__ __forceinline__ void finish_tile(const QgemmSm90TransposedArgs& args, u8* shared,
                                            const Product& product, const Position& at, const Tile& tile,
                                            int number) {
  // The exchange lies where the stages do: all of them are done with, and the next tile's come after.
  __syncthreads();
  float* const exchange = reinterpret_cast<float*>(shared + kTiling.boxes());
  product.store(exchange, at.team);
  if (args.cluster == 2 && number == 0) cluster_wait();
  __syncthreads();
  Meeting meeting(args, exchange, tile, at.rank, number % 2);
  if (args.cluster == 2) meeting.send();
  meeting.add_own();
  if (args.cluster == 2) cluster_wait();
  meeting.store();
}

// ---- 6. Of experts: the stages hold what comes next, of any tile

// Warps that share a tile, one to all 16, and what a thread is there.
struct TileWarps {
  int number, teams, team, thread, threads;
  __device__ __forceinline__ TileWarps(const QgemmSm90TransposedArgs& args, int warp)
      : teams(kTeams / args.tiles_at_once), threads(kTransposedThreads / args.tiles_at_once) {
    number = warp / teams;
    team = warp % teams;
    thread = static_cast<int>(threadIdx.x) % threads;
  }
  __device__ __forceinline__ void sync() const {
    if (teams == 1)  // there are 16 barriers in all
      __syncwarp();
    else
      sync_some(1 + number, threads);
  }
};

// The sums of some blocks of all teams meet in the half of the table that it does not use, then those of the
// next.
template <class P>
__device__ __forceinline__ void finish_flowing(const QgemmSm90TransposedArgs& args, const P& product,
                                               const TileWarps& warps, const Tile& tile, u8* shared) {
  constexpr int kBlockLines = kTiling.block_words() / 32, kBlockPairs = kTokens * 8;
  constexpr int kAtOnce = min(P::kBlocks, kMeetingBytes / 128 / (kTeams * kBlockLines));  // blocks
  constexpr int kTeamLines = kAtOnce * kBlockLines;
  static_assert(P::kBlocks % kAtOnce == 0);
  const int lane = static_cast<int>(threadIdx.x % 32), lines = warps.number * warps.teams * kTeamLines;
  const float factor = global_factor(weight_of(args, tile), args.global_scale);
#pragma unroll
  for (int first = 0; first < P::kBlocks; first += kAtOnce) {
    warps.sync();  // what was there is read
    product.each_sum(first, kAtOnce, [&](int block, int r, float sum) {
      store_shared(scratch_address(lines + warps.team * kTeamLines + block * kBlockLines + r, lane, 0), sum);
    });
    warps.sync();
    for (int at = warps.thread; at < kAtOnce * kBlockPairs; at += warps.threads) {
      const SumPlace place = P::place(first * kBlockPairs + at, 0, 1);
      const i64 column = static_cast<i64>(tile.columns) * kUnits * kUnitCols + place.pair * 2;
      if (place.token >= tile.num_rows || column >= args.k) continue;
      // A load each time: while products are made there are no registers for it.
      const i32 i = tile.first_row + place.token;
      const i32 row = kFindsRows ? found_rows(shared).slots[i] : slot_of(args.experts, i);
      if (row < 0) continue;
      u32 from = scratch_address(lines + place.word / 32 - first * kBlockLines, lane, 0);
      Pair sum;
#pragma unroll 4
      for (int team = 0; team < warps.teams; ++team, from += kTeamLines * kScratchStride) {
        sum.even += load_shared(from);
        sum.odd += load_shared(from + P::kOdd / 32 * kScratchStride);
      }
      store_pair(args, row, column, {sum.even * factor, sum.odd * factor});
    }
  }
}

template <class P>
__device__ __forceinline__ void run_flowing(const QgemmSm90TransposedArgs& args, u8* shared) {
  const Position at(args);
  let_next_start();
  const TileWarps warps(args, at.team);
  Stream stream(args, shared, at.team, warps.team, warps.teams, 0);
  if (at.copies) {
    stream.init();
    prefetch_map(&args.x);
  }
  fill_tables(args, shared, 0);
  P product(args, shared, at.warp, at.lane, 0);
  wait_for_earlier();
  if (kFindsRows && at.team == 0) find_rows(found_rows(shared), args.experts, kTokens);
  __syncthreads();
  // Who has fewest steps to do.
  if (kFindsRows && at.team == kTeams - 1 && (args.partials != nullptr || !args.accumulate))
    clear_rows(args.experts, args.partials, args.partial_stride, static_cast<u16*>(args.y), args.k);
  int number = static_cast<int>(blockIdx.x + gridDim.x * static_cast<u32>(warps.number));
  const int apart = static_cast<int>(gridDim.x) * args.tiles_at_once;
  const i32 row_tiles = count_row_tiles(args, shared);
  Tile tile;
  if (!find_tile(tile, args, shared, row_tiles, number)) return;
  stream.set_tile(tile);
  Flow flow(stream, args, shared, row_tiles, number, apart);
  for (int i = 0; i < kStages; ++i) flow.load_next(stream.first() + i, at.copies);

  TeamStage ring{stream.first()};
  for (;;) {
    Tile next;
    number += apart;
    const bool goes_on = find_tile(next, args, shared, row_tiles, number);  // early: it takes a while
    multiply_tile(product, stream, tile, ring,
                  [&](int, int stage, bool starts) { flow.load_next(stage, starts); });
    finish_flowing(args, product, warps, tile, shared);
    if (!goes_on) return;
    tile = next;
  }
}

__device__ __forceinline__ void run(const QgemmSm90TransposedArgs& args, u8* shared) {
  const Position at(args);
  let_next_start();
  Stream stream(args, shared, at.team, at.team, kTeams, at.rank);
  if (at.copies) {
    stream.init();
    prefetch_map(&args.x);
  }
  Tile tile;
  const auto start = [&] {
    if (!find_tile(tile, args, shared, count_row_tiles(args, shared), at.cluster)) return false;
    stream.set_tile(tile);
    if (at.copies) stream.start_weight();
    return true;
  };
  if (!kExperts) start();
  fill_tables(args, shared, at.rank);
  Product product(args, shared, at.warp, at.lane, static_cast<u32>(at.rank));
  wait_for_earlier();
  if (kExperts && !start()) return;  // only now is known what there is to do
  if (at.copies) stream.start_rest();
  // The other block of a cluster has begun when sums are sent there.
  if (args.cluster == 2) cluster_arrive_relaxed();
  __syncthreads();

  TeamStage ring{stream.first()};
  for (int number = 0;; ++number) {
    Tile next;
    bool goes_on = false;
    const auto find_next = [&] {
      goes_on = find_tile(next, args, shared, count_row_tiles(args, shared),
                          at.cluster + (number + 1) * at.num_clusters);
    };
    if (kExperts) find_next();  // early: it takes a while
    multiply_tile(product, stream, tile, ring, [&](int step, int stage, bool starts) {
      if (step + kStages >= stream.steps() || !starts) return;
      stream.load_weight(step + kStages, stage);
      stream.load_x(step + kStages, stage);
    });
    finish_tile(args, shared, product, at, tile, number);
    if (!kExperts) find_next();
    if (!goes_on) return;
    tile = next;
    fence_proxy_async();
    __syncthreads();
    stream.set_tile(tile);
    if (at.copies) stream.restart(ring.stage);
  }
}

#endif

extern "C" __global__ void __launch_bounds__(kTransposedThreads, 1)
    qgemm_sm90_transposed(const __grid_constant__ QgemmSm90TransposedArgs args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) u8 shared[];
  if constexpr (kFlows)
    run_flowing<Product>(args, shared);
  else
    run(args, shared);
#endif
}

}  // namespace halfbyte::device
