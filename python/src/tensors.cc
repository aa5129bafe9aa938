// The classes QuantizedTensor and PackedTensor; quantize and dequantize.
#include "tensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <sstream>

#include "halfbyte/error.hpp"
#include "plans.h"

namespace halfbyte::python {
namespace {

struct Part {
  const char* name;
  Tensor QuantizedTensor::*tensor;
};
constexpr Part kParts[] = {{"codes", &QuantizedTensor::codes},
                           {"scales", &QuantizedTensor::scales},
                           {"zeros", &QuantizedTensor::zeros},
                           {"biases", &QuantizedTensor::biases},
                           {"scales_absmax", &QuantizedTensor::scales_absmax},
                           {"scales_map", &QuantizedTensor::scales_map},
                           {"scales_offset", &QuantizedTensor::scales_offset},
                           {"global_scale", &QuantizedTensor::global_scale}};

bool has_part(const QuantizedTensor& q, const Part& part) {
  return (q.*part.tensor).num_elements() > 0 || part.tensor == &QuantizedTensor::codes ||
         part.tensor == &QuantizedTensor::scales;
}

nb::object part_of(const Quantized& self, const Part& part) {
  return has_part(self.tensor, part) ? to_python(self.tensor.*part.tensor, self.home) : nb::none();
}

// Throws Error(usage) for parts that do not fit the spec.
void check_parts(const QuantizedTensor& q) {
  if (!q.spec.double_quant)
    (void)q.view();
  else if (q.device().kind == DeviceKind::cpu)
    (void)q.expanded();
}

double bits_per_weight(const QuantizedTensor& q) {
  const int64_t n = q.rows() * q.cols();
  return n == 0 ? 0 : 8.0 * static_cast<double>(q.num_bytes()) / static_cast<double>(n);
}

// ---- Other devices

Quantized move_to(const Quantized& self, nb::handle device, nb::handle stream) {
  const Device to = from_python<Device>(device, "device");
  if (to == self.tensor.device()) return self;
  const Array home = home_on(self.home, to);
  return to_device(self, to, to_stream(stream, to.kind == DeviceKind::cuda ? home : self.home));
}

// ---- Errors against the dense weight

float from_f16(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16, rest = half & 0x7fffu;
  // The exponent moves by 112; infinities and NaN keep all its bits.
  const float value = std::bit_cast<float>((rest << 13) | (rest >= 0x7c00 ? 0x7f800000u : 0u)) *
                      (rest >= 0x7c00 ? 1.0f : 0x1p112f);
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

double element(const ConstTensorView& x, int64_t i) {
  const auto at = [&]<class T>(T) { return static_cast<const T*>(x.data)[i]; };
  switch (x.dtype) {
    case DType::f64:
      return at(double{});
    case DType::f16:
      return from_f16(at(uint16_t{}));
    case DType::bf16:
      return std::bit_cast<float>(uint32_t{at(uint16_t{})} << 16);
    default:
      return at(float{});
  }
}

// Decodes blocks of rows, so that memory does not grow with the weight. Groups that run across rows are
// decoded at once.
QuantizationError measure(const QuantizedTensor& q, const ConstTensorView& x, int num_threads) {
  constexpr int64_t kBlock = int64_t{1} << 20;
  const QuantizedTensor plain = q.expanded();
  const QuantizedView all = plain.view();
  const QuantShape s = quant_shape(all.spec, all.rows, all.cols);
  const bool flat = all.spec.granularity == Granularity::flat;
  const bool one_scale = all.spec.granularity == Granularity::tensor;
  const int64_t step =
      flat ? std::max<int64_t>(all.rows, 1) : std::max<int64_t>(kBlock / std::max<int64_t>(all.cols, 1), 1);
  const int64_t scale_bytes = size_of(all.spec.scale_dtype);
  const auto from = [](auto* part, int64_t bytes) {
    using T = std::remove_pointer_t<decltype(part)>;
    return part == nullptr ? part
                           : static_cast<T*>(static_cast<void*>(
                                 static_cast<std::byte*>(static_cast<void*>(part)) + bytes));
  };
  const DType dtype = x.dtype == DType::f64 ? DType::f64 : DType::f32;
  QuantizationError result;
  double noise = 0, signal = 0;
  for (int64_t row = 0; row < all.rows; row += step) {
    QuantizedView block = all;
    block.rows = std::min(step, all.rows - row);
    const int64_t groups = one_scale ? 0 : row * s.groups_per_row;
    if (!flat) {
      block.codes = from(all.codes, row * s.row_bytes);
      block.scales = from(all.scales, groups * scale_bytes);
      block.zeros = from(all.zeros, groups);
      block.biases = from(all.biases, groups * scale_bytes);
    }
    const Tensor decoded({}, dtype, {block.rows, all.cols});
    dequantize(block, decoded.view(), {.num_threads = num_threads});
    const ConstTensorView y = decoded.view();
    for (int64_t i = 0, n = block.rows * all.cols; i < n; ++i) {
      const double source = element(x, row * all.cols + i), error = element(y, i) - source;
      noise += error * error;
      signal += source * source;
      if (std::abs(error) > result.max_error) {
        result.max_error = std::abs(error);
        result.max_error_index = row * all.cols + i;
      }
    }
  }
  result.relative_rmse = noise == 0 ? 0 : std::sqrt(noise / signal);
  result.snr_db = -20 * std::log10(result.relative_rmse);
  return result;
}

nb::object to_named(const QuantizationError& error) {
  return values_module().attr("QuantizationError")(error.max_error, error.max_error_index,
                                                   error.relative_rmse, error.snr_db);
}

nb::object error_of(Quantized& self, nb::handle x, int num_threads) {
  const Array given = to_contiguous(x, "x");
  if (!is_floating(given.view.dtype) || given.view.shape != self.tensor.shape) {
    const auto text = [](DType dtype, std::span<const int64_t> shape) {
      return to_string(dtype) + (" " + shape_text(shape));
    };
    const std::string wanted = text(self.tensor.dtype, self.tensor.shape),
                      got = text(given.view.dtype, given.view.shape);
    throw Error(ErrorCode::usage,
                "error: x must be the dense weight, " + wanted + " or another floating dtype, got " + got,
                ErrorDetails{ErrorKind::invalid_argument, "x", wanted, got});
  }
  void* const stream = to_stream(nb::none(), given);
  QuantizationError error;
  {
    const nb::gil_scoped_release release;
    const Tensor host = given.view.device.kind == DeviceKind::cpu
                            ? Tensor::of(given.view, nullptr)
                            : Tensor::copy_of(given.view, stream).to({}, stream);
    error = measure(self.tensor.to({}, stream), host.view(), num_threads);
  }
  self.error = error;
  return to_named(error);
}

// ---- QuantizedTensor

std::string repr(const Quantized& self) {
  const QuantizedTensor& q = self.tensor;
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(4);
  text << "<QuantizedTensor " << to_string(q.spec) << ": shape " << shape_text(q.shape) << " of "
       << to_string(q.dtype) << ", " << bits_per_weight(q) << " bits per weight, "
       << halfbyte::to_string(q.device());
  if (self.error) text << "; " << python::text_of(*self.error);
  text << ">";
  return text.str();
}

// Scales of 8 bits are arrays of bytes in Python.
void as_scales(const QuantSpec& spec, Array& array) {
  if (size_of(spec.scale_dtype) == 1 && array.view.dtype == DType::u8) array.view.dtype = spec.scale_dtype;
}

void make_quantized(Quantized* self, nb::handle spec, nb::handle shape, nb::handle dtype, nb::kwargs parts) {
  QuantizedTensor q;
  from_python(spec, "spec", q.spec);
  from_python(shape, "shape", q.shape);
  from_python(dtype, "dtype", q.dtype);
  check_spec(q.spec);
  std::optional<Array> home;
  for (const auto& [key, value] : parts) {
    const std::string name = nb::cast<std::string>(key);
    if (name == "encoding") {
      from_python(value, "encoding", q.encoding);
      continue;
    }
    const auto* const part =
        std::ranges::find_if(kParts, [&](const Part& each) { return name == each.name; });
    if (part == std::end(kParts)) throw nb::type_error(("QuantizedTensor has no part " + name).c_str());
    if (value.is_none()) continue;
    Array array = to_contiguous(value, part->name);
    if (part->tensor == &QuantizedTensor::scales) as_scales(q.spec, array);
    q.*part->tensor = to_tensor(array);
    // bf16 of ml_dtypes is seen on the parts that have it.
    if (!home || array.view.dtype == DType::bf16) home = home_of(array);
  }
  for (const Part& part : {kParts[0], kParts[1]})
    if (!parts.contains(part.name))
      throw nb::type_error((std::string("QuantizedTensor needs ") + part.name).c_str());
  check_parts(q);
  new (self) Quantized{std::move(q), std::move(*home)};
}

nb::object dequantize_to(const Quantized& self, nb::handle dtype, nb::handle out, int num_threads,
                         nb::handle stream) {
  const DType as = dtype.is_none() ? self.tensor.dtype : from_python<DType>(dtype, "dtype");
  const Output y(out, "out", self.home, as, self.tensor.shape, stream);
  const Execution execution = execution_of(num_threads, stream, self.home);
  {
    const nb::gil_scoped_release release;
    dequantize(self.tensor, y.array.view, execution);
  }
  return y.result();
}

Packed pack(const Quantized& self, int64_t expert, nb::handle out, int num_threads, nb::handle stream) {
  const WeightView from = self.tensor.weight_view(expert);
  Packed packed = empty_packed(from.spec, from.rows, from.cols, self.home, out);
  const Execution execution = execution_of(num_threads, stream, self.home);
  const nb::gil_scoped_release release;
  reorder(from, packed.view(), execution);
  return packed;
}

// The memory of the framework on CUDA devices: one allocator for all.
QuantizedTensor empty_beside_in(const Array& like, const QuantSpec& spec, const TensorView& x) {
  QuantizedTensor q;
  q.spec = spec;
  q.shape = x.shape;
  q.dtype = x.dtype;
  const QuantShape s = quant_shape(spec, q.rows(), q.cols());
  const bool by_rows = spec.granularity == Granularity::group || spec.granularity == Granularity::channel;
  const auto make = [&](DType dtype, const Extents& shape) {
    return to_tensor(to_array(empty_beside(like, dtype, shape), "part", true));
  };
  const Extents groups = by_rows ? Extents{s.rows, s.groups_per_row} : Extents{s.num_groups};
  q.codes = make(DType::u8,
                 spec.granularity == Granularity::flat ? Extents{s.row_bytes} : Extents{s.rows, s.row_bytes});
  Array scales = to_array(empty_beside(like, spec.scale_dtype, groups), "part", true);
  as_scales(spec, scales);
  q.scales = to_tensor(scales);
  if (has_global_scale(spec)) q.global_scale = make(DType::f32, Extents{1});
  if (has_zeros(spec)) q.zeros = make(DType::u8, groups);
  if (has_biases(spec)) q.biases = make(spec.scale_dtype, groups);
  return q;
}

Quantized quantize_array(nb::handle x, nb::handle spec, nb::handle encoding, nb::handle importance,
                         int num_threads, nb::handle stream) {
  const Array array = to_contiguous(x, "x", stream);
  std::optional<Array> weights;
  Importance by;
  if (!importance.is_none()) {
    weights = to_contiguous(importance, "importance", stream);
    const int64_t cols = array.view.shape.empty() ? 1 : array.view.shape.back();
    if (weights->view.dtype != DType::f32 || weights->view.shape != std::vector<int64_t>{cols} ||
        weights->view.device != array.view.device) {
      const std::string wanted = "f32 [" + std::to_string(cols) + "]";
      throw Error(ErrorCode::usage, "importance must be " + wanted + ", on the device of x",
                  ErrorDetails{ErrorKind::invalid_argument, "importance", wanted, {}});
    }
    by = {static_cast<const float*>(weights->view.data), cols, 0};
  }
  const QuantSpec of = from_python<QuantSpec>(spec, "spec");
  const std::optional<Encoding> chosen = from_python<std::optional<Encoding>>(encoding, "encoding");
  const Execution execution = execution_of(num_threads, stream, array);
  Quantized result{{}, home_of(array)};
  const bool on_cuda = array.view.device.kind == DeviceKind::cuda;
  if (!on_cuda || array.framework != Framework::torch || of.double_quant || !is_floating(array.view.dtype)) {
    const nb::gil_scoped_release release;
    result.tensor = quantize(array.view, of, chosen.value_or(Encoding{}), execution, by);
    return result;
  }
  check_spec(of);
  QuantizedTensor& q = result.tensor = empty_beside_in(array, of, array.view);
  q.encoding = chosen.value_or(Encoding{});
  if (!q.encoding->scale_rule) q.encoding->scale_rule = default_scale_rule(of);
  const nb::gil_scoped_release release;
  if (!quantize(array.view, q.view(), *q.encoding, execution, nullptr, by).ok())
    q = quantize(array.view, of, *q.encoding, execution, by);  // throws what there is to say
  return result;
}

void bind_quantized(nb::module_& module) {
  nb::class_<Quantized> quantized(
      module, "QuantizedTensor",
      "A quantized weight: codes and scales as arrays, without a copy.\n\n"
      "    >>> w = np.linspace(-1, 1, 64 * 128, dtype=np.float32).reshape(64, 128)\n"
      "    >>> q = halfbyte.quantize(w, \"nf4\")\n"
      "    >>> q.codes.shape, q.scales.shape\n"
      "    ((64, 64), (64, 2))\n"
      "    >>> q\n"
      "    <QuantizedTensor nf4: shape (64, 128) of f32, 4.5 bits per weight, cpu>\n\n"
      "The matrix [rows, cols] has the leading axes of `shape` folded into rows. Parts in the native "
      "layout:\n"
      "  codes   u8 [rows, bytes of a row]; granularity flat: [bytes]\n"
      "  scales  spec.scale_dtype [rows, groups of a row]; tensor and flat: [groups]; u8 with double "
      "quantization\n"
      "  zeros   u8, like scales: asymmetric integers     biases  like scales: affine formats\n"
      "  scales_absmax f32 [blocks], scales_map f32 [256], scales_offset f32 [1]: double quantization\n"
      "  global_scale f32 [1]: nvfp4, whose scales are bytes (E4M3), as those of mxfp4 (E8M0)\n"
      "Parts have the shapes that they were given with; None: the spec does not have them.");
  quantized.def(
      "__init__",
      [](Quantized* self, nb::handle spec, nb::handle shape, nb::handle dtype, nb::kwargs parts) {
        make_quantized(self, spec, shape, dtype, parts);
      },
      nb::arg("spec"), nb::arg("shape"), nb::arg("dtype") = "f32", nb::arg("parts"),
      nb::sig("def __init__(self, spec: QuantSpec | str, shape: Sequence[int], dtype: object = 'f32', *, "
              "codes: object, scales: object, zeros: object = None, biases: object = None, "
              "scales_absmax: object = None, scales_map: object = None, scales_offset: object = None, "
              "global_scale: object = None, encoding: Encoding | str | None = None) -> None"),
      "Of arrays, whose memory is shared. dtype: of the dense weight (f32, f16, bf16, f64). Raises "
      "ValueError for parts that do not fit the spec, naming them.");
  for (const Part& part : kParts)
    quantized.def_prop_ro(
        part.name, [part](const Quantized& self) { return part_of(self, part); },
        nb::sig((std::string("def ") + part.name + "(self) -> object").c_str()));
  quantized.def_prop_ro("spec", [](const Quantized& self) { return self.tensor.spec; })
      .def_prop_ro(
          "encoding", [](const Quantized& self) { return to_python(self.tensor.encoding); },
          nb::sig("def encoding(self) -> Encoding | None"), "How the codes were chosen, where that is known.")
      .def_prop_ro(
          "shape", [](const Quantized& self) { return to_python(self.tensor.shape); },
          nb::sig("def shape(self) -> tuple[int, ...]"), "Of the dense weight.")
      .def_prop_ro(
          "dtype", [](const Quantized& self) { return to_python(self.tensor.dtype); },
          nb::sig("def dtype(self) -> str"), "Of the dense weight.")
      .def_prop_ro(
          "device", [](const Quantized& self) { return to_python(self.tensor.device()); },
          nb::sig("def device(self) -> str"))
      .def_prop_ro(
          "framework", [](const Quantized& self) { return to_python(self.home.framework); },
          nb::sig("def framework(self) -> str"),
          "That the parts are arrays of: \"numpy\", \"torch\" or, of others, \"dlpack\".")
      .def_prop_ro("rows", [](const Quantized& self) { return self.tensor.rows(); })
      .def_prop_ro("cols", [](const Quantized& self) { return self.tensor.cols(); })
      .def_prop_ro(
          "num_experts", [](const Quantized& self) { return self.tensor.num_experts(); },
          "Matrices: the product of the extents before the last two.")
      .def_prop_ro(
          "num_bytes", [](const Quantized& self) { return self.tensor.num_bytes(); }, "Of all parts.")
      .def_prop_ro("bits_per_weight", [](const Quantized& self) { return bits_per_weight(self.tensor); })
      .def("dequantize", &dequantize_to, nb::arg("dtype") = nb::none(), nb::kw_only(),
           nb::arg("out") = nb::none(), nb::arg("num_threads") = 0, nb::arg("stream") = nb::none(),
           nb::sig("def dequantize(self, dtype: object = None, *, out: object = None, num_threads: int = 0, "
                   "stream: object = None) -> object"),
           "The dense weight, as halfbyte.dequantize gives it.")
      .def(
          "pack",
          [](const Quantized& self, int64_t expert, nb::handle out, int num_threads, nb::handle stream) {
            return pack(self, expert, out, num_threads, stream);
          },
          nb::arg("expert") = 0, nb::kw_only(), nb::arg("out") = nb::none(), nb::arg("num_threads") = 0,
          nb::arg("stream") = nb::none(),
          nb::sig("def pack(self, expert: int = 0, *, out: object = None, num_threads: int = 0, "
                  "stream: object = None) -> PackedTensor"),
          "The form that products read, of the matrix of one expert; a copy. `out`: its memory, u8, "
          "spec.packed_bytes(rows, cols) bytes. Raises ValueError where there is none: f64 scales, groups "
          "that cross rows.\n\n"
          "    >>> q = halfbyte.quantize(np.ones((32, 64), np.float32), \"int4\")\n"
          "    >>> q.pack()\n"
          "    <PackedTensor int4: (32, 64), 5 bits per weight, cpu>")
      .def(
          "expanded",
          [](const Quantized& self, nb::handle stream) {
            void* const handle = to_stream(stream, self.home);
            Quantized result = self;
            const nb::gil_scoped_release release;
            result.tensor = self.tensor.expanded(handle);
            return result;
          },
          nb::arg("stream") = nb::none(),
          nb::sig("def expanded(self, stream: object = None) -> QuantizedTensor"),
          "The same weight without double quantization: its scales are f32. Waits for the stream.")
      .def(
          "slice",
          [](const Quantized& self, int axis, int64_t begin, int64_t end, nb::handle stream) {
            void* const handle = to_stream(stream, self.home);
            Quantized result{{}, self.home};
            const nb::gil_scoped_release release;
            result.tensor = self.tensor.slice({axis, begin, end}, handle);
            return result;
          },
          nb::arg("axis"), nb::arg("begin"), nb::arg("end"), nb::arg("stream") = nb::none(),
          nb::sig("def slice(self, axis: int, begin: int, end: int, stream: object = None) -> "
                  "QuantizedTensor"),
          "Elements [begin, end) along an axis of the shape, in memory of their own: codes and scales as "
          "they are. Raises ValueError, naming the reason, where it does not begin or end between groups, "
          "between bytes of codes, or where a block of scales begins (double quantization). Waits for the "
          "stream.\n\n"
          "    >>> q = halfbyte.quantize(np.eye(4, 256, dtype=np.float32), \"nf4\")\n"
          "    >>> q.slice(1, 64, 256).shape, q.slice(0, 1, 2).dequantize().sum()\n"
          "    ((4, 192), np.float32(1.0))")
      .def("to", &move_to, nb::arg("device"), nb::arg("stream") = nb::none(),
           nb::sig("def to(self, device: object, stream: object = None) -> QuantizedTensor"),
           "The same weight on another device: \"cpu\", \"cuda\", \"cuda:1\". Waits for the stream.")
      .def(
          "as_framework",
          [](const Quantized& self, nb::handle framework) {
            return Quantized{self.tensor,
                             home_of(from_python<Framework>(framework, "framework"), self.tensor.device()),
                             self.error};
          },
          nb::arg("framework"), nb::sig("def as_framework(self, framework: str) -> QuantizedTensor"),
          "The same memory, with parts that are arrays of \"numpy\", \"torch\" or \"dlpack\".")
      .def("error", &error_of, nb::arg("x"), nb::arg("num_threads") = 0,
           nb::sig("def error(self, x: object, num_threads: int = 0) -> QuantizationError"),
           "The error against the dense weight x, of any floating dtype: max_error, max_error_index, "
           "relative_rmse = sqrt(sum (y - x)^2 / sum x^2) and snr_db = -20 log10(relative_rmse). It costs "
           "decoding, on the CPU, by blocks; `repr` shows it from then on.\n\n"
           "    >>> x = np.array([[-1.0, 0.25, 0.0, 1.0]], np.float32)\n"
           "    >>> q = halfbyte.quantize(x, \"nf4\")\n"
           "    >>> round(q.error(x).relative_rmse, 4)\n"
           "    0.0027\n"
           "    >>> q\n"
           "    <QuantizedTensor nf4: shape (1, 4) of f32, 12 bits per weight, cpu; relative RMSE 0.002707, "
           "SNR 51.35 dB>")
      .def("__repr__", &repr)
      .def("__reduce__", [](const Quantized& self) {
        nb::dict parts;
        const Quantized host = self.home.framework == Framework::torch
                                   ? self
                                   : to_device(self, {}, to_stream(nb::none(), self.home));
        for (const Part& part : kParts)
          if (has_part(host.tensor, part)) parts[part.name] = part_of(host, part);
        if (host.tensor.encoding) parts["encoding"] = to_python(host.tensor.encoding);
        return nb::make_tuple(values_module().attr("rebuild_quantized"),
                              nb::make_tuple(host.tensor.spec, to_python(host.tensor.shape),
                                             to_python(host.tensor.dtype), parts));
      });
}

// ---- PackedTensor

// A part of a weight in a layout: bytes, and the array that it is given as.
struct ViewPart {
  const char* name;
  void* WeightView::*data;
  float* WeightView::*floats = nullptr;  // instead of data
  int64_t num_bytes;
  DType dtype;
  Extents shape = {};
};

std::vector<ViewPart> view_parts(const QuantSpec& spec, int64_t rows, int64_t cols, Layout layout) {
  const WeightViewBytes bytes = weight_view_bytes(spec, rows, cols, layout);
  const QuantShape s = quant_shape(spec, rows, cols);
  const bool by_rows = spec.granularity == Granularity::group || spec.granularity == Granularity::channel;
  const bool words = layout == Layout::compressed_tensors || layout == Layout::mlx;
  const DType word = layout == Layout::mlx ? DType::u32 : DType::i32;
  const DType scale = spec.double_quant || size_of(spec.scale_dtype) == 1 ? DType::u8 : spec.scale_dtype;
  std::vector<ViewPart> parts = {
      {"codes", &WeightView::codes, nullptr, bytes.codes, words ? word : DType::u8},
      {"scales", &WeightView::scales, nullptr, bytes.scales, scale},
      {"zeros", &WeightView::zeros, nullptr, bytes.zeros,
       layout == Layout::compressed_tensors ? word : DType::u8},
      {"biases", &WeightView::biases, nullptr, bytes.biases, spec.scale_dtype},
      {"absmax", nullptr, &WeightView::absmax, bytes.absmax, DType::f32},
      {"map", nullptr, &WeightView::map, bytes.map, DType::f32},
      {"offset", nullptr, &WeightView::offset, bytes.offset, DType::f32},
      {"global_scale", nullptr, &WeightView::global_scale, bytes.global_scale, DType::f32}};
  for (ViewPart& part : parts) {
    const int64_t length = part.num_bytes / size_of(part.dtype);
    const std::string_view name = part.name;
    part.shape = {length};
    if (part.data == nullptr || length == 0) continue;
    if (name == "codes" && layout == Layout::bitsandbytes)
      part.shape = {length, 1};
    else if (name == "codes" && by_rows && length % s.rows == 0)
      part.shape = {s.rows, length / s.rows};
    else if (name != "codes" && by_rows && length % s.groups_per_row == 0)
      part.shape = {length / s.groups_per_row, s.groups_per_row};
  }
  return parts;
}

nb::object unpack(const Packed& self, nb::handle layout_word, nb::handle dtype, int num_threads,
                  nb::handle stream) {
  const Layout layout = from_python<Layout>(layout_word, "layout");
  const PackedWeight& w = self.view();
  const Execution execution = execution_of(num_threads, stream, self.home);
  if (layout == Layout::halfbyte) {
    const DType of = from_python<DType>(dtype, "dtype");
    Quantized result{{}, self.home};
    {
      const nb::gil_scoped_release release;
      result.tensor = QuantizedTensor(w.spec, {w.rows, w.cols}, of, w.device);
      reorder(w, result.tensor.weight_view(), execution);
    }
    return nb::cast(std::move(result));
  }
  WeightView view{w.spec, w.rows, w.cols, layout};
  view.device = w.device;
  nb::dict arrays;
  std::vector<Output> outputs;
  for (const ViewPart& part : view_parts(w.spec, w.rows, w.cols, layout)) {
    if (part.num_bytes == 0) continue;
    void* const data =
        outputs.emplace_back(nb::none(), part.name, self.home, part.dtype, part.shape).array.view.data;
    if (part.data != nullptr)
      view.*part.data = data;
    else
      view.*part.floats = static_cast<float*>(data);
  }
  {
    const nb::gil_scoped_release release;
    reorder(w, view, execution);
  }
  size_t next = 0;
  for (const ViewPart& part : view_parts(w.spec, w.rows, w.cols, layout))
    if (part.num_bytes > 0) arrays[part.name] = outputs[next++].result();
  return arrays;
}

Packed reorder_arrays(nb::handle spec_text, int64_t rows, int64_t cols, nb::handle layout_word,
                      nb::handle out, int num_threads, nb::handle stream, const nb::kwargs& given) {
  const QuantSpec spec = from_python<QuantSpec>(spec_text, "spec");
  const Layout layout = from_python<Layout>(layout_word, "layout");
  check_spec(spec);
  WeightView view{spec, rows, cols, layout};
  std::vector<Array> arrays;
  std::vector<ViewPart> parts = view_parts(spec, rows, cols, layout);
  for (const auto& [key, value] : given) {
    const std::string name = nb::cast<std::string>(key);
    const auto part = std::ranges::find_if(parts, [&](const ViewPart& each) { return name == each.name; });
    if (part == parts.end()) throw nb::type_error(("reorder has no part " + name).c_str());
    if (value.is_none()) continue;
    const Array& array = arrays.emplace_back(to_array(value, part->name, false, stream));
    view.device = arrays.front().view.device;
    const bool any_word = name == "codes" || name == "zeros";
    void* const data =
        part_data(array, part->name, any_word ? array.view.dtype : part->dtype, part->num_bytes, view.device);
    if (part->data != nullptr)
      view.*part->data = data;
    else
      view.*part->floats = static_cast<float*>(data);
  }
  if (arrays.empty()) throw nb::type_error("reorder needs codes and scales");
  const Array home = home_of(arrays.front());
  Packed packed = empty_packed(spec, rows, cols, home, out);
  const Execution execution = execution_of(num_threads, stream, home);
  const nb::gil_scoped_release release;
  reorder(view, packed.view(), execution);
  return packed;
}

using Concat = void (*)(std::span<const ConstPackedWeight> weights, const PackedWeight& to, void* stream);

// Packed weights, joined along the extent `joined`.
Packed concat_packed(nb::handle weights, nb::handle stream, int64_t PackedWeight::*joined, Concat concat) {
  if (!nb::isinstance<nb::sequence>(weights) || nb::isinstance<nb::str>(weights))
    wrong_type("weights", "a list of PackedTensor", weights);
  std::vector<Packed> given;
  std::vector<ConstPackedWeight> views;
  PackedWeight whole;
  for (const nb::handle each : nb::borrow<nb::sequence>(weights)) {
    if (!nb::isinstance<Packed>(each))
      wrong_type("weights[" + std::to_string(given.size()) + "]", "a PackedTensor", each);
    given.push_back(nb::cast<const Packed&>(each));
    const PackedWeight& weight = given.back().view();
    const int64_t before = views.empty() ? 0 : whole.*joined;
    if (views.empty()) whole = weight;
    whole.*joined = before + weight.*joined;
    views.push_back(weight);
  }
  if (given.empty())
    throw Error(ErrorCode::usage, "weights must have at least one weight, got none",
                ErrorDetails{ErrorKind::invalid_argument, "weights", "at least one weight", "none"});
  const Packed& first = given.front();
  Packed packed = empty_packed(whole.spec, whole.rows, whole.cols, first.home, nb::none());
  void* const handle = to_stream(stream, first.home);
  const nb::gil_scoped_release release;
  concat(views, packed.view(), handle);
  return packed;
}
Packed concat_rows_of(nb::handle weights, nb::handle stream) {
  return concat_packed(weights, stream, &PackedWeight::rows, &concat_rows);
}
Packed concat_cols_of(nb::handle weights, nb::handle stream) {
  return concat_packed(weights, stream, &PackedWeight::cols, &concat_cols);
}

Packed slice_packed(const Packed& self, int axis, int64_t begin, int64_t end, nb::handle stream) {
  const PackedWeight& weight = self.view();
  // What is no slice, the library says.
  const int64_t most = axis == 0 ? weight.rows : weight.cols;
  const int64_t extent = begin >= 0 && begin <= end && end <= most ? end - begin : 0;
  Packed packed = empty_packed(weight.spec, axis == 0 ? extent : weight.rows,
                               axis == 1 ? extent : weight.cols, self.home, nb::none());
  void* const handle = to_stream(stream, self.home);
  const nb::gil_scoped_release release;
  copy_slice(weight, {axis, begin, end}, packed.view(), handle);
  return packed;
}

void bind_packed(nb::module_& module) {
  nb::class_<PackedTensor>(module, "_PackedTensor", "What functions of the library read of a PackedTensor.");
  nb::class_<Packed, PackedTensor>(
      module, "PackedTensor",
      "A quantized matrix [rows, cols] in the form that products read: one piece of memory, whose content "
      "is opaque, in place of the parts of a QuantizedTensor.\n\n"
      "    >>> q = halfbyte.quantize(np.ones((32, 64), np.float32), \"int4,scale_dtype=f16\")\n"
      "    >>> packed = q.pack()\n"
      "    >>> packed.data.dtype, packed.data.size == q.spec.packed_bytes(32, 64)\n"
      "    (dtype('uint8'), True)\n"
      "    >>> bool((packed.unpack().codes == q.codes).all())\n"
      "    True")
      .def_static(
          "of",
          [](nb::handle spec, int64_t rows, int64_t cols, nb::handle data) {
            const QuantSpec of = from_python<QuantSpec>(spec, "spec");
            const Array array = to_array(data, "data");
            return Packed{PackedTensor::of(of, rows, cols, to_tensor(array)), home_of(array)};
          },
          nb::arg("spec"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"),
          nb::sig("def of(spec: QuantSpec | str, rows: int, cols: int, data: object) -> PackedTensor"),
          "The packed weight that an array of bytes holds, which is shared: u8 of any shape, contiguous, at "
          "least spec.packed_bytes(rows, cols), at a multiple of 64 bytes (256 on CUDA devices). Raises "
          "ValueError otherwise.")
      .def_static(
          "copy_of",
          [](nb::handle spec, int64_t rows, int64_t cols, nb::handle data) {
            const QuantSpec of = from_python<QuantSpec>(spec, "spec");
            const Array array = to_array(data, "data");
            void* const stream = to_stream(nb::none(), array);
            const Packed packed = empty_packed(of, rows, cols, home_of(array), nb::none());
            const PackedWeight& w = packed.view();
            const void* const from = part_data(array, "data", DType::u8, w.num_bytes, w.device);
            copy(w.device, w.data, from, w.num_bytes, stream);
            return packed;
          },
          nb::arg("spec"), nb::arg("rows"), nb::arg("cols"), nb::arg("data"),
          nb::sig("def copy_of(spec: QuantSpec | str, rows: int, cols: int, data: object) -> PackedTensor"),
          "The same of bytes that lie anywhere, which are copied.")
      .def(
          "slice", &slice_packed, nb::arg("axis"), nb::arg("begin"), nb::arg("end"), nb::kw_only(),
          nb::arg("stream") = nb::none(),
          nb::sig("def slice(self, axis: int, begin: int, end: int, *, stream: object = None) -> "
                  "PackedTensor"),
          "Rows (axis 0) or columns (axis 1) begin to end, a copy, as they are to the bit. Rows are cut at "
          "multiples of 32, columns between groups and at multiples of 64 and of the length of a group up to "
          "256. On CUDA devices it is enqueued on the stream. Raises ValueError, naming the reason, for "
          "other "
          "slices, with double quantization, and where so few columns are stored in another form.")
      .def_prop_ro(
          "data", [](const Packed& self) { return to_python(memory_of(self), self.home); },
          nb::sig("def data(self) -> object"), "u8 [num_bytes], without a copy.")
      .def_prop_ro("spec", [](const Packed& self) { return self.view().spec; })
      .def_prop_ro("rows", [](const Packed& self) { return self.view().rows; })
      .def_prop_ro("cols", [](const Packed& self) { return self.view().cols; })
      .def_prop_ro("num_bytes", [](const Packed& self) { return self.view().num_bytes; })
      .def_prop_ro(
          "device", [](const Packed& self) { return to_python(self.view().device); },
          nb::sig("def device(self) -> str"))
      .def_prop_ro(
          "framework", [](const Packed& self) { return to_python(self.home.framework); },
          nb::sig("def framework(self) -> str"))
      .def("unpack", &unpack, nb::arg("layout") = "halfbyte", nb::arg("dtype") = "f32", nb::kw_only(),
           nb::arg("num_threads") = 0, nb::arg("stream") = nb::none(),
           nb::sig("def unpack(self, layout: str = 'halfbyte', dtype: object = 'f32', *, "
                   "num_threads: int = 0, stream: object = None) -> QuantizedTensor | dict[str, object]"),
           "The parts again, a copy: a QuantizedTensor, of a dense weight of `dtype`; in another layout "
           "(bitsandbytes, compressed-tensors, mlx) a dict of the arrays that its files have: codes, scales, "
           "zeros, biases, and with double quantization absmax, map, offset. Of any spec that it can pack, "
           "also of one that files in it do not have. Raises ValueError for others.")
      .def(
          "to",
          [](const Packed& self, nb::handle device, nb::handle stream) {
            const Device to = from_python<Device>(device, "device");
            if (to == self.view().device) return self;
            const Array home = home_on(self.home, to);
            void* const handle = to_stream(stream, to.kind == DeviceKind::cuda ? home : self.home);
            const PackedWeight& w = self.view();
            return Packed{
                PackedTensor::of(w.spec, w.rows, w.cols, moved(memory_of(self), self.home, to, handle)),
                home};
          },
          nb::arg("device"), nb::arg("stream") = nb::none(),
          nb::sig("def to(self, device: object, stream: object = None) -> PackedTensor"),
          "The same weight on another device. Waits for the stream.")
      .def("__repr__",
           [](const Packed& self) {
             const PackedWeight& w = self.view();
             const double n = static_cast<double>(w.rows) * static_cast<double>(w.cols);
             std::ostringstream text;
             text.imbue(std::locale::classic());
             text.precision(4);
             text << "<PackedTensor " << to_string(w.spec) << ": " << shape_text(std::array{w.rows, w.cols})
                  << ", " << (n == 0 ? 0 : 8 * static_cast<double>(w.num_bytes) / n) << " bits per weight, "
                  << halfbyte::to_string(w.device) << ">";
             return text.str();
           })
      .def("__reduce__", [](const Packed& self) {
        const PackedWeight& w = self.view();
        const bool as_it_is = self.home.framework == Framework::torch;
        const Tensor bytes = as_it_is ? memory_of(self) : memory_of(self).to({});
        const Array home = as_it_is ? self.home : home_on(self.home, {});
        return nb::make_tuple(values_module().attr("rebuild_packed"),
                              nb::make_tuple(w.spec, w.rows, w.cols, to_python(bytes, home)));
      });
}

}  // namespace

const Quantized& to_quantized(nb::handle object, const char* name) {
  if (!nb::isinstance<Quantized>(object)) wrong_type(name, "a QuantizedTensor", object);
  return nb::cast<const Quantized&>(object);
}

Execution execution_of(int num_threads, nb::handle stream, const Array& like) {
  return {num_threads, to_stream(stream, like)};
}

Packed empty_packed(const QuantSpec& spec, int64_t rows, int64_t cols, const Array& like, nb::handle out,
                    int64_t count) {
  const int64_t num_bytes = count * packed_weight_bytes(spec, rows, cols);
  const bool by_framework = like.framework == Framework::torch && like.view.device.kind == DeviceKind::cuda;
  if (out.is_none() && !by_framework)
    return {PackedTensor::of(spec, rows, cols, Tensor(like.view.device, DType::u8, {num_bytes})), like};
  const nb::object made =
      out.is_none() ? empty_beside(like, DType::u8, std::array{num_bytes}) : nb::borrow(out);
  const Array array = to_array(made, "out", true);
  return {PackedTensor::of(spec, rows, cols, to_tensor(array)), home_of(array)};
}

nb::object values_module() { return nb::module_::import_("halfbyte._values"); }

std::string shape_text(std::span<const int64_t> shape) {
  return nb::cast<std::string>(nb::repr(to_python(shape)));
}

Tensor moved(const Tensor& part, const Array& home, Device device, void* stream) {
  if (part.num_bytes() == 0 || home.framework != Framework::torch || part.device() == device)
    return part.to(device, stream);
  const nb::object array = to_python(part, home).attr("to")(halfbyte::to_string(device));
  return to_tensor(to_array(array, "part"));
}

Array home_on(const Array& home, Device device) {
  if (home.view.device == device) return home;
  const bool from_cuda = home.framework == Framework::other && device.kind == DeviceKind::cpu;
  return home_of(from_cuda ? Framework::numpy : home.framework, device);
}

Tensor memory_of(const Packed& self) {
  const PackedWeight& w = self.view();
  const TensorView view{w.data, DType::u8, {w.num_bytes}, {}, w.device, w.num_bytes};
  return Tensor::of(view, std::make_shared<PackedTensor>(self));
}

Quantized to_device(const Quantized& q, Device device, void* stream) {
  if (device == q.tensor.device()) return q;
  Quantized result{q.tensor, home_on(q.home, device), q.error};
  for (const Part& part : kParts)
    if (has_part(q.tensor, part))
      result.tensor.*part.tensor = moved(q.tensor.*part.tensor, q.home, device, stream);
  return result;
}

std::string text_of(const QuantizationError& error) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(4);
  text << "relative RMSE " << error.relative_rmse << ", SNR " << error.snr_db << " dB";
  return text.str();
}

void bind_tensors(nb::module_& module) {
  bind_packed(module);
  bind_quantized(module);
  module.def(
      "quantize", &quantize_array, nb::arg("x"), nb::arg("spec") = "nf4", nb::kw_only(),
      nb::arg("encoding") = nb::none(), nb::arg("importance") = nb::none(), nb::arg("num_threads") = 0,
      nb::arg("stream") = nb::none(),
      nb::sig("def quantize(x: object, spec: QuantSpec | str = 'nf4', *, encoding: Encoding | str | None "
              "= None, importance: object = None, num_threads: int = 0, stream: object = None) -> "
              "QuantizedTensor"),
      "Quantizes x [..., cols] (f32, f16, bf16, f64) on its device; a strided x is copied first.\n\n"
      "    >>> x = np.array([[-1.0, 0.25, 0.0, 1.0]], np.float32)\n"
      "    >>> q = halfbyte.quantize(x, \"int4,group_size=2\")\n"
      "    >>> q.dequantize()\n"
      "    array([[-1.       ,  0.2857143,  0.       ,  1.       ]], dtype=float32)\n\n"
      "spec: a QuantSpec or its text: the format (nf4, int4, affine4, ...), then group_size=, "
      "scale_dtype=, granularity=, asymmetric, double_quant. encoding: how codes are chosen, an "
      "Encoding or a rule: \"half-range\"; Encoding(search=True) finds the scales of least squared error. "
      "importance: then f32 [cols], how much the error of each column counts. num_threads: of the CPU; 0: "
      "all. stream: of CUDA arrays; "
      "None: the current one of their framework. Waits for it. Raises Error (BAD_INPUT) if x is not "
      "finite or spec.scale_dtype cannot hold a scale, ValueError for bad arguments.");
  module.def(
      "dequantize",
      [](nb::handle q, nb::handle dtype, nb::handle out, int num_threads, nb::handle stream) {
        return dequantize_to(to_quantized(q, "q"), dtype, out, num_threads, stream);
      },
      nb::arg("q"), nb::arg("dtype") = nb::none(), nb::kw_only(), nb::arg("out") = nb::none(),
      nb::arg("num_threads") = 0, nb::arg("stream") = nb::none(),
      nb::sig("def dequantize(q: QuantizedTensor, dtype: object = None, *, out: object = None, "
              "num_threads: int = 0, stream: object = None) -> object"),
      "The dense weight of shape q.shape and of `dtype` (f32, f16, bf16, f64; None: q.dtype), a new array, "
      "or "
      "`out`, whose dtype then counts. On CUDA devices it is enqueued on the stream.\n\n"
      "    >>> q = halfbyte.quantize(np.eye(2, dtype=np.float32), \"int8\")\n"
      "    >>> halfbyte.dequantize(q, \"f16\")\n"
      "    array([[1., 0.],\n"
      "           [0., 1.]], dtype=float16)");
  module.def(
      "reorder",
      [](nb::handle spec, int64_t rows, int64_t cols, nb::handle layout, nb::handle out, int num_threads,
         nb::handle stream, nb::kwargs parts) {
        return reorder_arrays(spec, rows, cols, layout, out, num_threads, stream, parts);
      },
      nb::arg("spec"), nb::arg("rows"), nb::arg("cols"), nb::arg("layout") = "halfbyte", nb::kw_only(),
      nb::arg("out") = nb::none(), nb::arg("num_threads") = 0, nb::arg("stream") = nb::none(),
      nb::arg("parts"),
      nb::sig("def reorder(spec: QuantSpec | str, rows: int, cols: int, layout: str = 'halfbyte', *, "
              "out: object = None, num_threads: int = 0, stream: object = None, codes: object, "
              "scales: object, zeros: object = None, biases: object = None, absmax: object = None, "
              "map: object = None, offset: object = None, global_scale: object = None) -> PackedTensor"),
      "The packed form of the tensors that a layout has of a weight [rows, cols]: halfbyte, bitsandbytes, "
      "compressed-tensors or mlx. Codes and zeros: contiguous, any dtype, counted in bytes; scales and "
      "biases: spec.scale_dtype (u8 with double quantization); absmax, map, offset, global_scale: f32, on "
      "the device. "
      "`out`: the memory of the result. Exact. Raises ValueError naming the part.\n\n"
      "    >>> q = halfbyte.quantize(np.ones((32, 64), np.float32), \"affine4\")\n"
      "    >>> mlx = q.pack().unpack(\"mlx\")\n"
      "    >>> sorted(mlx), mlx[\"codes\"].shape, mlx[\"codes\"].dtype\n"
      "    (['biases', 'codes', 'scales'], (32, 8), dtype('uint32'))\n"
      "    >>> halfbyte.reorder(q.spec, 32, 64, \"mlx\", **mlx)\n"
      "    <PackedTensor affine4: (32, 64), 5 bits per weight, cpu>");
  module.def(
      "concat_rows", &concat_rows_of, nb::arg("weights"), nb::kw_only(), nb::arg("stream") = nb::none(),
      nb::sig("def concat_rows(weights: Sequence[PackedTensor], *, stream: object = None) -> PackedTensor"),
      "The rows of all weights, one behind the other, as one weight, a copy: products of the same x with "
      "several weights (queries, keys and values; gate and up) are then one, and the columns of its y those "
      "of each. The weights have one spec, the same columns and device, and but for the last a multiple of "
      "32 "
      "rows; their scales are not double quantized, and not one for the whole tensor, and a global scale is "
      "the same for all. Exact; on CUDA devices it is enqueued on the stream. Raises ValueError naming the "
      "weight that does not fit.\n\n"
      "    >>> q = halfbyte.quantize(np.eye(96, 64, dtype=np.float32), \"int8\")\n"
      "    >>> k = halfbyte.quantize(np.ones((32, 64), np.float32), \"int8\")\n"
      "    >>> both = halfbyte.concat_rows([q.pack(), k.pack()])\n"
      "    >>> both.rows, halfbyte.qgemm(np.ones((1, 64), np.float32), both).shape\n"
      "    (128, (1, 128))");
  module.def(
      "concat_cols", &concat_cols_of, nb::arg("weights"), nb::kw_only(), nb::arg("stream") = nb::none(),
      nb::sig("def concat_cols(weights: Sequence[PackedTensor], *, stream: object = None) -> PackedTensor"),
      "The columns of all weights, one behind the other, as one weight, a copy: PackedTensor.slice of axis 1 "
      "undone. The weights have one spec, the same rows and device, and but for the last columns that slice "
      "cuts at; otherwise as concat_rows.\n\n"
      "    >>> q = halfbyte.quantize(np.eye(96, 256, dtype=np.float32), \"int8\").pack()\n"
      "    >>> halfbyte.concat_cols([q.slice(1, 0, 64), q.slice(1, 64, 256)]).cols\n"
      "    256");
}

}  // namespace halfbyte::python
