#include "halfbyte/tensor.hpp"

#include "core/words.h"

namespace halfbyte {
namespace {

constexpr std::array<Word<DType>, 9> kDTypes{{{DType::f32, "f32"},
                                              {DType::f16, "f16"},
                                              {DType::bf16, "bf16"},
                                              {DType::f64, "f64"},
                                              {DType::i8, "i8"},
                                              {DType::u8, "u8"},
                                              {DType::i32, "i32"},
                                              {DType::u32, "u32"},
                                              {DType::i64, "i64"}}};

}  // namespace

const char* to_string(DType dtype) { return word_of(kDTypes, dtype); }
DType parse_dtype(std::string_view word) { return value_of(kDTypes, word, "dtype"); }

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::i8:
    case DType::u8:
      return 1;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::f64:
    case DType::i64:
      return 8;
  }
  HALFBYTE_FAIL(bug, "size_of: no dtype {}", static_cast<int>(dtype));
}

int64_t num_elements(const TensorView& tensor) {
  int64_t product = 1;
  for (const int64_t extent : tensor.shape) {
    HALFBYTE_CHECK(extent >= 0, usage, "tensor: an extent must not be negative, got {}", extent);
    HALFBYTE_CHECK(!__builtin_mul_overflow(product, extent, &product), usage,
                   "tensor: the number of elements exceeds 2^63 - 1");
  }
  return product;
}

bool is_contiguous(const TensorView& tensor) {
  if (tensor.strides.empty()) return true;
  if (tensor.strides.size() != tensor.shape.size()) return false;
  int64_t expected = 1;
  for (size_t i = tensor.shape.size(); i-- > 0;) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != expected) return false;
    expected *= tensor.shape[i];
  }
  return true;
}

}  // namespace halfbyte
