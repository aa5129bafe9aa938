// The C interface on a CUDA device: memory, streams, operations and plans give the bytes of the CPU.
#include "halfbyte/halfbyte.h"

#include "harness.h"

namespace halfbyte {
namespace {

using CApiCuda = testing::CudaTest;

#define ASSERT_OK(call) ASSERT_EQ((call), HALFBYTE_OK) << halfbyte_last_error()

constexpr DLDevice kDevice{kDLCUDA, 0};
constexpr DLDevice kHost{kDLCPU, 0};

std::vector<float> some_values(int64_t n) {
  std::vector<float> values(static_cast<size_t>(n));
  std::mt19937 random(static_cast<unsigned>(n));
  std::normal_distribution<float> normal;
  for (float& value : values) value = normal(random);
  return values;
}

// The same array on both sides. Moves nothing by itself.
class Both {
 public:
  Both(int64_t n, uint8_t code, uint8_t bits)
      : host(static_cast<size_t>(n * bits / 8)), shape_(n), type_{code, bits, 1} {
    EXPECT_EQ(halfbyte_memory_create(kDevice, num_bytes(), &memory_), HALFBYTE_OK) << halfbyte_last_error();
  }
  Both(const Both&) = delete;
  ~Both() { halfbyte_memory_destroy(memory_); }

  DLTensor on(DLDevice device) {
    void* const data = device.device_type == kDLCPU ? host.data() : halfbyte_memory_data(memory_);
    return {data, device, 1, type_, &shape_, nullptr, 0};
  }
  void upload(void* stream) {
    ASSERT_OK(halfbyte_copy(kDevice, halfbyte_memory_data(memory_), host.data(), num_bytes(), stream));
  }
  std::vector<uint8_t> download(halfbyte_stream* stream) {
    std::vector<uint8_t> bytes(host.size());
    EXPECT_EQ(halfbyte_copy(kDevice, bytes.data(), halfbyte_memory_data(memory_), num_bytes(),
                            halfbyte_stream_handle(stream)),
              HALFBYTE_OK);
    EXPECT_EQ(halfbyte_stream_synchronize(stream), HALFBYTE_OK);
    return bytes;
  }
  int64_t num_bytes() const { return static_cast<int64_t>(host.size()); }

  std::vector<uint8_t> host;

