// Observers: the ranges of values that pass by, per tensor, channel or group, from which scales and zero
// points are computed.
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
  // Of the n finite values of each batch, sorted, number k = ceil(percentile * n / 100) from below, and as
  // many from above: exact, nearest rank. The mean over batches.
  percentile,
  // Of each batch, the range whose sum of squared quantization errors is least, by a search that
  // docs/training.md describes. The mean over batches.
  mse,
};
HALFBYTE_API const char* to_string(ObserverKind kind);  // "min-max" "moving-average" "percentile" "mse"
HALFBYTE_API ObserverKind parse_observer_kind(std::string_view word);  // Error(usage) names the known words

struct HALFBYTE_API ObserverConfig {
  ObserverKind kind = ObserverKind::min_max;
  double momentum = 0.99;     // moving_average: weight of history, in (0, 1)
  double percentile = 99.99;  // in (50, 100]
  QParamsConfig qparams;      // mse: the quantization whose error is measured
  bool operator==(const ObserverConfig&) const = default;
};
// Throws Error(usage) naming the field, the rule and the value; NaN is none.
HALFBYTE_API void check_config(const ObserverConfig& config);

// What an observer has seen. Plain values, to be copied, saved and sent as they are: all that an observer
// keeps between batches.
struct HALFBYTE_API ObserverState {
  // One of each group, in the order of scales; values of `dtype`. min > max (+inf, -inf): nothing seen.
  std::vector<double> min, max;
  DType dtype = DType::f32;  // what is computed and kept in: f32; f64 for observers of f64 tensors
  int64_t num_batches = 0;

  static ObserverState empty(int64_t num_groups, DType dtype = DType::f32);
  // A batch, by its ranges, values of `dtype` or rounded to it: min-max and moving-average as the kind says,
  // percentile and mse take them as the ranges of a batch. Throws Error(usage) for other lengths and
  // Error(bad_input) for NaN, infinities and min > max; nothing is changed then.
  void update(const ObserverConfig& config, std::span<const double> batch_min,
              std::span<const double> batch_max);
  void update(const ObserverConfig& config, double batch_min, double batch_max);  // of one group
  // What the two have seen, of as many groups and the same dtype: min-max: the range that contains both; else
  // the mean, weighted by batches.
  void merge(const ObserverConfig& config, const ObserverState& other);
  // Of every group. Error(usage) "observer has no data" where a group has seen nothing.
  std::vector<QParams> qparams(const QParamsConfig& config, DType scale_dtype = DType::f32) const;

  bool operator==(const ObserverState&) const = default;
};

struct HALFBYTE_API ObserveDescriptor {
  std::vector<int64_t> shape;  // of x, in elements; any rank, any extents
  // As LinearDescriptor has them.
  Granularity granularity = Granularity::tensor;
  int axis = -1;
  int64_t group_size = 0;
  DType dtype = DType::f32;  // of x: f32, f64, f16, bf16
  ObserverConfig observer;
  int64_t alignment = 16;  // of the address of x, as LinearDescriptor has it

  // Of min and max: the scale_shape() of LinearDescriptor.
  std::vector<int64_t> state_shape() const;
  DType state_dtype() const { return dtype == DType::f64 ? DType::f64 : DType::f32; }
  bool operator==(const ObserveDescriptor&) const = default;
};
HALFBYTE_API void check_descriptor(const ObserveDescriptor& descriptor);

// A batch into the state, which lies in memory of the device. Only finite values count; the status says how
// many were not, and where the first of them is. A group without any keeps its state, and num_batches grows
// by 1; a batch without elements changes nothing. Nothing overlaps.
//
// The bytes are the same for every device, SIMD target, number of threads and run; a zero in them is +0.
struct HALFBYTE_API Observe {
  using Descriptor = ObserveDescriptor;
  struct Args {
    TensorView x;            // read; contiguous
    TensorView min, max;     // read and written: state_shape(), state_dtype(); before the first +inf and -inf
    TensorView num_batches;  // read and written: i64 []; before the first 0
  };
  using Status = QuantizeStatus;
};
using ObservePlan = Plan<Observe>;
extern template class Plan<Observe>;

// The tensors of a state on their device: as they are before a first batch; copied to the host, from the
// host. On a CUDA device enqueued on `stream`; load_observer waits for it. Throws Error(usage) for tensors
// that Observe would refuse, or that are not those of the state.
HALFBYTE_API void reset_observer(const TensorView& min, const TensorView& max, const TensorView& num_batches,
                                 void* stream = nullptr);
HALFBYTE_API ObserverState load_observer(const TensorView& min, const TensorView& max,
                                         const TensorView& num_batches, void* stream = nullptr);
HALFBYTE_API void store_observer(const ObserverState& state, const TensorView& min, const TensorView& max,
                                 const TensorView& num_batches, void* stream = nullptr);

struct HALFBYTE_API QParamsDescriptor {
  std::vector<int64_t> shape;  // of all tensors
  QParamsConfig config;
  DType dtype = DType::f32;               // of min and max: f32, f64
  DType scale_dtype = DType::f32;         // f32, f16, bf16; f64 for f64
  std::optional<DType> zero_point_dtype;  // i32, i8, u8; none where symmetric and signed
  bool operator==(const QParamsDescriptor&) const = default;
};
HALFBYTE_API void check_descriptor(const QParamsDescriptor& descriptor);

// Scales and zero points from ranges, on the device: compute_qparams for each. A group that has seen nothing
// (min > max) or whose range is not finite gets scale 0 and the zero point of 0, and counts as an invalid
// scale in the status; a scale that its dtype cannot hold as unheld.
struct HALFBYTE_API ComputeQParams {
  using Descriptor = QParamsDescriptor;
  struct Args {
    TensorView min, max;    // read
    TensorView scale;       // written
    TensorView zero_point;  // written; without data where the descriptor has none
  };
  using Status = QuantizeStatus;
};
using ComputeQParamsPlan = Plan<ComputeQParams>;
extern template class Plan<ComputeQParams>;

}  // namespace halfbyte
