// Sums of little: each member writes its x, with a flag in every 8 bytes, into the inboxes of all others, and
// adds up what arrives in its own, in the order of ranks. Data travels once.
#include "ops/all_reduce/all_reduce.cuh"

namespace halfbyte::device {

using Memory = Element::Memory;
constexpr int kPerLine = 2 * kPerWord;

struct Two {
  u32 word[2];
};

__device__ __forceinline__ void store_line(AllReduceLine* to, const Two& data, u32 flag) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(data.word[0]), "r"(flag),
               "r"(data.word[1]), "r"(flag)
               : "memory");
}
__device__ __forceinline__ AllReduceLine load_line(const AllReduceLine* from) {
  AllReduceLine v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.data0), "=r"(v.flag0), "=r"(v.data1), "=r"(v.flag1)
               : "l"(from)
               : "memory");
  return v;
}

// The elements of a line of x; behind the end zeros.
__device__ __forceinline__ Two load_x(const AllReduceArgs& args, i64 line, bool whole) {
  const auto* const x = static_cast<const Memory*>(args.x) + line * kPerLine;
  Two v{};
  if (whole) {
    v.word[0] = reinterpret_cast<const u32*>(x)[0];
    v.word[1] = reinterpret_cast<const u32*>(x)[1];
    return v;
  }
#pragma unroll
  for (int i = 0; i < kPerLine; ++i)
    if (line * kPerLine + i < args.num_elements) {
      if constexpr (kPerWord == 1)
        v.word[i] = bit_cast<u32>(x[i]);
      else
        v.word[i / 2] |= static_cast<u32>(x[i]) << (i % 2 * 16);
    }
  return v;
}

extern "C" __global__ void __launch_bounds__(kLineThreads)
    all_reduce_lines(const __grid_constant__ AllReduceArgs args) {
  begin_run();
  const u32 run = number_of_run(args);
  const i64 first = block_index() * kLineThreads + threadIdx.x,
            stride = static_cast<i64>(gridDim.x) * kLineThreads,
            num_lines = (args.num_elements + kPerLine - 1) / kPerLine,
            num_whole = reinterpret_cast<u64>(args.x) % 4 == 0 ? args.num_elements / kPerLine : 0,
            parity = static_cast<i64>(run % 2) * args.size * kMostLines;
  for (i64 line = first; line < num_lines; line += stride) {
    const Two own = load_x(args, line, line < num_whole);
    for (int to = 1; to < args.size; ++to) {  // each begins with another one
      const int member = (args.rank + to) % args.size;
      store_line(args.inbox[member].lines + parity + args.rank * kMostLines + line, own, run);
    }
  }
  const AllReduceLine* const inbox = args.inbox[args.rank].lines + parity;
  for (i64 line = first; line < num_lines; line += stride) {
    const bool whole = line < num_whole;
    float sum[kPerLine];
    for (int from = 0; from < args.size; ++from) {
      Two part;
      if (from == args.rank) {
        part = load_x(args, line, whole);
      } else {
        const AllReduceLine* const at = inbox + from * kMostLines + line;
        AllReduceLine arrived = load_line(at);
        for (u32 tries = 1; arrived.flag0 != run || arrived.flag1 != run; ++tries) {
          if (is_aborted(args, tries)) return;
          arrived = load_line(at);
        }
        part = {{arrived.data0, arrived.data1}};
      }
#pragma unroll
      for (int i = 0; i < kPerLine; ++i) {
        const float summand = value(part.word[i / kPerWord], i % kPerWord);
        sum[i] = from == 0 ? summand : sum[i] + summand;
      }
    }
    auto* const x = static_cast<Memory*>(args.x) + line * kPerLine;
#pragma unroll
    for (int i = 0; i < kPerLine; ++i)
      if (whole || line * kPerLine + i < args.num_elements) x[i] = store(Element(), sum[i]);
  }
}

}  // namespace halfbyte::device
