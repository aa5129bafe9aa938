// Quantization-aware training: a network of two layers learns with INT4 weights and INT8 activations, by
// straight-through gradients, and its INT4 weights go into a checkpoint that vLLM and transformers read.
//   qat_mlp_cpp OUTPUT.safetensors
// Exit code 1: it did not learn, or what is stored is not what the last step computed with.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "halfbyte/checkpoint.hpp"
#include "halfbyte/convert.hpp"
#include "halfbyte/device.hpp"
#include "halfbyte/fake_quantize.hpp"
#include "halfbyte/quantize_linear.hpp"
#include "random_values.h"

using namespace halfbyte;

namespace {

constexpr int64_t kBatch = 64, kInputs = 64, kHidden = 128, kOutputs = 32, kGroup = 32;
constexpr int kSteps = 300;
constexpr float kRate = 0.05f;

using Floats = std::vector<float>;

TensorView view(Floats& values, const std::vector<int64_t>& shape) {
  return {values.data(), DType::f32, shape};
}

// y[m, n] = x[m, k] . w[n, k]^T
Floats product(const Floats& x, const Floats& w, int64_t m, int64_t n, int64_t k) {
  Floats y(static_cast<size_t>(m * n));
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (int64_t c = 0; c < k; ++c)
        sum += x[static_cast<size_t>(i * k + c)] * w[static_cast<size_t>(j * k + c)];
      y[static_cast<size_t>(i * n + j)] = sum;
    }
  return y;
}
Floats transposed(const Floats& x, int64_t rows, int64_t cols) {
  Floats y(x.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j)
      y[static_cast<size_t>(j * rows + i)] = x[static_cast<size_t>(i * cols + j)];
  return y;
}

// A tensor that is rounded where it is used. One descriptor serves both plans.
class Rounded {
 public:
  explicit Rounded(const FakeQuantizeDescriptor& descriptor)
      : shape_(descriptor.shape),
        scale_shape_(descriptor.scale_shape()),
        forward_(FakeQuantizePlan::select({}, descriptor)),
        backward_(FakeQuantizeBackwardPlan::select({}, descriptor)),
        mask_({}, DType::u8, descriptor.mask_shape()),
        scale_({}, DType::f32, scale_shape_),
        min_({}, DType::f32, scale_shape_),
        max_({}, DType::f32, scale_shape_),
        num_batches_({}, DType::i64, {}) {
    observes_ = descriptor.observer.has_value();
    if (observes_) reset_observer(min_.view(), max_.view(), num_batches_.view());
  }
  Floats forward(Floats& x) {
    Floats y(x.size());
    FakeQuantize::Args args{
        .x = view(x, shape_), .y = view(y, shape_), .scale = scale_.view(), .mask = mask_.view()};
    if (observes_) {
      args.min = min_.view();
      args.max = max_.view();
      args.num_batches = num_batches_.view();
    }
    forward_.run(nullptr, {}, args);
    return y;
  }
  // Straight through: 0 where x was clamped.
  Floats backward(Floats& dy) const {
    Floats dx(dy.size());
    backward_.run(nullptr, {}, {.mask = mask_.view(), .dy = view(dy, shape_), .dx = view(dx, shape_)});
    return dx;
  }
  const Tensor& scale() const { return scale_; }

 private:
  std::vector<int64_t> shape_, scale_shape_;
  FakeQuantizePlan forward_;
  FakeQuantizeBackwardPlan backward_;
  Tensor mask_, scale_, min_, max_, num_batches_;
  bool observes_;
};

// INT4, a scale for 32 weights of a row, from the weights themselves.
FakeQuantizeDescriptor weight_descriptor(int64_t rows, int64_t cols) {
  FakeQuantizeDescriptor d;
  d.shape = {rows, cols};
  d.granularity = Granularity::group;
  d.group_size = kGroup;
  d.computed = true;
  d.mask = true;
  return d;
}
// INT8, one scale, from a moving average of what was seen.
FakeQuantizeDescriptor activation_descriptor(int64_t cols) {
  FakeQuantizeDescriptor d;
  d.shape = {kBatch, cols};
  d.q_min = -128;
  d.q_max = 127;
  d.computed = true;
  d.mask = true;
  d.observer = ObserverConfig{};
  d.observer->kind = ObserverKind::moving_average;
  d.observer->momentum = 0.9;
  return d;
}

