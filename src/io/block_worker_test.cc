#include "io/block_worker.h"

#include <gtest/gtest.h>

#include "core/checks.h"
#include "io/test_directory.h"

namespace halfbyte {
namespace {

using io::Block;
using io::BlockWorker;
using io::QuantizedWeight;

constexpr int64_t kLarge = 8 << 20;

QuantizedWeight make_weight(Layout layout, std::vector<int64_t> shape, const QuantSpec& spec) {
  return {"a.weight", std::move(shape), DType::bf16, layout, spec};
}

QuantizedWeight large_weight() { return make_weight(Layout::halfbyte, {3000, 8192}, {}); }

TEST(BlockWorker, TakesSmallerBlocksWhereMemoryIsShort) {
  const QuantizedWeight weight = large_weight();
  BlockWorker worker(Device{}, kLarge);
  std::vector<Block> done;
  int num_failures = 0;
  worker.for_each_block(weight, 0, 3000 * 8192, [&](const Block& block) {
    if (block.count > kLarge / 8 && ++num_failures) HALFBYTE_FAIL(device, "out of device memory");
    done.push_back(block);
  });
  EXPECT_EQ(num_failures, 3);
  EXPECT_EQ(worker.max_elements, kLarge / 8);
  int64_t begin = 0;
  for (const Block& block : done) {
    EXPECT_EQ(block.begin, begin);
    EXPECT_LE(block.count, kLarge / 8);
    begin += block.count;
  }
  EXPECT_EQ(begin, 3000 * 8192);
}

TEST(BlockWorker, GivesUpAtTheSizeOfABlockOnTheCpu) {
  BlockWorker worker(Device{}, kLarge);
  std::vector<int64_t> tried;
  expect_error(ErrorCode::device, "out of device memory", [&] {
    worker.for_each_block(large_weight(), 0, 3000 * 8192, [&](const Block& block) {
      tried.push_back(block.count);
      HALFBYTE_FAIL(device, "out of device memory");
    });
  });
  EXPECT_EQ(tried, (std::vector<int64_t>{8 << 20, 4 << 20, 2 << 20, 1 << 20, 512 << 10, 256 << 10}));
}

TEST(BlockWorker, OtherErrorsAreFinal) {
  BlockWorker worker(Device{}, kLarge);
  int num_calls = 0;
  const auto fail = [&](const Block&) { ++num_calls, throw Error(ErrorCode::io, "disk"); };
  expect_error(ErrorCode::io, "disk", [&] { worker.for_each_block(large_weight(), 0, 3000 * 8192, fail); });
  EXPECT_EQ(num_calls, 1);
}

// What one worker does in small blocks must lie within what was planned as a large one.
TEST(BlockWorker, SmallBlocksFillLargeOnes) {
  QuantSpec asymmetric, flat, affine;
  asymmetric.format = Format::int4;
  asymmetric.asymmetric = true;
  flat.granularity = Granularity::flat;
  affine.format = Format::affine3;
  for (const QuantizedWeight& weight : {
           make_weight(Layout::compressed_tensors, {3, 13, 640},
                       asymmetric),  // words of zero points hold 8 rows
           make_weight(Layout::bitsandbytes, {37, 333}, flat),
           make_weight(Layout::mlx, {31, 320}, affine),
           make_weight(Layout::halfbyte, {29, 1001}, {}),
       }) {
    const int64_t n = weight.rows() * weight.cols();
    for (const int64_t large : {int64_t{1}, int64_t{4000}, int64_t{10'000}, n})
      for (const int64_t small : {int64_t{1}, int64_t{1500}, int64_t{6000}}) {
        int64_t next = 0;
        for (int64_t begin = 0; begin < n;) {
          const int64_t count = io::block_at(weight, begin, large).count;
          BlockWorker worker(Device{}, small);
          worker.for_each_block(weight, begin, count, [&](const Block& block) {
            EXPECT_EQ(block.begin, next);
            next += block.count;
          });
          begin += count;
          ASSERT_EQ(next, begin) << to_string(weight.layout) << " " << large << " " << small;
        }
      }
  }
}

TEST(BlockWorker, NumberOfWorkers) {
  EXPECT_EQ(io::num_workers({}, 5), 5);
  EXPECT_EQ(io::num_workers({}, 64), 64);
  EXPECT_EQ(io::num_workers({DeviceKind::cuda, 0}, 5), 5);
  EXPECT_EQ(io::num_workers({DeviceKind::cuda, 0}, 64), 16);

  const Device cpu, first{DeviceKind::cuda, 0}, second{DeviceKind::cuda, 1};
  const auto count = [](const std::vector<Device>& workers, Device device) {
    return std::ranges::count(workers, device);
  };
  EXPECT_EQ(io::worker_devices({}, 3), (std::vector<Device>{cpu, cpu, cpu}));
  EXPECT_EQ(io::worker_devices({{second, first}}, 64).size(), 32u);
  const std::vector<Device> all = io::worker_devices({{cpu, first, second}}, 48);
  EXPECT_EQ(all.size(), 48u);
  EXPECT_EQ(count(all, first), 16);
  EXPECT_EQ(count(all, cpu), 16);
  EXPECT_EQ(all.front(), first) << "whose blocks are the larger ones";
  const std::vector<Device> few = io::worker_devices({{cpu, first}}, 2);
  EXPECT_EQ(count(few, first), 2);
  EXPECT_EQ(count(few, cpu), 1) << "devices must not starve the CPU";
}

TEST(BlockWorker, DevicesDiffer) {
  io::check_devices({});
  io::check_devices({{Device{}}});
  expect_error(ErrorCode::usage, "devices must differ, got cpu twice", [] {
    io::check_devices({{Device{}, Device{}}});
  });
}

TEST(CheckpointReport, Bottleneck) {
  CheckpointReport report;
  EXPECT_STREQ(bottleneck(report), "");
  report.run_seconds = 2;
  report.compute_seconds = 3, report.read_seconds = 4, report.write_seconds = 1;
  EXPECT_STREQ(bottleneck(report), "read");
  report.compute_seconds = 5;
  EXPECT_STREQ(bottleneck(report), "compute");
  report.copy_seconds = 5.5;
  EXPECT_STREQ(bottleneck(report), "copy");
  report.write_seconds = 6;
  EXPECT_STREQ(bottleneck(report), "write");
  report.verify_seconds = 1, report.sync_seconds = 1.5;
  EXPECT_STREQ(bottleneck(report), "sync");
  report.verify_seconds = 2;
  EXPECT_STREQ(bottleneck(report), "verify");
}

}  // namespace
}  // namespace halfbyte
