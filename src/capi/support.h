// What the C functions share: no exception leaves them, sized structures, enumerators, tensors.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "halfbyte/dlpack.hpp"
#include "halfbyte/error.hpp"
#include "halfbyte/format.hpp"
#include "halfbyte/halfbyte.h"
#include "halfbyte/ops.hpp"

struct halfbyte_blob {
  std::string bytes;
};

namespace halfbyte::capi {

template <class... Values>
[[noreturn]] void refuse(fmt::format_string<Values...> text, Values&&... values) {
  throw Error(ErrorCode::usage, fmt::format(text, std::forward<Values>(values)...));
}

// Sets what halfbyte_last_error() and its like say.
halfbyte_status fail(const Error& error) noexcept;
halfbyte_status fail(ErrorCode code, const char* message) noexcept;

// Runs the body of a C function.
template <class Body>
halfbyte_status guard(const Body& body) noexcept {
  try {
    body();
    return HALFBYTE_OK;
  } catch (const Error& error) {
    return fail(error);
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::no_memory, "out of memory");
  } catch (const std::exception& error) {
    return fail(ErrorCode::bug, error.what());
  } catch (...) {
    return fail(ErrorCode::bug, "an exception of an unknown type");
  }
}

template <class T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) refuse("{} must not be NULL", name);
  if constexpr (requires { alignof(T); })
    if (const auto address = reinterpret_cast<uintptr_t>(pointer); address % alignof(T) != 0)
      refuse("{} must be aligned to {} bytes, got {:#x}", name, alignof(T), address);
  return *pointer;
}

// ---- Sized structures

inline constexpr size_t kLargestStruct = 4096;  // more is not a struct_size but uninitialized memory

// Whether a structure of so many bytes ends within a field of T. No version has such a structure.
template <class T>
bool cuts_field(size_t size);
#define HALFBYTE_CUTS(field) || (offsetof(S, field) < size && size < offsetof(S, field) + sizeof(S::field))
// NOLINTBEGIN(bugprone-macro-parentheses)
#define HALFBYTE_STRUCT(name, fields)         \
  template <>                                 \
  inline bool cuts_field<name>(size_t size) { \
    using S = name;                           \
    return false fields;                      \
  }
// NOLINTEND(bugprone-macro-parentheses)
#include "capi/fields.h"
#undef HALFBYTE_STRUCT
#undef HALFBYTE_CUTS

template <class T>
size_t check_struct_size(size_t struct_size, const char* name) {
  if (struct_size < sizeof(size_t) || struct_size > kLargestStruct || cuts_field<T>(struct_size))
    refuse("{}: struct_size must be the sizeof of its structure, {} in this version, got {}", name, sizeof(T),
           struct_size);
  return struct_size;
}

// What the caller gave, in the structure of this version: `defaults` where his is older. NULL: `defaults`.
template <class T>
T read_struct(const T* given, const T& defaults, const char* name) {
  T result = defaults;
  if (given != nullptr) {
    const size_t size = check_struct_size<T>(required(given, name).struct_size, name);
    std::memcpy(&result, given, std::min(size, sizeof(T)));
    const char* const bytes = reinterpret_cast<const char*>(given);
    for (size_t i = sizeof(T); i < size; ++i)
      if (bytes[i] != 0)
        refuse("{}: this version knows {} bytes of the structure, but byte {} of {} is set", name, sizeof(T),
               i, size);
  }
  result.struct_size = sizeof(T);
  return result;
}

// As much of `value` as the structure of the caller has; 0 for what is newer than this version.
template <class T>
void write_struct(T* to, T value, size_t struct_size, const char* name) {
  char* const bytes = reinterpret_cast<char*>(&required(to, name));
  value.struct_size = check_struct_size<T>(struct_size, name);  // which stays that of the caller
  std::memcpy(bytes, &value, std::min(struct_size, sizeof(T)));
  if (struct_size > sizeof(T)) std::memset(bytes + sizeof(T), 0, struct_size - sizeof(T));
}
template <class T>
void write_struct(T* to, const T& value, const char* name) {
  write_struct(to, value, required(to, name).struct_size, name);
}

