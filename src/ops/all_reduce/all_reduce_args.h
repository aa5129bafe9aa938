// What the kernels of `all_reduce` are given: shared by host and device, freestanding.
#pragma once

#include "formats/common.h"

namespace halfbyte {

inline constexpr int kMaxPeers = 16;

// A flag is the number of a run, of all members alike. Data of two runs lie apart, by the parity of their
// numbers: when a member writes those of a run, the run before the last has ended for all, as it has seen
// data of the last, which others write when they have ended the one before it.

// 8 bytes of data. Halves of 8 bytes arrive as a whole, so data whose flag is there is there, without a
// fence.
struct alignas(16) AllReduceLine {
  formats::u32 data0, flag0, data1, flag1;
};
inline constexpr int kLineThreads = 256, kMostLineBlocks = 96;
inline constexpr formats::i64 kMostLines = 32768;  // of a run

// Blocks that wait for each other: a flag for each, behind its data, of which a thread holds so many vectors
// of 16 bytes.
inline constexpr int kChunkThreads = 512, kChunkVectors = 2, kMostChunkBlocks = 128;
inline constexpr formats::i64 kMostChunkBytes =
    4 << 20;  // of x in a run: of pieces, whose sums lie behind what others write

// Of one member, in memory of its device.
struct AllReduceState {
  formats::u32 run;     // number of the last one; 0: there was none
  formats::u32 ticket;  // blocks that have read it
};
// What others write, by parity and by who writes: lines [2][size][kMostLines]; bytes
// [2][size][kMostChunkBytes]; flags [2][2][size][kMostChunkBlocks], of the first and second exchange of a
// run.
struct AllReduceInbox {
  AllReduceLine* lines;
  unsigned char* chunks;
  formats::u32* flags;
};

struct AllReduceArgs {
  void* x;
  formats::i64 num_elements;        // chunks: a multiple of 16 bytes
  AllReduceInbox inbox[kMaxPeers];  // of each member, in memory of its device
  AllReduceState* state;
  const volatile formats::u32* aborted;  // in memory of the host
  formats::i32 rank, size;
};

}  // namespace halfbyte
