// `fake_quantize` and `fake_quantize_backward` beside a copy of as many bytes, in turn with it: the counter
// of_copy is its time by ours.
#include "halfbyte/fake_quantize.hpp"

#include <chrono>

#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

const std::vector<int64_t> kShape{16384, 8192};

double seconds(const auto& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

template <class Op>
void run(benchmark::State& state, const FakeQuantizeDescriptor& descriptor) {
  constexpr bool kForward = std::is_same_v<Op, FakeQuantize>;
  const bool from_mask = !kForward && descriptor.mask;
  const auto threads = static_cast<int>(state.range(0));
  const auto plan = Plan<Op>::select({}, descriptor, {threads});
  const std::vector<int64_t> groups = descriptor.scale_shape();
  const int64_t dense_bytes = contiguous_bytes(descriptor.dtype, kShape),
                group_bytes = contiguous_bytes(DType::f32, groups),
                mask_bytes = descriptor.mask ? contiguous_bytes(DType::u8, descriptor.mask_shape()) : 0;
  const Buffer x = make_buffer(dense_bytes), y = make_buffer(dense_bytes), mask = make_buffer(mask_bytes),
               scale = make_buffer(group_bytes), zero = make_buffer(group_bytes),
               min = make_buffer(group_bytes), max = make_buffer(group_bytes), num_batches = make_buffer(8),
               workspace = make_buffer(plan.workspace_size());
  if (descriptor.dtype == DType::bf16) fill_weights(x.get(), dense_bytes / 2);
  if (descriptor.dtype == DType::f32)
    for (int64_t i = 0; i < dense_bytes / 4; ++i)
      reinterpret_cast<float*>(x.get())[i] = static_cast<float>((i * 2654435761) % 4001 - 2000) * 0.00005f;
  for (int64_t i = 0; i < mask_bytes; ++i) mask[static_cast<size_t>(i)] = static_cast<uint8_t>(i * 37);
  for (int64_t i = 0; i < group_bytes / 4; ++i) {
    reinterpret_cast<float*>(scale.get())[i] =
        (descriptor.format ? 0.05f : 0.005f) + 1e-9f * static_cast<float>(i % 1000);
    reinterpret_cast<int32_t*>(zero.get())[i] = 1;
  }
  const auto view = [&](const Buffer& buffer, DType dtype, const std::vector<int64_t>& shape) {
    return TensorView{buffer.get(), dtype, shape, {}, {}};
  };
  const TensorView in = view(x, descriptor.dtype, kShape), out = view(y, descriptor.dtype, kShape);
  TensorView scales, zeros, bits;
  if (!from_mask) scales = view(scale, DType::f32, groups);
  if (descriptor.zero_point_dtype) zeros = view(zero, DType::i32, groups);
  if (descriptor.mask) bits = view(mask, DType::u8, descriptor.mask_shape());
  typename Op::Args args;
  int64_t bytes = 2 * dense_bytes + mask_bytes;
  if constexpr (kForward) {
    args = {in, out, scales, zeros, bits, {}, {}, {}};
    if (descriptor.observer) {
      args.min = view(min, DType::f32, groups);
      args.max = view(max, DType::f32, groups);
      args.num_batches = view(num_batches, DType::i64, {});
      reset_observer(args.min, args.max, args.num_batches);
    }
  } else {
    args = {from_mask ? TensorView{} : in, bits, out, scales, zeros, out};  // dx is dy
    if (!from_mask) bytes += dense_bytes;
  }
  double ours = 1e9, copy = 1e9;  // the best of each: seconds a byte
  for (auto _ : state) {
    const double time = seconds([&] { plan.run(nullptr, workspace.get(), args); });
    state.SetIterationTime(time);
    ours = std::min(ours, time / static_cast<double>(bytes));
    const double moved = seconds([&] { bare_move(x.get(), dense_bytes, y.get(), dense_bytes, threads); });
    copy = std::min(copy, moved / static_cast<double>(2 * dense_bytes));
  }
  state.SetBytesProcessed(state.iterations() * bytes);
  state.counters["of_copy"] = copy / ours;
}

template <class Op = FakeQuantize>
void add(const std::string& name, const FakeQuantizeDescriptor& descriptor) {
  const std::string full = std::string("BM_fake_quantize") +
                           (std::is_same_v<Op, FakeQuantize> ? "/" : "_backward/") +
                           to_string(descriptor.dtype) + "_" + name;
  benchmark::RegisterBenchmark(full.c_str(), run<Op>, descriptor)
      ->Arg(2)
      ->Unit(benchmark::kMillisecond)
      ->UseManualTime();
}

[[maybe_unused]] const bool kAdded = [] {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    FakeQuantizeDescriptor tensor;
    tensor.shape = kShape;
    tensor.dtype = dtype;
    FakeQuantizeDescriptor channel = tensor, column = tensor, group = tensor;
    channel.granularity = column.granularity = Granularity::channel;
    channel.axis = 0;
    column.axis = 1;
    group.granularity = Granularity::group;
    group.group_size = 64;
    FakeQuantizeDescriptor asymmetric = group, nf4 = group, masked_tensor = tensor, masked_group = group;
    asymmetric.zero_point_dtype = DType::i32;
    nf4.format = Format::nf4;
    masked_tensor.mask = masked_group.mask = true;

    add("tensor", tensor);
    add("channel0", channel);
    add("channel1", column);
    add("g64", group);
    add("g64_zero", asymmetric);
    add("g64_nf4", nf4);
    add("tensor_mask", masked_tensor);
    add("g64_mask", masked_group);
    add<FakeQuantizeBackward>("tensor", tensor);
    add<FakeQuantizeBackward>("channel0", channel);
    add<FakeQuantizeBackward>("g64", group);
    add<FakeQuantizeBackward>("from_mask", masked_tensor);
    tensor.computed = channel.computed = group.computed = true;
    add("g64_computed", group);
    add("tensor_computed", tensor);
    add("channel0_computed", channel);
    FakeQuantizeDescriptor observed = group;
    observed.observer.emplace().kind = ObserverKind::moving_average;
    add("g64_observed", observed);
  }
  return true;
}();

}  // namespace
}  // namespace halfbyte::bench
