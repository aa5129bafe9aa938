// What plans ask of the memory of their arguments.
#pragma once

#include <span>
#include <string>

#include "halfbyte/format.hpp"
#include "halfbyte/plan.hpp"

namespace halfbyte {

// The largest power of two, up to the 16 bytes that matter, of which the address is a multiple.
inline int64_t alignment_of(const void* data) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data) | 16;
  return static_cast<int64_t>(address & (~address + 1));
}

std::string text_of(std::span<const int64_t> shape);  // "[2, 3]"

// The memory of an argument, and what a run does with it.
struct ArgumentMemory {
  const char* name;
  const void* data;
  int64_t num_bytes;    // that are touched; 0: none, wherever `data` points
  int64_t known_bytes;  // that there are; -1: not known
  int64_t alignment;    // a power of two
  bool promised;        // the alignment is that of the descriptor
  bool written;         // else read
};

// Where an argument of one run lies, and what it says of itself: by pointers, as a run copies no shapes.
struct ArgumentData {
  const void* data;
  int64_t known_bytes;   // that there are; -1: not known
  const Extents* shape;  // null: memory without a type, which has none of what follows
  const Extents* strides;
  DType dtype;
  Device device;
};
template <class Data>
ArgumentData data_of(const BasicTensorView<Data>& view) {
  return {view.data, view.num_bytes, &view.shape, &view.strides, view.dtype, view.device};
}
inline ArgumentData untyped(const void* data, int64_t known_bytes = -1) {
  return {data, known_bytes, nullptr, nullptr, DType::u8, {}};
}

// A tensor argument, and what it must be.
struct TensorArgument {
  const char* name = nullptr;
  const ArgumentData* view = nullptr;
  DType dtype = DType::f32;
  std::span<const int64_t> shape;  // one element: [] or [1]
  bool written = false;            // else read
  int64_t alignment = 1;           // in bytes
  bool promised = false;           // the alignment is that of the descriptor
  bool may_be_strided = false;     // else it must be contiguous
  const char* contiguous_as = "";  // why: " as ..."
  // shape is [rows, cols]: the leading axes have `rows` elements together; of one column, the last axis may
  // be missing.
  bool any_leading_axes = false;
};

// Of a descriptor: what it promises of the addresses of tensors of `dtype`. `what` names it in errors.
void check_alignment(const char* what, int64_t alignment, DType dtype);

// These throw Error(usage) that names operation, argument, rule and values.
// Dtype, shape, strides, device, memory. Returns what is touched.
ArgumentMemory check_tensor(const char* op, const TensorArgument& argument, Device device);
void check_argument(const char* op, const ArgumentMemory& memory, Device device);
// Where one of the two is written.
void check_apart(const char* op, const ArgumentMemory& a, const ArgumentMemory& b);
// Each pair of them.
void check_all_apart(const char* op, std::span<const ArgumentMemory> arguments);
// Of a run with these arguments, from all of which it must lie apart; or none, for the status of one.
void check_workspace(const char* op, const Workspace& workspace, int64_t num_bytes, Device device,
                     std::span<const ArgumentMemory> arguments = {});

// The spec of an argument is that of another.
void check_same_spec(const char* op, const char* name, const QuantSpec& given, const QuantSpec& expected,
                     const char* other = "the descriptor");

}  // namespace halfbyte
