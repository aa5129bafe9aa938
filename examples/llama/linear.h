// The linear layers of a model: dense, or quantized.
#pragma once

#include <compare>
#include <memory>
#include <string>
#include <vector>

#include "halfbyte/checkpoint.hpp"
#include "halfbyte/device.hpp"

namespace llama {

enum class Matmul { fused, dequantize };

struct Options {
  halfbyte::Device device;  // of products with quantized weights; all else is on the host
  halfbyte::DType dtype = halfbyte::DType::f32;  // f32, bf16: of what goes into linear layers and comes out
  Matmul matmul = Matmul::fused;
  int num_threads = 1;
};

// How a linear layer is computed.
struct Product {
  std::string weight;  // "nf4 g64, bitsandbytes"; "bf16"
  std::string kind;    // "fused", "dequantized" (to f32, when it was loaded) or "dense"
  std::string kernel;  // of fused products that have run; several are separated by commas
  std::string reason;  // why it is dequantized, where that was not asked for
  auto operator<=>(const Product&) const = default;
};

class Linear {
 public:
  virtual ~Linear() = default;
  // y[m, n] = x[m, k] . W^T (+ bias). Both at multiples of 16 bytes.
  virtual void forward(const float* x, int64_t m, float* y) = 0;
  virtual Product product() const = 0;
  virtual int64_t memory_bytes() const = 0;  // of the weight
};

// What layers share: the stream, and memory that each uses while it runs.
struct Workplace {
  explicit Workplace(const Options& options);
  Options options;
  halfbyte::Stream stream;
  halfbyte::Memory workspace, x, y;      // of the device
  std::vector<uint16_t> x_bf16, y_bf16;  // on the host
};

// `weight` is of two axes; bias is empty or [n].
std::unique_ptr<Linear> make_linear(const halfbyte::Checkpoint& checkpoint, const halfbyte::Weight& weight,
                                    std::vector<float> bias, Workplace& workplace);

}  // namespace llama
