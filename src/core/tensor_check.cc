#include "core/tensor_check.h"

#include <algorithm>

#include "core/expect.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

uintptr_t begin_of(const ArgumentMemory& memory) { return reinterpret_cast<uintptr_t>(memory.data); }
uintptr_t end_of(const ArgumentMemory& memory) {
  return begin_of(memory) + static_cast<uintptr_t>(memory.num_bytes);
}

// One past the last byte that the tensor touches, from its data.
int64_t extent_bytes(const char* op, const TensorArgument& argument) {
  const Extents& strides = *argument.view->strides;
  int64_t last = 0;
  for (size_t i = 0; i < argument.shape.size(); ++i) {
    int64_t step = 0;
    if (argument.shape[i] == 0) return 0;
    HALFBYTE_CHECK(!__builtin_mul_overflow(argument.shape[i] - 1, strides[i], &step) &&
                       !__builtin_add_overflow(last, step, &last),
                   usage, "{}: {}: strides {} of shape {} exceed 2^63 - 1 elements", op, argument.name,
                   text_of(strides), text_of(argument.shape));
  }
  int64_t count = 0, num_bytes = 0;
  HALFBYTE_CHECK(!__builtin_add_overflow(last, 1, &count) &&
                     !__builtin_mul_overflow(count, size_of(argument.dtype), &num_bytes),
                 usage, "{}: {}: strides {} of shape {} exceed 2^63 - 1 bytes", op, argument.name,
                 text_of(strides), text_of(argument.shape));
  return num_bytes;
}

// `too_small`: the kind of that error.
void check_touched(const char* op, const ArgumentMemory& memory, Device device, ErrorKind too_small) {
  if (memory.num_bytes == 0) return;
  const char* const name = memory.name;
  const auto details = [&](ErrorKind kind, std::string expected, std::string actual) {
    return ErrorDetails{kind, name, std::move(expected), std::move(actual)};
  };
  const auto bytes = [](int64_t num_bytes) { return fmt::format("{} bytes", num_bytes); };
  HALFBYTE_CHECK_AS(memory.data != nullptr, usage, details(too_small, bytes(memory.num_bytes), "no data"),
                    "{}: {} needs {} bytes but has no data", op, name, memory.num_bytes);
  HALFBYTE_CHECK_AS(memory.known_bytes < 0 || memory.known_bytes >= memory.num_bytes, usage,
                    details(too_small, bytes(memory.num_bytes), bytes(memory.known_bytes)),
                    "{}: {} needs {} bytes, its memory has {}", op, name, memory.num_bytes,
                    memory.known_bytes);
  HALFBYTE_CHECK_AS((begin_of(memory) & static_cast<uintptr_t>(memory.alignment - 1)) == 0, usage,
                    details(ErrorKind::misaligned, fmt::format("aligned to {} bytes", memory.alignment),
                            fmt::format("{:#x}", begin_of(memory))),
                    "{}: {} must be aligned to {} bytes{}, its address is {:#x}", op, name, memory.alignment,
                    memory.promised ? " (descriptor.alignment)" : "", begin_of(memory));
  try {
    check_memory(name, memory.data, memory.num_bytes, device);
  } catch (const Error& error) {
    throw Error(ErrorCode::usage, fmt::format("{}: {}", op, error.what()),
                details(ErrorKind::invalid_argument, fmt::format("memory of {}", to_string(device)), ""));
  }
}

void check_shape(const char* op, const TensorArgument& argument) {
  const std::span<const int64_t> shape = *argument.view->shape;
  if (!argument.any_leading_axes) {
    const bool one = argument.shape.empty() && shape.size() == 1 && shape[0] == 1;  // as the header has it
    HALFBYTE_MUST(one || std::ranges::equal(shape, argument.shape), invalid_argument, op, argument.name,
                  "have the shape", text_of(argument.shape), text_of(shape));
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
  HALFBYTE_CHECK_AS(
      fits || one_column, usage,
      (ErrorDetails{ErrorKind::invalid_argument, argument.name, text_of(argument.shape), text_of(shape)}),
      "{}: {} must have the rows and columns of the descriptor, {}, got the shape {}", op, argument.name,
      text_of(argument.shape), text_of(shape));
}

}  // namespace

