#include "array.h"

#include <nanobind/ndarray.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "halfbyte/error.hpp"
#include "words.h"

namespace halfbyte::python {
namespace {

// What is known of a type of arrays. Types are kept, so that a pointer stays the same type.
struct Kind {
  enum Way : uint8_t { numpy, torch, torch_without_memory, interface, protocol, none } way = none;
  const DLPackExchangeAPI* table = nullptr;
  bool makes_arrays = false;  // protocol: its results are arrays of its own
};

std::string text_of(nb::handle object) { return nb::cast<std::string>(nb::str(object)); }

std::string text_attribute(nb::handle object, const char* name) {
  return text_of(nb::getattr(object, name, nb::str("")));
}

bool is_module(const std::string& module, const char* package) {
  const std::string name(package);
  return module == name || module.starts_with(name + ".");
}

bool derives_from_torch(nb::handle type) {
  for (const nb::handle base : nb::tuple(type.attr("__mro__")))
    if (text_attribute(base, "__name__") == "Tensor" && text_attribute(base, "__module__") == "torch")
      return true;
  return false;
}

Kind find_kind(nb::handle type) {
  const std::string module = text_attribute(type, "__module__"), name = text_attribute(type, "__name__");
  if (module == "numpy" && name == "ndarray") return {Kind::numpy};
  if (derives_from_torch(type)) {
    // Subclasses that take over the dispatch have no memory of their own, or other memory than it seems.
    const nb::object torch = nb::module_::import_("torch");
    const nb::object plain = torch.attr("_C").attr("_disabled_torch_dispatch_impl");
    if (!nb::getattr(type, "__torch_dispatch__", nb::none()).is(plain)) return {Kind::torch_without_memory};
    Kind kind{Kind::torch};
    const nb::object capsule = nb::getattr(type, "__dlpack_c_exchange_api__", nb::none());
    if (PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
      const auto* api =
          static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      while (api != nullptr && api->header.version.major != DLPACK_MAJOR_VERSION)
        api = reinterpret_cast<const DLPackExchangeAPI*>(api->header.prev_api);
      if (api != nullptr && api->dltensor_from_py_object_no_sync != nullptr) kind.table = api;
    }
    return kind;
  }
  if (nb::hasattr(type, "__dlpack__")) {
    const bool is_jax = is_module(module, "jax") || is_module(module, "jaxlib");
    return {Kind::protocol, nullptr, is_jax || nb::hasattr(type, "__array_namespace__")};
  }
  if (PyType_GetSlot(reinterpret_cast<PyTypeObject*>(type.ptr()), Py_bf_getbuffer) != nullptr)
    return {Kind::protocol};
  if (nb::hasattr(type, "__array_interface__")) return {Kind::interface};
  return {};
}

const Kind& kind_of(nb::handle object) {
  static std::unordered_map<PyObject*, Kind>& kinds = *new std::unordered_map<PyObject*, Kind>;
  const nb::handle type = object.type();
  const auto found = kinds.find(type.ptr());
  if (found != kinds.end()) return found->second;
  const Kind kind = find_kind(type);
  type.inc_ref();
  return kinds.emplace(type.ptr(), kind).first->second;
}

constexpr const char* kAnArray = "an array: of NumPy, PyTorch, or whatever has __dlpack__ or a buffer";

// Whether the dtype object of NumPy is the bfloat16 of ml_dtypes, which neither DLPack nor buffers of NumPy
// have.
bool is_bf16(nb::handle dtype) {
  static std::unordered_map<PyObject*, bool>& known = *new std::unordered_map<PyObject*, bool>;
  const nb::handle type = dtype.type();
  const auto found = known.find(type.ptr());
  if (found != known.end()) return found->second;
  type.inc_ref();
  return known.emplace(type.ptr(), text_attribute(dtype, "name") == "bfloat16").first->second;
}

template <class NdArray>
DLTensor to_dltensor(const NdArray& array, const int64_t* shape, const int64_t* strides) {
  DLTensor tensor{};
  tensor.data = const_cast<void*>(static_cast<const void*>(array.data()));
  tensor.device = {static_cast<DLDeviceType>(array.device_type()), array.device_id()};
  tensor.ndim = static_cast<int32_t>(array.ndim());
  tensor.dtype = {array.dtype().code, array.dtype().bits, array.dtype().lanes};
  tensor.shape = const_cast<int64_t*>(shape);
  tensor.strides = const_cast<int64_t*>(strides);
  return tensor;
}

// NumPy has no bf16, and the library no unsigned integers of 16 bits.
TensorView view_of(DLTensor tensor, const char* name) {
  if (tensor.dtype.code == kDLUInt && tensor.dtype.bits == 16) tensor.dtype.code = kDLBfloat;
  return from_dlpack(tensor, name);
}

template <class NdArray>
bool take_ndarray(nb::handle object, const char* name, Array& array) {
  NdArray given;
  if (!nb::try_cast(object, given, false)) return false;  // no conversion: it would be a copy
  std::vector<int64_t> shape(given.ndim()), strides(given.ndim());
  for (size_t i = 0; i < given.ndim(); ++i) {
    shape[i] = static_cast<int64_t>(given.shape(i));
    strides[i] = given.stride(i);
  }
  array.view = view_of(to_dltensor(given, shape.data(), strides.data()), name);
  array.owner = nb::borrow(object);
  return true;
}

void take_numpy(nb::handle object, const char* name, bool written, Array& array) {
  nb::object bits = nb::borrow(object);
  if (is_bf16(object.attr("dtype"))) bits = object.attr("view")("uint16");
  const bool taken = written ? take_ndarray<nb::ndarray<>>(bits, name, array)
                             : take_ndarray<nb::ndarray<nb::ro>>(bits, name, array);
  if (taken) return;
  const std::string dtype = text_of(nb::object(object.attr("dtype")));
  const bool writable = nb::cast<bool>(object.attr("flags").attr("writeable"));
  throw Error(
      ErrorCode::usage,
      std::string(name) + (written && !writable ? ": the array is read-only, and would be written"
                                                : ": arrays of NumPy dtype " + dtype + " cannot be used"),
      ErrorDetails{ErrorKind::invalid_argument, name, {}, dtype});
}

DType torch_dtype(nb::handle dtype, const char* name) {
  static std::unordered_map<PyObject*, DType>& known = *new std::unordered_map<PyObject*, DType>;
  const auto found = known.find(dtype.ptr());
  if (found != known.end()) return found->second;
  const DType value = from_python<DType>(dtype, name);
  return known.emplace(dtype.inc_ref().ptr(), value).first->second;
}

Device torch_device(nb::handle tensor, const char* name) {
  if (nb::cast<bool>(tensor.attr("is_cuda")))
    return {DeviceKind::cuda, nb::cast<int>(tensor.attr("get_device")())};
  const std::string type = text_of(nb::object(tensor.attr("device").attr("type")));
  if (type != "cpu")
    throw Error(ErrorCode::usage, std::string(name) + ": tensors on device " + type + " cannot be used");
  return {};
}

void check_sign(nb::handle tensor, const char* name) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  const nb::object negative = nb::steal(PyObject_CallMethodObjArgs(tensor.ptr(), is_neg, nullptr));
  if (!negative.is_valid()) nb::raise_python_error();
  if (negative.ptr() == Py_True)
    throw Error(ErrorCode::usage,
                std::string(name) + ": a negative view of a tensor: call resolve_neg() first");
}

void take_torch(nb::handle object, const char* name, const Kind& kind, Array& array) {
  array.framework = Framework::torch;
  array.table = kind.table;
  array.owner = nb::borrow(object);
  if (kind.table != nullptr) {
    DLTensor tensor{};
    if (kind.table->dltensor_from_py_object_no_sync(object.ptr(), &tensor) != 0) nb::raise_python_error();
    array.view = view_of(tensor, name);
    if (is_floating(array.view.dtype)) check_sign(object, name);
    return;
  }
  check_sign(object, name);
  TensorView& view = array.view;
  view.dtype = torch_dtype(object.attr("dtype"), name);
  view.device = torch_device(object, name);
  for (const nb::handle extent : nb::tuple(object.attr("shape")))
    view.shape.push_back(nb::cast<int64_t>(extent));
  for (const nb::handle stride : nb::tuple(object.attr("stride")()))
    view.strides.push_back(nb::cast<int64_t>(stride));
  view.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(object.attr("data_ptr")()));
}