// What the _init functions do.
template <class T>
halfbyte_status init_struct(T* to, const T& defaults, size_t struct_size, const char* name) {
  return guard([&] { write_struct(to, defaults, struct_size, name); });
}

// ---- Values

template <class Enum>
Enum enum_of(int64_t value, Enum last, const char* name) {
  if (value < 0 || value > static_cast<int32_t>(last))
    refuse("{} must be 0 to {}, got {}", name, static_cast<int>(last), value);
  return static_cast<Enum>(value);
}
// The word of an enumerator; NULL where there is none.
template <class Enum>
const char* word_of(int32_t value, Enum last) {
  return value < 0 || value > static_cast<int32_t>(last) ? nullptr : to_string(static_cast<Enum>(value));
}
template <class Enum>
std::optional<Enum> optional_of(int64_t value, Enum last, const char* name) {
  if (value == HALFBYTE_UNSET) return std::nullopt;
  return enum_of(value, last, name);
}
inline DType dtype_of(int32_t value, const char* name) { return enum_of(value, DType::f8_e8m0, name); }
inline bool flag_of(int64_t value, const char* name) {
  if (value != 0 && value != 1) refuse("{} must be 0 or 1, got {}", name, value);
  return value == 1;
}
inline int threads_of(int64_t value, const char* name) {
  if (value < 0 || value > INT_MAX) refuse("{} must be 0 to {}, got {}", name, INT_MAX, value);
  return static_cast<int>(value);
}

// The extents that a caller gave; more than kMostExtents are not extents but uninitialized memory.
inline constexpr int64_t kMostExtents = 32;
inline std::vector<int64_t> extents_of(const int64_t* shape, int64_t ndim, int64_t fewest,
                                       const char* shape_name, const char* ndim_name) {
  if (ndim < fewest || ndim > kMostExtents)
    refuse("{} must be {} to {}, got {}", ndim_name, fewest, kMostExtents, ndim);
  if (ndim == 0) return {};
  required(shape, shape_name);
  return {shape, shape + ndim};
}

inline Slice slice_of(const halfbyte_slice* slice, const char* name) {
  const halfbyte_slice& given = required(slice, name);
  // What is no axis of any tensor is refused as none of this one.
  const bool fits = given.axis >= 0 && given.axis <= kMostExtents;
  return {fits ? static_cast<int>(given.axis) : -1, given.begin, given.end};
}

// The element `index` of a list.
template <class List>
const auto& element(const List& list, int64_t index, const char* name) {
  if (index < 0 || static_cast<uint64_t>(index) >= list.size())
    refuse("{}: index must be 0 to {}, got {}", name, static_cast<int64_t>(list.size()) - 1, index);
  return list[static_cast<size_t>(index)];
}

inline TensorView view_of(const DLTensor* tensor, const char* name) {
  return from_dlpack(required(tensor, name), name);
}
// A tensor that may be missing.
inline TensorView optional_view_of(const DLTensor* tensor, const char* name) {
  return tensor == nullptr ? TensorView{} : view_of(tensor, name);
}

// NULL is an empty list only; `name` for the message.
std::vector<std::string> words_of(const char* const* words, int64_t count, const char* name);
QuantSpec spec_of(const halfbyte_quant_spec* spec, const char* name);
halfbyte_quant_spec to_c(const QuantSpec& spec);
// Null: the defaults.
Encoding encoding_of(const halfbyte_encoding* encoding, const char* name);
halfbyte_encoding to_c(const Encoding& encoding);
// A part of a quantized matrix, or an array of scales: contiguous, with n elements. The memory, NULL: none.
void* part(const DLTensor* tensor, const char* name, DType dtype, int64_t n, Device device);
QuantizedView parts_of(const halfbyte_quantized* given, const QuantSpec& spec, int64_t rows, int64_t cols,
                       Device device, const char* name);
halfbyte_quantize_status to_c(const QuantizeStatus& status);
Execution execution_of(const halfbyte_execution* execution);
// The opaque weight for C (capi/weight.cc), and back.
halfbyte_quantized_weight* new_weight(QuantizedTensor tensor);
const QuantizedTensor& tensor_of(const halfbyte_quantized_weight* weight, const char* name);

}  // namespace halfbyte::capi
