// What was found in the data: the counts of a device as the public status, and the sum of parts.
#pragma once

#include "formats/counts.h"
#include "halfbyte/ops.hpp"

namespace halfbyte {

inline QuantizeStatus status_of(const QuantizeCounts& counts) {
  QuantizeStatus status;
  status.num_nonfinite = static_cast<int64_t>(counts.num_nonfinite);
  if (counts.num_nonfinite > 0) status.first_nonfinite = static_cast<int64_t>(~counts.first_nonfinite_key);
  status.num_unheld_scales = static_cast<int64_t>(counts.num_unheld_scales);
  status.num_coarse_scales = static_cast<int64_t>(counts.num_coarse_scales);
  status.num_invalid_scales = static_cast<int64_t>(counts.num_invalid_scales);
  status.num_invalid_zero_points = static_cast<int64_t>(counts.num_invalid_zero_points);
  return status;
}

inline void merge(QuantizeStatus& into, const QuantizeStatus& from) {
  if (from.num_nonfinite != 0 && (into.num_nonfinite == 0 || from.first_nonfinite < into.first_nonfinite))
    into.first_nonfinite = from.first_nonfinite;
  into.num_nonfinite += from.num_nonfinite;
  into.num_unheld_scales += from.num_unheld_scales;
  into.num_coarse_scales += from.num_coarse_scales;
  into.num_invalid_scales += from.num_invalid_scales;
  into.num_invalid_zero_points += from.num_invalid_zero_points;
}

}  // namespace halfbyte
