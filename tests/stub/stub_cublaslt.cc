// A stand-in for cuBLASLt that multiplies bf16 matrices in host memory, which is the memory of stub_cuda.
// What it is asked for when it chooses an algorithm goes to STUB_LOG.
//   STUB_CUBLASLT_CREATE   result of cublasLtCreate; 0
#include <bit>
#include <cstddef>
#include <map>

#include "stub/stub.h"

namespace {

constexpr int kInvalidValue = 7, kNotSupported = 15;

struct Layout {
  int type;
  uint64_t rows, cols;
  int64_t stride;
};
// Attributes by number.
struct Attributes {
  std::map<int, uint64_t> values;
  int set(int attribute, const void* value, size_t num_bytes) {
    if (num_bytes > sizeof(uint64_t)) return kInvalidValue;
    __builtin_memcpy(&values[attribute], value, num_bytes);
    return 0;
  }
};
struct Algorithm {
  uint64_t data[8];
};
struct Result {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

float value_of(const void* matrix, int64_t index) {
  return std::bit_cast<float>(uint32_t{static_cast<const uint16_t*>(matrix)[index]} << 16);
}
uint16_t rounded(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace

extern "C" {

int cublasLtGetProperty(int, int* value) {
  *value = 13;
  return 0;
}
int cublasLtCreate(void** handle) {
  static int the_handle;
  *handle = &the_handle;
  return stub::number("STUB_CUBLASLT_CREATE", 0);
}
int cublasLtMatmulDescCreate(Attributes** desc, int compute_type, int scale_type) {
  *desc = new Attributes;
  return compute_type == 68 && scale_type == 0 ? 0 : kNotSupported;
}
int cublasLtMatmulDescDestroy(Attributes* desc) {
  delete desc;
  return 0;
}
int cublasLtMatmulDescSetAttribute(Attributes* desc, int attribute, const void* value, size_t num_bytes) {
  return desc->set(attribute, value, num_bytes);
}
int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t cols, int64_t stride) {
  *layout = new Layout{type, rows, cols, stride};
  return type == 14 ? 0 : kNotSupported;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return 0;
}
int cublasLtMatmulPreferenceCreate(Attributes** preference) {
  *preference = new Attributes;
  return 0;
}
int cublasLtMatmulPreferenceDestroy(Attributes* preference) {
  delete preference;
  return 0;
}
int cublasLtMatmulPreferenceSetAttribute(Attributes* preference, int attribute, const void* value,
                                         size_t num_bytes) {
  return preference->set(attribute, value, num_bytes);
}
int cublasLtMatmulAlgoGetHeuristic(void*, Attributes* desc, Layout*, Layout*, Layout*, Layout*,
                                   Attributes* preference, int, Result* results, int* num_results) {
  std::string line = "preference";
  for (const auto& [attribute, value] : preference->values)
    line += " " + std::to_string(attribute) + "=" + std::to_string(value);
  stub::log(line + " bias at " + std::to_string(desc->values[8]));
  results[0] = {{{1, 2, 3, 4, 5, 6, 7, 8}}, static_cast<size_t>(preference->values[1]), 0, 1, {}};
  *num_results = 1;
  return 0;
}
// By columns: d[rows, cols] = op(a) . b + bias[rows] + beta c.
int cublasLtMatmul(void*, Attributes* desc, const void* alpha, const void* a, Layout* a_layout, const void* b,
                   Layout* b_layout, const void* beta, const void* c, Layout* c_layout, void* d,
                   Layout* d_layout, const Algorithm* algorithm, void*, size_t, void*) {
  const bool transpose = desc->values[3] == 1, add = desc->values[7] == 4;
  const auto* const bias = reinterpret_cast<const void*>(desc->values[8]);
  const uint64_t sums = transpose ? a_layout->rows : a_layout->cols;
  if ((transpose ? a_layout->cols : a_layout->rows) != d_layout->rows || b_layout->rows != sums ||
      b_layout->cols != d_layout->cols || c != d || c_layout != d_layout || algorithm->data[7] != 8)
    return kInvalidValue;
  for (int64_t col = 0; col < static_cast<int64_t>(d_layout->cols); ++col)
    for (int64_t row = 0; row < static_cast<int64_t>(d_layout->rows); ++row) {
      float sum = 0;
      for (int64_t i = 0; i < static_cast<int64_t>(sums); ++i)
        sum += value_of(a, transpose ? row * a_layout->stride + i : i * a_layout->stride + row) *
               value_of(b, col * b_layout->stride + i);
      sum *= *static_cast<const float*>(alpha);
      if (add) sum += value_of(bias, row);
      const int64_t at = col * d_layout->stride + row;
      if (const float factor = *static_cast<const float*>(beta); factor != 0) sum += factor * value_of(c, at);
      static_cast<uint16_t*>(d)[at] = rounded(sum);
    }
  return 0;
}

}  // extern "C"
