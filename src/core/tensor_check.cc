#include "core/tensor_check.h"

#include <algorithm>

#include "core/checks.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

uintptr_t begin_of(const ArgumentMemory& memory) { return reinterpret_cast<uintptr_t>(memory.data); }
uintptr_t end_of(const ArgumentMemory& memory) {
  return begin_of(memory) + static_cast<uintptr_t>(memory.num_bytes);
}

// One past the last byte that the tensor touches, from its data.
int64_t extent_bytes(const char* op, const TensorArgument& argument) {
  const TensorView& view = *argument.view;
  int64_t last = 0;
  for (size_t i = 0; i < argument.shape.size(); ++i) {
    int64_t step = 0;
    if (argument.shape[i] == 0) return 0;
    HALFBYTE_CHECK(!__builtin_mul_overflow(argument.shape[i] - 1, view.strides[i], &step) &&
                       !__builtin_add_overflow(last, step, &last),
                   usage, "{}: {}: strides {} of shape {} exceed 2^63 - 1 elements", op, argument.name,
                   text_of(view.strides), text_of(argument.shape));
  }
  int64_t count = 0, num_bytes = 0;
  HALFBYTE_CHECK(!__builtin_add_overflow(last, 1, &count) &&
                     !__builtin_mul_overflow(count, size_of(argument.dtype), &num_bytes),
                 usage, "{}: {}: strides {} of shape {} exceed 2^63 - 1 bytes", op, argument.name,
                 text_of(view.strides), text_of(argument.shape));
  return num_bytes;
}

void check_shape(const char* op, const TensorArgument& argument) {
  const std::span<const int64_t> shape = argument.view->shape;
  if (!argument.any_leading_axes) {
    const bool one = argument.shape.empty() && shape.size() == 1 && shape[0] == 1;  // as the header has it
    HALFBYTE_CHECK(one || std::ranges::equal(shape, argument.shape), usage,
                   "{}: {} must have the shape {}, got {}", op, argument.name, text_of(argument.shape),
                   text_of(shape));
    return;
  }
  const auto rows = [](std::span<const int64_t> axes) {  // -1: there cannot be so many
    int64_t product = 1;
    for (const int64_t extent : axes)
      if (extent < 0 || __builtin_mul_overflow(product, extent, &product)) return int64_t{-1};
    return product;
  };
  const bool one_column = argument.shape[1] == 1 && rows(shape) == argument.shape[0];
  const bool fits = !shape.empty() && shape.back() == argument.shape[1] &&
                    rows(shape.first(shape.size() - 1)) == argument.shape[0];
  HALFBYTE_CHECK(fits || one_column, usage,
                 "{}: {} must have the rows and columns of the descriptor, {}, got the shape {}", op,
                 argument.name, text_of(argument.shape), text_of(shape));
}

}  // namespace

void check_alignment(const char* what, int64_t alignment, DType dtype) {
  HALFBYTE_CHECK(alignment > 0 && (alignment & (alignment - 1)) == 0 && alignment >= size_of(dtype), usage,
                 "{}: alignment must be a power of two and at least the {} bytes of {}, got {}", what,
                 size_of(dtype), to_string(dtype), alignment);
}

