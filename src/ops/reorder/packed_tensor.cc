// The packed form of an owning weight.
#include "halfbyte/qgemm.hpp"

namespace halfbyte {

PackedTensor::PackedTensor(const QuantSpec& spec, int64_t rows, int64_t cols, Device device)
    : memory_(device, DType::u8, {packed_weight_bytes(spec, rows, cols)}),
      weight_{spec, rows, cols, memory_.data(), device, kPackedWeightVersion, memory_.num_bytes()} {}

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
