// Checkpoints: read, quantized, converted, compared, checked, mended and written.
#include "halfbyte/checkpoint.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <sstream>

#include "halfbyte/error.hpp"
#include "halfbyte/verify.hpp"
#include "tensors.h"

namespace halfbyte::python {
namespace {

std::string to_path(nb::handle object) {
  const nb::object path = nb::module_::import_("os").attr("fsencode")(object);  // str, bytes, os.PathLike
  return {nb::cast<nb::bytes>(path).c_str(), nb::cast<nb::bytes>(path).size()};
}

// ---- Progress

// What Python is asked during long work, and what it raised there. The library destroys copies of functions
// that hold it without the GIL.
struct Callbacks {
  nb::object progress;  // None: nobody asks
  bool is_bar = false;
  std::exception_ptr error;
  std::chrono::steady_clock::time_point next_look = {};  // for signals, where nobody asks

  explicit Callbacks(nb::handle given) {
    if (given.is_none() || given.is(nb::bool_(false))) {
      progress = nb::none();
    } else if (given.is(nb::bool_(true))) {
      progress = nb::module_::import_("halfbyte._progress").attr("Bar")();
      is_bar = true;
    } else if (PyCallable_Check(given.ptr())) {
      progress = nb::borrow(given);
    } else {
      wrong_type("progress", "a function of (phase, done_bytes, total_bytes), or True for a bar", given);
    }
  }
  Callbacks(const Callbacks&) = delete;
  Callbacks& operator=(const Callbacks&) = delete;
  ~Callbacks() {
    if (!nb::is_alive()) {
      progress.release();
      return;
    }
    const nb::gil_scoped_acquire gil;
    progress.reset();
    error = nullptr;
  }
  bool report(const Progress& at) {
    if (progress.is_none()) {
      const auto now = std::chrono::steady_clock::now();
      if (now < next_look) return true;
      next_look = now + std::chrono::milliseconds(50);
    }
    const nb::gil_scoped_acquire gil;
    if (error) return false;
    try {
      if (PyErr_CheckSignals() != 0) nb::raise_python_error();
      if (progress.is_none()) return true;
      const nb::object answer = progress(at.phase, at.done_bytes, at.total_bytes);
      return !answer.is(nb::bool_(false));
    } catch (...) {
      error = std::current_exception();
      return false;
    }
  }
  void close() {
    if (is_bar) progress.attr("close")();
  }
};

ProgressFunction progress_of(const std::shared_ptr<Callbacks>& callbacks) {
  return [callbacks](const Progress& at) { return callbacks->report(at); };
}

// Without the GIL. What a callback raised goes before the error that the work ended with for that.
template <class Work>
auto run_work(const std::shared_ptr<Callbacks>& callbacks, Work work) {
  try {
    auto result = [&] {
      const nb::gil_scoped_release release;
      return work();
    }();
    callbacks->close();
    return result;
  } catch (...) {
    callbacks->close();
    if (callbacks->error) std::rethrow_exception(callbacks->error);
    throw;
  }
}

// ---- Options by name

template <class Options>
class OptionRows {
 public:
  template <class Member>
  OptionRows& operator()(const char* name, Member Options::*member) {
    rows_.push_back(
        {name, [member, name](Options& to, nb::handle value) { from_python(value, name, to.*member); }});
    return *this;
  }
  void set(const char* function, Options& to, const nb::kwargs& given) const {
    for (const auto& [key, value] : given) {
      const std::string name = nb::cast<std::string>(key);
      const auto row = std::ranges::find_if(rows_, [&](const Row& each) { return name == each.name; });
      if (row == rows_.end()) {
        std::string known;
        for (const Row& each : rows_) known += (known.empty() ? "" : ", ") + std::string(each.name);
        throw nb::type_error(
            (std::string(function) + " has no option " + name + "; it has " + known).c_str());
      }
      row->set(to, value);
    }
  }

