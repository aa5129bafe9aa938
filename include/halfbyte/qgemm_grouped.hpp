// Products with the packed weights of many experts, as a mixture of experts needs them: each row of x meets
// the weight of the expert that it was given to. Who gets which row is known on the device only: a run reads
// it there, waits for nothing, and a CUDA graph can capture it.
//
//   const PackedExperts w({.format = Format::nf4}, num_experts, n, k, device);   // reorder(..., w.view(e))
//   const auto route = RoutePlan::select(device, {.tokens = t, .top_k = 8, .num_experts = num_experts});
//   route.run(stream, workspace, {.experts = experts, .offsets = offsets, .slots = slots});
//   const auto plan = QgemmGroupedPlan::select(device, {.spec = spec, .num_experts = num_experts, .m = t,
//       .n = n, .k = k, .rows = ExpertRows::indices, .top_k = 8});
//   plan.run(stream, workspace, {.x = x, .weight = w.stack(), .offsets = offsets, .slots = slots, .y = y});
#pragma once

#include "halfbyte/qgemm.hpp"

namespace halfbyte {

// ---- Weights

// The packed weights of experts, of one spec and shape, one behind the other in one array: that of expert e
// begins at e * packed_weight_bytes(spec, rows, cols). Copies of the object share the memory.
class HALFBYTE_API PackedExperts {
 public:
  PackedExperts() = default;  // of no experts
  // Uninitialized. Throws as packed_weight_bytes, and as Tensor.
  PackedExperts(const QuantSpec& spec, int64_t num_experts, int64_t rows, int64_t cols, Device device = {});
  int64_t num_experts() const { return num_experts_; }
  // All of them, as products take them: num_bytes is the length of the array. Valid as long as the memory.
  const PackedWeight& stack() const { return stack_; }
  // That of one. Throws Error(usage) if there is no such expert.
  PackedWeight view(int64_t expert) const;
  // The same weights on another device, as Tensor::to.
  PackedExperts to(Device device, void* stream = nullptr) const;

 private:
  Tensor memory_;
  PackedWeight stack_;
  int64_t num_experts_ = 0;
};

// ---- Who gets which row

// A slot is one use of a token by an expert: slot t * top_k + j is the j-th of token t.
struct HALFBYTE_API RouteDescriptor {
  int64_t tokens = 0, top_k = 1, num_experts = 0;  // at most 2^31 - 1 slots; 2^20 experts
  DType dtype = DType::i32;                        // of experts: i32 or i64

  bool operator==(const RouteDescriptor&) const = default;
};
// Throws Error(usage) naming the field, the rule and the values.
HALFBYTE_API void check_descriptor(const RouteDescriptor& descriptor);

// Sorts slots by their expert, and those of one by their numbers. Slots of what is no expert, a negative
// number or one that is too large (where experts are spread over devices), come last: offsets count only the
// others. The same bytes on every device.
struct HALFBYTE_API Route {
  using Descriptor = RouteDescriptor;
  struct Args {
    ConstTensorView experts = {};  // read: [tokens, top_k]
    TensorView offsets = {};       // written: i32 [num_experts]: where the slots of an expert end
    TensorView slots = {};         // written: i32 [tokens * top_k]
  };
  using Status = QuantizeStatus;  // always that of empty data
};
using RoutePlan = Plan<Route>;
extern template class Plan<Route>;

// ---- Products

enum class ExpertRows : uint8_t {
  // Rows of x and y lie in the order of the experts: those of expert e end before row offsets[e], as for
  // grouped_mm of PyTorch.
  offsets,
  // `slots` lists the rows in that order, as Route makes it: rows are read and written where they lie.
  indices,
  // Each expert has a matrix of m rows, of which the first offsets[e] count. The others are neither read nor
  // written.
  masked,
};
HALFBYTE_API const char* to_string(ExpertRows rows);  // "offsets" "indices" "masked"
HALFBYTE_API ExpertRows parse_expert_rows(std::string_view word);

struct HALFBYTE_API QgemmGroupedDescriptor {
  QuantSpec spec = {};      // of the weights [n, k]
  int64_t num_experts = 0;  // at least 1, at most 2^20
  // Rows of x and y (offsets), tokens (indices), rows that an expert may have (masked); n and k as for a
  // product with one weight. Each may be 0. At most 2^31 - 1 rows in all.
  int64_t m = 0, n = 0, k = 0;
  bool transposed = false;
  DType dtype = DType::bf16;  // of x, y, bias and forward_x: bf16, f16, f32
  ExpertRows rows = ExpertRows::offsets;

