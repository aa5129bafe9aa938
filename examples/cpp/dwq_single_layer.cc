// DWQ of one layer: random weights to 4-bit codes, scales and biases 5 % off, and 200 steps of Adam that
// bring them back while the codes stay as they are. The loss is the mean squared error of the decoded
// weights.
//   dwq_single_layer_cpp [--device cpu|cuda|cuda:1] [OUTPUT.safetensors]
// Prints a hash of the trained scales and biases, which is the same on every device. Stores the layer of
// groups of 64 in the layout of MLX. Exit code 1: the error did not become 5 times smaller, or what is stored
// is not what training ended with.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "halfbyte/affine_qdq.hpp"
#include "halfbyte/checkpoint.hpp"
#include "halfbyte/device.hpp"

using namespace halfbyte;

namespace {

constexpr int kSteps = 200;
constexpr double kLearningRate = 5e-3;

// Sums of four uniform numbers: nearly normal, the same everywhere.
std::vector<float> random_weights(int64_t n) {
  uint64_t state = 1;
  std::vector<float> weights(static_cast<size_t>(n));
  for (float& w : weights) {
    int sum = 0;
    for (int i = 0; i < 4; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      sum += static_cast<int>(state >> 48);
    }
    w = static_cast<float>(sum - 131070) / 65536;
  }
  return weights;
}

// FNV-1a.
uint64_t hash_of(uint64_t hash, const std::vector<float>& values) {
  for (const float value : values) {
    unsigned char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    for (const unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211u;
  }
  return hash;
}

// f32 tensors on the device.
class Floats {
 public:
  Floats(Device device, std::vector<int64_t> shape)
      : device_(device), shape_(std::move(shape)), memory_(device, size() * kBytes) {}
  TensorView view() const { return {memory_.data(), DType::f32, shape_, {}, device_, memory_.num_bytes()}; }
  void set(const std::vector<float>& values, const Stream& stream) const {
    copy(device_, memory_.data(), values.data(), size() * kBytes, stream.handle());
  }
  std::vector<float> get(const Stream& stream) const {
    std::vector<float> values(static_cast<size_t>(size()));
    copy(device_, values.data(), memory_.data(), size() * kBytes, stream.handle());
    stream.synchronize();
    return values;
  }

 private:
  static constexpr int64_t kBytes = sizeof(float);
  int64_t size() const {
    return std::accumulate(shape_.begin(), shape_.end(), int64_t{1}, std::multiplies<int64_t>());
  }

  Device device_;
  std::vector<int64_t> shape_;
  Memory memory_;
};

// The layer as MLX reads it. Whether it decodes to `expected` when it is read back.
bool is_stored(const std::string& path, const AffineQdqDescriptor& d, const TensorView& codes,
               const std::vector<float>& scales, const std::vector<float>& biases,
               const std::vector<float>& expected) {
  const std::vector<int64_t> groups = {static_cast<int64_t>(scales.size())};
  QuantizedTensor layer({.format = Format::affine4, .group_size = d.group_size}, {d.rows, d.cols},
                        DType::f32);
  layer.codes = Tensor::copy_of(codes).to(Device{});
  layer.scales = Tensor::copy_of({scales.data(), DType::f32, groups});
  layer.biases = Tensor::copy_of({biases.data(), DType::f32, groups});
  CheckpointWriter writer(path, {.layout = Layout::mlx, .force = true});
  writer.set("layer.weight", layer);
  writer.finish();

  const Checkpoint checkpoint = Checkpoint::open(path);
  std::vector<float> decoded(expected.size());
  checkpoint.decode(*checkpoint.find("layer.weight"), 0, d.rows * d.cols, DType::f32, decoded.data());
  return decoded == expected;
}

// Trains a layer; returns how many times smaller its error became, 0 if it was not stored so.
double train(Device device, int64_t group_size, const std::string& output) {
  AffineQdqDescriptor descriptor;
  descriptor.rows = 64;
  descriptor.cols = 256;
  descriptor.group_size = group_size;
  descriptor.adam = true;
  const int64_t n = descriptor.rows * descriptor.cols;
  const std::vector<int64_t> shape = {descriptor.rows, descriptor.cols}, code_shape = descriptor.code_shape(),
                             scale_shape = descriptor.scale_shape();

  // Once: plans, memory, the codes.
  const auto init = AffineInitPlan::select(device, descriptor);
  const auto forward = AffineQdqPlan::select(device, descriptor);
  const auto backward = AffineQdqBackwardPlan::select(device, descriptor);
  std::printf("%s\n%s\n%s\n", to_string(init.sku()).c_str(), to_string(forward.sku()).c_str(),
              to_string(backward.sku()).c_str());
  const Stream stream(device);
  const Memory workspace(
      device, std::max({init.workspace_size(), forward.workspace_size(), backward.workspace_size()}));
  const Memory code_memory(device, code_shape[0] * code_shape[1]);
  const TensorView codes{code_memory.data(), DType::u8, code_shape, {}, device, code_memory.num_bytes()};
  const Floats w(device, shape), y(device, shape), dy(device, shape);
  const Floats scales(device, scale_shape), biases(device, scale_shape);
  const Floats moments[] = {
      {device, scale_shape}, {device, scale_shape}, {device, scale_shape}, {device, scale_shape}};

  const std::vector<float> weights = random_weights(n);

  // The mean squared error, and its gradient.
  std::vector<float> gradient(weights.size()), decoded;
  const auto error = [&] {
    forward.run(stream.handle(), workspace, {codes, scales.view(), biases.view(), y.view()});
    decoded = y.get(stream);
    double sum = 0;
    for (size_t i = 0; i < decoded.size(); ++i) {
      const float difference = decoded[i] - weights[i];
      sum += static_cast<double>(difference) * static_cast<double>(difference);
      gradient[i] = 2 * difference / static_cast<float>(n);
    }
    return sum / static_cast<double>(n);
  };

  w.set(weights, stream);
  init.run(stream.handle(), workspace, {w.view(), codes, scales.view(), biases.view()});
  const double rounding = error();
  for (const Floats* parameters : {&scales, &biases}) {
    std::vector<float> values = parameters->get(stream);
    for (float& value : values) value += 0.05f * std::fabs(value);
    parameters->set(values, stream);
    stream.synchronize();
  }
  const std::vector<float> zeros(static_cast<size_t>(scale_shape[0] * scale_shape[1]));
  for (const Floats& moment : moments) moment.set(zeros, stream);

  const double before = error();
  AffineQdqBackward::Args args;
  args.codes = codes;
  args.dy = dy.view();
  args.scales = scales.view();
  args.biases = biases.view();
  args.scale_m = moments[0].view();
  args.scale_v = moments[1].view();
  args.bias_m = moments[2].view();
  args.bias_v = moments[3].view();
  args.adam.learning_rate = kLearningRate;
  for (args.adam.step = 1; args.adam.step <= kSteps; ++args.adam.step) {
    dy.set(gradient, stream);
    backward.run(stream.handle(), workspace, args);
    error();
  }
  const double after = error();
  const uint64_t hash = hash_of(hash_of(14695981039346656037u, scales.get(stream)), biases.get(stream));
  std::printf(
      "group %lld: mean squared error of rounding %.4e, 5%% off %.4e, after %d steps %.4e: %.1f times "
      "smaller; "
      "hash %016llx\n",
      static_cast<long long>(group_size), rounding, before, kSteps, after, before / after,
      static_cast<unsigned long long>(hash));
  if (!output.empty() &&
      !is_stored(output, descriptor, codes, scales.get(stream), biases.get(stream), decoded)) {
    std::printf("%s does not hold what training ended with\n", output.c_str());
    return 0;
  }
  return before / after;
}

}  // namespace

int main(int argc, char** argv) try {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  Device device;
  if (arguments.size() >= 2 && arguments[0] == "--device") {
    device = parse_device(arguments[1]);
    arguments.erase(arguments.begin(), arguments.begin() + 2);
  }
  if (arguments.size() > 1) {
    std::fprintf(stderr, "usage: %s [--device cpu|cuda|cuda:1] [OUTPUT.safetensors]\n", argv[0]);
    return 2;
  }
  const std::string output = arguments.empty() ? "" : arguments[0];
  bool good = train(device, 32, "") >= 5;
  good = train(device, 64, output) >= 5 && good;
  return good ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return static_cast<int>(error.code());
}
