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
      if constexpr (kGlobalScale) even *= factor, odd *= factor;
      if constexpr (kExperts) {
        if (args_.partials != nullptr) {
          *reinterpret_cast<FloatPair*>(args_.partials + row * args_.partial_stride + column) = {even, odd};
          continue;
        }
        const float* const weights = args_.experts.routing_weights;
        if (weights != nullptr) even *= weights[row], odd *= weights[row];
      }
      float v[2] = {even, odd};
      store_two(static_cast<u16*>(args_.y) + row * args_.k + column, v, column + 1 < args_.k,
                args_.accumulate, args_.pairs);
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

__device__ __forceinline__ void multiply_tile(Product& product, const Stream& stream, const Tile& tile,
                                              TeamStage& ring) {
  product.set_tile(tile.columns, stream.strip_of(0));
  for (int step = 0; step < stream.steps(); ++step) {
    wait(stream.full(ring.stage), ring.parity);
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

__device__ __forceinline__ void run(const QgemmSm90TransposedArgs& args, u8* shared) {
  const Position at(args);
  let_next_start();
  Stream stream(args, shared, at.team, at.rank);
  if (at.copies) {
    stream.init();
    prefetch_map(&args.x);
  }
  Tile tile;
  const auto start = [&] {
    if (!find_tile(tile, args, at.cluster)) return false;
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
      goes_on = find_tile(next, args, at.cluster + (number + 1) * at.num_clusters);
    };
    if (kExperts) find_next();  // early: it takes a while
    multiply_tile(product, stream, tile, ring);
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
  run(args, shared);
#endif
}

}  // namespace halfbyte::device
