// What the kernels of measurements are given: shared by host and device, freestanding.
#pragma once

#include "formats/common.h"

namespace halfbyte {

// Kernels that only read.
struct ReadArgs {
  const void* from;        // aligned to 16 bytes
  formats::i64 num_bytes;  // a multiple of 16
  formats::u32* never;     // written if all that a thread read comes to one value of 2^32
  formats::i32 early;      // started by launch_early
};
inline constexpr int kReadBulkThreads = 32;

// Kernels that only move, words of 16 bytes.
struct MoveArgs {
  const void* from;
  void* to;
  formats::i64 num_reads, num_writes;
};
inline constexpr int kMoveThreads = 256;

struct DelayArgs {
  formats::i64 cycles;
};

}  // namespace halfbyte
