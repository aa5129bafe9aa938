// The C interface: its structures, what each kind of bad argument gives, and that it does what C++ does.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "capi/support.h"
#include "halfbyte/checkpoint.hpp"
#include "halfbyte/fake_quantize.hpp"
#include "halfbyte/halfbyte.h"
#include "halfbyte/observe.hpp"
#include "halfbyte/ops.hpp"
#include "halfbyte/qgemm_grouped.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "halfbyte/version.hpp"
#include "io/test_directory.h"
#include "ops/testing.h"

namespace halfbyte {
namespace {

const std::string kModel = HALFBYTE_SOURCE_DIR "/examples/tiny-llama";
constexpr DLDevice kCpu{kDLCPU, 0};
constexpr DLDevice kNoDevice{kDLCUDA, 4711};

// A contiguous tensor of a vector on the CPU.
template <class T>
class Array {
 public:
  explicit Array(std::vector<int64_t> shape) : Array(std::move(shape), {}) {}
  Array(std::vector<int64_t> shape, std::vector<T> values)
      : values(std::move(values)), shape_(std::move(shape)) {
    int64_t n = 1;
    for (const int64_t extent : shape_) n *= extent;
    this->values.resize(static_cast<size_t>(n));
    tensor_ = {
        this->values.data(), kCpu, static_cast<int32_t>(shape_.size()), type(), shape_.data(), nullptr, 0};
  }
  Array(const Array&) = delete;
  operator const DLTensor*() const { return &tensor_; }  // NOLINT: as the C functions take it
  DLTensor* operator->() { return &tensor_; }

  std::vector<T> values;

