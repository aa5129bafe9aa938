// Arrays of NumPy, PyTorch, CuPy, JAX and whoever else speaks DLPack or the buffer protocol, as views without
// a copy. Results beside them; streams.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <span>

#include "halfbyte/device.hpp"
#include "halfbyte/dlpack.hpp"
#include "halfbyte/tensor.hpp"

namespace halfbyte::python {

namespace nb = nanobind;

// Who owns an array, and allocates results beside it.
enum class Framework : uint8_t { numpy, torch, other };

struct Array {
  TensorView view;
  nb::object owner;   // keeps the memory alive
  nb::object source;  // the object that was given
  Framework framework = Framework::numpy;
  const DLPackExchangeAPI* table = nullptr;  // of torch, where it has one
};

// The memory of `object`. `written`: a read-only array is refused. `stream`: on which a CUDA array will be
// used, as to_stream takes it; its owner is told. Arrays of dtype bfloat16 (ml_dtypes) and uint16 are bf16.
// Throws TypeError for what is no array, and for tensors of PyTorch without memory of their own (fake,
// sharded); Error(usage) for dtypes that halfbyte does not have.
Array to_array(nb::handle object, const char* name, bool written = false, nb::handle stream = nb::none());

// A stream that is given (an int, a stream of PyTorch or CuPy, whatever has __cuda_stream__); for None, the
// one on which the owner of `array` works now. Null for the CPU.
void* to_stream(nb::handle stream, const Array& array);

// A new array of the framework of `like`, on its device. bf16 in NumPy: of ml_dtypes if `like` is, else
// uint16. What is neither NumPy nor PyTorch, and has more than a buffer, gets an array that speaks DLPack;
// give_back turns it into one of its own.
nb::object empty_beside(const Array& like, DType dtype, std::span<const int64_t> shape);
Array new_beside(const Array& like, DType dtype, std::span<const int64_t> shape);  // with its view
nb::object give_back(const Array& like, nb::object array);

// Memory that a Python object keeps.
std::shared_ptr<void> kept_by(nb::object object);
// A tensor of the library as an array, without a copy: 4-bit elements as bytes, bf16 in NumPy as uint16.
nb::object to_python(const Tensor& tensor, Framework framework);
// The same as an array like another: of its own framework, bf16 as it has it.
nb::object to_python(const Tensor& tensor, const Array& like);

// What remains of an array for empty_beside, give_back and to_python: its framework and device, no memory.
Array home_of(const Array& array);
Array home_of(Framework framework, Device device);
void from_python(nb::handle object, const char* name, Framework& value);  // "numpy", "torch", "dlpack"
const char* to_string(Framework framework);

// An array that is written: the one that the caller gives, or if that is None, a new one beside `like`.
struct Output {
  Output(nb::handle out, const char* name, const Array& like, DType dtype, std::span<const int64_t> shape,
         nb::handle stream = nb::none());
  nb::object result() const;  // what the caller gets, once it is written

  Array array;
  Array like;
  bool is_given;
};
// The array itself where it is contiguous, else a copy of it that is.
nb::object contiguous(nb::handle object, const Array& array);
Array to_contiguous(nb::handle object, const char* name, nb::handle stream = nb::none());
// The memory of a contiguous array as a tensor of the library, which keeps it.
Tensor to_tensor(const Array& array);

}  // namespace halfbyte::python
