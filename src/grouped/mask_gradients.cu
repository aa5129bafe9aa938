// Gradients by the mask that fake_quantize wrote: a thread has kMaskBatch chunks of 16 bytes, 32 apart, or an
// element.
#include "cuda/device/chunk.cuh"
#include "cuda/device/memory.cuh"
#include "grouped/linear_args.h"
#include "halfbyte_config.h"

namespace halfbyte::device {

using Memory = Element::Memory;
constexpr int kChunk = 16 / sizeof(Memory);
using Index = Select<kWide, i64, u32>;

__device__ __forceinline__ void select_chunk(Words4& words, u32 bits) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const int i = w * 4 / static_cast<int>(sizeof(Memory));  // the first element of the word
    if constexpr (sizeof(Memory) == 2)
      words.word[w] &= ((bits >> i & 1) != 0 ? 0xFFFFu : 0) | ((bits >> (i + 1) & 1) != 0 ? 0xFFFF0000u : 0);
    else
      words.word[w] = (bits >> i & 1) != 0 ? words.word[w] : 0;
  }
}

extern "C" __global__ void __launch_bounds__(kLinearThreads)
    mask_gradients(const __grid_constant__ MaskGradientsArgs args) {
  if constexpr (kChunks) {
    const Index warp = static_cast<Index>(block_index()) * (kLinearThreads / 32) + threadIdx.x / 32;
    const Index first = warp * (32 * kMaskBatch) + threadIdx.x % 32;
    const auto end = static_cast<Index>(args.num_items);
    Words4 words[kMaskBatch];
    u32 bits[kMaskBatch];
#pragma unroll
    for (int b = 0; b < kMaskBatch; ++b) {
      const Index chunk = min(first + b * 32, end - 1);
      words[b] = load_to_write(static_cast<const Words4*>(args.dy) + chunk);  // dx may be dy
      bits[b] = static_cast<u32>(args.mask[chunk / (8 / kChunk)]) >> (chunk % (8 / kChunk) * kChunk);
    }
#pragma unroll
    for (int b = 0; b < kMaskBatch; ++b) {
      const Index chunk = first + b * 32;
      if (chunk >= end) break;
      select_chunk(words[b], bits[b]);
      store_once(static_cast<Words4*>(args.dx) + chunk, words[b]);
    }
  } else {
    const Index index = static_cast<Index>(block_index()) * kLinearThreads + threadIdx.x;
    if (index >= static_cast<Index>(args.num_items)) return;
    const Index row = index / static_cast<Index>(args.cols),
                column = index - row * static_cast<Index>(args.cols);
    const bool passes = args.mask[row * static_cast<i64>(args.row_bytes) + column / 8] >> (column % 8) & 1;
    static_cast<Memory*>(args.dx)[index] = passes ? static_cast<const Memory*>(args.dy)[index] : Memory{};
  }
}

}  // namespace halfbyte::device
