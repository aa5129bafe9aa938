// What the hosts of the campaign do with the library: a plug-in that uses all of the C interface that
// computes or handles files, with small problems. It takes no memory of its own.
#include <sys/mman.h>
#include <sys/stat.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include "halfbyte/halfbyte.h"

namespace {

constexpr DLDevice kCpu = {kDLCPU, 0};
// So large that several threads share the work.
constexpr int64_t kRows = 1024, kCols = 256, kElements = kRows * kCols;

// The memory of one run.
struct Run {
  int64_t threads;
  const char* model;   // a checkpoint to read
  const char* output;  // where there is nothing
  uint64_t hash = 14695981039346656037U;

  alignas(64) std::array<float, kElements> x, y, dy, dx;
  alignas(64) std::array<uint8_t, kElements> codes;
  alignas(64) std::array<float, kElements> scales, biases, more;
  alignas(64) std::array<uint8_t, kElements> zeros;
  std::array<float, 256> map;

  void digest(const void* data, size_t size) {
    for (const char *at = static_cast<const char*>(data), *end = at + size; at != end; ++at)
      hash = (hash ^ static_cast<uint8_t>(*at)) * 1099511628211U;
  }
  template <size_t n>
  void digest(const std::array<float, n>& values, int64_t count) {
    digest(values.data(), static_cast<size_t>(count) * sizeof(float));
  }
};

// Up to two axes, in host memory.
struct Array : DLTensor {
  std::array<int64_t, 2> extents;
  Array(void* memory, uint8_t code, uint8_t bits, int64_t rows, int64_t cols = -1) : extents{rows, cols} {
    data = memory;
    device = kCpu;
    ndim = rows < 0 ? 0 : cols < 0 ? 1 : 2;
    dtype = {code, bits, 1};
    shape = extents.data();
    strides = nullptr;
    byte_offset = 0;
  }
  Array(const Array&) = delete;
};
struct Floats : Array {
  template <class Memory>
  explicit Floats(Memory& memory, int64_t rows = -1, int64_t cols = -1)
      : Array(memory.data(), kDLFloat, 32, rows, cols) {}
};
struct Bytes : Array {
  template <class Memory>
  explicit Bytes(Memory& memory, int64_t rows, int64_t cols = -1)
      : Array(memory.data(), kDLUInt, 8, rows, cols) {}
};

#define TRY(call)                                             \
  do {                                                        \
    const halfbyte_status status_of_call = (call);            \
    if (status_of_call != HALFBYTE_OK) return status_of_call; \
  } while (false)
#define WITH(type, name) \
  halfbyte_##type name;  \
  TRY(halfbyte_##type##_init(&name, sizeof name))

// What a function gives, and ends at the end.
template <class Handle, void (*destroy)(Handle*)>
struct Owner {
  Handle* handle = nullptr;
  Owner() = default;
  Owner(const Owner&) = delete;
  ~Owner() { destroy(handle); }
  operator Handle*() const { return handle; }
  Handle** operator&() { return &handle; }
};
using PlanOf = Owner<halfbyte_plan, halfbyte_plan_destroy>;
using Weight = Owner<halfbyte_quantized_weight, halfbyte_quantized_weight_destroy>;
using Report = Owner<halfbyte_report, halfbyte_report_destroy>;
using Blob = Owner<halfbyte_blob, halfbyte_blob_destroy>;

halfbyte_status words(Run& run) {
  halfbyte_format format = 0;
  TRY(halfbyte_format_find("affine4", &format));
  run.digest(&format, sizeof format);
  halfbyte_dtype dtype = 0;
  TRY(halfbyte_dtype_find("bf16", &dtype));
  DLDevice device;
  return halfbyte_device_find("cuda:3", &device);
}

// An error has a text, in parts too; without memory another one.
halfbyte_status errors(Run& run) {
  halfbyte_format format = 0;
  halfbyte_status status =
      halfbyte_format_find("a word that no format has, and that no small string holds", &format);
  if (status != HALFBYTE_USAGE || halfbyte_last_error()[0] == 0) return status;
  WITH(quant_spec, spec);
  spec.group_size = -1;
  status = halfbyte_quant_spec_check(&spec);
  if (status != HALFBYTE_USAGE || halfbyte_last_error()[0] == 0) return status;
  const Floats x(run.x, kRows, kCols);
  WITH(quantize_descriptor, descriptor);
  spec.group_size = 64;
  descriptor.spec = &spec;
  descriptor.rows = kRows;
  descriptor.cols = kCols + 1;
  PlanOf plan;
  TRY(halfbyte_quantize_select(kCpu, &descriptor, nullptr, &plan));
  WITH(quantize_args, args);
  args.x = &x;
  status = halfbyte_quantize_can_implement(plan, &args);
  if (status != HALFBYTE_USAGE || halfbyte_last_error_kind() < 0) return status;
  DLTensor misaligned = x;  // its rule is no small string
  misaligned.byte_offset = 1;
  args.x = &misaligned;
  status = halfbyte_quantize_can_implement(plan, &args);
  if (status != HALFBYTE_USAGE) return status;
  halfbyte_checkpoint* none = nullptr;
  status = halfbyte_checkpoint_open("/a/path/that/leads/nowhere/and/is/no/small/string", &none);
  return status == HALFBYTE_IO ? HALFBYTE_OK : status;
}

halfbyte_status quantize_as(Run& run, halfbyte_format format, bool asymmetric, bool plans) {
  WITH(quant_spec, spec);
  spec.format = format;
  spec.asymmetric = asymmetric;
  halfbyte_quant_shape shape;
  shape.struct_size = sizeof shape;
  TRY(halfbyte_quant_shape_of(&spec, kRows, kCols, &shape));
  const Floats x(run.x, kRows, kCols), y(run.y, kRows, kCols), scales(run.scales, shape.num_groups),
      biases(run.biases, shape.num_groups);
  const Bytes codes(run.codes, shape.code_bytes), zeros(run.zeros, shape.num_groups);
  WITH(quantized, parts);
  parts.codes = &codes;
  parts.scales = &scales;
  parts.zeros = shape.has_zeros ? &zeros : nullptr;
  parts.biases = shape.has_biases ? &biases : nullptr;
  if (plans) {
    WITH(quantize_descriptor, descriptor);
    descriptor.spec = &spec;
    descriptor.rows = kRows;
    descriptor.cols = kCols;
    WITH(plan_preference, preference);
    preference.num_threads = run.threads;
    PlanOf quantize, dequantize;
    TRY(halfbyte_quantize_select(kCpu, &descriptor, &preference, &quantize));
    TRY(halfbyte_dequantize_select(kCpu, &descriptor, &preference, &dequantize));
    halfbyte_sku sku;
    sku.struct_size = sizeof sku;
    TRY(halfbyte_plan_sku(quantize, &sku));
    WITH(quantize_args, to);
    to.x = &x;
    to.out = &parts;
    TRY(halfbyte_quantize_run(quantize, nullptr, nullptr, 0, &to));
    WITH(dequantize_args, from);
    from.in = &parts;
    from.y = &y;
    TRY(halfbyte_dequantize_run(dequantize, nullptr, nullptr, 0, &from));
  } else {
    WITH(execution, execution);
    execution.num_threads = run.threads;
    TRY(halfbyte_quantize(&x, &spec, nullptr, &parts, &execution, nullptr, nullptr));
    TRY(halfbyte_dequantize(&parts, &spec, &y, &execution));
    halfbyte_value_range range;
    range.struct_size = sizeof range;
    TRY(halfbyte_value_range_of(&x, &execution, &range));
    run.digest(&range, sizeof range);
  }
  run.digest(run.codes.data(), static_cast<size_t>(shape.code_bytes));
  run.digest(run.scales, shape.num_groups);
  run.digest(run.y, kElements);
  return HALFBYTE_OK;
}
halfbyte_status quantize(Run& run) {
  TRY(quantize_as(run, HALFBYTE_FORMAT_NF4, false, false));
  TRY(quantize_as(run, HALFBYTE_FORMAT_INT4, true, false));
  TRY(quantize_as(run, HALFBYTE_FORMAT_AFFINE4, false, false));
  return quantize_as(run, HALFBYTE_FORMAT_INT3, false, false);
}
halfbyte_status quantize_plans(Run& run) {
  TRY(quantize_as(run, HALFBYTE_FORMAT_FP4, false, true));
  TRY(quantize_as(run, HALFBYTE_FORMAT_INT8, true, true));
  return quantize_as(run, HALFBYTE_FORMAT_AFFINE5, false, true);
}

halfbyte_status flat_buffers(Run& run) {
  WITH(execution, execution);
  execution.num_threads = run.threads;
  const int64_t n = 4001, groups = (n + 31) / 32;
  const Floats x(run.x, n), y(run.y, n), scales(run.scales, groups);
  const Bytes codes(run.codes, (n + 1) / 2), zeros(run.zeros, groups);
  TRY(halfbyte_quantize_int4(&x, &codes, &scales, &zeros, n, 32, 0, &execution));
  TRY(halfbyte_dequantize_int4(&codes, &scales, &zeros, &y, n, 32, 0, &execution));
  run.digest(run.y, n);
  TRY(halfbyte_quantize_nf4(&x, &codes, &scales, n, 32, &execution));
  TRY(halfbyte_dequantize_nf4(&codes, &scales, &y, n, 32, &execution));
  run.digest(run.y, n);
  const int64_t shape[] = {1, n - 1};
  const Bytes fewer(run.codes, n / 2);
  const Floats fewer_scales(run.scales, (n - 1) / 32);
  Weight weight;
  TRY(halfbyte_quantized_weight_from_flat(HALFBYTE_FORMAT_NF4, 1, 32, &fewer, &fewer_scales, nullptr, shape,
                                          2, &weight, nullptr, nullptr));
  const Bytes map(run.zeros, 600);
  const Floats absmax(run.more, 3), all(run.x, 600);
  float offset = 0;
  TRY(halfbyte_double_quantize(&all, &map, &absmax, &offset));
  const Floats back(run.y, 600);
  TRY(halfbyte_double_dequantize(&map, &absmax, offset, &back));
  run.digest(run.y, 600);
  return HALFBYTE_OK;
}

halfbyte_status linear_plans(Run& run) {
  const int64_t extents[] = {kRows, kCols};
  WITH(linear_descriptor, d);
  d.shape = extents;
  d.ndim = 2;
  d.granularity = HALFBYTE_GRANULARITY_CHANNEL;
  d.axis = 0;
  d.computed = 1;
  WITH(plan_preference, preference);
  preference.num_threads = run.threads;
  const Floats x(run.x, kRows, kCols), y(run.y, kRows, kCols), dy(run.dy, kRows, kCols),
      dx(run.dx, kRows, kCols), scale(run.scales, kRows);
  const Array codes(run.codes.data(), kDLInt, 8, kRows, kCols);
  PlanOf quantize, dequantize, backward;
  TRY(halfbyte_quantize_linear_select(kCpu, &d, &preference, &quantize));
  WITH(quantize_linear_args, to);
  to.x = &x;
  to.codes = &codes;
  to.scale = &scale;
  TRY(halfbyte_quantize_linear_run(quantize, nullptr, nullptr, 0, &to));
  d.computed = 0;
  TRY(halfbyte_dequantize_linear_select(kCpu, &d, &preference, &dequantize));
  WITH(dequantize_linear_args, from);
  from.codes = &codes;
  from.scale = &scale;
  from.y = &y;
  TRY(halfbyte_dequantize_linear_run(dequantize, nullptr, nullptr, 0, &from));
  TRY(halfbyte_quantize_linear_backward_select(kCpu, &d, &preference, &backward));
  WITH(quantize_linear_backward_args, back);
  back.x = &x;
  back.dy = &dy;
  back.scale = &scale;
  back.dx = &dx;
  TRY(halfbyte_quantize_linear_backward_run(backward, nullptr, nullptr, 0, &back));
  run.digest(run.y, kElements);
  run.digest(run.dx, kElements);
  Weight weight;
  WITH(execution, execution);
  execution.num_threads = run.threads;
  TRY(halfbyte_quantized_weight_from_linear(&d, &codes, &scale, nullptr, &execution, &weight));
  Owner<halfbyte_linear_codes, halfbyte_linear_codes_destroy> linear;
  TRY(halfbyte_quantized_weight_to_linear(weight, &execution, &linear));
  return HALFBYTE_OK;
}

halfbyte_status training_plans(Run& run) {
  const int64_t extents[] = {kRows, kCols};
  WITH(plan_preference, preference);
  preference.num_threads = run.threads;
  const Floats x(run.x, kRows, kCols), y(run.y, kRows, kCols), dy(run.dy, kRows, kCols),
      dx(run.dx, kRows, kCols), scale(run.scales, kRows, kCols / 32), dscale(run.more, kRows, kCols / 32);
  WITH(fake_quantize_descriptor, d);
  d.shape = extents;
  d.ndim = 2;
  d.granularity = HALFBYTE_GRANULARITY_GROUP;
  d.group_size = 32;
  d.computed = 1;
  PlanOf fake, backward, learned;
  TRY(halfbyte_fake_quantize_select(kCpu, &d, &preference, &fake));
  WITH(fake_quantize_args, args);
  args.x = &x;
  args.y = &y;
  args.scale = &scale;
  TRY(halfbyte_fake_quantize_run(fake, nullptr, nullptr, 0, &args));
  d.computed = 0;
  TRY(halfbyte_fake_quantize_backward_select(kCpu, &d, &preference, &backward));
  WITH(fake_quantize_backward_args, back);
  back.x = &x;
  back.dy = &dy;
  back.scale = &scale;
  back.dx = &dx;
  TRY(halfbyte_fake_quantize_backward_run(backward, nullptr, nullptr, 0, &back));
  run.digest(run.y, kElements);
  run.digest(run.dx, kElements);
  TRY(halfbyte_fake_quantize_learned_backward_select(kCpu, &d, &preference, &learned));
  WITH(fake_quantize_learned_backward_args, lsq);
  lsq.x = &x;
  lsq.dy = &dy;
  lsq.scale = &scale;
  lsq.dx = &dx;
  lsq.dscale = &dscale;
  TRY(halfbyte_fake_quantize_learned_backward_run(learned, nullptr, nullptr, 0, &lsq));
  run.digest(run.more, kElements / 32);

  WITH(affine_qdq_descriptor, affine);
  affine.rows = kRows;
  affine.cols = kCols;
  int64_t code_shape[2], scale_shape[2];
  TRY(halfbyte_affine_qdq_descriptor_shapes(&affine, code_shape, scale_shape));
  const Bytes codes(run.codes, code_shape[0], code_shape[1]);
  const Floats scales(run.scales, scale_shape[0], scale_shape[1]),
      biases(run.biases, scale_shape[0], scale_shape[1]), dscales(run.more, scale_shape[0], scale_shape[1]),
      dbiases(run.dx, scale_shape[0], scale_shape[1]);
  PlanOf init, qdq, qdq_backward;
  TRY(halfbyte_affine_init_select(kCpu, &affine, &preference, &init));
  WITH(affine_init_args, first);
  first.w = &x;
  first.codes = &codes;
  first.scales = &scales;
  first.biases = &biases;
  TRY(halfbyte_affine_init_run(init, nullptr, nullptr, 0, &first));
  TRY(halfbyte_affine_qdq_select(kCpu, &affine, &preference, &qdq));
  WITH(affine_qdq_args, there);
  there.codes = &codes;
  there.scales = &scales;
  there.biases = &biases;
  there.y = &y;
  TRY(halfbyte_affine_qdq_run(qdq, nullptr, nullptr, 0, &there));
  TRY(halfbyte_affine_qdq_backward_select(kCpu, &affine, &preference, &qdq_backward));
  WITH(affine_qdq_backward_args, gradients);
  gradients.codes = &codes;
  gradients.dy = &dy;
  gradients.dscales = &dscales;
  gradients.dbiases = &dbiases;
  TRY(halfbyte_affine_qdq_backward_run(qdq_backward, nullptr, nullptr, 0, &gradients));
  run.digest(run.y, kElements);
  run.digest(run.more, scale_shape[0] * scale_shape[1]);
  return HALFBYTE_OK;
}

halfbyte_status observers(Run& run) {
  const int64_t extents[] = {kRows, kCols}, groups[] = {kRows};
  WITH(plan_preference, preference);
  preference.num_threads = run.threads;
  WITH(observer_config, config);
  const Floats x(run.x, kRows, kCols), min(run.scales, kRows), max(run.biases, kRows), scale(run.more, kRows);
  std::array<int64_t, kRows> counts;
  for (const halfbyte_observer_kind kind : {HALFBYTE_OBSERVER_MOVING_AVERAGE, HALFBYTE_OBSERVER_PERCENTILE}) {
    const bool each = kind == HALFBYTE_OBSERVER_PERCENTILE;
    const Array batches(counts.data(), kDLInt, 64, each ? kRows : -1);
    config.kind = kind;
    WITH(observe_descriptor, d);
    d.shape = extents;
    d.ndim = 2;
    d.granularity = HALFBYTE_GRANULARITY_CHANNEL;
    d.axis = 0;
    d.observer = &config;
    TRY(halfbyte_observer_reset(&min, &max, &batches, nullptr));
    PlanOf observe;
    TRY(halfbyte_observe_select(kCpu, &d, &preference, &observe));
    WITH(observe_args, args);
    args.x = &x;
    args.min = &min;
    args.max = &max;
    args.num_batches = &batches;
    TRY(halfbyte_observe_run(observe, nullptr, nullptr, 0, &args));
    TRY(halfbyte_observe_run(observe, nullptr, nullptr, 0, &args));
    run.digest(run.scales, kRows);
  }
  WITH(qparams_descriptor, d);
  d.shape = groups;
  d.ndim = 1;
  PlanOf qparams;
  TRY(halfbyte_compute_qparams_select(kCpu, &d, &preference, &qparams));
  WITH(compute_qparams_args, args);
  args.min = &min;
  args.max = &max;
  args.scale = &scale;
  TRY(halfbyte_compute_qparams_run(qparams, nullptr, nullptr, 0, &args));
  run.digest(run.more, kRows);
  std::array<double, 4> low, high, batch_low = {-1, -2, -3, 0}, batch_high = {1, 3, 5, 0};
  WITH(observer_state, state);
  state.min = low.data();
  state.max = high.data();
  state.num_groups = 4;
  config.kind = HALFBYTE_OBSERVER_MIN_MAX;
  TRY(halfbyte_observer_state_reset(&state));
  TRY(halfbyte_observer_state_update(&state, &config, batch_low.data(), batch_high.data()));
  run.digest(low.data(), sizeof low);
  return HALFBYTE_OK;
}

halfbyte_status products(Run& run) {
  WITH(quant_spec, spec);
  const int64_t shape[] = {kRows, kCols};
  Weight weight;
  TRY(halfbyte_quantized_weight_create(&spec, shape, 2, HALFBYTE_DTYPE_F32, kCpu, &weight));
  halfbyte_quantized_weight_parts parts;
  parts.struct_size = sizeof parts;
  TRY(halfbyte_quantized_weight_get_parts(weight, &parts));
  std::memcpy(parts.codes->data, run.zeros.data(), kElements / 2);
  for (int64_t i = 0; i < kElements / 64; ++i) static_cast<float*>(parts.scales->data)[i] = 0.5F;
  WITH(execution, execution);
  execution.num_threads = run.threads;
  Owner<halfbyte_packed_tensor, halfbyte_packed_tensor_destroy> packed;
  TRY(halfbyte_quantized_weight_pack(weight, 0, &execution, &packed));
  WITH(packed_weight, form);
  TRY(halfbyte_packed_tensor_get(packed, &form));
  WITH(qgemm_descriptor, d);
  d.spec = &spec;
  d.n = kRows;
  d.k = kCols;
  d.dtype = HALFBYTE_DTYPE_F32;
  WITH(plan_preference, preference);
  preference.num_threads = run.threads;
  Owner<halfbyte_qgemm_plans, halfbyte_qgemm_plans_destroy> plans;
  TRY(halfbyte_qgemm_plans_create(kCpu, &d, &preference, &plans));
  for (const int64_t m : {1, 3, 40}) {
    const Floats x(run.x, m, kCols), y(run.y, m, kRows);
    WITH(qgemm_args, args);
    args.x = &x;
    args.weight = &form;
    args.y = &y;
    TRY(halfbyte_qgemm_plans_run(plans, nullptr, nullptr, 0, &args));
    run.digest(run.y, m * kRows);
    d.m = m;
    PlanOf plan;
    TRY(halfbyte_qgemm_select(kCpu, &d, &preference, &plan));
    TRY(halfbyte_qgemm_run(plan, nullptr, nullptr, 0, &args));
  }
  Blob text;
  TRY(halfbyte_qgemm_explain(kCpu, &d, &text));
  Weight copy;
  return halfbyte_quantized_weight_to(weight, kCpu, nullptr, &copy);
}

halfbyte_status kernels(Run& run) {
  int64_t count = 0, index = 0;
  TRY(halfbyte_kernel_count(&count));
  run.digest(&count, sizeof count);
  for (int64_t i = 0; i < count; ++i) {
    halfbyte_kernel kernel;
    kernel.struct_size = sizeof kernel;
    TRY(halfbyte_kernel_get(i, &kernel));
    halfbyte_kernel_key key;
    key.struct_size = sizeof key;
    for (int64_t j = 0; j < kernel.num_keys; ++j) TRY(halfbyte_kernel_get_key(i, j, &key));
  }
  const halfbyte_kernel_setting setting = {"format", "int4"};
  TRY(halfbyte_kernel_choose("dequantize", &setting, 1, &index));
  Owner<halfbyte_cuda, halfbyte_cuda_destroy> cuda;
  return halfbyte_cuda_query(&cuda);
}

halfbyte_status read_checkpoint(Run& run) {
  Owner<halfbyte_checkpoint, halfbyte_checkpoint_close> checkpoint;
  TRY(halfbyte_checkpoint_open(run.model, &checkpoint));
  halfbyte_checkpoint_info info;
  info.struct_size = sizeof info;
  TRY(halfbyte_checkpoint_get_info(checkpoint, &info));
  for (int64_t i = 0; i < info.num_weights; ++i) {
    halfbyte_weight weight;
    weight.struct_size = sizeof weight;
    TRY(halfbyte_checkpoint_get_weight(checkpoint, i, &weight));
    run.digest(weight.name, std::strlen(weight.name));
    const Floats y(run.y, 64);
    TRY(halfbyte_checkpoint_decode(checkpoint, i, 0, &y));
    run.digest(run.y, 64);
  }
  TRY(halfbyte_checkpoint_read(checkpoint, 0, 0, 16, run.codes.data()));
  return HALFBYTE_OK;
}

template <class Options>
void prepare(Run& run, Options& options) {
  options.num_threads = run.threads;
  options.force = 1;
}

halfbyte_status digest_report(Run& run, const Report& report) {
  halfbyte_report_info info;
  info.struct_size = sizeof info;
  TRY(halfbyte_report_get_info(report, &info));
  for (int64_t i = 0; i < info.num_weights; ++i) {
    halfbyte_weight_report weight;
    weight.struct_size = sizeof weight;
    TRY(halfbyte_report_get_weight(report, i, &weight));
    run.digest(&weight.max_error, sizeof weight.max_error);
  }
  return HALFBYTE_OK;
}

// "": the output, or "OUTPUT.suffix" beside it.
struct Path {
  std::array<char, 4096> text;
  Path(const Run& run, const char* suffix) {
    std::snprintf(text.data(), text.size(), "%s%s", run.output, suffix);
  }
  operator const char*() const { return text.data(); }
};

// A call that memory fails leaves its output as it was: its last allocation comes before the output does.
template <class Call>
halfbyte_status keeps_output_without_memory(const char* output, const Call& call) {
  const auto file = [&] {
    struct stat status;
    return stat(output, &status) == 0 ? status.st_ino : 0;
  };
  const ino_t before = file();
  const halfbyte_status status = call();
  if (status == HALFBYTE_NO_MEMORY && file() != before) {
    std::fprintf(stderr, "host: another \"%s\" after NO_MEMORY\n", output);
    std::abort();
  }
  return status;
}

halfbyte_status write_checkpoints(Run& run) {
  const Path int4(run, "-int4"), dense(run, "-dense"), converted(run, "-converted"), written(run, "-written");
  {
    WITH(quantize_options, options);
    prepare(run, options);
    options.format = HALFBYTE_FORMAT_INT4;
    options.layout = HALFBYTE_LAYOUT_COMPRESSED_TENSORS;
    options.group_size = 32;
    Report report;
    TRY(keeps_output_without_memory(
        int4, [&] { return halfbyte_quantize_checkpoint(run.model, int4, &options, &report); }));
    TRY(digest_report(run, report));
  }
  {
    WITH(dequantize_options, options);
    prepare(run, options);
    Report report;
    TRY(keeps_output_without_memory(
        dense, [&] { return halfbyte_dequantize_checkpoint(int4, dense, &options, &report); }));
  }
  {
    WITH(convert_options, options);
    prepare(run, options);
    options.layout = HALFBYTE_LAYOUT_HALFBYTE;
    Report report;
    TRY(keeps_output_without_memory(
        converted, [&] { return halfbyte_convert_checkpoint(int4, converted, &options, &report); }));
  }
  {
    WITH(compare_options, options);
    options.num_threads = run.threads;
    Owner<halfbyte_comparison, halfbyte_comparison_destroy> comparison;
    TRY(halfbyte_compare_checkpoints(run.model, dense, &options, &comparison));
    halfbyte_comparison_row row;
    row.struct_size = sizeof row;
    TRY(halfbyte_comparison_get_row(comparison, 0, &row));
    run.digest(&row.max_error, sizeof row.max_error);
  }
  WITH(writer_options, options);
  prepare(run, options);
  Owner<halfbyte_writer, halfbyte_writer_destroy> writer;
  TRY(halfbyte_writer_create(written, &options, &writer));
  const Floats x(run.x, kRows, kCols);
  TRY(halfbyte_writer_set_dense(writer, "x", &x));
  WITH(quant_spec, spec);
  const int64_t shape[] = {kRows, kCols};
  Weight weight;
  TRY(halfbyte_quantized_weight_create(&spec, shape, 2, HALFBYTE_DTYPE_F32, kCpu, &weight));
  halfbyte_quantized_weight_parts parts;
  parts.struct_size = sizeof parts;
  TRY(halfbyte_quantized_weight_get_parts(weight, &parts));
  std::memset(parts.codes->data, 0x37, kElements / 2);
  for (int64_t i = 0; i < kElements / 64; ++i) static_cast<float*>(parts.scales->data)[i] = 0.5F;
  TRY(halfbyte_writer_set(writer, "w", weight));
  Report report;
  return keeps_output_without_memory(written, [&] { return halfbyte_writer_finish(writer, &report); });
}

struct Operation {
  const char* name;
  halfbyte_status (*run)(Run&);
};
constexpr Operation kOperations[] = {
    {"words", words},
    {"errors", errors},
    {"quantize", quantize},
    {"quantize_plans", quantize_plans},
    {"flat_buffers", flat_buffers},
    {"linear_plans", linear_plans},
    {"training_plans", training_plans},
    {"observers", observers},
    {"products", products},
    {"kernels", kernels},
    {"read_checkpoint", read_checkpoint},
    {"write_checkpoints", write_checkpoints},
};

}  // namespace

extern "C" {

// The name of an operation; NULL behind the last.
__attribute__((visibility("default"))) const char* campaign_operation(int index) {
  return index < static_cast<int>(sizeof kOperations / sizeof *kOperations) ? kOperations[index].name
                                                                            : nullptr;
}
// Runs it. *hash: of what it computed.
__attribute__((visibility("default"))) int campaign_run(int index, int threads, const char* model,
                                                        const char* output, uint64_t* hash) {
  // Not of malloc, which may fail.
  void* const memory = mmap(nullptr, sizeof(Run), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return HALFBYTE_NO_MEMORY;
  Run& run = *new (memory) Run;
  run.threads = threads;
  run.model = model;
  run.output = output;
  run.hash = 14695981039346656037U;
  uint32_t state = 12345;
  for (int64_t i = 0; i < kElements; ++i) {
    state = state * 1664525 + 1013904223;
    const auto at = static_cast<size_t>(i);
    run.x[at] = static_cast<float>(static_cast<int32_t>(state)) / 1e9F;
    run.dy[at] = run.x[at] / 3;
    run.zeros[at] = static_cast<uint8_t>(state >> 24);
  }
  const halfbyte_status status = kOperations[index].run(run);
  *hash = run.hash;
  munmap(memory, sizeof(Run));
  return status;
}
__attribute__((visibility("default"))) const char* campaign_error() { return halfbyte_last_error(); }
}
