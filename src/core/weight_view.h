// Weights of products as arguments: from their public description to their layout, and what they must be.
#pragma once

#include <array>
#include <vector>

#include "core/tensor_check.h"
#include "formats/weight_view.h"
#include "halfbyte/qgemm.hpp"

namespace halfbyte {

inline constexpr int64_t kMaxWeightExtent = int64_t{1} << 40;

// Throws Error(usage) for scales of f64, what the layout does not hold, and extents beyond kMaxWeightExtent.
formats::WeightViewLayout view_layout_of(const QuantSpec& spec, int64_t rows, int64_t cols, Layout layout);

// Checked but for what a descriptor says: the memory of their parts. Throw Error(usage) that names operation,
// argument, rule and values.
ArgumentMemory check_packed(const char* op, const char* name, const ConstPackedWeight& weight, Device device,
                            bool written);
// All but the memory.
void check_packed_form(const char* op, const char* name, const ConstPackedWeight& weight, Device device);

// The names of a view and of its parts.
struct WeightViewNames {
  const char *view, *codes, *scales, *zeros, *biases, *absmax, *map, *offset, *global_scale;
};
// `code_alignment`: in bytes.
std::vector<ArgumentMemory> check_view(const char* op, const WeightViewNames& names,
                                       const ConstWeightView& view, Device device, int64_t code_alignment,
                                       bool written);
// All but the memory.
void check_view_device(const char* op, const char* name, const ConstWeightView& view, Device device);

// A part of a view, and what its memory must be.
struct WeightViewPart {
  const char* name;
  const void* (*data)(const ConstWeightView& view);
  bool present;  // else it must be null
  int64_t num_bytes, alignment;
};
inline constexpr const char* kNoWeightPart = "spec has none";
std::array<WeightViewPart, 8> weight_view_parts(const WeightViewNames& names, const QuantSpec& spec,
                                                int64_t rows, int64_t cols, Layout layout,
                                                int64_t code_alignment);

}  // namespace halfbyte