  // Only with indices:
  int64_t top_k = 1;              // slots of a token
  bool x_per_slot = false;        // x has a row for each slot; false: for each token
  bool sum_slots = false;         // y has a row for each token, the sum of its slots; false: for each slot
  bool routing_weights = false;   // the product of a slot is multiplied by its routing weight
  bool routing_gradient = false;  // transposed only: the gradient of the routing weights too

  bool bias = false;  // forward only: of each expert
  // Forward only: the first n / 2 rows of a weight are a gate, the others what it opens. y has n / 2 columns,
  // silu(gate) * other with silu(v) = v / (1 + e^-v), in f32 and before the routing weight (Shazeer 2020,
  // "GLU Variants Improve Transformer").
  bool swiglu = false;
  bool accumulate = false;   // y += instead of y =; the sum is rounded once
  int64_t alignment = 16;    // as in QgemmDescriptor
  std::string variant = {};  // as in QgemmDescriptor; empty: the first that does not refuse

  bool operator==(const QgemmGroupedDescriptor&) const = default;
};
// Throws Error(usage) naming the field, the rule and the values.
HALFBYTE_API void check_descriptor(const QgemmGroupedDescriptor& descriptor);

// Why each variant takes the description or not, as explain_qgemm.
HALFBYTE_API std::vector<QgemmChoice> explain_qgemm_grouped(Device device,
                                                            const QgemmGroupedDescriptor& descriptor);

// y[row] = x[row] . W[e]^T (+ bias[e]), or x[row] . W[e] where transposed, of the expert e of the row. Rows
// that no expert has are products of nothing, 0, but for those of masked, which are not written.
//
// A sum over slots is made of f32 products in the order of the slots, and rounded once. The same routing
// gives the same bytes. Routing is data: whatever is in offsets and slots, no memory outside the tensors is
// touched. But y is not defined where offsets do not ascend, or slots lists a slot twice or leaves one out.
// y and routing_grad overlap nothing. The status is always that of empty data.
struct HALFBYTE_API QgemmGrouped {
  using Descriptor = QgemmGroupedDescriptor;
  struct Args {
    // read: [m, in]; indices, x_per_slot: [m * top_k, in]; masked: [num_experts, m, in]. in: k, or n where
    // transposed.
    ConstTensorView x = {};
    ConstPackedWeight weight = {};         // read: of all experts, see PackedExperts
    ConstTensorView offsets = {};          // read: i32 [num_experts]
    ConstTensorView slots = {};            // read, with indices: i32 [m * top_k]
    ConstTensorView routing_weights = {};  // read, if the descriptor says so: f32 [m, top_k]
    ConstTensorView bias = {};             // read, if the descriptor says so: [num_experts, n]
    // With routing_gradient: what the forward product of a slot was made from, and the gradient of its
    // routing weight, (x . W) . forward_x.
    ConstTensorView forward_x = {};  // read: [m * top_k, k]
    TensorView routing_grad = {};    // written: f32 [m, top_k]
    // written (with accumulate read too): [m, out]; indices without sum_slots: [m * top_k, out]; masked:
    // [num_experts, m, out]. out: n, n / 2 with swiglu, or k where transposed.
    TensorView y = {};
  };
  using Status = QuantizeStatus;
};
using QgemmGroupedPlan = Plan<QgemmGrouped>;
extern template class Plan<QgemmGrouped>;

}  // namespace halfbyte
