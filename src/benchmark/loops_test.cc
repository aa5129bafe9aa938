#include "benchmark/loops.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>

namespace halfbyte {
namespace {

TEST(BenchLoops, ReadEveryByte) {
  std::mt19937_64 random(std::random_device{}());
  for (const int64_t num_bytes : {1, 63, 64, 255, 256, 1023, 4096, 5000})
    for (const int num_streams : {1, 2, 4})
      for (const int64_t prefetch_bytes : {0, 1024}) {
        std::vector<uint8_t> bytes(static_cast<size_t>(num_bytes));
        for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
        const ReadLoop loop{num_streams, prefetch_bytes};
        const uint64_t all = read_bytes(bytes.data(), num_bytes, loop);
        for (uint8_t& byte : bytes) {
          byte ^= 0x10;
          EXPECT_NE(read_bytes(bytes.data(), num_bytes, loop), all) << num_bytes << " " << num_streams;
          byte ^= 0x10;
        }
        EXPECT_EQ(read_bytes(bytes.data(), num_bytes, loop), all);
      }
}

TEST(BenchLoops, MoveWritesAndCopyCopies) {
  std::mt19937_64 random(std::random_device{}());
  for (const int64_t num_bytes : {1, 63, 64, 4096, 40000}) {
    std::vector<uint8_t> from(static_cast<size_t>(num_bytes)), to(from.size(), 0xA5),
        moved(from.size(), 0xA5);
    for (uint8_t& byte : from) byte = static_cast<uint8_t>(random());
    copy_bytes(from.data(), to.data(), num_bytes);
    move_bytes(from.data(), num_bytes, moved.data(), num_bytes);
    end_moves();
    EXPECT_EQ(to, from);
    EXPECT_EQ(std::count(moved.begin(), moved.end(), 0xA5), 0);
  }
}

TEST(BenchLoops, ArithmeticStaysFinite) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    std::set<std::string> names;
    for (const ArithmeticLoop& loop : arithmetic_loops(dtype)) {
      EXPECT_TRUE(names.insert(loop.name).second) << loop.name;
      EXPECT_GE(loop.flops, 2);
      EXPECT_TRUE(std::isfinite(loop.run(10000))) << loop.name;
    }
    EXPECT_TRUE(names.contains("fma"));
    EXPECT_TRUE(dtype == DType::bf16 || names.size() == 1);
  }
}

}  // namespace
}  // namespace halfbyte
