// Quantized weights as Python has them: the tensors of the library, with the framework that their parts are
// given back as.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "array.h"
#include "halfbyte/ops.hpp"
#include "halfbyte/qgemm.hpp"
#include "words.h"

namespace halfbyte::python {

// What `error` found.
struct QuantizationError {
  double max_error = 0;
  int64_t max_error_index = 0;
  double relative_rmse = 0;
  double snr_db = 0;
};

struct Quantized {
  QuantizedTensor tensor;
  Array home;  // see home_of
  std::optional<QuantizationError> error = {};
};
// Its base is what functions of the library are given.
struct Packed : PackedTensor {
  Array home;
};

// Fails with TypeError for what is no QuantizedTensor.
const Quantized& to_quantized(nb::handle object, const char* name);
// The number of threads, and the stream of the framework where none is given.
Execution execution_of(int num_threads, nb::handle stream, const Array& like);
// A packed weight without content beside `like`; its memory is `out`, where that is not None. With memory for
// `count` of them, one behind the other.
Packed empty_packed(const QuantSpec& spec, int64_t rows, int64_t cols, const Array& like, nb::handle out,
                    int64_t count = 1);
Tensor memory_of(const Packed& packed);  // u8 [num_bytes]
// On another device, in memory of its framework. Waits for the stream.
Tensor moved(const Tensor& tensor, const Array& home, Device device, void* stream);
Array home_on(const Array& home, Device device);
std::string shape_text(std::span<const int64_t> shape);  // "(2, 3)"
nb::object values_module();                              // what Python defines of values
// The same weight on another device, in memory of its framework. Waits for the stream.
Quantized to_device(const Quantized& q, Device device, void* stream);
// A row of a report: "relative RMSE 0.0917, SNR 20.8 dB".
std::string text_of(const QuantizationError& error);

void bind_tensors(nb::module_& module);
void bind_experts(nb::module_& module);
void bind_functions(nb::module_& module);
void bind_observers(nb::module_& module);
void bind_system(nb::module_& module);
void bind_checkpoints(nb::module_& module);

}  // namespace halfbyte::python