bool is_jax(nb::handle object) {
  const std::string module = text_attribute(object.type(), "__module__");
  return is_module(module, "jax") || is_module(module, "jaxlib");
}

// By __dlpack__ or the buffer protocol.
void take_protocol(nb::handle object, const char* name, const Kind& kind, bool written, nb::handle stream,
                   Array& array) {
  array.framework = kind.makes_arrays ? Framework::other : Framework::numpy;
  // Its arrays say nothing of it in DLPack.
  if (written && is_jax(object))
    throw Error(ErrorCode::usage,
                std::string(name) + ": arrays of JAX are immutable, and it would be written",
                ErrorDetails{ErrorKind::invalid_argument, name, "a writable array", "an array of JAX"});
  nb::object given = nb::borrow(object);
  if (nb::hasattr(object, "__dlpack_device__")) {
    const nb::object device = object.attr("__dlpack_device__")();
    if (nb::cast<int>(device[0]) == kDLCUDA) {
      array.framework = Framework::other;
      array.view.device = {DeviceKind::cuda, nb::cast<int>(device[1])};
      array.source = given;
      void* const on = to_stream(stream, array);
      // 1 is the default stream.
      given =
          object.attr("__dlpack__")(nb::arg("stream") = on == nullptr ? 1 : reinterpret_cast<intptr_t>(on));
    }
  }
  // A buffer may leave out its strides, as those of ctypes do, and nanobind reads them: a memoryview has
  // some.
  if (given.is(object) && !nb::hasattr(object, "__dlpack__"))
    given = nb::steal(PyMemoryView_FromObject(object.ptr()));
  if (!given.is_valid()) throw nb::python_error();
  const bool taken = written ? take_ndarray<nb::ndarray<>>(given, name, array)
                             : take_ndarray<nb::ndarray<nb::ro>>(given, name, array);
  if (!taken)
    throw Error(ErrorCode::usage, std::string(name) +
                                      ": the array cannot be used: its dtype is not one of halfbyte" +
                                      (written ? ", or it is read-only and would be written" : ""));
  if (!given.is(object)) array.owner = nb::make_tuple(given, object);
}

