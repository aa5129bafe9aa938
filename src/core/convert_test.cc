// Codes of integer plans and of flat buffers as weights, against plain loops.
#include "halfbyte/convert.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "core/checks.h"
#include "halfbyte/qgemm.hpp"
#include "io/test_directory.h"

namespace halfbyte {
namespace {

Tensor random_tensor(DType dtype, const std::vector<int64_t>& shape, double mean) {
  std::mt19937 random(5);
  std::normal_distribution<double> normal(mean, 1);
  Tensor tensor({}, dtype, shape);
  for (int64_t i = 0; i < tensor.num_elements(); ++i) {
    const double x = normal(random);
    if (dtype == DType::f64) reinterpret_cast<double*>(tensor.data())[i] = x;
    if (dtype == DType::f32) reinterpret_cast<float*>(tensor.data())[i] = static_cast<float>(x);
    // Of bf16 and f16 only the high bits: any are fine.
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
    if (dtype == DType::bf16)
      reinterpret_cast<uint16_t*>(tensor.data())[i] = static_cast<uint16_t>(bits >> 16);
    if (dtype == DType::f16)
      reinterpret_cast<uint16_t*>(tensor.data())[i] =
          static_cast<uint16_t>((bits >> 16 & 0x8000) | (0x3800 + (bits >> 13 & 0x7FF)));
  }
  return tensor;
}

double float_at(const Tensor& tensor, int64_t i) {
  switch (tensor.dtype()) {
    case DType::f64:
      return reinterpret_cast<const double*>(tensor.data())[i];
    case DType::f32:
      return static_cast<double>(reinterpret_cast<const float*>(tensor.data())[i]);
    case DType::bf16:
      return static_cast<double>(
          std::bit_cast<float>(uint32_t{reinterpret_cast<const uint16_t*>(tensor.data())[i]} << 16));
    default: {
      const uint32_t bits = reinterpret_cast<const uint16_t*>(tensor.data())[i];
      const double sign = (bits & 0x8000) != 0 ? -1 : 1;
      const int exponent = static_cast<int>(bits >> 10 & 31), mantissa = static_cast<int>(bits & 1023);
      return sign * (exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25));
    }
  }
}

// Integers of any dtype, those of 4 bits in rows that begin at bytes.
int int_at(const Tensor& tensor, int64_t i) {
  if (tensor.dtype() == DType::i32) return reinterpret_cast<const int32_t*>(tensor.data())[i];
  const auto* const bytes = reinterpret_cast<const uint8_t*>(tensor.data());
  if (tensor.dtype() == DType::i8) return static_cast<int8_t>(bytes[i]);
  if (tensor.dtype() == DType::u8) return bytes[i];
  const int64_t cols = tensor.shape().empty() ? 1 : tensor.shape().back();
  const int code = bytes[i / cols * ((cols + 1) / 2) + i % cols / 2] >> (i % cols % 2 * 4) & 15;
  return tensor.dtype() == DType::i4 && code > 7 ? code - 16 : code;
}

template <class Op>
void run_plan(const typename Op::Descriptor& descriptor, const typename Op::Args& args) {
  const auto plan = Plan<Op>::select({}, descriptor);
  const Memory workspace({}, plan.workspace_size());
  plan.run(nullptr, workspace, args);
}

struct Linear {
  LinearDescriptor descriptor;
  Tensor codes, scale, zero_point;
};

Linear quantized(LinearDescriptor d, const Tensor& x) {
  d.computed = true;
  Linear linear{d, Tensor({}, d.code_dtype, d.shape), Tensor({}, d.scale_dtype, d.scale_shape()), {}};
  QuantizeLinear::Args args{x.view(), linear.codes.view(), linear.scale.view(), {}};
  if (d.zero_point_dtype) {
    linear.zero_point = Tensor({}, *d.zero_point_dtype, d.scale_shape());
    args.zero_point = linear.zero_point.view();
  }
  run_plan<QuantizeLinear>(d, args);
  linear.descriptor.computed = false;
  return linear;
}

// The number of the scale of an element.
int64_t group_at(const LinearDescriptor& d, int64_t i) {
  const int64_t cols = d.shape.back();
  if (d.granularity == Granularity::tensor) return 0;
  if (d.granularity == Granularity::channel) return i / cols;
  return i / cols * ((cols + d.group_size - 1) / d.group_size) + i % cols / d.group_size;
}

std::vector<LinearDescriptor> descriptors() {
  std::vector<LinearDescriptor> result;
  const std::vector<std::vector<int64_t>> shapes = {{7, 33}, {4, 64}, {1, 5}, {3, 5, 31}, {40}};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64})
    for (const DType code_dtype : {DType::i4, DType::u4, DType::i8, DType::u8})
      for (const std::optional<DType> zero :
           {std::optional<DType>(), std::optional(DType::i32), std::optional(code_dtype)})
        for (const Granularity granularity : {Granularity::tensor, Granularity::channel, Granularity::group})
          for (const auto& shape : shapes) {
            if (granularity == Granularity::channel && shape.size() != 2) continue;
            LinearDescriptor d;
            d.shape = shape;
            d.granularity = granularity;
            if (granularity == Granularity::channel) d.axis = 0;
            if (granularity == Granularity::group) d.group_size = 16;
            d.dtype = dtype;
            d.code_dtype = code_dtype;
            d.zero_point_dtype = zero;
            if (dtype == DType::f16 || dtype == DType::bf16)
              d.scale_dtype = shape.size() == 2 ? dtype : DType::f32;
            const bool four = is_packed(code_dtype);
            d.q_min = code_dtype == DType::i4 ? -8 : code_dtype == DType::i8 ? -100 : 0;
            d.q_max = four ? d.q_min + 15 : d.q_min + 200;
            if (zero) d.scale_rule = ScaleRule::minmax;
            result.push_back(d);
          }
  return result;
}