 private:
  halfbyte_memory* memory_ = nullptr;
  int64_t shape_;
  DLDataType type_;
};

TEST_F(CApiCuda, FlatBuffersGiveTheBytesOfTheCpu) {
  halfbyte_stream* stream = nullptr;
  ASSERT_OK(halfbyte_stream_create(kDevice, &stream));
  halfbyte_execution execution;
  ASSERT_OK(halfbyte_execution_init(&execution, sizeof execution));
  execution.stream = halfbyte_stream_handle(stream);
  for (const int64_t group_size : {1, 7, 32, 64, 100}) {
    for (const int64_t n : {1, 63, 1000, 70001}) {
      const int64_t groups = (n + group_size - 1) / group_size;
      const std::vector<float> values = some_values(n);
      Both x(n, kDLFloat, 32), codes((n + 1) / 2, kDLUInt, 8), scales(groups, kDLFloat, 32),
          zeros(groups, kDLUInt, 8), y(n, kDLFloat, 32);
      std::memcpy(x.host.data(), values.data(), x.host.size());
      x.upload(execution.stream);
      for (const int mode : {0, 1, 2}) {  // asymmetric, symmetric, nf4
        for (const DLDevice device : {kHost, kDevice}) {
          const DLTensor xt = x.on(device), ct = codes.on(device), st = scales.on(device),
                         zt = zeros.on(device), yt = y.on(device);
          if (mode == 2) {
            ASSERT_OK(halfbyte_quantize_nf4(&xt, &ct, &st, n, group_size, &execution));
            ASSERT_OK(halfbyte_dequantize_nf4(&ct, &st, &yt, n, group_size, &execution));
          } else {
            ASSERT_OK(halfbyte_quantize_int4(&xt, &ct, &st, &zt, n, group_size, mode, &execution));
            ASSERT_OK(halfbyte_dequantize_int4(&ct, &st, &zt, &yt, n, group_size, mode, &execution));
          }
        }
        EXPECT_EQ(codes.download(stream), codes.host)
            << "mode " << mode << ", n " << n << ", group " << group_size;
        EXPECT_EQ(scales.download(stream), scales.host);
        EXPECT_EQ(zeros.download(stream), zeros.host);
        EXPECT_EQ(y.download(stream), y.host);
      }
    }
  }
  halfbyte_stream_destroy(stream);
}

TEST_F(CApiCuda, PlansRunOnAStreamOfTheCaller) {
  const int64_t n = 1000;
  halfbyte_stream* stream = nullptr;
  ASSERT_OK(halfbyte_stream_create(kDevice, &stream));
  Both x(n, kDLFloat, 32), codes(n, kDLInt, 8), scale(1, kDLFloat, 32);
  const std::vector<float> values = some_values(n);
  std::memcpy(x.host.data(), values.data(), x.host.size());
  const float step = 0.125f;
  std::memcpy(scale.host.data(), &step, sizeof step);
  x.upload(halfbyte_stream_handle(stream));
  scale.upload(halfbyte_stream_handle(stream));
  halfbyte_linear_descriptor descriptor;
  ASSERT_OK(halfbyte_linear_descriptor_init(&descriptor, sizeof descriptor));
  descriptor.ndim = 1;
  descriptor.shape = &n;
  descriptor.alignment = 4;
  for (const DLDevice device : {kHost, kDevice}) {
    halfbyte_plan* plan = nullptr;
    halfbyte_memory* workspace = nullptr;
    int64_t workspace_size = 0;
    ASSERT_OK(halfbyte_quantize_linear_select(device, &descriptor, nullptr, &plan));
    ASSERT_OK(halfbyte_plan_workspace_size(plan, &workspace_size));
    ASSERT_OK(halfbyte_memory_create(device, workspace_size, &workspace));
    const DLTensor xt = x.on(device), ct = codes.on(device), st = scale.on(device);
    halfbyte_quantize_linear_args args;
    ASSERT_OK(halfbyte_quantize_linear_args_init(&args, sizeof args));
    args.x = &xt;
    args.codes = &ct;
    args.scale = &st;
    void* const handle = halfbyte_stream_handle(stream);
    ASSERT_OK(
        halfbyte_quantize_linear_run(plan, handle, halfbyte_memory_data(workspace), workspace_size, &args));
    halfbyte_quantize_status status;
    status.struct_size = sizeof status;
    ASSERT_OK(halfbyte_plan_status(plan, handle, halfbyte_memory_data(workspace), workspace_size, &status));
    EXPECT_EQ(status.num_nonfinite, 0);
    halfbyte_memory_destroy(workspace);
    halfbyte_plan_destroy(plan);
  }
  EXPECT_EQ(codes.download(stream), codes.host);
  halfbyte_stream_destroy(stream);
}

TEST_F(CApiCuda, HostMemoryIsRefusedWhereTheTensorSaysDevice) {
  Both x(64, kDLFloat, 32), codes(32, kDLUInt, 8), scales(1, kDLFloat, 32);
  DLTensor xt = x.on(kHost);
  const DLTensor ct = codes.on(kDevice), st = scales.on(kDevice);
  EXPECT_EQ(halfbyte_quantize_nf4(&xt, &ct, &st, 64, 64, nullptr), HALFBYTE_USAGE);
  EXPECT_STREQ(halfbyte_last_error(), "quantize_nf4: codes must be on cpu as the others, got cuda:0");
  xt.device = kDevice;
  EXPECT_EQ(halfbyte_quantize_nf4(&xt, &ct, &st, 64, 64, nullptr), HALFBYTE_USAGE);
  EXPECT_EQ(std::string(halfbyte_last_error()).find("quantize_nf4: x must be in memory of cuda:0"), 0u)
      << halfbyte_last_error();
}

}  // namespace
}  // namespace halfbyte
