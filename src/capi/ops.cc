// Quantization: specifications, operations, flat buffers.
#include "capi/support.h"
#include "halfbyte/device.hpp"
#include "halfbyte/simple.hpp"

using namespace halfbyte;
using namespace halfbyte::capi;

namespace {

// A dense tensor, in memory that its device can use.
TensorView dense_of(const DLTensor* tensor, const char* name) {
  TensorView view = view_of(tensor, name);
  if (view.data != nullptr)
    check_memory(name, view.data, contiguous_bytes(view.dtype, view.shape), view.device);
  return view;
}

// As QuantizedView: of the dense tensor x or y.
QuantizedView parts_of(const halfbyte_quantized* given, const halfbyte_quant_spec* spec,
                       const TensorView& dense, const char* name) {
  const int64_t cols = dense.shape.empty() ? 1 : dense.shape.back();
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < dense.shape.size(); ++i)
    if (__builtin_mul_overflow(rows, dense.shape[i], &rows))
      refuse("{}: the number of rows exceeds 2^63 - 1", name);
  required(given, name);
  return capi::parts_of(given, spec_of(spec, "spec"), rows, cols, dense.device, name);
}

halfbyte_value_range to_c(const ValueRange& range) {
  return {sizeof(halfbyte_value_range), range.min, range.max, range.num_nonfinite, range.first_nonfinite};
}

// One axis of host memory for the scales of double quantization.
template <class T>
T* host_array(const DLTensor* tensor, const char* name, DType dtype, int64_t n) {
  required(tensor, name);
  return static_cast<T*>(part(tensor, name, dtype, n, Device{}));
}

// Null: none. The columns are those of x.
Importance importance_of(const halfbyte_encoding* given, const TensorView& x) {
  if (given == nullptr) return {};
  const DLTensor* const tensor = read_struct(given, capi::to_c(Encoding{}), "encoding").importance;
  if (tensor == nullptr) return {};
  const int64_t cols = x.shape.empty() ? 1 : x.shape.back();
  return {static_cast<const float*>(part(tensor, "encoding->importance", DType::f32, cols, x.device)), cols,
          0};
}

}  // namespace

halfbyte_status halfbyte_quant_spec_init(halfbyte_quant_spec* spec, size_t struct_size) {
  return init_struct(spec, capi::to_c(QuantSpec{}), struct_size, "spec");
}
halfbyte_status halfbyte_encoding_init(halfbyte_encoding* encoding, size_t struct_size) {
  return init_struct(encoding, capi::to_c(Encoding{}), struct_size, "encoding");
}
halfbyte_status halfbyte_quant_spec_check(const halfbyte_quant_spec* spec) {
  return guard([&] { check_spec(spec_of(spec, "spec")); });
}

halfbyte_status halfbyte_quant_shape_of(const halfbyte_quant_spec* spec, int64_t rows, int64_t cols,
                                        halfbyte_quant_shape* shape) {
  return guard([&] {
    const QuantSpec checked = spec_of(spec, "spec");
    const QuantShape sizes = quant_shape(checked, rows, cols);
    write_struct(
        shape,
        {0, sizes.rows, sizes.cols, sizes.row_bytes, sizes.group_size, sizes.groups_per_row, sizes.num_groups,
         sizes.code_bytes(), has_zeros(checked), has_biases(checked), has_global_scale(checked)},
        "shape");
  });
}

halfbyte_status halfbyte_execution_init(halfbyte_execution* execution, size_t struct_size) {
  return init_struct(execution, {}, struct_size, "execution");
}

halfbyte_status halfbyte_value_range_of(const DLTensor* x, const halfbyte_execution* execution,
                                        halfbyte_value_range* range) {
  return guard([&] {
    required(range, "range");
    write_struct(range, to_c(value_range(dense_of(x, "x"), execution_of(execution))), "range");
  });
}

halfbyte_status halfbyte_quantized_init(halfbyte_quantized* quantized, size_t struct_size) {
  return init_struct(quantized, {}, struct_size, "quantized");
}

halfbyte_status halfbyte_quantize(const DLTensor* x, const halfbyte_quant_spec* spec,
                                  const halfbyte_encoding* encoding, const halfbyte_quantized* out,
                                  const halfbyte_execution* execution, const halfbyte_value_range* range,
                                  halfbyte_quantize_status* status) {
  return guard([&] {
    const TensorView dense = dense_of(x, "x");
    const QuantizedView view = parts_of(out, spec, dense, "out");
    const halfbyte_value_range given = read_struct(range, to_c(ValueRange{}), "range");
    const ValueRange whole{given.min, given.max, given.num_nonfinite, given.first_nonfinite};
    if (status != nullptr) check_struct_size<halfbyte_quantize_status>(status->struct_size, "status");
    const QuantizeStatus found =
        quantize(dense, view, encoding_of(encoding, "encoding"), execution_of(execution),
                 range == nullptr ? nullptr : &whole, importance_of(encoding, dense));
    if (status != nullptr) {
      write_struct(status, capi::to_c(found), "status");
      return;
    }
    if (found.num_nonfinite != 0)
      throw Error(ErrorCode::bad_input,
                  fmt::format("quantize: x has {} elements that are not finite, the first at index {}",
                              found.num_nonfinite, found.first_nonfinite));
    if (found.num_unheld_scales != 0)
      throw Error(ErrorCode::bad_input,
                  fmt::format("quantize: {} cannot hold {} scales", to_string(view.spec.scale_dtype),
                              found.num_unheld_scales));
  });
}

