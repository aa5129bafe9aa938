#include "core/plan_base.h"

#include <gtest/gtest.h>

#include "core/checks.h"
#include "core/plan.h"
#include "halfbyte/system.hpp"

namespace halfbyte {
namespace {

// An op with an argument of each kind. It counts its runs in the status.
struct ProbeDescriptor {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  int64_t alignment = 16;
  bool strided = false, has_scale = true, has_parts = true, needs_z = true, finds_nothing = false;
  const char* misspelt = nullptr;  // an argument in place
  size_t num_more = 0;             // rows
};
void check_descriptor(const ProbeDescriptor& d) { check_alignment("probe descriptor", d.alignment, d.dtype); }
void check_probe(const char* op, const ProbeDescriptor& d) {
  HALFBYTE_CHECK(d.dtype != DType::i8, usage, "{}: no i8", op);
}

struct Probe {
  using Descriptor = ProbeDescriptor;
  struct Args {
    TensorView x, scale, y, z;
    void* parts = nullptr;
    int64_t parts_bytes = -1;
    const char *bad_value = nullptr, *bad_strides = nullptr;
  };
  using Status = QuantizeStatus;
};

struct ProbeImpl : Plan<Probe>::Impl {
  ProbeImpl(Device on, const ProbeDescriptor& d, const PlanPreference& preference)
      : Impl("probe", on, d, preference, check_probe) {
    const auto dense = [&](const char* name, TensorView Args::*view) -> ArgumentRow& {
      return tensor(name, view, d.dtype, d.shape).promised(d.alignment).strided(d.strided);
    };
    dense("x", &Args::x);
    tensor("scale", &Args::scale, DType::f32, {}).absent_unless(d.has_scale, "descriptor.has_scale is false");
    memory(
        "parts", [](const Args& args) -> ArgumentData { return untyped(args.parts, args.parts_bytes); }, 8)
        .aligned(2)
        .null_unless(d.has_parts, "there are none");
    dense("y", &Args::y).written();
    tensor("z", &Args::z, DType::u8, {2, 4}).any_leading_axes().written().optional(!d.needs_z);
    in_place("y", "x");
    if (d.misspelt != nullptr) in_place("y", d.misspelt);
    for (size_t i = 0; i < d.num_more; ++i) dense("more", &Args::x);
    sku.dtypes = to_string(d.dtype);
    if (d.finds_nothing) finds_nothing();
  }
  void check_values(const Args& args) const override {
    HALFBYTE_CHECK(args.bad_value == nullptr, usage, "{}: {}", op, args.bad_value);
  }
  void check_strides(const Args& args) const override {
    HALFBYTE_CHECK(args.bad_strides == nullptr, usage, "{}: {}", op, args.bad_strides);
  }
  void execute(const Args&, void*, void* workspace) const override {
    if (!descriptor.finds_nothing) status_in(workspace).num_nonfinite = ++runs;
  }

  mutable int64_t runs = 0;
};

std::string message_of(const std::function<void()>& run, ErrorCode code = ErrorCode::usage) {
  try {
    run();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "";
}

}  // namespace

HALFBYTE_DEFINE_PLAN(Probe, ProbeImpl);

namespace {

class PlanBaseTest : public ::testing::Test {
 protected:
  // What `run` says to the arguments as `change` leaves them, and can_implement too.
  template <class F>
  std::string refused(F change, const ProbeDescriptor& d) {
    const auto plan = Plan<Probe>::select({}, d);
    Probe::Args args = good(d);
    change(args);
    const std::string message = message_of([&] { plan.run(nullptr, workspace, args); });
    const std::optional<Error> error = plan.can_implement(args);
    EXPECT_EQ(error ? error->what() : std::string(), message);
    return message;
  }
  template <class F>
  std::string refused(F change) {
    return refused(change, of());
  }

