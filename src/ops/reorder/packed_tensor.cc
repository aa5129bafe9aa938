// The packed form of an owning weight.
#include "core/expect.h"
#include "core/weight_view.h"
#include "halfbyte/qgemm_grouped.hpp"

namespace halfbyte {
PackedTensor::PackedTensor(const QuantSpec& spec, int64_t rows, int64_t cols, Device device)
    : memory_(device, DType::u8, {packed_weight_bytes(spec, rows, cols)}),
      weight_{spec, rows, cols, memory_.data(), device, kPackedWeightVersion, memory_.num_bytes()} {}

PackedTensor PackedTensor::of(const QuantSpec& spec, int64_t rows, int64_t cols, Tensor memory) {
  constexpr const char* kOp = "packed tensor";
  HALFBYTE_MUST(memory.dtype() == DType::u8, invalid_argument, kOp, "memory", "be", "u8",
                to_string(memory.dtype()));
  PackedTensor result;
  result.memory_ = std::move(memory);
  const Tensor& held = result.memory_;
  result.weight_ = {spec, rows, cols, held.data(), held.device(), kPackedWeightVersion, held.num_bytes()};
  check_packed(kOp, "memory", result.weight_, held.device(), false);
  return result;
}

PackedTensor PackedTensor::to(Device device, void* stream) const {
  PackedTensor result = *this;
  result.memory_ = memory_.to(device, stream);
  result.weight_.data = result.memory_.data();
  result.weight_.device = device;
  return result;
}

PackedExperts::PackedExperts(const QuantSpec& spec, int64_t num_experts, int64_t rows, int64_t cols,
                             Device device)
    : num_experts_(num_experts) {
  constexpr const char* kOp = "packed experts";
  HALFBYTE_MUST(num_experts >= 0, invalid_argument, kOp, "num_experts", "be", ">= 0", num_experts);
  const int64_t num_bytes = packed_weight_bytes(spec, rows, cols);
  memory_ = Tensor(device, DType::u8, {num_experts, num_bytes});
  stack_ = {spec, rows, cols, memory_.data(), device, kPackedWeightVersion, memory_.num_bytes()};
}

PackedWeight PackedExperts::view(int64_t expert) const {
  HALFBYTE_MUST(expert >= 0 && expert < num_experts_, invalid_argument, "packed experts", "expert", "be",
                fmt::format("one of {}", num_experts_), expert);
  PackedWeight weight = stack_;
  weight.num_bytes = stack_.num_bytes / num_experts_;
  weight.data = static_cast<std::byte*>(stack_.data) + expert * weight.num_bytes;
  return weight;
}

PackedExperts PackedExperts::to(Device device, void* stream) const {
  PackedExperts result = *this;
  result.memory_ = memory_.to(device, stream);
  result.stack_.data = result.memory_.data();
  result.stack_.device = device;
  return result;
}

PackedTensor QuantizedTensor::pack(Execution execution, int64_t expert) const {
  const WeightView from = weight_view(expert);
  PackedTensor packed(from.spec, from.rows, from.cols, from.device);
  reorder(from, packed.view(), execution);
  return packed;
}

}  // namespace halfbyte