// The words of torch and of NumPy.
const char* long_name(DType dtype) {
  switch (dtype) {
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::f64:
      return "float64";
    case DType::i8:
      return "int8";
    case DType::i32:
      return "int32";
    case DType::u32:
      return "uint32";
    case DType::i64:
      return "int64";
    default:
      return "uint8";
  }
}

nb::dlpack::dtype nb_dtype(DType dtype) {
  const auto of = [](int code, int bits) {
    return nb::dlpack::dtype{static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
  };
  switch (dtype) {
    case DType::f32:
      return of(kDLFloat, 32);
    case DType::f16:
      return of(kDLFloat, 16);
    case DType::bf16:
      return of(kDLBfloat, 16);
    case DType::f64:
      return of(kDLFloat, 64);
    case DType::i8:
      return of(kDLInt, 8);
    case DType::i32:
      return of(kDLInt, 32);
    case DType::u32:
      return of(kDLUInt, 32);
    case DType::i64:
      return of(kDLInt, 64);
    default:
      return of(kDLUInt, 8);
  }
}

nb::tuple tuple_of(std::span<const int64_t> shape) { return nb::tuple(to_python(shape)); }

nb::object module_named(const char* name) { return nb::module_::import_(name); }

void set_error(void*, const char* kind, const char* message) {
  const nb::gil_scoped_acquire gil;
  PyErr_Format(PyExc_RuntimeError, "%s: %s", kind, message);
}

// Of a framework that has the table. The memory is known before there is an object.
nb::object empty_by_table(const Array& like, DType dtype, std::span<const int64_t> shape, void*& data) {
  const nb::dlpack::dtype type = nb_dtype(dtype);
  DLTensor prototype{};
  prototype.device = to_dlpack(like.view.device);
  prototype.ndim = static_cast<int32_t>(shape.size());
  prototype.dtype = {type.code, type.bits, type.lanes};
  prototype.shape = const_cast<int64_t*>(shape.data());
  DLManagedTensorVersioned* made = nullptr;
  void* object = nullptr;
  if (like.table->managed_tensor_allocator(&prototype, &made, nullptr, set_error) != 0)
    nb::raise_python_error();
  data = static_cast<std::byte*>(made->dl_tensor.data) + made->dl_tensor.byte_offset;
  if (like.table->managed_tensor_to_py_object_no_sync(made, &object) != 0) nb::raise_python_error();
  return nb::steal(static_cast<PyObject*>(object));
}

nb::object empty_torch(const Array& like, DType dtype, std::span<const int64_t> shape) {
  void* data = nullptr;
  if (like.table != nullptr) return empty_by_table(like, dtype, shape, data);
  const nb::object torch = module_named("torch");
  return torch.attr("empty")(tuple_of(shape), nb::arg("dtype") = torch.attr(long_name(dtype)),
                             nb::arg("device") = like.source.attr("device"));
}

}  // namespace

