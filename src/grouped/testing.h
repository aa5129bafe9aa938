// For the tests of ops on grouped tensors: tensors in poisoned memory.
#pragma once

#include "ops/testing.h"

namespace halfbyte::testing {

// A tensor in memory of its own, of which it need not use all.
struct Storage {
  static constexpr uint8_t kPoison = 0xA5;
  TensorView view;             // without data and device
  int64_t offset = 0;          // bytes before its first element
  std::vector<uint8_t> bytes;  // all, with what lies around it

  TensorView at(void* memory, Device device) const {
    TensorView result = view;
    result.device = device;
    result.data = bytes.empty() ? nullptr : static_cast<uint8_t*>(memory) + offset;
    return result;
  }
};

}  // namespace halfbyte::testing
