#include "core/tensor_check.h"

#include "core/checks.h"
#include "halfbyte/device.hpp"

namespace halfbyte {
namespace {

uintptr_t begin_of(const ArgumentMemory& memory) { return reinterpret_cast<uintptr_t>(memory.data); }
uintptr_t end_of(const ArgumentMemory& memory) {
  return begin_of(memory) + static_cast<uintptr_t>(memory.num_bytes);
}

}  // namespace

std::string text_of(std::span<const int64_t> shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

void check_argument(const char* op, const ArgumentMemory& memory, Device device) {
  if (memory.num_bytes == 0) return;
  const char* const name = memory.name;
  HALFBYTE_CHECK(memory.data != nullptr, usage, "{}: {} needs {} bytes but has no data", op, name,
                 memory.num_bytes);
  HALFBYTE_CHECK(memory.known_bytes < 0 || memory.known_bytes >= memory.num_bytes, usage,
                 "{}: {} needs {} bytes, its memory has {}", op, name, memory.num_bytes, memory.known_bytes);
  HALFBYTE_CHECK(begin_of(memory) % static_cast<uintptr_t>(memory.alignment) == 0, usage,
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

void check_workspace(const char* op, const void* workspace, int64_t num_bytes, Device device,
                     std::span<const ArgumentMemory> arguments) {
  const ArgumentMemory memory{"workspace", workspace, num_bytes, -1, 16, false, true};
  check_argument(op, memory, device);
  for (const ArgumentMemory& argument : arguments) check_apart(op, memory, argument);
}

}  // namespace halfbyte
