// The kernel that finds the ranges of groups of any shape.
#pragma once

#include "cuda/kernel.h"
#include "cuda/launch.h"
#include "grouped/grouping.h"
#include "grouped/ranges_args.h"

namespace halfbyte {

// counts: elements that are not finite; x is contiguous. chunks: of 16 bytes, else elements; not with counts.
// wide: 2^31 pieces of work and more.
cuda::KernelSpec ranges_kernel(const char* name, DType dtype, bool counts, bool chunks, bool wide);

// The kernel for a problem, and its arguments but for addresses and strides of tensors that are not
// contiguous.
struct RangesCuda {
  cuda::KernelSpec spec;
  cuda::Grid grid;
  RangesArgs args{};
};
// whole: the chunks of x lie at multiples of 16 bytes, one behind the other.
RangesCuda select_ranges(const char* name, const Grouping& grouping, DType dtype, bool counts, bool whole);

}  // namespace halfbyte
