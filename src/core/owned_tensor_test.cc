#include <gtest/gtest.h>

#include <cstring>

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

TEST(Tensor, RefusesWhatItCannotCopy) {
  float values[6] = {};
  const auto refused = [](const TensorView& view) {
    try {
      Tensor::copy_of(view);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(refused({values, DType::f32, {2, 3}, {1, 2}, {}}),
            "tensor: the view must be contiguous, got strides [1, 2] of shape [2, 3]");
  EXPECT_EQ(refused({values, DType::f32, {2, 3}, {}, {}, 20}),
            "tensor: the view needs 24 bytes, its memory has 20");
  EXPECT_EQ(refused({nullptr, DType::f32, {2, 3}, {}, {}}),
            "tensor: the view needs 24 bytes but has no data");
  EXPECT_THROW(Tensor(Device{}, DType::f32, {-1}), Error);
}

}  // namespace
}  // namespace halfbyte
