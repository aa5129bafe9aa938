// quantize where rows are whole groups of 8 << args.group_shift elements, so that x is one sequence of
// groups: statistics, parameters, codes and packing in one pass.
//
// Work is issued about as fast as memory delivers it, so that instructions count and many warps must be under
// way: x waits in shared memory, not in registers. A thread has kBatch chunks of 8 elements, 32 chunks apart;
// 2^args.group_shift neighbouring lanes have a group in each. Ranges by shuffles; then lane b of a
// group's lanes works out the parameters of their chunk b, so that this costly part runs once for all chunks.
#include "ops/quantize/quantize.cuh"

namespace halfbyte::device {

constexpr int kThreads = kGroupsThreads;
// 40 registers a thread: as many warps as can be, where the fast path needs no more.
constexpr int kMinBlocks = !kFast ? 4 : (HALFBYTE_DEVICE_ARCH >= 800 ? 1536 : 1024) / kThreads;

// Where a thread has fewer chunks than it could have, they are as many as a group has: the size is known.
__device__ __forceinline__ int group_shift(const QuantizeArgs& args) {
  if constexpr (kBatch == groups_batch(1 << 20, sizeof(Memory))) return args.group_shift;
  int shift = 0;
  while (1 << shift < kBatch) ++shift;
  return shift;
}

// The memory of a warp: its chunks of x, 32 after 32, and from the front their codes, which take the place of
// chunks that are done, and are stored 16 bytes a lane.
struct Tile {
  alignas(16) u8 bytes[kBatch * 32 * sizeof(Chunk)];