TEST(Convert, CodesOfPlansAreWeightsAndBack) {
  for (const LinearDescriptor& d : descriptors()) {
    SCOPED_TRACE(fmt::format("{} {} zero {} {} [{}]", to_string(d.dtype), to_string(d.code_dtype),
                             d.zero_point_dtype ? to_string(*d.zero_point_dtype) : "none",
                             to_string(d.granularity), fmt::join(d.shape, ", ")));
    const Linear linear = quantized(d, random_tensor(d.dtype, d.shape, d.zero_point_dtype ? 0.7 : 0));
    const QuantizedTensor q = from_linear(linear.descriptor, linear.codes.view(), linear.scale.view(),
                                          d.zero_point_dtype ? linear.zero_point.view() : TensorView{});
    EXPECT_EQ(q.spec.format, is_packed(d.code_dtype) ? Format::int4 : Format::int8);
    const Tensor y({}, DType::f64, d.shape);
    dequantize(q, y.view());
    for (int64_t i = 0; i < y.num_elements(); ++i) {
      const int64_t g = group_at(d, i);
      const int zero = d.zero_point_dtype ? int_at(linear.zero_point, g) : 0;
      ASSERT_EQ(float_at(y, i), (int_at(linear.codes, i) - zero) * float_at(linear.scale, g)) << i;
    }
    const LinearCodes back = to_linear(q);
    const Tensor z({}, back.descriptor.dtype, d.shape), expected({}, back.descriptor.dtype, d.shape);
    run_plan<DequantizeLinear>(back.descriptor,
                               {back.codes.view(), back.scale.view(),
                                q.spec.asymmetric ? back.zero_point.view() : TensorView{}, z.view()});
    dequantize(q, expected.view());
    EXPECT_EQ(0, std::memcmp(z.data(), expected.data(), static_cast<size_t>(z.num_bytes())));
    if (back.codes.dtype() == d.code_dtype) {
      EXPECT_EQ(0, std::memcmp(back.codes.data(), linear.codes.data(),
                               static_cast<size_t>(back.codes.num_bytes())));
    }
    if (HasFailure()) return;
  }
}

// Every integer format, all codes, in all that a plan can have.
TEST(Convert, EveryIntegerWeightIsCodesOfAPlan) {
  for (const FormatInfo& format : all_formats()) {
    if (format.kind != FormatKind::integer) continue;
    for (const bool asymmetric : {false, true})
      for (const Granularity granularity :
           {Granularity::tensor, Granularity::channel, Granularity::group, Granularity::flat}) {
        const QuantSpec spec{.format = format.format,
                             .asymmetric = asymmetric,
                             .granularity = granularity,
                             .group_size = 13,
                             .scale_dtype = DType::f16};
        SCOPED_TRACE(fmt::format("{} {} {}", format.name, asymmetric, to_string(granularity)));
        const std::vector<int64_t> shape = {3, 5, 39};
        const QuantizedTensor q = quantize(random_tensor(DType::f32, shape, 0.3).view(), spec);
        const LinearCodes back = to_linear(q);
        const Tensor z({}, DType::f16, shape), expected({}, DType::f16, shape);
        run_plan<DequantizeLinear>(back.descriptor,
                                   {back.codes.view(), back.scale.view(),
                                    asymmetric ? back.zero_point.view() : TensorView{}, z.view()});
        dequantize(q, expected.view());
        EXPECT_EQ(0, std::memcmp(z.data(), expected.data(), static_cast<size_t>(z.num_bytes())));
      }
  }
}

