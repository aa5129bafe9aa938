// What the products with one weight and with those of experts share.
#pragma once

#include <vector>

#include "capi/plan.h"
#include "halfbyte/qgemm.hpp"

namespace halfbyte::capi {

PackedWeight packed_of(const halfbyte_packed_weight* given, const char* name);
// What the _explain functions give.
halfbyte_blob* new_explanation(const std::vector<QgemmChoice>& choices);

}  // namespace halfbyte::capi
