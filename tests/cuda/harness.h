// For the tests that need a CUDA device: memory on it between guards, the ops on it, comparisons with the
// CPU.
#pragma once

#include <algorithm>

#include "cuda/driver.h"
#include "cuda/graph.h"
#include "cuda/launch.h"
#include "halfbyte/device.hpp"
#include "halfbyte/plan.hpp"
#include "ops/testing.h"

namespace halfbyte::testing {

inline constexpr Device kCuda = {DeviceKind::cuda, 0};

// Why no device can be used; empty if one can.
inline const std::string& cuda_problem() {
  static const std::string problem = [] {
    try {
      check_device(kCuda);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  }();
  return problem;
}

// Skips where no device can be used; with HALFBYTE_REQUIRE_CUDA set, fails.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_problem().empty()) return;
    if (std::getenv("HALFBYTE_REQUIRE_CUDA")) FAIL() << cuda_problem();
    GTEST_SKIP() << cuda_problem();
  }
};

// Where the arrays of a case lie: behind a multiple of 256 bytes.
struct Placement {
  int64_t values = 0;  // elements of x or y
  int64_t codes = 0;   // bytes
  int64_t scales = 0;  // elements of scales and biases; bytes of zeros
  // Without guards and poison, so that a checker of memory accesses sees what they would hide.
  bool exact = false;
};

// Bytes on the device between guards, poisoned like them.
class DeviceBytes {
 public:
  DeviceBytes(int64_t num_bytes, int64_t offset, bool exact)
      : num_bytes_(num_bytes),
        guard_(exact ? 0 : kGuard),
        begin_(guard_ + offset),
        memory_(kCuda, begin_ + num_bytes + guard_) {
    if (exact) return;
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::fill(memory_.data(), Parts::kPoison, memory_.num_bytes(), nullptr);
  }

  uint8_t* data() const { return reinterpret_cast<uint8_t*>(memory_.data()) + begin_; }
  int64_t num_bytes() const { return num_bytes_; }
  Workspace workspace() const { return {data(), num_bytes_}; }
  void upload(const void* bytes) const { copy(kCuda, data(), bytes, num_bytes_); }
  // Writes num_bytes() bytes to `bytes`. The guards must be as they were.
  void download(void* bytes) const {
    std::vector<uint8_t> all(static_cast<size_t>(memory_.num_bytes() - (guard_ == 0 ? begin_ : 0)));
    const int64_t begin = guard_ == 0 ? 0 : begin_;
    copy(kCuda, all.data(), data() - begin, static_cast<int64_t>(all.size()));
    const cuda::Scope scope(cuda::context(kCuda.index));
    cuda::synchronize(nullptr);
    for (int64_t i = 0; i < static_cast<int64_t>(all.size()); ++i)
      if ((i < begin || i >= begin + num_bytes_) && all[static_cast<size_t>(i)] != Parts::kPoison) {
        ADD_FAILURE() << "byte " << i - begin << " of an array of " << num_bytes_ << " was written";
        break;
      }
    std::copy_n(all.data() + begin, num_bytes_, static_cast<uint8_t*>(bytes));
  }

 private:
  static constexpr int64_t kGuard = 256;
  int64_t num_bytes_, guard_, begin_;
  Memory memory_;
};

// Parts on the device.
class DeviceParts {
 public:
  DeviceParts(const EncodedSpec& spec, int64_t rows, int64_t cols, const Placement& place)
      : DeviceParts(spec, rows, cols, quant_shape(spec, rows, cols), place) {}

  QuantizedView view() const {
    return {spec_,
            rows_,
            cols_,
            codes_.data(),
            scales_.data(),
            has_zeros(spec_) ? zeros_.data() : nullptr,
            has_biases(spec_) ? biases_.data() : nullptr,
            has_global_scale(spec_) ? reinterpret_cast<float*>(global_scale_.data()) : nullptr};
  }
  void upload(const Parts& parts) const {
    codes_.upload(parts.codes.data());
    scales_.upload(parts.scales.data());
    zeros_.upload(parts.zeros.data());
    biases_.upload(parts.biases.data());
    global_scale_.upload(parts.global_scale.data());
  }
  Parts download() const {
    Parts parts(spec_, rows_, cols_);
    codes_.download(parts.codes.data());
    scales_.download(parts.scales.data());
    zeros_.download(parts.zeros.data());
    biases_.download(parts.biases.data());
    global_scale_.download(parts.global_scale.data());
    return parts;
  }