halfbyte_status halfbyte_dequantize(const halfbyte_quantized* in, const halfbyte_quant_spec* spec,
                                    const DLTensor* y, const halfbyte_execution* execution) {
  return guard([&] {
    const TensorView dense = dense_of(y, "y");
    dequantize(parts_of(in, spec, dense, "in"), dense, execution_of(execution));
  });
}

halfbyte_status halfbyte_double_quantize(const DLTensor* scales, const DLTensor* codes,
                                         const DLTensor* absmax, float* offset) {
  return guard([&] {
    const int64_t n = num_elements(view_of(scales, "scales"));
    const int64_t blocks = n / kDoubleQuantBlock + (n % kDoubleQuantBlock != 0);
    const float* const values = host_array<float>(scales, "scales", DType::f32, n);
    DoubleQuantizedView view{host_array<uint8_t>(codes, "codes", DType::u8, n),
                             host_array<float>(absmax, "absmax", DType::f32, blocks), 0};
    required(offset, "offset");
    double_quantize(values, n, view);
    *offset = view.offset;
  });
}

halfbyte_status halfbyte_double_dequantize(const DLTensor* codes, const DLTensor* absmax, float offset,
                                           const DLTensor* scales) {
  return guard([&] {
    const int64_t n = num_elements(view_of(scales, "scales"));
    const int64_t blocks = n / kDoubleQuantBlock + (n % kDoubleQuantBlock != 0);
    float* const values = host_array<float>(scales, "scales", DType::f32, n);
    const ConstDoubleQuantizedView view{host_array<uint8_t>(codes, "codes", DType::u8, n),
                                        host_array<float>(absmax, "absmax", DType::f32, blocks), offset};
    double_dequantize(view, n, values);
  });
}

// ---- Flat buffers

halfbyte_status halfbyte_int4_num_groups(int64_t n, int64_t group_size, int64_t* num_groups) {
  return guard([&] { required(num_groups, "num_groups") = Int4Config{group_size}.num_groups(n); });
}
halfbyte_status halfbyte_int4_packed_bytes(int64_t n, int64_t* num_bytes) {
  return guard([&] { required(num_bytes, "num_bytes") = Int4Config{}.packed_bytes(n); });
}

halfbyte_status halfbyte_quantize_int4(const DLTensor* x, const DLTensor* codes, const DLTensor* scales,
                                       const DLTensor* zeros, int64_t n, int64_t group_size,
                                       int32_t symmetric, const halfbyte_execution* execution) {
  return guard([&] {
    const Int4Config config{group_size, flag_of(symmetric, "symmetric")};
    const TensorView zeros_view = config.symmetric ? TensorView{} : view_of(zeros, "zeros");
    quantize_int4(view_of(x, "x"), view_of(codes, "codes"), view_of(scales, "scales"), zeros_view, n, config,
                  execution_of(execution));
  });
}
halfbyte_status halfbyte_dequantize_int4(const DLTensor* codes, const DLTensor* scales, const DLTensor* zeros,
                                         const DLTensor* y, int64_t n, int64_t group_size, int32_t symmetric,
                                         const halfbyte_execution* execution) {
  return guard([&] {
    const Int4Config config{group_size, flag_of(symmetric, "symmetric")};
    const TensorView zeros_view = config.symmetric ? TensorView{} : view_of(zeros, "zeros");
    dequantize_int4(view_of(codes, "codes"), view_of(scales, "scales"), zeros_view, view_of(y, "y"), n,
                    config, execution_of(execution));
  });
}
halfbyte_status halfbyte_quantize_nf4(const DLTensor* x, const DLTensor* codes, const DLTensor* scales,
                                      int64_t n, int64_t group_size, const halfbyte_execution* execution) {
  return guard([&] {
    quantize_nf4(view_of(x, "x"), view_of(codes, "codes"), view_of(scales, "scales"), n, group_size,
                 execution_of(execution));
  });
}
halfbyte_status halfbyte_dequantize_nf4(const DLTensor* codes, const DLTensor* scales, const DLTensor* y,
                                        int64_t n, int64_t group_size, const halfbyte_execution* execution) {
  return guard([&] {
    dequantize_nf4(view_of(codes, "codes"), view_of(scales, "scales"), view_of(y, "y"), n, group_size,
                   execution_of(execution));
  });
}