 private:
  struct Row {
    const char* name;
    std::function<void(Options& to, nb::handle value)> set;
  };
  std::vector<Row> rows_;
};

// ---- Reading

struct Place {
  Device device;
  Array home;
};

// Arrays of PyTorch where its device is given, else of NumPy, unless a framework is asked for.
Place place_of(nb::handle device, nb::handle framework) {
  const Device on = from_python<Device>(device, "device");
  Framework of = nb::isinstance<nb::str>(device) ? Framework::numpy : Framework::torch;
  if (!framework.is_none()) from_python(framework, "framework", of);
  return {on, home_of(of, on)};
}

const Weight& weight_named(const Checkpoint& self, nb::handle name) {
  const std::string word = nb::isinstance<Weight>(name) ? nb::cast<const Weight&>(name).name
                                                        : from_python<std::string>(name, "name");
  const Weight* const found = self.find(word);
  if (found == nullptr)
    throw Error(ErrorCode::usage, "the checkpoint has no weight \"" + word + "\"",
                ErrorDetails{ErrorKind::invalid_argument, "name", {}, word});
  return *found;
}

std::optional<Slice> slice_given(nb::handle given) {
  if (given.is_none()) return std::nullopt;
  std::tuple<int, int64_t, int64_t> values;
  if (!nb::try_cast(given, values)) wrong_type("slice", "None or (axis, begin, end)", given);
  const auto [axis, begin, end] = values;
  return Slice{axis, begin, end};
}

Quantized load(const Checkpoint& self, nb::handle name, nb::handle device, nb::handle framework,
               int num_threads, nb::handle stream, nb::handle slice) {
  const Weight& weight = weight_named(self, name);
  const std::optional<Slice> part = slice_given(slice);
  Place place = place_of(device, framework);
  void* const handle = to_stream(stream, place.home);
  // PyTorch allocates what it has on CUDA devices.
  const bool by_torch = place.home.framework == Framework::torch && place.device.kind == DeviceKind::cuda;
  Quantized result{{}, by_torch ? home_of(Framework::torch, {}) : std::move(place.home)};
  {
    const nb::gil_scoped_release release;
    result.tensor =
        load_weight(self, weight.name, by_torch ? Device{} : place.device, {num_threads, handle}, part);
  }
  return by_torch ? to_device(result, place.device, handle) : result;
}

nb::object decode(const Checkpoint& self, nb::handle name, nb::handle dtype, int64_t begin,
                  nb::handle count_given, nb::handle out) {
  const Weight& weight = weight_named(self, name);
  const int64_t all = num_elements(weight.shape);
  const bool whole = count_given.is_none() && begin == 0;
  const int64_t count = count_given.is_none() ? all - begin : from_python<int64_t>(count_given, "count");
  if (begin < 0 || count < 0 || begin > all || count > all - begin)
    throw Error(ErrorCode::usage,
                "decode: elements " + std::to_string(begin) + " to " + std::to_string(begin + count) +
                    " are not in weight \"" + weight.name + "\", which has " + std::to_string(all),
                ErrorDetails{ErrorKind::invalid_argument, "count", {}, std::to_string(count)});
  const std::vector<int64_t> shape = whole ? weight.shape : std::vector<int64_t>{count};
  const Output y(out, "out", home_of(Framework::numpy, {}), from_python<DType>(dtype, "dtype"), shape);
  const TensorView& view = y.array.view;
  if (!is_contiguous(view) || num_elements(view) != count || view.device.kind != DeviceKind::cpu)
    throw Error(ErrorCode::usage,
                "decode: out must be " + std::to_string(count) + " contiguous elements in host memory, got " +
                    std::to_string(num_elements(view)),
                ErrorDetails{ErrorKind::invalid_argument, "out", std::to_string(count),
                             std::to_string(num_elements(view))});
  {
    const nb::gil_scoped_release release;
    self.decode(weight, begin, count, view.dtype, view.data);
  }
  return y.result();
}

nb::object load_dense(const Checkpoint& self, nb::handle name, nb::handle dtype, nb::handle device,
                      nb::handle framework) {
  const Weight& weight = weight_named(self, name);
  std::optional<DType> as = weight.dtype;
  if (!dtype.is_none()) from_python(dtype, "dtype", as.emplace());
  const StoredTensor& stored = self.tensors()[static_cast<size_t>(weight.parts.front())];
  if (!as)
    throw Error(ErrorCode::usage,
                "load_dense: weight \"" + weight.name + "\" is stored as " + stored.dtype +
                    ", which is no dtype of halfbyte: read its bytes",
                ErrorDetails{ErrorKind::invalid_argument, "dtype", {}, stored.dtype});
  const Place place = place_of(device, framework);
  const Array host_home =
      place.device.kind == DeviceKind::cpu ? place.home : home_of(place.home.framework, {});
  const Output y(nb::none(), "out", host_home, *as, weight.shape);
  void* const stream = to_stream(nb::none(), place.home);
  {
    const nb::gil_scoped_release release;
    const int64_t num_bytes = contiguous_bytes(*as, weight.shape);
    auto* const data = static_cast<std::byte*>(y.array.view.data);
    if (!weight.layout && weight.dtype == as)
      self.read(stored, 0, {data, static_cast<size_t>(num_bytes)});
    else
      self.decode(weight, 0, num_elements(weight.shape), *as, data);
  }
  if (place.device.kind == DeviceKind::cpu) return y.result();
  if (place.home.framework == Framework::torch)
    return y.result().attr("to")(halfbyte::to_string(place.device));
  return to_python(to_tensor(y.array).to(place.device, stream), place.home);
}

nb::object read_bytes(const Checkpoint& self, nb::handle tensor, uint64_t offset, nb::handle count,
                      nb::handle out) {
  const StoredTensor* stored = nullptr;
  if (nb::isinstance<StoredTensor>(tensor)) {
    stored = &nb::cast<const StoredTensor&>(tensor);
  } else {
    const std::string name = from_python<std::string>(tensor, "tensor");
    const auto found = std::ranges::find(self.tensors(), name, &StoredTensor::name);
    if (found == self.tensors().end())
      throw Error(ErrorCode::usage, "the checkpoint has no tensor \"" + name + "\"",
                  ErrorDetails{ErrorKind::invalid_argument, "tensor", {}, name});
    stored = &*found;
  }
  const uint64_t rest = stored->num_bytes - std::min(offset, stored->num_bytes);
  const uint64_t length = count.is_none() ? rest : from_python<uint64_t>(count, "num_bytes");
  const Output bytes(out, "out", home_of(Framework::numpy, {}), DType::u8,
                     std::array{static_cast<int64_t>(length)});
  const TensorView& view = bytes.array.view;
  if (!is_contiguous(view) || view.device.kind != DeviceKind::cpu ||
      contiguous_bytes(view.dtype, view.shape) != static_cast<int64_t>(length))
    throw Error(ErrorCode::usage,
                "read: out must be " + std::to_string(length) + " contiguous bytes in host memory",
                ErrorDetails{ErrorKind::invalid_argument, "out", std::to_string(length), {}});
  {
    const nb::gil_scoped_release release;
    self.read(*stored, offset, {static_cast<std::byte*>(view.data), length});
  }
  return bytes.result();
}

template <class T>
std::vector<T> list_of(std::span<const T> items) {
  return {items.begin(), items.end()};
}

std::string quoted(const std::string& text) { return nb::cast<std::string>(nb::repr(to_python(text))); }
// Of a Weight or WeightReport.
std::string spec_text(const auto& weight) {
  if (weight.scale_rows == 1) return to_string(weight.spec);
  return to_string(weight.spec) + " in blocks of " + std::to_string(weight.scale_rows) + "x" +
         std::to_string(weight.spec.group_size);
}

void bind_reading(nb::module_& module) {
  nb::class_<StoredTensor>(module, "StoredTensor", "A tensor as stored in a safetensors file.")
      .def_ro("name", &StoredTensor::name)
      .def_ro("dtype", &StoredTensor::dtype, "As the file spells it: \"BF16\", \"U8\", \"F8_E4M3\", ...")
      .def_prop_ro(
          "shape", [](const StoredTensor& self) { return to_python(self.shape); },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_ro("file", &StoredTensor::file, "Its name within the directory.")
      .def_ro("offset", &StoredTensor::offset, "Bytes from the start of the file.")
      .def_ro("num_bytes", &StoredTensor::num_bytes)
      .def("__repr__", [](const StoredTensor& self) {
        return "<StoredTensor " + quoted(self.name) + ": " + self.dtype + " " + shape_text(self.shape) + ">";
      });
  nb::class_<Weight>(module, "Weight",
                     "A weight as a model sees it: a dense tensor, or the parts of a quantized one.")
      .def_ro("name", &Weight::name)
      .def_prop_ro(
          "shape", [](const Weight& self) { return to_python(self.shape); },
          nb::sig("def shape(self) -> tuple[int, ...]"), "Of the dense weight.")
      .def_prop_ro(
          "dtype", [](const Weight& self) { return to_python(self.dtype); },
          nb::sig("def dtype(self) -> str | None"),
          "Dense: as stored, None where halfbyte has no such dtype. Quantized: that it had before.")
      .def_prop_ro(
          "layout", [](const Weight& self) { return to_python(self.layout); },
          nb::sig("def layout(self) -> str | None"), "None: dense.")
      .def_prop_ro(
          "spec",
          [](const Weight& self) { return self.layout ? to_python(self.spec) : nb::object(nb::none()); },
          nb::sig("def spec(self) -> QuantSpec | None"), "None: dense.")
      .def_ro("scale_rows", &Weight::scale_rows,
              "Rows of a matrix that share the scale of a group: of fp8 in blocks more than 1.")
      .def_ro("parts", &Weight::parts, "Indices into Checkpoint.tensors.")
      .def_ro("num_bytes", &Weight::num_bytes, "Of all parts.")
      .def_ro("foreign", &Weight::foreign, "The method of a ForeignQuantization that it belongs to, or \"\".")
      .def_ro("note", &Weight::note, "What is unusual in how it is stored, or \"\".")
      .def_prop_ro("bits_per_weight", [](const Weight& self) { return bits_per_weight(self); })
      .def("__repr__", [](const Weight& self) {
        return "<Weight " + quoted(self.name) + ": " + shape_text(self.shape) + ", " +
               (self.layout ? spec_text(self) + " in " + to_string(*self.layout)
                            : "dense " + std::string(self.dtype ? to_string(*self.dtype) : "?")) +
               ">";
      });
  nb::class_<ForeignQuantization>(
      module, "ForeignQuantization",
      "Quantization by another tool in a form that is recognised and not read: its tensors are weights as "
      "stored, and nothing can be computed from them.")
      .def_ro("method", &ForeignQuantization::method)
      .def_ro("layout", &ForeignQuantization::layout)
      .def_ro("source", &ForeignQuantization::source, "What says so: \"config.json\", \"tensors\", ...")
      .def_ro("parameters", &ForeignQuantization::parameters, "Names and JSON texts.")
      .def_ro("num_weights", &ForeignQuantization::num_weights)
      .def_ro("example", &ForeignQuantization::example)
      .def_ro("advice", &ForeignQuantization::advice, "How to make the model dense.")
      .def("__repr__", [](const ForeignQuantization& self) {
        return "<ForeignQuantization " + quoted(self.method) + ": " + std::to_string(self.num_weights) +
               " weights>";
      });
  nb::class_<Checkpoint>(
      module, "Checkpoint",
      "A safetensors file or a model directory, dense or quantized, in any layout that halfbyte reads. Only "
      "headers are read at first. Threads may share it.\n\n"
      "    >>> checkpoint = halfbyte.Checkpoint(model)\n"
      "    >>> checkpoint.find(\"lm_head.weight\")\n"
      "    <Weight 'lm_head.weight': (256, 256), dense bf16>\n"
      "    >>> checkpoint.load_dense(\"model.norm.weight\", \"f32\").shape\n"
      "    (256,)")
      .def(
          "__init__",
          [](Checkpoint* self, nb::handle path) {
            const std::string file = to_path(path);
            const nb::gil_scoped_release release;
            new (self) Checkpoint(Checkpoint::open(file));
          },
          nb::arg("path"), nb::sig("def __init__(self, path: str | os.PathLike) -> None"),
          "path: a .safetensors file, or a directory with model.safetensors or an index and shards (of a hub "
          "cache: one in snapshots/). Checks every header. Raises Error (BAD_INPUT), naming file, tensor or "
          "byte, and Error (IO).")
      .def_prop_ro("is_directory", &Checkpoint::is_directory)
      .def_prop_ro("tensors", [](const Checkpoint& self) { return list_of(self.tensors()); })
      .def_prop_ro(
          "weights", [](const Checkpoint& self) { return list_of(self.weights()); }, "Sorted by name.")
      .def_prop_ro("foreign", [](const Checkpoint& self) { return list_of(self.foreign()); })
      .def(
          "find",
          [](const Checkpoint& self, std::string_view name) {
            const Weight* const found = self.find(name);
            return found == nullptr ? nb::object(nb::none()) : nb::cast(*found);
          },
          nb::arg("name"), nb::sig("def find(self, name: str) -> Weight | None"),
          "The weight of that name; None if there is none.")
      .def(
          "read", &read_bytes, nb::arg("tensor"), nb::arg("offset") = 0, nb::arg("num_bytes") = nb::none(),
          nb::kw_only(), nb::arg("out") = nb::none(),
          nb::sig("def read(self, tensor: StoredTensor | str, offset: int = 0, num_bytes: int | None = None, "
                  "*, out: object = None) -> object"),
          "Bytes of a stored tensor as they are: u8 [num_bytes], or `out`, contiguous, of as many bytes.")
      .def(
          "decode", &decode, nb::arg("name"), nb::arg("dtype") = "f32", nb::kw_only(), nb::arg("begin") = 0,
          nb::arg("count") = nb::none(), nb::arg("out") = nb::none(),
          nb::sig("def decode(self, name: Weight | str, dtype: object = 'f32', *, begin: int = 0, "
                  "count: int | None = None, out: object = None) -> object"),
          "Elements of a weight, dense or quantized, as f32, f16, bf16 or f64: all, in its shape, or [count] "
          "of the row-major weight from `begin` on. bf16 in NumPy is uint16. Uses one thread.")
      .def("load_weight", &load, nb::arg("name"), nb::arg("device") = "cpu", nb::kw_only(),
           nb::arg("framework") = nb::none(), nb::arg("num_threads") = 0, nb::arg("stream") = nb::none(),
           nb::arg("slice") = nb::none(),
           nb::sig("def load_weight(self, name: Weight | str, device: object = 'cpu', *, "
                   "framework: str | None = None, num_threads: int = 0, stream: object = None, "
                   "slice: tuple[int, int, int] | None = None) -> QuantizedTensor"),
           "A quantized weight, from every layout, exactly; of shape [out, in] of the layer. slice: (axis, "
           "begin, end), only this part of it, as QuantizedTensor.slice. framework: of its arrays, "
           "\"numpy\", \"torch\" or \"dlpack\"; None: torch for a torch.device, else numpy. Raises "
           "ValueError if no weight has the name, or it is dense (see load_dense); Error (BAD_INPUT) where "
           "the "
           "file does not have what its header says.")
      .def(
          "load_dense", &load_dense, nb::arg("name"), nb::arg("dtype") = nb::none(), nb::kw_only(),
          nb::arg("device") = "cpu", nb::arg("framework") = nb::none(),
          nb::sig("def load_dense(self, name: Weight | str, dtype: object = None, *, device: object = 'cpu', "
                  "framework: str | None = None) -> object"),
          "A weight as a dense array, quantized ones decoded. dtype None: as stored, or that it had before. "
          "bf16 in NumPy is uint16.")
      .def("__repr__", [](const Checkpoint& self) {
        const auto weights = self.weights();
        const auto quantized =
            std::ranges::count_if(weights, [](const Weight& w) { return w.layout.has_value(); });
        return "<Checkpoint: " + std::to_string(weights.size()) + " weights, " + std::to_string(quantized) +
               " quantized>";
      });
}

// ---- Reports

std::string bytes_text(uint64_t source, uint64_t output) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(3);
  text << source << " -> " << output << " bytes";
  if (output > 0) text << " (" << static_cast<double>(source) / static_cast<double>(output) << "x)";
  return text.str();
}

void bind_reports(nb::module_& module) {
  nb::class_<WeightReport>(module, "WeightReport", "What happened (or would happen) to one weight.")
      .def_ro("name", &WeightReport::name)
      .def_prop_ro(
          "shape", [](const WeightReport& self) { return to_python(self.shape); },
          nb::sig("def shape(self) -> tuple[int, ...]"))
      .def_ro("dtype", &WeightReport::dtype, "Of the source, as stored (\"BF16\").")
      .def_ro("quantized", &WeightReport::quantized)
      .def_ro("reason", &WeightReport::reason, "Why it stayed dense.")
      .def_ro("note", &WeightReport::note)
      .def_prop_ro(
          "spec", [](const WeightReport& self) { return self.spec; }, "Where quantized.")
      .def_ro("scale_rows", &WeightReport::scale_rows, "As of Weight.")
      .def_prop_ro(
          "encoding", [](const WeightReport& self) { return self.encoding; }, "Where quantized.")
      .def_ro("source_bytes", &WeightReport::source_bytes)
      .def_ro("output_bytes", &WeightReport::output_bytes)
      .def_ro("bits_per_weight", &WeightReport::bits_per_weight)
      .def_ro("measured", &WeightReport::measured, "Whether the errors below were measured.")
      .def_ro("max_error", &WeightReport::max_error)
      .def_ro("max_error_index", &WeightReport::max_error_index)
      .def_ro("relative_rmse", &WeightReport::relative_rmse)
      .def_ro("snr_db", &WeightReport::snr_db)
      .def("__repr__", [](const WeightReport& self) {
        std::string text = "<WeightReport " + quoted(self.name) + ": " + shape_text(self.shape) + ", ";
        text += self.quantized ? spec_text(self) : "dense" + (self.reason.empty() ? "" : ": " + self.reason);
        if (self.measured)
          text += "; " + text_of({self.max_error, self.max_error_index, self.relative_rmse, self.snr_db});
        return text + ">";
      });
  nb::class_<ReaderVerdict>(module, "ReaderVerdict", "Whether a reader loads an output.")
      .def_prop_ro(
          "reader", [](const ReaderVerdict& self) { return to_python(self.reader); },
          nb::sig("def reader(self) -> str"))
      .def_ro("why_not", &ReaderVerdict::why_not, "\"\": it does.")
      .def("__repr__", [](const ReaderVerdict& self) {
        return std::string("<ReaderVerdict ") + to_string(self.reader) + ": " +
               (self.why_not.empty() ? "loads it" : self.why_not) + ">";
      });
  nb::class_<CheckpointReport>(module, "CheckpointReport", "What was read and written. Bytes are of tensors.")
      .def_ro("input", &CheckpointReport::input)
      .def_ro("output", &CheckpointReport::output)
      .def_prop_ro(
          "reader", [](const CheckpointReport& self) { return to_python(self.reader); },
          nb::sig("def reader(self) -> str"), "That the output is for.")
      .def_ro("readers", &CheckpointReport::readers, "Which readers read the layout.")
      .def_ro("architecture", &CheckpointReport::architecture)
      .def_prop_ro(
          "layout", [](const CheckpointReport& self) { return to_python(self.layout); },
          nb::sig("def layout(self) -> str | None"))
      .def_prop_ro(
          "devices", [](const CheckpointReport& self) { return halfbyte::to_string(self.devices); },
          nb::sig("def devices(self) -> str"), "That computed: \"cuda:0,cuda:1\".")
      .def_ro("weights", &CheckpointReport::weights)
      .def_ro("left_out", &CheckpointReport::left_out, "Weights that the reader does not load.")
      .def_ro("copied_files", &CheckpointReport::copied_files)
      .def_ro("skipped_files", &CheckpointReport::skipped_files)
      .def_ro("source_bytes", &CheckpointReport::source_bytes)
      .def_ro("output_bytes", &CheckpointReport::output_bytes)
      .def_ro("quantized_source_bytes", &CheckpointReport::quantized_source_bytes)
      .def_ro("num_quantized", &CheckpointReport::num_quantized)
      .def_ro("num_resumed_files", &CheckpointReport::num_resumed_files,
              "Files with tensors that an earlier run had completed.")
      .def_ro("peak_buffer_bytes", &CheckpointReport::peak_buffer_bytes)
      .def_ro("run_seconds", &CheckpointReport::run_seconds)
      .def_ro("sync_seconds", &CheckpointReport::sync_seconds)
      .def_ro("verify_seconds", &CheckpointReport::verify_seconds)
      .def_ro("read_seconds", &CheckpointReport::read_seconds, "Of run_seconds, on all workers together.")
      .def_ro("write_seconds", &CheckpointReport::write_seconds, "Likewise.")
      .def_ro("copy_seconds", &CheckpointReport::copy_seconds, "Likewise: to CUDA devices and back.")
      .def_ro("compute_seconds", &CheckpointReport::compute_seconds, "Likewise.")
      .def_prop_ro(
          "bottleneck", [](const CheckpointReport& self) { return bottleneck(self); },
          nb::sig("def bottleneck(self) -> str"),
          "\"read\", \"copy\", \"compute\", \"write\", \"verify\" or \"sync\"; \"\": nothing was run.")
      .def_ro("total_seconds", &CheckpointReport::total_seconds,
              "Of quantize and dequantize. A dry run of quantize estimates all times.")
      .def_ro("time_note", &CheckpointReport::time_note,
              "Of a dry run: what was not measured, and why; \"\": nothing.")
      .def_ro("device_note", &CheckpointReport::device_note,
              "Why choose_devices took no CUDA device; \"\": it did.")
      .def("__repr__", [](const CheckpointReport& self) {
        return "<CheckpointReport " + quoted(self.output) + ": " + std::to_string(self.num_quantized) +
               " of " + std::to_string(self.weights.size()) + " weights quantized, " +
               bytes_text(self.source_bytes, self.output_bytes) + ">";
      });
  nb::class_<CompareRow>(module, "CompareRow", "A weight of two checkpoints, compared.")
      .def_ro("name", &CompareRow::name)
      .def_ro("problem", &CompareRow::problem, "\"missing in B\", ...; \"\": it was compared.")
      .def_ro("max_error", &CompareRow::max_error)
      .def_ro("max_error_index", &CompareRow::max_error_index)
      .def_ro("relative_rmse", &CompareRow::relative_rmse)
      .def_ro("snr_db", &CompareRow::snr_db)
      .def("__repr__", [](const CompareRow& self) {
        return "<CompareRow " + quoted(self.name) + ": " +
               (self.problem.empty()
                    ? text_of({self.max_error, self.max_error_index, self.relative_rmse, self.snr_db})
                    : self.problem) +
               ">";
      });
  nb::class_<Fault>(module, "Fault", "A rule that a quantized checkpoint does not keep: docs/verify.md.")
      .def_ro("rule", &Fault::rule, "\"scale-zero\", \"global-scale-mismatch\", ...")
      .def_ro("name", &Fault::name, "Of the tensor, module or file.")
      .def_ro("text", &Fault::text, "What is wrong, with the values.")
      .def("__repr__", [](const Fault& self) {
        return "<Fault " + self.rule + ": " + quoted(self.name) + ": " + self.text + ">";
      });
  nb::class_<RepairedWeight>(module, "RepairedWeight",
                             "A weight whose global scale, a divisor, repair_checkpoint changed.")
      .def_ro("name", &RepairedWeight::name)
      .def_ro("global_scale_before", &RepairedWeight::global_scale_before)
      .def_ro("global_scale", &RepairedWeight::global_scale)
      .def_ro("num_scales", &RepairedWeight::num_scales, "Scales of groups, which were rounded anew.")
      .def("__repr__", [](const RepairedWeight& self) {
        return nb::str("<RepairedWeight {}: global scale {:.9g} -> {:.9g}>")
            .format(quoted(self.name), self.global_scale_before, self.global_scale);
      });
}

// ---- Writing

template <class Options, class Run>
CheckpointReport run_on(const char* name, const OptionRows<Options>& rows, nb::handle input,
                        nb::handle output, nb::handle progress, const nb::kwargs& given, Options options,
                        Run run) {
  rows.set(name, options, given);
  const std::string from = to_path(input), to = to_path(output);
  const auto callbacks = std::make_shared<Callbacks>(progress);
  options.progress = progress_of(callbacks);
  return run_work(callbacks, [&] { return run(from, to, options); });
}

void bind_functions_of_files(nb::module_& module) {
  OptionRows<QuantizeOptions> quantize_rows;
  using Q = QuantizeOptions;
  quantize_rows("asymmetric", &Q::asymmetric)("double_quant", &Q::double_quant)("table", &Q::table)(
      "layout", &Q::layout)("granularity", &Q::granularity)("group_size", &Q::group_size)(
      "scale_rule", &Q::scale_rule)("scale_dtype", &Q::scale_dtype)("search", &Q::search)(
      "importance", &Q::importance)("nonfinite", &Q::nonfinite)("include", &Q::include)(
      "exclude", &Q::exclude)("reader", &Q::reader)("force_layout", &Q::force_layout)(
      "keep_embeddings", &Q::keep_embeddings)("fallback_dense", &Q::fallback_dense)("dry_run", &Q::dry_run)(
      "verify", &Q::verify)("force", &Q::force)("unfinished", &Q::unfinished)("shard_bytes", &Q::shard_bytes)(
      "devices", &Q::devices)("choose_devices", &Q::choose_devices)("num_threads", &Q::num_threads);
  module.def(
      "quantize_checkpoint",
      [rows = quantize_rows](nb::handle input, nb::handle output, nb::handle format, nb::handle progress,
                             nb::kwargs given) {
        QuantizeOptions options;
        from_python(format, "format", options.format);
        return run_on("quantize_checkpoint", rows, input, output, progress, given, std::move(options),
                      [](const auto& from, const auto& to, const auto& with) {
                        return quantize_checkpoint(from, to, with);
                      });
      },
      nb::arg("input"), nb::arg("output"), nb::arg("format") = "nf4", nb::kw_only(),
      nb::arg("progress") = nb::none(), nb::arg("options"),
      nb::sig(
          "def quantize_checkpoint(input: str | os.PathLike, output: str | os.PathLike, format: str = "
          "'nf4', *, progress: Callable[[str, int, int], bool | None] | bool | None = None, "
          "asymmetric: bool = False, double_quant: bool = False, table: Sequence[float] = ..., "
          "layout: str | None = None, granularity: str | None = None, group_size: int | None = None, "
          "scale_rule: str | None = None, scale_dtype: str | None = None, search: bool = False, "
          "importance: str = '', nonfinite: str = 'error', "
          "include: Sequence[str] = (), exclude: Sequence[str] = (), reader: str | None = None, "
          "force_layout: bool = False, keep_embeddings: bool = False, fallback_dense: bool = False, "
          "dry_run: bool = False, verify: bool = True, force: bool = False, unfinished: str = 'keep', "
          "shard_bytes: int = 0, "
          "devices: object = 'cpu', choose_devices: bool = False, num_threads: int = 0) -> CheckpointReport"),
      "Quantizes a checkpoint, file to file or directory to directory, as `halfbyte quantize` does: the "
      "output "
      "is complete and verified, or there is none. Options that are not given have the defaults of the "
      "layout. devices: that compute, side by side: \"cpu\", \"cuda:1\", \"cpu,cuda:all\", or a sequence; "
      "choose_devices: the CUDA devices among them only where a measurement shows that they make it "
      "faster; with no devices, (), the CPU and the first usable CUDA device.\n\n"
      "    >>> report = halfbyte.quantize_checkpoint(model, output, \"int4\", group_size=32)\n"
      "    >>> report.num_quantized, report.weights[0].name\n"
      "    (28, 'lm_head.weight')\n"
      "    >>> halfbyte.Checkpoint(output).load_weight(\"model.layers.0.mlp.up_proj.weight\")\n"
      "    <QuantizedTensor int4,group_size=32,scale_dtype=bf16: shape (768, 256) of bf16, 4.5 bits per "
      "weight, "
      "cpu>\n\n"
      "progress: called with (phase, done_bytes, total_bytes) from any thread; False cancels, exceptions end "
      "the work. True: a bar of tqdm where it is installed, else a line, on work of more than a second. "
      "unfinished: what to do with an output of several files that an interrupted run left: 'keep' leaves "
      "it, "
      "'resume' goes on with its complete files, 'discard' removes it. "
      "Raises "
      "Error (EXISTS) if the output exists and not force, (BAD_INPUT), (IO), (VERIFY), (CANCELLED); "
      "ValueError "
      "for bad options.");
  OptionRows<DequantizeOptions> dequantize_rows;
  using D = DequantizeOptions;
  dequantize_rows("dtype", &D::dtype)("dry_run", &D::dry_run)("force", &D::force)(
      "unfinished", &D::unfinished)("shard_bytes", &D::shard_bytes)("devices", &D::devices)("num_threads",
                                                                                            &D::num_threads);
  module.def(
      "dequantize_checkpoint",
      [rows = dequantize_rows](nb::handle input, nb::handle output, nb::handle progress, nb::kwargs given) {
        return run_on("dequantize_checkpoint", rows, input, output, progress, given, DequantizeOptions{},
                      [](const auto& from, const auto& to, const auto& with) {
                        return dequantize_checkpoint(from, to, with);
                      });
      },
      nb::arg("input"), nb::arg("output"), nb::kw_only(), nb::arg("progress") = nb::none(),
      nb::arg("options"),
      nb::sig("def dequantize_checkpoint(input: str | os.PathLike, output: str | os.PathLike, *, "
              "progress: Callable[[str, int, int], bool | None] | bool | None = None, "
              "dtype: object = None, dry_run: bool = False, force: bool = False, unfinished: str = 'keep', "
              "shard_bytes: int = 0, "
              "devices: object = 'cpu', num_threads: int = 0) -> CheckpointReport"),
      "Makes every quantized weight dense: dtype f32, f16 or bf16; None: that each weight had before. Raises "
      "as "
      "quantize_checkpoint.\n\n"
      "    >>> report = halfbyte.quantize_checkpoint(model, output)\n"
      "    >>> halfbyte.dequantize_checkpoint(output, second).num_quantized\n"
      "    28");
  OptionRows<ConvertOptions> convert_rows;
  using C = ConvertOptions;
  convert_rows("requantize", &C::requantize)("experts", &C::experts)("dry_run", &C::dry_run)(
      "reader", &C::reader)("force_layout", &C::force_layout)("verify", &C::verify)("force", &C::force)(
      "unfinished", &C::unfinished)("shard_bytes", &C::shard_bytes)("num_threads", &C::num_threads);
  module.def(
      "convert_checkpoint",
      [rows = convert_rows](nb::handle input, nb::handle output, nb::handle layout, nb::handle progress,
                            nb::kwargs given) {
        ConvertOptions options;
        from_python(layout, "layout", options.layout);
        return run_on("convert_checkpoint", rows, input, output, progress, given, std::move(options),
                      [](const auto& from, const auto& to, const auto& with) {
                        return convert_checkpoint(from, to, with);
                      });
      },
      nb::arg("input"), nb::arg("output"), nb::arg("layout"), nb::kw_only(), nb::arg("progress") = nb::none(),
      nb::arg("options"),
      nb::sig("def convert_checkpoint(input: str | os.PathLike, output: str | os.PathLike, layout: str, *, "
              "progress: Callable[[str, int, int], bool | None] | bool | None = None, "
              "requantize: bool = False, experts: str | None = None, dry_run: bool = False, "
              "reader: str | None = None, force_layout: bool = False, verify: bool = True, force: bool = "
              "False, unfinished: str = 'keep', shard_bytes: int = 0, "
              "num_threads: int = 0) -> CheckpointReport"),
      "Writes the quantized weights in another layout: the codes stay, and every code decodes to the same "
      "f32. "
      "Where the layout cannot hold them so: Error (BAD_INPUT) that names the first weight, unless "
      "requantize. experts: of layout bitsandbytes their form, 'per-expert', 'parametrize' or 'experts4bit'. "
      "Raises as quantize_checkpoint.\n\n"
      "    >>> report = halfbyte.quantize_checkpoint(model, output, \"affine4\", layout=\"halfbyte\")\n"
      "    >>> halfbyte.convert_checkpoint(output, second, \"mlx\").layout\n"
      "    'mlx'");
  module.def(
      "compare_checkpoints",
      [](nb::handle a, nb::handle b, int num_threads, nb::handle progress) {
        const std::string first = to_path(a), other = to_path(b);
        const auto callbacks = std::make_shared<Callbacks>(progress);
        return run_work(callbacks, [&] {
          return compare_checkpoints(first, other, num_threads, progress_of(callbacks));
        });
      },
      nb::arg("a"), nb::arg("b"), nb::kw_only(), nb::arg("num_threads") = 0, nb::arg("progress") = nb::none(),
      nb::sig("def compare_checkpoints(a: str | os.PathLike, b: str | os.PathLike, *, num_threads: int = 0, "
              "progress: Callable[[str, int, int], bool | None] | bool | None = None) -> list[CompareRow]"),
      "Compares the decoded weights of two checkpoints; a is the reference. Rows with a problem come first, "
      "then the others with the worst SNR first.\n\n"
      "    >>> rows = halfbyte.compare_checkpoints(model, model)\n"
      "    >>> rows[0].problem, rows[0].max_error\n"
      "    ('', 0.0)");
  module.def(
      "verify_checkpoint",
      [](nb::handle path, nb::handle progress) {
        const std::string of = to_path(path);
        const auto callbacks = std::make_shared<Callbacks>(progress);
        return run_work(callbacks, [&] { return verify_checkpoint(of, progress_of(callbacks)); });
      },
      nb::arg("path"), nb::kw_only(), nb::arg("progress") = nb::none(),
      nb::sig("def verify_checkpoint(path: str | os.PathLike, *, "
              "progress: Callable[[str, int, int], bool | None] | bool | None = None) -> list[Fault]"),
      "The faults of a quantized checkpoint, in order of rule and name: rules that its readers rely on "
      "and do not check. Raises Error (IO) where files cannot be read, (CANCELLED).\n\n"
      "    >>> report = halfbyte.quantize_checkpoint(model, output, \"nvfp4\")\n"
      "    >>> halfbyte.verify_checkpoint(output)\n"
      "    []");
  module.def(
      "repair_checkpoint",
      [](nb::handle input, nb::handle output, bool force, nb::handle progress) {
        const std::string from = to_path(input), to = to_path(output);
        const auto callbacks = std::make_shared<Callbacks>(progress);
        return run_work(callbacks,
                        [&] { return repair_checkpoint(from, to, force, progress_of(callbacks)).weights; });
      },
      nb::arg("input"), nb::arg("output"), nb::kw_only(), nb::arg("force") = false,
      nb::arg("progress") = nb::none(),
      nb::sig("def repair_checkpoint(input: str | os.PathLike, output: str | os.PathLike, *, "
              "force: bool = False, progress: Callable[[str, int, int], bool | None] | bool | None = None) "
              "-> list[RepairedWeight]"),
      "Writes a copy in which weights of nvfp4 that runtimes multiply by as one (q, k and v; gate and up) "
      "have one global scale; codes stay. Returns the weights that changed. Raises ValueError where there is "
      "nothing to mend, and as quantize_checkpoint.\n\n"
      "    >>> report = halfbyte.quantize_checkpoint(model, output, \"nvfp4\")\n"
      "    >>> halfbyte.repair_checkpoint(output, second) if halfbyte.verify_checkpoint(output) else "
      "\"no faults\"\n"
      "    'no faults'");
}

struct Writer {
  std::shared_ptr<Callbacks> callbacks;
  std::optional<CheckpointWriter> writer;  // gone after finish and discard
  nb::object report = nb::none();

