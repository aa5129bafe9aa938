// For tests of products: memory of the device in which a value that was not written, or was read from where
// it should not be, shows.
#pragma once

#include "harness.h"

namespace halfbyte::testing {

// Memory of the device between bytes that are NaN, or without any.
class Surrounded {
 public:
  Surrounded(int64_t num_bytes, int64_t alignment, bool exact)
      : num_bytes_(num_bytes),
        before_(exact ? 0 : kMargin),
        bytes_(num_bytes + 2 * before_, alignment % 256, exact) {
    clear();
  }
  uint8_t* data() const { return bytes_.data() + before_; }
  void upload(const std::vector<uint8_t>& content) { fill(content.data()); }
  // To NaN.
  void clear() { fill(nullptr); }
  // What lies around it must be as it was.
  std::vector<uint8_t> download() const {
    std::vector<uint8_t> all(static_cast<size_t>(bytes_.num_bytes()));
    bytes_.download(all.data());
    const auto begin = all.begin() + before_, end = begin + num_bytes_;
    const auto is_nan = [](uint8_t byte) { return byte == kNaN; };
    EXPECT_TRUE(std::all_of(all.begin(), begin, is_nan) && std::all_of(end, all.end(), is_nan))
        << "memory around an array of " << num_bytes_ << " bytes was written";
    return {begin, end};
  }

 private:
  static constexpr int64_t kMargin = 512;
  static constexpr uint8_t kNaN = 0xFF;  // in every type
  void fill(const uint8_t* content) {
    std::vector<uint8_t> all(static_cast<size_t>(bytes_.num_bytes()), kNaN);
    if (content) std::copy_n(content, num_bytes_, all.begin() + before_);
    bytes_.upload(all.data());
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::synchronize(nullptr);  // before `all` goes
  }

  int64_t num_bytes_, before_;
  DeviceBytes bytes_;
};

}  // namespace halfbyte::testing
