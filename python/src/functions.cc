// Functions beside plans: double quantization, flat buffers, weights from codes of integer plans, ranges.
#include "halfbyte/convert.hpp"
#include "halfbyte/error.hpp"
#include "halfbyte/qparams.hpp"
#include "halfbyte/simple.hpp"
#include "plans.h"
#include "tensors.h"

namespace halfbyte::python {
namespace {

[[noreturn]] void refuse(const std::string& message, const char* name, const std::string& expected,
                         const std::string& actual) {
  throw Error(ErrorCode::usage, message, ErrorDetails{ErrorKind::invalid_argument, name, expected, actual});
}

int64_t length_of(const Array& array) { return num_elements(array.view); }

// In host memory, contiguous and of that dtype.
Array host_array(nb::handle object, const char* name, DType dtype) {
  Array array = to_contiguous(object, name);
  (void)part_data(array, name, dtype, 0, {});
  return array;
}

// ---- Double quantization

nb::object double_quantize_array(nb::handle scales) {
  const Array x = host_array(scales, "scales", DType::f32);
  const int64_t n = length_of(x), blocks = (n + kDoubleQuantBlock - 1) / kDoubleQuantBlock;
  const Output codes(nb::none(), "codes", x, DType::u8, x.view.shape);
  const Output absmax(nb::none(), "absmax", x, DType::f32, std::array{blocks});
  DoubleQuantizedView out{static_cast<uint8_t*>(codes.array.view.data),
                          static_cast<float*>(absmax.array.view.data), 0};
  {
    const nb::gil_scoped_release release;
    double_quantize(static_cast<const float*>(x.view.data), n, out);
  }
  return nb::make_tuple(codes.result(), absmax.result(), out.offset);
}

nb::object double_dequantize_array(nb::handle codes, nb::handle absmax, double offset, nb::handle map) {
  const Array q = host_array(codes, "codes", DType::u8);
  const int64_t n = length_of(q), blocks = (n + kDoubleQuantBlock - 1) / kDoubleQuantBlock;
  const Array most = host_array(absmax, "absmax", DType::f32);
  (void)part_data(most, "absmax", DType::f32, blocks * 4, {});
  std::optional<Array> given;
  const float* table = nullptr;
  if (!map.is_none()) {
    given = host_array(map, "map", DType::f32);
    table = static_cast<const float*>(part_data(*given, "map", DType::f32, 256 * 4, {}));
  }
  const Output scales(nb::none(), "scales", q, DType::f32, q.view.shape);
  const ConstDoubleQuantizedView in{static_cast<const uint8_t*>(q.view.data),
                                    static_cast<const float*>(most.view.data), static_cast<float>(offset)};
  {
    const nb::gil_scoped_release release;
    double_dequantize(in, n, static_cast<float*>(scales.array.view.data), table);
  }
  return scales.result();
}

nb::object map_array() {
  // It lives as long as the library.
  const TensorView view{const_cast<float*>(double_quant_map()), DType::f32, {256}};
  return to_python(Tensor::copy_of(view), Framework::numpy);
}

// ---- Flat buffers

// Codes, scales, zeros: what the caller gives as a tuple, or new arrays beside x.
struct FlatOutputs {
  Output codes, scales;
  std::optional<Output> zeros;