Array to_array(nb::handle object, const char* name, bool written, nb::handle stream) {
  Array array;
  array.source = nb::borrow(object);
  const Kind& kind = kind_of(object);
  switch (kind.way) {
    case Kind::numpy:
      take_numpy(object, name, written, array);
      break;
    case Kind::torch:
      take_torch(object, name, kind, array);
      break;
    case Kind::protocol:
      take_protocol(object, name, kind, written, stream, array);
      break;
    case Kind::interface:
      take_numpy(module_named("numpy").attr("asarray")(object), name, written, array);
      break;
    case Kind::torch_without_memory:
      wrong_type(name, "a plain tensor: this one is fake, sharded or of another subclass; call its operator",
                 object);
    case Kind::none:
      wrong_type(name, kAnArray, object);
  }
  return array;
}

void* to_stream(nb::handle stream, const Array& array) {
  if (array.view.device.kind == DeviceKind::cpu) return nullptr;
  const auto pointer = [](nb::handle of) { return reinterpret_cast<void*>(nb::cast<uintptr_t>(of)); };
  if (!stream.is_none()) {
    if (PyIndex_Check(stream.ptr())) return pointer(stream);
    if (nb::hasattr(stream, "cuda_stream")) return pointer(stream.attr("cuda_stream"));  // PyTorch
    if (nb::hasattr(stream, "__cuda_stream__")) return pointer(stream.attr("__cuda_stream__")()[1]);
    if (nb::hasattr(stream, "ptr")) return pointer(stream.attr("ptr"));  // CuPy
    wrong_type("stream", "an int, or a stream of PyTorch or CuPy", stream);
  }
  const int index = array.view.device.index;
  if (array.table != nullptr) {
    void* current = nullptr;
    if (array.table->current_work_stream(kDLCUDA, index, &current) != 0) nb::raise_python_error();
    return current;
  }
  if (array.framework == Framework::torch)
    return pointer(module_named("torch").attr("_C").attr("_cuda_getCurrentRawStream")(index));
  if (array.source.is_valid() && is_module(text_attribute(array.source.type(), "__module__"), "cupy"))
    return pointer(module_named("cupy").attr("cuda").attr("get_current_stream")().attr("ptr"));
  return nullptr;
}

nb::object empty_beside(const Array& like, DType dtype, std::span<const int64_t> shape) {
  if (like.framework == Framework::torch) return empty_torch(like, dtype, shape);
  if (like.framework == Framework::numpy) {
    nb::object type = nb::str(dtype == DType::bf16 ? "uint16" : long_name(dtype));
    if (dtype == DType::bf16 && like.source.is_valid() && nb::hasattr(like.source, "dtype") &&
        is_bf16(like.source.attr("dtype")))
      type = like.source.attr("dtype");
    return module_named("numpy").attr("empty")(tuple_of(shape), nb::arg("dtype") = type);
  }
  return to_python(Tensor(like.view.device, dtype, {shape.begin(), shape.end()}), Framework::other);
}

Array new_beside(const Array& like, DType dtype, std::span<const int64_t> shape) {
  if (like.table == nullptr) return to_array(empty_beside(like, dtype, shape), "a new array", true);
  Array made;
  made.framework = like.framework;
  made.table = like.table;
  made.source = made.owner = empty_by_table(like, dtype, shape, made.view.data);
  made.view.dtype = dtype;
  made.view.shape = shape;
  made.view.device = like.view.device;
  return made;
}

nb::object give_back(const Array& like, nb::object array) {
  if (like.framework != Framework::other || !like.source.is_valid()) return array;
  if (nb::hasattr(like.source, "__array_namespace__"))
    return like.source.attr("__array_namespace__")().attr("from_dlpack")(array);
  if (is_jax(like.source)) return module_named("jax.numpy").attr("from_dlpack")(array);
  const std::string module = text_attribute(like.source.type(), "__module__");
  const nb::object package =
      module_named("sys").attr("modules").attr("get")(module.substr(0, module.find('.')).c_str());  // "cupy"
  return nb::hasattr(package, "from_dlpack") ? package.attr("from_dlpack")(array) : array;
}

std::shared_ptr<void> kept_by(nb::object object) {
  PyObject* const kept = object.release().ptr();
  return {static_cast<void*>(kept), [](void* of) {
            if (!nb::is_alive()) return;
            const nb::gil_scoped_acquire gil;
            nb::handle(static_cast<PyObject*>(of)).dec_ref();
          }};
}