 private:
  DeviceParts(const EncodedSpec& spec, int64_t rows, int64_t cols, const QuantShape& shape,
              const Placement& place)
      : spec_(spec),
        rows_(rows),
        cols_(cols),
        codes_(shape.code_bytes(), place.codes, place.exact),
        scales_(shape.num_groups * size_of(spec.scale_dtype), place.scales * size_of(spec.scale_dtype),
                place.exact),
        zeros_(has_zeros(spec) ? shape.num_groups : 0, place.scales, place.exact),
        biases_(has_biases(spec) ? shape.num_groups * size_of(spec.scale_dtype) : 0,
                place.scales * size_of(spec.scale_dtype), place.exact),
        global_scale_(has_global_scale(spec) ? int64_t{sizeof(float)} : 0, 0, place.exact) {}

  EncodedSpec spec_;
  int64_t rows_, cols_;
  DeviceBytes codes_, scales_, zeros_, biases_, global_scale_;
};

using cuda::Graph;

inline TensorView matrix(const void* data, DType dtype, int64_t rows, int64_t cols, Device device = {}) {
  return {const_cast<void*>(data), dtype, {rows, cols}, {}, device};
}

// x: rows * cols elements in host memory.
inline Parts quantize_on_cpu(const uint8_t* x, DType dtype, const EncodedSpec& spec, int64_t rows,
                             int64_t cols, const ValueRange* range = nullptr,
                             const Importance& importance = {}) {
  Parts parts(spec, rows, cols);
  parts.status = quantize(matrix(x, dtype, rows, cols), parts.view(), spec.encoding, {}, range, importance);
  return parts;
}
inline Parts quantize_on_cuda(const uint8_t* x, DType dtype, const EncodedSpec& spec, int64_t rows,
                              int64_t cols, const Placement& place = {}, const ValueRange* range = nullptr,
                              Importance importance = {}) {
  const int64_t size = size_of(dtype);
  const DeviceBytes source(rows * cols * size, place.values * size, place.exact);
  source.upload(x);
  const DeviceParts device(spec, rows, cols, place);
  const DeviceBytes weights(importance.count * int64_t{sizeof(float)}, 0, place.exact);
  if (importance.weights != nullptr) {
    weights.upload(importance.weights);
    importance.weights = reinterpret_cast<const float*>(weights.data());
  }
  const QuantizeStatus status = quantize(matrix(source.data(), dtype, rows, cols, kCuda), device.view(),
                                         spec.encoding, {}, range, importance);
  Parts parts = device.download();
  parts.status = status;
  std::vector<uint8_t> after(static_cast<size_t>(source.num_bytes()));
  source.download(after.data());
  EXPECT_TRUE(std::equal(after.begin(), after.end(), x)) << "x was written";
  return parts;
}

inline std::vector<uint8_t> dequantize_on_cpu(Parts& parts, DType dtype) {
  std::vector<uint8_t> y(static_cast<size_t>(parts.rows * parts.cols * size_of(dtype)), Parts::kPoison);
  dequantize(parts.view(), matrix(y.data(), dtype, parts.rows, parts.cols));
  return y;
}
inline std::vector<uint8_t> dequantize_on_cuda(const Parts& parts, DType dtype, const Placement& place = {}) {
  const int64_t size = size_of(dtype);
  const DeviceParts device(parts.spec, parts.rows, parts.cols, place);
  device.upload(parts);
  const DeviceBytes target(parts.rows * parts.cols * size, place.values * size, place.exact);
  dequantize(device.view(), matrix(target.data(), dtype, parts.rows, parts.cols, kCuda));
  std::vector<uint8_t> y(static_cast<size_t>(target.num_bytes()));
  target.download(y.data());
  EXPECT_TRUE(parts.same_bytes(device.download())) << "an input of dequantize was written";
  return y;
}

