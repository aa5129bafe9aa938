#include "core/checks.h"
#include "core/plan_device.h"
#include "core/tensor_check.h"
#include "halfbyte/device.hpp"

namespace halfbyte {

Tensor::Tensor(Device device, DType dtype, std::vector<int64_t> shape)
    : device_(device),
      dtype_(dtype),
      shape_(std::move(shape)),
      memory_(device, contiguous_bytes(dtype, shape_)) {}

namespace {

// Returns its bytes.
int64_t check_contiguous_view(const ConstTensorView& view) {
  HALFBYTE_CHECK(is_contiguous(view), usage,
                 "tensor: the view must be contiguous, got strides {} of shape {}", text_of(view.strides),
                 text_of(view.shape));
  const int64_t num_bytes = contiguous_bytes(view.dtype, view.shape);
  HALFBYTE_CHECK(view.num_bytes < 0 || view.num_bytes >= num_bytes, usage,
                 "tensor: the view needs {} bytes, its memory has {}", num_bytes, view.num_bytes);
  HALFBYTE_CHECK(view.data != nullptr || num_bytes == 0, usage,
                 "tensor: the view needs {} bytes but has no data", num_bytes);
  return num_bytes;
}

}  // namespace

Tensor Tensor::copy_of(const ConstTensorView& view, void* stream) {
  const int64_t num_bytes = check_contiguous_view(view);
  Tensor tensor(view.device, view.dtype, view.shape);
  copy(view.device, tensor.data(), view.data, num_bytes, stream);
  wait_for(view.device, stream);
  return tensor;
}

Tensor Tensor::of(const TensorView& view, std::shared_ptr<void> owner) {
  const int64_t num_bytes = check_contiguous_view(view);
  const int64_t alignment = is_packed(view.dtype) ? 1 : size_of(view.dtype);
  check_argument("tensor", {"the view", view.data, num_bytes, view.num_bytes, alignment, false, false},
                 view.device);
  Tensor tensor;
  tensor.device_ = view.device;
  tensor.dtype_ = view.dtype;
  tensor.shape_ = view.shape;
  tensor.memory_.data_ = {std::move(owner), static_cast<std::byte*>(view.data)};
  tensor.memory_.num_bytes_ = num_bytes;
  return tensor;
}

int64_t Tensor::num_elements() const { return halfbyte::num_elements(view()); }
int64_t Tensor::num_bytes() const { return contiguous_bytes(dtype_, shape_); }
TensorView Tensor::view() const { return {data(), dtype_, shape_, {}, device_, num_bytes()}; }

Tensor Tensor::to(Device device, void* stream) const {
  if (device == device_) return *this;
  if (device.kind == DeviceKind::cuda && device_.kind == DeviceKind::cuda)
    return to(Device{}).to(device, stream);
  const Device cuda = device.kind == DeviceKind::cuda ? device : device_;
  Tensor tensor(device, dtype_, shape_);
  copy(cuda, tensor.data(), data(), num_bytes(), stream);
  wait_for(cuda, stream);
  return tensor;
}

}  // namespace halfbyte
