// Loops of the CPU that do one thing as fast as it goes: they read, or multiply.
#pragma once

#include <cstdint>
#include <vector>

#include "halfbyte/tensor.hpp"

namespace halfbyte {

// How to read memory.
struct ReadLoop {
  int num_streams;             // read in turn: 1, 2 or 4
  int64_t prefetch_bytes = 0;  // how far ahead; 0: left to the processor
};
// Reads with vectors, on the calling thread. The result depends on every byte.
uint64_t read_bytes(const void* from, int64_t num_bytes, ReadLoop loop);

// Reads so many bytes, and writes others past the caches, on the calling thread: what is written comes from
// the first-level cache.
void move_bytes(const void* from, int64_t read_bytes, void* to, int64_t write_bytes);
// Copies past the caches.
void copy_bytes(const void* from, void* to, int64_t num_bytes);
// After these: what was written is seen by others.
void end_moves();

// Multiply-adds in registers, on the calling thread.
struct ArithmeticLoop {
  const char* name;
  double flops;                  // of a step
  double (*run)(int64_t steps);  // the result depends on all steps
};
// Those of the processor whose products are exact for operands of `dtype`, with sums in f32: "fma" of f32,
// "bf16_dot" (vdpbf16ps), "amx_bf16" (tdpbf16ps).
std::vector<ArithmeticLoop> arithmetic_loops(DType dtype);

}  // namespace halfbyte