// Rows without elements have a scale in a plan, and none in a weight.
TEST(Convert, WeightsWithoutElementsAreCodesOfAPlan) {
  for (const Granularity granularity : {Granularity::channel, Granularity::group})
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{256, 0}, {0, 64}, {2, 3, 0}, {0}}) {
      const QuantSpec spec{
          .format = Format::int4, .asymmetric = true, .granularity = granularity, .group_size = 32};
      SCOPED_TRACE(fmt::format("{} [{}]", to_string(granularity), fmt::join(shape, ", ")));
      const LinearCodes codes = to_linear(QuantizedTensor(spec, shape, DType::f32));
      EXPECT_EQ(codes.codes.num_elements(), 0);
      for (int64_t i = 0; i < codes.scale.num_elements(); ++i) EXPECT_EQ(float_at(codes.scale, i), 0);
      for (int64_t i = 0; i < codes.zero_point.num_elements(); ++i)
        EXPECT_EQ(int_at(codes.zero_point, i), -8);
    }
}

// A plan's codes per group, multiplied, against sums in f64.
TEST(Convert, ProductsOfCodesOfPlans) {
  const int64_t m = 3, n = 37, k = 200;
  for (const DType code_dtype : {DType::i4, DType::u4, DType::i8, DType::u8})
    for (const bool packed : {true, false}) {
      LinearDescriptor d = LinearDescriptor::per_group({n, k}, 64);
      d.code_dtype = code_dtype;
      d.zero_point_dtype = DType::i32;
      d.scale_rule = ScaleRule::minmax;
      d.q_min = code_dtype == DType::i4 ? -8 : code_dtype == DType::i8 ? -128 : 0;
      d.q_max = d.q_min + (is_packed(code_dtype) ? 15 : 255);
      const Linear linear = quantized(d, random_tensor(DType::f32, {n, k}, 0.5));
      const QuantizedTensor q =
          from_linear(linear.descriptor, linear.codes.view(), linear.scale.view(), linear.zero_point.view());
      const Tensor x = random_tensor(DType::f32, {m, k}, 0.1), y({}, DType::f32, {m, n});
      const PackedTensor weight = q.pack();
      Qgemm::Args args{.x = x.view(), .y = y.view()};
      if (packed)
        args.weight = weight.view();
      else
        args.view = q.weight_view();
      run_plan<Qgemm>({.spec = q.spec, .m = m, .n = n, .k = k, .dtype = DType::f32, .packed = packed}, args);
      for (int64_t i = 0; i < m * n; ++i) {
        double sum = 0, magnitude = 0;
        for (int64_t j = 0; j < k; ++j) {
          const int64_t element = i % n * k + j, g = group_at(d, element);
          const double w =
              (int_at(linear.codes, element) - int_at(linear.zero_point, g)) * float_at(linear.scale, g);
          sum += float_at(x, i / n * k + j) * w;
          magnitude += std::abs(float_at(x, i / n * k + j) * w);
        }
        ASSERT_NEAR(float_at(y, i), sum, 2 * static_cast<double>(k) * 0x1p-24 * magnitude);
      }
    }
}

TEST(Convert, WhatHasNoExactFormIsRefused) {
  const Tensor codes({}, DType::i8, {4, 6}), scale({}, DType::f32, {4}), zeros({}, DType::i32, {4});
  std::memset(codes.data(), 0, 24);
  std::memset(zeros.data(), 0, 16);
  for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(scale.data())[i] = 1;
  LinearDescriptor d = LinearDescriptor::per_channel({4, 6}, 0);
  d.zero_point_dtype = DType::i32;
  const auto convert = [&] { from_linear(d, codes.view(), scale.view(), zeros.view()); };
  EXPECT_NO_THROW(convert());
  reinterpret_cast<int32_t*>(zeros.data())[2] = 128;
  expect_error(ErrorCode::bad_input, "zero point 2 is 128, not a value of i8", convert);
  reinterpret_cast<int32_t*>(zeros.data())[2] = INT32_MIN;
  expect_error(ErrorCode::bad_input, "zero point 2 is -2147483648", convert);
  reinterpret_cast<int32_t*>(zeros.data())[2] = -128;
  EXPECT_NO_THROW(convert());
  d.q_max = 5;
  codes.data()[7] = std::byte{6};
  expect_error(ErrorCode::bad_input, "code 7 is 6, outside of [-128, 5]", convert);
  codes.data()[7] = std::byte{5};
  reinterpret_cast<float*>(scale.data())[3] = -1;
  expect_error(ErrorCode::bad_input, "scale 3 is -1", convert);
  reinterpret_cast<float*>(scale.data())[3] = 1;
  d.axis = 1;
  expect_error(ErrorCode::usage, "axis 0 of two, got axis 1 of 2", convert);
  d = LinearDescriptor::per_group({4, 6}, 2, 0);
  expect_error(ErrorCode::usage, "along its last axis, got axis 0 of 2", convert);
  d = LinearDescriptor::per_channel({4, 6}, 0);
  expect_error(ErrorCode::usage, "zero_point must have no data", convert);
  d.dtype = d.scale_dtype = DType::f64;
  expect_error(ErrorCode::usage, "scale_dtype must be f32, f16 or bf16", convert);
  const Tensor x = random_tensor(DType::f32, {4, 6}, 0);
  expect_error(ErrorCode::usage, "format must be of integers, got nf4",
               [&] { to_linear(quantize(x.view(), QuantSpec{})); });
  const QuantSpec across{.format = Format::int4, .granularity = Granularity::flat, .group_size = 4};
  expect_error(ErrorCode::usage, "groups of 4 that run across rows of 6",
               [&] { to_linear(quantize(x.view(), across)); });
}

