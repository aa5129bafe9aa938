// Observers record the ranges of the values that they see, per tensor, channel or group. Scales and zero
// points are computed from these ranges.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "halfbyte/ops.hpp"
#include "halfbyte/plan.hpp"
#include "halfbyte/qparams.hpp"

namespace halfbyte {

enum class ObserverKind : uint8_t {
  min_max,         // of all batches
  moving_average,  // of the minima and maxima of batches: avg = avg * momentum + new * (1 - momentum)
  // In each batch, sort the n finite values and let k = ceil(percentile * n / 100). The range is from the
  // k-th value from above to the k-th from below: exact, nearest rank. k is at least floor(n / 2) + 1, which
  // gives the median, or both of them: percentiles up to 50 all mean that. The state is the mean over the
  // batches in which the group had finite values.
  percentile,
  // In each batch, the range with the least sum of squared quantization errors, by a search that
  // docs/training.md describes. The state is the mean, as that of percentile.
  mse,
};
HALFBYTE_API const char* to_string(ObserverKind kind);  // "min-max" "moving-average" "percentile" "mse"
HALFBYTE_API ObserverKind parse_observer_kind(std::string_view word);  // Error(usage) names the known words

struct HALFBYTE_API ObserverConfig {
  ObserverKind kind = ObserverKind::min_max;
  double momentum = 0.99;      // moving_average: weight of history, in (0, 1)
  double percentile = 99.99;   // in (0, 100]
  QParamsConfig qparams = {};  // mse: the quantization whose error is measured
  bool operator==(const ObserverConfig&) const = default;
};
// Throws Error(usage) naming the field, the rule and the value. NaN is never valid.
HALFBYTE_API void check_config(const ObserverConfig& config);
// Whether states count batches per group: percentile and mse.
HALFBYTE_API bool counts_per_group(ObserverKind kind);

// What an observer has seen: all that it keeps between batches, as plain values to copy, save and send.
struct HALFBYTE_API ObserverState {
  // One value for each group, in the order of the scales, of type `dtype`. min > max (+inf, -inf) means
  // nothing seen.
  std::vector<double> min, max;
  DType dtype = DType::f32;  // type of the arithmetic and of the state: f32; f64 for f64 tensors
  // min-max and moving-average: one count, of all batches. percentile and mse: for each group, the count of
  // batches in which it had finite values. A state whose counts are not those of the kind is refused with
  // Error(usage): one count of many groups does not tell how much each weighs.
  std::vector<int64_t> num_batches = {0};

  static ObserverState empty(int64_t num_groups, DType dtype = DType::f32,
                             ObserverKind kind = ObserverKind::min_max);
  // Adds a batch by its ranges, which are rounded to `dtype`. min-max and moving-average update the state as
  // the kind says; percentile and mse take the values as the ranges that they found in a batch. A group
  // without finite values in the batch has +inf and -inf. Throws Error(usage) for other lengths, and
  // Error(bad_input) for NaN, other infinities and min > max. The state is then unchanged.
  void update(const ObserverConfig& config, std::span<const double> batch_min,
              std::span<const double> batch_max);
  void update(const ObserverConfig& config, double batch_min, double batch_max);  // of one group
  // Adds what another observer of as many groups and the same dtype has seen. min-max: the range that
  // contains both ranges. Others: the mean, weighted by the counts of batches.
  void merge(const ObserverConfig& config, const ObserverState& other);
  // Scale and zero point of every group. Throws Error(usage) "observer has no data" if a group has seen
  // nothing.
  std::vector<QParams> qparams(const QParamsConfig& config, DType scale_dtype = DType::f32) const;

  bool operator==(const ObserverState&) const = default;
};

struct HALFBYTE_API ObserveDescriptor {
  std::vector<int64_t> shape = {};  // of x, in elements; any rank, any extents
  // As LinearDescriptor has them.
  Granularity granularity = Granularity::tensor;
  int axis = -1;
  int64_t group_size = 0;
  DType dtype = DType::f32;  // of x: f32, f64, f16, bf16
  ObserverConfig observer = {};
  int64_t alignment = 16;  // of the address of x, as LinearDescriptor has it

  // Of min and max: the scale_shape() of LinearDescriptor.
  std::vector<int64_t> state_shape() const;
  // Of num_batches: [], or the state_shape() of percentile and mse.
  std::vector<int64_t> count_shape() const;
  DType state_dtype() const { return dtype == DType::f64 ? DType::f64 : DType::f32; }
  bool operator==(const ObserveDescriptor&) const = default;
};
HALFBYTE_API void check_descriptor(const ObserveDescriptor& descriptor);

// Adds a batch to the state, which lies in memory of the device. Only finite values count; the status has the
// number of the others and the position of the first. A group without finite values keeps its state: its
// count too where there is one of each group; one count of all grows by 1. A batch without elements changes
// nothing. Nothing overlaps.
//
// Every device, SIMD target, number of threads and run gives the same bytes. A zero in the state is +0.
struct HALFBYTE_API Observe {
  using Descriptor = ObserveDescriptor;
  struct Args {
    ConstTensorView x = {};  // read; contiguous
    TensorView min = {},
               max = {};  // read and written: state_shape(), state_dtype(); before the first +inf and -inf
    TensorView num_batches = {};  // read and written: i64, count_shape(); before the first 0
  };
  using Status = QuantizeStatus;
};
using ObservePlan = Plan<Observe>;
extern template class Plan<Observe>;

// reset_observer sets the tensors of a state on their device to what they are before the first batch.
// load_observer copies them to the host, store_observer from the host. On a CUDA device the work is enqueued
// on `stream`; load_observer waits for it. num_batches is [], or has the shape of min and max. They throw
// Error(usage) for tensors that Observe would refuse, or that do not fit the state.
HALFBYTE_API void reset_observer(const TensorView& min, const TensorView& max, const TensorView& num_batches,
                                 void* stream = nullptr);
HALFBYTE_API ObserverState load_observer(const ConstTensorView& min, const ConstTensorView& max,
                                         const ConstTensorView& num_batches, void* stream = nullptr);
HALFBYTE_API void store_observer(const ObserverState& state, const TensorView& min, const TensorView& max,
                                 const TensorView& num_batches, void* stream = nullptr);

struct HALFBYTE_API QParamsDescriptor {
  std::vector<int64_t> shape = {};  // of all tensors
  QParamsConfig config = {};
  DType dtype = DType::f32;                    // of min and max: f32, f64
  DType scale_dtype = DType::f32;              // f32, f16, bf16; f64 for f64
  std::optional<DType> zero_point_dtype = {};  // i32, i8, u8; none where symmetric and signed
  bool operator==(const QParamsDescriptor&) const = default;
};
HALFBYTE_API void check_descriptor(const QParamsDescriptor& descriptor);

// Computes scales and zero points from ranges on the device, each by compute_qparams. A group that has seen
// nothing (min > max), or whose range is not finite, gets scale 0 and the zero point of the range (0, 0), and
// counts as an invalid scale in the status. A scale that its dtype cannot hold counts as unheld.
struct HALFBYTE_API ComputeQParams {
  using Descriptor = QParamsDescriptor;
  struct Args {
    ConstTensorView min = {}, max = {};  // read
    TensorView scale = {};               // written
    TensorView zero_point = {};          // written; without data where the descriptor has none
  };
  using Status = QuantizeStatus;
};
using ComputeQParamsPlan = Plan<ComputeQParams>;
extern template class Plan<ComputeQParams>;

}  // namespace halfbyte