  __device__ __forceinline__ Chunk& chunk(int i) { return reinterpret_cast<Chunk*>(bytes)[i]; }
  __device__ __forceinline__ void put(int chunk, const Packed& packed) {
    u8* const to = bytes + chunk * kBits;
    if constexpr (kBits == 2) {
      *reinterpret_cast<u16*>(to) = static_cast<u16>(packed.low);
    } else if constexpr (kBits == 4) {
      *reinterpret_cast<u32*>(to) = packed.low;
    } else if constexpr (kBits == 8) {
      *reinterpret_cast<u64*>(to) = packed.bits();
    } else {
      const u64 bits = packed.bits();
#pragma unroll
      for (int i = 0; i < kBits; ++i) to[i] = static_cast<u8>(bits >> (8 * i));
    }
  }
  // Those of the first num_chunks, a multiple of 4.
  __device__ __forceinline__ void store(u8* to, int num_chunks, int lane) const {
    if (num_chunks == 32 * kBatch) {
      constexpr int kWords = 32 * kBatch * kBits / 16;
#pragma unroll
      for (int i = 0; i < kWords; i += 32)
        if (kWords % 32 == 0 || i + lane < kWords)
          reinterpret_cast<Words4*>(to)[i + lane] = reinterpret_cast<const Words4*>(bytes)[i + lane];
    } else {
      for (int i = lane; i < num_chunks * kBits / 4; i += 32)
        reinterpret_cast<u32*>(to)[i] = reinterpret_cast<const u32*>(bytes)[i];
    }
  }
};

// The range of chunk `lane` % kBatch over `lanes` lanes. In each step a lane keeps half of its chunks
// and gives the other half away, which takes kBatch - 1 shuffles for what would otherwise be kBatch a step.
template <class RangeOfChunk>
__device__ __forceinline__ Range<F> own_range(const RangeOfChunk& range_of_chunk, int lane, int lanes) {
  decltype(range_of_chunk(0)) ranges[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) ranges[b] = range_of_chunk(b);
#pragma unroll
  for (int half = kBatch / 2, mask = 1; half >= 1; half /= 2, mask *= 2) {
    const bool odd = (lane & mask) != 0;
#pragma unroll
    for (int b = 0; b < half; ++b) {
      const auto keep = odd ? ranges[2 * b + 1] : ranges[2 * b],
                 give = odd ? ranges[2 * b] : ranges[2 * b + 1];
      ranges[b] = join(keep, shuffle_xor(give, mask));
    }
  }
#pragma unroll
  for (int mask = kBatch; mask < 32; mask *= 2)
    if (mask < lanes) ranges[0] = join(ranges[0], shuffle_xor(ranges[0], mask));
  return unpack(ranges[0]);
}

// Encodes all chunks, also of groups that are slow: shuffles need all lanes. owner: the first lane of this
// lane's group.
template <bool kClampHigh>
__device__ __forceinline__ void encode_tile(Tile& tile, const Encoding& e, const LaneBins& bins, int lane,
                                            int owner) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const Encoding shared = {shuffle(e.scale, owner + b), kAffine ? shuffle(e.bias, owner + b) : 0,
                             shuffle(e.reciprocal, owner + b),
                             kCodec.asymmetric ? shuffle(e.zero_point, owner + b) : 0, false};
    const Packed codes = encode_fast<kClampHigh>(tile.chunk(b * 32 + lane), shared, bins);
    __syncwarp();  // all lanes have read what is written over
    tile.put(b * 32 + lane, codes);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks)
    quantize_groups(const __grid_constant__ QuantizeArgs args) {
  __shared__ Tile tiles[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const LaneBins bins = load_bins(lane);
  const i64 warp = block_index() * (kThreads / 32) + threadIdx.x / 32;
  const i64 first = warp * (32 * kBatch);  // chunk
  // Chunks from there on; no warp leaves early, so that shuffles find all lanes.
  const int num_chunks = static_cast<int>(clamp<i64>(args.num_chunks - first, 0, 32 * kBatch));

  Tile& tile = tiles[threadIdx.x / 32];
  const auto* const x = static_cast<const Words4*>(args.x) + (first + lane) * Chunk::kWords4;
  if (num_chunks == 32 * kBatch) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b)
#pragma unroll
      for (int i = 0; i < Chunk::kWords4; ++i)
        copy_async(&tile.chunk(b * 32 + lane).words[i], x + b * 32 * Chunk::kWords4 + i);
  } else {
#pragma unroll 1
    for (int chunk = lane; chunk < 32 * kBatch; chunk += 32)
      tile.chunk(chunk) = chunk < num_chunks ? load_chunk<Chunk>(args.x, first + chunk) : Chunk{};
  }
  wait_copies();

  const int lanes = 1 << group_shift(args), own = lane & (lanes - 1), own_chunk = own * 32 + lane;
  const bool owns = own < kBatch && own_chunk < num_chunks;
  const auto x_of = [&](int b) -> const Chunk& { return tile.chunk(b * 32 + lane); };
  Range<F> range;
  if (kPairs && is_symmetric(args))
    range = own_range([&](int b) { return magnitude_range(x_of(b)); }, lane, lanes);
  else
    range = own_range([&](int b) { return signed_range(x_of(b)); }, lane, lanes);
  const bool finite = is_finite(range);
  if (__any_sync(kAllLanes, !finite)) {
#pragma unroll 1
    for (int b = 0; b < kBatch; ++b) {
      const int chunk = b * 32 + lane;
      Range<F> r = finite_range(chunk < num_chunks ? kChunk : 0,
                                [&](int i) { return load_element(args.x, (first + chunk) * kChunk + i); });
#pragma unroll 1
      for (int mask = 1; mask < lanes; mask *= 2) r = join(r, shuffle_xor(r, mask));
      if (own == b) range = r;
    }
  }
  Encoding e{};
  if (owns) e = finish_group(args, (first + own_chunk) >> group_shift(args), range, true);
  e.slow = e.slow || !finite;
  const u32 slow = __ballot_sync(kAllLanes, e.slow);
  const int owner = lane & -lanes;  // of this lane's group in the first of the chunks
  if constexpr (kFast) {
    if (clamps_high(args))
      encode_tile<true>(tile, e, bins, lane, owner);
    else
      encode_tile<false>(tile, e, bins, lane, owner);
  }
  if (slow != 0) {
    __syncwarp();
#pragma unroll 1
    for (int b = 0; b < kBatch; ++b) {
      const Encoding shared = {shuffle(e.scale, owner + b), shuffle(e.bias, owner + b), 0,
                               shuffle(e.zero_point, owner + b), true};
      const int chunk = b * 32 + lane;
      if (!(slow >> (owner + b) & 1) || chunk >= num_chunks) continue;
      const i64 index = (first + chunk) * kChunk;
      tile.put(chunk, Packed::of(encode_slow(
                          args, index, kChunk, [&](int i) { return load_element(args.x, index + i); },
                          [&](int) { return shared; })));
    }
  }
  __syncwarp();
  tile.store(args.codes + first * kBits, num_chunks, lane);
}

}  // namespace halfbyte::device
