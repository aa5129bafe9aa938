// Memory that a run works in beside its arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace halfbyte {

// Hands out the memory of a workspace, one part behind the other; what does not fit is allocated. Of one
// thread. The parts live as long as the object.
class Scratch {
 public:
  static constexpr int64_t kAlignment = 64;

  Scratch() = default;  // allocates all
  Scratch(void* data, int64_t num_bytes)
      : next_(static_cast<std::byte*>(data)), end_(static_cast<std::byte*>(data) + num_bytes) {
    align();
  }

  // n elements, uninitialized.
  template <class T>
  T* take(int64_t n) {
    static_assert(std::is_trivially_copyable_v<T> && alignof(T) <= kAlignment);
    const int64_t num_bytes = bytes_of<T>(n);
    if (end_ - next_ < num_bytes) {
      own_.push_back(
          std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(num_bytes + kAlignment)));
      next_ = own_.back().get();
      end_ = next_ + num_bytes + kAlignment;
      align();
    }
    std::byte* const data = next_;
    next_ += num_bytes;
    return reinterpret_cast<T*>(data);
  }
  // What `take` needs.
  template <class T>
  static int64_t bytes_of(int64_t n) {
    return (n * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  }

 private:
  void align() {
    const auto address = reinterpret_cast<uintptr_t>(next_);
    next_ += (kAlignment - address % kAlignment) % kAlignment;
  }

  std::byte *next_ = nullptr, *end_ = nullptr;
  std::vector<std::unique_ptr<std::byte[]>> own_;
};

}  // namespace halfbyte
