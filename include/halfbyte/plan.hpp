// A plan is an operation, prepared once for a description of its tensors and run many times. `select` checks
// the description, chooses the kernels and compiles them. `run` is asynchronous on the caller's stream. It
// neither allocates, nor compiles, nor waits, and a CUDA graph can capture it.
//
//   const auto plan = QuantizeLinearPlan::select(device, descriptor);
//   const Memory workspace(device, plan.workspace_size());
//   plan.run(stream, workspace.data(), args);
//   const QuantizeStatus status = plan.status(workspace.data(), stream);  // waits
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "halfbyte/error.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

// Which kernel a plan runs.
struct Sku {
  std::string op;       // "quantize_linear"
  std::string kernel;   // "linear_chunks", as kernels are listed; "quantize_linear_cpu"
  std::string backend;  // "cpu AVX3_DL", "cuda sm_90a"
  std::string dtypes;   // "bf16 -> i8, scale f32, zero point i32"
};
HALFBYTE_API std::string to_string(const Sku& sku);  // all four in one line

// How the weights of a product are rounded before they are multiplied.
enum class WeightRounding : uint8_t {
  none,            // not at all: f32 and f64 products, and plans that multiply no weights
  code_rounded,    // the value of a code to the type of the products; the scale is applied to f32 sums
  weight_rounded,  // value, scale and bias to the type of the products, then value * scale (+ bias) once more
};
HALFBYTE_API const char* to_string(WeightRounding rounding);  // "none" "code-rounded" "weight-rounded"

// What holds for the results of a plan.
struct PrecisionGuarantee {
  DType math = DType::f32;          // the type of the arithmetic: f64 for f64 tensors, else f32
  DType accumulator = DType::f32;   // of sums; minima and maxima are exact
  bool deterministic = true;        // the same bytes run to run
  bool same_on_all_devices = true;  // and for every device, SIMD target and number of threads
  WeightRounding weight_rounding = WeightRounding::none;
};

struct PlanPreference {
  int num_threads = 0;  // CPU: 0: all; 1: on the calling thread only
};

// A plan of operation Op, which names its Descriptor, Args and Status.
//
// A plan is immutable. Threads may share it and run it at the same time, each run with a workspace of its
// own. Copies are cheap. On the CPU, `run` returns when the work is done, and ignores the stream.
template <class Op>
class Plan {
 public:
  using Descriptor = typename Op::Descriptor;
  using Args = typename Op::Args;
  using Status = typename Op::Status;

  // Throws Error(usage) for a bad descriptor, naming the field, the rule and the values. Throws Error(device)
  // if the device cannot be used or no kernel takes the description.
  HALFBYTE_API static Plan select(Device device, const Descriptor& descriptor,
                                  const PlanPreference& preference = {});

  HALFBYTE_API Device device() const;
  HALFBYTE_API const Descriptor& descriptor() const;
  HALFBYTE_API const Sku& sku() const;
  HALFBYTE_API const PrecisionGuarantee& precision_guarantee() const;
  // Bytes of device memory that a run needs, at an address that is a multiple of 16. Never 0.
  HALFBYTE_API int64_t workspace_size() const;
  // Why `run` would refuse the tensors, as an Error(usage) that names the argument, the rule and the values;
  // nothing if it would not. Checks dtype, shape, strides, device, alignment, length and overlap.
  HALFBYTE_API std::optional<Error> can_implement(const Args& args) const;
  // `stream` is a CUstream of the device; null is the default stream. Throws what can_implement returns, and
  // Error(device) if the device refuses.
  HALFBYTE_API void run(void* stream, void* workspace, const Args& args) const;
  // What the last run with this workspace found in the data. Waits for `stream`, which may not be capturing.
  HALFBYTE_API Status status(const void* workspace, void* stream = nullptr) const;

  struct Impl;

 private:
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

}  // namespace halfbyte
