// The linear layers of a model: dense, or quantized.
#pragma once

#include <compare>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "halfbyte/checkpoint.hpp"
#include "halfbyte/device.hpp"
#include "halfbyte/qgemm_parallel.hpp"

namespace llama {

enum class Matmul { fused, dequantize };

struct Options {
  halfbyte::Device device;  // of products with quantized weights; all else is on the host
  halfbyte::DType dtype = halfbyte::DType::f32;  // f32, bf16: of what goes into linear layers and comes out
  halfbyte::QgemmMath math = halfbyte::QgemmMath::automatic;  // of linear layers: automatic, int8
  Matmul matmul = Matmul::fused;
  int num_threads = 1;
  std::vector<halfbyte::Device> members;  // more than one: weights are cut, and each has a part
};

// How a linear layer is computed.
struct Product {
  std::string weight;  // "nf4 g64, bitsandbytes"; "bf16"
  // "fused"; "fused, colwise" and "fused, rowwise", from parts; "grouped", fused and together with those of
  // other experts; "dequantized" (to f32, when it was loaded) or "dense"
  std::string kind;
  std::string kernel;  // of fused products that have run; several are separated by commas
  std::string reason;  // why it is dequantized, in one part, or gate apart from up, where it was not to be
  auto operator<=>(const Product&) const = default;
  void add_kernel(const std::string& name);  // unless it is there
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
  // Of those that have parts of the weights; none where there is one device.
  std::vector<halfbyte::Communicator> group;
  std::vector<Workplace> of_members;
  halfbyte::Memory workspace, x, y, hidden, routing;  // of the device
  std::vector<uint16_t> x_bf16, y_bf16;               // on the host

  // Makes memory at least that long. What was in it is lost.
  std::byte* reserve(halfbyte::Memory& memory, int64_t num_bytes) const;
  // x[m, columns] as products read it: in their dtype, on the device. Valid until the next call.
  halfbyte::ConstTensorView upload(const float* x_values, int64_t m, int64_t columns);
  // Where products write y[m, columns]. Once they are enqueued, `download` waits and moves it to y.
  halfbyte::TensorView output(float* y_values, int64_t m, int64_t columns);
  void download(const halfbyte::TensorView& from, float* y_values);
};

std::string describe(const halfbyte::Weight& weight);
// Why products cannot read the codes of a quantized weight; empty: they can.
std::string why_not_packed(const halfbyte::Weight& weight);

// `weight` is of two axes, or of three: then it is that of one expert. bias is empty or [n]. style: how the
// weight is cut, if there are members; unset: it is not.
std::unique_ptr<Linear> make_linear(const halfbyte::Checkpoint& checkpoint, const halfbyte::Weight& weight,
                                    std::vector<float> bias, Workplace& workplace, int64_t expert = 0,
                                    std::optional<halfbyte::ParallelStyle> style = {});

}  // namespace llama
