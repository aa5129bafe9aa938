// The groups of a tensor [outer, axis, inner], for kernels: shared by host and device, freestanding.
#pragma once

#include "formats/common.h"

namespace halfbyte {

struct LinearStrides64 {
  formats::i64 outer, axis, inner;
};

// In units: elements, or chunks of them that lie together. Group s begins at (o, a, i) with
// s = (o * groups_axis + a / group_axis) * groups_inner + i; it has the extents group_outer, group_axis (less
// at the end of axis), group_inner.
struct Groups {
  formats::i64 num_groups, groups_axis, groups_inner;
  formats::i64 axis, group_outer, group_axis, group_inner;
  LinearStrides64 strides;  // of units, in elements

  struct Group {
    formats::i64 begin;  // offset of its first unit
    formats::i64 axis;   // extent
    formats::i64 size;   // units
  };
  HALFBYTE_FN formats::i64 longest() const {
    return group_outer * formats::min(group_axis, axis) * group_inner;
  }
  // Index: what numbers of groups and units fit in. kDense: strides.inner is 1.
  template <bool kDense, class Index>
  HALFBYTE_FN Group group(Index s) const {
    const Index in_axis = s / static_cast<Index>(groups_inner), o = in_axis / static_cast<Index>(groups_axis);
    const formats::i64 a =
        static_cast<formats::i64>(in_axis - o * static_cast<Index>(groups_axis)) * group_axis;
    const formats::i64 i = s - in_axis * static_cast<Index>(groups_inner);
    const formats::i64 extent = formats::min(group_axis, axis - a);
    return {
        static_cast<formats::i64>(o) * strides.outer + a * strides.axis + (kDense ? i : i * strides.inner),
        extent, group_outer * extent * group_inner};
  }
  // Of unit k of a group, from its first, in elements.
  template <bool kDense, class Index>
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
    const auto in_line = static_cast<formats::i64>(inner);
    return static_cast<formats::i64>(outer) * strides.outer + static_cast<formats::i64>(rest) * strides.axis +
           (kDense ? in_line : in_line * strides.inner);
  }
};

}  // namespace halfbyte
