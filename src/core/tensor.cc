#include "halfbyte/tensor.hpp"

#include "core/words.h"

namespace halfbyte {
namespace {

constexpr std::array<Word<DType>, 13> kDTypes{{{DType::f32, "f32"},
                                               {DType::f16, "f16"},
                                               {DType::bf16, "bf16"},
                                               {DType::f64, "f64"},
                                               {DType::i8, "i8"},
                                               {DType::u8, "u8"},
                                               {DType::i32, "i32"},
                                               {DType::u32, "u32"},
                                               {DType::i64, "i64"},
                                               {DType::i4, "i4"},
                                               {DType::u4, "u4"},
                                               {DType::f8_e4m3, "f8_e4m3"},
                                               {DType::f8_e8m0, "f8_e8m0"}}};

}  // namespace

const char* to_string(DType dtype) { return word_of(kDTypes, dtype); }
DType parse_dtype(std::string_view word) { return value_of(kDTypes, word, "dtype"); }

int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::i8:
    case DType::u8:
    case DType::f8_e4m3:
    case DType::f8_e8m0:
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
    case DType::i4:
    case DType::u4:
      HALFBYTE_FAIL(usage, "size_of: an element of {} has half a byte", to_string(dtype));
  }
  HALFBYTE_FAIL(bug, "size_of: no dtype {}", static_cast<int>(dtype));
}

int64_t num_elements(std::span<const int64_t> shape) {
  int64_t product = 1;
  bool fits = true, empty = false;
  for (const int64_t extent : shape) {
    HALFBYTE_CHECK(extent >= 0, usage, "tensor: an extent must not be negative, got {}", extent);
    empty = empty || extent == 0;
    fits = fits && !__builtin_mul_overflow(product, extent, &product);
  }
  HALFBYTE_CHECK(fits || empty, usage, "tensor: the number of elements exceeds 2^63 - 1");
  return empty ? 0 : product;
}

int64_t contiguous_bytes(DType dtype, std::span<const int64_t> shape) {
  const int64_t n = num_elements(shape);
  int64_t num_bytes = 0;
  if (is_packed(dtype)) {
    const int64_t last = shape.empty() ? 1 : shape.back();
    return n == 0 ? 0 : n / last * ((last + 1) / 2);
  }
  HALFBYTE_CHECK(!__builtin_mul_overflow(n, size_of(dtype), &num_bytes), usage,
                 "tensor: {} elements of {} exceed 2^63 - 1 bytes", n, to_string(dtype));
  return num_bytes;
}

bool is_contiguous(std::span<const int64_t> shape, std::span<const int64_t> strides) {
  if (strides.empty()) return true;
  if (strides.size() != shape.size()) return false;
  if (num_elements(shape) == 0) return true;
  int64_t expected = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] > 1 && strides[i] != expected) return false;
    expected *= shape[i];
  }
  return true;
}

}  // namespace halfbyte
