#include "core/packed_weight.h"

#include <algorithm>

#include "core/checks.h"
#include "halfbyte/qgemm.hpp"

namespace halfbyte {
namespace {

static_assert(kPackedWeightVersion == formats::kPackedVersion);

// Padded to whole units, with parameters for each column, which is more than there can be.
bool fits_in_memory(int64_t rows, int64_t cols) {
  constexpr int64_t kBytesPerColumn = 16;
  int64_t num_bytes = 0;
  return !__builtin_add_overflow(rows, formats::kUnitRows, &rows) &&
         !__builtin_add_overflow(cols, formats::kMaxBlockCols, &cols) &&
         !__builtin_mul_overflow(rows, cols, &num_bytes) &&
         !__builtin_mul_overflow(num_bytes, kBytesPerColumn, &num_bytes);
}

}  // namespace

formats::PackedLayout packed_layout_of(const QuantSpec& spec, int64_t rows, int64_t cols) {
  quant_shape(spec, rows, cols);  // throws for what no layout holds
  const FormatInfo& format = info(spec.format);
  HALFBYTE_CHECK(spec.scale_dtype != DType::f64, usage,
                 "packed weight: spec.scale_dtype must have 32 bits at most, got {}",
                 to_string(spec.scale_dtype));
  HALFBYTE_CHECK(spec.granularity != Granularity::flat || cols % spec.group_size == 0, usage,
                 "packed weight: spec.group_size of granularity flat must divide the columns, got {} for {}",
                 spec.group_size, cols);
  HALFBYTE_CHECK(fits_in_memory(rows, cols), usage,
                 "packed weight: [{}, {}] in whole units of {} rows exceeds 2^63 - 1 bytes", rows, cols,
                 formats::kUnitRows);
  const bool grouped = spec.granularity == Granularity::group || spec.granularity == Granularity::flat;
  const int64_t group = grouped ? spec.group_size : std::max<int64_t>(cols, 1);
  return formats::packed_layout(rows, cols, format.bits, group, static_cast<int>(size_of(spec.scale_dtype)),
                                has_zeros(spec), has_biases(spec), spec.double_quant, has_global_scale(spec));
}

int64_t packed_weight_bytes(const QuantSpec& spec, int64_t rows, int64_t cols) {
  return packed_layout_of(spec, rows, cols).num_bytes;
}

}  // namespace halfbyte
