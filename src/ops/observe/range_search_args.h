// What the kernels of percentile and mse ranges are given: shared by host and device, freestanding.
#pragma once

#include "formats/mse_search.h"
#include "formats/observer.h"
#include "formats/percentile.h"

namespace halfbyte {

// The elements of every group of a contiguous tensor, in row-major order. Group s begins at (o, a, i) with
// s = (o * groups_axis + a / group_axis) * groups_inner + i; it has the extents group_outer, group_axis
// (less at the end of axis), group_inner.
struct SearchGroups {
  formats::i64 num_groups, groups_axis, groups_inner;
  formats::i64 axis, group_outer, group_axis, group_inner;
  formats::i64 stride_outer, stride_axis;  // that of inner is 1

  struct Group {
    formats::i64 begin;  // index of its first element
    formats::i64 axis;   // extent
    formats::i64 size;   // elements
  };
  HALFBYTE_FN Group group(formats::i64 s) const {
    const formats::i64 in_axis = s / groups_inner, o = in_axis / groups_axis;
    const formats::i64 a = (in_axis - o * groups_axis) * group_axis;
    const formats::i64 extent = formats::min(group_axis, axis - a);
    return {o * stride_outer + a * stride_axis + (s - in_axis * groups_inner), extent,
            group_outer * extent * group_inner};
  }
  // Where element k of a group lies, from its first. Index: what k fits in.
  template <class Index>
  HALFBYTE_FN formats::i64 offset(const Group& group, Index k) const {
    Index rest = k, inner = 0, outer = 0;
    if (group_inner > 1) {
      rest = k / static_cast<Index>(group_inner);
      inner = k - rest * static_cast<Index>(group_inner);
    }
    if (group_outer > 1) {
      outer = rest / static_cast<Index>(group.axis);
      rest -= outer * static_cast<Index>(group.axis);
    }
    return static_cast<formats::i64>(outer) * stride_outer + static_cast<formats::i64>(rest) * stride_axis +
           static_cast<formats::i64>(inner);
  }
};

}  // namespace halfbyte
