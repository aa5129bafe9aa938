// `fake_quantize`, with and without a mask, and `fake_quantize_backward`, from x and from the mask, beside a
// copy of the same bytes.
#include "halfbyte/fake_quantize.hpp"

#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

const std::vector<int64_t> kShape{8192, 8192};

template <class Op>
void run(benchmark::State& state, const FakeQuantizeDescriptor& descriptor) {
  const auto threads = static_cast<int>(state.range(0));
  const auto plan = Plan<Op>::select({}, descriptor, {threads});
  const std::vector<int64_t> scale_shape = descriptor.scale_shape(), mask_shape = descriptor.mask_shape();
  const int64_t dense_bytes = contiguous_bytes(descriptor.dtype, kShape),
                scale_bytes = contiguous_bytes(DType::f32, scale_shape),
                mask_bytes = descriptor.mask ? contiguous_bytes(DType::u8, mask_shape) : 0;
  const Buffer x = make_buffer(dense_bytes), y = make_buffer(dense_bytes), dy = make_buffer(dense_bytes),
               scale = make_buffer(scale_bytes), mask = make_buffer(mask_bytes),
               workspace = make_buffer(plan.workspace_size());
  if (descriptor.dtype == DType::bf16)
    fill_weights(x.get(), dense_bytes / 2);
  else
    fill_floats(x.get(), dense_bytes / 4);
  std::copy_n(x.get(), dense_bytes, dy.get());
  for (int64_t i = 0; i < mask_bytes; ++i) mask[static_cast<size_t>(i)] = static_cast<uint8_t>(i * 37);
  for (int64_t i = 0; i < scale_bytes / 4; ++i)
    reinterpret_cast<float*>(scale.get())[i] = 0.005f + 1e-9f * static_cast<float>(i % 1000);
  const TensorView dense{x.get(), descriptor.dtype, kShape, {}, {}},
      other{y.get(), descriptor.dtype, kShape, {}, {}}, scales{scale.get(), DType::f32, scale_shape, {}, {}};
  TensorView bits;
  if (descriptor.mask) bits = {mask.get(), DType::u8, mask_shape, {}, {}};
  typename Op::Args args;
  int64_t reads = dense_bytes, writes = dense_bytes;
  if constexpr (std::is_same_v<Op, FakeQuantize>) {
    args.x = dense, args.y = other, args.scale = scales, args.mask = bits;
    reads += scale_bytes, writes += mask_bytes;
  } else {
    args.dy = {dy.get(), descriptor.dtype, kShape, {}, {}}, args.dx = other, args.mask = bits;
    if (!descriptor.mask) args.x = dense, args.scale = scales;
    reads += descriptor.mask ? mask_bytes : dense_bytes + scale_bytes;
  }
  beside_copy(state, reads, writes, threads, [&] { plan.run(nullptr, workspace.get(), args); });
}

template <class Op>
void add(const char* op, const char* name, const FakeQuantizeDescriptor& descriptor) {
  const std::string full = std::string("BM_") + op + "/" + to_string(descriptor.dtype) + "_" + name +
                           (descriptor.mask ? "_mask" : "");
  benchmark::RegisterBenchmark(full.c_str(), run<Op>, descriptor)
      ->Arg(2)
      ->Unit(benchmark::kMillisecond)
      ->UseManualTime();
}

[[maybe_unused]] const bool kAdded = [] {
  struct Setup {
    const char* name;
    Granularity granularity;
    int axis;
    int64_t group_size;
  };
  for (const DType dtype : {DType::bf16, DType::f32})
    for (const Setup& setup :
         {Setup{"tensor", Granularity::tensor, -1, 0}, Setup{"channel0", Granularity::channel, 0, 0},
          Setup{"channel1", Granularity::channel, 1, 0}, Setup{"g64", Granularity::group, -1, 64}})
      for (const bool mask : {false, true}) {
        FakeQuantizeDescriptor descriptor;
        descriptor.shape = kShape;
        descriptor.granularity = setup.granularity;
        descriptor.axis = setup.axis;
        descriptor.group_size = setup.group_size;
        descriptor.dtype = dtype;
        descriptor.mask = mask;
        add<FakeQuantize>("fake_quantize", setup.name, descriptor);
        if (!mask || setup.granularity == Granularity::tensor)  // the mask has no groups
          add<FakeQuantizeBackward>("fake_quantize_backward", setup.name, descriptor);
      }
  return true;
}();

}  // namespace
}  // namespace halfbyte::bench
