#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

void BM_quantize(benchmark::State& state, const QuantSpec& spec) {
  const Buffer x = make_buffer(kRows * kCols * 2);
  fill_weights(x.get(), kRows * kCols);
  const QuantShape shape = quant_shape(spec, kRows, kCols);
  const Buffer codes = make_buffer(shape.code_bytes()), scales = make_buffer(shape.num_groups * 4),
               zeros = make_buffer(shape.num_groups), biases = make_buffer(shape.num_groups * 4);
  const TensorView view{x.get(), DType::bf16, {kRows, kCols}, {}, {}};
  const QuantizedView out{spec,
                          kRows,
                          kCols,
                          codes.get(),
                          scales.get(),
                          has_zeros(spec) ? zeros.get() : nullptr,
                          has_biases(spec) ? biases.get() : nullptr};
  for (auto _ : state) quantize(view, out, {static_cast<int>(state.range(0))});
  // Bytes of the source: compare with the bare read.
  state.SetBytesProcessed(state.iterations() * kRows * kCols * 2);
}
#define HALFBYTE_BENCH(name, ...)                              \
  BENCHMARK_CAPTURE(BM_quantize, name, QuantSpec{__VA_ARGS__}) \
      ->Arg(2)                                                 \
      ->Unit(benchmark::kMillisecond)                          \
      ->UseRealTime()
HALFBYTE_BENCH(bf16_nf4_g64, .format = Format::nf4);
HALFBYTE_BENCH(bf16_fp4_g64, .format = Format::fp4);
HALFBYTE_BENCH(bf16_int4_g128, .format = Format::int4, .group_size = 128,
               .scale_rule = ScaleRule::half_range);
HALFBYTE_BENCH(bf16_int4_asymmetric_g128, .format = Format::int4, .asymmetric = true, .group_size = 128,
               .scale_rule = ScaleRule::minmax);
HALFBYTE_BENCH(bf16_int8_channel, .format = Format::int8, .granularity = Granularity::channel);
HALFBYTE_BENCH(bf16_affine4_g64, .format = Format::affine4, .scale_rule = ScaleRule::mlx_edge);
HALFBYTE_BENCH(bf16_affine3_g64, .format = Format::affine3, .scale_rule = ScaleRule::minmax);

}  // namespace
}  // namespace halfbyte::bench
