#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "halfbyte/device.hpp"
#include "halfbyte/error.hpp"

namespace halfbyte {
namespace {

TEST(Tensor, CopiesTheElementsOfAView) {
  float values[] = {1, 2, 3, 4, 5, 6};
  const Tensor tensor = Tensor::copy_of({values, DType::f32, {2, 3}, {}, {}});
  values[0] = 7;
  EXPECT_EQ(tensor.num_elements(), 6);
  EXPECT_EQ(tensor.num_bytes(), 24);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data()) % 256, 0u);
  const TensorView view = tensor.view();
  EXPECT_EQ(view.num_bytes, 24);
  EXPECT_EQ(*static_cast<const float*>(view.data), 1);
  EXPECT_EQ(std::memcmp(static_cast<const float*>(view.data) + 1, values + 1, 20), 0);
  EXPECT_EQ(tensor.to(Device{}).data(), tensor.data());
}

TEST(Tensor, PackedAndEmptyOnes) {
  EXPECT_EQ(Tensor(Device{}, DType::i4, {3, 5}).num_bytes(), 9);
  EXPECT_EQ(Tensor().num_elements(), 0);
  EXPECT_EQ(Tensor(Device{}, DType::f16, {}).num_bytes(), 2);
  EXPECT_EQ(Tensor(Device{}, DType::f16, {4, 0}).data(), nullptr);
}

// Of `make`: "accepted", or why not.
template <class Make>
std::string refused(const Make& make) {
  try {
    make();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::usage);
    return error.what();
  }
  return "accepted";
}

TEST(Tensor, RefusesWhatItCannotCopyOrShare) {
  float values[6] = {};
  const auto expect = [&](const TensorView& view, const std::string& text) {
    EXPECT_EQ(refused([&] { Tensor::copy_of(view); }), text);
    EXPECT_EQ(refused([&] { Tensor::of(view, nullptr); }), text);
  };
  expect({values, DType::f32, {2, 3}, {1, 2}, {}},
         "tensor: the view must be contiguous, got strides [1, 2] of shape [2, 3]");
  expect({values, DType::f32, {2, 3}, {}, {}, 20}, "tensor: the view needs 24 bytes, its memory has 20");
  expect({nullptr, DType::f32, {2, 3}, {}, {}}, "tensor: the view needs 24 bytes but has no data");
  EXPECT_THROW(Tensor(Device{}, DType::f32, {-1}), Error);
  const TensorView unaligned{reinterpret_cast<std::byte*>(values) + 2, DType::f32, {5}, {}, {}};
  EXPECT_EQ(refused([&] { Tensor::copy_of(unaligned); }), "accepted");
  EXPECT_NE(refused([&] {
              Tensor::of(unaligned, nullptr);
            }).find("tensor: the view must be aligned to 4 bytes, its address is 0x"),
            std::string::npos);
}

TEST(Tensor, SharesTheMemoryOfAnotherOwner) {
  auto owner = std::make_shared<std::vector<float>>(std::vector<float>{1, 2, 3, 4, 5, 6});
  float* const values = owner->data();
  const std::weak_ptr<void> alive = owner;
  Tensor tensor = Tensor::of({values, DType::f32, {2, 3}, {3, 1}, {}, 100}, std::move(owner));
  EXPECT_EQ(static_cast<void*>(tensor.data()), values);
  EXPECT_EQ(tensor.shape(), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(tensor.dtype(), DType::f32);
  EXPECT_EQ(tensor.num_bytes(), 24);
  EXPECT_EQ(tensor.view().num_bytes, 24);
  EXPECT_EQ(tensor.to(Device{}).data(), tensor.data());
  {
    const Tensor copy = tensor;
    tensor = {};
    EXPECT_FALSE(alive.expired());
    EXPECT_EQ(static_cast<const float*>(copy.view().data)[5], 6);
  }
  EXPECT_TRUE(alive.expired());
}

TEST(Tensor, SharesMemoryThatNobodyOwnsAndNone) {
  uint8_t codes[9] = {};
  const Tensor packed = Tensor::of({codes + 1, DType::i4, {2, 5}, {}, {}}, nullptr);
  EXPECT_EQ(static_cast<void*>(packed.data()), codes + 1);
  EXPECT_EQ(packed.num_bytes(), 6);
  EXPECT_EQ(Tensor::of({nullptr, DType::f32, {0, 3}, {}, {}}, nullptr).num_elements(), 0);
}

}  // namespace
}  // namespace halfbyte
