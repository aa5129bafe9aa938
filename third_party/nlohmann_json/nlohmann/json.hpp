// nlohmann-json, found behind this file, made fit for a process without memory: it takes some to destroy an array
// or an object, as a std::vector of values, where the exception would end the process. Such vectors have a
// reserve here, for where nothing else is left.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <nlohmann/json_fwd.hpp>
#include <type_traits>
#include <utility>

namespace halfbyte::json_reserve {

constexpr std::size_t kBytes = 1 << 20;  // the system gives the pages when they are written
alignas(std::max_align_t) inline char bytes[kBytes];
inline std::size_t used = 0, num_blocks = 0;  // none: all is free again
inline std::atomic_flag busy;

struct Lock {
  Lock() {
    while (busy.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~Lock() { busy.clear(std::memory_order_release); }
};

inline void* allocate(std::size_t size) {
  if (void* const block = ::operator new(size, std::nothrow)) return block;
  const Lock lock;
  size = (size + alignof(std::max_align_t) - 1) / alignof(std::max_align_t) * alignof(std::max_align_t);
  if (size > kBytes - used) throw std::bad_alloc();
  ++num_blocks;
  return bytes + std::exchange(used, used + size);
}
inline void deallocate(void* block) noexcept {
  const std::less<const void*> before;
  if (before(block, bytes) || !before(block, bytes + kBytes)) return ::operator delete(block);
  const Lock lock;
  if (--num_blocks == 0) used = 0;
}

template <class Value>
struct Allocator {
  using value_type = Value;
  using size_type = std::size_t;
  using difference_type = std::ptrdiff_t;
  using propagate_on_container_move_assignment = std::true_type;
  Value* allocate(std::size_t n) {
    if (n > static_cast<std::size_t>(PTRDIFF_MAX) / sizeof(Value)) throw std::bad_array_new_length();
    return static_cast<Value*>(json_reserve::allocate(n * sizeof(Value)));
  }
  void deallocate(Value* block, std::size_t) noexcept { json_reserve::deallocate(block); }
};

}  // namespace halfbyte::json_reserve

template <>
struct std::allocator<nlohmann::json> : halfbyte::json_reserve::Allocator<nlohmann::json> {
  allocator() = default;
  template <class Other>
  constexpr allocator(const std::allocator<Other>&) noexcept {}
  friend constexpr bool operator==(const allocator&, const allocator&) noexcept { return true; }
};
template <>
struct std::allocator<nlohmann::ordered_json> : halfbyte::json_reserve::Allocator<nlohmann::ordered_json> {
  allocator() = default;
  template <class Other>
  constexpr allocator(const std::allocator<Other>&) noexcept {}
  friend constexpr bool operator==(const allocator&, const allocator&) noexcept { return true; }
};

#include_next <nlohmann/json.hpp>