nb::object to_python(const Tensor& tensor, Framework framework) {
  std::vector<size_t> shape(tensor.shape().begin(), tensor.shape().end());
  if (is_packed(tensor.dtype()) && !shape.empty()) shape.back() = (shape.back() + 1) / 2;
  const nb::capsule owner(new Tensor(tensor), [](void* of) noexcept { delete static_cast<Tensor*>(of); });
  const DLDevice device = to_dlpack(tensor.device());
  const auto array = [&]<class Tag>(Tag, DType dtype) {
    return nb::cast(nb::ndarray<Tag>(tensor.data(), shape.size(), shape.data(), owner, nullptr,
                                     nb_dtype(dtype), static_cast<int>(device.device_type),
                                     device.device_id));
  };
  const bool on_cpu = tensor.device().kind == DeviceKind::cpu;
  if (framework == Framework::torch) return array(nb::pytorch(), tensor.dtype());
  if (framework == Framework::numpy && on_cpu) {
    if (tensor.dtype() != DType::bf16) return array(nb::numpy(), tensor.dtype());
    auto bits = nb::ndarray<nb::numpy>(tensor.data(), shape.size(), shape.data(), owner, nullptr,
                                       nb::dlpack::dtype{static_cast<uint8_t>(kDLUInt), 16, 1});
    return nb::cast(bits);
  }
  return array(nb::array_api(), tensor.dtype());
}

nb::object to_python(const Tensor& tensor, const Array& like) {
  const nb::object array = to_python(tensor, like.framework);
  const bool on_cpu = tensor.device().kind == DeviceKind::cpu;
  if (like.framework == Framework::numpy && on_cpu && tensor.dtype() == DType::bf16 &&
      like.source.is_valid() && nb::hasattr(like.source, "dtype") && is_bf16(like.source.attr("dtype")))
    return array.attr("view")(like.source.attr("dtype"));
  return give_back(like, array);
}

Array home_of(const Array& array) {
  Array home;
  home.framework = array.framework;
  home.table = array.table;
  home.view.device = array.view.device;
  home.source = give_back(array, empty_beside(array, array.view.dtype, std::array{int64_t{0}}));
  return home;
}

Array home_of(Framework framework, Device device) {
  Array home;
  home.framework =
      device.kind == DeviceKind::cuda && framework == Framework::numpy ? Framework::other : framework;
  home.view.device = device;
  if (framework == Framework::torch)
    home = to_array(module_named("torch").attr("empty")(0, nb::arg("device") = halfbyte::to_string(device)),
                    "framework");
  return home;
}

const char* to_string(Framework framework) {
  return framework == Framework::numpy ? "numpy" : framework == Framework::torch ? "torch" : "dlpack";
}

void from_python(nb::handle object, const char* name, Framework& value) {
  std::string word;
  from_python(object, name, word);
  for (const Framework each : {Framework::numpy, Framework::torch, Framework::other})
    if (word == to_string(each)) {
      value = each;
      return;
    }
  throw Error(ErrorCode::usage, std::string(name) + " must be numpy, torch or dlpack, got " + word,
              ErrorDetails{ErrorKind::invalid_argument, name, "numpy, torch or dlpack", word});
}

Output::Output(nb::handle out, const char* name, const Array& beside, DType dtype,
               std::span<const int64_t> shape, nb::handle stream)
    : like(beside), is_given(!out.is_none()) {
  array = to_array(is_given ? nb::borrow(out) : empty_beside(like, dtype, shape), name, true, stream);
}

nb::object Output::result() const { return is_given ? array.source : give_back(like, array.source); }

nb::object contiguous(nb::handle object, const Array& array) {
  if (is_contiguous(array.view)) return nb::borrow(object);
  if (array.framework == Framework::torch) return object.attr("contiguous")();
  if (array.view.device.kind == DeviceKind::cpu)
    return module_named("numpy").attr("ascontiguousarray")(object);
  return object.attr("copy")();
}

Array to_contiguous(nb::handle object, const char* name, nb::handle stream) {
  Array array = to_array(object, name, false, stream);
  if (is_contiguous(array.view)) return array;
  Array copy = to_array(contiguous(object, array), name, false, stream);
  copy.source = array.source;
  copy.framework = array.framework;
  return copy;
}

Tensor to_tensor(const Array& array) { return Tensor::of(array.view, kept_by(array.owner)); }

}  // namespace halfbyte::python
