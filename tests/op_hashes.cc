// Prints a hash of the bytes that each op gives for seeded random problems, a line a problem: two builds,
// devices or numbers of threads give the same bytes where they print the same lines. It uses public headers
// only, so that it can be built against any version of the library. Problems depend on the seed, the op and
// their number alone; outputs are poisoned before, and bytes around tensors are hashed too. Bytes of products
// depend on the variant, which their lines name.
#include "op_hashes.h"

#include <cstdlib>

#include "halfbyte/affine_qdq.hpp"
#include "halfbyte/fake_quantize.hpp"
#include "halfbyte/qgemm_grouped.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "halfbyte/quantize_plan.hpp"
#include "halfbyte/simple.hpp"

namespace halfbyte::op_hashes {
namespace {

constexpr const char* kUsage = R"(halfbyte_op_hashes [--OPTION VALUE]...
  --op NAME        may be given more than once; else all
  --device DEVICE  cpu or cuda:N
  --threads N      of the CPU; 0: all
  --seed N         1
  --first N        number of the first problem of each op: 0
  --count N        problems of each op: 200
  --variant NAME   of products: this one; else the chosen one and then each other that takes the problem
)";

// ---- Matrices: quantize, dequantize and what stands on them

QuantizedView make_quantized(Problem& p, const QuantSpec& spec, int64_t rows, int64_t cols, bool output) {
  const QuantShape shape = quant_shape(spec, rows, cols);
  const auto part = [&](DType dtype, int64_t n, Data data) {
    return p.tensor(dtype, {n}, output ? Data::poison : data).data;
  };
  QuantizedView view{spec, rows, cols};
  view.codes = static_cast<uint8_t*>(part(DType::u8, shape.code_bytes(), Data::bits));
  const Data scales = p.random.one_in(2) ? Data::scales : Data::finite;
  view.scales = part(spec.scale_dtype, shape.num_groups, scales);
  if (has_biases(spec)) view.biases = part(spec.scale_dtype, shape.num_groups, Data::normal);
  if (!has_zeros(spec)) return view;
  const int64_t most = (1 << info(spec.format).bits) - 1;
  view.zeros = static_cast<uint8_t*>(output ? part(DType::u8, shape.num_groups, Data::poison)
                                            : p.integers(DType::u8, {shape.num_groups}, 0, most).data);
  return view;
}

void run_quantize(Problem& p) {
  Random& r = p.random;
  const DType dtype = draw_float(r);
  const EncodedSpec spec = draw_spec(r, dtype);
  const Shape shape = draw_shape(r, 1, 3);
  const int64_t rows = rows_of(shape), cols = shape.back(), alignment = p.draw_alignment(dtype);
  const bool plan = r.one_in(2), ranged = !plan && spec.granularity == Granularity::tensor && r.one_in(2);
  p.text << dtype << ' ' << shape << ' ' << spec << (plan ? " plan" : ranged ? " range" : "");
  const TensorView x = p.tensor(dtype, shape, Data::any);
  p.print([&] {
    const QuantizedView out = make_quantized(p, spec, rows, cols, true);
    if (plan) return p.run<Quantize>({spec, rows, cols, dtype, alignment, spec.encoding}, {x, out});
    const ValueRange range{-1, 3};  // as if of a larger tensor
    p.hash.add(quantize(x, out, spec.encoding, p.execution, ranged ? &range : nullptr));
  });
}

void run_dequantize(Problem& p) {
  Random& r = p.random;
  const DType dtype = draw_float(r);
  const EncodedSpec spec = draw_spec(r, dtype);
  const Shape shape = draw_shape(r, 1, 3);
  const int64_t rows = rows_of(shape), cols = shape.back(), alignment = p.draw_alignment(dtype);
  const bool plan = r.one_in(2);
  p.text << dtype << ' ' << shape << ' ' << spec << (plan ? " plan" : "");
  p.print([&] {
    const QuantizedView in = make_quantized(p, spec, rows, cols, false);
    const TensorView y = p.tensor(dtype, shape, Data::poison);
    if (plan) return p.run<Dequantize>({spec, rows, cols, dtype, alignment}, {in, y});
    dequantize(in, y, p.execution);
  });
}

void run_value_range(Problem& p) {
  const DType dtype = draw_float(p.random);
  const Shape shape = draw_shape(p.random, 0, 3);
  p.draw_alignment(dtype);
  p.text << dtype << ' ' << shape;
  const TensorView x = p.tensor(dtype, shape, Data::any);
  p.print([&] { p.hash.add(value_range(x, p.execution)); });
}

// In host memory on every device, as double_quantize is.
void run_quantized_tensor(Problem& p) {
  Random& r = p.random;
  const DType dtype = draw_float(r);
  EncodedSpec spec = draw_spec(r, dtype);
  if (spec.scale_dtype == DType::f64) spec.scale_dtype = DType::f32;
  spec.double_quant = spec.scale_dtype == DType::f32 && !has_biases(spec);
  const Shape shape = draw_shape(r, 1, 3);
  p.text << dtype << ' ' << shape << ' ' << spec;
  std::vector<uint8_t> values(static_cast<size_t>(contiguous_bytes(dtype, shape))), result = values;
  fill_values(r, values.data(), dtype, rows_of(shape) * shape.back(), r.one_in(4) ? Data::any : Data::normal);
  p.print([&] {
    const QuantizedTensor q =
        quantize({values.data(), dtype, shape, {}, {}}, spec, spec.encoding, p.execution);
    dequantize(q, {result.data(), dtype, shape, {}, {}}, p.execution);
    const auto add = [&](const Tensor& part) {
      p.hash.add(part.data(), static_cast<size_t>(part.num_bytes()));
    };
    for (const Tensor& part : {q.codes, q.scales, q.zeros, q.biases}) add(part);
    p.hash.add(result);
    add(q.scales_absmax);
    const Tensor& offset = q.scales_offset;
    p.hash.add(offset.num_elements() == 0 ? 0.0 : double{*reinterpret_cast<const float*>(offset.data())});
  });
}

void run_double_quantize(Problem& p) {
  const int64_t n = draw_shape(p.random, 1, 1)[0];
  p.text << '[' << n << ']';
  const auto length = static_cast<size_t>(n);
  std::vector<float> scales(length), absmax((length + 255) / 256), decoded(length);
  std::vector<uint8_t> codes(length);
  fill_values(p.random, reinterpret_cast<uint8_t*>(scales.data()), DType::f32, n,
              p.random.one_in(4) ? Data::finite : Data::normal);
  p.print([&] {
    DoubleQuantizedView view{codes.data(), absmax.data(), 0};
    double_quantize(scales.data(), n, view);
    double_dequantize(view, n, decoded.data());
    p.hash.add(codes);
    p.hash.add(double{view.offset});
    for (const auto& values : {absmax, decoded}) p.hash.add(values);
    p.hash.add(double_quant_map(), 256 * sizeof(float));
  });
}

void run_simple(Problem& p) {
  Random& r = p.random;
  const DType dtype = draw_float(r), y_dtype = draw_float(r);
  const int64_t n = draw_shape(r, 1, 1)[0], group_size = draw_group_size(r);
  const bool nf4 = r.one_in(3), symmetric = nf4 || r.one_in(2);
  DType scale_dtype = draw_short_float(r);
  if (dtype == DType::f64 && y_dtype == DType::f64 && r.one_in(2)) scale_dtype = DType::f64;
  p.draw_alignment(dtype);
  p.text << (nf4         ? "nf4 "
             : symmetric ? "int4 "
                         : "int4+zero ")
         << dtype << " to " << y_dtype << " [" << n << "] " << group_size << ' ' << scale_dtype;
  const TensorView x = p.tensor(dtype, {n}, r.one_in(3) ? Data::any : Data::normal);
  const Int4Config config{group_size, symmetric};
  const int64_t groups = config.num_groups(n);
  const TensorView codes = p.tensor(DType::u8, {config.packed_bytes(n)}, Data::poison);
  const TensorView scales = p.tensor(scale_dtype, {groups}, Data::poison);
  const TensorView zeros = symmetric ? TensorView{} : p.tensor(DType::u8, {groups}, Data::poison);
  const TensorView y = p.tensor(y_dtype, {n}, Data::poison);
  p.print([&] {
    if (nf4) {
      quantize_nf4(x, codes, scales, n, group_size, p.execution);
      dequantize_nf4(codes, scales, y, n, group_size, p.execution);
    } else {
      quantize_int4(x, codes, scales, zeros, n, config, p.execution);
      dequantize_int4(codes, scales, zeros, y, n, config, p.execution);
    }
  });
}

// ---- Linear quantization

struct Parameters {
  TensorView scale, zero_point;
};
// Of linear and fake quantization.
template <class Descriptor>
Parameters make_parameters(Problem& p, const Descriptor& d) {
  const Shape shape = d.scale_shape();
  Parameters result;
  result.scale = p.tensor(d.scale_dtype, shape, d.computed ? Data::poison : Data::invalid_scales);
  if (!d.zero_point_dtype) return result;
  const DType dtype = *d.zero_point_dtype;
  const int beyond = dtype == DType::i32 && p.random.one_in(4) ? 3 : 0;
  if (d.computed || is_floating(dtype))
    result.zero_point = p.tensor(dtype, shape, d.computed ? Data::poison : Data::any);
  else
    result.zero_point = p.integers(dtype, shape, d.q_min - beyond, d.q_max + beyond);
  return result;
}

LinearDescriptor draw_linear(Problem& p, bool may_compute) {
  Random& r = p.random;
  LinearDescriptor d;
  d.dtype = draw_float(r);
  d.code_dtype = r.pick({DType::i8, DType::i8, DType::u8, DType::u8, DType::i4, DType::u4});
  p.text << d.dtype << ' ' << d.code_dtype << ' ';
  draw_grouping(p, d);
  const bool is_signed = d.code_dtype == DType::i8 || d.code_dtype == DType::i4;
  const int levels = is_packed(d.code_dtype) ? 16 : 256;
  d.q_min = is_signed ? -levels / 2 : 0;
  d.q_max = d.q_min + levels - 1;
  if (r.one_in(3)) {
    if (is_signed) d.q_min += static_cast<int>(r.below(levels / 4));
    d.q_max -= static_cast<int>(r.below(levels / 4));
  }
  d.scale_dtype = draw_scale_dtype(r, d.dtype);
  if (r.one_in(2)) d.zero_point_dtype = r.one_in(2) ? DType::i32 : d.code_dtype;
  d.computed = may_compute && r.one_in(2);
  d.scale_rule = r.pick({ScaleRule::absmax, ScaleRule::half_range});
  if (d.zero_point_dtype) d.scale_rule = ScaleRule::minmax;
  d.strided = r.one_in(3);
  d.alignment = p.draw_alignment(d.dtype);
  p.text << d.q_min << ".." << d.q_max << ' ' << d.scale_dtype << ' ';
  if (d.zero_point_dtype) p.text << *d.zero_point_dtype << ' ';
  p.text << (d.computed ? to_string(d.scale_rule) : "given") << (d.strided ? " strided" : "");
  return d;
}

// Strided: with space between elements, along the axis, and between what is before it.
TensorView linear_tensor(Problem& p, const LinearDescriptor& d, DType dtype, Data data) {
  if (!d.strided || is_packed(dtype) || d.shape.empty()) return p.tensor(dtype, d.shape, data);
  const auto rank = static_cast<int>(d.shape.size());
  const auto axis = static_cast<size_t>((d.axis + rank) % rank);
  Shape strides(d.shape.size());
  int64_t stride = p.random.between(1, 2);
  for (size_t i = strides.size(); i-- > 0;) {
    if (i == axis || i + 1 == axis) stride += p.random.below(3);
    strides[i] = stride;
    stride *= std::max<int64_t>(1, d.shape[i]);
  }
  return p.tensor(dtype, d.shape, data, strides);
}

void run_quantize_linear(Problem& p) {
  const LinearDescriptor d = draw_linear(p, true);
  p.print([&] {
    const TensorView x = linear_tensor(p, d, d.dtype, Data::any);
    const TensorView codes = linear_tensor(p, d, d.code_dtype, Data::poison);
    const auto [scale, zero_point] = make_parameters(p, d);
    p.run<QuantizeLinear>(d, {x, codes, scale, zero_point});
  });
}
void run_dequantize_linear(Problem& p) {
  const LinearDescriptor d = draw_linear(p, false);
  p.print([&] {
    const TensorView codes = linear_tensor(p, d, d.code_dtype, Data::bits);
    const TensorView y = linear_tensor(p, d, d.dtype, Data::poison);
    const auto [scale, zero_point] = make_parameters(p, d);
    p.run<DequantizeLinear>(d, {codes, scale, zero_point, y});
  });
}
void run_quantize_linear_backward(Problem& p) {
  const LinearDescriptor d = draw_linear(p, false);
  p.print([&] {
    const TensorView x = linear_tensor(p, d, d.dtype, Data::any);
    const TensorView dy = linear_tensor(p, d, d.dtype, Data::any);
    const auto [scale, zero_point] = make_parameters(p, d);
    const TensorView dx = p.random.one_in(3) ? dy : linear_tensor(p, d, d.dtype, Data::poison);
    p.run<QuantizeLinearBackward>(d, {x, dy, scale, zero_point, dx});
  });
}

// ---- Observers

struct StateTensors {
  TensorView min, max, num_batches;
};
StateTensors make_state(Problem& p, DType dtype, const Shape& shape, const Shape& counts) {
  StateTensors state;
  state.min = p.tensor(dtype, shape, Data::poison);
  state.max = p.tensor(dtype, shape, Data::poison);
  state.num_batches = p.tensor(DType::i64, counts, Data::poison);
  reset_observer(state.min, state.max, state.num_batches, p.stream.handle());
  return state;
}
void run_observe(Problem& p) {
  Random& r = p.random;
  ObserveDescriptor d;
  d.dtype = draw_float(r);
  p.text << d.dtype << ' ';
  draw_grouping(p, d);
  d.observer = draw_observer(r, 4);
  d.alignment = p.draw_alignment(d.dtype);
  const int64_t num_batches = r.between(1, 3);
  p.text << d.observer << ' ' << num_batches << (num_batches > 1 ? " batches" : " batch");
  p.print([&] {
    const auto [min, max, batches] = make_state(p, d.state_dtype(), d.state_shape(), d.count_shape());
    const ObservePlan plan = p.select<Observe>(d);
    for (int64_t i = 0; i < num_batches; ++i)
      p.run(plan, {p.tensor(d.dtype, d.shape, Data::any), min, max, batches});
    const ObserverState state = load_observer(min, max, batches, p.stream.handle());
    p.hash.add(state);
    store_observer(state, min, max, batches, p.stream.handle());
  });
}

void run_observer_state(Problem& p) {
  Random& r = p.random;
  const ObserverConfig config = draw_observer(r, 4);
  const DType dtype = r.pick({DType::f32, DType::f64}), scale_dtype = draw_short_float(r);
  const int64_t num_groups = r.between(1, 40);
  p.text << config << ' ' << dtype << " [" << num_groups << "] " << scale_dtype;
  p.print([&] {
    ObserverState states[] = {ObserverState::empty(num_groups, dtype, config.kind),
                              ObserverState::empty(num_groups, dtype, config.kind)};
    for (ObserverState& state : states)
      for (int64_t batch = r.between(1, 4); batch > 0; --batch) {
        std::vector<double> min, max;
        for (int64_t i = 0; i < num_groups; ++i) {
          min.push_back(r.normal());
          max.push_back(min.back() + 3 * r.uniform());
        }
        state.update(config, min, max);
      }
    states[0].merge(config, states[1]);
    p.hash.add(states[0]);
    for (const QParams& params : states[0].qparams(config.qparams, scale_dtype)) p.hash.add(params);
  });
}

void run_compute_qparams(Problem& p) {
  Random& r = p.random;
  QParamsDescriptor d;
  d.shape = draw_shape(r, 0, 3);
  d.config = draw_qparams(r);
  d.dtype = r.pick({DType::f32, DType::f64});
  d.scale_dtype = draw_short_float(r);
  if (d.dtype == DType::f64 && r.one_in(2)) d.scale_dtype = DType::f64;
  if (d.config.asymmetric || d.config.q_min >= 0 || r.one_in(2))
    d.zero_point_dtype = r.pick({DType::i32, d.config.q_min < 0 ? DType::i8 : DType::u8});
  p.text << d.shape << ' ' << d.config << ' ' << d.dtype << ' ' << d.scale_dtype;
  if (d.zero_point_dtype) p.text << ' ' << *d.zero_point_dtype;
  p.print([&] {
    const TensorView min = p.tensor(d.dtype, d.shape, Data::any), max = p.tensor(d.dtype, d.shape, Data::any);
    const TensorView scale = p.tensor(d.scale_dtype, d.shape, Data::poison);
    TensorView zero_point;
    if (d.zero_point_dtype) zero_point = p.tensor(*d.zero_point_dtype, d.shape, Data::poison);
    p.run<ComputeQParams>(d, {min, max, scale, zero_point});
    const double low = -r.uniform(), high = 2 * r.uniform();
    p.hash.add(compute_qparams(low, high, d.config, d.scale_dtype, d.dtype));
  });
}

// ---- Fake quantization

FakeQuantizeDescriptor draw_fake_quantize(Problem& p) {
  Random& r = p.random;
  FakeQuantizeDescriptor d;
  d.dtype = draw_float(r);
  p.text << d.dtype << ' ';
  draw_grouping(p, d);
  if (r.one_in(3)) {
    d.format = r.pick({Format::nf4, Format::fp4, Format::fp4_e2m1, Format::lut4});
    draw_table(r, *d.format, d.table);
    p.text << info(*d.format).name << ' ';
  } else {
    const QParamsConfig config = draw_qparams(r);
    d.q_min = config.q_min;
    d.q_max = config.q_max;
    if (r.one_in(2)) d.zero_point_dtype = DType::i32;
    p.text << d.q_min << ".." << d.q_max << (d.zero_point_dtype ? " i32 " : " ");
  }
  d.scale_dtype = draw_scale_dtype(r, d.dtype);
  d.alignment = p.draw_alignment(d.dtype);
  p.text << d.scale_dtype;
  return d;
}

void run_fake_quantize(Problem& p) {
  Random& r = p.random;
  FakeQuantizeDescriptor d = draw_fake_quantize(p);
  d.mask = r.one_in(2);
  d.computed = r.one_in(2);
  if (d.computed) {
    d.scale_rule = d.zero_point_dtype        ? ScaleRule::minmax
                   : d.format || r.one_in(2) ? ScaleRule::absmax
                                             : ScaleRule::half_range;
    d.eps = r.pick({0.0, 0.0, 0x1p-23, 1e-3});
    if (r.one_in(2)) d.observer = draw_observer(r, 2);
  } else if (d.zero_point_dtype && r.one_in(2)) {
    d.zero_point_dtype = d.state_dtype();  // learned
  }
  const bool in_place = r.one_in(3);
  p.text << (d.computed ? std::string(" ") + to_string(d.scale_rule) : " given") << (d.mask ? " mask" : "")
         << (in_place ? " in place" : "");
  if (d.observer) p.text << ' ' << *d.observer;
  p.print([&] {
    const auto [scale, zero_point] = make_parameters(p, d);
    const TensorView mask = d.mask ? p.tensor(DType::u8, d.mask_shape(), Data::poison) : TensorView{};
    const auto [min, max, batches] =
        d.observer ? make_state(p, d.state_dtype(), d.scale_shape(), {}) : StateTensors{};
    const FakeQuantizePlan plan = p.select<FakeQuantize>(d);
    for (int64_t i = d.observer ? r.between(1, 3) : 1; i > 0; --i) {
      const TensorView x = p.tensor(d.dtype, d.shape, Data::any);
      const TensorView y = in_place ? x : p.tensor(d.dtype, d.shape, Data::poison);
      p.run(plan, {x, y, scale, zero_point, mask, min, max, batches});
    }
  });
}

void run_fake_quantize_block_floats(Problem& p) {
  Random& r = p.random;
  const FormatInfo& format = info(r.pick({Format::nvfp4, Format::mxfp4}));
  FakeQuantizeDescriptor d;
  d.dtype = draw_float(r);
  d.shape = draw_shape(r, 1, 4);
  const auto rank = static_cast<int>(d.shape.size());
  if (r.one_in(3)) d.axis = static_cast<int>(r.between(-rank, rank - 1));
  p.text << format.name << ' ' << d.dtype << ' ' << d.shape << '@' << d.axis << ' ';
  d.format = format.format;
  d.granularity = Granularity::group;
  d.group_size = format.group_size;
  d.scale_dtype = *format.scale_dtype;
  d.alignment = p.draw_alignment(d.dtype);
  d.computed = !r.one_in(3);
  const bool has_global = format.format == Format::nvfp4;
  d.computed_global_scale = has_global && d.computed && r.one_in(2);
  p.text << (d.computed_global_scale ? "with the global scale" : d.computed ? "computed" : "given");
  p.print([&] {
    const TensorView x = p.tensor(d.dtype, d.shape, Data::any), y = p.tensor(d.dtype, d.shape, Data::poison);
    const TensorView scale = p.tensor(d.scale_dtype, d.scale_shape(), d.computed ? Data::poison : Data::bits);
    TensorView global;
    if (has_global)
      global = p.tensor(DType::f32, {1}, d.computed_global_scale ? Data::poison : Data::invalid_scales);
    p.run<FakeQuantize>(d, {x, y, scale, {}, {}, {}, {}, {}, global});
  });
}

void run_fake_quantize_backward(Problem& p) {
  Random& r = p.random;
  FakeQuantizeDescriptor d = draw_fake_quantize(p);
  d.mask = r.one_in(3);
  if (d.zero_point_dtype && r.one_in(2)) d.zero_point_dtype = d.state_dtype();
  const bool in_place = r.one_in(3);
  p.text << (d.mask ? " mask" : "") << (in_place ? " in place" : "");
  p.print([&] {
    FakeQuantizeBackward::Args args;
    const TensorView dy = p.tensor(d.dtype, d.shape, Data::any);
    args.dy = dy;
    args.dx = in_place ? dy : p.tensor(d.dtype, d.shape, Data::poison);
    if (d.mask) {
      args.mask = p.tensor(DType::u8, d.mask_shape(), Data::bits);
    } else {
      args.x = p.tensor(d.dtype, d.shape, Data::any);
      const Parameters parameters = make_parameters(p, d);
      args.scale = parameters.scale, args.zero_point = parameters.zero_point;
    }
    p.run<FakeQuantizeBackward>(d, args);
  });
}

void run_fake_quantize_learned_backward(Problem& p) {
  Random& r = p.random;
  FakeQuantizeDescriptor d = draw_fake_quantize(p);
  const bool learned = d.zero_point_dtype && r.one_in(2), in_place = r.one_in(3);
  if (learned) d.zero_point_dtype = d.state_dtype();
  d.gradient_scale = r.one_in(2) ? 1 : r.uniform();
  p.text << (learned ? " learned" : "") << (in_place ? " in place" : "") << ' ' << d.gradient_scale;
  p.print([&] {
    FakeQuantizeLearnedBackward::Args args;
    args.x = p.tensor(d.dtype, d.shape, Data::any);
    const TensorView dy = p.tensor(d.dtype, d.shape, Data::any);
    args.dy = dy;
    const Parameters parameters = make_parameters(p, d);
    args.scale = parameters.scale, args.zero_point = parameters.zero_point;
    args.dx = in_place ? dy : p.tensor(d.dtype, d.shape, Data::poison);
    args.dscale = p.tensor(d.state_dtype(), d.scale_shape(), Data::poison);
    if (learned) args.dzero_point = p.tensor(d.state_dtype(), d.scale_shape(), Data::poison);
    p.run<FakeQuantizeLearnedBackward>(d, args);
  });
}

// ---- Affine quantization over fixed codes

AffineQdqDescriptor draw_affine(Problem& p) {
  Random& r = p.random;
  AffineQdqDescriptor d;
  const Shape shape = draw_shape(r, 2, 2);
  d.rows = shape[0];
  d.cols = shape[1];
  d.bits = r.pick({2, 3, 4, 4, 5, 6, 8});
  d.group_size = draw_group_size(r);
  d.packed = !r.one_in(3);
  d.dtype = draw_short_float(r);
  d.scale_dtype = draw_short_float(r);
  d.alignment = p.draw_alignment(d.dtype);
  p.text << d.dtype << ' ' << shape << " affine" << d.bits << (d.packed ? " group" : " bytes group")
         << d.group_size << ' ' << d.scale_dtype;
  return d;
}
TensorView affine_codes(Problem& p, const AffineQdqDescriptor& d) {
  return d.packed ? p.tensor(DType::u8, d.code_shape(), Data::bits)
                  : p.integers(DType::u8, d.code_shape(), 0, (1 << d.bits) - 1);
}

void run_affine_init(Problem& p) {
  Random& r = p.random;
  AffineQdqDescriptor d = draw_affine(p);
  d.scale_rule = r.pick({ScaleRule::minmax, ScaleRule::mlx_edge});
  d.rounding = r.pick({AffineRounding::half_even, AffineRounding::half_away});
  d.refit = r.one_in(2);
  p.text << ' ' << to_string(d.scale_rule) << (d.rounding == AffineRounding::half_away ? " away" : "")
         << (d.refit ? " refit" : "");
  p.print([&] {
    AffineInit::Args args;
    args.w = p.tensor(d.dtype, {d.rows, d.cols}, Data::any);
    args.codes = p.tensor(DType::u8, d.code_shape(), Data::poison);
    args.scales = p.tensor(d.scale_dtype, d.scale_shape(), Data::poison);
    args.biases = p.tensor(d.scale_dtype, d.scale_shape(), Data::poison);
    p.run<AffineInit>(d, args);
  });
}

void run_affine_qdq(Problem& p) {
  const AffineQdqDescriptor d = draw_affine(p);
  p.print([&] {
    AffineQdq::Args args;
    args.codes = affine_codes(p, d);
    args.scales = p.tensor(d.scale_dtype, d.scale_shape(), Data::finite);
    args.biases = p.tensor(d.scale_dtype, d.scale_shape(), Data::finite);
    args.y = p.tensor(d.dtype, {d.rows, d.cols}, Data::poison);
    p.run<AffineQdq>(d, args);
  });
}

void run_affine_qdq_backward(Problem& p) {
  Random& r = p.random;
  AffineQdqDescriptor d = draw_affine(p);
  d.adam = r.one_in(2);
  const bool gradients = !d.adam || r.one_in(2);
  const Data data = r.one_in(3) ? Data::any : Data::normal;
  p.text << (d.adam ? " adam" : "") << (gradients ? "" : " alone");
  p.print([&] {
    const auto tensor = [&](Data values) { return p.tensor(DType::f32, d.scale_shape(), values); };
    AffineQdqBackward::Args args;
    args.codes = affine_codes(p, d);
    args.dy = p.tensor(d.dtype, {d.rows, d.cols}, data);
    if (gradients) args.dscales = tensor(Data::poison), args.dbiases = tensor(Data::poison);
    if (d.adam) {
      args.scales = tensor(Data::finite), args.biases = tensor(Data::finite);
      args.scale_m = tensor(Data::normal), args.bias_m = tensor(Data::normal);
      args.scale_v = tensor(Data::scales), args.bias_v = tensor(Data::scales);
      args.adam = {r.uniform() * 0.01, r.pick({0.9, 0.99, 0.0}), r.pick({0.999, 0.99, 0.0}),
                   r.pick({1e-8, 0.0}), r.pick({r.between(1, 9), r.between(1, 5000)})};
    }
    p.run<AffineQdqBackward>(d, args);
  });
}

// ---- Packed weights and products

WeightView make_weight_view(Problem& p, const QuantSpec& spec, int64_t rows, int64_t cols, Layout layout,
                            bool output) {
  const WeightViewBytes bytes = weight_view_bytes(spec, rows, cols, layout);
  const auto part = [&](DType dtype, int64_t num_bytes, Data data) {
    return p.tensor(dtype, {num_bytes / size_of(dtype)}, output ? Data::poison : data).data;
  };
  WeightView view{spec, rows, cols, layout};
  view.device = p.device;
  view.codes = part(DType::u8, bytes.codes, Data::bits);
  view.scales = spec.double_quant ? part(DType::u8, bytes.scales, Data::bits)
                                  : part(spec.scale_dtype, bytes.scales, Data::normal);
  if (has_zeros(spec) && (output || layout == Layout::compressed_tensors))
    view.zeros = part(DType::u8, bytes.zeros, Data::bits);
  else if (has_zeros(spec))
    view.zeros = p.integers(DType::u8, {bytes.zeros}, 0, (1 << info(spec.format).bits) - 1).data;
  if (has_biases(spec)) view.biases = part(spec.scale_dtype, bytes.biases, Data::normal);
  if (!spec.double_quant) return view;
  view.absmax = static_cast<float*>(part(DType::f32, bytes.absmax, Data::normal));
  view.map = static_cast<float*>(output ? part(DType::f32, bytes.map, Data::poison)
                                        : p.copy_of(DType::f32, {256}, double_quant_map()).data);
  view.offset = static_cast<float*>(part(DType::f32, bytes.offset, Data::normal));
  return view;
}
PackedWeight make_packed_weight(Problem& p, const QuantSpec& spec, int64_t rows, int64_t cols) {
  const int64_t num_bytes = packed_weight_bytes(spec, rows, cols);
  return {spec, rows, cols, p.packed_weight(num_bytes), p.device, kPackedWeightVersion, num_bytes};
}

template <bool kStreams>
void run_reorder(Problem& p) {
  Random& r = p.random;
  const EncodedSpec spec = draw_weight_spec(r, kStreams);
  const Shape shape = draw_weight_shape(r, spec);
  const Layout from = draw_layout(r, spec), to = r.one_in(2) ? from : draw_layout(r, spec);
  p.draw_alignment(DType::f32);
  p.text << shape << ' ' << spec << ' ' << to_string(from) << " to " << to_string(to);
  p.print([&] {
    const PackedWeight packed = make_packed_weight(p, spec, shape[0], shape[1]);
    reorder(make_weight_view(p, spec, shape[0], shape[1], from, false), packed, p.execution);
    reorder(packed, make_weight_view(p, spec, shape[0], shape[1], to, true), p.execution);
  });
}

// ---- Products

QgemmDescriptor draw_qgemm(Problem& p, bool streams) {
  Random& r = p.random;
  QgemmDescriptor d;
  const EncodedSpec spec = draw_weight_spec(r, streams);
  d.spec = spec;
  const Shape shape = draw_weight_shape(r, d.spec);
  d.n = shape[0];
  d.k = shape[1];
  d.m = r.one_in(3) ? r.between(1, 8) : draw_extent(r, 300);
  d.m = std::min(d.m, std::max<int64_t>(1, 16000000 / std::max<int64_t>(1, d.n * d.k)));
  d.transposed = r.one_in(3);
  d.dtype = r.pick({DType::bf16, DType::bf16, DType::f16, DType::f32});
  d.packed = !r.one_in(5);
  d.layout = draw_layout(r, d.spec);
  d.bias = !d.transposed && r.one_in(2);
  d.accumulate = r.one_in(3);
  if (d.dtype == DType::f32) d.math = r.pick({QgemmMath::automatic, QgemmMath::tf32, QgemmMath::f64});
  d.early_start = r.one_in(8);
  d.alignment = p.draw_alignment(d.dtype);
  p.text << d.dtype << ' ' << d.m << 'x' << d.n << 'x' << d.k << ' ' << spec << ' '
         << (d.packed ? "packed" : to_string(d.layout)) << (d.transposed ? " transposed" : "")
         << (d.bias ? " bias" : "") << (d.accumulate ? " accumulate" : "") << (d.early_start ? " early" : "")
         << (d.alignment == 16 ? " " : " unaligned ") << to_string(d.math);
  return d;
}

// Of all variants that take the problem, those that are not chosen.
std::vector<std::string> others_of(const std::vector<QgemmChoice>& choices) {
  std::vector<std::string> others;
  for (const QgemmChoice& choice : choices)
    if (choice.reason.empty()) others.push_back(choice.variant);
  if (!others.empty()) others.erase(others.begin());
  return others;
}

// Returns the other variants that take the problem.
template <bool kStreams>
std::vector<std::string> run_product(Problem& p, const std::string& variant) {
  QgemmDescriptor d = draw_qgemm(p, kStreams);
  d.variant = variant;
  std::vector<std::string> others;
  Qgemm::Args args;
  try {
    const WeightView view = make_weight_view(p, d.spec, d.n, d.k, d.layout, false);
    if (d.packed) {
      const PackedWeight weight = make_packed_weight(p, d.spec, d.n, d.k);
      args.weight = weight;
      reorder(view, weight, p.execution);
    } else {
      args.view = view;
    }
    args.x = p.tensor(d.dtype, {d.m, d.transposed ? d.n : d.k}, Data::normal);
    if (d.bias) args.bias = p.tensor(d.dtype, {d.n}, Data::normal);
    args.y = p.tensor(d.dtype, {d.m, d.transposed ? d.k : d.n}, d.accumulate ? Data::normal : Data::poison);
    others = others_of(explain_qgemm(p.device, d));
  } catch (const Error&) {
    others.clear();  // selecting the plan says why
  }
  p.text << ' ';
  p.print([&] {
    const QgemmPlan plan = p.select<Qgemm>(d);
    p.text << plan.sku().kernel;
    p.run(plan, args);
  });
  return others;
}

void run_route(Problem& p) {
  Random& r = p.random;
  RouteDescriptor d;
  d.top_k = r.between(1, 8);
  d.tokens = r.one_in(20) ? 0 : draw_extent(r, 3000);
  d.num_experts = draw_extent(r, 300);
  d.dtype = r.pick({DType::i32, DType::i64});
  p.draw_alignment(d.dtype);
  p.text << d.dtype << ' ' << d.tokens << " top" << d.top_k << " of " << d.num_experts;
  p.print([&] {
    // Those of no expert too, but not always.
    const int64_t beyond = r.one_in(2) ? 1 + d.num_experts / 8 : 0;
    const TensorView experts = p.integers(d.dtype, {d.tokens, d.top_k}, -beyond, d.num_experts - 1 + beyond);
    const TensorView offsets = p.tensor(DType::i32, {d.num_experts}, Data::poison);
    p.run<Route>(d, {experts, offsets, p.tensor(DType::i32, {d.tokens * d.top_k}, Data::poison)});
  });
}

QgemmGroupedDescriptor draw_grouped(Problem& p) {
  Random& r = p.random;
  QgemmGroupedDescriptor d;
  const EncodedSpec spec = draw_weight_spec(r, r.one_in(4));
  d.spec = spec;
  const Shape shape = draw_weight_shape(r, d.spec);
  d.n = shape[0];
  d.k = shape[1];
  const int64_t size = std::max<int64_t>(1, d.n * d.k);
  d.num_experts = std::min(draw_extent(r, 40), std::max<int64_t>(1, 2000000 / size));
  d.transposed = r.one_in(3);
  d.dtype = r.pick({DType::bf16, DType::bf16, DType::f16, DType::f32});
  d.rows = r.pick({ExpertRows::offsets, ExpertRows::indices, ExpertRows::indices, ExpertRows::masked});
  if (d.rows == ExpertRows::indices) {
    d.top_k = r.between(1, 6);
    d.x_per_slot = r.one_in(2);
    d.sum_slots = r.one_in(2);
    d.routing_weights = r.one_in(2);
    d.routing_gradient = d.transposed && d.k > 0 && r.one_in(2);
  }
  const int64_t rows_of_m = d.rows == ExpertRows::masked ? d.num_experts : d.top_k;
  d.m = std::min(draw_extent(r, 300), std::max<int64_t>(1, 8000000 / size)) / rows_of_m + 1;
  d.bias = !d.transposed && r.one_in(2);
  d.accumulate = r.one_in(3);
  d.alignment = p.draw_alignment(d.dtype);
  p.text << d.dtype << ' ' << d.num_experts << 'x' << d.m << 'x' << d.n << 'x' << d.k << ' ' << spec << ' '
         << to_string(d.rows);
  if (d.rows == ExpertRows::indices) p.text << " top" << d.top_k;
  p.text << (d.x_per_slot ? " per-slot" : "") << (d.sum_slots ? " sum" : "")
         << (d.routing_weights ? " weights" : "") << (d.routing_gradient ? " gradient" : "")
         << (d.transposed ? " transposed" : "") << (d.bias ? " bias" : "")
         << (d.accumulate ? " accumulate" : "") << (d.alignment == 16 ? "" : " unaligned");
  return d;
}

// Returns the other variants that take the problem.
std::vector<std::string> run_grouped(Problem& p, const std::string& variant) {
  QgemmGroupedDescriptor d = draw_grouped(p);
  d.variant = variant;
  std::vector<std::string> others;
  const RouteDescriptor route{d.m, d.top_k, d.num_experts};
  Route::Args routing;
  QgemmGrouped::Args args;
  try {
    const int64_t num_bytes = packed_weight_bytes(d.spec, d.n, d.k), slots = d.m * d.top_k;
    std::byte* const stack = p.packed_weight(d.num_experts * num_bytes);
    for (int64_t e = 0; e < d.num_experts; ++e)
      reorder(
          make_weight_view(p, d.spec, d.n, d.k, Layout::halfbyte, false),
          PackedWeight{d.spec, d.n, d.k, stack + e * num_bytes, p.device, kPackedWeightVersion, num_bytes},
          p.execution);
    args.weight =
        PackedWeight{d.spec, d.n, d.k, stack, p.device, kPackedWeightVersion, d.num_experts * num_bytes};
    if (d.rows == ExpertRows::masked) {
      args.offsets = p.integers(DType::i32, {d.num_experts}, 0, d.m);
    } else {
      routing = {p.integers(DType::i32, {d.m, d.top_k}, p.random.one_in(2) ? -1 : 0, d.num_experts - 1),
                 p.tensor(DType::i32, {d.num_experts}, Data::poison),
                 p.tensor(DType::i32, {slots}, Data::poison)};
      args.offsets = routing.offsets;
      if (d.rows == ExpertRows::indices) args.slots = routing.slots;
    }
    const auto shape = [&](int64_t rows, int64_t cols) {
      return d.rows == ExpertRows::masked ? Shape{d.num_experts, d.m, cols} : Shape{rows, cols};
    };
    const int64_t in = d.transposed ? d.n : d.k, out = d.transposed ? d.k : d.n;
    args.x = p.tensor(d.dtype, shape(d.x_per_slot ? slots : d.m, in), Data::normal);
    if (d.routing_weights) args.routing_weights = p.tensor(DType::f32, {d.m, d.top_k}, Data::normal);
    if (d.bias) args.bias = p.tensor(d.dtype, {d.num_experts, d.n}, Data::normal);
    if (d.routing_gradient) {
      args.forward_x = p.tensor(d.dtype, {slots, d.k}, Data::normal);
      args.routing_grad = p.tensor(DType::f32, {d.m, d.top_k}, Data::poison);
    }
    args.y =
        p.tensor(d.dtype, shape(d.sum_slots ? d.m : slots, out), d.accumulate ? Data::normal : Data::poison);
    others = others_of(explain_qgemm_grouped(p.device, d));
  } catch (const Error&) {
    others.clear();  // selecting the plan says why
  }
  p.text << ' ';
  p.print([&] {
    const QgemmGroupedPlan plan = p.select<QgemmGrouped>(d);
    p.text << plan.sku().kernel;
    if (d.rows != ExpertRows::masked) p.run<Route>(route, routing);
    p.run(plan, args);
  });
  return others;
}

// Each variant has the problem anew, so that its line does not depend on who else takes it.
template <std::vector<std::string> (*kRun)(Problem& p, const std::string& variant)>
void run_variants(Problem& p) {
  const std::vector<std::string> others = kRun(p, p.options.variant);
  if (!p.options.variant.empty()) return;
  for (const std::string& variant : others) {
    Problem again(&p);
    kRun(again, variant);
  }
}

struct OpEntry {
  const char* name;
  void (*run)(Problem&);
};
constexpr OpEntry kOps[] = {
    {"quantize", run_quantize},
    {"dequantize", run_dequantize},
    {"value_range", run_value_range},
    {"quantized_tensor", run_quantized_tensor},
    {"double_quantize", run_double_quantize},
    {"simple", run_simple},
    {"quantize_linear", run_quantize_linear},
    {"dequantize_linear", run_dequantize_linear},
    {"quantize_linear_backward", run_quantize_linear_backward},
    {"observe", run_observe},
    {"observer_state", run_observer_state},
    {"compute_qparams", run_compute_qparams},
    {"fake_quantize", run_fake_quantize},
    {"fake_quantize_backward", run_fake_quantize_backward},
    {"fake_quantize_learned_backward", run_fake_quantize_learned_backward},
    {"fake_quantize_block_floats", run_fake_quantize_block_floats},
    {"affine_init", run_affine_init},
    {"affine_qdq", run_affine_qdq},
    {"affine_qdq_backward", run_affine_qdq_backward},
    {"reorder", run_reorder<false>},
    {"qgemm", run_variants<run_product<false>>},
    {"reorder_streams", run_reorder<true>},
    {"qgemm_streams", run_variants<run_product<true>>},
    {"route", run_route},
    {"qgemm_grouped", run_variants<run_grouped>},
};

[[noreturn]] void fail_usage() {
  std::cerr << kUsage << "  ops:";
  for (const OpEntry& op : kOps) std::cerr << ' ' << op.name;
  std::cerr << '\n';
  std::exit(2);
}

bool is_op(const std::string& name) {
  return std::any_of(std::begin(kOps), std::end(kOps), [&](const OpEntry& op) { return name == op.name; });
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    const int64_t number = std::atoll(value.c_str());
    if (name == "--op" && is_op(value))
      options.ops.push_back(value);
    else if (name == "--device")
      options.device = parse_device(value);
    else if (name == "--threads")
      options.num_threads = static_cast<int>(number);
    else if (name == "--seed")
      options.seed = static_cast<uint64_t>(number);
    else if (name == "--first")
      options.first = number;
    else if (name == "--count")
      options.count = number;
    else if (name == "--variant")
      options.variant = value;
    else
      fail_usage();
  }
  return options;
}

void run(const Options& options) {
  check_device(options.device);
  for (const OpEntry& op : kOps) {
    const auto& ops = options.ops;
    if (!ops.empty() && std::find(ops.begin(), ops.end(), op.name) == ops.end()) continue;
    for (int64_t index = options.first; index < options.first + options.count; ++index) {
      Problem problem(options, op.name, index);
      op.run(problem);
    }
  }
}

}  // namespace
}  // namespace halfbyte::op_hashes

int main(int argc, char** argv) {
  try {
    halfbyte::op_hashes::run(halfbyte::op_hashes::parse(argc, argv));
  } catch (const halfbyte::Error& error) {
    std::cerr << "halfbyte_op_hashes: " << error.what() << '\n';
    return static_cast<int>(error.code());
  }
  return 0;
}
