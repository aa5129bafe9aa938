// Groups of the CPU: sums, products with weights that are cut, and how a group ends.
#include <gmock/gmock.h>

#include "ops/all_reduce/all_reduce_testing.h"

namespace halfbyte {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using testing::run_members;

std::vector<Communicator> group_of(size_t size) {
  return Communicator::of_devices(std::vector<Device>(size));
}

TEST(AllReduce, SumsInTheOrderOfRanks) {
  uint64_t seed = 0;
  for (const size_t size : {1, 2, 3, 5, 8})
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      const std::vector<Communicator> members = group_of(size);
      for (const int64_t count : {0, 1, 2, 7, 513, 5000})
        testing::expect_sum(members, dtype, count, size_of(dtype), ++seed);
    }
}

TEST(AllReduce, SaysWhoItIs) {
  const std::vector<Communicator> members = group_of(3);
  for (size_t i = 0; i < members.size(); ++i) {
    EXPECT_EQ(members[i].rank(), static_cast<int>(i));
    EXPECT_EQ(members[i].size(), 3);
    EXPECT_EQ(members[i].device(), Device());
    EXPECT_EQ(members[i].transport(), "threads");
  }
}

TEST(AllReduce, RefusesTensorsThatDifferAndGoesOn) {
  const std::vector<Communicator> members = group_of(3);
  for (const bool by_dtype : {false, true}) {
    const auto errors = run_members(members, [&](const Communicator& member) {
      std::vector<float> x(8, 1.0f);
      const bool other = member.rank() == 1;
      member.all_reduce(
          {x.data(), other && by_dtype ? DType::bf16 : DType::f32, {other && !by_dtype ? 7 : 8}});
    });
    EXPECT_THAT(errors,
                Each(HasSubstr("USAGE: all_reduce: x must be alike for all members, got 8 elements of "
                               "f32 and ")));
    testing::expect_sum(members, DType::f32, 20, 0, 1);
  }
}

TEST(AllReduce, RefusesOtherTensors) {
  const std::vector<Communicator> members = group_of(1);
  std::vector<double> memory(8);
  const auto refusal = [&](TensorView x) -> std::string {
    try {
      members[0].all_reduce(x);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_EQ(refusal({memory.data(), DType::f64, {8}}), "all_reduce: x must be f32, bf16 or f16, got f64");
  EXPECT_EQ(refusal({memory.data(), DType::f32, {8}, {}, {DeviceKind::cuda, 1}}),
            "all_reduce: x must be on cpu, is on cuda:1");
  EXPECT_EQ(refusal({memory.data(), DType::f32, {2, 2}, {4, 1}}),
            "all_reduce: x must be contiguous, got strides [4, 1]");
  EXPECT_EQ(refusal({memory.data(), DType::f32, {8}, {}, {}, 31}),
            "all_reduce: x must have 32 bytes, its memory has 31");
  EXPECT_THAT(refusal({reinterpret_cast<std::byte*>(memory.data()) + 1, DType::bf16, {2}}),
              HasSubstr("all_reduce: x must be aligned to 2 bytes, is at 0x"));
}

TEST(AllReduce, GroupsThatCannotBe) {
  const auto refusal = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::usage);
      return error.what();
    }
    return "accepted";
  };
  const Device cuda{DeviceKind::cuda, 0};
  const std::string id(Communicator::kIdBytes, 'x');
  EXPECT_EQ(refusal([] { Communicator::of_devices({}); }), "communicator: devices must not be empty");
  EXPECT_EQ(refusal([&] {
              Communicator::of_devices(std::vector<Device>{{}, cuda});
            }),
            "communicator: devices must be of one kind, got cpu,cuda:0");
  EXPECT_EQ(refusal([] { Communicator::of_devices(std::vector<Device>(2), Transport::nccl); }),
            "communicator: transport must be auto on the CPU, got nccl");
  EXPECT_EQ(refusal([&] { Communicator::connect({}, id, 0, 2); }),
            "communicator: processes are connected by NCCL, which has no cpu");
  EXPECT_EQ(refusal([&] { Communicator::connect(cuda, "x", 0, 2); }),
            "communicator: id must be of 128 bytes, got 1");
  EXPECT_EQ(refusal([&] { Communicator::connect(cuda, id, 2, 2); }),
            "communicator: rank must be from 0 to size - 1, got 2 of 2");
  EXPECT_EQ(refusal([] { parse_transport("mpi"); }),
            "unknown transport 'mpi': must be one of auto, peer, nccl");
  for (const Transport transport : {Transport::automatic, Transport::peer, Transport::nccl})
    EXPECT_EQ(parse_transport(to_string(transport)), transport);
}

