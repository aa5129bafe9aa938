// The matrix, barrier and bulk copy instructions of src/cuda/device against plain loops, bit for bit:
// products and sums of small integers are exact in every order. What the device does not have is not tested.
#include "device_headers_program.h"
#include "formats/convert.h"
#include "harness.h"

namespace halfbyte {
namespace {

// Small integers, as f16 or bf16.
struct Integers {
  std::vector<float> values;
  std::vector<uint16_t> bits;
};
Integers random_integers(int64_t n, bool bf16, std::mt19937_64& random) {
  Integers result;
  for (int64_t i = 0; i < n; ++i) {
    const auto value = static_cast<float>(static_cast<int>(random() % 17) - 8);
    result.values.push_back(value);
    result.bits.push_back(bf16 ? formats::to_bf16(value) : formats::to_f16(value));
  }
  return result;
}

class DeviceHeadersCuda : public testing::CudaTest {
 protected:
  void SetUp() override {
    testing::CudaTest::SetUp();
    if (!testing::cuda_problem().empty()) return;
    const cuda::Context& context = cuda::context(testing::kCuda.index);
    capability_ = context.capability;
    static const cuda::CUmodule module = [&] {
      const cuda::Compilation compilation = testing::compile_device_headers(context.target);
      EXPECT_FALSE(compilation.code.empty()) << compilation.log;
      const cuda::Scope scope(context);
      cuda::CUmodule loaded = nullptr;
      cuda::check(cuda::driver().cuModuleLoadData(&loaded, compilation.code.data()), "cuModuleLoadData");
      return loaded;
    }();
    module_ = module;
  }

  // One block of the kernel; `d` goes there and comes back.
  template <class A, class B, class D>
  void run(const std::string& name, int num_threads, const std::vector<A>& a, const std::vector<B>& b,
           std::vector<D>& d) const {
    const testing::DeviceBytes a_bytes = upload(a), b_bytes = upload(b), d_bytes = upload(d);
    const cuda::Scope scope(cuda::context(testing::kCuda.index));
    cuda::CUfunction function = nullptr;
    cuda::check(cuda::driver().cuModuleGetFunction(&function, module_, name.c_str()), "cuModuleGetFunction");
    cuda::launch(function, {1, num_threads}, nullptr,
                 testing::DeviceHeadersArgs{a_bytes.data(), b_bytes.data(), d_bytes.data()});
    d_bytes.download(d.data());
  }

  // d [m][n] += a [m][k] * (b [n][k])^T by the kernel, from a d of integers; d = ... where not `accumulates`.
  void multiply(const std::string& name, int num_threads, int64_t m, int64_t n, int64_t k, bool accumulates) {
    SCOPED_TRACE(name);
    const bool bf16 = name.find("bf16") != std::string::npos;
    const Integers a = random_integers(m * k, bf16, random_), b = random_integers(n * k, bf16, random_);
    std::vector<float> d = random_integers(m * n, bf16, random_).values, expected = d;
    for (int64_t i = 0; i < m * n; ++i) {
      float sum = accumulates ? d[static_cast<size_t>(i)] : 0;
      for (int64_t j = 0; j < k; ++j)
        sum += a.values[static_cast<size_t>(i / n * k + j)] * b.values[static_cast<size_t>(i % n * k + j)];
      expected[static_cast<size_t>(i)] = sum;
    }
    run(name, num_threads, a.bits, b.bits, d);
    EXPECT_EQ(d, expected);
  }

  int capability_ = 0;
  std::mt19937_64 random_{1};

 private:
  template <class T>
  static testing::DeviceBytes upload(const std::vector<T>& values) {
    testing::DeviceBytes bytes(static_cast<int64_t>(values.size() * sizeof(T)), 0, false);
    bytes.upload(values.data());
    return bytes;
  }

  cuda::CUmodule module_ = nullptr;
};

TEST_F(DeviceHeadersCuda, mma) {
  if (capability_ < 80) return;
  for (const char* type : {"f16", "bf16"}) multiply(fmt::format("mma_{}", type), 32, 16, 8, 16, true);
}

TEST_F(DeviceHeadersCuda, load_matrices) {
  if (capability_ < 80) return;
  std::vector<uint16_t> a(4 * 8 * 8), d(2 * 32 * 4 * 2), expected;  // [matrix][row][column]
  for (uint16_t& element : a) element = static_cast<uint16_t>(random_());
  for (const bool transposed : {false, true})
    for (size_t lane = 0; lane < 32; ++lane)
      for (size_t matrix = 0; matrix < 4; ++matrix)
        for (size_t i = 0; i < 2; ++i) {
          const size_t row = lane / 4, column = lane % 4 * 2 + i;
          expected.push_back(a[matrix * 64 + (transposed ? column * 8 + row : row * 8 + column)]);
        }
  run("load_matrices", 32, a, a, d);
  EXPECT_EQ(d, expected);
}

TEST_F(DeviceHeadersCuda, copy) {
  if (capability_ < 90) return;
  std::vector<uint32_t> a(3 * 1024), d(a.size()), expected;
  for (uint32_t& word : a) {
    word = static_cast<uint32_t>(random_());
    expected.push_back(word + 1);
  }
  run("copy", 128, a, a, d);
  EXPECT_EQ(d, expected);
}

TEST_F(DeviceHeadersCuda, wgmma) {
  if (capability_ != 90) return;
  for (const char* type : {"f16", "bf16"})
    for (const int n : {8, 16, 32, 64, 128, 256})
      for (const char* major_b : {"k", "mn"}) {
        if (n < 64 && major_b == std::string("mn")) continue;
        multiply(fmt::format("wgmma_rs_{}_{}_{}", type, n, major_b), 128, 64, n, 64, false);
        for (const char* major_a : {"k", "mn"})
          multiply(fmt::format("wgmma_ss_{}_{}_{}_{}", type, n, major_a, major_b), 128, 64, n, 64, true);
      }
}

}  // namespace
}  // namespace halfbyte
