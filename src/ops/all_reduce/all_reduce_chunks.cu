// Sums of more: blocks write chunks of x into the inboxes of others, then a flag. kPieces: each member sums a
// piece of x for all and hands it out, so that what a member writes does not grow with their number; else
// each sums all, and data travels once.
#include "ops/all_reduce/all_reduce.cuh"

namespace halfbyte::device {

using Memory = Element::Memory;
constexpr int kWords = 4, kPerVector = 16 / sizeof(Memory);

// 16 bytes of x, which may lie anywhere: whether it does is not the same for all members.
__device__ __forceinline__ Words4 load_x(const void* x, i64 i, bool aligned) {
  if (aligned) return static_cast<const Words4*>(x)[i];
  const auto* const from = static_cast<const Memory*>(x) + i * kPerVector;
  Words4 v{};
#pragma unroll
  for (int e = 0; e < kPerVector; ++e)
    if constexpr (kPerWord == 1)
      v.word[e] = bit_cast<u32>(from[e]);
    else
      v.word[e / 2] |= static_cast<u32>(from[e]) << (e % 2 * 16);
  return v;
}
__device__ __forceinline__ void store_x(void* x, i64 i, bool aligned, const Words4& v) {
  if (aligned) {
    static_cast<Words4*>(x)[i] = v;
    return;
  }
  auto* const to = static_cast<Memory*>(x) + i * kPerVector;
#pragma unroll
  for (int e = 0; e < kPerVector; ++e)
    if constexpr (kPerWord == 1)
      to[e] = bit_cast<float>(v.word[e]);
    else
      to[e] = static_cast<u16>(v.word[e / 2] >> (e % 2 * 16));
}

// This block's flag at each other member, behind what the block has written there; then it waits for theirs.
// False: it must end.
__device__ __forceinline__ bool exchange(const AllReduceArgs& args, u32 run, int number) {
  const i64 at = (static_cast<i64>(run % 2) * 2 + number) * args.size * kMostChunkBlocks + blockIdx.x;
  const int member = static_cast<int>(threadIdx.x);
  bool ended = false;
  __syncthreads();
  if (member < args.size && member != args.rank) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(args.inbox[member].flags + at +
                                                             args.rank * kMostChunkBlocks),
                 "r"(run)
                 : "memory");
    const u32* const flag = args.inbox[args.rank].flags + at + member * kMostChunkBlocks;
    u32 found = 0;
    for (u32 tries = 1; found != run && !ended; ++tries) {
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(found) : "l"(flag) : "memory");
      ended = is_aborted(args, tries);
    }
  }
  return __syncthreads_or(ended ? 1 : 0) == 0;
}

// Of a chunk, those of a thread, all in registers at once; and of how many members at once.
constexpr int kVectors = kChunkVectors, kBatch = 4;
static_assert(kMostChunkBytes / 2 <=
              i64{16} * kMostChunkBlocks * kChunkThreads * kVectors);  // two members and more

extern "C" __global__ void __launch_bounds__(kChunkThreads, 1)
    all_reduce_chunks(const __grid_constant__ AllReduceArgs args) {
  begin_run();
  const i64 num_vectors = args.num_elements * sizeof(Memory) / 16,
            piece = kPieces ? (num_vectors + args.size - 1) / args.size : num_vectors,
            chunk = (piece + gridDim.x - 1) / gridDim.x, begin = chunk * blockIdx.x + threadIdx.x,
            end = min(chunk * (blockIdx.x + 1), piece);
  const bool aligned = reinterpret_cast<u64>(args.x) % 16 == 0;
  // Of the piece of a member, the u-th vector of this thread.
  const auto first_of = [&](int member) { return kPieces ? member * piece : 0; };
  const auto place = [&](int u) { return begin + u * kChunkThreads; };
  const auto has = [&](int member, int u) { return place(u) < min(end, num_vectors - first_of(member)); };

  Words4 own[kVectors];
#pragma unroll
  for (int u = 0; u < kVectors; ++u)
    if (has(args.rank, u)) own[u] = load_x(args.x, first_of(args.rank) + place(u), aligned);
  const u32 run = number_of_run(args);
  // Where member `from` writes for member `to`.
  const auto inbox = [&](int to, int from) {
    const i64 slot = static_cast<i64>(run % 2) * args.size + from;
    return reinterpret_cast<Words4*>(args.inbox[to].chunks + slot * kMostChunkBytes);
  };

  for (int base = 1; base < args.size; base += kBatch) {
    Words4 part[kBatch][kVectors];
    if constexpr (kPieces)
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          const int member = (args.rank + base + j) % args.size;
          if (base + j < args.size && has(member, u))
            part[j][u] = load_x(args.x, first_of(member) + place(u), aligned);
        }
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const int member = (args.rank + base + j) % args.size;
        if (base + j < args.size && has(member, u))
          inbox(member, args.rank)[place(u)] = kPieces ? part[j][u] : own[u];
      }
  }
  if (!exchange(args, run, 0)) return;

  float sum[kVectors][kWords][kPerWord];
  for (int base = 0; base < args.size; base += kBatch) {
    Words4 part[kBatch][kVectors];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int u = 0; u < kVectors; ++u)
        if (base + j < args.size && has(args.rank, u))
          part[j][u] = base + j == args.rank ? own[u] : inbox(args.rank, base + j)[place(u)];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (base + j < args.size)
#pragma unroll
        for (int u = 0; u < kVectors; ++u)
#pragma unroll
          for (int w = 0; w < kWords; ++w)
#pragma unroll
            for (int e = 0; e < kPerWord; ++e) {
              const float summand = value(part[j][u].word[w], e);
              sum[u][w][e] = base + j == 0 ? summand : sum[u][w][e] + summand;
            }
  }
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if (!has(args.rank, u)) continue;
    Words4 result;
#pragma unroll
    for (int w = 0; w < kWords; ++w) result.word[w] = word_of(Element(), sum[u][w]);
    store_x(args.x, first_of(args.rank) + place(u), aligned, result);
    if constexpr (kPieces)
      for (int to = 1; to < args.size; ++to)
        inbox((args.rank + to) % args.size, args.rank)[piece + place(u)] = result;
  }
  if constexpr (kPieces) {
    if (!exchange(args, run, 1)) return;
    for (int base = 1; base < args.size; base += kBatch) {
      Words4 part[kBatch][kVectors];
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          const int member = (args.rank + base + j) % args.size;
          if (base + j < args.size && has(member, u)) part[j][u] = inbox(args.rank, member)[piece + place(u)];
        }
#pragma unroll
      for (int j = 0; j < kBatch; ++j)
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          const int member = (args.rank + base + j) % args.size;
          if (base + j < args.size && has(member, u))
            store_x(args.x, first_of(member) + place(u), aligned, part[j][u]);
        }
    }
  }
}

}  // namespace halfbyte::device