inline ::testing::AssertionResult same_bytes(const char* name, const uint8_t* cpu, const uint8_t* cuda,
                                             size_t num_bytes) {
  if (num_bytes == 0 || std::memcmp(cpu, cuda, num_bytes) == 0) return ::testing::AssertionSuccess();
  const auto at = static_cast<size_t>(std::mismatch(cpu, cpu + num_bytes, cuda).first - cpu);
  size_t count = 0;
  for (size_t i = 0; i < num_bytes; ++i) count += cpu[i] != cuda[i];
  return ::testing::AssertionFailure()
         << fmt::format("{}: {} of {} bytes differ, the first at {}: CPU {:02x}, CUDA {:02x}", name, count,
                        num_bytes, at, cpu[at], cuda[at]);
}
inline ::testing::AssertionResult same(const QuantizeStatus& cpu, const QuantizeStatus& cuda) {
  const auto text = [](const QuantizeStatus& s) {
    return fmt::format("num_nonfinite {}, first_nonfinite {}, num_unheld_scales {}, num_coarse_scales {}",
                       s.num_nonfinite, s.first_nonfinite, s.num_unheld_scales, s.num_coarse_scales);
  };
  if (text(cpu) == text(cuda)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "status: CPU " << text(cpu) << "; CUDA " << text(cuda);
}
// Bytes and status.
inline ::testing::AssertionResult same(const Parts& cpu, const Parts& cuda) {
  const std::pair<const char*, std::vector<uint8_t> Parts::*> members[] = {
      {"scales", &Parts::scales},
      {"zeros", &Parts::zeros},
      {"biases", &Parts::biases},
      {"global_scale", &Parts::global_scale},
      {"codes", &Parts::codes}};
  for (const auto& [name, member] : members)
    if (auto result = same_bytes(name, (cpu.*member).data(), (cuda.*member).data(), (cpu.*member).size());
        !result)
      return result;
  return same(cpu.status, cuda.status);
}

inline bool is_nan(const uint8_t* element, DType dtype) {
  const auto load = [&]<class T>(T value) {
    std::memcpy(&value, element, sizeof(T));
    return value;
  };
  switch (dtype) {
    case DType::f32:
      return std::isnan(load(0.0f));
    case DType::f16:
      return (load(uint16_t{0}) & 0x7FFF) > 0x7C00;
    case DType::bf16:
      return (load(uint16_t{0}) & 0x7FFF) > 0x7F80;
    default:
      return std::isnan(load(0.0));
  }
}
// Bit equality of values, where any NaN equals any NaN: its payload is the processor's choice.
inline ::testing::AssertionResult same_values(const uint8_t* cpu, const uint8_t* cuda, int64_t n,
                                              DType dtype) {
  const int64_t size = size_of(dtype);
  if (n == 0 || std::memcmp(cpu, cuda, static_cast<size_t>(n * size)) == 0)
    return ::testing::AssertionSuccess();
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t *a = cpu + i * size, *b = cuda + i * size;
    if (std::memcmp(a, b, static_cast<size_t>(size)) == 0 || (is_nan(a, dtype) && is_nan(b, dtype))) continue;
    std::string left, right;
    for (int64_t k = size - 1; k >= 0; --k) {
      left += fmt::format("{:02x}", a[k]);
      right += fmt::format("{:02x}", b[k]);
    }
    return ::testing::AssertionFailure()
           << fmt::format("y: element {} of {} ({}): CPU {}, CUDA {}", i, n, to_string(dtype), left, right);
  }
  return ::testing::AssertionSuccess();
}
inline ::testing::AssertionResult same_values(const std::vector<uint8_t>& cpu,
                                              const std::vector<uint8_t>& cuda, DType dtype) {
  return same_values(cpu.data(), cuda.data(), static_cast<int64_t>(cpu.size()) / size_of(dtype), dtype);
}

// Name of a parameter of a test: letters, digits and _.
inline std::string test_name(const std::string& text) {
  std::string name;
  for (const char c : text) name += std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
}
inline std::string short_name(const EncodedSpec& spec) {
  return fmt::format("{}{}_{}", info(spec.format).name, spec.asymmetric ? "_asymmetric" : "",
                     to_string(spec.encoding.scale_rule.value_or(default_scale_rule(spec))));
}

// The same values with NaN and infinities among them: some alone, some by the hundred.
inline Values with_nonfinite(const Values& clean) {
  Values x;
  x.dtype = clean.dtype;
  const double bad[] = {NAN, INFINITY, -INFINITY};
  for (size_t i = 0; i < clean.exact.size(); ++i)
    x.push_back(i % 97 == 40 || i / 150 % 20 == 7 ? bad[i % 3] : clean.exact[i]);
  return x;
}

}  // namespace halfbyte::testing