 private:
  static DLDataType type() {
    const uint8_t code = std::is_floating_point_v<T> ? kDLFloat : std::is_signed_v<T> ? kDLInt : kDLUInt;
    return {code, 8 * sizeof(T), 1};
  }
  std::vector<int64_t> shape_;
  DLTensor tensor_;
};

#define EXPECT_OK(call) EXPECT_EQ((call), HALFBYTE_OK) << halfbyte_last_error()
#define EXPECT_FAILS(status, message, call)         \
  do {                                              \
    EXPECT_EQ((call), (status)) << #call;           \
    EXPECT_STREQ(halfbyte_last_error(), (message)); \
  } while (false)

template <class T, class Init>
T initialised(Init* init) {
  T value;
  EXPECT_OK(init(&value, sizeof value));
  return value;
}
#define INITIALISED(name) initialised<halfbyte_##name>(halfbyte_##name##_init)

template <class T>
T output() {
  T value;
  std::memset(&value, 0xA5, sizeof value);
  value.struct_size = sizeof value;
  return value;
}

std::vector<float> some_values(size_t n) {
  std::vector<float> x(n);
  for (size_t i = 0; i < n; ++i) x[i] = std::sin(static_cast<float>(i * i % 1000)) * 3;
  return x;
}

// ---- Structures

// A field that is added later must not lie in what was padding: there an older caller has anything.
TEST(CApi, StructuresDoNotEndWithPadding) {
#define EXPECT_NO_TAIL(type, member) \
  EXPECT_EQ(offsetof(halfbyte_##type, member) + sizeof(halfbyte_##type::member), sizeof(halfbyte_##type))
  EXPECT_NO_TAIL(quant_spec, group_size);
  EXPECT_NO_TAIL(encoding, search);
  EXPECT_NO_TAIL(convert_options, unfinished);
  EXPECT_NO_TAIL(writer_options, unfinished);
  EXPECT_NO_TAIL(quantize_options, choose_devices);
  EXPECT_NO_TAIL(dequantize_options, unfinished);
  EXPECT_NO_TAIL(quant_shape, has_global_scale);
  EXPECT_NO_TAIL(execution, stream);
  EXPECT_NO_TAIL(quantize_status, num_invalid_zero_points);
  EXPECT_NO_TAIL(value_range, first_nonfinite);
  EXPECT_NO_TAIL(quantized, global_scale);
  EXPECT_NO_TAIL(plan_preference, num_threads);
  EXPECT_NO_TAIL(sku, device_type);
  EXPECT_NO_TAIL(precision_guarantee, weight_rounding);
  EXPECT_NO_TAIL(quantize_descriptor, alignment);
  EXPECT_NO_TAIL(quantize_args, out);
  EXPECT_NO_TAIL(dequantize_args, y);
  EXPECT_NO_TAIL(linear_descriptor, strided);
  EXPECT_NO_TAIL(quantize_linear_args, zero_point);
  EXPECT_NO_TAIL(dequantize_linear_args, y);
  EXPECT_NO_TAIL(quantize_linear_backward_args, dx);
  EXPECT_NO_TAIL(fake_quantize_descriptor, computed_global_scale);
  EXPECT_NO_TAIL(fake_quantize_args, global_scale);
  EXPECT_NO_TAIL(fake_quantize_backward_args, dx);
  EXPECT_NO_TAIL(fake_quantize_learned_backward_args, dzero_point);
  EXPECT_NO_TAIL(qparams_config, eps);
  EXPECT_NO_TAIL(observer_config, qparams);
  EXPECT_NO_TAIL(observer_state, group_batches);
  EXPECT_NO_TAIL(observe_descriptor, observer);
  EXPECT_NO_TAIL(observe_args, num_batches);
  EXPECT_NO_TAIL(qparams_descriptor, zero_point_dtype);
  EXPECT_NO_TAIL(compute_qparams_args, zero_point);
  EXPECT_NO_TAIL(affine_qdq_descriptor, n_bins);
  EXPECT_NO_TAIL(affine_init_args, biases);
  EXPECT_NO_TAIL(affine_qdq_args, y);
  EXPECT_NO_TAIL(adam_step, step);
  EXPECT_NO_TAIL(affine_qdq_backward_args, adam);
  EXPECT_NO_TAIL(weight_view, global_scale);
  EXPECT_NO_TAIL(packed_weight, version);
  EXPECT_NO_TAIL(qgemm_descriptor, early_start);
  EXPECT_NO_TAIL(qgemm_args, y);
  EXPECT_NO_TAIL(route_descriptor, num_experts);
  EXPECT_NO_TAIL(route_args, slots);
  EXPECT_NO_TAIL(qgemm_grouped_descriptor, alignment);
  EXPECT_NO_TAIL(qgemm_grouped_args, y);
  EXPECT_NO_TAIL(quantized_weight_info, device);
  EXPECT_NO_TAIL(quantized_weight_parts, global_scale);
  EXPECT_NO_TAIL(linear_codes_parts, descriptor);
  EXPECT_NO_TAIL(progress, total_bytes);
  EXPECT_NO_TAIL(checkpoint_info, num_foreign);
  EXPECT_NO_TAIL(foreign, num_parameters);
  EXPECT_NO_TAIL(stored_tensor, num_bytes);
  EXPECT_NO_TAIL(weight, scale_rows);
  EXPECT_NO_TAIL(report_info, device_note);
  EXPECT_NO_TAIL(reader_verdict, why_not);
  EXPECT_NO_TAIL(weight_report, scale_rows);
  EXPECT_NO_TAIL(compare_options, user_data);
  EXPECT_NO_TAIL(comparison_row, snr_db);
  EXPECT_NO_TAIL(verify_options, user_data);
  EXPECT_NO_TAIL(fault, text);
  EXPECT_NO_TAIL(repair_options, user_data);
  EXPECT_NO_TAIL(repaired_weight, num_scales);
  EXPECT_NO_TAIL(system_info, num_threads);
  EXPECT_NO_TAIL(cuda_info, num_devices);
  EXPECT_NO_TAIL(cuda_device, memory_bytes);
  EXPECT_NO_TAIL(kernel, plain);
  EXPECT_NO_TAIL(kernel_key, open);
  EXPECT_NO_TAIL(kernel_pack_options, user_data);
  EXPECT_NO_TAIL(kernel_pack_info, num_bytes);
#undef EXPECT_NO_TAIL
}

TEST(CApi, TheDefaultsAreThoseOfCpp) {
  const auto spec = INITIALISED(quant_spec);
  EXPECT_EQ(capi::spec_of(&spec, "spec"), QuantSpec{});
  const auto options = INITIALISED(quantize_options);
  EXPECT_EQ(options.format, HALFBYTE_FORMAT_NF4);
  EXPECT_EQ(options.layout, HALFBYTE_UNSET);
  EXPECT_EQ(options.verify, 1);
  EXPECT_EQ(options.num_devices, 0);
  EXPECT_EQ(INITIALISED(dequantize_options).dtype, HALFBYTE_UNSET);
  EXPECT_EQ(INITIALISED(compare_options).num_threads, 0);
  EXPECT_EQ(INITIALISED(execution).stream, nullptr);
  EXPECT_EQ(INITIALISED(plan_preference).num_threads, 0);
  EXPECT_EQ(INITIALISED(quantized).codes, nullptr);
  const auto descriptor = INITIALISED(linear_descriptor);
  EXPECT_EQ(descriptor.q_min, -128);
  EXPECT_EQ(descriptor.zero_point_dtype, HALFBYTE_UNSET);
  EXPECT_EQ(descriptor.alignment, 16);
  EXPECT_EQ(INITIALISED(quantize_descriptor).spec, nullptr);
  EXPECT_EQ(INITIALISED(quantize_descriptor).dtype, HALFBYTE_DTYPE_F32);
  EXPECT_EQ(INITIALISED(quantize_descriptor).alignment, 16);
  EXPECT_EQ(INITIALISED(qparams_config).q_max, QParamsConfig{}.q_max);
  EXPECT_EQ(INITIALISED(observer_config).momentum, ObserverConfig{}.momentum);
  EXPECT_EQ(INITIALISED(observer_config).percentile, ObserverConfig{}.percentile);
  EXPECT_EQ(INITIALISED(observer_state).num_groups, 0);
  EXPECT_EQ(INITIALISED(observe_descriptor).axis, -1);
  EXPECT_EQ(INITIALISED(observe_descriptor).alignment, 16);
  EXPECT_EQ(INITIALISED(qparams_descriptor).zero_point_dtype, HALFBYTE_UNSET);
  const auto affine = INITIALISED(affine_qdq_descriptor);
  EXPECT_EQ(affine.bits, 4);
  EXPECT_EQ(affine.packed, 1);
  EXPECT_EQ(affine.group_size, 64);
  EXPECT_EQ(affine.scale_rule, HALFBYTE_SCALE_RULE_MINMAX);
  const auto fake = INITIALISED(fake_quantize_descriptor);
  EXPECT_EQ(fake.q_min, FakeQuantizeDescriptor{}.q_min);
  EXPECT_EQ(fake.q_max, FakeQuantizeDescriptor{}.q_max);
  EXPECT_EQ(fake.format, HALFBYTE_UNSET);
  EXPECT_EQ(fake.zero_point_dtype, HALFBYTE_UNSET);
  EXPECT_EQ(fake.gradient_scale, 1);
  EXPECT_EQ(fake.alignment, 16);
  EXPECT_EQ(INITIALISED(adam_step).beta2, 0.999);
  EXPECT_EQ(INITIALISED(adam_step).step, 1);
  EXPECT_EQ(INITIALISED(weight_view).layout, HALFBYTE_LAYOUT_HALFBYTE);
  EXPECT_EQ(INITIALISED(packed_weight).version, kPackedWeightVersion);
  const auto qgemm = INITIALISED(qgemm_descriptor);
  EXPECT_EQ(qgemm.dtype, HALFBYTE_DTYPE_BF16);
  EXPECT_EQ(qgemm.packed, 1);
  EXPECT_EQ(qgemm.alignment, 16);
  EXPECT_EQ(qgemm.variant, nullptr);
  EXPECT_EQ(INITIALISED(qgemm_args).weight, nullptr);
  EXPECT_EQ(INITIALISED(route_descriptor).dtype, HALFBYTE_DTYPE_I32);
  EXPECT_EQ(INITIALISED(route_descriptor).top_k, 1);
  EXPECT_EQ(INITIALISED(route_args).slots, nullptr);
  const auto grouped = INITIALISED(qgemm_grouped_descriptor);
  EXPECT_EQ(grouped.dtype, HALFBYTE_DTYPE_BF16);
  EXPECT_EQ(grouped.rows, HALFBYTE_EXPERT_ROWS_OFFSETS);
  EXPECT_EQ(grouped.top_k, 1);
  EXPECT_EQ(grouped.swiglu, 0);
  EXPECT_EQ(grouped.alignment, 16);
  EXPECT_EQ(grouped.variant, nullptr);
  EXPECT_EQ(INITIALISED(qgemm_grouped_args).weight, nullptr);
}

// As a later version of the library would see this one's callers, and the other way round.
TEST(CApi, StructuresOfOtherVersions) {
  struct Newer {
    halfbyte_quant_spec spec;
    int64_t added;
  } newer{};
  EXPECT_OK(halfbyte_quant_spec_init(&newer.spec, sizeof newer));
  EXPECT_EQ(newer.spec.struct_size, sizeof newer);
  EXPECT_OK(halfbyte_quant_spec_check(&newer.spec));
  newer.added = 1;
  EXPECT_FAILS(HALFBYTE_USAGE,
               fmt::format("spec: this version knows {} bytes of the structure, but byte {} of {} is set",
                           sizeof newer.spec, sizeof newer.spec, sizeof newer)
                   .c_str(),
               halfbyte_quant_spec_check(&newer.spec));

  auto older = INITIALISED(quant_spec);
  older.group_size = -1;  // not of the older structure
  older.struct_size = offsetof(halfbyte_quant_spec, group_size);
  EXPECT_OK(halfbyte_quant_spec_check(&older));
  older.struct_size = sizeof older;
  EXPECT_FAILS(HALFBYTE_USAGE, "spec: group_size must be positive, got -1",
               halfbyte_quant_spec_check(&older));

  const auto spec = INITIALISED(quant_spec);
  auto shape = output<halfbyte_quant_shape>();
  shape.struct_size = offsetof(halfbyte_quant_shape, code_bytes);
  EXPECT_OK(halfbyte_quant_shape_of(&spec, 2, 100, &shape));
  EXPECT_EQ(shape.num_groups, 4);
  EXPECT_EQ(shape.code_bytes, static_cast<int64_t>(0xA5A5A5A5A5A5A5A5)) << "written behind the end";
  EXPECT_EQ(shape.struct_size, offsetof(halfbyte_quant_shape, code_bytes));

  for (const size_t size : {size_t{0}, size_t{7}, SIZE_MAX}) {
    shape.struct_size = size;
    EXPECT_FAILS(
        HALFBYTE_USAGE,
        fmt::format("shape: struct_size must be the sizeof of its structure, {} in this version, got {}",
                    sizeof shape, size)
            .c_str(),
        halfbyte_quant_shape_of(&spec, 2, 100, &shape));
  }
  EXPECT_FAILS(HALFBYTE_USAGE, "spec must not be NULL", halfbyte_quant_spec_init(nullptr, sizeof shape));
}

// A size that ends within a field is of no version.
TEST(CApi, StructuresThatEndWithinAField) {
  auto spec = INITIALISED(quant_spec);
  for (size_t size = sizeof(size_t); size <= sizeof spec; ++size) {
    spec.struct_size = size;
    const bool cuts_flag = size < offsetof(halfbyte_quant_spec, table) && size % 4 != 0;
    const size_t end_of_table = offsetof(halfbyte_quant_spec, table) + sizeof spec.table;
    const bool cuts_table = size > offsetof(halfbyte_quant_spec, table) && size < end_of_table;
    const bool cuts_last = size > offsetof(halfbyte_quant_spec, group_size) && size < sizeof spec;
    if (!cuts_flag && !cuts_table && !cuts_last) {
      EXPECT_OK(halfbyte_quant_spec_check(&spec));
      continue;
    }
    EXPECT_FAILS(
        HALFBYTE_USAGE,
        fmt::format("spec: struct_size must be the sizeof of its structure, {} in this version, got {}",
                    sizeof spec, size)
            .c_str(),
        halfbyte_quant_spec_check(&spec));
  }
  // What is written, too.
  const auto good = INITIALISED(quant_spec);
  auto shape = output<halfbyte_quant_shape>();
  shape.struct_size = offsetof(halfbyte_quant_shape, code_bytes) + 3;
  EXPECT_EQ(halfbyte_quant_shape_of(&good, 2, 100, &shape), HALFBYTE_USAGE);
  shape.struct_size = sizeof shape;
  EXPECT_EQ(halfbyte_quant_spec_init(&spec, sizeof spec - 1), HALFBYTE_USAGE);
}

TEST(CApi, MisalignedPointersAreRefused) {
  alignas(16) std::array<char, sizeof(halfbyte_quant_spec) + 8> memory{};
  auto* const spec = reinterpret_cast<halfbyte_quant_spec*>(memory.data() + 4);
  EXPECT_EQ(halfbyte_quant_spec_init(spec, sizeof *spec), HALFBYTE_USAGE);
  EXPECT_EQ(std::string(halfbyte_last_error()).find("spec must be aligned to 8 bytes, got 0x"), 0U)
      << halfbyte_last_error();
  EXPECT_EQ(halfbyte_quant_spec_check(spec), HALFBYTE_USAGE);
  std::vector<float> values(9);
  int64_t shape[] = {8};
  DLTensor x{values.data(), {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, shape, nullptr, 2};
  auto range = output<halfbyte_value_range>();
  EXPECT_EQ(halfbyte_value_range_of(&x, nullptr, &range), HALFBYTE_USAGE);
  EXPECT_EQ(
      std::string(halfbyte_last_error()).find("dlpack: x: data with byte_offset must be aligned to 4 bytes"),
      0U)
      << halfbyte_last_error();
}

TEST(CApi, DescriptorsOfAbsurdRank) {
  auto descriptor = INITIALISED(linear_descriptor);
  int64_t shape[] = {2, 2};
  descriptor.shape = shape;
  halfbyte_plan* plan = nullptr;
  for (const int32_t ndim : {33, INT32_MAX}) {
    descriptor.ndim = ndim;
    EXPECT_FAILS(HALFBYTE_USAGE, fmt::format("descriptor.ndim must be 0 to 32, got {}", ndim).c_str(),
                 halfbyte_quantize_linear_select({kDLCPU, 0}, &descriptor, nullptr, &plan));
  }
}

// ---- Errors

TEST(CApi, VersionAndStatusNames) {
  EXPECT_EQ(halfbyte_version(), HALFBYTE_VERSION);
  EXPECT_STREQ(halfbyte_version_string(), kVersion);
  EXPECT_STREQ(halfbyte_status_name(HALFBYTE_OK), "OK");
  EXPECT_STREQ(halfbyte_status_name(HALFBYTE_CANCELLED), "CANCELLED");
  EXPECT_STREQ(halfbyte_status_name(4711), "BUG");
}

TEST(CApi, EachThreadHasItsOwnLastError) {
  halfbyte_format format = 0;
  EXPECT_EQ(halfbyte_format_find("nf5", &format), HALFBYTE_USAGE);
  const std::string mine = halfbyte_last_error();
  EXPECT_EQ(mine.find("unknown format 'nf5'"), 0u) << mine;
  std::thread([] {
    EXPECT_STREQ(halfbyte_last_error(), "");
    halfbyte_dtype dtype = 0;
    EXPECT_EQ(halfbyte_dtype_find("f33", &dtype), HALFBYTE_USAGE);
    EXPECT_EQ(std::string(halfbyte_last_error()).find("unknown dtype 'f33'"), 0u);
  }).join();
  EXPECT_EQ(halfbyte_last_error(), mine);
  EXPECT_OK(halfbyte_format_find("int4", &format));
  EXPECT_EQ(halfbyte_last_error(), mine) << "what succeeds leaves it";
}

TEST(CApi, EveryKindOfExceptionBecomesAStatus) {
  EXPECT_EQ(capi::guard([] {}), HALFBYTE_OK);
  EXPECT_FAILS(HALFBYTE_CORRUPT, "why", capi::guard([] { throw Error(ErrorCode::corrupt, "why"); }));
  EXPECT_FAILS(HALFBYTE_NO_MEMORY, "out of memory", capi::guard([] { throw std::bad_alloc(); }));
  EXPECT_FAILS(HALFBYTE_BUG, "text", capi::guard([] { throw std::runtime_error("text"); }));
  EXPECT_FAILS(HALFBYTE_BUG, "an exception of an unknown type", capi::guard([] { throw 1; }));
}

int32_t num_layouts() {
  int32_t count = 0;
  while (halfbyte_layout_name(count) != nullptr) ++count;
  return count;
}

TEST(CApi, WordsOfEveryEnumerator) {
  for (const FormatInfo& format : all_formats()) {
    halfbyte_format found = -1;
    EXPECT_OK(halfbyte_format_find(format.name, &found));
    EXPECT_EQ(found, static_cast<int32_t>(format.format));
    EXPECT_STREQ(halfbyte_format_name(found), format.name);
  }
  for (int32_t i = 0; i <= HALFBYTE_DTYPE_F8_E8M0; ++i) {
    halfbyte_dtype found = -1;
    EXPECT_OK(halfbyte_dtype_find(halfbyte_dtype_name(i), &found));
    EXPECT_EQ(found, i);
  }
  for (int32_t i = 0; i <= HALFBYTE_SCALE_RULE_MLX_EDGE; ++i) {
    halfbyte_scale_rule found = -1;
    EXPECT_OK(halfbyte_scale_rule_find(halfbyte_scale_rule_name(i), &found));
    EXPECT_EQ(found, i);
  }
  for (int32_t i = 0; i < num_layouts(); ++i) {
    halfbyte_layout found = -1;
    EXPECT_OK(halfbyte_layout_find(halfbyte_layout_name(i), &found));
    EXPECT_EQ(found, i);
  }
  for (int32_t i = 0; i <= HALFBYTE_READER_NONE; ++i) {
    halfbyte_reader found = -1;
    EXPECT_OK(halfbyte_reader_find(halfbyte_reader_name(i), &found));
    EXPECT_EQ(found, i);
  }
  for (int32_t i = 0; i <= HALFBYTE_QGEMM_MATH_INT8; ++i) {
    halfbyte_qgemm_math found = -1;
    EXPECT_OK(halfbyte_qgemm_math_find(halfbyte_qgemm_math_name(i), &found));
    EXPECT_EQ(found, i);
  }
  for (int32_t i = 0; i <= HALFBYTE_EXPERT_ROWS_MASKED; ++i) {
    halfbyte_expert_rows found = -1;
    EXPECT_OK(halfbyte_expert_rows_find(halfbyte_expert_rows_name(i), &found));
    EXPECT_EQ(found, i);
  }
  EXPECT_STREQ(halfbyte_expert_rows_name(HALFBYTE_EXPERT_ROWS_INDICES), "indices");
  EXPECT_STREQ(halfbyte_weight_rounding_name(HALFBYTE_WEIGHT_ROUNDING_CODE_ROUNDED), "code-rounded");
  EXPECT_STREQ(halfbyte_error_kind_name(HALFBYTE_ERROR_KIND_MISALIGNED), "misaligned");
  EXPECT_STREQ(halfbyte_op_kind_name(HALFBYTE_OP_QGEMM), "qgemm");
  EXPECT_STREQ(halfbyte_op_kind_name(HALFBYTE_OP_ROUTE), "route");
  EXPECT_STREQ(halfbyte_op_kind_name(HALFBYTE_OP_QGEMM_GROUPED), "qgemm_grouped");
  EXPECT_STREQ(halfbyte_arch_name(HALFBYTE_ARCH_SM_90A), "sm_90a");
  EXPECT_STREQ(halfbyte_weight_rounding_name(HALFBYTE_WEIGHT_ROUNDING_WEIGHT_ROUNDED), "weight-rounded");
  for (const int32_t none : {-1, 99}) {
    EXPECT_EQ(halfbyte_qgemm_math_name(none), nullptr);
    EXPECT_EQ(halfbyte_expert_rows_name(none), nullptr);
    EXPECT_EQ(halfbyte_weight_rounding_name(none), nullptr);
    EXPECT_EQ(halfbyte_error_kind_name(none), nullptr);
    EXPECT_EQ(halfbyte_op_kind_name(none), nullptr);
    EXPECT_EQ(halfbyte_arch_name(none), nullptr);
    EXPECT_EQ(halfbyte_format_name(none), nullptr);
    EXPECT_EQ(halfbyte_dtype_name(none), nullptr);
    EXPECT_EQ(halfbyte_scale_rule_name(none), nullptr);
    EXPECT_EQ(halfbyte_layout_name(none), nullptr);
    EXPECT_EQ(halfbyte_reader_name(none), nullptr);
  }
  EXPECT_STREQ(halfbyte_format_name(HALFBYTE_FORMAT_FP4_E2M1), "fp4_e2m1");
  EXPECT_STREQ(halfbyte_layout_name(HALFBYTE_LAYOUT_COMPRESSED_TENSORS), "compressed-tensors");
  EXPECT_STREQ(halfbyte_layout_name(HALFBYTE_LAYOUT_GPTQ), "gptq");
  EXPECT_STREQ(halfbyte_layout_name(HALFBYTE_LAYOUT_AWQ), "awq");
  EXPECT_STREQ(halfbyte_reader_name(HALFBYTE_READER_TRANSFORMERS_4), "transformers-4");
  DLDevice device{};
  EXPECT_OK(halfbyte_device_find("cuda:3", &device));
  EXPECT_EQ(device.device_type, kDLCUDA);
  EXPECT_EQ(device.device_id, 3);
  EXPECT_EQ(halfbyte_device_find("gpu", &device), HALFBYTE_USAGE);
  EXPECT_FAILS(HALFBYTE_USAGE, "word must not be NULL", halfbyte_device_find(nullptr, &device));
  EXPECT_FAILS(HALFBYTE_USAGE, "format must not be NULL", halfbyte_format_find("nf4", nullptr));
}

// ---- Operations

TEST(CApi, QuantizeGivesTheBytesOfCppAndComesBack) {
  Array<float> x({3, 100}, some_values(300)), y({3, 100});
  std::vector<float> expected(300);
  for (const char* word : {"nf4", "int4", "affine4", "int8"}) {
    auto spec = INITIALISED(quant_spec);
    EXPECT_OK(halfbyte_format_find(word, &spec.format));
    spec.asymmetric = spec.format == HALFBYTE_FORMAT_INT8;
    EXPECT_OK(halfbyte_quant_spec_check(&spec));
    auto shape = output<halfbyte_quant_shape>();
    EXPECT_OK(halfbyte_quant_shape_of(&spec, 3, 100, &shape));
    EXPECT_EQ(shape.has_zeros, spec.asymmetric);
    Array<uint8_t> codes({shape.code_bytes}), zeros({shape.num_groups});
    Array<float> scales({shape.num_groups}), biases({shape.num_groups});
    auto parts = INITIALISED(quantized);
    parts.codes = codes;
    parts.scales = scales;
    if (shape.has_zeros) parts.zeros = zeros;
    if (shape.has_biases) parts.biases = biases;
    auto status = output<halfbyte_quantize_status>();
    auto execution = INITIALISED(execution);
    execution.num_threads = 1;
    EXPECT_OK(halfbyte_quantize(x, &spec, nullptr, &parts, &execution, nullptr, &status));
    EXPECT_EQ(status.num_nonfinite, 0);
    EXPECT_EQ(status.first_nonfinite, -1);
    EXPECT_OK(halfbyte_dequantize(&parts, &spec, y, nullptr));

    const QuantizedTensor q =
        quantize({x.values.data(), DType::f32, {3, 100}, {}, {}}, capi::spec_of(&spec, "spec"));
    EXPECT_EQ(0, std::memcmp(codes.values.data(), q.codes.data(), codes.values.size())) << word;
    EXPECT_EQ(0, std::memcmp(scales.values.data(), q.scales.data(), 4 * scales.values.size()));
    dequantize(q, {expected.data(), DType::f32, {3, 100}, {}, {}});
    EXPECT_EQ(y.values, expected);
  }
}

TEST(CApi, BlockFloatsHaveScalesOfEightBitsAndAGlobalScale) {
  Array<float> x({3, 96}, some_values(288)), y({3, 96}), global_scale({1});
  auto spec = INITIALISED(quant_spec);
  spec.format = HALFBYTE_FORMAT_NVFP4;
  EXPECT_FAILS(HALFBYTE_USAGE, "spec: scale dtype of nvfp4 must be f8_e4m3, got f32",
               halfbyte_quant_spec_check(&spec));
  spec.scale_dtype = HALFBYTE_DTYPE_F8_E4M3;
  spec.group_size = 16;
  auto shape = output<halfbyte_quant_shape>();
  EXPECT_OK(halfbyte_quant_shape_of(&spec, 3, 96, &shape));
  EXPECT_EQ(shape.has_global_scale, 1);
  Array<uint8_t> codes({shape.code_bytes}), scales({shape.num_groups});
  scales->dtype = {kDLFloat8_e4m3fn, 8, 1};
  auto parts = INITIALISED(quantized);
  parts.codes = codes;
  parts.scales = scales;
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize: out.global_scale must be given exactly for nvfp4",
               halfbyte_quantize(x, &spec, nullptr, &parts, nullptr, nullptr, nullptr));
  parts.global_scale = global_scale;
  EXPECT_OK(halfbyte_quantize(x, &spec, nullptr, &parts, nullptr, nullptr, nullptr));
  EXPECT_OK(halfbyte_dequantize(&parts, &spec, y, nullptr));
  const QuantizedTensor q =
      quantize({x.values.data(), DType::f32, {3, 96}, {}, {}}, capi::spec_of(&spec, "spec"));
  EXPECT_EQ(0, std::memcmp(codes.values.data(), q.codes.data(), codes.values.size()));
  EXPECT_EQ(0, std::memcmp(scales.values.data(), q.scales.data(), scales.values.size()));
  EXPECT_EQ(0, std::memcmp(global_scale.values.data(), q.global_scale.data(), sizeof(float)));
  std::vector<float> expected(288);
  dequantize(q, {expected.data(), DType::f32, {3, 96}, {}, {}});
  EXPECT_EQ(y.values, expected);
}

TEST(CApi, AnEncodingSearchesScalesByImportance) {
  Array<float> x({2, 4}, {1, -7.5, 2, 0.3f, 3, 4, 5, 0.7f}), scales({2}), importance({4}, {0, 0, 0, 1});
  Array<uint8_t> codes({4});
  auto spec = INITIALISED(quant_spec);
  spec.format = HALFBYTE_FORMAT_INT4;
  spec.group_size = 4;
  auto out = INITIALISED(quantized);
  out.codes = codes;
  out.scales = scales;
  auto encoding = INITIALISED(encoding);
  EXPECT_EQ(encoding.search, 0);
  encoding.search = 1;
  EXPECT_OK(halfbyte_quantize(x, &spec, &encoding, &out, nullptr, nullptr, nullptr));
  const float alike = scales.values[0];
  encoding.importance = importance;
  EXPECT_OK(halfbyte_quantize(x, &spec, &encoding, &out, nullptr, nullptr, nullptr));
  EXPECT_NE(scales.values[0], alike);
  Array<float> longer({5});
  encoding.importance = longer;
  EXPECT_FAILS(HALFBYTE_USAGE, "encoding->importance must have 4 elements, got 5",
               halfbyte_quantize(x, &spec, &encoding, &out, nullptr, nullptr, nullptr));
  importance.values[2] = -1;
  encoding.importance = importance;
  EXPECT_FAILS(HALFBYTE_BAD_INPUT, "quantize: importance must be finite and not negative, got -1 at index 2",
               halfbyte_quantize(x, &spec, &encoding, &out, nullptr, nullptr, nullptr));
  auto descriptor = INITIALISED(quantize_descriptor);
  descriptor.spec = &spec;
  descriptor.encoding = &encoding;
  descriptor.rows = 2;
  descriptor.cols = 4;
  halfbyte_plan* plan = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.encoding->importance must be NULL: plans search without it",
               halfbyte_quantize_select(kCpu, &descriptor, nullptr, &plan));
  encoding.search = 2;
  EXPECT_FAILS(HALFBYTE_USAGE, "encoding.search must be 0 or 1, got 2",
               halfbyte_quantize(x, &spec, &encoding, &out, nullptr, nullptr, nullptr));
}

TEST(CApi, AnEncodingSaysHowCodesAreChosen) {
  Array<float> x({8}, {1, -7.5, 2, 0, 3, 4, 5, 7}), scales({1});
  Array<uint8_t> codes({4});
  auto spec = INITIALISED(quant_spec);
  spec.format = HALFBYTE_FORMAT_INT4;
  auto out = INITIALISED(quantized);
  out.codes = codes;
  out.scales = scales;
  auto encoding = INITIALISED(encoding);
  EXPECT_EQ(encoding.scale_rule, HALFBYTE_UNSET);
  EXPECT_OK(halfbyte_quantize(x, &spec, &encoding, &out, nullptr, nullptr, nullptr));
  EXPECT_FLOAT_EQ(scales.values[0], 7.5f / 7);
  encoding.scale_rule = HALFBYTE_SCALE_RULE_HALF_RANGE;
  EXPECT_OK(halfbyte_quantize(x, &spec, &encoding, &out, nullptr, nullptr, nullptr));
  EXPECT_FLOAT_EQ(scales.values[0], 1);
  encoding.scale_rule = HALFBYTE_SCALE_RULE_MLX_EDGE;
  EXPECT_FAILS(HALFBYTE_USAGE, "encoding: scale rule mlx-edge does not fit format int4",
               halfbyte_quantize(x, &spec, &encoding, &out, nullptr, nullptr, nullptr));
  encoding.code_scale = 7;
  EXPECT_FAILS(HALFBYTE_USAGE, "encoding.code_scale must be 0 to 1, got 7",
               halfbyte_quantize(x, &spec, &encoding, &out, nullptr, nullptr, nullptr));
}

TEST(CApi, RangeOfTheWholeTensor) {
  Array<float> x({4}, {1, -3, 2, 0});
  auto range = output<halfbyte_value_range>();
  EXPECT_OK(halfbyte_value_range_of(x, nullptr, &range));
  EXPECT_EQ(range.min, -3);
  EXPECT_EQ(range.max, 2);
  EXPECT_EQ(range.first_nonfinite, -1);
  auto spec = INITIALISED(quant_spec);
  spec.format = HALFBYTE_FORMAT_INT8;
  spec.granularity = HALFBYTE_GRANULARITY_TENSOR;
  range.min = -12.7;
  Array<uint8_t> codes({4});
  Array<float> scales({1});
  auto out = INITIALISED(quantized);
  out.codes = codes;
  out.scales = scales;
  EXPECT_OK(halfbyte_quantize(x, &spec, nullptr, &out, nullptr, &range, nullptr));
  EXPECT_FLOAT_EQ(scales.values[0], 0.1f);
}

TEST(CApi, QuantizeRefusesWithTheArgumentTheRuleAndTheValues) {
  Array<float> x({2, 64}, some_values(128)), scales({2}), wrong_scales({3});
  Array<double> scales64({2});
  Array<uint8_t> codes({64}), wrong_codes({63});
  const auto spec = INITIALISED(quant_spec);
  auto out = INITIALISED(quantized);
  out.codes = codes;
  out.scales = scales;
  const auto run = [&] { return halfbyte_quantize(x, &spec, nullptr, &out, nullptr, nullptr, nullptr); };
  EXPECT_OK(run());
  EXPECT_FAILS(HALFBYTE_USAGE, "x must not be NULL",
               halfbyte_quantize(nullptr, &spec, nullptr, &out, nullptr, nullptr, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "spec must not be NULL",
               halfbyte_quantize(x, nullptr, nullptr, &out, nullptr, nullptr, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "out must not be NULL",
               halfbyte_quantize(x, &spec, nullptr, nullptr, nullptr, nullptr, nullptr));
  out.codes = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize: out.codes is null", run());
  out.codes = wrong_codes;
  EXPECT_FAILS(HALFBYTE_USAGE, "out->codes must have 64 elements, got 63", run());
  out.codes = x;
  EXPECT_FAILS(HALFBYTE_USAGE, "out->codes must be u8, got f32", run());
  out.codes = codes;
  out.scales = wrong_scales;
  EXPECT_FAILS(HALFBYTE_USAGE, "out->scales must have 2 elements, got 3", run());
  out.scales = scales64;
  EXPECT_FAILS(HALFBYTE_USAGE, "out->scales must be f32, got f64", run());
  out.scales = scales;
  out.zeros = codes;
  EXPECT_FAILS(HALFBYTE_USAGE, "out->zeros must have 2 elements, got 64", run());
  out.zeros = nullptr;
  int64_t strides[] = {1, 2};
  x->strides = strides;
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize: x must be contiguous", run());
  x->strides = nullptr;
  x->dtype = {kDLBool, 8, 1};
  EXPECT_EQ(run(), HALFBYTE_USAGE);
  x->dtype = {kDLInt, 32, 1};
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize: x must be f32, f16, bf16 or f64, got i32", run());
  x->dtype = {kDLFloat, 32, 1};
  x->device = {kDLMetal, 0};
  EXPECT_FAILS(
      HALFBYTE_USAGE,
      "dlpack: x: device type must be kDLCPU (1), kDLCUDA (2), kDLCUDAHost (3) or kDLCUDAManaged (13), "
      "got 8",
      run());
  x->device = kCpu;
  codes->device = kNoDevice;
  EXPECT_FAILS(HALFBYTE_USAGE, "out->codes must be on cpu, got cuda:4711", run());
  codes->device = kCpu;

  auto bad = spec;
  bad.format = 99;
  EXPECT_FAILS(HALFBYTE_USAGE,
               fmt::format("spec.format must be 0 to {}, got 99", all_formats().size() - 1).c_str(),
               halfbyte_quant_spec_check(&bad));
  bad = spec;
  bad.asymmetric = 2;
  EXPECT_FAILS(HALFBYTE_USAGE, "spec.asymmetric must be 0 or 1, got 2", halfbyte_quant_spec_check(&bad));
  bad = spec;
  bad.group_size = 0;
  EXPECT_FAILS(HALFBYTE_USAGE, "spec: group_size must be positive, got 0",
               halfbyte_quantize(x, &bad, nullptr, &out, nullptr, nullptr, nullptr));
  auto execution = INITIALISED(execution);
  execution.num_threads = -1;
  EXPECT_FAILS(HALFBYTE_USAGE, "execution.num_threads must be 0 to 2147483647, got -1",
               halfbyte_quantize(x, &spec, nullptr, &out, &execution, nullptr, nullptr));
  EXPECT_OK(run());
}

TEST(CApi, NonFiniteDataIsAnErrorUnlessAskedFor) {
  Array<float> x({4}, {1, 2, NAN, INFINITY}), scales({1});
  Array<uint8_t> codes({2});
  const auto spec = INITIALISED(quant_spec);
  auto out = INITIALISED(quantized);
  out.codes = codes;
  out.scales = scales;
  EXPECT_FAILS(HALFBYTE_BAD_INPUT, "quantize: x has 2 elements that are not finite, the first at index 2",
               halfbyte_quantize(x, &spec, nullptr, &out, nullptr, nullptr, nullptr));
  auto status = output<halfbyte_quantize_status>();
  EXPECT_OK(halfbyte_quantize(x, &spec, nullptr, &out, nullptr, nullptr, &status));
  EXPECT_EQ(status.num_nonfinite, 2);
  EXPECT_EQ(status.first_nonfinite, 2);
}

TEST(CApi, DoubleQuantization) {
  Array<float> scales({300}, some_values(300)), back({300}), absmax({2});
  Array<uint8_t> codes({300});
  float offset = 0;
  EXPECT_OK(halfbyte_double_quantize(scales, codes, absmax, &offset));
  EXPECT_OK(halfbyte_double_dequantize(codes, absmax, offset, back));
  for (size_t i = 0; i < 300; ++i) EXPECT_NEAR(back.values[i], scales.values[i], 0.05);
  EXPECT_FAILS(HALFBYTE_USAGE, "absmax must have 2 elements, got 300",
               halfbyte_double_quantize(scales, codes, back, &offset));
  EXPECT_FAILS(HALFBYTE_USAGE, "codes must be u8, got f32",
               halfbyte_double_dequantize(back, absmax, offset, scales));
  EXPECT_FAILS(HALFBYTE_USAGE, "offset must not be NULL",
               halfbyte_double_quantize(scales, codes, absmax, nullptr));
}

TEST(CApi, FlatBuffers) {
  int64_t count = 0;
  EXPECT_OK(halfbyte_int4_num_groups(129, 32, &count));
  EXPECT_EQ(count, 5);
  EXPECT_OK(halfbyte_int4_packed_bytes(129, &count));
  EXPECT_EQ(count, 65);
  EXPECT_FAILS(HALFBYTE_USAGE, "num_groups: group_size must be positive, got 0 elements",
               halfbyte_int4_num_groups(129, 0, &count));

  Array<float> x({8}, {-1, -0.5f, 0, 0.25f, 0.5f, 1, 1.5f, 2}), y({8}), scales({1});
  Array<uint8_t> codes({4}), zeros({1});
  EXPECT_OK(halfbyte_quantize_int4(x, codes, scales, zeros, 8, 8, 0, nullptr));
  EXPECT_EQ(codes.values, (std::vector<uint8_t>{0x30, 0x65, 0xA7, 0xFD}));
  EXPECT_EQ(zeros.values[0], 5);
  EXPECT_OK(halfbyte_dequantize_int4(codes, scales, zeros, y, 8, 8, 0, nullptr));
  EXPECT_FLOAT_EQ(y.values[6], 1.6f);
  EXPECT_OK(halfbyte_quantize_int4(x, codes, scales, nullptr, 8, 8, 1, nullptr));
  EXPECT_OK(halfbyte_dequantize_int4(codes, scales, nullptr, y, 8, 8, 1, nullptr));
  EXPECT_EQ(y.values[7], 2);
  EXPECT_OK(halfbyte_quantize_nf4(x, codes, scales, 8, 8, nullptr));
  EXPECT_EQ(codes.values[0], 0x42);
  EXPECT_OK(halfbyte_dequantize_nf4(codes, scales, y, 8, 8, nullptr));
  EXPECT_EQ(y.values[7], 2);

  EXPECT_FAILS(HALFBYTE_USAGE, "zeros must not be NULL",
               halfbyte_quantize_int4(x, codes, scales, nullptr, 8, 8, 0, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "symmetric must be 0 or 1, got 7",
               halfbyte_dequantize_int4(codes, scales, nullptr, y, 8, 8, 7, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize_nf4: x must have at least 9 elements, got 8",
               halfbyte_quantize_nf4(x, codes, scales, 9, 16, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "dequantize_nf4: codes must be u8, got f32",
               halfbyte_dequantize_nf4(x, scales, y, 8, 8, nullptr));
  x.values[3] = NAN;
  EXPECT_FAILS(HALFBYTE_BAD_INPUT, "quantize_nf4: x has 1 elements that are not finite, the first at index 3",
               halfbyte_quantize_nf4(x, codes, scales, 8, 8, nullptr));
}

// ---- Plans

struct PlanDeleter {
  void operator()(halfbyte_plan* plan) const { halfbyte_plan_destroy(plan); }
};
using UniquePlan = std::unique_ptr<halfbyte_plan, PlanDeleter>;

halfbyte_linear_descriptor rows_of(const int64_t (&shape)[2]) {
  auto descriptor = INITIALISED(linear_descriptor);
  descriptor.ndim = 2;
  descriptor.shape = shape;
  descriptor.granularity = HALFBYTE_GRANULARITY_CHANNEL;
  descriptor.axis = 0;
  descriptor.alignment = 4;
  return descriptor;
}

TEST(CApi, PlansOfAffineQuantizationThatIsTrained) {
  auto descriptor = INITIALISED(affine_qdq_descriptor);
  descriptor.rows = 1;
  descriptor.cols = descriptor.group_size = 8;
  descriptor.alignment = 4;
  int64_t code_shape[2] = {}, scale_shape[2] = {};
  EXPECT_OK(halfbyte_affine_qdq_descriptor_shapes(&descriptor, code_shape, scale_shape));
  EXPECT_EQ(code_shape[1], 4);
  EXPECT_EQ(scale_shape[1], 1);
  EXPECT_FAILS(HALFBYTE_USAGE, "code_shape must not be NULL",
               halfbyte_affine_qdq_descriptor_shapes(&descriptor, nullptr, scale_shape));
  descriptor.bits = 7;
  EXPECT_FAILS(HALFBYTE_USAGE, "affine descriptor: bits must be 2, 3, 4, 5, 6 or 8, got 7",
               halfbyte_affine_qdq_descriptor_shapes(&descriptor, code_shape, scale_shape));
  descriptor.bits = 4;
  descriptor.n_bins = int64_t{1} << 33;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.n_bins must be in [0, 256], got 8589934592",
               halfbyte_affine_qdq_descriptor_shapes(&descriptor, code_shape, scale_shape));
  descriptor.n_bins = 17;
  EXPECT_FAILS(HALFBYTE_USAGE,
               "affine descriptor: n_bins must be 0 (all codes), or 2 to the 16 codes of 4 bits, got 17",
               halfbyte_affine_qdq_descriptor_shapes(&descriptor, code_shape, scale_shape));
  descriptor.n_bins = 16;
  descriptor.packed = 2;
  halfbyte_plan* raw = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.packed must be 0 or 1, got 2",
               halfbyte_affine_init_select(kCpu, &descriptor, nullptr, &raw));
  descriptor.packed = 0;

  descriptor.half_away = 1;
  EXPECT_OK(halfbyte_affine_init_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan init(raw);
  EXPECT_OK(halfbyte_affine_qdq_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan forward(raw);
  EXPECT_OK(halfbyte_affine_qdq_backward_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan backward(raw);
  descriptor.adam = 1;
  EXPECT_OK(halfbyte_affine_qdq_backward_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan training(raw);

  alignas(16) std::array<uint8_t, 128> workspace;
  Array<float> w({1, 8}, {0, .5f, 1.5f, 2.5f, 3.5f, 7.5f, 14.5f, 15}), y({1, 8}), scales({1, 1}),
      biases({1, 1});
  Array<uint8_t> codes({1, 8});
  auto args = INITIALISED(affine_init_args);
  args.w = w;
  args.codes = codes;
  args.scales = scales;
  args.biases = biases;
  EXPECT_OK(halfbyte_affine_init_can_implement(init.get(), &args));
  EXPECT_OK(halfbyte_affine_init_run(init.get(), nullptr, workspace.data(), sizeof workspace, &args));
  EXPECT_EQ(codes.values, (std::vector<uint8_t>{0, 1, 2, 3, 4, 8, 15, 15}));
  EXPECT_EQ(scales.values[0], 1);
  auto status = output<halfbyte_quantize_status>();
  EXPECT_OK(halfbyte_plan_status(init.get(), nullptr, workspace.data(), sizeof workspace, &status));
  EXPECT_EQ(status.num_nonfinite, 0);
  args.w = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "w must not be NULL", halfbyte_affine_init_can_implement(init.get(), &args));

  auto decode = INITIALISED(affine_qdq_args);
  decode.codes = codes;
  decode.scales = scales;
  decode.biases = biases;
  decode.y = y;
  EXPECT_OK(halfbyte_affine_qdq_can_implement(forward.get(), &decode));
  EXPECT_OK(halfbyte_affine_qdq_run(forward.get(), nullptr, workspace.data(), sizeof workspace, &decode));
  EXPECT_EQ(y.values, (std::vector<float>{0, 1, 2, 3, 4, 8, 15, 15}));
  decode.y = codes;
  EXPECT_FAILS(HALFBYTE_USAGE, "affine_qdq: y must be f32, got u8",
               halfbyte_affine_qdq_can_implement(forward.get(), &decode));

  codes.values = {0, 1, 2, 3, 15, 14, 13, 12};
  Array<float> dy({1, 8}, {1, -1, 2, .5f, -.25f, 1, 0, 4}), dscales({1, 1}), dbiases({1, 1});
  auto gradient = INITIALISED(affine_qdq_backward_args);
  gradient.codes = codes;
  gradient.dy = dy;
  gradient.dscales = dscales;
  gradient.dbiases = dbiases;
  EXPECT_OK(halfbyte_affine_qdq_backward_can_implement(backward.get(), &gradient));
  EXPECT_OK(halfbyte_affine_qdq_backward_run(backward.get(), nullptr, workspace.data(), sizeof workspace,
                                             &gradient));
  EXPECT_EQ(dscales.values[0], 62.75f);
  EXPECT_EQ(dbiases.values[0], 7.25f);
  // Either gradient alone; tensors without an axis of one element.
  dscales.values[0] = dbiases.values[0] = 0;
  Array<float> flat_dbiases({1});
  gradient.dscales = nullptr;
  gradient.dbiases = flat_dbiases;
  EXPECT_OK(halfbyte_affine_qdq_backward_run(backward.get(), nullptr, workspace.data(), sizeof workspace,
                                             &gradient));
  EXPECT_EQ(dscales.values[0], 0);
  EXPECT_EQ(flat_dbiases.values[0], 7.25f);
  gradient.dbiases = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "affine_qdq_backward: dscales or dbiases must have data",
               halfbyte_affine_qdq_backward_can_implement(backward.get(), &gradient));

  const auto refused = [&] { return halfbyte_affine_qdq_backward_can_implement(training.get(), &gradient); };
  EXPECT_FAILS(HALFBYTE_USAGE, "scales must not be NULL", refused());
  Array<float> moments[4] = {{{1, 1}, {0}}, {{1, 1}, {0}}, {{1, 1}, {0}}, {{1, 1}, {0}}};
  gradient.dscales = gradient.dbiases = nullptr;
  gradient.scales = scales;
  gradient.biases = biases;
  gradient.scale_m = moments[0];
  gradient.scale_v = moments[1];
  gradient.bias_m = moments[2];
  gradient.bias_v = moments[3];
  EXPECT_FAILS(HALFBYTE_USAGE, "adam must not be NULL", refused());
  auto step = INITIALISED(adam_step);
  gradient.adam = &step;
  step.beta1 = 1;
  EXPECT_FAILS(HALFBYTE_USAGE, "affine_qdq_backward: adam.beta1 must be in [0, 1), got 1", refused());
  step.beta1 = 0.9;
  EXPECT_OK(refused());
  EXPECT_OK(halfbyte_affine_qdq_backward_run(training.get(), nullptr, workspace.data(), sizeof workspace,
                                             &gradient));
  EXPECT_NEAR(static_cast<double>(scales.values[0]), 0.999, 1e-6);
  EXPECT_NEAR(static_cast<double>(biases.values[0]), -0.001, 1e-6);
  EXPECT_NEAR(static_cast<double>(moments[0].values[0]), 6.275, 1e-6);
}

TEST(CApi, ProductsWithQuantizedWeights) {
  auto spec = INITIALISED(quant_spec);
  spec.group_size = 32;
  Array<float> w({40, 96}, some_values(40 * 96)), x({3, 96}, some_values(3 * 96)), y({3, 40}), bias({40});
  Array<float> scales({40, 3}), scales_back({40, 3}), expected({3, 40});
  Array<uint8_t> codes({40, 48}), codes_back({40, 48});
  auto parts = INITIALISED(quantized);
  parts.codes = codes;
  parts.scales = scales;
  EXPECT_OK(halfbyte_quantize(w, &spec, nullptr, &parts, nullptr, nullptr, nullptr));
  auto view = INITIALISED(weight_view);
  view.spec = &spec;
  view.rows = 40;
  view.cols = 96;
  view.codes = codes;
  view.scales = scales;
  int64_t num_bytes = 0;
  EXPECT_OK(halfbyte_packed_weight_bytes(&spec, 40, 96, &num_bytes));
  EXPECT_EQ(num_bytes, packed_weight_bytes(capi::spec_of(&spec, "spec"), 40, 96));
  Array<uint8_t> memory({num_bytes + 256});
  int64_t offset = 256 - static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory.values.data()) % 256);
  DLTensor data = *static_cast<const DLTensor*>(memory);
  data.byte_offset = static_cast<uint64_t>(offset);
  data.shape = &num_bytes;
  auto packed = INITIALISED(packed_weight);
  packed.spec = &spec;
  packed.rows = 40;
  packed.cols = 96;
  packed.data = &data;
  EXPECT_OK(halfbyte_reorder_to_packed(&view, &packed, nullptr));
  auto back = view;
  back.codes = codes_back;
  back.scales = scales_back;
  EXPECT_OK(halfbyte_reorder_from_packed(&packed, &back, nullptr));
  EXPECT_EQ(codes.values, codes_back.values);
  EXPECT_EQ(scales.values, scales_back.values);

  // A weight of 32 rows and this one, as one of 72.
  view.rows = 32;
  Array<uint8_t> some_codes({32, 48}, codes.values);
  Array<float> some_scales({32, 3}, scales.values);
  view.codes = some_codes;
  view.scales = some_scales;
  const std::array<int64_t, 2> joined_rows = {32, 72};
  std::array<int64_t, 2> joined_bytes{};
  for (size_t i = 0; i < 2; ++i)
    EXPECT_OK(halfbyte_packed_weight_bytes(&spec, joined_rows[i], 96, &joined_bytes[i]));
  Array<uint8_t> more_memory({joined_bytes[0] + joined_bytes[1] + 256});
  const auto more_offset =
      static_cast<uint64_t>(256 - reinterpret_cast<uintptr_t>(more_memory.values.data()) % 256);
  std::array<DLTensor, 2> joined_data;
  std::array<halfbyte_packed_weight, 2> joined = {packed, packed};
  for (size_t i = 0; i < 2; ++i) {
    joined_data[i] = *static_cast<const DLTensor*>(more_memory);
    joined_data[i].byte_offset = more_offset + static_cast<uint64_t>(i == 0 ? 0 : joined_bytes[0]);
    joined_data[i].shape = &joined_bytes[i];
    joined[i].rows = joined_rows[i];
    joined[i].data = &joined_data[i];
  }
  EXPECT_OK(halfbyte_reorder_to_packed(&view, joined.data(), nullptr));
  const halfbyte_packed_weight* both[] = {joined.data(), &packed};
  EXPECT_OK(halfbyte_packed_concat_rows(both, 2, &joined[1], nullptr));
  Array<uint8_t> all_codes({72, 48});
  Array<float> all_scales({72, 3});
  view.rows = 72;
  view.codes = all_codes;
  view.scales = all_scales;
  EXPECT_OK(halfbyte_reorder_from_packed(&joined[1], &view, nullptr));
  some_codes.values.insert(some_codes.values.end(), codes.values.begin(), codes.values.end());
  EXPECT_EQ(all_codes.values, some_codes.values);
  some_scales.values.insert(some_scales.values.end(), scales.values.begin(), scales.values.end());
  EXPECT_EQ(all_scales.values, some_scales.values);
  EXPECT_FAILS(HALFBYTE_USAGE, "concat_rows: to must be [32, 96], the rows of all weights, got [72, 96]",
               halfbyte_packed_concat_rows(both, 1, &joined[1], nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "concat_rows: weights must not be empty",
               halfbyte_packed_concat_rows(nullptr, 0, &joined[1], nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "weights must not be NULL",
               halfbyte_packed_concat_rows(nullptr, 2, &joined[1], nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "count must be >= 0, got -1",
               halfbyte_packed_concat_rows(both, -1, &joined[1], nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "to must not be NULL", halfbyte_packed_concat_rows(both, 2, nullptr, nullptr));
  both[1] = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "weights[1] must not be NULL",
               halfbyte_packed_concat_rows(both, 2, &joined[1], nullptr));
  // A part of it: the rows of the second. And the columns of one weight, as one.
  std::ranges::fill(memory.values, uint8_t{0x5a});
  const halfbyte_slice rows = {0, 32, 72}, outside = {0, 32, 73}, all = {1, 0, 96};
  EXPECT_OK(halfbyte_packed_slice(&joined[1], &rows, &packed, nullptr));
  std::ranges::fill(codes_back.values, uint8_t{0});
  EXPECT_OK(halfbyte_reorder_from_packed(&packed, &back, nullptr));
  EXPECT_EQ(codes.values, codes_back.values);
  EXPECT_FAILS(HALFBYTE_USAGE, "slice: slice must lie within the 72 elements of axis 0, got 32 to 73",
               halfbyte_packed_slice(&joined[1], &outside, &packed, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "slice must not be NULL",
               halfbyte_packed_slice(&joined[1], nullptr, &packed, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "slice: to must be [72, 96], the slice, got [40, 96]",
               halfbyte_packed_slice(&joined[1], &all, &packed, nullptr));
  Array<uint8_t> third_memory({joined_bytes[0] + 256});
  DLTensor third_data = *static_cast<const DLTensor*>(third_memory);
  third_data.byte_offset =
      static_cast<uint64_t>(256 - reinterpret_cast<uintptr_t>(third_memory.values.data()) % 256);
  third_data.shape = joined_bytes.data();
  halfbyte_packed_weight third = joined[0];
  third.data = &third_data;
  const halfbyte_packed_weight* one[] = {joined.data()};
  EXPECT_OK(halfbyte_packed_concat_cols(one, 1, &third, nullptr));
  EXPECT_EQ(0, std::memcmp(third_memory.values.data() + third_data.byte_offset,
                           more_memory.values.data() + more_offset, static_cast<size_t>(joined_bytes[0])));
  EXPECT_FAILS(HALFBYTE_USAGE, "concat_cols: to must be [32, 96], the cols of all weights, got [40, 96]",
               halfbyte_packed_concat_cols(one, 1, &packed, nullptr));
  view.rows = 40;
  view.codes = codes;
  view.scales = scales;

  auto descriptor = INITIALISED(qgemm_descriptor);
  descriptor.spec = &spec;
  descriptor.m = 3;
  descriptor.n = 40;
  descriptor.k = 96;
  descriptor.dtype = HALFBYTE_DTYPE_F32;
  descriptor.bias = 1;
  descriptor.variant = "qgemm_ref";  // takes both forms, and needs little workspace
  halfbyte_plan* raw = nullptr;
  EXPECT_OK(halfbyte_qgemm_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan plan(raw);
  descriptor.packed = 0;
  EXPECT_OK(halfbyte_qgemm_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan plan_of_view(raw);
  auto guarantee = output<halfbyte_precision_guarantee>();
  EXPECT_OK(halfbyte_plan_precision_guarantee(plan.get(), &guarantee));
  EXPECT_EQ(guarantee.weight_rounding, HALFBYTE_WEIGHT_ROUNDING_NONE);
  EXPECT_EQ(guarantee.same_on_all_devices, 0);

  alignas(16) std::array<uint8_t, 64> workspace;
  auto args = INITIALISED(qgemm_args);
  args.x = x;
  args.weight = &packed;
  args.bias = bias;
  args.y = y;
  EXPECT_OK(halfbyte_qgemm_can_implement(plan.get(), &args));
  EXPECT_OK(halfbyte_qgemm_run(plan.get(), nullptr, workspace.data(), sizeof workspace, &args));
  args.weight = nullptr;
  args.view = &view;
  args.y = expected;
  EXPECT_OK(halfbyte_qgemm_run(plan_of_view.get(), nullptr, workspace.data(), sizeof workspace, &args));
  EXPECT_EQ(y.values, expected.values);
  EXPECT_NE(y.values[0], 0);

  // Plans for every m: the rows are those of x.
  descriptor.m = -7;
  descriptor.packed = 1;
  halfbyte_qgemm_plans* plans = nullptr;
  EXPECT_OK(halfbyte_qgemm_plans_create(kCpu, &descriptor, nullptr, &plans));
  int64_t plan_bytes = 0, plans_bytes = 0;
  EXPECT_OK(halfbyte_plan_workspace_size(plan.get(), &plan_bytes));
  EXPECT_OK(halfbyte_qgemm_plans_workspace_size(plans, 3, &plans_bytes));
  EXPECT_EQ(plans_bytes, plan_bytes);
  args.weight = &packed;
  args.view = nullptr;
  args.y = y;
  std::fill(y.values.begin(), y.values.end(), 0.0f);
  EXPECT_OK(halfbyte_qgemm_plans_run(plans, nullptr, workspace.data(), sizeof workspace, &args));
  EXPECT_EQ(y.values, expected.values);
  std::fill(y.values.begin(), y.values.end(), 0.0f);
  EXPECT_OK(halfbyte_qgemm_plans_run(plans, nullptr, nullptr, 0, &args));
  EXPECT_EQ(y.values, expected.values);
  EXPECT_FAILS(HALFBYTE_USAGE, "qgemm descriptor: m must be 0 to 2^40, got -1",
               halfbyte_qgemm_plans_workspace_size(plans, -1, &plans_bytes));
  EXPECT_FAILS(HALFBYTE_USAGE, "num_bytes must not be NULL",
               halfbyte_qgemm_plans_workspace_size(plans, 3, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "args must not be NULL",
               halfbyte_qgemm_plans_run(plans, nullptr, nullptr, 0, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "plans must not be NULL",
               halfbyte_qgemm_plans_run(nullptr, nullptr, nullptr, 0, &args));
  EXPECT_FAILS(HALFBYTE_USAGE, "plans must not be NULL",
               halfbyte_qgemm_plans_create(kCpu, &descriptor, nullptr, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor must not be NULL",
               halfbyte_qgemm_plans_create(kCpu, nullptr, nullptr, &plans));
  halfbyte_qgemm_plans_destroy(plans);
  halfbyte_qgemm_plans_destroy(nullptr);
  descriptor.m = 3;
  descriptor.packed = 0;
  args.weight = nullptr;
  args.view = &view;

  const auto refused = [&](const halfbyte_plan* of) { return halfbyte_qgemm_can_implement(of, &args); };
  EXPECT_FAILS(HALFBYTE_USAGE, "weight must not be NULL", refused(plan.get()));
  view.scales = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "qgemm: view.scales needs 480 bytes but has no data",
               refused(plan_of_view.get()));
  view.scales = codes;
  EXPECT_FAILS(HALFBYTE_USAGE, "view->scales must be f32, got u8", refused(plan_of_view.get()));
  Array<float> more_scales({41, 3});
  view.scales = more_scales;
  EXPECT_FAILS(HALFBYTE_USAGE, "view->scales must have 480 bytes, got 492", refused(plan_of_view.get()));
  view.layout = 9;
  EXPECT_FAILS(HALFBYTE_USAGE, "view->layout must be 0 to 8, got 9", refused(plan_of_view.get()));
  args.view = nullptr;
  args.weight = &packed;
  packed.version = 3;
  EXPECT_FAILS(HALFBYTE_USAGE, "qgemm: weight.version must be 2, got 3", refused(plan.get()));
  EXPECT_FAILS(HALFBYTE_USAGE, "reorder: to.version must be 2, got 3",
               halfbyte_reorder_to_packed(&back, &packed, nullptr));
  packed.version = int64_t{1} << 40;
  EXPECT_FAILS(HALFBYTE_USAGE, "weight->version must be 2, got 1099511627776", refused(plan.get()));
  packed.data = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "weight->data must not be NULL", refused(plan.get()));
  EXPECT_FAILS(HALFBYTE_USAGE, "num_bytes must not be NULL",
               halfbyte_packed_weight_bytes(&spec, 1, 1, nullptr));

  halfbyte_blob* text = nullptr;
  EXPECT_OK(halfbyte_qgemm_explain(kCpu, &descriptor, &text));
  const std::string lines = static_cast<const char*>(halfbyte_blob_data(text));
  EXPECT_NE(lines.find("\nqgemm_ref: \nqgemm_sm90_wgmma: it is for CUDA devices\n"), std::string::npos)
      << lines;
  EXPECT_NE(lines.find("qgemm_simd (packs the view first): \n"), std::string::npos) << lines;
  halfbyte_blob_destroy(text);
  descriptor.variant = "qgemm_sm60";
  EXPECT_EQ(halfbyte_qgemm_select(kCpu, &descriptor, nullptr, &raw), HALFBYTE_USAGE);
  descriptor.variant = nullptr;
  descriptor.math = 4;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.math must be 0 to 3, got 4",
               halfbyte_qgemm_explain(kCpu, &descriptor, &text));
}

TEST(CApi, ProductsWithTheWeightsOfExperts) {
  constexpr int64_t kExperts = 3, kTokens = 5, kTopK = 2, kRows = 40, kCols = 96;
  auto spec = INITIALISED(quant_spec);
  spec.group_size = 32;
  int64_t num_bytes = 0;
  EXPECT_OK(halfbyte_packed_weight_bytes(&spec, kRows, kCols, &num_bytes));
  Array<uint8_t> memory({kExperts * num_bytes + 256});
  const auto first = static_cast<uint64_t>(256 - reinterpret_cast<uintptr_t>(memory.values.data()) % 256);
  DLTensor data = *static_cast<const DLTensor*>(memory);
  auto packed = INITIALISED(packed_weight);
  packed.spec = &spec;
  packed.rows = kRows;
  packed.cols = kCols;
  packed.data = &data;
  int64_t data_bytes = num_bytes;
  data.shape = &data_bytes;
  for (int64_t e = 0; e < kExperts; ++e) {
    Array<float> w({kRows, kCols}, some_values(kRows * kCols)), scales({kRows, 3});
    for (float& value : w.values) value += static_cast<float>(e);
    Array<uint8_t> codes({kRows, kCols / 2});
    auto parts = INITIALISED(quantized);
    parts.codes = codes;
    parts.scales = scales;
    EXPECT_OK(halfbyte_quantize(w, &spec, nullptr, &parts, nullptr, nullptr, nullptr));
    auto view = INITIALISED(weight_view);
    view.spec = &spec;
    view.rows = kRows;
    view.cols = kCols;
    view.codes = codes;
    view.scales = scales;
    data.byte_offset = first + static_cast<uint64_t>(e * num_bytes);
    EXPECT_OK(halfbyte_reorder_to_packed(&view, &packed, nullptr));
  }

  // Each slot by a product of one row with the weight of its expert.
  const std::vector<int32_t> chosen = {2, 0, 0, 2, 2, 0, 2, 1, 0, 2};
  Array<float> x({kTokens, kCols}, some_values(kTokens * kCols)), y({kTokens * kTopK, kRows});
  auto one = INITIALISED(qgemm_descriptor);
  one.spec = &spec;
  one.m = 1;
  one.n = kRows;
  one.k = kCols;
  one.dtype = HALFBYTE_DTYPE_F32;
  one.variant = "qgemm_ref";
  halfbyte_plan* raw = nullptr;
  EXPECT_OK(halfbyte_qgemm_select(kCpu, &one, nullptr, &raw));
  const UniquePlan plan_of_one(raw);
  std::vector<float> expected;
  for (size_t slot = 0; slot < chosen.size(); ++slot) {
    const auto token = static_cast<ptrdiff_t>(slot / kTopK);
    Array<float> row({1, kCols}, {x.values.begin() + token * kCols, x.values.begin() + (token + 1) * kCols});
    Array<float> product({1, kRows});
    data.byte_offset = first + static_cast<uint64_t>(chosen[slot] * num_bytes);
    auto args = INITIALISED(qgemm_args);
    args.x = row;
    args.weight = &packed;
    args.y = product;
    EXPECT_OK(halfbyte_qgemm_run(plan_of_one.get(), nullptr, nullptr, 0, &args));
    expected.insert(expected.end(), product.values.begin(), product.values.end());
  }
  data.byte_offset = first;
  data_bytes = kExperts * num_bytes;

  Array<int32_t> experts({kTokens, kTopK}, chosen), offsets({kExperts}), slots({kTokens * kTopK});
  auto route = INITIALISED(route_descriptor);
  route.tokens = kTokens;
  route.top_k = kTopK;
  route.num_experts = kExperts;
  EXPECT_OK(halfbyte_route_select(kCpu, &route, nullptr, &raw));
  const UniquePlan routing(raw);
  auto sku = output<halfbyte_sku>();
  EXPECT_OK(halfbyte_plan_sku(routing.get(), &sku));
  EXPECT_EQ(sku.op_kind, HALFBYTE_OP_ROUTE);
  auto route_args = INITIALISED(route_args);
  route_args.experts = experts;
  route_args.offsets = offsets;
  route_args.slots = slots;
  EXPECT_OK(halfbyte_route_can_implement(routing.get(), &route_args));
  EXPECT_OK(halfbyte_route_run(routing.get(), nullptr, nullptr, 0, &route_args));
  EXPECT_EQ(offsets.values, (std::vector<int32_t>{4, 5, 10}));
  EXPECT_EQ(slots.values, (std::vector<int32_t>{1, 2, 5, 8, 7, 0, 3, 4, 6, 9}));

  auto descriptor = INITIALISED(qgemm_grouped_descriptor);
  descriptor.spec = &spec;
  descriptor.num_experts = kExperts;
  descriptor.m = kTokens;
  descriptor.n = kRows;
  descriptor.k = kCols;
  descriptor.top_k = kTopK;
  descriptor.dtype = HALFBYTE_DTYPE_F32;
  descriptor.variant = "qgemm_ref";
  EXPECT_FAILS(HALFBYTE_USAGE, "qgemm_grouped descriptor: top_k above 1 needs rows indices, got offsets",
               halfbyte_qgemm_grouped_select(kCpu, &descriptor, nullptr, &raw));
  descriptor.rows = HALFBYTE_EXPERT_ROWS_INDICES;
  EXPECT_OK(halfbyte_qgemm_grouped_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan plan(raw);
  EXPECT_OK(halfbyte_plan_sku(plan.get(), &sku));
  EXPECT_EQ(sku.op_kind, HALFBYTE_OP_QGEMM_GROUPED);
  auto args = INITIALISED(qgemm_grouped_args);
  args.x = x;
  args.weight = &packed;
  args.offsets = offsets;
  args.slots = slots;
  args.y = y;
  EXPECT_OK(halfbyte_qgemm_grouped_can_implement(plan.get(), &args));
  EXPECT_OK(halfbyte_qgemm_grouped_run(plan.get(), nullptr, nullptr, 0, &args));
  EXPECT_EQ(y.values, expected);
  EXPECT_NE(y.values[0], 0);

  // The first half of the rows of a weight is a gate.
  constexpr size_t kOpened = kRows / 2;
  descriptor.swiglu = 1;
  EXPECT_OK(halfbyte_qgemm_grouped_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan gated(raw);
  Array<float> opened({kTokens * kTopK, kRows / 2});
  EXPECT_EQ(halfbyte_qgemm_grouped_can_implement(gated.get(), &args), HALFBYTE_USAGE);
  args.y = opened;
  EXPECT_OK(halfbyte_qgemm_grouped_run(gated.get(), nullptr, nullptr, 0, &args));
  for (size_t slot = 0; slot < chosen.size(); ++slot)
    for (size_t col = 0; col < kOpened; ++col) {
      const float gate = expected[slot * kRows + col], other = expected[slot * kRows + kOpened + col];
      const float wanted = gate / (1 + std::exp(-gate)) * other;
      EXPECT_NEAR(opened.values[slot * kOpened + col], wanted, 1e-5f * std::fabs(wanted) + 1e-5f) << slot;
    }
  descriptor.swiglu = 2;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.swiglu must be 0 or 1, got 2",
               halfbyte_qgemm_grouped_select(kCpu, &descriptor, nullptr, &raw));
  descriptor.swiglu = 0;

  // Slots of a token, each times its routing weight, plus a bias, one after the other.
  descriptor.sum_slots = descriptor.routing_weights = descriptor.bias = 1;
  EXPECT_OK(halfbyte_qgemm_grouped_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan summing(raw);
  Array<float> routing_weights({kTokens, kTopK}, some_values(kTokens * kTopK));
  Array<float> bias({kExperts, kRows}, some_values(kExperts * kRows)), total({kTokens, kRows});
  args.y = total;
  const auto refused = [&](const halfbyte_plan* of) {
    return halfbyte_qgemm_grouped_can_implement(of, &args);
  };
  EXPECT_FAILS(HALFBYTE_USAGE, "routing_weights must not be NULL", refused(summing.get()));
  args.routing_weights = routing_weights;
  EXPECT_FAILS(HALFBYTE_USAGE, "bias must not be NULL", refused(summing.get()));
  args.bias = bias;
  EXPECT_OK(halfbyte_qgemm_grouped_run(summing.get(), nullptr, nullptr, 0, &args));
  for (size_t token = 0; token < kTokens; ++token)
    for (size_t col = 0; col < kRows; ++col) {
      float sum = 0;
      for (size_t slot = token * kTopK; slot < (token + 1) * kTopK; ++slot) {
        const size_t at = static_cast<size_t>(chosen[slot]) * kRows + col;
        sum += (expected[slot * kRows + col] + bias.values[at]) * routing_weights.values[slot];
      }
      EXPECT_EQ(total.values[token * kRows + col], sum) << token << ' ' << col;
    }

  // The gradient of the routing weights.
  descriptor.sum_slots = descriptor.bias = 0;
  descriptor.transposed = descriptor.routing_gradient = 1;
  EXPECT_OK(halfbyte_qgemm_grouped_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan backward(raw);
  Array<float> dy({kTokens, kRows}, some_values(kTokens * kRows)), dx({kTokens * kTopK, kCols});
  Array<float> forward_x({kTokens * kTopK, kCols}), gradient({kTokens, kTopK});
  for (size_t i = 0; i < forward_x.values.size(); ++i)
    forward_x.values[i] = x.values[i / kCols / kTopK * kCols + i % kCols];
  args.x = dy;
  args.bias = nullptr;
  args.y = dx;
  EXPECT_FAILS(HALFBYTE_USAGE, "forward_x must not be NULL", refused(backward.get()));
  args.forward_x = forward_x;
  EXPECT_FAILS(HALFBYTE_USAGE, "routing_grad must not be NULL", refused(backward.get()));
  args.routing_grad = gradient;
  EXPECT_OK(halfbyte_qgemm_grouped_run(backward.get(), nullptr, nullptr, 0, &args));
  for (size_t slot = 0; slot < chosen.size(); ++slot) {
    double by_forward = 0;  // dy . (W . x)
    for (size_t col = 0; col < kRows; ++col)
      by_forward += static_cast<double>(dy.values[slot / kTopK * kRows + col] * expected[slot * kRows + col]);
    EXPECT_NEAR(gradient.values[slot], by_forward, 1e-4 * std::fabs(by_forward) + 1e-2) << slot;
  }

  // The tensors that descriptors speak of, and no others.
  EXPECT_FAILS(HALFBYTE_USAGE, "weight must not be NULL", (args.weight = nullptr, refused(backward.get())));
  args.weight = &packed;
  EXPECT_FAILS(HALFBYTE_USAGE, "slots must not be NULL", (args.slots = nullptr, refused(backward.get())));
  args.slots = slots;
  data_bytes = 2 * num_bytes;
  const std::string short_of = fmt::format("qgemm_grouped: weight needs {} bytes, its memory has {}",
                                           kExperts * num_bytes, data_bytes);
  EXPECT_FAILS(HALFBYTE_USAGE, short_of.c_str(), refused(backward.get()));
  EXPECT_FAILS(HALFBYTE_USAGE, "args must not be NULL",
               halfbyte_qgemm_grouped_run(plan.get(), nullptr, nullptr, 0, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "plan must be one of route, got one of qgemm_grouped",
               halfbyte_route_run(plan.get(), nullptr, nullptr, 0, &route_args));
  route_args.slots = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "slots must not be NULL",
               halfbyte_route_can_implement(routing.get(), &route_args));
  route.dtype = HALFBYTE_DTYPE_I8;
  EXPECT_FAILS(HALFBYTE_USAGE, "route descriptor: dtype must be i32 or i64, got i8",
               halfbyte_route_select(kCpu, &route, nullptr, &raw));

  halfbyte_blob* text = nullptr;
  EXPECT_OK(halfbyte_qgemm_grouped_explain(kCpu, &descriptor, &text));
  const std::string lines = static_cast<const char*>(halfbyte_blob_data(text));
  EXPECT_NE(lines.find("\nqgemm_ref: \n"), std::string::npos) << lines;
  halfbyte_blob_destroy(text);
  EXPECT_FAILS(HALFBYTE_USAGE, "text must not be NULL",
               halfbyte_qgemm_grouped_explain(kCpu, &descriptor, nullptr));
  descriptor.rows = 3;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.rows must be 0 to 2, got 3",
               halfbyte_qgemm_grouped_explain(kCpu, &descriptor, &text));
  halfbyte_expert_rows rows = -1;
  EXPECT_EQ(halfbyte_expert_rows_find("sorted", &rows), HALFBYTE_USAGE);
  EXPECT_FAILS(HALFBYTE_USAGE, "word must not be NULL", halfbyte_expert_rows_find(nullptr, &rows));
}

TEST(CApi, PlansOfFakeQuantization) {
  const int64_t shape[2] = {2, 4};
  auto descriptor = INITIALISED(fake_quantize_descriptor);
  descriptor.shape = shape;
  descriptor.ndim = 2;
  descriptor.granularity = HALFBYTE_GRANULARITY_CHANNEL;
  descriptor.axis = 0;
  descriptor.alignment = 4;
  int32_t ndim = 0;
  int64_t scale_shape[2] = {};
  EXPECT_OK(halfbyte_fake_quantize_descriptor_scale_shape(&descriptor, &ndim, scale_shape));
  EXPECT_EQ(ndim, 1);
  EXPECT_EQ(scale_shape[0], 2);

  halfbyte_plan* raw = nullptr;
  EXPECT_OK(halfbyte_fake_quantize_learned_backward_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan learned(raw);
  descriptor.mask = 1;
  EXPECT_OK(halfbyte_fake_quantize_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan forward(raw);
  EXPECT_OK(halfbyte_fake_quantize_backward_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan backward(raw);
  alignas(16) uint64_t workspace[64];

  Array<float> x({2, 4}, {1, 2.3f, -1, 99, 10, 100, -100, 5}), scale({2}, {0.5f, 2}), y({2, 4}), dx({2, 4}),
      dy({2, 4}, {1, 1, 1, 1, 1, 1, 1, 1}), dscale({2});
  Array<uint8_t> mask({2, 1});
  auto args = INITIALISED(fake_quantize_args);
  args.x = x;
  args.y = y;
  args.scale = scale;
  args.mask = mask;
  EXPECT_OK(halfbyte_fake_quantize_can_implement(forward.get(), &args));
  EXPECT_OK(halfbyte_fake_quantize_run(forward.get(), nullptr, workspace, sizeof workspace, &args));
  EXPECT_EQ(y.values, (std::vector<float>{1, 2.5f, -1, 3.5f, 10, 14, -16, 4}));
  EXPECT_EQ(mask.values, (std::vector<uint8_t>{0b0111, 0b1001}));

  auto gradient = INITIALISED(fake_quantize_backward_args);
  gradient.mask = mask;
  gradient.dy = dy;
  gradient.dx = dx;
  EXPECT_OK(halfbyte_fake_quantize_backward_can_implement(backward.get(), &gradient));
  EXPECT_OK(
      halfbyte_fake_quantize_backward_run(backward.get(), nullptr, workspace, sizeof workspace, &gradient));
  EXPECT_EQ(dx.values, (std::vector<float>{1, 1, 1, 0, 1, 0, 0, 1}));

  auto of_scale = INITIALISED(fake_quantize_learned_backward_args);
  of_scale.x = x;
  of_scale.dy = dy;
  of_scale.scale = scale;
  of_scale.dx = dx;
  of_scale.dscale = dscale;
  EXPECT_OK(halfbyte_fake_quantize_learned_backward_can_implement(learned.get(), &of_scale));
  EXPECT_OK(halfbyte_fake_quantize_learned_backward_run(learned.get(), nullptr, workspace, sizeof workspace,
                                                        &of_scale));
  EXPECT_EQ(dx.values, (std::vector<float>{1, 1, 1, 0, 1, 0, 0, 1}));
  EXPECT_EQ(dscale.values[1], 7.0f - 8 + (2 - 2.5f));

  args.mask = nullptr;
  EXPECT_EQ(halfbyte_fake_quantize_can_implement(forward.get(), &args), HALFBYTE_USAGE);
  gradient.x = x;
  EXPECT_FAILS(
      HALFBYTE_USAGE, "fake_quantize_backward: x must have no data, as the mask is read in its place",
      halfbyte_fake_quantize_backward_run(backward.get(), nullptr, workspace, sizeof workspace, &gradient));
  EXPECT_FAILS(HALFBYTE_USAGE, "plan must be one of fake_quantize, got one of fake_quantize_backward",
               halfbyte_fake_quantize_run(backward.get(), nullptr, workspace, sizeof workspace, &args));
  descriptor.q_max = 256;
  EXPECT_EQ(halfbyte_fake_quantize_select(kCpu, &descriptor, nullptr, &raw), HALFBYTE_USAGE);
}

// Every field of the descriptor and of the arguments arrives: the values are those of C++.
TEST(CApi, FakeQuantizationOfBlockFloats) {
  const int64_t shape[2] = {3, 40};
  auto descriptor = INITIALISED(fake_quantize_descriptor);
  EXPECT_EQ(descriptor.computed_global_scale, 0);
  descriptor.shape = shape;
  descriptor.ndim = 2;
  descriptor.granularity = HALFBYTE_GRANULARITY_GROUP;
  descriptor.format = HALFBYTE_FORMAT_NVFP4;
  descriptor.group_size = 16;
  descriptor.scale_dtype = HALFBYTE_DTYPE_F8_E4M3;
  descriptor.computed = 1;
  descriptor.alignment = 4;
  halfbyte_plan* raw = nullptr;
  descriptor.computed_global_scale = 2;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.computed_global_scale must be 0 or 1, got 2",
               halfbyte_fake_quantize_select(kCpu, &descriptor, nullptr, &raw));
  const auto round = [&](int64_t computed_global_scale, const std::vector<float>& values,
                         const DLTensor* global) {
    descriptor.computed_global_scale = computed_global_scale;
    EXPECT_OK(halfbyte_fake_quantize_select(kCpu, &descriptor, nullptr, &raw));
    const UniquePlan plan(raw);
    Array<float> x({3, 40}, values), y({3, 40});
    Array<uint8_t> scale({3, 3});
    scale->dtype = {kDLFloat8_e4m3fn, 8, 1};
    auto args = INITIALISED(fake_quantize_args);
    args.x = x;
    args.y = y;
    args.scale = scale;
    alignas(16) uint64_t workspace[64];
    EXPECT_EQ(halfbyte_fake_quantize_can_implement(plan.get(), &args), HALFBYTE_USAGE);
    args.global_scale = global;
    EXPECT_OK(halfbyte_fake_quantize_run(plan.get(), nullptr, workspace, sizeof workspace, &args));
    return y.values;
  };
  const std::vector<float> values = some_values(120);
  Array<float> global_scale({1});
  const std::vector<float> y = round(1, values, global_scale);
  const QuantizedTensor q =
      quantize({const_cast<float*>(values.data()), DType::f32, {3, 40}, {}, {}},
               {.format = Format::nvfp4, .group_size = 16, .scale_dtype = DType::f8_e4m3});
  std::vector<float> expected(120);
  dequantize(q, {expected.data(), DType::f32, {3, 40}, {}, {}});
  EXPECT_EQ(y, expected);
  EXPECT_EQ(0, std::memcmp(global_scale.values.data(), q.global_scale.data(), sizeof(float)));
  EXPECT_EQ(round(0, values, global_scale), expected);
}

TEST(CApi, FakeQuantizationIsThatOfCpp) {
  const int64_t shape[3] = {2, 3, 10};
  const std::vector<int64_t> shape_of_x(shape, shape + 3);
  auto config = INITIALISED(observer_config);
  config.kind = HALFBYTE_OBSERVER_MOVING_AVERAGE;
  config.momentum = 0.5;
  auto descriptor = INITIALISED(fake_quantize_descriptor);
  descriptor.shape = shape;
  descriptor.ndim = 3;
  descriptor.granularity = HALFBYTE_GRANULARITY_GROUP;
  descriptor.axis = 1;
  descriptor.group_size = 2;
  descriptor.q_min = -3;
  descriptor.q_max = 12;
  descriptor.zero_point_dtype = HALFBYTE_DTYPE_I32;
  descriptor.computed = 1;
  descriptor.scale_rule = HALFBYTE_SCALE_RULE_MINMAX;
  descriptor.eps = 0.125;
  descriptor.observer = &config;
  descriptor.mask = 1;
  descriptor.alignment = 4;
  FakeQuantizeDescriptor same;
  same.shape = shape_of_x;
  same.granularity = Granularity::group;
  same.axis = 1;
  same.group_size = 2;
  same.q_min = -3;
  same.q_max = 12;
  same.zero_point_dtype = DType::i32;
  same.computed = true;
  same.scale_rule = ScaleRule::minmax;
  same.eps = 0.125;
  same.observer.emplace().kind = ObserverKind::moving_average;
  same.observer->momentum = 0.5;
  same.mask = true;
  same.alignment = 4;

  int32_t ndim = 0;
  int64_t extents[3] = {};
  EXPECT_OK(halfbyte_fake_quantize_descriptor_scale_shape(&descriptor, &ndim, extents));
  const std::vector<int64_t> groups(extents, extents + ndim);
  EXPECT_EQ(groups, same.scale_shape());
  int64_t num_levels = 0;
  EXPECT_OK(halfbyte_fake_quantize_descriptor_num_levels(&descriptor, &num_levels));
  EXPECT_EQ(num_levels, 16);
  EXPECT_FAILS(HALFBYTE_USAGE, "num_levels must not be NULL",
               halfbyte_fake_quantize_descriptor_num_levels(&descriptor, nullptr));
  EXPECT_OK(halfbyte_fake_quantize_descriptor_mask_shape(&descriptor, &ndim, extents));
  const std::vector<int64_t> bits(extents, extents + ndim);
  EXPECT_EQ(bits, (std::vector<int64_t>{2, 3, 2}));
  EXPECT_FAILS(HALFBYTE_USAGE, "mask_shape must not be NULL",
               halfbyte_fake_quantize_descriptor_mask_shape(&descriptor, &ndim, nullptr));

  std::vector<float> values;
  for (int i = 0; i < 60; ++i) values.push_back(static_cast<float>(i * 37 % 60 - 20) * 0.09f);
  struct Tensors {
    Array<float> x, dy, y, scale, learned_zero, min, max, dx, dscale, dzero;
    Array<int32_t> zero;
    Array<uint8_t> mask;
    Array<int64_t> num_batches{{}, {1}};
    Tensors(const std::vector<int64_t>& dense, const std::vector<int64_t>& groups,
            const std::vector<int64_t>& bits, const std::vector<float>& values)
        : x(dense, values),
          dy(dense, {values.rbegin(), values.rend()}),
          y(dense),
          scale(groups, std::vector<float>(40, 0.0625f)),
          learned_zero(groups, std::vector<float>(40, 1.75f)),
          min(groups, std::vector<float>(40, -1)),
          max(groups, std::vector<float>(40, 0.5f)),
          dx(dense),
          dscale(groups),
          dzero(groups),
          zero(groups),
          mask(bits) {}
    bool operator==(const Tensors& other) const {
      return y.values == other.y.values && scale.values == other.scale.values &&
             zero.values == other.zero.values && mask.values == other.mask.values &&
             min.values == other.min.values && max.values == other.max.values &&
             num_batches.values == other.num_batches.values && dx.values == other.dx.values &&
             dscale.values == other.dscale.values && dzero.values == other.dzero.values;
    }
  };
  Tensors c(shape_of_x, groups, bits, values), cpp(shape_of_x, groups, bits, values);
  alignas(16) uint64_t workspace[64];
  const auto view = [](const DLTensor* tensor) { return capi::view_of(tensor, ""); };
  const auto run_both = [&](bool has_zero) {
    halfbyte_plan* raw = nullptr;
    EXPECT_OK(halfbyte_fake_quantize_select(kCpu, &descriptor, nullptr, &raw));
    const UniquePlan plan(raw);
    auto args = INITIALISED(fake_quantize_args);
    args.x = c.x;
    args.y = c.y;
    args.scale = c.scale;
    FakeQuantize::Args other{view(cpp.x), view(cpp.y), view(cpp.scale), {}, {}, {}, {}, {}};
    if (has_zero) {
      args.zero_point = c.zero;
      args.mask = c.mask;
      args.min = c.min;
      args.max = c.max;
      args.num_batches = c.num_batches;
      other.zero_point = view(cpp.zero);
      other.mask = view(cpp.mask);
      other.min = view(cpp.min);
      other.max = view(cpp.max);
      other.num_batches = view(cpp.num_batches);
    }
    EXPECT_OK(halfbyte_fake_quantize_run(plan.get(), nullptr, workspace, sizeof workspace, &args));
    FakeQuantizePlan::select({}, same).run(nullptr, workspace, other);
    EXPECT_TRUE(c == cpp);
  };
  run_both(true);
  {  // backward takes the same descriptor
    halfbyte_plan* raw = nullptr;
    EXPECT_OK(halfbyte_fake_quantize_backward_select(kCpu, &descriptor, nullptr, &raw));
    const UniquePlan plan(raw);
    auto args = INITIALISED(fake_quantize_backward_args);
    args.mask = c.mask;
    args.dy = c.dy;
    args.dx = c.dx;
    EXPECT_OK(halfbyte_fake_quantize_backward_run(plan.get(), nullptr, workspace, sizeof workspace, &args));
    FakeQuantizeBackwardPlan::select({}, same).run(nullptr, workspace,
                                                   {{}, view(cpp.mask), view(cpp.dy), {}, {}, view(cpp.dx)});
    EXPECT_TRUE(c == cpp);
    EXPECT_OK(halfbyte_fake_quantize_learned_backward_select(kCpu, &descriptor, nullptr, &raw));
    halfbyte_plan_destroy(raw);
  }
  EXPECT_EQ(c.num_batches.values[0], 2);
  EXPECT_EQ(*std::ranges::min_element(c.scale.values), 0.125f);

  // A table.
  const float table[16] = {-4, -3, -2, -1.5f, -1, -0.5f, -0.25f, 0, 0.125f, 0.25f, 0.5f, 1, 1.5f, 2, 4, 5};
  descriptor.format = HALFBYTE_FORMAT_LUT4;
  descriptor.table = table;
  descriptor.zero_point_dtype = HALFBYTE_UNSET;
  descriptor.scale_rule = HALFBYTE_SCALE_RULE_ABSMAX;
  descriptor.computed = descriptor.mask = 0;
  descriptor.observer = nullptr;
  same.format = Format::lut4;
  std::copy_n(table, 16, same.table.begin());
  same.zero_point_dtype.reset();
  same.scale_rule = ScaleRule::absmax;
  same.computed = same.mask = false;
  same.observer.reset();
  const std::vector<float> before = c.y.values;
  run_both(false);
  EXPECT_NE(c.y.values, before);

  // Learned scales and zero points.
  descriptor.format = HALFBYTE_UNSET;
  descriptor.zero_point_dtype = HALFBYTE_DTYPE_F32;
  descriptor.gradient_scale = 0.3;
  same.format.reset();
  same.zero_point_dtype = DType::f32;
  same.gradient_scale = 0.3;
  halfbyte_plan* raw = nullptr;
  EXPECT_OK(halfbyte_fake_quantize_learned_backward_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan learned(raw);
  auto args = INITIALISED(fake_quantize_learned_backward_args);
  args.x = c.x;
  args.dy = c.dy;
  args.scale = c.scale;
  args.zero_point = c.learned_zero;
  args.dx = c.dx;
  args.dscale = c.dscale;
  EXPECT_EQ(halfbyte_fake_quantize_learned_backward_can_implement(learned.get(), &args), HALFBYTE_USAGE);
  args.dzero_point = c.dzero;
  EXPECT_OK(halfbyte_fake_quantize_learned_backward_run(learned.get(), nullptr, workspace, sizeof workspace,
                                                        &args));
  FakeQuantizeLearnedBackwardPlan::select({}, same).run(
      nullptr, workspace,
      {view(cpp.x), view(cpp.dy), view(cpp.scale), view(cpp.learned_zero), view(cpp.dx), view(cpp.dscale),
       view(cpp.dzero)});
  EXPECT_TRUE(c == cpp);
  const std::vector<float> none(c.dscale.values.size());
  EXPECT_NE(c.dscale.values, none);
  EXPECT_NE(c.dzero.values, none);
}

TEST(CApi, PlansOfTheThreeOperations) {
  const int64_t shape[2] = {2, 4};
  auto descriptor = rows_of(shape);
  int32_t ndim = 0;
  int64_t scale_shape[2] = {};
  EXPECT_OK(halfbyte_linear_descriptor_scale_shape(&descriptor, &ndim, scale_shape));
  EXPECT_EQ(ndim, 1);
  EXPECT_EQ(scale_shape[0], 2);
  int64_t num_levels = 0;
  EXPECT_OK(halfbyte_linear_descriptor_num_levels(&descriptor, &num_levels));
  EXPECT_EQ(num_levels, 256);
  EXPECT_FAILS(HALFBYTE_USAGE, "num_levels must not be NULL",
               halfbyte_linear_descriptor_num_levels(&descriptor, nullptr));
  descriptor.q_min = 300;
  EXPECT_EQ(halfbyte_linear_descriptor_num_levels(&descriptor, &num_levels), HALFBYTE_USAGE);
  descriptor.q_min = -128;

  auto preference = INITIALISED(plan_preference);
  preference.num_threads = 1;
  halfbyte_plan* raw = nullptr;
  EXPECT_OK(halfbyte_quantize_linear_select(kCpu, &descriptor, &preference, &raw));
  const UniquePlan quantize(raw);
  EXPECT_OK(halfbyte_dequantize_linear_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan dequantize(raw);
  EXPECT_OK(halfbyte_quantize_linear_backward_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan backward(raw);

  auto sku = output<halfbyte_sku>();
  EXPECT_OK(halfbyte_plan_sku(quantize.get(), &sku));
  EXPECT_STREQ(sku.op, "quantize_linear");
  EXPECT_STREQ(sku.dtypes, "f32 -> i8, scale f32");
  EXPECT_EQ(sku.op_kind, HALFBYTE_OP_QUANTIZE_LINEAR);
  EXPECT_EQ(sku.element, HALFBYTE_DTYPE_F32);
  EXPECT_EQ(sku.aux_element, HALFBYTE_DTYPE_I8);
  EXPECT_EQ(sku.layout, HALFBYTE_UNSET);
  EXPECT_EQ(sku.device_type, kDLCPU);
  EXPECT_EQ(std::string("cpu ") + halfbyte_arch_name(sku.arch), sku.backend);
  auto guarantee = output<halfbyte_precision_guarantee>();
  EXPECT_OK(halfbyte_plan_precision_guarantee(quantize.get(), &guarantee));
  EXPECT_EQ(guarantee.math, HALFBYTE_DTYPE_F32);
  EXPECT_EQ(guarantee.deterministic, 1);
  DLDevice device{kDLCUDA, 5};
  EXPECT_OK(halfbyte_plan_device(quantize.get(), &device));
  EXPECT_EQ(device.device_type, kDLCPU);
  int64_t workspace_size = 0;
  EXPECT_OK(halfbyte_plan_workspace_size(quantize.get(), &workspace_size));
  ASSERT_GT(workspace_size, 0);
  halfbyte_memory* memory = nullptr;
  EXPECT_OK(halfbyte_memory_create(kCpu, workspace_size, &memory));
  void* const workspace = halfbyte_memory_data(memory);

  Array<float> x({2, 4}, {1, 2.5f, -1, NAN, 10, 1000, -1000, 5}), scale({2}, {0.5f, 2}), y({2, 4}),
      dy({2, 4}, {1, 1, 1, 1, 1, 1, 1, 1});
  Array<int8_t> codes({2, 4});
  auto args = INITIALISED(quantize_linear_args);
  args.x = x;
  args.codes = codes;
  args.scale = scale;
  EXPECT_OK(halfbyte_quantize_linear_can_implement(quantize.get(), &args));
  EXPECT_OK(halfbyte_quantize_linear_run(quantize.get(), nullptr, workspace, workspace_size, &args));
  EXPECT_EQ(codes.values, (std::vector<int8_t>{2, 5, -2, 0, 5, 127, -128, 2}));
  auto status = output<halfbyte_quantize_status>();
  EXPECT_OK(halfbyte_plan_status(quantize.get(), nullptr, workspace, workspace_size, &status));
  EXPECT_EQ(status.num_nonfinite, 1);
  EXPECT_EQ(status.first_nonfinite, 3);

  auto back = INITIALISED(dequantize_linear_args);
  back.codes = codes;
  back.scale = scale;
  back.y = y;
  EXPECT_OK(halfbyte_dequantize_linear_can_implement(dequantize.get(), &back));
  EXPECT_OK(halfbyte_dequantize_linear_run(dequantize.get(), nullptr, workspace, workspace_size, &back));
  EXPECT_EQ(y.values, (std::vector<float>{1, 2.5f, -1, 0, 10, 254, -256, 4}));

  auto gradient = INITIALISED(quantize_linear_backward_args);
  gradient.x = x;
  gradient.dy = dy;
  gradient.scale = scale;
  gradient.dx = dy;  // in place
  EXPECT_OK(halfbyte_quantize_linear_backward_can_implement(backward.get(), &gradient));
  EXPECT_OK(
      halfbyte_quantize_linear_backward_run(backward.get(), nullptr, workspace, workspace_size, &gradient));
  EXPECT_EQ(dy.values, (std::vector<float>{1, 1, 1, 0, 1, 0, 0, 1}));

  // What each kind of bad argument gives, without running anything.
  const auto refused = [&] { return halfbyte_quantize_linear_can_implement(quantize.get(), &args); };
  EXPECT_FAILS(HALFBYTE_USAGE, "plan must be one of dequantize_linear, got one of quantize_linear",
               halfbyte_dequantize_linear_run(quantize.get(), nullptr, workspace, workspace_size, &back));
  EXPECT_FAILS(HALFBYTE_USAGE, "plan must not be NULL",
               halfbyte_quantize_linear_run(nullptr, nullptr, workspace, workspace_size, &args));
  EXPECT_FAILS(HALFBYTE_USAGE, "args must not be NULL",
               halfbyte_quantize_linear_can_implement(quantize.get(), nullptr));
  EXPECT_OK(halfbyte_quantize_linear_run(quantize.get(), nullptr, nullptr, 0, &args));  // has no status
  const auto expect_fields = [](int32_t kind, const char* argument, const char* expected,
                                const char* actual) {
    EXPECT_EQ(halfbyte_last_error_kind(), kind);
    EXPECT_STREQ(halfbyte_last_error_argument(), argument);
    EXPECT_STREQ(halfbyte_last_error_expected(), expected);
    EXPECT_STREQ(halfbyte_last_error_actual(), actual);
  };
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize_linear: workspace needs 48 bytes, its memory has 47",
               halfbyte_quantize_linear_run(quantize.get(), nullptr, workspace, 47, &args));
  expect_fields(HALFBYTE_ERROR_KIND_WORKSPACE_TOO_SMALL, "workspace", "48 bytes", "47 bytes");
  args.codes = scale;
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize_linear: codes must be i8, got f32", refused());
  expect_fields(HALFBYTE_ERROR_KIND_INVALID_ARGUMENT, "codes", "i8", "f32");
  args.codes = codes;
  EXPECT_FAILS(HALFBYTE_USAGE, "plan must not be NULL", halfbyte_plan_sku(nullptr, nullptr));
  expect_fields(HALFBYTE_ERROR_KIND_GENERAL, "", "", "");
  EXPECT_EQ(halfbyte_plan_status(quantize.get(), nullptr, nullptr, 0, &status), HALFBYTE_USAGE);
  args.scale = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "scale must not be NULL", refused());
  args.scale = x;
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize_linear: scale must have the shape [2], got [2, 4]", refused());
  args.scale = scale;
  args.codes = x;
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize_linear: codes must be i8, got f32", refused());
  Array<int8_t> wrong({4, 2});
  args.codes = wrong;
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize_linear: codes must have the shape [2, 4], got [4, 2]", refused());
  DLTensor alias = *static_cast<const DLTensor*>(codes);
  alias.data = x.values.data();
  args.codes = &alias;
  EXPECT_EQ(refused(), HALFBYTE_USAGE);
  EXPECT_EQ(std::string(halfbyte_last_error()).find("quantize_linear: codes must not overlap x"), 0u)
      << halfbyte_last_error();
  args.codes = codes;
  x->byte_offset = 2;
  EXPECT_EQ(refused(), HALFBYTE_USAGE);
  EXPECT_EQ(halfbyte_last_error_kind(), HALFBYTE_ERROR_KIND_MISALIGNED);
  EXPECT_STREQ(halfbyte_last_error_argument(), "x");
  x->byte_offset = 0;
  args.struct_size = 3;
  EXPECT_EQ(refused(), HALFBYTE_USAGE);
  halfbyte_memory_destroy(memory);
}

// ---- Observers

TEST(CApi, ScalesFromRanges) {
  auto config = INITIALISED(qparams_config);
  config.asymmetric = 1;
  config.scale_rule = HALFBYTE_SCALE_RULE_MINMAX;
  double scale = 0;
  int32_t zero_point = 0;
  EXPECT_OK(
      halfbyte_compute_qparams(-3, 2, &config, HALFBYTE_DTYPE_F32, HALFBYTE_DTYPE_F32, &scale, &zero_point));
  EXPECT_EQ(static_cast<float>(scale), 5.0f / 255);
  EXPECT_EQ(zero_point, 25);
  const auto compute = [&](double min, double max) {
    return halfbyte_compute_qparams(min, max, &config, HALFBYTE_DTYPE_F32, HALFBYTE_DTYPE_F32, &scale,
                                    &zero_point);
  };
  EXPECT_FAILS(HALFBYTE_BAD_INPUT, "compute_qparams: min must be at most max, got 2 and -3", compute(2, -3));
  EXPECT_EQ(zero_point, 25) << "written by a failure";
  EXPECT_FAILS(HALFBYTE_USAGE, "config must not be NULL",
               halfbyte_compute_qparams(0, 1, nullptr, 0, 0, &scale, &zero_point));
  EXPECT_FAILS(HALFBYTE_USAGE, "scale must not be NULL",
               halfbyte_compute_qparams(0, 1, &config, 0, 0, nullptr, &zero_point));
  config.q_max = 1000;
  EXPECT_FAILS(HALFBYTE_USAGE,
               "qparams config: q_min and q_max must be within [-128, 255], got -128 and 1000",
               compute(0, 1));
  config.asymmetric = 2;
  EXPECT_FAILS(HALFBYTE_USAGE, "config.asymmetric must be 0 or 1, got 2", compute(0, 1));
}

TEST(CApi, ObserversOfTheHost) {
  halfbyte_observer_kind kind = -1;
  EXPECT_OK(halfbyte_observer_kind_find("moving-average", &kind));
  EXPECT_EQ(kind, HALFBYTE_OBSERVER_MOVING_AVERAGE);
  EXPECT_STREQ(halfbyte_observer_kind_name(kind), "moving-average");
  EXPECT_EQ(halfbyte_observer_kind_name(4), nullptr);
  EXPECT_EQ(halfbyte_observer_kind_find("histogram", &kind), HALFBYTE_USAGE);

  auto config = INITIALISED(observer_config);
  config.kind = HALFBYTE_OBSERVER_MOVING_AVERAGE;
  config.momentum = 0.5;
  double min[2], max[2], other_min[2] = {-3, -1}, other_max[2] = {1, 1};
  auto state = INITIALISED(observer_state);
  state.min = min;
  state.max = max;
  state.num_groups = 2;
  EXPECT_OK(halfbyte_observer_state_reset(&state));
  EXPECT_EQ(min[1], INFINITY);
  const auto qparams_config = INITIALISED(qparams_config);
  double scale[2] = {};
  int32_t zero_point[2] = {};
  EXPECT_FAILS(
      HALFBYTE_USAGE, "observer has no data: group 0 of 2 has seen no finite value",
      halfbyte_observer_state_qparams(&state, &qparams_config, HALFBYTE_DTYPE_F32, scale, zero_point));
  const double batch_min[2] = {-1, 0}, batch_max[2] = {1, 127};
  EXPECT_OK(halfbyte_observer_state_update(&state, &config, batch_min, batch_max));
  EXPECT_OK(halfbyte_observer_state_qparams(&state, &qparams_config, HALFBYTE_DTYPE_F32, scale, zero_point));
  EXPECT_EQ(scale[1], 1);
  auto other = INITIALISED(observer_state);
  other.min = other_min;
  other.max = other_max;
  other.num_groups = 2;
  other.num_batches = 1;
  EXPECT_OK(halfbyte_observer_state_merge(&state, &config, &other));
  EXPECT_EQ(min[0], -2);
  EXPECT_EQ(state.num_batches, 2);
  const double bad[2] = {NAN, 0};
  EXPECT_EQ(halfbyte_observer_state_update(&state, &config, bad, batch_max), HALFBYTE_BAD_INPUT);
  EXPECT_EQ(min[0], -2);
  EXPECT_FAILS(HALFBYTE_USAGE, "batch_min must not be NULL",
               halfbyte_observer_state_update(&state, &config, nullptr, batch_max));
  other.num_groups = -1;
  EXPECT_FAILS(HALFBYTE_USAGE, "other.num_groups must not be negative, got -1",
               halfbyte_observer_state_merge(&state, &config, &other));
  config.momentum = NAN;
  EXPECT_FAILS(HALFBYTE_USAGE, "observer: momentum must be in (0, 1), got nan",
               halfbyte_observer_state_update(&state, &config, batch_min, batch_max));
  // Nothing is written behind a structure without the last member.
  auto shorter = INITIALISED(observer_state);
  shorter.struct_size = offsetof(halfbyte_observer_state, num_batches);
  shorter.num_batches = 99;
  EXPECT_OK(halfbyte_observer_state_reset(&shorter));
  EXPECT_EQ(shorter.num_batches, 99);

  Array<float> low({2}), high({2});
  Array<int64_t> batches({});
  EXPECT_OK(halfbyte_observer_store(&state, low, high, batches, nullptr));
  EXPECT_EQ(low.values[0], -2);
  EXPECT_EQ(batches.values[0], 2);
  EXPECT_OK(halfbyte_observer_reset(low, high, batches, nullptr));
  EXPECT_EQ(high.values[1], -INFINITY);
  EXPECT_OK(halfbyte_observer_load(low, high, batches, nullptr, &state));
  EXPECT_EQ(min[0], INFINITY);
  EXPECT_EQ(state.num_batches, 0);
  state.num_groups = 1;
  EXPECT_FAILS(HALFBYTE_USAGE, "state must have 2 groups of dtype 0, got 1 of 0",
               halfbyte_observer_load(low, high, batches, nullptr, &state));
}

TEST(CApi, MeansCountBatchesOfEachGroup) {
  auto config = INITIALISED(observer_config);
  config.kind = HALFBYTE_OBSERVER_PERCENTILE;
  double min[2], max[2], other_min[2] = {10, 20}, other_max[2] = {10, 20};
  int64_t counts[2] = {7, 7}, other_counts[2] = {1, 3};
  auto state = INITIALISED(observer_state), other = INITIALISED(observer_state);
  state.min = min;
  state.max = max;
  state.num_groups = other.num_groups = 2;
  state.group_batches = counts;
  other.min = other_min;
  other.max = other_max;
  other.group_batches = other_counts;
  EXPECT_OK(halfbyte_observer_state_reset(&state));
  EXPECT_EQ(counts[1], 0);
  const double zeros[2] = {};
  EXPECT_OK(halfbyte_observer_state_update(&state, &config, zeros, zeros));
  EXPECT_OK(halfbyte_observer_state_merge(&state, &config, &other));
  EXPECT_EQ(max[0], 5);
  EXPECT_EQ(max[1], 15);
  EXPECT_EQ(counts[0], 2);
  EXPECT_EQ(counts[1], 4);
  EXPECT_EQ(state.num_batches, 0);

  const int64_t shape[2] = {2, 1};
  auto descriptor = INITIALISED(observe_descriptor);
  descriptor.shape = shape;
  descriptor.ndim = 2;
  descriptor.granularity = HALFBYTE_GRANULARITY_CHANNEL;
  descriptor.axis = 0;
  descriptor.alignment = 4;
  descriptor.observer = &config;
  int32_t ndim = 0;
  int64_t count_shape[2] = {};
  EXPECT_OK(halfbyte_observe_descriptor_count_shape(&descriptor, &ndim, count_shape));
  EXPECT_EQ(ndim, 1);
  EXPECT_EQ(count_shape[0], 2);
  EXPECT_FAILS(HALFBYTE_USAGE, "count_shape must not be NULL",
               halfbyte_observe_descriptor_count_shape(&descriptor, &ndim, nullptr));
  halfbyte_plan* raw = nullptr;
  EXPECT_OK(halfbyte_observe_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan observe(raw);
  Array<float> x({2, 1}, {NAN, 35}), low({2}), high({2});
  Array<int64_t> batches({2});
  EXPECT_OK(halfbyte_observer_store(&state, low, high, batches, nullptr));
  auto args = INITIALISED(observe_args);
  args.x = x;
  args.min = low;
  args.max = high;
  args.num_batches = batches;
  alignas(16) std::byte workspace[64];
  EXPECT_OK(halfbyte_observe_run(observe.get(), nullptr, workspace, sizeof workspace, &args));
  EXPECT_OK(halfbyte_observer_load(low, high, batches, nullptr, &state));
  EXPECT_EQ(max[0], 5);
  EXPECT_EQ(max[1], 19);
  EXPECT_EQ(counts[0], 2);
  EXPECT_EQ(counts[1], 5);

  // One count does not tell how much each group weighs.
  state.group_batches = nullptr;
  EXPECT_FAILS(
      HALFBYTE_USAGE,
      "observer: num_batches of percentile must have a count of each of the 2 groups, got 1: a state "
      "with one count does not tell in how many batches each group had finite values",
      halfbyte_observer_state_update(&state, &config, zeros, zeros));
  EXPECT_FAILS(HALFBYTE_USAGE, "state must have group_batches, as num_batches has 2 counts",
               halfbyte_observer_load(low, high, batches, nullptr, &state));
  Array<int64_t> one({});
  state.group_batches = counts;
  EXPECT_FAILS(HALFBYTE_USAGE, "state must have no group_batches, as num_batches has 1 counts",
               halfbyte_observer_load(low, high, one, nullptr, &state));
  args.num_batches = one;
  EXPECT_FAILS(HALFBYTE_USAGE, "observe: num_batches must have the shape [2], got []",
               halfbyte_observe_run(observe.get(), nullptr, workspace, sizeof workspace, &args));
}

TEST(CApi, PlansOfObservers) {
  const int64_t shape[2] = {2, 4};
  auto config = INITIALISED(observer_config);
  auto descriptor = INITIALISED(observe_descriptor);
  descriptor.shape = shape;
  descriptor.ndim = 2;
  descriptor.granularity = HALFBYTE_GRANULARITY_CHANNEL;
  descriptor.axis = 0;
  descriptor.alignment = 4;
  descriptor.observer = &config;
  int32_t ndim = 0;
  int64_t state_shape[2] = {};
  EXPECT_OK(halfbyte_observe_descriptor_state_shape(&descriptor, &ndim, state_shape));
  EXPECT_EQ(ndim, 1);
  EXPECT_EQ(state_shape[0], 2);
  halfbyte_plan* raw = nullptr;
  EXPECT_OK(halfbyte_observe_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan observe(raw);
  Array<float> x({2, 4}, {1, NAN, -3, 2, 0, 4, 5, -127}), min({2}), max({2}), scale({2});
  Array<int64_t> num_batches({});
  EXPECT_OK(halfbyte_observer_reset(min, max, num_batches, nullptr));
  auto args = INITIALISED(observe_args);
  args.x = x;
  args.min = min;
  args.max = max;
  args.num_batches = num_batches;
  alignas(16) std::byte workspace[64];
  EXPECT_OK(halfbyte_observe_can_implement(observe.get(), &args));
  EXPECT_OK(halfbyte_observe_run(observe.get(), nullptr, workspace, sizeof workspace, &args));
  auto status = output<halfbyte_quantize_status>();
  EXPECT_OK(halfbyte_plan_status(observe.get(), nullptr, workspace, sizeof workspace, &status));
  EXPECT_EQ(status.first_nonfinite, 1);
  EXPECT_EQ(min.values, (std::vector<float>{-3, -127}));
  EXPECT_EQ(max.values, (std::vector<float>{2, 5}));
  EXPECT_EQ(num_batches.values[0], 1);

  auto qparams = INITIALISED(qparams_descriptor);
  qparams.shape = state_shape;
  qparams.ndim = 1;
  EXPECT_OK(halfbyte_compute_qparams_select(kCpu, &qparams, nullptr, &raw));
  const UniquePlan compute(raw);
  auto scale_args = INITIALISED(compute_qparams_args);
  scale_args.min = min;
  scale_args.max = max;
  scale_args.scale = scale;
  EXPECT_OK(halfbyte_compute_qparams_can_implement(compute.get(), &scale_args));
  EXPECT_OK(halfbyte_compute_qparams_run(compute.get(), nullptr, workspace, sizeof workspace, &scale_args));
  EXPECT_EQ(scale.values, (std::vector<float>{3.0f / 127, 1}));

  const auto refused = [&] { return halfbyte_observe_can_implement(observe.get(), &args); };
  EXPECT_FAILS(
      HALFBYTE_USAGE, "plan must be one of compute_qparams, got one of observe",
      halfbyte_compute_qparams_run(observe.get(), nullptr, workspace, sizeof workspace, &scale_args));
  args.min = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "min must not be NULL", refused());
  args.min = x;
  EXPECT_FAILS(HALFBYTE_USAGE, "observe: min must have the shape [2], got [2, 4]", refused());
  args.min = min;
  args.x = min;
  EXPECT_FAILS(HALFBYTE_USAGE, "observe: x must have the shape [2, 4], got [2]", refused());
  scale_args.zero_point = scale;
  EXPECT_FAILS(HALFBYTE_USAGE,
               "compute_qparams: zero_point must have no data, as descriptor.zero_point_dtype is not set",
               halfbyte_compute_qparams_can_implement(compute.get(), &scale_args));
  const auto select = [&] { return halfbyte_observe_select(kCpu, &descriptor, nullptr, &raw); };
  descriptor.ndim = -1;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.ndim must be 0 to 32, got -1", select());
  descriptor.ndim = 2;
  config.kind = 7;
  EXPECT_FAILS(HALFBYTE_USAGE, "config.kind must be 0 to 3, got 7", select());
  config.kind = HALFBYTE_OBSERVER_MIN_MAX;
  descriptor.axis = 2;
  EXPECT_FAILS(HALFBYTE_USAGE, "observe descriptor: axis must be in [-2, 2) for shape [2, 4], got 2",
               select());
  qparams.zero_point_dtype = HALFBYTE_DTYPE_F32;
  EXPECT_FAILS(HALFBYTE_USAGE, "qparams descriptor: zero_point_dtype must be i32, i8 or u8, got f32",
               halfbyte_compute_qparams_select(kCpu, &qparams, nullptr, &raw));
}

TEST(CApi, PlansOfPackedFormats) {
  auto spec = INITIALISED(quant_spec);
  spec.format = HALFBYTE_FORMAT_INT4;
  spec.asymmetric = 1;
  auto descriptor = INITIALISED(quantize_descriptor);
  descriptor.spec = &spec;
  descriptor.rows = 2;
  descriptor.cols = 128;
  descriptor.alignment = 4;
  halfbyte_plan* raw = nullptr;
  EXPECT_OK(halfbyte_quantize_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan quantize(raw);
  EXPECT_OK(halfbyte_dequantize_select(kCpu, &descriptor, nullptr, &raw));
  const UniquePlan dequantize(raw);
  auto sku = output<halfbyte_sku>();
  EXPECT_OK(halfbyte_plan_sku(quantize.get(), &sku));
  EXPECT_STREQ(sku.op, "quantize");
  EXPECT_STREQ(sku.dtypes, "f32 -> int4, scale f32, zero point u8");
  EXPECT_EQ(sku.op_kind, HALFBYTE_OP_QUANTIZE);
  EXPECT_EQ(sku.aux_element, HALFBYTE_DTYPE_U8);
  EXPECT_EQ(sku.layout, HALFBYTE_LAYOUT_HALFBYTE);

  // The bytes of the functions.
  Array<float> x({2, 128}, some_values(256)), y({2, 128}), decoded({2, 128});
  Array<uint8_t> codes({2, 64}), zeros({4}), expected_codes({2, 64}), expected_zeros({4});
  Array<float> scales({4}), expected_scales({4});
  x.values[77] = NAN;
  auto parts = INITIALISED(quantized), expected = INITIALISED(quantized);
  parts.codes = codes;
  parts.scales = scales;
  parts.zeros = zeros;
  expected.codes = expected_codes;
  expected.scales = expected_scales;
  expected.zeros = expected_zeros;
  auto status = output<halfbyte_quantize_status>();
  EXPECT_OK(halfbyte_quantize(x, &spec, nullptr, &expected, nullptr, nullptr, &status));
  EXPECT_OK(halfbyte_dequantize(&expected, &spec, decoded, nullptr));

  alignas(16) std::byte workspace[64];
  int64_t workspace_size = 0;
  EXPECT_OK(halfbyte_plan_workspace_size(quantize.get(), &workspace_size));
  ASSERT_LE(workspace_size, 64);
  auto args = INITIALISED(quantize_args);
  args.x = x;
  args.out = &parts;
  EXPECT_OK(halfbyte_quantize_can_implement(quantize.get(), &args));
  EXPECT_OK(halfbyte_quantize_run(quantize.get(), nullptr, workspace, sizeof workspace, &args));
  EXPECT_EQ(codes.values, expected_codes.values);
  EXPECT_EQ(scales.values, expected_scales.values);
  EXPECT_EQ(zeros.values, expected_zeros.values);
  status = output<halfbyte_quantize_status>();
  EXPECT_OK(halfbyte_plan_status(quantize.get(), nullptr, workspace, sizeof workspace, &status));
  EXPECT_EQ(status.num_nonfinite, 1);
  EXPECT_EQ(status.first_nonfinite, 77);
  auto back = INITIALISED(dequantize_args);
  back.in = &parts;
  back.y = y;
  EXPECT_OK(halfbyte_dequantize_can_implement(dequantize.get(), &back));
  EXPECT_OK(halfbyte_dequantize_run(dequantize.get(), nullptr, workspace, sizeof workspace, &back));
  EXPECT_EQ(y.values, decoded.values);

  const auto refused = [&] { return halfbyte_quantize_can_implement(quantize.get(), &args); };
  EXPECT_FAILS(HALFBYTE_USAGE, "plan must be one of dequantize, got one of quantize",
               halfbyte_dequantize_run(quantize.get(), nullptr, workspace, sizeof workspace, &back));
  EXPECT_FAILS(HALFBYTE_USAGE, "args must not be NULL",
               halfbyte_quantize_run(quantize.get(), nullptr, workspace, sizeof workspace, nullptr));
  EXPECT_EQ(halfbyte_quantize_run(quantize.get(), nullptr, nullptr, 8, &args), HALFBYTE_USAGE);
  args.out = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "out must not be NULL", refused());
  args.out = &parts;
  args.x = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "x must not be NULL", refused());
  args.x = x;
  parts.codes = zeros;
  EXPECT_FAILS(HALFBYTE_USAGE, "out->codes must have 128 elements, got 4", refused());
  parts.codes = scales;
  EXPECT_FAILS(HALFBYTE_USAGE, "out->codes must be u8, got f32", refused());
  parts.codes = codes;
  parts.zeros = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "quantize: out.zeros needs 4 bytes but has no data", refused());
  back.y = scales;
  EXPECT_EQ(halfbyte_dequantize_can_implement(dequantize.get(), &back), HALFBYTE_USAGE);
  EXPECT_EQ(std::string(halfbyte_last_error()).find("dequantize: y must have the rows and columns"), 0u)
      << halfbyte_last_error();

  raw = nullptr;
  const auto select = [&] { return halfbyte_quantize_select(kCpu, &descriptor, nullptr, &raw); };
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor must not be NULL",
               halfbyte_dequantize_select(kCpu, nullptr, nullptr, &raw));
  descriptor.dtype = 77;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.dtype must be 0 to 12, got 77", select());
  descriptor.dtype = HALFBYTE_DTYPE_F32;
  descriptor.alignment = 3;
  EXPECT_EQ(select(), HALFBYTE_USAGE);
  descriptor.alignment = 4;
  descriptor.spec = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.spec must not be NULL", select());
  EXPECT_EQ(raw, nullptr);
}

TEST(CApi, SelectRefusesBadDescriptorsAndDevices) {
  const int64_t shape[2] = {2, 4};
  const auto good = rows_of(shape);
  halfbyte_plan* plan = nullptr;
  const auto select = [&](const halfbyte_linear_descriptor& descriptor) {
    return halfbyte_quantize_linear_select(kCpu, &descriptor, nullptr, &plan);
  };
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor must not be NULL",
               halfbyte_quantize_linear_select(kCpu, nullptr, nullptr, &plan));
  EXPECT_FAILS(HALFBYTE_USAGE, "plan must not be NULL",
               halfbyte_quantize_linear_select(kCpu, &good, nullptr, nullptr));
  auto bad = good;
  bad.ndim = -1;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.ndim must be 0 to 32, got -1", select(bad));
  bad = good;
  bad.shape = nullptr;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.shape must not be NULL", select(bad));
  bad = good;
  bad.dtype = 77;
  EXPECT_FAILS(HALFBYTE_USAGE, "descriptor.dtype must be 0 to 12, got 77", select(bad));
  bad = good;
  bad.q_max = 300;
  EXPECT_EQ(select(bad), HALFBYTE_USAGE);
  EXPECT_NE(std::string(halfbyte_last_error()).find("300"), std::string::npos) << halfbyte_last_error();
  EXPECT_EQ(halfbyte_quantize_linear_select(kNoDevice, &good, nullptr, &plan), HALFBYTE_DEVICE);
  auto preference = INITIALISED(plan_preference);
  preference.num_threads = -1;
  EXPECT_EQ(halfbyte_quantize_linear_select(kCpu, &good, &preference, &plan), HALFBYTE_USAGE);
  EXPECT_EQ(plan, nullptr) << "a failure leaves the result as it was";
  halfbyte_plan_destroy(nullptr);
}

// ---- Weights of codes that were made elsewhere

TEST(CApi, CodesOfPlansAreWeightsAndBack) {
  Array<int8_t> codes({2, 3}, {-8, 7, 0, 3, -1, 2});
  Array<float> scale({2}, {0.5f, 2});
  Array<int32_t> zero_point({2}, {1, -3});
  const int64_t shape[] = {2, 3};
  auto descriptor = INITIALISED(linear_descriptor);
  descriptor.shape = shape;
  descriptor.ndim = 2;
  descriptor.granularity = HALFBYTE_GRANULARITY_CHANNEL;
  descriptor.axis = 0;
  descriptor.zero_point_dtype = HALFBYTE_DTYPE_I32;
  halfbyte_quantized_weight* weight = nullptr;
  ASSERT_EQ(halfbyte_quantized_weight_from_linear(&descriptor, codes, scale, zero_point, nullptr, &weight),
            HALFBYTE_OK)
      << halfbyte_last_error();
  auto parts = output<halfbyte_quantized_weight_parts>();
  EXPECT_OK(halfbyte_quantized_weight_get_parts(weight, &parts));
  const uint8_t expected[] = {120, 135, 128, 131, 127, 130};
  EXPECT_EQ(0, std::memcmp(parts.codes->data, expected, 6));
  EXPECT_EQ(static_cast<uint8_t*>(parts.zeros->data)[1], 125);
  halfbyte_linear_codes* back = nullptr;
  ASSERT_EQ(halfbyte_quantized_weight_to_linear(weight, nullptr, &back), HALFBYTE_OK);
  auto linear = output<halfbyte_linear_codes_parts>();
  EXPECT_OK(halfbyte_linear_codes_get(back, &linear));
  EXPECT_EQ(0, std::memcmp(linear.codes->data, codes.values.data(), 6));
  EXPECT_EQ(static_cast<int8_t*>(linear.zero_point->data)[1], -3);
  EXPECT_EQ(linear.descriptor.zero_point_dtype, HALFBYTE_DTYPE_I8);
  EXPECT_EQ(linear.descriptor.shape[1], 3);
  int32_t ndim = 0;
  int64_t scale_shape[2] = {};
  EXPECT_OK(halfbyte_linear_descriptor_scale_shape(&linear.descriptor, &ndim, scale_shape));
  EXPECT_EQ(scale_shape[0], 2);
  halfbyte_linear_codes_destroy(back);
  halfbyte_quantized_weight_destroy(weight);
  EXPECT_EQ(halfbyte_quantized_weight_from_linear(&descriptor, codes, scale, nullptr, nullptr, &weight),
            HALFBYTE_USAGE);
  zero_point.values[1] = 128;
  EXPECT_EQ(halfbyte_quantized_weight_from_linear(&descriptor, codes, scale, zero_point, nullptr, &weight),
            HALFBYTE_BAD_INPUT);
  EXPECT_FAILS(HALFBYTE_USAGE, "weight must not be NULL",
               halfbyte_quantized_weight_to_linear(nullptr, nullptr, &back));

  Array<uint8_t> flat({3}, {0x10, 0x32, 0x04});
  Array<double> scales({2}, {0.5, 0.1}), zeros({2}, {1.25, 3});
  const int64_t five[] = {1, 5};
  double max_error = -1;
  int64_t index = -1;
  ASSERT_EQ(halfbyte_quantized_weight_from_flat(HALFBYTE_FORMAT_INT4, 0, 3, flat, scales, zeros, five, 2,
                                                &weight, &max_error, &index),
            HALFBYTE_OK)
      << halfbyte_last_error();
  EXPECT_GE(index, 3);  // 0.1 is no f32
  EXPECT_GT(max_error, 0);
  EXPECT_LT(max_error, 1e-7);
  auto spec = output<halfbyte_quant_spec>();
  EXPECT_OK(halfbyte_quantized_weight_get_spec(weight, &spec));
  EXPECT_EQ(spec.format, HALFBYTE_FORMAT_AFFINE4);
  halfbyte_quantized_weight_destroy(weight);
  EXPECT_EQ(halfbyte_quantized_weight_from_flat(HALFBYTE_FORMAT_NF4, 1, 3, flat, scales, zeros, five, 2,
                                                &weight, nullptr, nullptr),
            HALFBYTE_USAGE);
}

// ---- Checkpoints

TEST(CApi, NoteOfAWeight) {
  const TestDirectory directory;
  const std::string path = directory / "gptq.safetensors";
  // [8, 16] in two groups, of even and of odd columns.
  const std::string header = R"({"a.qweight":{"dtype":"I32","shape":[2,8],"data_offsets":[0,64]},)"
                             R"("a.qzeros":{"dtype":"I32","shape":[2,1],"data_offsets":[64,72]},)"
                             R"("a.g_idx":{"dtype":"I32","shape":[16],"data_offsets":[72,136]},)"
                             R"("a.scales":{"dtype":"F16","shape":[2,8],"data_offsets":[136,168]}})";
  std::string data = std::string(64, '\0') + std::string(8, '\x77');
  for (int column = 0; column < 16; ++column)
    data += std::string(1, static_cast<char>(column % 2)) + std::string(3, '\0');
  for (int i = 0; i < 16; ++i) data += std::string("\x00\x3c", 2);  // 1
  std::string file(8, '\0');
  file[0] = static_cast<char>(header.size());
  file[1] = static_cast<char>(header.size() >> 8);
  std::ofstream(path, std::ios::binary) << file << header << data;
  halfbyte_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(halfbyte_checkpoint_open(path.c_str(), &checkpoint), HALFBYTE_OK) << halfbyte_last_error();
  auto weight = output<halfbyte_weight>();
  EXPECT_OK(halfbyte_checkpoint_get_weight(checkpoint, 0, &weight));
  EXPECT_STREQ(weight.name, "a.weight");
  EXPECT_EQ(weight.layout, HALFBYTE_LAYOUT_GPTQ);
  EXPECT_STREQ(weight.note, "act-order");
  halfbyte_checkpoint_close(checkpoint);
}

TEST(CApi, ForeignQuantizationIsNamed) {
  const TestDirectory directory;
  const std::string path = directory / "fp8.safetensors";
  const std::string header = R"({"a.weight":{"dtype":"F8_E5M2","shape":[1,2],"data_offsets":[0,2]},)"
                             R"("a.weight_scale":{"dtype":"F64","shape":[1],"data_offsets":[2,10]}})";
  std::string file(8, '\0');
  file[0] = static_cast<char>(header.size());
  std::ofstream(path, std::ios::binary) << file << header << std::string(10, '\0');
  halfbyte_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(halfbyte_checkpoint_open(path.c_str(), &checkpoint), HALFBYTE_OK) << halfbyte_last_error();
  auto info = output<halfbyte_checkpoint_info>();
  EXPECT_OK(halfbyte_checkpoint_get_info(checkpoint, &info));
  EXPECT_EQ(info.num_foreign, 1);
  auto weight = output<halfbyte_weight>();
  EXPECT_OK(halfbyte_checkpoint_get_weight(checkpoint, 0, &weight));
  EXPECT_STREQ(weight.foreign, "fp8");
  EXPECT_EQ(weight.note, nullptr);
  auto foreign = output<halfbyte_foreign>();
  EXPECT_OK(halfbyte_checkpoint_get_foreign(checkpoint, 0, &foreign));
  EXPECT_STREQ(foreign.method, "fp8");
  EXPECT_STREQ(foreign.layout, "");
  EXPECT_STREQ(foreign.source, "tensors");
  EXPECT_STREQ(foreign.example, "a.weight");
  EXPECT_EQ(foreign.num_weights, 1);
  ASSERT_EQ(foreign.num_parameters, 1);
  const char *key = nullptr, *value = nullptr;
  EXPECT_OK(halfbyte_checkpoint_get_foreign_parameter(checkpoint, 0, 0, &key, &value));
  EXPECT_STREQ(key, "granularity");
  EXPECT_STREQ(value, "\"tensor\"");
  EXPECT_EQ(halfbyte_checkpoint_get_foreign_parameter(checkpoint, 0, 1, &key, &value), HALFBYTE_USAGE);
  EXPECT_EQ(halfbyte_checkpoint_get_foreign_parameter(checkpoint, 0, 0, &key, nullptr), HALFBYTE_USAGE);
  EXPECT_EQ(halfbyte_checkpoint_get_foreign(checkpoint, 1, &foreign), HALFBYTE_USAGE);
  halfbyte_checkpoint_close(checkpoint);
}

TEST(CApi, CheckpointsAreReadWrittenAndCompared) {
  const TestDirectory directory;
  const std::string output_path = directory / "nf4", dense = directory / "dense";
  auto options = INITIALISED(quantize_options);
  options.num_threads = 1;
  const char* excluded[] = {"down_proj"};
  options.exclude = excluded;
  options.num_exclude = 1;
  int calls = 0;
  options.user_data = &calls;
  options.progress = [](const halfbyte_progress* progress, void* user_data) {
    EXPECT_EQ(progress->struct_size, sizeof *progress);
    EXPECT_LE(progress->done_bytes, progress->total_bytes);
    ++*static_cast<int*>(user_data);
    return 0;
  };
  halfbyte_report* report = nullptr;
  ASSERT_EQ(halfbyte_quantize_checkpoint(kModel.c_str(), output_path.c_str(), &options, &report), HALFBYTE_OK)
      << halfbyte_last_error();
  EXPECT_GT(calls, 0);
  auto info = output<halfbyte_report_info>();
  EXPECT_OK(halfbyte_report_get_info(report, &info));
  EXPECT_EQ(info.layout, HALFBYTE_LAYOUT_BITSANDBYTES);
  EXPECT_STREQ(info.input, kModel.c_str());
  EXPECT_GT(info.num_quantized, 0);
  EXPECT_EQ(info.reader, HALFBYTE_READER_TRANSFORMERS_5);
  EXPECT_STREQ(info.architecture, "LlamaForCausalLM");
  ASSERT_EQ(info.num_readers, 3);
  auto verdict = output<halfbyte_reader_verdict>();
  EXPECT_OK(halfbyte_report_get_reader(report, 0, &verdict));
  EXPECT_EQ(verdict.reader, HALFBYTE_READER_TRANSFORMERS_5);
  EXPECT_STREQ(verdict.why_not, "");
  EXPECT_EQ(halfbyte_report_get_reader(report, 3, &verdict), HALFBYTE_USAGE);
  EXPECT_EQ(info.num_left_out, 0);
  EXPECT_EQ(halfbyte_report_left_out(report, 0), nullptr);
  ASSERT_EQ(info.num_devices, 1);
  DLDevice device = kNoDevice;
  EXPECT_OK(halfbyte_report_get_device(report, 0, &device));
  EXPECT_EQ(device.device_type, kDLCPU);
  EXPECT_EQ(halfbyte_report_get_device(report, 1, &device), HALFBYTE_USAGE);
  EXPECT_GT(info.compute_seconds, 0);
  EXPECT_EQ(info.copy_seconds, 0);
  EXPECT_STREQ(info.device_note, "");
  EXPECT_STRNE(info.bottleneck, "");
  EXPECT_GT(info.num_copied_files, 0);
  EXPECT_NE(halfbyte_report_copied_file(report, 0), nullptr);
  EXPECT_EQ(halfbyte_report_copied_file(report, info.num_copied_files), nullptr);
  auto sharded = INITIALISED(quantize_options);
  sharded.shard_bytes = 1 << 20;
  const std::string shards = directory / "shards";
  EXPECT_OK(halfbyte_quantize_checkpoint(kModel.c_str(), shards.c_str(), &sharded, nullptr));
  EXPECT_TRUE(std::filesystem::exists(shards + "/model.safetensors.index.json"));
  EXPECT_EQ(halfbyte_report_skipped_file(report, info.num_skipped_files), nullptr);
  bool saw_excluded = false;
  for (int64_t i = 0; i < info.num_weights; ++i) {
    auto weight = output<halfbyte_weight_report>();
    EXPECT_OK(halfbyte_report_get_weight(report, i, &weight));
    auto spec = output<halfbyte_quant_spec>();
    if (weight.quantized) {
      EXPECT_EQ(weight.measured, 1);
      EXPECT_GT(weight.snr_db, 15);
      EXPECT_OK(halfbyte_report_get_spec(report, i, &spec));
      EXPECT_EQ(spec.format, HALFBYTE_FORMAT_NF4);
      auto encoding = output<halfbyte_encoding>();
      EXPECT_OK(halfbyte_report_get_encoding(report, i, &encoding));
      EXPECT_EQ(encoding.scale_rule, HALFBYTE_SCALE_RULE_ABSMAX);
    } else {
      EXPECT_EQ(halfbyte_report_get_spec(report, i, &spec), HALFBYTE_USAGE);
      auto encoding = output<halfbyte_encoding>();
      EXPECT_EQ(halfbyte_report_get_encoding(report, i, &encoding), HALFBYTE_USAGE);
      saw_excluded |= std::string(weight.reason) == "excluded";
    }
  }
  EXPECT_TRUE(saw_excluded);
  auto weight_report = output<halfbyte_weight_report>();
  EXPECT_FAILS(HALFBYTE_USAGE,
               fmt::format("weights: index must be 0 to {}, got -1", info.num_weights - 1).c_str(),
               halfbyte_report_get_weight(report, -1, &weight_report));
  halfbyte_report_destroy(report);

  halfbyte_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(halfbyte_checkpoint_open(output_path.c_str(), &checkpoint), HALFBYTE_OK);
  auto counts = output<halfbyte_checkpoint_info>();
  EXPECT_OK(halfbyte_checkpoint_get_info(checkpoint, &counts));
  EXPECT_EQ(counts.is_directory, 1);
  EXPECT_EQ(counts.num_weights, info.num_weights);
  EXPECT_GT(counts.num_tensors, counts.num_weights);
  int64_t index = 0;
  EXPECT_OK(halfbyte_checkpoint_find(checkpoint, "no such weight", &index));
  EXPECT_EQ(index, -1);
  EXPECT_OK(halfbyte_checkpoint_find(checkpoint, "model.layers.0.mlp.up_proj.weight", &index));
  ASSERT_GE(index, 0);
  auto weight = output<halfbyte_weight>();
  EXPECT_OK(halfbyte_checkpoint_get_weight(checkpoint, index, &weight));
  EXPECT_STREQ(weight.name, "model.layers.0.mlp.up_proj.weight");
  EXPECT_EQ(weight.layout, HALFBYTE_LAYOUT_BITSANDBYTES);
  EXPECT_EQ(weight.ndim, 2);
  EXPECT_GT(weight.num_parts, 1);
  EXPECT_NEAR(weight.bits_per_weight, 4.5, 0.1);
  auto spec = output<halfbyte_quant_spec>();
  EXPECT_OK(halfbyte_checkpoint_get_spec(checkpoint, index, &spec));
  EXPECT_EQ(spec.group_size, 64);
  auto tensor = output<halfbyte_stored_tensor>();
  EXPECT_OK(halfbyte_checkpoint_get_tensor(checkpoint, weight.parts[0], &tensor));
  EXPECT_STREQ(tensor.file, "model.safetensors");
  std::vector<uint8_t> bytes(16);
  EXPECT_OK(halfbyte_checkpoint_read(checkpoint, weight.parts[0], tensor.num_bytes - 16, 16, bytes.data()));
  EXPECT_FAILS(
      HALFBYTE_USAGE,
      fmt::format("bytes [{}, {} + 16) are not within tensor {} of {} bytes", tensor.num_bytes - 15,
                  tensor.num_bytes - 15, weight.parts[0], tensor.num_bytes)
          .c_str(),
      halfbyte_checkpoint_read(checkpoint, weight.parts[0], tensor.num_bytes - 15, 16, bytes.data()));
  EXPECT_FAILS(HALFBYTE_USAGE, "bytes must not be NULL",
               halfbyte_checkpoint_read(checkpoint, weight.parts[0], 0, 16, nullptr));
  Array<float> y({64});
  EXPECT_OK(halfbyte_checkpoint_decode(checkpoint, index, 64, y));
  EXPECT_NE(y.values[0], 0);
  EXPECT_EQ(halfbyte_checkpoint_decode(checkpoint, index, -1, y), HALFBYTE_USAGE);
  EXPECT_EQ(halfbyte_checkpoint_decode(checkpoint, counts.num_weights, 0, y), HALFBYTE_USAGE);
  EXPECT_OK(halfbyte_checkpoint_find(checkpoint, "model.norm.weight", &index));
  EXPECT_EQ(halfbyte_checkpoint_get_spec(checkpoint, index, &spec), HALFBYTE_USAGE) << "a dense weight";
  halfbyte_checkpoint_close(checkpoint);

  EXPECT_OK(halfbyte_dequantize_checkpoint(output_path.c_str(), dense.c_str(), nullptr, nullptr));
  auto convert = INITIALISED(convert_options);
  EXPECT_EQ(convert.verify, 1);
  const std::string converted = output_path + "-halfbyte";
  EXPECT_OK(halfbyte_convert_checkpoint(output_path.c_str(), converted.c_str(), &convert, &report));
  auto converted_info = output<halfbyte_report_info>();
  EXPECT_OK(halfbyte_report_get_info(report, &converted_info));
  EXPECT_EQ(converted_info.layout, HALFBYTE_LAYOUT_HALFBYTE);
  halfbyte_report_destroy(report);
  convert.layout = HALFBYTE_LAYOUT_AWQ;
  EXPECT_EQ(halfbyte_convert_checkpoint(output_path.c_str(), dense.c_str(), &convert, nullptr),
            HALFBYTE_BAD_INPUT);
  EXPECT_NE(std::string(halfbyte_last_error()).find("layout awq: does not hold nf4"), std::string::npos);
  EXPECT_EQ(convert.experts, HALFBYTE_UNSET);
  convert.experts = HALFBYTE_EXPERTS_PARAMETRIZE;
  EXPECT_EQ(halfbyte_convert_checkpoint(output_path.c_str(), dense.c_str(), &convert, nullptr),
            HALFBYTE_USAGE);
  EXPECT_NE(std::string(halfbyte_last_error()).find("only bitsandbytes has parametrize"), std::string::npos);
  convert.experts = HALFBYTE_EXPERTS_EXPERTS4BIT + 1;
  EXPECT_EQ(halfbyte_convert_checkpoint(output_path.c_str(), dense.c_str(), &convert, nullptr),
            HALFBYTE_USAGE);
  EXPECT_NE(std::string(halfbyte_last_error()).find("options.experts must be 0 to 2"), std::string::npos);
  halfbyte_comparison* comparison = nullptr;
  EXPECT_OK(halfbyte_compare_checkpoints(kModel.c_str(), dense.c_str(), nullptr, &comparison));
  int64_t num_rows = 0;
  EXPECT_OK(halfbyte_comparison_num_rows(comparison, &num_rows));
  EXPECT_EQ(num_rows, info.num_weights);
  auto row = output<halfbyte_comparison_row>();
  EXPECT_OK(halfbyte_comparison_get_row(comparison, 0, &row));
  EXPECT_STREQ(row.problem, "");
  EXPECT_GT(row.snr_db, 15);
  EXPECT_EQ(halfbyte_comparison_get_row(comparison, num_rows, &row), HALFBYTE_USAGE);
  halfbyte_comparison_destroy(comparison);
}

TEST(CApi, FaultsAreFoundAndMended) {
  const TestDirectory directory;
  const std::string path = directory / "quantized", mended = directory / "mended";
  auto quantize = INITIALISED(quantize_options);
  quantize.format = HALFBYTE_FORMAT_NVFP4;
  ASSERT_EQ(halfbyte_quantize_checkpoint(kModel.c_str(), path.c_str(), &quantize, nullptr), HALFBYTE_OK)
      << halfbyte_last_error();
  halfbyte_verification* verification = nullptr;
  EXPECT_OK(halfbyte_verify_checkpoint(path.c_str(), nullptr, &verification));
  int64_t num_faults = -1;
  EXPECT_OK(halfbyte_verification_num_faults(verification, &num_faults));
  EXPECT_EQ(num_faults, 0);
  halfbyte_verification_destroy(verification);
  EXPECT_EQ(halfbyte_repair_checkpoint(path.c_str(), mended.c_str(), nullptr, nullptr), HALFBYTE_USAGE);

  const std::string name = "model.layers.0.self_attn.k_proj.weight";
  float global_scale = 0;
  const Checkpoint checkpoint = Checkpoint::open(path);
  for (const StoredTensor& tensor : checkpoint.tensors()) {
    if (tensor.name != name + "_global_scale") continue;
    std::fstream file(path + "/" + tensor.file, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(tensor.offset));
    file.read(reinterpret_cast<char*>(&global_scale), sizeof global_scale);
    const float twice = 2 * global_scale;
    file.seekp(static_cast<std::streamoff>(tensor.offset));
    file.write(reinterpret_cast<const char*>(&twice), sizeof twice);
  }
  ASSERT_GT(global_scale, 0);

  const auto verify = INITIALISED(verify_options);
  ASSERT_EQ(halfbyte_verify_checkpoint(path.c_str(), &verify, &verification), HALFBYTE_OK);
  EXPECT_OK(halfbyte_verification_num_faults(verification, &num_faults));
  ASSERT_GT(num_faults, 0);
  auto fault = output<halfbyte_fault>();
  EXPECT_OK(halfbyte_verification_get_fault(verification, 0, &fault));
  EXPECT_STREQ(fault.rule, "global-scale-mismatch");
  EXPECT_NE(std::string(fault.name).find("model.layers.0.self_attn."), std::string::npos) << fault.name;
  EXPECT_STRNE(fault.text, "");
  EXPECT_FAILS(HALFBYTE_USAGE,
               fmt::format("faults: index must be 0 to {}, got {}", num_faults - 1, num_faults).c_str(),
               halfbyte_verification_get_fault(verification, num_faults, &fault));
  halfbyte_verification_destroy(verification);

  halfbyte_repair* repair = nullptr;
  ASSERT_EQ(halfbyte_repair_checkpoint(path.c_str(), mended.c_str(), nullptr, &repair), HALFBYTE_OK)
      << halfbyte_last_error();
  int64_t num_weights = 0;
  EXPECT_OK(halfbyte_repair_num_weights(repair, &num_weights));
  ASSERT_EQ(num_weights, 1);
  auto weight = output<halfbyte_repaired_weight>();
  EXPECT_OK(halfbyte_repair_get_weight(repair, 0, &weight));
  EXPECT_EQ(weight.name, name);
  EXPECT_EQ(weight.global_scale_before, 2 * global_scale);
  EXPECT_EQ(weight.global_scale, global_scale);
  EXPECT_GT(weight.num_scales, 0);
  EXPECT_EQ(halfbyte_repair_get_weight(repair, 1, &weight), HALFBYTE_USAGE);
  halfbyte_repair_destroy(repair);
  EXPECT_OK(halfbyte_verify_checkpoint(mended.c_str(), nullptr, &verification));
  EXPECT_OK(halfbyte_verification_num_faults(verification, &num_faults));
  EXPECT_EQ(num_faults, 0);
  halfbyte_verification_destroy(verification);

  auto options = INITIALISED(repair_options);
  EXPECT_EQ(halfbyte_repair_checkpoint(path.c_str(), mended.c_str(), &options, nullptr), HALFBYTE_EXISTS);
  options.force = 1;
  EXPECT_OK(halfbyte_repair_checkpoint(path.c_str(), mended.c_str(), &options, nullptr));
  options.progress = [](const halfbyte_progress*, void*) { return 1; };
  EXPECT_EQ(halfbyte_repair_checkpoint(path.c_str(), mended.c_str(), &options, nullptr), HALFBYTE_CANCELLED);
  auto cancelled = INITIALISED(verify_options);
  cancelled.progress = options.progress;
  EXPECT_EQ(halfbyte_verify_checkpoint(mended.c_str(), &cancelled, &verification), HALFBYTE_CANCELLED);
}

// A weight comes in, is changed, multiplied and goes out.
TEST(CApi, WeightsComeInAndGoOut) {
  const TestDirectory directory;
  const std::string quantized = directory / "quantized", out = directory / "out";
  const char* const name = "model.layers.0.mlp.up_proj.weight";
  auto options = INITIALISED(quantize_options);
  options.double_quant = 1;
  ASSERT_EQ(halfbyte_quantize_checkpoint(kModel.c_str(), quantized.c_str(), &options, nullptr), HALFBYTE_OK)
      << halfbyte_last_error();
  halfbyte_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(halfbyte_checkpoint_open(quantized.c_str(), &checkpoint), HALFBYTE_OK);
  int64_t index = -1, dense = -1;
  EXPECT_OK(halfbyte_checkpoint_find(checkpoint, name, &index));
  EXPECT_OK(halfbyte_checkpoint_find(checkpoint, "model.norm.weight", &dense));
  halfbyte_quantized_weight* weight = nullptr;
  ASSERT_EQ(halfbyte_checkpoint_load(checkpoint, index, kCpu, nullptr, nullptr, &weight), HALFBYTE_OK)
      << halfbyte_last_error();
  EXPECT_EQ(halfbyte_checkpoint_load(checkpoint, dense, kCpu, nullptr, nullptr, &weight), HALFBYTE_USAGE);
  EXPECT_EQ(halfbyte_checkpoint_load(checkpoint, -1, kCpu, nullptr, nullptr, &weight), HALFBYTE_USAGE);
  EXPECT_FAILS(HALFBYTE_USAGE, "weight must not be NULL",
               halfbyte_checkpoint_load(checkpoint, index, kCpu, nullptr, nullptr, nullptr));
  // Of double quantization, a part that begins with a block of scales; its own first half.
  const halfbyte_slice upper = {0, 0, 128}, lower = {0, 1, 128}, quarter = {0, 0, 64};
  halfbyte_quantized_weight *part = nullptr, *part_of_part = nullptr, *from_file = nullptr;
  ASSERT_EQ(halfbyte_checkpoint_load(checkpoint, index, kCpu, nullptr, &upper, &part), HALFBYTE_OK)
      << halfbyte_last_error();
  EXPECT_OK(halfbyte_quantized_weight_slice(part, &quarter, nullptr, &part_of_part));
  EXPECT_OK(halfbyte_checkpoint_load(checkpoint, index, kCpu, nullptr, &quarter, &from_file));
  auto some = output<halfbyte_quantized_weight_parts>(), others = some;
  EXPECT_OK(halfbyte_quantized_weight_get_parts(part_of_part, &some));
  EXPECT_OK(halfbyte_quantized_weight_get_parts(from_file, &others));
  ASSERT_EQ(some.codes->shape[0], others.codes->shape[0]);
  EXPECT_EQ(0, std::memcmp(some.codes->data, others.codes->data, static_cast<size_t>(some.codes->shape[0])));
  EXPECT_FAILS(
      HALFBYTE_USAGE,
      "load_weight: a weight [768, 256] has no slice 1 to 128 of axis 0: scale 4 is not the first of a "
      "block of 256 with an absmax: take a slice of expanded()",
      halfbyte_checkpoint_load(checkpoint, index, kCpu, nullptr, &lower, &from_file));
  EXPECT_FAILS(HALFBYTE_USAGE, "slice must not be NULL",
               halfbyte_quantized_weight_slice(weight, nullptr, nullptr, &part));
  for (halfbyte_quantized_weight* each : {part, part_of_part, from_file})
    halfbyte_quantized_weight_destroy(each);

  auto info = output<halfbyte_quantized_weight_info>();
  EXPECT_OK(halfbyte_quantized_weight_get_info(weight, &info));
  ASSERT_EQ(info.ndim, 2);
  const int64_t rows = info.shape[0], cols = info.shape[1];
  EXPECT_EQ(info.num_experts, 1);
  EXPECT_EQ(info.device.device_type, kDLCPU);
  auto spec = output<halfbyte_quant_spec>();
  EXPECT_OK(halfbyte_quantized_weight_get_spec(weight, &spec));
  EXPECT_EQ(spec.format, HALFBYTE_FORMAT_NF4);
  EXPECT_EQ(spec.double_quant, 1);
  auto parts = output<halfbyte_quantized_weight_parts>();
  EXPECT_OK(halfbyte_quantized_weight_get_parts(weight, &parts));
  ASSERT_NE(parts.codes, nullptr);
  EXPECT_EQ(parts.codes->shape[0], rows * cols / 2);
  EXPECT_EQ(parts.zeros, nullptr);
  ASSERT_NE(parts.map, nullptr);
  EXPECT_EQ(parts.map->shape[0], 256);

  // The packed form goes back to a weight that was made here.
  halfbyte_packed_tensor* packed = nullptr;
  ASSERT_EQ(halfbyte_quantized_weight_pack(weight, 0, nullptr, &packed), HALFBYTE_OK)
      << halfbyte_last_error();
  auto packed_weight = INITIALISED(packed_weight);
  EXPECT_OK(halfbyte_packed_tensor_get(packed, &packed_weight));
  EXPECT_EQ(packed_weight.rows, rows);
  halfbyte_quantized_weight *made = nullptr, *moved = nullptr;
  ASSERT_EQ(halfbyte_quantized_weight_create(&spec, info.shape, 2, HALFBYTE_DTYPE_BF16, kCpu, &made),
            HALFBYTE_OK);
  auto view = INITIALISED(weight_view);
  EXPECT_OK(halfbyte_quantized_weight_get_view(made, 0, &view));
  EXPECT_EQ(view.cols, cols);
  EXPECT_OK(halfbyte_reorder_from_packed(&packed_weight, &view, nullptr));
  EXPECT_OK(halfbyte_quantized_weight_to(made, kCpu, nullptr, &moved));
  auto back = output<halfbyte_quantized_weight_parts>();
  EXPECT_OK(halfbyte_quantized_weight_get_parts(moved, &back));
  EXPECT_EQ(0, std::memcmp(back.codes->data, parts.codes->data, static_cast<size_t>(rows * cols / 2)));
  EXPECT_EQ(0, std::memcmp(back.offset->data, parts.offset->data, 4));
  halfbyte_packed_tensor_destroy(packed);

  // Written into the place of the other.
  static_cast<uint8_t*>(back.codes->data)[0] ^= 0x11;
  auto wanted = INITIALISED(writer_options);
  const std::string base = quantized;
  wanted.base = base.c_str();
  wanted.layout = HALFBYTE_LAYOUT_BITSANDBYTES;
  halfbyte_writer* writer = nullptr;
  ASSERT_EQ(halfbyte_writer_create(out.c_str(), &wanted, &writer), HALFBYTE_OK) << halfbyte_last_error();
  EXPECT_OK(halfbyte_writer_set(writer, name, moved));
  EXPECT_FAILS(HALFBYTE_USAGE, fmt::format("writer: weight \"{}\" was given before", name).c_str(),
               halfbyte_writer_set(writer, name, moved));
  Array<float> norm({cols}, some_values(static_cast<size_t>(cols)));
  EXPECT_OK(halfbyte_writer_set_dense(writer, "model.norm.weight", norm));
  EXPECT_FAILS(HALFBYTE_USAGE, "dense must not be NULL", halfbyte_writer_set_dense(writer, "x", nullptr));
  halfbyte_report* report = nullptr;
  ASSERT_EQ(halfbyte_writer_finish(writer, &report), HALFBYTE_OK) << halfbyte_last_error();
  EXPECT_EQ(halfbyte_writer_finish(writer, nullptr), HALFBYTE_USAGE);
  halfbyte_writer_destroy(writer);
  halfbyte_report_destroy(report);
  halfbyte_quantized_weight_destroy(made);
  halfbyte_quantized_weight_destroy(weight);
  halfbyte_checkpoint_close(checkpoint);

  ASSERT_EQ(halfbyte_checkpoint_open(out.c_str(), &checkpoint), HALFBYTE_OK) << halfbyte_last_error();
  EXPECT_OK(halfbyte_checkpoint_find(checkpoint, name, &index));
  ASSERT_EQ(halfbyte_checkpoint_load(checkpoint, index, kCpu, nullptr, nullptr, &weight), HALFBYTE_OK);
  EXPECT_OK(halfbyte_quantized_weight_get_parts(weight, &parts));
  EXPECT_EQ(0, std::memcmp(back.codes->data, parts.codes->data, static_cast<size_t>(rows * cols / 2)));
  halfbyte_quantized_weight_destroy(weight);
  halfbyte_quantized_weight_destroy(moved);
  halfbyte_checkpoint_close(checkpoint);
  const int64_t shape[] = {4, 64};
  EXPECT_EQ(halfbyte_quantized_weight_create(&spec, shape, 0, HALFBYTE_DTYPE_F32, kCpu, &made),
            HALFBYTE_USAGE);
}

TEST(CApi, CheckpointFailuresHaveTheirStatus) {
  const TestDirectory directory;
  const std::string missing = directory / "missing", out = directory / "out";
  halfbyte_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(halfbyte_checkpoint_open(missing.c_str(), &checkpoint), HALFBYTE_IO);
  EXPECT_NE(std::string(halfbyte_last_error()).find(missing), std::string::npos) << halfbyte_last_error();
  EXPECT_EQ(checkpoint, nullptr);
  EXPECT_FAILS(HALFBYTE_USAGE, "path must not be NULL", halfbyte_checkpoint_open(nullptr, &checkpoint));
  EXPECT_FAILS(HALFBYTE_USAGE, "output must not be NULL",
               halfbyte_quantize_checkpoint(kModel.c_str(), nullptr, nullptr, nullptr));
  const std::string damaged = directory / "damaged.safetensors";
  std::ofstream(damaged) << "not a checkpoint at all";
  EXPECT_EQ(halfbyte_checkpoint_open(damaged.c_str(), &checkpoint), HALFBYTE_BAD_INPUT);

  auto options = INITIALISED(quantize_options);
  options.progress = [](const halfbyte_progress*, void*) { return 1; };
  halfbyte_report* report = nullptr;
  EXPECT_EQ(halfbyte_quantize_checkpoint(kModel.c_str(), out.c_str(), &options, &report), HALFBYTE_CANCELLED);
  EXPECT_EQ(report, nullptr);
  options.progress = [](const halfbyte_progress*, void*) -> int { throw std::bad_alloc(); };
  EXPECT_EQ(halfbyte_quantize_checkpoint(kModel.c_str(), out.c_str(), &options, &report), HALFBYTE_NO_MEMORY);
  EXPECT_EQ(directory.names(), std::vector<std::string>{"damaged.safetensors"})
      << "no output after a failure";
  options.progress = nullptr;
  options.devices = &kNoDevice;
  options.num_devices = 1;
  EXPECT_EQ(halfbyte_quantize_checkpoint(kModel.c_str(), out.c_str(), &options, &report), HALFBYTE_DEVICE);
  options.devices = &kCpu;
  options.layout = 17;
  EXPECT_FAILS(HALFBYTE_USAGE,
               fmt::format("options.layout must be 0 to {}, got 17", num_layouts() - 1).c_str(),
               halfbyte_quantize_checkpoint(kModel.c_str(), out.c_str(), &options, &report));
  options.layout = HALFBYTE_UNSET;
  const char* words[] = {"proj", nullptr};
  options.include = words;
  options.num_include = 2;
  EXPECT_FAILS(HALFBYTE_USAGE, "options.include must not be NULL",
               halfbyte_quantize_checkpoint(kModel.c_str(), out.c_str(), &options, &report));
  options.num_include = 1;
  options.dry_run = 1;
  halfbyte_report* plan = nullptr;
  EXPECT_OK(halfbyte_quantize_checkpoint(kModel.c_str(), out.c_str(), &options, &plan));
  EXPECT_FALSE(std::filesystem::exists(out));
  auto info = output<halfbyte_report_info>();
  EXPECT_OK(halfbyte_report_get_info(plan, &info));
  EXPECT_GT(info.total_seconds, info.run_seconds);
  EXPECT_GT(info.run_seconds, 0);
  EXPECT_STREQ(info.time_note, "");
  halfbyte_report_destroy(plan);
  std::filesystem::create_directory(out);
  options.dry_run = 0;
  EXPECT_EQ(halfbyte_quantize_checkpoint(kModel.c_str(), out.c_str(), &options, &report), HALFBYTE_EXISTS);
  halfbyte_checkpoint_close(nullptr);
  halfbyte_report_destroy(nullptr);
  halfbyte_comparison_destroy(nullptr);
}

// ---- The machine

TEST(CApi, SystemAndDevices) {
  auto info = output<halfbyte_system_info>();
  EXPECT_OK(halfbyte_get_system_info(&info));
  EXPECT_STREQ(info.version, kVersion);
  EXPECT_NE(std::string(info.compiled_targets).find(info.simd_target), std::string::npos);
  EXPECT_GE(info.num_threads, 1);

  halfbyte_cuda* cuda = nullptr;
  EXPECT_OK(halfbyte_cuda_query(&cuda));
  auto found = output<halfbyte_cuda_info>();
  EXPECT_OK(halfbyte_cuda_get_info(cuda, &found));
  EXPECT_TRUE(found.num_devices > 0 || *found.problem != '\0');
  auto device = output<halfbyte_cuda_device>();
  EXPECT_EQ(halfbyte_cuda_get_device(cuda, found.num_devices, &device), HALFBYTE_USAGE);
  halfbyte_cuda_destroy(cuda);

  EXPECT_OK(halfbyte_check_device(kCpu));
  EXPECT_EQ(halfbyte_check_device(kNoDevice), HALFBYTE_DEVICE);
}

TEST(CApi, StreamsMemoryAndCopies) {
  halfbyte_stream* stream = nullptr;
  EXPECT_OK(halfbyte_stream_create(kCpu, &stream));
  EXPECT_EQ(halfbyte_stream_handle(stream), nullptr);
  EXPECT_OK(halfbyte_stream_synchronize(stream));
  halfbyte_stream_destroy(stream);
  EXPECT_EQ(halfbyte_stream_create(kNoDevice, &stream), HALFBYTE_DEVICE);
  EXPECT_FAILS(HALFBYTE_USAGE, "stream must not be NULL", halfbyte_stream_synchronize(nullptr));

  halfbyte_memory *a = nullptr, *b = nullptr;
  EXPECT_OK(halfbyte_memory_create(kCpu, 4, &a));
  EXPECT_OK(halfbyte_memory_create_host(kCpu, 4, &b));
  std::memcpy(halfbyte_memory_data(a), "abc", 4);
  EXPECT_OK(halfbyte_copy(kCpu, halfbyte_memory_data(b), halfbyte_memory_data(a), 4, nullptr));
  EXPECT_STREQ(static_cast<const char*>(halfbyte_memory_data(b)), "abc");
  EXPECT_FAILS(HALFBYTE_USAGE, "copy: to and from must not be NULL",
               halfbyte_copy(kCpu, nullptr, halfbyte_memory_data(a), 4, nullptr));
  EXPECT_FAILS(HALFBYTE_USAGE, "copy: num_bytes must not be negative, got -1",
               halfbyte_copy(kCpu, halfbyte_memory_data(b), halfbyte_memory_data(a), -1, nullptr));
  halfbyte_memory_destroy(a);
  halfbyte_memory_destroy(b);
  EXPECT_EQ(halfbyte_memory_data(nullptr), nullptr);
  EXPECT_EQ(halfbyte_stream_handle(nullptr), nullptr);
  EXPECT_EQ(halfbyte_memory_create(kNoDevice, 4, &a), HALFBYTE_DEVICE);
  EXPECT_EQ(halfbyte_memory_create(kCpu, -4, &a), HALFBYTE_USAGE);
  if (!testing::kSanitized) {  // AddressSanitizer ends the process instead
    EXPECT_EQ(halfbyte_memory_create(kCpu, INT64_MAX, &a), HALFBYTE_NO_MEMORY);
  }
}

// ---- Kernels

TEST(CApi, KernelsAreListedAndChosen) {
  int64_t num_kernels = 0;
  EXPECT_OK(halfbyte_kernel_count(&num_kernels));
  ASSERT_GT(num_kernels, 0);
  auto kernel = output<halfbyte_kernel>();
  EXPECT_OK(halfbyte_kernel_get(0, &kernel));
  ASSERT_GT(kernel.num_keys, 0);
  auto key = output<halfbyte_kernel_key>();
  EXPECT_OK(halfbyte_kernel_get_key(0, 0, &key));
  ASSERT_GT(key.num_values, 0);
  EXPECT_NE(halfbyte_kernel_key_value(0, 0, 0), nullptr);
  EXPECT_EQ(halfbyte_kernel_key_value(0, 0, key.num_values), nullptr);
  EXPECT_EQ(halfbyte_kernel_get(num_kernels, &kernel), HALFBYTE_USAGE);
  EXPECT_EQ(halfbyte_kernel_get_key(0, kernel.num_keys, &key), HALFBYTE_USAGE);

  const halfbyte_kernel_setting settings[] = {{"format", "nf4"}};
  int64_t index = -1;
  EXPECT_OK(halfbyte_kernel_choose("dequantize", settings, 1, &index));
  EXPECT_OK(halfbyte_kernel_get(index, &kernel));
  EXPECT_STREQ(kernel.op, "dequantize");
  EXPECT_EQ(halfbyte_kernel_choose("multiply", nullptr, 0, &index), HALFBYTE_USAGE);
  EXPECT_FAILS(HALFBYTE_USAGE, "settings must not be NULL",
               halfbyte_kernel_choose("dequantize", nullptr, 1, &index));
  EXPECT_TRUE(kernel.plain);

  halfbyte_blob* json = nullptr;
  EXPECT_OK(halfbyte_kernel_describe(kernel.name, settings, 1, &json));
  const std::string text = static_cast<const char*>(halfbyte_blob_data(json));
  EXPECT_EQ(static_cast<int64_t>(text.size()), halfbyte_blob_size(json));
  EXPECT_NE(text.find("\"kernel\": \"halfbyte_dequantize\""), std::string::npos) << text;
  halfbyte_blob_destroy(json);
  json = nullptr;
  EXPECT_FAILS(
      HALFBYTE_USAGE,
      "kernel dequantize takes a struct of this version of the library: only plain kernels are described",
      halfbyte_kernel_describe("dequantize", settings, 1, &json));
  EXPECT_EQ(halfbyte_kernel_describe("x", nullptr, 0, &json), HALFBYTE_USAGE);
  EXPECT_FAILS(HALFBYTE_USAGE, "json must not be NULL",
               halfbyte_kernel_describe(kernel.name, settings, 1, nullptr));
  EXPECT_EQ(json, nullptr);
}

TEST(CApi, KernelsAreEmittedAndPacked) {
  int64_t num_targets = 0;
  if (halfbyte_kernel_target_count(&num_targets) == HALFBYTE_DEVICE) GTEST_SKIP() << halfbyte_last_error();
  ASSERT_GT(num_targets, 0);
  const char* target = nullptr;
  EXPECT_OK(halfbyte_kernel_target_get(0, &target));
  EXPECT_EQ(halfbyte_kernel_target_get(num_targets, &target), HALFBYTE_USAGE);
  const halfbyte_kernel_setting settings[] = {{"format", "nf4"}, {"dtype", "f32"}};
  halfbyte_blob* blob = nullptr;
  ASSERT_EQ(halfbyte_kernel_emit_ptx("dequantize", settings, 2, target, &blob), HALFBYTE_OK)
      << halfbyte_last_error();
  const std::string ptx = static_cast<const char*>(halfbyte_blob_data(blob));
  EXPECT_EQ(static_cast<int64_t>(ptx.size()), halfbyte_blob_size(blob));
  EXPECT_NE(ptx.find(".entry dequantize"), std::string::npos);
  halfbyte_blob_destroy(blob);
  EXPECT_OK(halfbyte_kernel_emit_cubin("dequantize", settings, 2, target, &blob));
  EXPECT_EQ(0, std::memcmp(halfbyte_blob_data(blob),
                           "\x7F"
                           "ELF",
                           4));
  halfbyte_blob_destroy(blob);
  blob = nullptr;
  EXPECT_EQ(halfbyte_kernel_emit_ptx("dequantize", settings, 2, "sm_11", &blob), HALFBYTE_USAGE);
  EXPECT_EQ(blob, nullptr);
  EXPECT_EQ(halfbyte_blob_size(nullptr), 0);

  const TestDirectory directory;
  const std::string path = directory / "kernels.hbk";
  auto options = INITIALISED(kernel_pack_options);
  const char *ops[] = {"dequantize"}, *formats[] = {"nf4"}, *dtypes[] = {"f32"};
  options.targets = &target;
  options.num_targets = 1;
  options.ops = ops;
  options.formats = formats;
  options.dtypes = dtypes;
  options.num_ops = options.num_formats = options.num_dtypes = 1;
  int64_t count = 0;
  EXPECT_OK(halfbyte_kernel_pack_count(&options, &count));
  EXPECT_GT(count, 0);
  options.num_shards = static_cast<int32_t>(count);  // one kernel
  options.progress = [](int64_t, int64_t, void*) { return 1; };
  auto info = output<halfbyte_kernel_pack_info>();
  EXPECT_EQ(halfbyte_kernel_pack_write(path.c_str(), &options, &info), HALFBYTE_CANCELLED);
  EXPECT_TRUE(directory.names().empty());
  options.progress = nullptr;
  EXPECT_OK(halfbyte_kernel_pack_write(path.c_str(), &options, &info));
  EXPECT_EQ(info.num_kernels, 1);
  EXPECT_EQ(info.num_bytes, std::filesystem::file_size(path));
  EXPECT_OK(halfbyte_kernel_pack_load(path.c_str(), &info));
  EXPECT_EQ(info.num_matching, 1);
  EXPECT_EQ(halfbyte_kernel_pack_load((directory / "none").c_str(), nullptr), HALFBYTE_IO);
}

}  // namespace
}  // namespace halfbyte
