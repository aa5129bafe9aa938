#include "halfbyte/dlpack.hpp"

#include <gtest/gtest.h>

#include "halfbyte/error.hpp"

namespace halfbyte {
namespace {

std::string message_of(const DLTensor& tensor) {
  try {
    from_dlpack(tensor, "x");
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    return error.what();
  }
  return "";
}

TEST(DLPack, EveryDTypeComesBack) {
  int64_t memory[8] = {};
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16, DType::f64, DType::i8, DType::u8, DType::i32,
                            DType::u32, DType::i64, DType::i4, DType::u4}) {
    std::vector<int64_t> storage;
    const DLTensor tensor = to_dlpack({memory, dtype, {2, 4}, {}, {}}, storage);
    const TensorView view = from_dlpack(tensor);
    EXPECT_EQ(view.dtype, dtype) << to_string(dtype);
    EXPECT_EQ(view.data, memory);
    EXPECT_EQ(view.shape, (std::vector<int64_t>{2, 4}));
    EXPECT_TRUE(is_contiguous(view));
    EXPECT_EQ(view.device, Device{});
  }
}

TEST(DLPack, OffsetStridesAndRankZero) {
  float memory[64];
  int64_t shape[] = {2, 3}, strides[] = {16, 2};
  DLTensor tensor{memory, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, strides, 12};
  const TensorView view = from_dlpack(tensor);
  EXPECT_EQ(view.data, memory + 3);
  EXPECT_EQ(view.strides, (std::vector<int64_t>{16, 2}));
  std::vector<int64_t> storage;
  const DLTensor back = to_dlpack(view, storage);
  EXPECT_EQ(back.strides[0], 16);
  EXPECT_EQ(back.byte_offset, 0u);

  tensor.strides = nullptr;  // as before DLPack 1.2
  EXPECT_TRUE(is_contiguous(from_dlpack(tensor)));
  tensor.ndim = 0;
  tensor.shape = nullptr;
  EXPECT_EQ(num_elements(from_dlpack(tensor)), 1);
  tensor.data = nullptr;
  EXPECT_EQ(from_dlpack(tensor).data, nullptr);
}

TEST(DLPack, Devices) {
  EXPECT_EQ(from_dlpack(DLDevice{kDLCUDAHost, 0}), Device{});
  EXPECT_EQ(from_dlpack(DLDevice{kDLCUDA, 3}), (Device{DeviceKind::cuda, 3}));
  EXPECT_EQ(from_dlpack(DLDevice{kDLCUDAManaged, 0}), (Device{DeviceKind::cuda, 0}));
  EXPECT_EQ(to_dlpack(Device{DeviceKind::cuda, 3}).device_id, 3);
  EXPECT_EQ(to_dlpack(Device{}).device_type, kDLCPU);
  EXPECT_THROW(from_dlpack(DLDevice{kDLMetal, 0}), Error);
  EXPECT_THROW(from_dlpack(DLDevice{kDLCUDA, -1}), Error);
}

TEST(DLPack, WhatIsRefused) {
  uint8_t memory[64];
  int64_t shape[] = {2, 3};
  const DLTensor good{memory, {kDLCPU, 0}, 2, {kDLUInt, 8, 1}, shape, nullptr, 0};
  DLTensor tensor = good;
  EXPECT_EQ(message_of(tensor), "");
  tensor.dtype = {kDLBool, 8, 1};
  EXPECT_EQ(message_of(tensor),
            "dlpack: x: dtype must be float 16, 32, 64, bfloat 16, float8 e4m3fn, e8m0fnu, int 4, 8, 32, 64 "
            "or uint "
            "4, 8, 32 of one lane, "
            "got code 6 of 8 bits and 1 lanes");
  tensor.dtype = {kDLFloat, 32, 4};
  EXPECT_NE(message_of(tensor), "");
  tensor = good;
  tensor.ndim = -1;
  EXPECT_EQ(message_of(tensor), "dlpack: x: ndim must be 0 to 32, got -1");
  tensor.ndim = 1 << 30;  // read no further
  EXPECT_EQ(message_of(tensor), "dlpack: x: ndim must be 0 to 32, got 1073741824");
  tensor = good;
  tensor.shape = nullptr;
  EXPECT_EQ(message_of(tensor), "dlpack: x: shape must not be null, ndim is 2");
  shape[0] = -2;
  EXPECT_EQ(message_of(good), "dlpack: x: an extent must not be negative, got -2");
  shape[0] = 2;
  tensor = good;
  tensor.dtype = {kDLUInt, 4, 1};
  EXPECT_EQ(message_of(tensor),
            "dlpack: x: rows of u4 must have an even number of elements where there is more than one, got 3");
  shape[0] = 1;
  EXPECT_EQ(message_of(tensor), "");
}

// A read of what is not aligned to its type is undefined, and faults in vector code.
TEST(DLPack, AddressesAreThoseOfTheirElements) {
  alignas(16) float memory[16];
  int64_t shape[] = {2, 3}, *const odd = reinterpret_cast<int64_t*>(reinterpret_cast<char*>(shape) + 4);
  const DLTensor good{memory, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, nullptr, 0};
  DLTensor tensor = good;
  tensor.byte_offset = 6;
  try {
    from_dlpack(tensor, "x");
    ADD_FAILURE() << "taken";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::misaligned);
    EXPECT_EQ(error.argument(), "x");
    EXPECT_EQ(error.expected(), "aligned to 4 bytes");
  }
  tensor.dtype = {kDLFloat, 16, 1};
  EXPECT_EQ(message_of(tensor), "");
  tensor.dtype = {kDLUInt, 4, 1};
  tensor.byte_offset = 7;
  shape[1] = 4;
  EXPECT_EQ(message_of(tensor), "");
  tensor = good;
  tensor.byte_offset = 1;
  shape[0] = 0;
  EXPECT_EQ(message_of(tensor), "");  // there are none
  tensor = good;
  tensor.shape = odd;
  EXPECT_NE(message_of(tensor).find("dlpack: x: shape must be aligned to 8 bytes, got 0x"),
            std::string::npos);
  tensor.shape = shape;
  tensor.strides = odd;
  EXPECT_NE(message_of(tensor).find("dlpack: x: strides must be aligned to 8 bytes"), std::string::npos);
}

}  // namespace
}  // namespace halfbyte
