// What qgemm_expert_rows is given: shared by host and device, freestanding.
#pragma once

#include "ops/qgemm/weight/experts_args.h"

namespace halfbyte {

inline constexpr int kExpertRowsThreads = 256;
// Of a row of x, that a warp copies: each lane has eight on their way at a time. A warp with rows of 28 KB
// took 25 us, one load after the other.
inline constexpr int kExpertRowsPiece = 8 * 32;

// Rows [first, first + count) in the order of experts, and the tiles of the expert that are gone through
// together: `width` from number `panel` on. Of entry 0 of a list, expert is how many others there are; they
// have numbers from 0.
struct ExpertTileEntry {
  formats::i32 expert, first, count, panel, width;
};

// Of shared memory, where a kernel finds tiles and at most so many rows by itself.
HALFBYTE_FN int found_rows_bytes(int most_rows) { return most_rows * 20 + 4; }

struct QgemmExpertRowsArgs {
  ExpertsArgs experts;
  ExpertTileEntry* list;  // [1 + most_tiles]
  formats::i32 tile, most_tiles, most_width;
  const void* x;
  void* to;                 // x in the order of experts, [rows][chunks]; null: it lies in it
  formats::i32* rows_of_x;  // [rows]: the row of x of each in the order of experts; null: not needed
  formats::i64 chunks;      // of 16 bytes, of a row of x
  formats::i32 pieces;      // of a row, of kExpertRowsPiece chunks each; 1 where x is not copied
  bool once;                // the copy is more than the second-level cache keeps: rather x is to stay there
  void* zeros;  // [zero_parts][rows], of zero_bytes: y or sums; null: rows that no expert has are not written
  formats::i64 zero_bytes;
  formats::i32 zero_parts;
  formats::u32* flags;  // [num_flags], which become zeros
  formats::i32 num_flags;
};

}  // namespace halfbyte