TEST(AllReduce, EndsForAllWhenOneMemberFails) {
  const std::vector<Communicator> members = group_of(4);
  std::vector<float> sums(4);
  const auto errors = run_members(members, [&](const Communicator& member) {
    float x = 1;
    member.all_reduce({&x, DType::f32, {1}});
    sums[static_cast<size_t>(member.rank())] = x;
    if (member.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the others wait by now
      member.abort();
      throw Error(ErrorCode::bad_input, "its own");
    }
    member.all_reduce({&x, DType::f32, {1}});
  });
  EXPECT_EQ(sums, std::vector<float>(4, 4.0f));
  for (size_t i = 0; i < errors.size(); ++i)
    EXPECT_EQ(errors[i],
              i == 2 ? "BAD_INPUT: its own" : "CANCELLED: all_reduce: abort() has ended the group");
  float x = 1;
  EXPECT_THROW(members[0].all_reduce({&x, DType::f32, {1}}), Error);
}

// Ends in the middle of many sums, from outside: nobody touches the memory of a member that has left.
TEST(AllReduce, MayEndAtAnyTime) {
  for (int round = 0; round < 50; ++round) {
    const std::vector<Communicator> members = group_of(3);
    std::thread outside([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(20 * round));
      members[0].abort();
    });
    const auto errors = run_members(members, [](const Communicator& member) {
      for (;;) {
        std::vector<float> x(1000, 1.0f);
        member.all_reduce({x.data(), DType::f32, {1000}});
        for (const float value : x) EXPECT_EQ(value, 3);
      }
    });
    outside.join();
    EXPECT_THAT(errors, Each("CANCELLED: all_reduce: abort() has ended the group"));
  }
}

TEST(ParallelQgemm, PartsGiveTheProductOfOneDevice) {
  for (const size_t size : {1, 2, 3, 7})
    testing::expect_parallel_products(group_of(size), std::vector<int64_t>{1, 5});
}

TEST(ParallelQgemm, RefusesWhatASumCannotBe) {
  const std::vector<Communicator> members = group_of(2);
  const QgemmDescriptor d{.m = 2, .n = 64, .k = 64};
  const auto plan = ParallelQgemmPlan::select(members[0], d, ParallelStyle::rowwise);
  Qgemm::Args args;
  args.y = {nullptr, DType::bf16, {2, 64}, {128, 1}};
  const auto refusal = [&] {
    try {
      plan.run(nullptr, {}, args);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refusal(), "parallel qgemm: y must be contiguous where it is a sum");
  EXPECT_THROW(ParallelQgemmPlan::select(members[0], {.m = -1}, ParallelStyle::rowwise), Error);
}

TEST(ParallelQgemm, PartsAreWholeUnits) {
  EXPECT_EQ(part_of(1, 7 * 64, 64, 0, 3), (Slice{1, 0, 192}));
  EXPECT_EQ(part_of(1, 7 * 64, 64, 1, 3), (Slice{1, 192, 320}));
  EXPECT_EQ(part_of(1, 7 * 64, 64, 2, 3), (Slice{1, 320, 448}));
  EXPECT_EQ(part_of(0, 5, 5, 0, 1), (Slice{0, 0, 5}));
  const auto refusal = [](int64_t extent, int64_t unit, int rank, int size) {
    try {
      part_of(0, extent, unit, rank, size);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refusal(100, 64, 0, 1), "part_of: extent must be a multiple of unit, got 100 and 64");
  EXPECT_EQ(refusal(128, 64, 0, 3), "part_of: 2 units of 64 are too few for 3 members");
  EXPECT_EQ(refusal(128, 64, 2, 2), "part_of: rank must be from 0 to size - 1, got 2 of 2");
}

}  // namespace
}  // namespace halfbyte
