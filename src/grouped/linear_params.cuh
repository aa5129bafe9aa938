// From the range of a group to its scale and zero point.
#pragma once

#include "grouped/linear.cuh"

namespace halfbyte::device {

// By one thread of a kernel, of all that compute scales the first.
__device__ __forceinline__ void store_global_scale(const LinearCommon& common) {
  if constexpr (kHasGlobalScale)
    if (common.tensor_range != nullptr) *common.global_scale = global_scale(common);
}

// Also stores them where `store` says so, but for a packed zero point, and counts what is wrong with them.
__device__ __forceinline__ Group make_params(const LinearCommon& common, i64 index, F min, F max,
                                             bool store) {
  Codec codec = codec_of(common);
  codec.asymmetric = kZeroType != ZeroType::none;
  codec.rule = codec.asymmetric                             ? Rule::minmax
               : !kTable && common.rule == Rule::half_range ? Rule::half_range
                                                            : Rule::absmax;
  GroupParams<F> params;
  Seen<F> range{min, max};
  if constexpr (kOp == LinearOp::fake_quantize) {
    codec.kind = kTable ? Kind::table : Kind::integer;
    if constexpr (kTableGiven) {  // as much of it as group_params needs: 1 is another code
      codec.book.values[0] = common.table.of_code_0;
      codec.book.values[1] = common.table.values[15];
      codec.book.code_of_rank[15] = 1;
      codec.book.max_magnitude = common.table.max_magnitude;
    } else {
      codec.book = kBook;
    }
    codec.eps = common.eps;
    codec.saturate = kHasGlobalScale && common.tensor_range == nullptr;
    if (kHasGlobalScale && !set_global_scale(codec, global_scale(common))) {
      if (store) atomic_add(&common.counts->num_invalid_scales, 1);
    } else if (store && common.observer.min != nullptr) {
      if (!observe_params(common.observer, index, range, common.history, codec, params))
        atomic_add(&common.counts->num_invalid_scales, 1);
    } else {
      params = group_params(min, max, codec);
    }
  } else {
    params = group_params(min, max, codec);
  }
  if (store) {
    store_scale(common.data.scales, index, params.scale, codec.scale_type, codec.global_scale);
    if constexpr (kZeroType == ZeroType::i32) static_cast<int*>(common.data.zeros)[index] = params.zero_point;
    if constexpr (kZeroType == ZeroType::byte)
      static_cast<u8*>(common.data.zeros)[index] = static_cast<u8>(params.zero_point);
    if (!is_held(params, range.min, range.max, codec)) atomic_add(&common.counts->num_unheld_scales, 1);
    if (params.coarse) atomic_add(&common.counts->num_coarse_scales, 1);
  }
  Group group{};
  group.scale = formats::is_finite(params.scale) ? params.scale : 0;
  group.zero_point = params.zero_point;
  prepare(group);
  return group;
}

}  // namespace halfbyte::device
