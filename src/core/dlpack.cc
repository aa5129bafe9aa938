#include "halfbyte/dlpack.hpp"

#include "core/expect.h"

namespace halfbyte {
namespace {

struct DTypeRow {
  DType dtype;
  uint8_t code, bits;
};
constexpr DTypeRow kDLPackDTypes[] = {
    {DType::f32, kDLFloat, 32},
    {DType::f16, kDLFloat, 16},
    {DType::bf16, kDLBfloat, 16},
    {DType::f64, kDLFloat, 64},
    {DType::i8, kDLInt, 8},
    {DType::u8, kDLUInt, 8},
    {DType::i32, kDLInt, 32},
    {DType::u32, kDLUInt, 32},
    {DType::i64, kDLInt, 64},
    {DType::i4, kDLInt, 4},
    {DType::u4, kDLUInt, 4},
    {DType::f8_e4m3, kDLFloat8_e4m3fn, 8},
    {DType::f8_e8m0, kDLFloat8_e8m0fnu, 8},
};

DType dtype_of(const DLDataType& type, std::string_view name) {
  for (const DTypeRow& row : kDLPackDTypes)
    if (type.code == row.code && type.bits == row.bits && type.lanes == 1) return row.dtype;
  HALFBYTE_FAIL(
      usage,
      "dlpack: {}: dtype must be float 16, 32, 64, bfloat 16, float8 e4m3fn, e8m0fnu, int 4, 8, 32, 64 or "
      "uint 4, 8, 32 of one lane, got code {} of {} bits and {} lanes",
      name, type.code, type.bits, type.lanes);
}

constexpr int32_t kMostDims = 32;  // more is no rank but uninitialized memory

void check_aligned(const void* data, size_t alignment, std::string_view name, const char* part) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  HALFBYTE_CHECK_AS(
      address % alignment == 0, usage,
      (ErrorDetails{ErrorKind::misaligned, std::string(name), fmt::format("aligned to {} bytes", alignment),
                    fmt::format("{:#x}", address)}),
      "dlpack: {}: {} must be aligned to {} bytes, got {:#x}", name, part, alignment, address);
}

// DLPack packs a whole tensor, we a row: the same where rows end with a byte, or there is one.
void check_packing(const TensorView& view, std::string_view name) {
  if (!is_packed(view.dtype) || view.shape.empty() || view.shape.back() % 2 == 0) return;
  HALFBYTE_CHECK(
      num_elements(view) == view.shape.back(), usage,
      "dlpack: {}: rows of {} must have an even number of elements where there is more than one, got {}",
      name, to_string(view.dtype), view.shape.back());
}

}  // namespace

Device from_dlpack(DLDevice device, std::string_view name) {
  switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      return {};
    case kDLCUDA:
    case kDLCUDAManaged:
      HALFBYTE_CHECK(device.device_id >= 0, usage, "dlpack: {}: device_id must not be negative, got {}", name,
                     device.device_id);
      return {DeviceKind::cuda, device.device_id};
    default:
      HALFBYTE_FAIL(
          usage,
          "dlpack: {}: device type must be kDLCPU (1), kDLCUDA (2), kDLCUDAHost (3) or kDLCUDAManaged "
          "(13), got {}",
          name, static_cast<int>(device.device_type));
  }
}

DLDevice to_dlpack(Device device) {
  return device.kind == DeviceKind::cuda ? DLDevice{kDLCUDA, device.index} : DLDevice{kDLCPU, 0};
}

TensorView from_dlpack(const DLTensor& tensor, std::string_view name) {
  TensorView view;
  view.device = from_dlpack(tensor.device, name);
  view.dtype = dtype_of(tensor.dtype, name);
  HALFBYTE_CHECK(tensor.ndim >= 0 && tensor.ndim <= kMostDims, usage,
                 "dlpack: {}: ndim must be 0 to {}, got {}", name, kMostDims, tensor.ndim);
  HALFBYTE_CHECK(tensor.ndim == 0 || tensor.shape != nullptr, usage,
                 "dlpack: {}: shape must not be null, ndim is {}", name, tensor.ndim);
  check_aligned(tensor.shape, alignof(int64_t), name, "shape");
  check_aligned(tensor.strides, alignof(int64_t), name, "strides");
  view.shape = Extents(tensor.shape, tensor.shape + tensor.ndim);
  if (tensor.strides != nullptr) view.strides = Extents(tensor.strides, tensor.strides + tensor.ndim);
  for (const int64_t extent : view.shape)
    HALFBYTE_CHECK(extent >= 0, usage, "dlpack: {}: an extent must not be negative, got {}", name, extent);
  check_packing(view, name);
  if (tensor.data == nullptr) return view;
  view.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
  if (!is_packed(view.dtype) && num_elements(view) > 0)
    check_aligned(view.data, static_cast<size_t>(size_of(view.dtype)), name, "data with byte_offset");
  return view;
}

DLTensor to_dlpack(const TensorView& view, std::vector<int64_t>& storage) {
  check_packing(view, "tensor");
  const size_t rank = view.shape.size();
  storage.assign(2 * rank, 1);
  std::copy(view.shape.begin(), view.shape.end(), storage.begin());
  const auto strides = storage.begin() + static_cast<std::ptrdiff_t>(rank);
  if (view.strides.empty()) {
    int64_t stride = 1;
    for (size_t i = rank; i-- > 0; stride *= view.shape[i]) strides[static_cast<std::ptrdiff_t>(i)] = stride;
  } else {
    std::copy(view.strides.begin(), view.strides.end(), strides);
  }
  DLTensor tensor{};
  tensor.data = view.data;
  tensor.device = to_dlpack(view.device);
  tensor.ndim = static_cast<int32_t>(rank);
  for (const DTypeRow& row : kDLPackDTypes)
    if (row.dtype == view.dtype) tensor.dtype = {row.code, row.bits, 1};
  tensor.shape = storage.data();
  tensor.strides = storage.data() + rank;
  return tensor;
}

}  // namespace halfbyte
