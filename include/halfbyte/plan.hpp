// A plan is an operation, prepared once for a description of its tensors and run many times. `select` checks
// the description, chooses the kernels and compiles them. `run` is asynchronous on the caller's stream. It
// neither allocates, nor compiles, nor waits, and a CUDA graph can capture it.
//
//   const auto plan = QuantizeLinearPlan::select(device, descriptor);
//   const Memory workspace(device, plan.workspace_size());
//   plan.run(stream, workspace, args);
//   const QuantizeStatus status = plan.status(stream, workspace);  // waits
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <ranges>
#include <string>
#include <type_traits>
#include <utility>

#include "halfbyte/device.hpp"
#include "halfbyte/error.hpp"
#include "halfbyte/format.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte {

// The operation of a plan.
enum class OpKind : uint8_t {
  other,  // none of this version
  quantize,
  dequantize,
  quantize_linear,
  dequantize_linear,
  quantize_linear_backward,
  fake_quantize,
  fake_quantize_backward,
  fake_quantize_learned_backward,
  observe,
  compute_qparams,
  affine_init,
  affine_qdq,
  affine_qdq_backward,
  qgemm,
  route,
  qgemm_grouped,
};
HALFBYTE_API const char* to_string(OpKind kind);  // as Sku::op

// What a kernel was compiled for: the SIMD target of the CPU or the target of the CUDA device.
enum class Arch : uint8_t {
  none,   // nothing runs: the tensors are empty
  other,  // none of this list: Sku::backend names it
  scalar,
  avx2,
  avx3,
  avx3_dl,
  avx3_zen4,
  avx512_bf16,
  amx_bf16,
  sm_75,
  sm_80,
  sm_86,
  sm_87,
  sm_89,
  sm_90a,
  sm_100a,
  sm_103a,
  sm_120a,
  sm_121a,
};
HALFBYTE_API const char* to_string(Arch arch);  // "AVX3_DL", "sm_90a", ...: as in Sku::backend

// Which kernel a plan runs.
struct Sku {
  std::string op;       // "quantize_linear"
  std::string kernel;   // "linear_chunks", as kernels are listed; "quantize_linear_cpu"
  std::string backend;  // "cpu AVX3_DL", "cuda sm_90a"
  std::string dtypes;   // "bf16 -> i8, scale f32, zero point i32"
  // The same as enumerators.
  OpKind op_kind = OpKind::other;
  DeviceKind device_kind = DeviceKind::cpu;
  Arch arch = Arch::other;
  DType element = DType::f32;  // of x, y and gradients; of the ranges of compute_qparams
  // Of what is made of them, or they of it: the codes (u8: bytes of packed codes), the state of observe, the
  // scales of compute_qparams. Unset: fake quantization has none.
  std::optional<DType> aux_element = {};
  std::optional<Layout> layout = {};  // of packed codes; unset: integers, or the packed weight of qgemm
};
HALFBYTE_API std::string to_string(const Sku& sku);  // the four texts in one line

// How the weights of a product are rounded before they are multiplied.
enum class WeightRounding : uint8_t {
  none,            // not at all: f32 and f64 products, and plans that multiply no weights
  code_rounded,    // the value of a code to the type of the products; the scale is applied to f32 sums
  weight_rounded,  // value, scale and bias to the type of the products, then value * scale (+ bias) once more
};
HALFBYTE_API const char* to_string(WeightRounding rounding);  // "none" "code-rounded" "weight-rounded"

// What holds for the results of a plan.
struct PrecisionGuarantee {
  DType math = DType::f32;          // the type of the arithmetic: f64 for f64 tensors, i8 for products with
                                    // math = int8, else f32
  DType accumulator = DType::f32;   // of sums; minima and maxima are exact
  bool deterministic = true;        // the same bytes run to run
  bool same_on_all_devices = true;  // and for every device, SIMD target and number of threads
  WeightRounding weight_rounding = WeightRounding::none;
};

// The memory that a run uses besides its arguments: of the plan's device, at least workspace_size() bytes, at
// a multiple of 16. Non-owning. A run leaves what it found in the data there, which `status` reads. On the
// CPU it may be Workspace{}: a run then uses memory that the library holds for the calling thread, and its
// status cannot be read. That memory grows with the need; more than 32 MiB is freed after the run, the rest
// with the thread.
struct Workspace {
  void* data = nullptr;
  int64_t num_bytes = 0;

  Workspace() = default;
  Workspace(void* memory, int64_t size) : data(memory), num_bytes(size) {}
  Workspace(const Memory& memory) : data(memory.data()), num_bytes(memory.num_bytes()) {}
  // Of std::vector, std::array, std::span.
  template <std::ranges::contiguous_range Range>
  requires(
      std::ranges::borrowed_range<Range>&& std::is_trivially_copyable_v<std::ranges::range_value_t<Range>> &&
      !std::is_const_v<std::remove_reference_t<std::ranges::range_reference_t<Range>>>)
      // NOLINTNEXTLINE(bugprone-forwarding-reference-overload): a Workspace is no range.
      Workspace(Range&& range)
      : data(std::ranges::data(range)),
        num_bytes(
            static_cast<int64_t>(std::ranges::size(range) * sizeof(std::ranges::range_value_t<Range>))) {}
};

struct PlanPreference {
  int num_threads = 0;  // CPU: 0: all, but 1 for small work; 1: on the calling thread only
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
  // Bytes of memory that a run needs, see Workspace. Never 0.
  HALFBYTE_API int64_t workspace_size() const;
  // Why `run` would refuse the tensors, as an Error(usage) that names the argument, the rule and the values;
  // nothing if it would not. Checks dtype, shape, strides, device, alignment, length and overlap.
  HALFBYTE_API std::optional<Error> can_implement(const Args& args) const;
  // `stream` is a CUstream of the device; null is the default stream. Throws what can_implement returns,
  // Error(usage) for a workspace that is too small, naming both sizes, and Error(device) if the device
  // refuses.
  HALFBYTE_API void run(void* stream, const Workspace& workspace, const Args& args) const;
  // What the last run with this workspace found in the data. Waits for `stream`, which may not be capturing.
  HALFBYTE_API Status status(void* stream, const Workspace& workspace) const;

  struct Impl;

 private:
  explicit Plan(std::shared_ptr<const Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<const Impl> impl_;
};

}  // namespace halfbyte
