// Which rows meet which weight, in a product with the weights of experts: shared by host and device,
// freestanding.
#pragma once

#include "formats/common.h"

namespace halfbyte {

// Rows are slots, or those of the matrices of all experts. See halfbyte/qgemm_grouped.hpp.
struct ExpertsArgs {
  const formats::i32* offsets;   // where the rows of an expert end; masked: how many it has
  const formats::i32* slots;     // the rows in the order of experts; null: they lie in it
  const float* routing_weights;  // of a row; null: none
  formats::i64 weight_bytes;     // from expert to expert
  formats::i32 rows, num;        // of all experts; of experts
  formats::i32 rows_per_expert;  // masked, else 0
  formats::i32 slots_per_x;      // rows that share a row of x
};

// Tiles of `tile` rows of one expert each that there can be at most, those of no expert among them.
HALFBYTE_FN formats::i64 most_expert_tiles(formats::i64 rows, formats::i64 num, formats::i64 rows_per_expert,
                                           formats::i64 tile) {
  if (rows_per_expert > 0) return num * ((rows_per_expert + tile - 1) / tile);
  const formats::i64 parts = formats::min(num + 1, rows);  // each has a row, and a tile that is not full
  return parts + (rows - parts) / tile;
}

}  // namespace halfbyte
