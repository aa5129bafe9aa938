// The packed form of an owning weight.
#include "core/expect.h"
#include "core/weight_view.h"

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

PackedTensor QuantizedTensor::pack(Execution execution, int64_t expert) const {
  const WeightView from = weight_view(expert);
  PackedTensor packed(from.spec, from.rows, from.cols, from.device);
  reorder(from, packed.view(), execution);
  return packed;
}

}  // namespace halfbyte
