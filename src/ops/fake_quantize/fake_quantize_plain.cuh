// What fake_quantize and its backward with plain parameters share (docs/kernels.md).
#pragma once

#include "grouped/linear.cuh"

namespace halfbyte::device {

// A tensor [outer, axis, inner] and its groups: group_outer is 1 or outer, group_inner 1 or inner.
struct PlainGroups {
  i64 axis, inner, group_outer, group_axis, group_inner;

  // Of element `index`.
  __device__ __forceinline__ Group load(const LinearCommon& common, i64 index) const {
    const i64 row = index / inner, i = index - row * inner, o = row / axis, a = row - o * axis;
    const i64 in_axis = a / group_axis, groups_axis = (axis + group_axis - 1) / group_axis;
    const i64 in_outer = (group_outer == 1 ? o : 0) * groups_axis + in_axis;
    const i64 number = group_inner == 1 ? in_outer * inner + i : in_outer;
    return load_group(common, number, [&] {
      return a == in_axis * group_axis && (group_outer == 1 || o == 0) && (group_inner == 1 || i == 0);
    });
  }
};

__device__ __forceinline__ LinearCommon common_of(const void* scales, const void* zeros,
                                                  QuantizeCounts* counts, int q_min, int q_max) {
  LinearCommon common{};
  common.data.scales = const_cast<void*>(scales);
  common.data.zeros = const_cast<void*>(zeros);
  common.counts = counts;
  common.given = true;
  common.q_min = q_min;
  common.q_max = q_max;
  common.scale_type = Scale::kScaleType;
  common.zero_type = kZeroType;
  common.table = kPlainTable;
  return common;
}

}  // namespace halfbyte::device