TEST(Convert, FlatBuffersAreWeights) {
  std::mt19937 random(3);
  for (const DType dtype : {DType::f32, DType::f64, DType::bf16})
    for (const int64_t group_size : {1, 16, 21, 64, 1000})
      for (const int form : {0, 1, 2, 3}) {  // int4 symmetric, asymmetric, without zeros; nf4
        const std::vector<int64_t> shape = {3, 43};
        const int64_t n = 129, groups = (n + group_size - 1) / group_size;
        const Tensor codes({}, DType::u8, {(n + 1) / 2}), scales = random_tensor(dtype, {groups}, 3),
                                                          zeros = random_tensor(dtype, {groups}, 7);
        for (int64_t i = 0; i < codes.num_elements(); ++i) codes.data()[i] = static_cast<std::byte>(random());
        FlatCodes flat{.format = form == 3 ? Format::nf4 : Format::int4,
                       .symmetric = form == 0,
                       .group_size = group_size};
        flat.codes = codes.view();
        flat.scales = scales.view();
        if (form == 1) flat.zeros = zeros.view();
        const Conversion converted = from_flat(flat, shape);
        const Tensor y({}, DType::f32, shape);
        dequantize(converted.weight, y.view());
        const float nf4[] = {-1,
                             -0.6961928009986877f,
                             -0.5250730514526367f,
                             -0.39491748809814453f,
                             -0.28444138169288635f,
                             -0.18477343022823334f,
                             -0.09105003625154495f,
                             0,
                             0.07958029955625534f,
                             0.16093020141124725f,
                             0.24611230194568634f,
                             0.33791524171829224f,
                             0.44070982933044434f,
                             0.5626170039176941f,
                             0.7229568362236023f,
                             1};
        double most = 0;
        for (int64_t i = 0; i < n; ++i) {
          const int code = std::to_integer<int>(codes.data()[i / 2]) >> (i % 2 * 4) & 15;
          const double scale = float_at(scales, i / group_size), zero = float_at(zeros, i / group_size);
          const double value = form == 3 ? static_cast<double>(nf4[code])
                                         : code - (form == 0   ? 8.0
                                                   : form == 1 ? zero
                                                               : 0.0);
          double expected = value * scale;
          if (dtype != DType::f64) {  // as f32 computes it
            const float difference = static_cast<float>(value);
            expected = static_cast<double>(difference * static_cast<float>(scale));
          }
          most = std::max(most, std::abs(float_at(y, i) - expected));
        }
        EXPECT_EQ(converted.max_error, most) << to_string(dtype) << " " << group_size << " form " << form;
        if (dtype != DType::f64 && form != 1) {
          EXPECT_EQ(most, 0);
        }
        EXPECT_LT(most, 1e-5);
      }
  FlatCodes flat{.format = Format::int8};
  expect_error(ErrorCode::usage, "format must be int4 or nf4", [&] { from_flat(flat, {2, 2}); });
  const Tensor codes({}, DType::u8, {2}), scales = random_tensor(DType::f64, {1}, 0);
  flat = {.codes = codes.view(), .scales = scales.view()};
  EXPECT_NO_THROW(from_flat(flat, {2, 2}));
  expect_error(ErrorCode::usage, "codes", [&] { from_flat(flat, {2, 3}); });
  reinterpret_cast<double*>(scales.data())[0] = 1e300;
  expect_error(ErrorCode::bad_input, "group 0 has scale", [&] { from_flat(flat, {2, 2}); });
}

}  // namespace
}  // namespace halfbyte
