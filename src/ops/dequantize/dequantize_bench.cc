#include "ops/bench.h"

namespace halfbyte::bench {
namespace {

void BM_dequantize(benchmark::State& state, const QuantSpec& spec, DType dtype) {
  const QuantShape shape = quant_shape(spec, kRows, kCols);
  const int64_t scale_bytes = shape.num_groups * size_of(spec.scale_dtype);
  Buffer codes = make_buffer(shape.code_bytes()), scales = make_buffer(scale_bytes),
         zeros = make_buffer(shape.num_groups), biases = make_buffer(scale_bytes),
         y = make_buffer(kRows * kCols * size_of(dtype));
  {
    const Buffer x = make_buffer(kRows * kCols * 2);
    fill_weights(x.get(), kRows * kCols);
    quantize({x.get(), DType::bf16, {kRows, kCols}, {}, {}},
             {spec, kRows, kCols, codes.get(), scales.get(), has_zeros(spec) ? zeros.get() : nullptr,
              has_biases(spec) ? biases.get() : nullptr});
  }
  const QuantizedView in{spec,
                         kRows,
                         kCols,
                         codes.get(),
                         scales.get(),
                         has_zeros(spec) ? zeros.get() : nullptr,
                         has_biases(spec) ? biases.get() : nullptr};
  const int64_t read_bytes = shape.code_bytes() + scale_bytes * (has_biases(spec) ? 2 : 1) +
                             (has_zeros(spec) ? shape.num_groups : 0);
  for (auto _ : state)
    dequantize(in, {y.get(), dtype, {kRows, kCols}, {}, {}}, {static_cast<int>(state.range(0))});
  // Bytes read and written: compare with the bare copy.
  state.SetBytesProcessed(state.iterations() * (read_bytes + kRows * kCols * size_of(dtype)));
}

// The same traffic without arithmetic.
void BM_bare_move_nf4_bf16(benchmark::State& state) {
  const int64_t read_bytes = kRows * kCols / 2 + kRows * kCols / 64 * 4, write_bytes = kRows * kCols * 2;
  const Buffer x = make_buffer(read_bytes), y = make_buffer(write_bytes);
  for (auto _ : state) bare_move(x.get(), read_bytes, y.get(), write_bytes, static_cast<int>(state.range(0)));
  state.SetBytesProcessed(state.iterations() * (read_bytes + write_bytes));
}
BENCHMARK(BM_bare_move_nf4_bf16)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();

#define HALFBYTE_BENCH(name, dtype, ...)                                \
  BENCHMARK_CAPTURE(BM_dequantize, name, QuantSpec{__VA_ARGS__}, dtype) \
      ->Arg(2)                                                          \
      ->Unit(benchmark::kMillisecond)                                   \
      ->UseRealTime()
HALFBYTE_BENCH(nf4_g64_bf16, DType::bf16, .format = Format::nf4);
HALFBYTE_BENCH(nf4_g64_f16, DType::f16, .format = Format::nf4);
HALFBYTE_BENCH(nf4_g64_f32, DType::f32, .format = Format::nf4);
HALFBYTE_BENCH(int4_g128_bf16, DType::bf16, .format = Format::int4, .group_size = 128,
               .scale_dtype = DType::bf16);
HALFBYTE_BENCH(affine4_g64_bf16, DType::bf16, .format = Format::affine4, .scale_rule = ScaleRule::minmax,
               .scale_dtype = DType::bf16);
HALFBYTE_BENCH(affine3_g64_bf16, DType::bf16, .format = Format::affine3, .scale_rule = ScaleRule::minmax,
               .scale_dtype = DType::bf16);
HALFBYTE_BENCH(int8_g64_bf16, DType::bf16, .format = Format::int8);

}  // namespace
}  // namespace halfbyte::bench