// The codes of the weight, with the scales of the last step.
QuantizedTensor stored_weight(Floats& w, int64_t rows, int64_t cols, const Tensor& scale) {
  LinearDescriptor d = LinearDescriptor::per_group({rows, cols}, kGroup);
  d.q_min = -8;
  d.q_max = 7;
  d.code_dtype = DType::i4;
  const Tensor codes({}, DType::i4, {rows, cols});
  QuantizeLinearPlan::select({}, d).run(
      nullptr, {}, {.x = view(w, {rows, cols}), .codes = codes.view(), .scale = scale.view()});
  return from_linear(d, codes.view(), scale.view());
}

bool is_stored(const Checkpoint& checkpoint, const char* name, const Floats& expected) {
  const Weight* const weight = checkpoint.find(name);
  Floats decoded(expected.size());
  checkpoint.decode(*weight, 0, static_cast<int64_t>(decoded.size()), DType::f32, decoded.data());
  return std::memcmp(decoded.data(), expected.data(), decoded.size() * sizeof(float)) == 0;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s OUTPUT.safetensors\n", argv[0]);
    return 2;
  }
  RandomValues random(1);
  Floats w1 = random.values(kHidden * kInputs, 0.125f), w2 = random.values(kOutputs * kHidden, 0.09f);
  const Floats teacher = random.values(kOutputs * kInputs, 0.125f);
  Rounded rounded1(weight_descriptor(kHidden, kInputs)), rounded2(weight_descriptor(kOutputs, kHidden));
  Rounded rounded_hidden(activation_descriptor(kHidden));

  Floats w1_hat, w2_hat;
  double first = 0, last = 0;
  for (int step = 0; step <= kSteps; ++step) {
    const Floats x = random.values(kBatch * kInputs), target = product(x, teacher, kBatch, kOutputs, kInputs);
    w1_hat = rounded1.forward(w1);
    w2_hat = rounded2.forward(w2);
    Floats hidden = product(x, w1_hat, kBatch, kHidden, kInputs);
    std::vector<char> is_positive(hidden.size());
    for (size_t i = 0; i < hidden.size(); ++i) {
      is_positive[i] = hidden[i] > 0;
      if (!is_positive[i]) hidden[i] = 0;
    }
    const Floats hidden_hat = rounded_hidden.forward(hidden);
    Floats dy = product(hidden_hat, w2_hat, kBatch, kOutputs, kHidden);
    double loss = 0;
    for (size_t i = 0; i < dy.size(); ++i) {
      const float error = dy[i] - target[i];
      loss += static_cast<double>(error) * static_cast<double>(error) / static_cast<double>(dy.size());
      dy[i] = 2 * error / kBatch;
    }
    if (step < 10) first += loss / 10;
    if (step > kSteps - 10) last += loss / 10;
    if (step == kSteps) break;  // the weights are those of this step

    Floats dw2_hat = product(transposed(dy, kBatch, kOutputs), transposed(hidden_hat, kBatch, kHidden),
                             kOutputs, kHidden, kBatch);
    Floats dhidden_hat = product(dy, transposed(w2_hat, kOutputs, kHidden), kBatch, kHidden, kOutputs);
    Floats dhidden = rounded_hidden.backward(dhidden_hat);
    for (size_t i = 0; i < dhidden.size(); ++i)
      if (!is_positive[i]) dhidden[i] = 0;
    Floats dw1_hat = product(transposed(dhidden, kBatch, kHidden), transposed(x, kBatch, kInputs), kHidden,
                             kInputs, kBatch);
    const Floats dw1 = rounded1.backward(dw1_hat), dw2 = rounded2.backward(dw2_hat);
    for (size_t i = 0; i < w1.size(); ++i) w1[i] -= kRate * dw1[i];
    for (size_t i = 0; i < w2.size(); ++i) w2[i] -= kRate * dw2[i];
  }

  CheckpointWriter writer(argv[1], {.layout = Layout::compressed_tensors, .force = true});
  writer.set("layers.0.weight", stored_weight(w1, kHidden, kInputs, rounded1.scale()));
  writer.set("layers.1.weight", stored_weight(w2, kOutputs, kHidden, rounded2.scale()));
  const CheckpointReport report = writer.finish();
  const Checkpoint checkpoint = Checkpoint::open(argv[1]);
  const bool same =
      is_stored(checkpoint, "layers.0.weight", w1_hat) && is_stored(checkpoint, "layers.1.weight", w2_hat);
  std::printf("mean squared error %.4f, after %d steps %.4f; %lld weights of INT4 stored, %s\n", first,
              kSteps, last, static_cast<long long>(report.num_quantized),
              same ? "equal to those of the last step" : "NOT those of the last step");
  return same && last < first / 4 ? 0 : 1;
} catch (const Error& error) {
  std::fprintf(stderr, "%s: %s\n", to_string(error.code()), error.what());
  return static_cast<int>(error.code());
}
