// Quantized weights that own their memory.
#include <array>
#include <map>
#include <memory>
#include <mutex>

#include "capi/support.h"
#include "halfbyte/convert.hpp"
#include "halfbyte/qgemm.hpp"

using namespace halfbyte;
using namespace halfbyte::capi;

namespace {

// The parts of a weight, or of one expert of it, as C sees them.
class Parts {
 public:
  // Null where there is none.
  const DLTensor* add(const TensorView& view) {
    if (view.data == nullptr && num_elements(view) == 0) return nullptr;
    const size_t i = count_++;
    tensors_[i] = to_dlpack(view, storage_[i]);
    return &tensors_[i];
  }

 private:
  size_t count_ = 0;
  std::array<DLTensor, 8> tensors_ = {};
  std::array<std::vector<int64_t>, 8> storage_ = {};
};

std::vector<int64_t> shape_of(const int64_t* shape, int64_t ndim) {
  return extents_of(shape, ndim, 1, "shape", "ndim");
}

struct View {
  Parts parts;
  halfbyte_weight_view view = {};
};

}  // namespace

struct halfbyte_quantized_weight {
  explicit halfbyte_quantized_weight(QuantizedTensor of) : tensor(std::move(of)), spec(to_c(tensor.spec)) {
    c_parts = {0,
               parts.add(tensor.codes.view()),
               parts.add(tensor.scales.view()),
               parts.add(tensor.zeros.view()),
               parts.add(tensor.biases.view()),
               parts.add(tensor.scales_absmax.view()),
               parts.add(tensor.scales_map.view()),
               parts.add(tensor.scales_offset.view()),
               parts.add(tensor.global_scale.view())};
  }

  const QuantizedTensor tensor;
  const halfbyte_quant_spec spec;
  Parts parts;
  halfbyte_quantized_weight_parts c_parts;
  // Made when they are asked for.
  mutable std::mutex mutex;
  mutable std::map<int64_t, std::unique_ptr<View>> views;
};

struct halfbyte_packed_tensor {
  explicit halfbyte_packed_tensor(PackedTensor of)
      : tensor(std::move(of)),
        spec(to_c(tensor.view().spec)),
        data(to_dlpack({tensor.view().data, DType::u8, {tensor.view().num_bytes}, {}, tensor.view().device},
                       storage)) {}

  const PackedTensor tensor;
  const halfbyte_quant_spec spec;
  std::vector<int64_t> storage;
  const DLTensor data;
};

namespace halfbyte::capi {

halfbyte_quantized_weight* new_weight(QuantizedTensor tensor) {
  return new halfbyte_quantized_weight(std::move(tensor));
}
const QuantizedTensor& tensor_of(const halfbyte_quantized_weight* weight, const char* name) {
  return required(weight, name).tensor;
}

}  // namespace halfbyte::capi

halfbyte_status halfbyte_quantized_weight_create(const halfbyte_quant_spec* spec, const int64_t* shape,
                                                 int64_t ndim, halfbyte_dtype dtype, DLDevice device,
                                                 halfbyte_quantized_weight** weight) {
  return guard([&] {
    std::vector<int64_t> extents = shape_of(shape, ndim);
    required(weight, "weight");
    const DType of_weight = dtype_of(dtype, "dtype");
    if (!is_floating(of_weight)) refuse("dtype must be f32, f16, bf16 or f64, got {}", to_string(of_weight));
    *weight = new_weight(
        QuantizedTensor(spec_of(spec, "spec"), std::move(extents), of_weight, from_dlpack(device)));
  });
}
void halfbyte_quantized_weight_destroy(halfbyte_quantized_weight* weight) { delete weight; }

halfbyte_status halfbyte_quantized_weight_get_info(const halfbyte_quantized_weight* weight,
                                                   halfbyte_quantized_weight_info* info) {
  return guard([&] {
    const QuantizedTensor& of = tensor_of(weight, "weight");
    write_struct(info,
                 {0, of.shape.data(), static_cast<int64_t>(of.shape.size()), static_cast<int64_t>(of.dtype),
                  of.num_experts(), of.num_bytes(), to_dlpack(of.device())},
                 "info");
  });
}

halfbyte_status halfbyte_quantized_weight_get_spec(const halfbyte_quantized_weight* weight,
                                                   halfbyte_quant_spec* spec) {
  return guard([&] { write_struct(spec, required(weight, "weight").spec, "spec"); });
}

