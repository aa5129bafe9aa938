#include "io/whole_tensors.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <thread>

#include "core/checks.h"

namespace halfbyte::io {
namespace {

// Tensors whose byte i of number t is what byte_of says, and how many bytes were read.
struct Source {
  std::vector<StoredTensor> tensors;
  std::atomic<uint64_t> num_read = 0;
  std::atomic<bool> fails = false;

  explicit Source(std::initializer_list<uint64_t> sizes) {
    for (const uint64_t size : sizes) {
      tensors.emplace_back();
      tensors.back().num_bytes = size;
    }
  }
  static std::byte byte_of(size_t tensor, uint64_t i) {
    return static_cast<std::byte>((i * 2654435761u >> 7) + tensor);
  }
  std::vector<std::byte> read(WholeTensors& whole, size_t tensor, const StoredRange& range) {
    std::vector<std::byte> bytes(range.num_bytes());
    const auto from_file = [&](uint64_t offset, std::span<std::byte> part) {
      HALFBYTE_CHECK(!fails.exchange(false), io, "cannot read");
      num_read += part.size();
      for (size_t i = 0; i < part.size(); ++i) part[i] = byte_of(tensor, offset + i);
    };
    whole.read(tensors[tensor], range, from_file, bytes);
    return bytes;
  }
  static bool is_right(size_t tensor, const StoredRange& range, const std::vector<std::byte>& bytes) {
    for (uint64_t i = 0; i < bytes.size(); ++i)
      if (bytes[i] !=
          byte_of(tensor, range.offset + i / range.run_bytes * range.stride + i % range.run_bytes))
        return false;
    return true;
  }
};

// Columns [first, first + width) of a tensor with rows of `stride` bytes.
StoredRange columns(const StoredTensor& tensor, uint64_t stride, uint64_t first, uint64_t width) {
  return {first, width, stride, static_cast<int64_t>(tensor.num_bytes / stride)};
}

TEST(WholeTensors, are_read_once_by_all_threads) {
  constexpr uint64_t kStride = 12'000, kWidth = 100;
  Source source({kStride * 1000, kStride * 300});  // not whole parts
  WholeTensors whole;
  std::atomic<uint64_t> next = 0, wrong = 0;
  std::vector<std::jthread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&] {
      for (uint64_t i; (i = next++) < 2 * kStride / kWidth;) {
        const size_t tensor = i % 2;
        const StoredRange range = columns(source.tensors[tensor], kStride, i / 2 * kWidth, kWidth);
        wrong += Source::is_right(tensor, range, source.read(whole, tensor, range)) ? 0 : 1;
      }
    });
  threads.clear();
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(source.num_read, kStride * 1300);
  // All of it was asked for: it is read again.
  source.read(whole, 1, columns(source.tensors[1], kStride, 0, kWidth));
  EXPECT_EQ(source.num_read, kStride * 1600);
}

TEST(WholeTensors, keep_so_many_bytes) {
  constexpr uint64_t kSize = WholeTensors::kMostBytes / 2, kStride = 1 << 20;
  Source source({kSize, kSize, kSize});
  WholeTensors whole;
  const auto reads = [&](size_t tensor) {
    const uint64_t before = source.num_read;
    const StoredRange range = columns(source.tensors[tensor], kStride, 5, 7);
    EXPECT_TRUE(Source::is_right(tensor, range, source.read(whole, tensor, range)));
    return source.num_read - before;
  };
  EXPECT_EQ(reads(0), kSize);
  EXPECT_EQ(reads(1), kSize);
  EXPECT_EQ(reads(0), 0u);
  EXPECT_EQ(reads(2), kSize);  // and forgets 1
  EXPECT_EQ(reads(0), 0u);
  EXPECT_EQ(reads(1), kSize);
}

TEST(WholeTensors, errors_leave_the_rest_to_others) {
  Source source({5 << 20});
  WholeTensors whole;
  const StoredRange range = columns(source.tensors[0], 1 << 20, 0, 10), beyond = {1, 10, 1 << 20, 6};
  source.fails = true;
  EXPECT_THROW(source.read(whole, 0, range), Error);
  EXPECT_TRUE(Source::is_right(0, range, source.read(whole, 0, range)));
  EXPECT_THROW(source.read(whole, 0, beyond), Error);
}

}  // namespace
}  // namespace halfbyte::io
