// What the variants of `reorder` share.
#pragma once

#include <functional>

#include "core/variant.h"
#include "halfbyte/qgemm.hpp"
#include "ops/reorder/reorder_args.h"

namespace halfbyte {

// A checked problem.
struct ReorderProblem {
  ReorderArgs args{};
  bool to_packed = false;
  Device device = {};
  int num_threads = 0;  // CPU
};
// What a variant has made for a problem: compiled, ready to run on arguments that differ from those of the
// problem in nothing but addresses, and on a CUDA device to enqueue it.
using ReorderRun = std::function<void(const ReorderArgs& args, void* stream)>;

// Rows of codes of the view begin at bytes.
inline bool rows_begin_at_bytes(const ReorderArgs& args) {
  return args.layout.n <= 1 || args.row_bits % 8 == 0;
}

// What lies between and behind the sections: kReorderGaps at most.
void find_gaps(const formats::PackedLayout& layout, ReorderGap* gaps);
// Of checked parts that fit together, and packed memory.
ReorderArgs make_reorder_args(const ConstWeightView& view, const void* packed);
// Their addresses only.
void place_reorder(ReorderArgs& args, const ConstWeightView& view, const void* packed);

ReorderRun reorder_cpu(const ReorderProblem& problem);

// The codes of tiles [first, last) of a strip. SIMD kernels, dispatched at run time. From the packed form:
// where rows do not begin at bytes, all tiles of a strip at once.
struct ReorderTiles {
  int64_t strip = 0, first = 0, last = 0;
};
void reorder_tiles_cpu(const ReorderProblem& problem, const ReorderTiles& tiles);

std::string refuse_reorder_cuda(const ReorderProblem& problem);
ReorderRun reorder_cuda(const ReorderProblem& problem);

}  // namespace halfbyte