halfbyte_status halfbyte_quantized_weight_get_parts(const halfbyte_quantized_weight* weight,
                                                    halfbyte_quantized_weight_parts* parts) {
  return guard([&] { write_struct(parts, required(weight, "weight").c_parts, "parts"); });
}

halfbyte_status halfbyte_quantized_weight_get_view(const halfbyte_quantized_weight* weight, int64_t expert,
                                                   halfbyte_weight_view* view) {
  return guard([&] {
    const halfbyte_quantized_weight& of = required(weight, "weight");
    const WeightView own = of.tensor.weight_view(expert);
    const WeightViewBytes bytes = weight_view_bytes(own.spec, own.rows, own.cols, own.layout);
    const std::lock_guard lock(of.mutex);
    std::unique_ptr<View>& place = of.views[expert];
    if (!place) {
      place = std::make_unique<View>();
      const auto add = [&](void* data, DType dtype, int64_t num_bytes) {
        return place->parts.add({data, dtype, {num_bytes / size_of(dtype)}, {}, own.device});
      };
      const DType scales = own.spec.double_quant ? DType::u8 : own.spec.scale_dtype;
      place->view = {0,
                     &of.spec,
                     own.rows,
                     own.cols,
                     add(own.codes, DType::u8, bytes.codes),
                     add(own.scales, scales, bytes.scales),
                     add(own.zeros, DType::u8, bytes.zeros),
                     add(own.biases, own.spec.scale_dtype, bytes.biases),
                     add(own.absmax, DType::f32, bytes.absmax),
                     add(own.map, DType::f32, bytes.map),
                     add(own.offset, DType::f32, bytes.offset),
                     static_cast<int64_t>(own.layout),
                     add(own.global_scale, DType::f32, bytes.global_scale)};
    }
    write_struct(view, place->view, "view");
  });
}

halfbyte_status halfbyte_quantized_weight_to(const halfbyte_quantized_weight* weight, DLDevice device,
                                             void* stream, halfbyte_quantized_weight** result) {
  return guard([&] {
    const QuantizedTensor& of = tensor_of(weight, "weight");
    required(result, "result") = new_weight(of.to(from_dlpack(device), stream));
  });
}

halfbyte_status halfbyte_quantized_weight_slice(const halfbyte_quantized_weight* weight,
                                                const halfbyte_slice* slice, void* stream,
                                                halfbyte_quantized_weight** result) {
  return guard([&] {
    const QuantizedTensor& of = tensor_of(weight, "weight");
    required(result, "result") = new_weight(of.slice(slice_of(slice, "slice"), stream));
  });
}

halfbyte_status halfbyte_quantized_weight_from_flat(halfbyte_format format, int32_t symmetric,
                                                    int64_t group_size, const DLTensor* codes,
                                                    const DLTensor* scales, const DLTensor* zeros,
                                                    const int64_t* shape, int64_t ndim,
                                                    halfbyte_quantized_weight** weight, double* max_error,
                                                    int64_t* max_error_index) {
  return guard([&] {
    FlatCodes flat;
    flat.format = enum_of(format, all_formats().back().format, "format");
    flat.symmetric = flag_of(symmetric, "symmetric");
    flat.group_size = group_size;
    flat.codes = view_of(codes, "codes");
    flat.scales = view_of(scales, "scales");
    flat.zeros = optional_view_of(zeros, "zeros");
    required(weight, "weight");
    Conversion conversion = from_flat(flat, shape_of(shape, ndim));
    *weight = new_weight(std::move(conversion.weight));
    if (max_error != nullptr) *max_error = conversion.max_error;
    if (max_error_index != nullptr) *max_error_index = conversion.max_error_index;
  });
}

halfbyte_status halfbyte_quantized_weight_pack(const halfbyte_quantized_weight* weight, int64_t expert,
                                               const halfbyte_execution* execution,
                                               halfbyte_packed_tensor** packed) {
  return guard([&] {
    const QuantizedTensor& of = tensor_of(weight, "weight");
    required(packed, "packed") = new halfbyte_packed_tensor(of.pack(execution_of(execution), expert));
  });
}

halfbyte_status halfbyte_packed_tensor_get(const halfbyte_packed_tensor* packed,
                                           halfbyte_packed_weight* weight) {
  return guard([&] {
    const halfbyte_packed_tensor& of = required(packed, "packed");
    const PackedWeight& own = of.tensor.view();
    write_struct(weight, {0, &of.spec, own.rows, own.cols, &of.data, own.version}, "weight");
  });
}
void halfbyte_packed_tensor_destroy(halfbyte_packed_tensor* packed) { delete packed; }
