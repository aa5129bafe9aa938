#include "halfbyte/qgemm.hpp"
#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

void BM_reorder(benchmark::State& state, const QuantSpec& spec, WeightLayout layout, bool to_packed) {
  const QuantShape shape = quant_shape(spec, kRows, kCols);
  const int64_t packed_bytes = packed_weight_bytes(spec, kRows, kCols),
                scale_bytes = shape.num_groups * size_of(spec.scale_dtype);
  const Buffer codes = make_buffer(shape.code_bytes()), scales = make_buffer(scale_bytes),
               biases = make_buffer(scale_bytes);
  std::byte* const memory =
      static_cast<std::byte*>(::operator new[](static_cast<size_t>(packed_bytes), std::align_val_t(256)));
  std::fill_n(memory, packed_bytes, std::byte{1});
  WeightView view;
  view.spec = spec;
  view.rows = kRows;
  view.cols = kCols;
  view.layout = layout;
  view.codes = codes.get();
  view.scales = scales.get();
  if (has_biases(spec)) view.biases = biases.get();
  PackedWeight packed;
  packed.spec = spec;
  packed.rows = kRows;
  packed.cols = kCols;
  packed.data = memory;
  const int threads = static_cast<int>(state.range(0));
  beside_copy(state, packed_bytes, packed_bytes, threads, [&] {
    if (to_packed)
      reorder(view, packed, {threads});
    else
      reorder(packed, view, {threads});
  });
  ::operator delete[](memory, std::align_val_t(256));
}

#define HALFBYTE_BENCH(name, layout, to_packed, ...)                                           \
  BENCHMARK_CAPTURE(BM_reorder, name, QuantSpec{__VA_ARGS__}, WeightLayout::layout, to_packed) \
      ->Arg(2)                                                                                 \
      ->Unit(benchmark::kMillisecond)                                                          \
      ->UseManualTime()
HALFBYTE_BENCH(nf4_g64_bitsandbytes, bitsandbytes, true, .format = Format::nf4,
               .granularity = Granularity::flat);
HALFBYTE_BENCH(nf4_g64_bitsandbytes_back, bitsandbytes, false, .format = Format::nf4,
               .granularity = Granularity::flat);
HALFBYTE_BENCH(int4_g128_compressed_tensors, compressed_tensors, true, .format = Format::int4,
               .group_size = 128, .scale_dtype = DType::bf16);
HALFBYTE_BENCH(affine4_g64_mlx, mlx, true, .format = Format::affine4, .scale_rule = ScaleRule::mlx_edge,
               .scale_dtype = DType::bf16);
HALFBYTE_BENCH(int8_g64, halfbyte, true, .format = Format::int8);
HALFBYTE_BENCH(int8_g64_back, halfbyte, false, .format = Format::int8);

}  // namespace
}  // namespace halfbyte::bench