std::string text_of(std::span<const int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

ArgumentMemory check_tensor(const char* op, const TensorArgument& argument, Device device) {
  const TensorView& view = *argument.view;
  const char* const name = argument.name;
  HALFBYTE_CHECK(view.dtype == argument.dtype, usage, "{}: {} must be {}, got {}", op, name,
                 to_string(argument.dtype), to_string(view.dtype));
  check_shape(op, argument);
  HALFBYTE_CHECK(view.strides.empty() || view.strides.size() == view.shape.size(), usage,
                 "{}: {} must have a stride for each of its {} axes, got {}", op, name, view.shape.size(),
                 view.strides.size());
  HALFBYTE_CHECK(view.device == device, usage, "{}: {} must be on {}, got {}", op, name, to_string(device),
                 to_string(view.device));
  for (const int64_t stride : view.strides)
    HALFBYTE_CHECK(stride >= 0, usage, "{}: {} must have strides >= 0, got {}", op, name,
                   text_of(view.strides));
  const bool strided = argument.may_be_strided && !is_packed(argument.dtype) && !view.strides.empty();
  HALFBYTE_CHECK(strided || is_contiguous(view), usage,
                 "{}: {} must be contiguous{}, got strides {} of shape {}", op, name, argument.contiguous_as,
                 text_of(view.strides), text_of(view.shape));
  const int64_t num_bytes =
      strided ? extent_bytes(op, argument) : contiguous_bytes(argument.dtype, argument.shape);
  const ArgumentMemory memory{
      name, view.data, num_bytes, view.num_bytes, argument.alignment, argument.promised, argument.written};
  check_argument(op, memory, device);
  return memory;
}

void check_argument(const char* op, const ArgumentMemory& memory, Device device) {
  if (memory.num_bytes == 0) return;
  const char* const name = memory.name;
  HALFBYTE_CHECK(memory.data != nullptr, usage, "{}: {} needs {} bytes but has no data", op, name,
                 memory.num_bytes);
  HALFBYTE_CHECK(memory.known_bytes < 0 || memory.known_bytes >= memory.num_bytes, usage,
                 "{}: {} needs {} bytes, its memory has {}", op, name, memory.num_bytes, memory.known_bytes);
  HALFBYTE_CHECK((begin_of(memory) & static_cast<uintptr_t>(memory.alignment - 1)) == 0, usage,
                 "{}: {} must be aligned to {} bytes{}, its address is {:#x}", op, name, memory.alignment,
                 memory.promised ? " (descriptor.alignment)" : "", begin_of(memory));
  try {
    check_memory(name, memory.data, memory.num_bytes, device);
  } catch (const Error& error) {
    HALFBYTE_FAIL(usage, "{}: {}", op, error.what());
  }
}

void check_apart(const char* op, const ArgumentMemory& a, const ArgumentMemory& b) {
  if ((!a.written && !b.written) || a.num_bytes == 0 || b.num_bytes == 0) return;
  HALFBYTE_CHECK(begin_of(a) >= end_of(b) || begin_of(b) >= end_of(a), usage,
                 "{}: {} must not overlap {}: their bytes are {:#x} to {:#x} and {:#x} to {:#x}", op, a.name,
                 b.name, begin_of(a), end_of(a), begin_of(b), end_of(b));
}

void check_all_apart(const char* op, std::span<const ArgumentMemory> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i)
    for (size_t j = 0; j < i; ++j) check_apart(op, arguments[i], arguments[j]);
}

void check_workspace(const char* op, const void* workspace, int64_t num_bytes, Device device,
                     std::span<const ArgumentMemory> arguments) {
  const ArgumentMemory memory{"workspace", workspace, num_bytes, -1, 16, false, true};
  check_argument(op, memory, device);
  for (const ArgumentMemory& argument : arguments) check_apart(op, memory, argument);
}

void check_same_spec(const char* op, const char* name, const QuantSpec& given, const QuantSpec& expected,
                     const char* other) {
  if (given == expected) return;
  const auto same = [&](const char* field, const auto& actual, const auto& wanted) {
    HALFBYTE_CHECK(actual == wanted, usage, "{}: {}.spec.{} must be {} as in {}, got {}", op, name, field,
                   wanted, other, actual);
  };
  using Text = std::string_view;
  same("format", Text(info(given.format).name), Text(info(expected.format).name));
  same("asymmetric", given.asymmetric, expected.asymmetric);
  same("granularity", Text(to_string(given.granularity)), Text(to_string(expected.granularity)));
  same("group_size", given.group_size, expected.group_size);
  same("scale_dtype", Text(to_string(given.scale_dtype)), Text(to_string(expected.scale_dtype)));
  same("double_quant", given.double_quant, expected.double_quant);
  HALFBYTE_FAIL(usage, "{}: {}.spec must be that of {}, its table is not", op, name, other);
}

}  // namespace halfbyte
