// The search for the range of least error: errors of candidates, the choice of the next.
#pragma once

#include "ops/observe/range_search.cuh"

namespace halfbyte::device {

using Candidate = MseCandidate<F>;
constexpr int kMost = kMseMostCandidates;
constexpr int kBlock = 16;  // elements summed in registers

__device__ __forceinline__ float least(float a, float b) { return fminf(a, b); }
__device__ __forceinline__ double least(double a, double b) { return fmin(a, b); }
__device__ __forceinline__ float most(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double most(double a, double b) { return fmax(a, b); }

// A pairwise sum of blocks that come in order, fewer than 2^levels.
template <int levels>
struct TreeSums {
  F parts[levels] = {};

  __device__ __forceinline__ void push(F sum, u32 number) {
    bool open = true;
#pragma unroll
    for (int level = 0; level < levels; ++level) {
      const bool full = (number >> level & 1) != 0;
      if (open && !full) parts[level] = sum;
      if (open && full) sum = parts[level] + sum;
      open = open && full;
    }
  }
  __device__ __forceinline__ F total(u32 count) const {
    F sum = 0;
#pragma unroll
    for (int level = 0; level < levels; ++level)
      if ((count >> level & 1) != 0) sum = parts[level] + sum;
    return sum;
  }
};

// The pairwise sum of term(first), ... term(first + n - 1).
template <int n, class Term>
__device__ __forceinline__ F tree_of(u32 first, const Term& term) {
  if constexpr (n == 1)
    return term(first);
  else
    return tree_of<n / 2>(first, term) + tree_of<n / 2>(first + n / 2, term);
}

// A candidate, ready to be used.
struct Codes {
  F scale, reciprocal, low, high;

  __device__ __forceinline__ F term(F x) const {  // mse_term()
    constexpr F kRound = Float<F>::kUnit * static_cast<F>(1.5);
    const F code = (least(high, most(low, x * reciprocal)) + kRound) - kRound;
    const F error = x - code * scale;
    return error * error;
  }
};
// The sum of n terms at y, in shared memory, aligned to 16 bytes.
template <int n>
__device__ __forceinline__ F sum_terms(const F* y, const Codes& codes) {
  constexpr int kLoad = 16 / sizeof(F);
  if constexpr (n > kLoad) {
    return sum_terms<n / 2>(y, codes) + sum_terms<n / 2>(y + n / 2, codes);
  } else {
    struct alignas(16) Load {
      F value[kLoad];
    };
    const Load load = *reinterpret_cast<const Load*>(y);
    F sum = codes.term(load.value[0]) + codes.term(load.value[1]);
    if constexpr (kLoad == 4) sum = sum + (codes.term(load.value[2]) + codes.term(load.value[3]));
    return sum;
  }
}
// The error of a candidate over so many blocks at y.
__device__ __forceinline__ F error_of(const F* y, u32 blocks, const Candidate& candidate, F levels) {
  const Codes codes = {candidate.scale, 1 / candidate.scale, candidate.low, candidate.low + levels};
  TreeSums<6> sums;
#pragma unroll 1
  for (u32 block = 0; block < blocks; ++block) sums.push(sum_terms<kBlock>(y + block * kBlock, codes), block);
  return sums.total(blocks);
}

// A search, where it stands.
struct Step {
  MseSearch<F> search;
  MseCodes codes;
  MseStage stage;
  int number;  // of the stage

  __device__ __forceinline__ Step(const MseSearch<F>& search_in, const MseCodes& codes_in, int number_in)
      : search(search_in),
        codes(codes_in),
        stage(mse_stage(codes_in.asymmetric, number_in)),
        number(number_in) {}
  __device__ __forceinline__ Candidate candidate(int i, const Candidate* parents) const {
    if (number == 0) return search.rung(i, codes);
    return search.child(parents[i / (stage.scales * stage.zeros)], i, stage, codes);
  }
};

// The search of a group, of which the range of finite values is known. False where there is nothing to find.
__device__ __forceinline__ bool begin_search(const RangeKeys* keys, const MseCodes& codes,
                                             MseSearch<F>& search) {
  if (keys->low == 0) return false;
  const F low = static_cast<F>(from_order_key(keys->low)), high = static_cast<F>(from_order_key(keys->high));
  if (low == 0 && high == 0) return false;
  search = MseSearch<F>::of(-low + 0, high + 0, codes);
  return true;
}
__device__ __forceinline__ void end_search(RangeKeys* keys, const MseSearch<F>& search, const Candidate& best,
                                           const MseCodes& codes) {
  F low, high;
  search.range(best, codes, low, high);
  store_range(keys, low, high);
}

struct Ranked {
  F value;
  int index;
};
__device__ __forceinline__ Ranked first(const Ranked& a, const Ranked& b) {
  return b.value < a.value || (b.value == a.value && b.index < a.index) ? b : a;
}
// The first of the values of a warp: value j of a lane has the number lane + 32 j.
template <int n>
__device__ __forceinline__ Ranked first_of(const F (&values)[n]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  Ranked result = {values[0], lane};
#pragma unroll
  for (int j = 1; j < n; ++j) result = first(result, Ranked{values[j], lane + 32 * j});
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2)
    result = first(result, Ranked{shuffle_xor(result.value, mask), shuffle_xor(result.index, mask)});
  return result;
}

// By a warp: takes up the errors of a stage, and puts the next parents in the place of those before.
__device__ __forceinline__ void take_errors(const Step& step, const F* errors, Candidate* parents,
                                            Candidate& best, F& least_error) {
  constexpr int kMine = (kMost + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x % 32), count = step.stage.count();
  const F infinity = bit_cast<F>(Float<F>::kInfinity);
  F values[kMine];
#pragma unroll
  for (int j = 0; j < kMine; ++j) values[j] = lane + 32 * j < count ? errors[lane + 32 * j] : infinity;
  const Ranked winner = first_of(values);
  if (step.number == 0 || winner.value < least_error) {
    least_error = winner.value;
    best = step.candidate(winner.index, parents);
  }
  if (step.number == kMseStages) return;
#pragma unroll
  for (int j = 0; j < kMine; ++j)
    if (lane + 32 * j < count) values[j] = mse_merit(errors, lane + 32 * j, step.stage.scales);
  const int num_parents = mse_stage(step.codes.asymmetric, step.number + 1).parents;
  int mine = 0;
#pragma unroll 1
  for (int rank = 0; rank < num_parents; ++rank) {
    const int index = first_of(values).index;
    if (lane == rank) mine = index;
#pragma unroll
    for (int j = 0; j < kMine; ++j)
      if (lane + 32 * j == index) values[j] = infinity;
  }
  const Candidate parent = step.candidate(mine, parents);
  __syncwarp();
  if (lane < num_parents) parents[lane] = parent;
  __syncwarp();
}

// The elements of a piece in units, with zeros up to whole blocks. By `threads` threads; they must meet
// afterwards.
template <class Index>
__device__ __forceinline__ u32 load_piece(const SearchCommon& common, const Groups::Group& group, i64 begin,
                                          u32 piece, F per_unit, u32 thread, u32 threads, F* y) {
  const u32 n = static_cast<u32>(min(static_cast<i64>(piece), group.size - begin));
  const u32 blocks = (n + kBlock - 1) / kBlock;
  for (u32 k = thread; k < blocks * kBlock; k += threads) {
    F value = 0;
    if (k < n) value = load(Element(), element_at(common, group, static_cast<Index>(begin + k)));
    y[k] = formats::is_finite(value) ? value * per_unit : 0;
  }
  return blocks;
}

// Blocks of elements that each of eight warps has, of so many: a power of two.
__device__ __forceinline__ u32 blocks_of_warp(u32 blocks) {
  return blocks <= kMseWarps ? 1u : 1u << (32 - __clz(static_cast<int>((blocks - 1) / kMseWarps)));
}

// What a block has in shared memory.
struct BlockShared {
  alignas(16) F y[mse_piece(kMseWarps, sizeof(F))];
  F partial[kMseWarps][kMost];
  Candidate parents[kMseMostParents];
};
// The errors of all candidates over up to kMseMostPieces pieces from element `begin` on, by a block; thread t
// keeps those of candidates t and t + kThreads.
constexpr int kKept = (kMost + kThreads - 1) / kThreads;
template <class Index>
__device__ __forceinline__ void block_errors(BlockShared& shared, const SearchCommon& common,
                                             const Groups::Group& group, i64 begin, i64 end, const Step& step,
                                             F (&errors)[kKept]) {
  constexpr int kPiece = mse_piece(kMseWarps, sizeof(F));
  const int count = step.stage.count(), warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  TreeSums<9> sums[kKept];
  u32 pieces = 0;
#pragma unroll 1
  for (i64 at = begin; at < end; at += kPiece, ++pieces) {
    const u32 blocks =
        load_piece<Index>(common, group, at, kPiece, step.search.per_unit, threadIdx.x, kThreads, shared.y);
    __syncthreads();
    const u32 share = blocks_of_warp(blocks), first_block = warp * share;
    const u32 mine = first_block >= blocks ? 0 : min(share, blocks - first_block);
#pragma unroll 1
    for (int i = lane; i < count; i += 32)
      shared.partial[warp][i] =
          error_of(shared.y + first_block * kBlock, mine, step.candidate(i, shared.parents),
                   static_cast<F>(step.codes.levels));
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int i = static_cast<int>(threadIdx.x) + j * kThreads;
      if (i >= count) continue;
      sums[j].push(tree_of<kMseWarps>(0, [&](u32 w) { return shared.partial[w][i]; }), pieces);
    }
  }
#pragma unroll
  for (int j = 0; j < kKept; ++j) errors[j] = sums[j].total(pieces);
}

}  // namespace halfbyte::device
