// Element types and non-owning tensor views.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "halfbyte/export.h"

namespace halfbyte {

// i4 (two's complement) and u4 have two elements in a byte, see contiguous_bytes.
enum class DType : uint8_t { f32, f16, bf16, f64, i8, u8, i32, u32, i64, i4, u4 };

// "f32", "bf16", ...: the words used by the command line, Python and reports.
HALFBYTE_API const char* to_string(DType dtype);
// Throws Error(usage) naming the known words.
HALFBYTE_API DType parse_dtype(std::string_view word);
// Bytes of one element. Throws Error(usage) for i4 and u4, whose elements take half a byte.
HALFBYTE_API int64_t size_of(DType dtype);
inline bool is_packed(DType dtype) { return dtype == DType::i4 || dtype == DType::u4; }
inline bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f64;
}

enum class DeviceKind : uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;  // of a CUDA device
  bool operator==(const Device&) const = default;
};

// A view of memory owned by somebody else. `shape` in elements, `strides` in elements (empty:
// contiguous, row-major). Extents are 64-bit; rank 0 is one element.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  Device device;
  // Length of the memory from `data` on; -1: not known. If it is known, calls that need more are refused.
  int64_t num_bytes = -1;
};

// Product of the extents. Throws Error(usage) if one is negative or the product exceeds 2^63 - 1.
HALFBYTE_API int64_t num_elements(const TensorView& tensor);
HALFBYTE_API bool is_contiguous(const TensorView& tensor);
// Bytes of a contiguous tensor. i4 and u4 have two elements in a byte along the last axis, the first in the
// low half. Each row of the last axis begins at a byte.
HALFBYTE_API int64_t contiguous_bytes(DType dtype, std::span<const int64_t> shape);

}  // namespace halfbyte
