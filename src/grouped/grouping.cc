#include "grouped/grouping.h"

#include <algorithm>

#include "core/expect.h"
#include "core/tensor_check.h"

namespace halfbyte {
namespace {

void check(const char* what, const GroupingFields& fields, DType dtype) {
  const int rank = static_cast<int>(fields.shape.size());
  contiguous_bytes(dtype, fields.shape);  // throws for negative extents and what is beyond 2^63 - 1 bytes
  HALFBYTE_MUST(fields.granularity == Granularity::tensor || fields.granularity == Granularity::channel ||
                    fields.granularity == Granularity::group,
                invalid_problem, what, "granularity", "be", "tensor, channel or group",
                fields.granularity == Granularity::flat ? "flat: give a shape of one axis" : "none of these");
  HALFBYTE_CHECK(rank > 0 || fields.granularity == Granularity::tensor, usage,
                 "{}: granularity {} needs an axis, shape is []", what, to_string(fields.granularity));
  if (rank > 0)
    HALFBYTE_MUST(-rank <= fields.axis && fields.axis < rank, invalid_problem, what, "axis", "be",
                  fmt::format("in [{}, {}) for shape {}", -rank, rank, text_of(fields.shape)), fields.axis);
  if (fields.granularity == Granularity::group)
    HALFBYTE_MUST(fields.group_size > 0, invalid_problem, what, "group_size", "be", "positive",
                  fields.group_size);
}

// Of checked extents: no overflow, unless one of the others is 0.
int64_t product(std::span<const int64_t> extents) {
  int64_t result = 1;
  for (const int64_t extent : extents)
    if (__builtin_mul_overflow(result, extent, &result)) return 0;
  return result;
}

}  // namespace

std::optional<Grouping::Rows> Grouping::as_rows() const {
  if (num_scales == 1 && scale_strides.axis == 0) return Rows{outer, axis, group_size};  // one group
  if (scale_strides.outer == 0) {  // channels: rows, where they are the first axis
    if (outer != 1) return {};
    return Rows{axis, inner, inner};
  }
  if (inner != 1) return {};
  return Rows{outer, axis, group_size};
}

std::optional<Grouping::Columns> Grouping::as_columns() const {
  if (scale_strides.outer != 0) return Columns{inner, axis, group_size};
  if (inner != 1 || scale_strides.axis == 0) return {};
  return Columns{axis, outer, outer};  // channels of the last axis
}

Groups Grouping::groups() const {
  Groups groups{};
  groups.num_groups = num_scales;
  groups.axis = axis;
  groups.group_outer = scale_strides.outer != 0 ? 1 : outer;
  groups.group_axis = group_size;
  groups.group_inner = scale_strides.inner != 0 ? 1 : inner;
  groups.groups_axis = axis == 0 ? 1 : (axis - 1) / group_size + 1;
  groups.groups_inner = scale_strides.inner != 0 ? std::max<int64_t>(1, inner) : 1;
  groups.strides = {axis * inner, inner, 1};
  return groups;
}

int axis_of(const GroupingFields& fields) {
  const int rank = static_cast<int>(fields.shape.size());
  return fields.axis < 0 ? std::max(0, fields.axis + rank) : fields.axis;
}

Grouping make_grouping(const char* what, const GroupingFields& fields, DType dtype, bool keep_axes) {
  check(what, fields, dtype);
  const std::span<const int64_t> shape = fields.shape;
  const auto at = static_cast<size_t>(axis_of(fields));
  Grouping g;
  if (!shape.empty()) {
    g.outer = product(shape.first(at));
    g.axis = shape[at];
    g.inner = product(shape.subspan(at + 1));
  }
  if (std::ranges::find(shape, 0) != shape.end()) g.outer = g.inner = 0;  // their product may not exist
  switch (fields.granularity) {
    case Granularity::channel:
      g.scale_shape = {shape[at]};
      g.scale_strides.axis = 1;
      break;
    case Granularity::group: {
      const int64_t groups = g.axis == 0 ? 0 : (g.axis - 1) / fields.group_size + 1;
      g.scale_shape.assign(shape.begin(), shape.end());
      g.scale_shape[at] = groups;
      g.group_size = std::min(fields.group_size, std::max<int64_t>(1, g.axis));
      g.scale_strides = {groups * g.inner, g.inner, 1};
      break;
    }
    default:
      if (!keep_axes) {
        g.axis = g.num_elements();
        g.outer = g.inner = 1;
      }
      g.group_size = std::max<int64_t>(1, g.axis);
      break;
  }
  g.num_scales = product(g.scale_shape);
  return g;
}

}  // namespace halfbyte
