// What the kernels of percentile and mse ranges share.
#pragma once

#include "ops/observe/observe.cuh"
#include "ops/observe/range_search_args.h"

namespace halfbyte::device {

// Element k of a group.
template <class Index>
__device__ __forceinline__ Memory element_at(const SearchCommon& common, const Groups::Group& group,
                                             Index k) {
  return static_cast<const Memory*>(common.x)[group.begin + common.groups.offset<true>(group, k)];
}

__device__ __forceinline__ void store_range(RangeKeys* keys, F min, F max) {
  *keys = {order_key(static_cast<double>(-min)), order_key(static_cast<double>(max))};
}

}  // namespace halfbyte::device