  CheckpointWriter& open() {
    if (!writer)
      throw Error(ErrorCode::usage, "the writer has finished, or what it would write was discarded");
    return *writer;
  }
};

void set_weight(Writer& self, const std::string& name, nb::handle weight, nb::handle spec, nb::handle shape,
                nb::handle dtype) {
  CheckpointWriter& writer = self.open();
  if (nb::isinstance<Quantized>(weight)) {
    writer.set(name, nb::cast<const Quantized&>(weight).tensor);
    return;
  }
  if (nb::isinstance<Packed>(weight)) wrong_type("weight", "a QuantizedTensor: unpack() it", weight);
  if (!PyCallable_Check(weight.ptr())) {
    writer.set(name, to_tensor(to_contiguous(weight, "weight")));
    return;
  }
  if (spec.is_none() || shape.is_none())
    throw nb::type_error("a function that makes a weight needs its spec and shape");
  QuantizedTensor form;
  from_python(spec, "spec", form.spec);
  from_python(shape, "shape", form.shape);
  from_python(dtype, "dtype", form.dtype);
  writer.set(name, form, [make = kept_by(nb::borrow(weight)), callbacks = self.callbacks] {
    const nb::gil_scoped_acquire gil;
    try {
      return to_quantized(nb::handle(static_cast<PyObject*>(make.get()))(), "weight").tensor;
    } catch (...) {
      callbacks->error = std::current_exception();
      throw Error(ErrorCode::cancelled, "a function that makes a weight raised an exception");
    }
  });
}

nb::object finish(Writer& self) {
  CheckpointWriter& writer = self.open();
  CheckpointReport report = run_work(self.callbacks, [&] { return writer.finish(); });
  self.report = nb::cast(std::move(report));
  self.writer.reset();
  return self.report;
}

void discard(Writer& self) { self.writer.reset(); }

void bind_writer(nb::module_& module) {
  OptionRows<WriterOptions> rows;
  using W = WriterOptions;
  rows("experts4bit", &W::experts4bit)("reader", &W::reader)("force_layout", &W::force_layout)(
      "verify", &W::verify)("force", &W::force)("identity", &W::identity)("unfinished", &W::unfinished)(
      "shard_bytes", &W::shard_bytes)("num_threads", &W::num_threads);
  nb::class_<Writer>(
      module, "CheckpointWriter",
      "Writes a checkpoint of weights that are given, quantized ones as they are. It becomes visible with "
      "finish(), complete and verified, or not at all. As a context manager it finishes, or after an "
      "exception "
      "discards.\n\n"
      "    >>> name = \"model.layers.0.mlp.up_proj.weight\"\n"
      "    >>> w = halfbyte.Checkpoint(model).load_dense(name, \"f32\")\n"
      "    >>> with halfbyte.CheckpointWriter(output, base=model) as writer:\n"
      "    ...     writer.set(name, halfbyte.quantize(w, \"int4,scale_dtype=bf16\"))\n"
      "    >>> writer.report.num_quantized\n"
      "    1")
      .def(
          "__init__",
          [rows](Writer* self, nb::handle output, nb::handle layout, nb::handle base, nb::handle config,
                 nb::handle progress, nb::kwargs given) {
            WriterOptions options;
            rows.set("CheckpointWriter", options, given);
            from_python(layout, "layout", options.layout);
            if (!base.is_none()) options.base = to_path(base);
            if (nb::isinstance<nb::dict>(config))
              options.config = nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(config));
            else
              from_python(config, "config", options.config);
            const std::string path = to_path(output);
            auto callbacks = std::make_shared<Callbacks>(progress);
            options.progress = progress_of(callbacks);
            new (self) Writer{callbacks, CheckpointWriter(path, std::move(options))};
          },
          nb::arg("output"), nb::arg("layout") = "halfbyte", nb::kw_only(), nb::arg("base") = nb::none(),
          nb::arg("config") = nb::none(), nb::arg("progress") = nb::none(), nb::arg("options"),
          nb::sig("def __init__(self, output: str | os.PathLike, layout: str = 'halfbyte', *, "
                  "base: str | os.PathLike | None = None, config: dict | str | None = None, "
                  "progress: Callable[[str, int, int], bool | None] | bool | None = None, "
                  "experts4bit: bool = False, reader: str | None = None, force_layout: bool = False, "
                  "verify: bool = True, force: bool = False, identity: str = '', unfinished: str = 'keep', "
                  "shard_bytes: int = 0, num_threads: int = 0) -> None"),
          "base: a checkpoint whose other weights, side files and metadata the output gets too. config: "
          "config.json of an output directory; None: that of base. The output is what base is, or a file if "
          "its name ends in .safetensors. experts4bit: of layout bitsandbytes, weights [E, out, in] have the "
          "tensors of Experts4bit. identity: text that says what is given; with it an interrupted writer can "
          "be "
          "gone on with by unfinished='resume', and functions are called for missing files only. progress "
          "and "
          "unfinished as of quantize_checkpoint.")
      .def(
          "set", &set_weight, nb::arg("name"), nb::arg("weight"), nb::kw_only(), nb::arg("spec") = nb::none(),
          nb::arg("shape") = nb::none(), nb::arg("dtype") = "f32",
          nb::sig("def set(self, name: str, weight: object, *, spec: QuantSpec | str | None = None, "
                  "shape: Sequence[int] | None = None, dtype: object = 'f32') -> None"),
          "weight: a QuantizedTensor; a dense array (f32, f16, bf16, ...); or a function without arguments "
          "that makes a QuantizedTensor of that spec, shape and dtype when its file is written, so that "
          "only the weights of one file are in memory. Memory is shared until finish(), and must not change. "
          "Raises ValueError, naming the weight and the reason, where the layout cannot hold it, and for a "
          "name that was set before.")
      .def(
          "finish", &finish, nb::sig("def finish(self) -> CheckpointReport"),
          "Writes all; once. Raises Error (BAD_INPUT) for what no file may hold, ValueError where the reader "
          "cannot load a weight as it was given, and what functions raised. There is then no output.")
      .def("discard", &discard, "Gives up. Nothing is written.")
      .def_prop_ro(
          "report", [](const Writer& self) { return self.report; },
          nb::sig("def report(self) -> CheckpointReport | None"), "Of finish().")
      .def(
          "__enter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __enter__(self) -> CheckpointWriter"))
      .def(
          "__exit__",
          [](Writer& self, nb::handle type, nb::handle, nb::handle) {
            if (!type.is_none())
              discard(self);
            else if (self.writer)
              finish(self);
          },
          nb::arg("type").none(), nb::arg("value").none(), nb::arg("traceback").none());
}

}  // namespace

void bind_checkpoints(nb::module_& module) {
  bind_reading(module);
  bind_reports(module);
  bind_functions_of_files(module);
  bind_writer(module);
}

}  // namespace halfbyte::python
