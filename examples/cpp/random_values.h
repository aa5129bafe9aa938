// Nearly normal numbers, the same on every machine: sums of four uniform ones.
#pragma once

#include <cstdint>
#include <vector>

class RandomValues {
 public:
  explicit RandomValues(uint64_t seed) : state_(seed) {}
  // Of mean 0 and standard deviation `scale`.
  std::vector<float> values(int64_t n, float scale = 1) {
    std::vector<float> result(static_cast<size_t>(n));
    for (float& value : result) value = next() * scale;
    return result;
  }
  float next() {
    int sum = 0;
    for (int i = 0; i < 4; ++i) {
      state_ = state_ * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<int>(state_ >> 48);
    }
    return static_cast<float>(sum - 131070) / 37837;
  }

 private:
  uint64_t state_;
};