  FlatOutputs(const Array& x, nb::handle out, const Int4Config& config, DType scale_dtype, bool with_zeros,
              nb::handle stream)
      : codes(item(out, 0), "codes", x, DType::u8, std::array{config.packed_bytes(length_of(x))}, stream),
        scales(item(out, 1), "scales", x, scale_dtype, std::array{config.num_groups(length_of(x))}, stream) {
    if (with_zeros)
      zeros.emplace(item(out, 2), "zeros", x, DType::u8, std::array{config.num_groups(length_of(x))}, stream);
  }
  static nb::object item(nb::handle out, int index) {
    return out.is_none() ? nb::none() : nb::object(out[index]);
  }
};

nb::object quantize_int4_array(nb::handle x, int64_t group_size, bool symmetric, nb::handle scale_dtype,
                               nb::handle out, int num_threads, nb::handle stream) {
  const Array array = to_contiguous(x, "x", stream);
  const Int4Config config{group_size, symmetric};
  const FlatOutputs to(array, out, config, from_python<DType>(scale_dtype, "scale_dtype"), !symmetric,
                       stream);
  const Execution execution = execution_of(num_threads, stream, array);
  {
    const nb::gil_scoped_release release;
    quantize_int4(array.view, to.codes.array.view, to.scales.array.view,
                  to.zeros ? to.zeros->array.view : TensorView{}, length_of(array), config, execution);
  }
  return nb::make_tuple(to.codes.result(), to.scales.result(), to.zeros ? to.zeros->result() : nb::none());
}

nb::object quantize_nf4_array(nb::handle x, int64_t group_size, nb::handle scale_dtype, nb::handle out,
                              int num_threads, nb::handle stream) {
  const Array array = to_contiguous(x, "x", stream);
  const FlatOutputs to(array, out, {group_size}, from_python<DType>(scale_dtype, "scale_dtype"), false,
                       stream);
  const Execution execution = execution_of(num_threads, stream, array);
  {
    const nb::gil_scoped_release release;
    quantize_nf4(array.view, to.codes.array.view, to.scales.array.view, length_of(array), group_size,
                 execution);
  }
  return nb::make_tuple(to.codes.result(), to.scales.result());
}

// Elements: those that are asked for, of `out`, or that fit into the codes.
int64_t flat_length(nb::handle n, nb::handle out, const Array& codes) {
  if (!n.is_none()) return from_python<int64_t>(n, "n");
  return out.is_none() ? 2 * length_of(codes) : length_of(to_array(out, "out", true));
}

template <class Run>
nb::object dequantize_flat(nb::handle codes, nb::handle scales, nb::handle n, nb::handle dtype,
                           nb::handle out, int num_threads, nb::handle stream, Run run) {
  const Array q = to_contiguous(codes, "codes", stream), s = to_contiguous(scales, "scales", stream);
  const int64_t length = flat_length(n, out, q);
  if (length < 0)
    refuse("n must not be negative, got " + std::to_string(length), "n", ">= 0", std::to_string(length));
  const Output y(out, "out", q, from_python<DType>(dtype, "dtype"), std::array{length}, stream);
  const Execution execution = execution_of(num_threads, stream, q);
  {
    const nb::gil_scoped_release release;
    run(q.view, s.view, y.array.view, length, execution);
  }
  return y.result();
}

nb::object dequantize_int4_array(nb::handle codes, nb::handle scales, nb::handle zeros, nb::handle n,
                                 int64_t group_size, bool symmetric, nb::handle dtype, nb::handle out,
                                 int num_threads, nb::handle stream) {
  std::optional<Array> z;
  if (!zeros.is_none()) z = to_contiguous(zeros, "zeros", stream);
  return dequantize_flat(
      codes, scales, n, dtype, out, num_threads, stream,
      [&](const auto& q, const auto& s, const auto& y, int64_t length, Execution execution) {
        dequantize_int4(q, s, z ? z->view : TensorView{}, y, length, {group_size, symmetric}, execution);
      });
}

nb::object dequantize_nf4_array(nb::handle codes, nb::handle scales, nb::handle n, int64_t group_size,
                                nb::handle dtype, nb::handle out, int num_threads, nb::handle stream) {
  return dequantize_flat(
      codes, scales, n, dtype, out, num_threads, stream,
      [&](const auto& q, const auto& s, const auto& y, int64_t length, Execution execution) {
        dequantize_nf4(q, s, y, length, group_size, execution);
      });
}

nb::object from_flat_arrays(nb::handle shape, nb::handle codes, nb::handle scales, nb::handle zeros,
                            nb::handle format, bool symmetric, int64_t group_size) {
  FlatCodes flat;
  from_python(format, "format", flat.format);
  flat.symmetric = symmetric;
  flat.group_size = group_size;
  const Array q = to_contiguous(codes, "codes"), s = to_contiguous(scales, "scales");
  flat.codes = q.view;
  flat.scales = s.view;
  std::optional<Array> z;
  if (!zeros.is_none()) {
    z = to_contiguous(zeros, "zeros");
    flat.zeros = z->view;
  }
  const auto extents = from_python<std::vector<int64_t>>(shape, "shape");
  std::optional<Conversion> made;
  {
    const nb::gil_scoped_release release;
    made = from_flat(flat, extents);
  }
  return values_module().attr("Conversion")(Quantized{std::move(made->weight), home_of(q)}, made->max_error,
                                            made->max_error_index);
}

// ---- Weights of integer plans

Quantized from_linear_arrays(const LinearDescriptor& d, nb::handle codes, nb::handle scale,
                             nb::handle zero_point, int num_threads, nb::handle stream) {
  const Array q = to_array(codes, "codes", false, stream), s = to_array(scale, "scale", false, stream);
  const TensorView code_view = codes_view(q, "codes", d.code_dtype, d.shape);
  std::optional<Array> z;
  TensorView zero_view;
  if (!zero_point.is_none()) {
    z = to_array(zero_point, "zero_point", false, stream);
    zero_view = codes_view(*z, "zero_point", d.zero_point_dtype.value_or(DType::i32), d.scale_shape());
  }
  const Execution execution = execution_of(num_threads, stream, q);
  Quantized result{{}, home_of(q)};
  const nb::gil_scoped_release release;
  result.tensor = from_linear(d, code_view, s.view, zero_view, execution);
  return result;
}

nb::object to_linear_arrays(nb::handle object, int num_threads, nb::handle stream) {
  const Quantized& q = to_quantized(object, "q");
  const Execution execution = execution_of(num_threads, stream, q.home);
  std::optional<LinearCodes> made;
  {
    const nb::gil_scoped_release release;
    made = to_linear(q.tensor, execution);
  }
  return values_module().attr("LinearCodes")(
      made->descriptor, to_python(made->codes, q.home), to_python(made->scale, q.home),
      made->descriptor.zero_point_dtype ? to_python(made->zero_point, q.home) : nb::none());
}

// ---- Ranges

nb::object range_of(nb::handle x, int num_threads, nb::handle stream) {
  const Array array = to_contiguous(x, "x", stream);
  const Execution execution = execution_of(num_threads, stream, array);
  ValueRange range;
  {
    const nb::gil_scoped_release release;
    range = value_range(array.view, execution);
  }
  return values_module().attr("ValueRange")(range.min, range.max, range.num_nonfinite, range.first_nonfinite);
}

void bind_flat(nb::module_& module) {
  module.def(
      "quantize_int4", &quantize_int4_array, nb::arg("x"), nb::kw_only(), nb::arg("group_size") = 64,
      nb::arg("symmetric") = true, nb::arg("scale_dtype") = "f32", nb::arg("out") = nb::none(),
      nb::arg("num_threads") = 0, nb::arg("stream") = nb::none(),
      nb::sig("def quantize_int4(x: object, *, group_size: int = 64, symmetric: bool = True, "
              "scale_dtype: object = 'f32', out: tuple | None = None, num_threads: int = 0, "
              "stream: object = None) -> tuple[object, object, object]"),
      "INT4 of a flat buffer of n elements, x of any shape (f32, f16, bf16, f64): (codes u8 [ceil(n / 2)], "
      "the first of a pair in the low half, scales [ceil(n / group_size)], zeros u8 like scales, None where "
      "symmetric). symmetric: scale = absmax / 7, stored code = code + 8; else (max - min) / 15 over the "
      "range with 0. `out`: a tuple of arrays to write instead. Raises Error (BAD_INPUT) if x is not finite "
      "or a scale does not fit.\n\n"
      "    >>> codes, scales, _ = halfbyte.quantize_int4(np.array([7, -3, 1], np.float32))\n"
      "    >>> codes.tolist(), scales.tolist()\n"
      "    ([95, 137], [1.0])\n"
      "    >>> halfbyte.dequantize_int4(codes, scales, n=3)\n"
      "    array([ 7., -3.,  1.], dtype=float32)");
  module.def(
      "dequantize_int4", &dequantize_int4_array, nb::arg("codes"), nb::arg("scales"),
      nb::arg("zeros") = nb::none(), nb::kw_only(), nb::arg("n") = nb::none(), nb::arg("group_size") = 64,
      nb::arg("symmetric") = true, nb::arg("dtype") = "f32", nb::arg("out") = nb::none(),
      nb::arg("num_threads") = 0, nb::arg("stream") = nb::none(),
      nb::sig(
          "def dequantize_int4(codes: object, scales: object, zeros: object = None, *, n: int | None = "
          "None, group_size: int = 64, symmetric: bool = True, dtype: object = 'f32', out: object = None, "
          "num_threads: int = 0, stream: object = None) -> object"),
      "The n elements (None: as many as `out` has, or two of each byte) of buffers of quantize_int4: (code - "
      "zero) * scale, in `dtype` or `out`.\n\n"
      "    >>> x = np.array([0, 1, 2, 15], np.float32)\n"
      "    >>> parts = halfbyte.quantize_int4(x, symmetric=False)\n"
      "    >>> halfbyte.dequantize_int4(*parts, symmetric=False)\n"
      "    array([ 0.,  1.,  2., 15.], dtype=float32)");
  module.def(
      "quantize_nf4", &quantize_nf4_array, nb::arg("x"), nb::kw_only(), nb::arg("group_size") = 64,
      nb::arg("scale_dtype") = "f32", nb::arg("out") = nb::none(), nb::arg("num_threads") = 0,
      nb::arg("stream") = nb::none(),
      nb::sig(
          "def quantize_nf4(x: object, *, group_size: int = 64, scale_dtype: object = 'f32', "
          "out: tuple | None = None, num_threads: int = 0, stream: object = None) -> tuple[object, object]"),
      "NF4 of a flat buffer, like quantize_int4: (codes, scales), scale = absmax.\n\n"
      "    >>> codes, scales = halfbyte.quantize_nf4(np.array([2, -2], np.float32))\n"
      "    >>> codes.tolist(), scales.tolist()\n"
      "    ([15], [2.0])");
  module.def(
      "dequantize_nf4", &dequantize_nf4_array, nb::arg("codes"), nb::arg("scales"), nb::kw_only(),
      nb::arg("n") = nb::none(), nb::arg("group_size") = 64, nb::arg("dtype") = "f32",
      nb::arg("out") = nb::none(), nb::arg("num_threads") = 0, nb::arg("stream") = nb::none(),
      nb::sig(
          "def dequantize_nf4(codes: object, scales: object, *, n: int | None = None, group_size: int = 64, "
          "dtype: object = 'f32', out: object = None, num_threads: int = 0, stream: object = None) -> "
          "object"),
      "The reverse of quantize_nf4, like dequantize_int4.\n\n"
      "    >>> halfbyte.dequantize_nf4(np.array([15], np.uint8), np.array([2], np.float32))\n"
      "    array([ 2., -2.], dtype=float32)");
  module.def(
      "from_flat", &from_flat_arrays, nb::arg("shape"), nb::arg("codes"), nb::arg("scales"),
      nb::arg("zeros") = nb::none(), nb::kw_only(), nb::arg("format") = "int4", nb::arg("symmetric") = true,
      nb::arg("group_size") = 64,
      nb::sig("def from_flat(shape: Sequence[int], codes: object, scales: object, zeros: object = None, *, "
              "format: str = 'int4', symmetric: bool = True, group_size: int = 64) -> "
              "Conversion"),
      "A weight of this shape from a flat buffer of 4-bit codes (int4 or nf4), in host memory, with zero "
      "points "
      "in floating point where it is not symmetric: (code - zero) * scale becomes affine4. Granularity flat, "
      "scales in f32. Gives (weight, max_error, max_error_index): what the conversion lost. Raises "
      "ValueError "
      "for what does not fit together, Error (BAD_INPUT) for scales that are not finite or that f32 cannot "
      "hold.\n\n"
      "    >>> codes, scales, _ = halfbyte.quantize_int4(np.arange(-8, 8, dtype=np.float32))\n"
      "    >>> halfbyte.from_flat((4, 4), codes, scales).weight\n"
      "    <QuantizedTensor int4,granularity=flat: shape (4, 4) of f32, 6 bits per weight, cpu>");
}

// What the functions in Python are made of.
void bind_helpers(nb::module_& module) {
  module.def("_describe", [](nb::handle x, const char* name) {
    const Array array = to_array(x, name);
    return nb::make_tuple(to_python(array.view.shape), to_python(array.view.dtype),
                          to_python(array.view.device));
  });
  module.def("_contiguous", [](nb::handle x, const char* name) { return contiguous(x, to_array(x, name)); });
  module.def("_empty", [](nb::handle like, nb::handle dtype, nb::handle shape) {
    const auto extents = from_python<std::vector<int64_t>>(shape, "shape");
    return empty_beside(to_array(like, "like"), from_python<DType>(dtype, "dtype"), extents);
  });
  module.def("_give_back",
             [](nb::handle like, nb::object array) { return give_back(to_array(like, "like"), array); });
}

}  // namespace

void bind_functions(nb::module_& module) {
  bind_flat(module);
  bind_helpers(module);
  module.def("double_quantize", &double_quantize_array, nb::arg("scales"),
             nb::sig("def double_quantize(scales: object) -> tuple[object, object, float]"),
             "Scales (f32, any shape, host memory) to 8 bits, as QLoRA and bitsandbytes do it: (codes u8 "
             "like scales, "
             "absmax f32 [ceil(n / 256)], offset), where offset is the mean, and codes are entries of "
             "double_quant_map.\n\n"
             "    >>> codes, absmax, offset = halfbyte.double_quantize(np.array([1, 2, 3], np.float32))\n"
             "    >>> halfbyte.double_dequantize(codes, absmax, offset).round(1), offset\n"
             "    (array([1., 2., 3.], dtype=float32), 2.0)");
  module.def(
      "double_dequantize", &double_dequantize_array, nb::arg("codes"), nb::arg("absmax"), nb::arg("offset"),
      nb::arg("map") = nb::none(),
      nb::sig("def double_dequantize(codes: object, absmax: object, offset: float, map: object = None) -> "
              "object"),
      "The scales (f32) again: map[codes] * absmax of the block of 256 + offset. map: f32 [256]; None: "
      "double_quant_map().\n\n"
      "    >>> zero = np.array([127], np.uint8)\n"
      "    >>> halfbyte.double_dequantize(zero, np.array([8], np.float32), 0.5)\n"
      "    array([0.5], dtype=float32)");
  module.def("double_quant_map", &map_array, nb::sig("def double_quant_map() -> object"),
             "The 256 values of 8-bit scales, f32, ascending, as bitsandbytes has them; a copy.\n\n"
             "    >>> halfbyte.double_quant_map()[[0, 127, 255]].round(3).tolist()\n"
             "    [-0.9929999709129333, 0.0, 1.0]");
  module.def(
      "from_linear", &from_linear_arrays, nb::arg("descriptor"), nb::arg("codes"), nb::arg("scale"),
      nb::arg("zero_point") = nb::none(), nb::kw_only(), nb::arg("num_threads") = 0,
      nb::arg("stream") = nb::none(),
      nb::sig(
          "def from_linear(descriptor: LinearDescriptor, codes: object, scale: object, zero_point: object = "
          "None, *, num_threads: int = 0, stream: object = None) -> QuantizedTensor"),
      "Codes, scale and zero point as quantize_linear gives them, as a weight that products multiply, "
      "exactly: "
      "i4 and u4 become int4, i8 and u8 int8. Granularity: tensor, channel along axis 0 of two, or group "
      "along the last axis. Raises ValueError for others, Error (BAD_INPUT) for codes and zero points out of "
      "range and for scales that are negative or not finite.\n\n"
      "    >>> d = halfbyte.LinearDescriptor(shape=[1, 4], granularity=\"group\", group_size=4)\n"
      "    >>> codes = np.array([[1, -2, 3, 0]], np.int8)\n"
      "    >>> halfbyte.from_linear(d, codes, np.array([[0.5]], np.float32)).dequantize()\n"
      "    array([[ 0.5, -1. ,  1.5,  0. ]], dtype=float32)");
  module.def(
      "to_linear", &to_linear_arrays, nb::arg("q"), nb::kw_only(), nb::arg("num_threads") = 0,
      nb::arg("stream") = nb::none(),
      nb::sig("def to_linear(q: QuantizedTensor, *, num_threads: int = 0, stream: object = None) -> "
              "LinearCodes"),
      "The reverse: (descriptor, codes, scale, zero_point) for integer plans; zero_point is None where q is "
      "symmetric. Exact for every integer format. Codes of int4 are bytes [..., ceil(cols / 2)]. Raises "
      "ValueError for other formats and for double quantization (see expanded).\n\n"
      "    >>> linear = halfbyte.to_linear(halfbyte.quantize(np.eye(2, dtype=np.float32), \"int8\"))\n"
      "    >>> linear.codes.tolist(), linear.descriptor.code_dtype\n"
      "    ([[127, 0], [0, 127]], 'i8')");
  module.def(
      "compute_qparams",
      [](double min, double max, const QParamsConfig& config, nb::handle scale_dtype, nb::handle dtype) {
        const QParams made = compute_qparams(min, max, config, from_python<DType>(scale_dtype, "scale_dtype"),
                                             from_python<DType>(dtype, "dtype"));
        return values_module().attr("QParams")(made.scale, made.zero_point);
      },
      nb::arg("min"), nb::arg("max"), nb::arg("config") = QParamsConfig{}, nb::arg("scale_dtype") = "f32",
      nb::arg("dtype") = "f32",
      nb::sig("def compute_qparams(min: float, max: float, config: QParamsConfig = ..., "
              "scale_dtype: object = 'f32', dtype: object = 'f32') -> QParams"),
      "The (scale, zero_point) of integer codes for a range of values, as all ops compute them. Raises "
      "Error (BAD_INPUT) if the range is not finite, min > max, or scale_dtype cannot hold the scale.\n\n"
      "    >>> halfbyte.compute_qparams(-1, 2, halfbyte.QParamsConfig.of_bits(4, asymmetric=True))\n"
      "    QParams(scale=0.20000000298023224, zero_point=-3)");
  module.def(
      "value_range", &range_of, nb::arg("x"), nb::kw_only(), nb::arg("num_threads") = 0,
      nb::arg("stream") = nb::none(),
      nb::sig("def value_range(x: object, *, num_threads: int = 0, stream: object = None) -> "
              "ValueRange"),
      "The smallest and largest finite value of x (floating, any shape); inf and -inf if there is none.\n\n"
      "    >>> halfbyte.value_range(np.array([1, np.nan, -2], np.float32))\n"
      "    ValueRange(min=-2.0, max=1.0, num_nonfinite=1, first_nonfinite=1)");
}

}  // namespace halfbyte::python
