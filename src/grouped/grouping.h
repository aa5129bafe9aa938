// Which elements of a tensor share a scale.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "grouped/groups_args.h"
#include "halfbyte/format.hpp"

namespace halfbyte {

// Strides of a tensor, or of scales, that is walked as [outer, axis, inner]; in elements.
struct LinearStrides {
  int64_t outer = 0, axis = 0, inner = 0;
};

// A contiguous tensor walked as [outer, axis, inner]. The scale of element (o, a, i) is number
// o * scale_strides.outer + a / group_size * scale_strides.axis + i * scale_strides.inner.
struct Grouping {
  int64_t outer = 1, axis = 1, inner = 1;  // no elements: outer = inner = 0
  int64_t group_size = 1;                  // > 0, at most `axis` unless that is 0
  LinearStrides scale_strides;
  std::vector<int64_t> scale_shape;
  int64_t num_scales = 1;

  int64_t num_elements() const { return outer * axis * inner; }
  int64_t scale_index(int64_t o, int64_t a, int64_t i) const {
    return o * scale_strides.outer + a / group_size * scale_strides.axis + i * scale_strides.inner;
  }

  // Groups one behind the other: `rows` rows of `row` elements, every `group` of which share a scale; the
  // last group of a row may be short. In order of scales.
  struct Rows {
    int64_t rows, row, group;
  };
  std::optional<Rows> as_rows() const;
  // Groups side by side: rows of `columns` elements, in bands of `group` rows, and each column of a band has
  // a scale; of every `axis` rows the last band may be short. In order of scales.
  struct Columns {
    int64_t columns, axis, group;
  };
  std::optional<Columns> as_columns() const;
  // Of any groups, in elements.
  Groups groups() const;
  // Whether neighbouring groups lie side by side: channels of the last axis, groups along another.
  bool side_by_side() const {
    return inner > 1 ? scale_strides.inner != 0 : scale_strides.axis == 1 && scale_strides.outer == 0;
  }
};

// The fields of a descriptor that decide it; `axis` is counted from the end where negative.
struct GroupingFields {
  std::span<const int64_t> shape;
  Granularity granularity = Granularity::tensor;
  int axis = -1;
  int64_t group_size = 0;
};

// `what` names the descriptor in errors. Throws Error(usage): an axis out of range, group_size < 1 of groups,
// granularity flat, more than 2^63 - 1 bytes of `dtype`. A tensor of one scale is walked as one axis unless
// `keep_axes`.
Grouping make_grouping(const char* what, const GroupingFields& fields, DType dtype, bool keep_axes = false);

// `axis` from the front; 0 for a tensor without axes.
int axis_of(const GroupingFields& fields);

}  // namespace halfbyte
