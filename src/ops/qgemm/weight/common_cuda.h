// Which products the CUDA variants have kernels for: two tables, of weights that are common and of tiles that
// do not fit.
#pragma once

#include <string>
#include <string_view>

#include "ops/qgemm/qgemm.h"

namespace halfbyte {

// Columns that share a scale where scales lie among the codes of a packed weight; 0: it has one scale a row,
// or sections of scales.
int inlined_group(const QgemmProblem& problem);

// Why there are no matrix instructions for the codes, which they take in fragments; empty if there are.
std::string refuse_streams(const QgemmProblem& problem);

// Whether the weight is one that layouts store, with x of a dtype that goes with it: those that variants have
// kernels of every tile for. Why not; empty if it is.
bool is_common_weight(const QgemmProblem& problem);
std::string refuse_rare_weight(const QgemmProblem& problem);

// Why weights cannot be rounded to the dtype of x, scale and all; empty if they can.
std::string refuse_range(const QgemmProblem& problem);

// A kernel with a tile: what the variant calls them, 0 where it has none.
struct QgemmTileOf {
  std::string_view kernel;
  int tokens = 0, strips = 0;
  bool shared = false;  // by the blocks of a cluster
};
// Why there is no such kernel: ptxas would spill registers. Empty if there is one.
std::string refuse_spilling(const QgemmProblem& problem, const QgemmTileOf& tile);

}  // namespace halfbyte