  static ProbeDescriptor of() {
    ProbeDescriptor d;
    d.shape = {2, 4};
    return d;
  }
  Probe::Args good(const ProbeDescriptor& d) {
    Probe::Args args;
    args.x = {x, DType::f32, d.shape, {}, {}};
    args.y = {y, DType::f32, d.shape, {}, {}};
    if (d.has_scale) args.scale = {&scale, DType::f32, {}, {}, {}};
    if (d.has_parts) args.parts = parts;
    args.z = {z, DType::u8, {2, 4}, {}, {}};
    return args;
  }

  alignas(16) float x[32] = {}, y[32] = {}, scale = 0;
  alignas(16) char parts[8] = {}, z[8] = {}, workspace[64] = {};
};
using A = Probe::Args;

TEST_F(PlanBaseTest, SaysWhatHoldsForMost) {
  const auto plan = Plan<Probe>::select({}, of());
  EXPECT_EQ(to_string(plan.sku()), "probe, probe_cpu, cpu " + system_info().simd_target + ", f32");
  EXPECT_EQ(plan.device(), Device());
  EXPECT_EQ(plan.descriptor().shape, of().shape);
  EXPECT_EQ(plan.precision_guarantee().math, DType::f32);
  EXPECT_EQ(plan.workspace_size(), static_cast<int64_t>(sizeof(QuantizeStatus)));
  plan.run(nullptr, workspace, good(of()));
  plan.run(nullptr, workspace, good(of()));
  EXPECT_EQ(plan.status(nullptr, workspace).num_nonfinite, 2);
  ProbeDescriptor wide = of();
  wide.dtype = DType::f64;
  EXPECT_EQ(Plan<Probe>::select({}, wide).precision_guarantee().accumulator, DType::f64);
}

TEST_F(PlanBaseTest, FindsNothingWhereItSaysSo) {
  ProbeDescriptor d = of();
  d.finds_nothing = true;
  const auto plan = Plan<Probe>::select({}, d);
  EXPECT_EQ(plan.workspace_size(), 16);
  workspace[0] = 1;
  plan.run(nullptr, workspace, good(d));
  EXPECT_TRUE(plan.status(nullptr, workspace).ok());
  EXPECT_EQ(workspace[0], 1);
}

TEST_F(PlanBaseTest, RefusesDescriptorThenPreference) {
  ProbeDescriptor d = of();
  d.alignment = 2;
  d.dtype = DType::i8;
  const auto select = [&](int num_threads) {
    return message_of([&] { Plan<Probe>::select({}, d, {num_threads}); });
  };
  EXPECT_EQ(select(-1), "probe: no i8");
  d.dtype = DType::f32;
  EXPECT_EQ(select(-1),
            "probe descriptor: alignment must be a power of two and at least the 4 bytes of f32, got 2");
  d.alignment = 16;
  EXPECT_EQ(select(-1), "probe: preference.num_threads must be >= 0, got -1");
  EXPECT_EQ(select(0), "");
}

TEST_F(PlanBaseTest, ChecksRows) {
  EXPECT_EQ(refused([](A&) {}), "");
  EXPECT_EQ(refused([](A& a) { a.x.dtype = DType::f16; }), "probe: x must be f32, got f16");
  EXPECT_EQ(refused([](A& a) { a.y.shape = {4, 2}; }), "probe: y must have the shape [2, 4], got [4, 2]");
  EXPECT_EQ(refused([](A& a) { a.y.device = {DeviceKind::cuda, 0}; }), "probe: y must be on cpu, got cuda:0");
  EXPECT_EQ(refused([](A& a) { a.scale.data = nullptr; }), "probe: scale needs 4 bytes but has no data");
  EXPECT_EQ(refused([](A& a) { a.x.num_bytes = 31; }), "probe: x needs 32 bytes, its memory has 31");
  EXPECT_EQ(refused([this](A& a) { a.x.data = x + 1; }), "");  // descriptor.alignment is of CUDA devices
  EXPECT_EQ(
      refused([this](A& a) { a.x.data = parts + 2; }),
      fmt::format("probe: x must be aligned to 4 bytes, its address is {}", static_cast<void*>(parts + 2)));
  EXPECT_EQ(
      refused([this](A& a) { a.scale.data = z + 1; }),
      fmt::format("probe: scale must be aligned to 4 bytes, its address is {}", static_cast<void*>(z + 1)));
  EXPECT_EQ(refused([](A& a) { a.scale.shape = {1}; }), "");  // one element
}

TEST_F(PlanBaseTest, ChecksMemoryWithoutAType) {
  EXPECT_EQ(refused([](A& a) { a.parts = nullptr; }), "probe: parts needs 8 bytes but has no data");
  EXPECT_EQ(refused([](A& a) { a.parts_bytes = 7; }), "probe: parts needs 8 bytes, its memory has 7");
  EXPECT_EQ(refused([this](A& a) { a.parts = parts + 1; }),
            fmt::format("probe: parts must be aligned to 2 bytes, its address is {}",
                        static_cast<void*>(parts + 1)));
}

TEST_F(PlanBaseTest, RefusesDataThatIsNotRead) {
  ProbeDescriptor d = of();
  d.has_scale = d.has_parts = false;
  EXPECT_EQ(refused([](A&) {}, d), "");
  EXPECT_EQ(refused([this](A& a) { a.scale.data = &scale; }, d),
            "probe: scale must have no data, as descriptor.has_scale is false");
  EXPECT_EQ(refused([this](A& a) { a.parts = parts; }, d), "probe: parts must be null: there are none");
}

TEST_F(PlanBaseTest, TheLastReasonForAbsenceCounts) {
  const auto reason_of = [&](bool first, bool second) {
    struct Table : PlanBase {
      Table(bool a, bool b) : PlanBase("table", {}, DType::f32, {}) {
        add({"w", 4}).absent_unless(a, "of a").absent_unless(b, "of b");
      }
      void check(const void* data) const {
        std::array<ArgumentMemory, 1> memory;
        check_rows(std::array{untyped(data)}, memory);
      }
    };
    return message_of([&] { Table(first, second).check(x); });
  };
  EXPECT_EQ(reason_of(true, true), "");
  EXPECT_EQ(reason_of(false, true), "table: w must have no data, as of a");
  EXPECT_EQ(reason_of(true, false), "table: w must have no data, as of b");
  EXPECT_EQ(reason_of(false, false), "table: w must have no data, as of b");
}

TEST_F(PlanBaseTest, OptionalDataIsCheckedWhereThereIsSome) {
  ProbeDescriptor d = of();
  d.needs_z = false;
  EXPECT_EQ(refused([](A& a) { a.z = {}; }, d), "");
  EXPECT_EQ(refused([](A& a) { a.z.dtype = DType::i8; }, d), "probe: z must be u8, got i8");
  EXPECT_EQ(refused([](A& a) { a.z = {}; }), "probe: z must be u8, got f32");
}

TEST_F(PlanBaseTest, FoldsLeadingAxes) {
  EXPECT_EQ(refused([](A& a) { a.z.shape = {1, 2, 1, 4}; }), "");
  EXPECT_EQ(refused([](A& a) { a.z.shape = {8}; }),
            "probe: z must have the rows and columns of the descriptor, [2, 4], got the shape [8]");
  EXPECT_EQ(refused([](A& a) {
              a.z.strides = {8, 1};
            }),
            "probe: z must be contiguous, got strides [8, 1] of shape [2, 4]");
}

TEST_F(PlanBaseTest, StridesAsTheDescriptorHasThem) {
  EXPECT_EQ(refused([](A& a) {
              a.x.strides = {8, 1};
            }),
            "probe: x must be contiguous as descriptor.strided is false, got strides [8, 1] of shape [2, 4]");
  ProbeDescriptor d = of();
  d.strided = true;
  EXPECT_EQ(refused([](A& a) { a.x.strides = {8, 1}; }, d), "");
  EXPECT_EQ(refused([](A& a) { a.x.strides = {8, -1}; }, d), "probe: x must have strides >= 0, got [8, -1]");
  // What lies between the elements counts as touched.
  EXPECT_TRUE(refused(
                  [this](A& a) {
                    a.x.strides = {8, 1};
                    a.y.data = x + 4;
                  },
                  d)
                  .starts_with("probe: y must not overlap x: their bytes are "));
}

TEST_F(PlanBaseTest, WhatIsWrittenOverlapsNothing) {
  EXPECT_TRUE(refused([this](A& a) { a.y.data = x + 4; }).starts_with("probe: y must not overlap x: "));
  EXPECT_TRUE(refused([this](A& a) { a.parts = y; }).starts_with("probe: y must not overlap parts: "));
  EXPECT_TRUE(refused([this](A& a) { a.z.data = y + 7; }).starts_with("probe: z must not overlap y: "));
  EXPECT_EQ(refused([this](A& a) { a.scale.data = x; }), "");  // both are read
  EXPECT_EQ(refused([this](A& a) { a.y.data = x + 8; }), "");  // behind it
  const auto plan = Plan<Probe>::select({}, of());
  EXPECT_TRUE(message_of([&] {
                plan.run(nullptr, x, good(of()));
              }).starts_with("probe: workspace must not overlap x"));
  EXPECT_TRUE(message_of([&] {
                plan.run(nullptr, {workspace + 8, 56}, good(of()));
              }).starts_with("probe: workspace must be aligned to 16 bytes"));
}

TEST_F(PlanBaseTest, ErrorsHaveFieldsBesideTheText) {
  const auto plan = Plan<Probe>::select({}, of());
  const auto expect = [&](auto change, ErrorKind kind, const char* argument, const std::string& expected,
                          const std::string& actual) {
    Probe::Args args = good(of());
    change(args);
    const std::optional<Error> error = plan.can_implement(args);
    ASSERT_TRUE(error.has_value()) << argument;
    EXPECT_EQ(error->kind(), kind) << error->what();
    EXPECT_EQ(error->argument(), argument);
    EXPECT_EQ(error->expected(), expected);
    EXPECT_EQ(error->actual(), actual);
  };
  expect([](A& a) { a.x.dtype = DType::f16; }, ErrorKind::invalid_argument, "x", "f32", "f16");
  expect([](A& a) { a.x.shape = {4, 2}; }, ErrorKind::invalid_argument, "x", "[2, 4]", "[4, 2]");
  expect([](A& a) { a.y.num_bytes = 31; }, ErrorKind::buffer_too_small, "y", "32 bytes", "31 bytes");
  expect([](A& a) { a.x.data = nullptr; }, ErrorKind::buffer_too_small, "x", "32 bytes", "no data");
  char* const odd = reinterpret_cast<char*>(x) + 1;
  expect([odd](A& a) { a.x.data = odd; }, ErrorKind::misaligned, "x", "aligned to 4 bytes",
         fmt::format("{:#x}", reinterpret_cast<uintptr_t>(odd)));
  try {
    plan.run(nullptr, {workspace, 1}, good(of()));
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::workspace_too_small);
    EXPECT_EQ(error.argument(), "workspace");
    EXPECT_EQ(error.actual(), "1 bytes");
  }
  ProbeDescriptor bad = of();
  bad.alignment = 3;
  try {
    Plan<Probe>::select({}, bad);
    ADD_FAILURE();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_problem);
    EXPECT_EQ(error.argument(), "alignment");
    EXPECT_EQ(error.actual(), "3");
  }
  bad = of();
  bad.dtype = DType::i8;
  bad.alignment = 16;
  try {
    Plan<Probe>::select({}, bad);
    ADD_FAILURE();
  } catch (const Error& error) {  // without fields of its own
    EXPECT_EQ(error.kind(), ErrorKind::invalid_problem);
    EXPECT_EQ(error.argument(), "");
  }
  EXPECT_EQ(Error(ErrorCode::usage, "text").kind(), ErrorKind::general);
}

TEST_F(PlanBaseTest, TheWorkspaceIsCheckedAndOnTheCpuMayBeNone) {
  const auto plan = Plan<Probe>::select({}, of());
  const int64_t size = plan.workspace_size();
  const auto expect = [&](const Workspace& given, const std::string& text) {
    EXPECT_EQ(message_of([&] { plan.run(nullptr, given, good(of())); }), text);
    EXPECT_EQ(message_of([&] { plan.status(nullptr, given); }), text);
  };
  expect({nullptr, size}, fmt::format("probe: workspace needs {} bytes but has no data", size));
  expect({workspace, size - 1},
         fmt::format("probe: workspace needs {} bytes, its memory has {}", size, size - 1));
  expect({workspace, -1}, fmt::format("probe: workspace needs {} bytes, its memory has 0", size));
  EXPECT_EQ(message_of([&] { plan.status(nullptr, {}); }),
            fmt::format("probe: workspace needs {} bytes but has no data", size));
  plan.run(nullptr, {}, good(of()));
  plan.run(nullptr, Memory({}, size), good(of()));
  std::vector<uint64_t> memory(static_cast<size_t>(size) / 8);
  plan.run(nullptr, memory, good(of()));
  EXPECT_EQ(plan.status(nullptr, memory).num_nonfinite, 3);
}

TEST_F(PlanBaseTest, InPlaceIsTheSameElements) {
  const auto in_place = [this](A& a) { a.y.data = x; };
  EXPECT_EQ(refused(in_place), "");
  // Of the declared pair alone: the other arguments are as apart as ever.
  EXPECT_TRUE(refused([&](A& a) {
                in_place(a);
                a.scale.data = x;
              }).starts_with("probe: y must not overlap scale"));
  ProbeDescriptor d = of();
  d.strided = true;
  const auto strided = [&](std::vector<int64_t> of_x, std::vector<int64_t> of_y) {
    return refused(
        [&](A& a) {
          in_place(a);
          a.x.strides = std::move(of_x);
          a.y.strides = std::move(of_y);
        },
        d);
  };
  EXPECT_EQ(strided({8, 1}, {8, 1}), "");
  EXPECT_EQ(strided({4, 1}, {}), "");  // written out
  EXPECT_TRUE(strided({8, 1}, {}).starts_with("probe: y must not overlap x"));
  EXPECT_TRUE(strided({1, 2}, {4, 1}).starts_with("probe: y must not overlap x"));
  d.shape = {1, 4};  // the stride of one row does not matter
  EXPECT_EQ(strided({8, 1}, {}), "");
  d.shape = {};
  EXPECT_EQ(refused(
                [&](A& a) {
                  in_place(a);
                  a.y.shape = {1};
                },
                d),
            "");
}

TEST_F(PlanBaseTest, FindsWhatIsWrongInOrder) {
  const auto wrong = [&](int good) {
    return refused([&](A& a) {
      if (good < 1) a.bad_value = "bad value";
      if (good < 2) a.x.dtype = DType::f16;
      if (good < 3) a.z.dtype = DType::f16;
      if (good < 4) a.bad_strides = "bad strides";
      a.scale.data = y;
    });
  };
  EXPECT_EQ(wrong(0), "probe: bad value");
  EXPECT_EQ(wrong(1), "probe: x must be f32, got f16");
  EXPECT_EQ(wrong(2), "probe: z must be u8, got f16");
  EXPECT_EQ(wrong(3), "probe: bad strides");
  EXPECT_TRUE(wrong(4).starts_with("probe: y must not overlap scale"));
}

TEST_F(PlanBaseTest, WrongTablesAreBugs) {
  ProbeDescriptor d = of();
  d.misspelt = "xx";
  const auto select = [&] { return message_of([&] { Plan<Probe>::select({}, d); }, ErrorCode::bug); };
  EXPECT_EQ(select(), "probe: no argument xx");
  d = of();
  d.num_more = PlanBase::kMaxArguments - 5;
  EXPECT_EQ(select(), "");
  ++d.num_more;
  EXPECT_EQ(select(), "probe: more than 12 arguments");
}

}  // namespace
}  // namespace halfbyte