void check_alignment(const char* what, int64_t alignment, DType dtype) {
  HALFBYTE_MUST(
      alignment > 0 && (alignment & (alignment - 1)) == 0 && alignment >= size_of(dtype), invalid_problem,
      what, "alignment", "be",
      fmt::format("a power of two and at least the {} bytes of {}", size_of(dtype), to_string(dtype)),
      alignment);
}

std::string text_of(std::span<const int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

ArgumentMemory check_tensor(const char* op, const TensorArgument& argument, Device device) {
  const ArgumentData& view = *argument.view;
  const Extents &shape = *view.shape, &strides = *view.strides;
  const char* const name = argument.name;
  HALFBYTE_MUST(view.dtype == argument.dtype, invalid_argument, op, name, "be", to_string(argument.dtype),
                to_string(view.dtype));
  check_shape(op, argument);
  HALFBYTE_MUST(strides.empty() || strides.size() == shape.size(), invalid_argument, op, name, "have",
                fmt::format("a stride for each of its {} axes", shape.size()), strides.size());
  HALFBYTE_MUST(view.device == device, invalid_argument, op, name, "be on", to_string(device),
                to_string(view.device));
  for (const int64_t stride : strides)
    HALFBYTE_MUST(stride >= 0, invalid_argument, op, name, "have", "strides >= 0", text_of(strides));
  const bool strided = argument.may_be_strided && !is_packed(argument.dtype) && !strides.empty();
  HALFBYTE_MUST(strided || is_contiguous(shape, strides), invalid_argument, op, name, "be",
                fmt::format("contiguous{}", argument.contiguous_as),
                fmt::format("strides {} of shape {}", text_of(strides), text_of(shape)));
  const int64_t num_bytes =
      strided ? extent_bytes(op, argument) : contiguous_bytes(argument.dtype, argument.shape);
  const ArgumentMemory memory{
      name, view.data, num_bytes, view.known_bytes, argument.alignment, argument.promised, argument.written};
  check_argument(op, memory, device);
  return memory;
}

void check_argument(const char* op, const ArgumentMemory& memory, Device device) {
  check_touched(op, memory, device, ErrorKind::buffer_too_small);
}

void check_apart(const char* op, const ArgumentMemory& a, const ArgumentMemory& b) {
  if ((!a.written && !b.written) || a.num_bytes == 0 || b.num_bytes == 0) return;
  HALFBYTE_CHECK_AS(begin_of(a) >= end_of(b) || begin_of(b) >= end_of(a), usage,
                    (ErrorDetails{ErrorKind::invalid_argument, a.name, fmt::format("apart from {}", b.name),
                                  fmt::format("{:#x} to {:#x}", begin_of(a), end_of(a))}),
                    "{}: {} must not overlap {}: their bytes are {:#x} to {:#x} and {:#x} to {:#x}", op,
                    a.name, b.name, begin_of(a), end_of(a), begin_of(b), end_of(b));
}

void check_all_apart(const char* op, std::span<const ArgumentMemory> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i)
    for (size_t j = 0; j < i; ++j) check_apart(op, arguments[i], arguments[j]);
}

void check_workspace(const char* op, const Workspace& workspace, int64_t num_bytes, Device device,
                     std::span<const ArgumentMemory> arguments) {
  const int64_t given = std::max<int64_t>(workspace.num_bytes, 0);
  const ArgumentMemory memory{"workspace", workspace.data, num_bytes, given, 16, false, true};
  check_touched(op, memory, device, ErrorKind::workspace_too_small);
  for (const ArgumentMemory& argument : arguments) check_apart(op, memory, argument);
}

void check_same_spec(const char* op, const char* name, const QuantSpec& given, const QuantSpec& expected,
                     const char* other) {
  if (given == expected) return;
  const auto same = [&](const char* field, const auto& actual, const auto& wanted) {
    HALFBYTE_CHECK_AS(actual == wanted, usage,
                      (ErrorDetails{ErrorKind::invalid_argument, fmt::format("{}.spec.{}", name, field),
                                    fmt::format("{}", wanted), fmt::format("{}", actual)}),
                      "{}: {}.spec.{} must be {} as in {}, got {}", op, name, field, wanted, other, actual);
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
