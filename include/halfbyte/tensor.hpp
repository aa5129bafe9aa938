// Element types and non-owning tensor views.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <ranges>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

#include "halfbyte/export.h"

namespace halfbyte {

// i4 (two's complement) and u4 have two elements in a byte, see contiguous_bytes. Of the OCP types of 8 bits,
// f8_e4m3 is "E4M3" with NaN and without infinity ("fn"), f8_e8m0 a power of two, 2^(byte - 127), 255 NaN.
enum class DType : uint8_t { f32, f16, bf16, f64, i8, u8, i32, u32, i64, i4, u4, f8_e4m3, f8_e8m0 };

// "f32", "bf16", ...: the words used by the command line, Python and reports.
HALFBYTE_API const char* to_string(DType dtype);
// Throws Error(usage) naming the known words.
HALFBYTE_API DType parse_dtype(std::string_view word);
// Bytes of one element. Throws Error(usage) for i4 and u4, whose elements take half a byte.
HALFBYTE_API int64_t size_of(DType dtype);
inline bool is_packed(DType dtype) { return dtype == DType::i4 || dtype == DType::u4; }
// What is computed with: not the types of 8 bits.
inline bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f64;
}

enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;  // of a CUDA device
  bool operator==(const Device&) const = default;
};

// The extents of a tensor, or its strides. Lists of up to kInline allocate no memory. A contiguous range: it
// converts to std::span.
class Extents {
 public:
  static constexpr size_t kInline = 8;
  using value_type = int64_t;
  using iterator = int64_t*;
  using const_iterator = const int64_t*;

  Extents() = default;
  Extents(std::initializer_list<int64_t> values) : Extents(values.begin(), values.end()) {}
  // Of std::vector, std::array, std::span.
  template <std::ranges::contiguous_range Range>
  requires(std::same_as<std::ranges::range_value_t<Range>, int64_t> &&
           !std::same_as<std::remove_cvref_t<Range>, Extents>) Extents(const Range& values)
      : Extents(std::ranges::begin(values), std::ranges::end(values)) {}
  template <std::input_iterator First, std::sentinel_for<First> Last>
  Extents(First first, Last last) {
    for (; first != last; ++first) push_back(*first);
  }
  operator std::vector<int64_t>() const { return {begin(), end()}; }

  size_t size() const { return heap_.empty() ? num_inline_ : heap_.size(); }
  bool empty() const { return size() == 0; }
  int64_t* data() { return heap_.empty() ? inline_ : heap_.data(); }
  const int64_t* data() const { return heap_.empty() ? inline_ : heap_.data(); }
  int64_t* begin() { return data(); }
  const int64_t* begin() const { return data(); }
  int64_t* end() { return data() + size(); }
  const int64_t* end() const { return data() + size(); }
  int64_t& operator[](size_t axis) { return data()[axis]; }
  int64_t operator[](size_t axis) const { return data()[axis]; }
  int64_t front() const { return *data(); }
  int64_t back() const { return data()[size() - 1]; }
  int64_t& front() { return *data(); }
  int64_t& back() { return data()[size() - 1]; }

  void push_back(int64_t value) {
    if (heap_.empty() && num_inline_ < kInline) {
      inline_[num_inline_++] = value;
      return;
    }
    if (heap_.empty()) {
      heap_.assign(inline_, inline_ + num_inline_);
      num_inline_ = 0;
    }
    heap_.push_back(value);
  }

  friend bool operator==(const Extents& a, const Extents& b) { return std::ranges::equal(a, b); }

 private:
  size_t num_inline_ = 0;  // 0 where heap_ has the values
  int64_t inline_[kInline] = {};
  std::vector<int64_t> heap_;  // all of a list that is longer
};

// T, const where Data is.
template <class Data, class T>
using ConstAs = std::conditional_t<std::is_const_v<Data>, const T, T>;

// A view of memory owned by somebody else: TensorView, or of what is only read ConstTensorView. `shape` in
// elements, `strides` in elements (empty: contiguous, row-major). Extents are 64-bit; rank 0 is one element.
template <class Data>  // void, const void
struct BasicTensorView {
  Data* data = nullptr;
  DType dtype = DType::f32;
  Extents shape = {};
  Extents strides = {};
  Device device = {};
  // Length of the memory from `data` on; -1: not known. If it is known, calls that need more are refused.
  int64_t num_bytes = -1;

  operator BasicTensorView<const void>() const requires(!std::is_const_v<Data>) {
    return {data, dtype, shape, strides, device, num_bytes};
  }
};
using TensorView = BasicTensorView<void>;
using ConstTensorView = BasicTensorView<const void>;

// Elements [begin, end) along one axis of a tensor.
struct Slice {
  int axis = 0;
  int64_t begin = 0, end = 0;
  bool operator==(const Slice&) const = default;
};

// Product of the extents. Throws Error(usage) if one is negative or the product exceeds 2^63 - 1.
HALFBYTE_API int64_t num_elements(std::span<const int64_t> shape);
template <class Data>
int64_t num_elements(const BasicTensorView<Data>& tensor) {
  return num_elements(tensor.shape);
}
inline int64_t num_elements(const ConstTensorView& tensor) { return num_elements(tensor.shape); }
HALFBYTE_API bool is_contiguous(std::span<const int64_t> shape, std::span<const int64_t> strides);
template <class Data>
bool is_contiguous(const BasicTensorView<Data>& tensor) {
  return is_contiguous(tensor.shape, tensor.strides);
}
inline bool is_contiguous(const ConstTensorView& tensor) {
  return is_contiguous(tensor.shape, tensor.strides);
}
// Bytes of a contiguous tensor. i4 and u4 have two elements in a byte along the last axis, the first in the
// low half. Each row of the last axis begins at a byte.
HALFBYTE_API int64_t contiguous_bytes(DType dtype, std::span<const int64_t> shape);

}  // namespace halfbyte
