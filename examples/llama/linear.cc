#include "linear.h"

#include <algorithm>
#include <optional>

#include "halfbyte/qgemm.hpp"
#include "host_math.h"

namespace llama {
namespace {

using namespace halfbyte;

std::string describe(const Weight& weight) {
  if (!weight.layout) return to_string(*weight.dtype);
  const QuantSpec& spec = weight.spec;
  std::string text = info(spec.format).name;
  if (spec.asymmetric) text += " asymmetric";
  const bool grouped = spec.granularity == Granularity::group || spec.granularity == Granularity::flat;
  text += grouped ? " g" + std::to_string(spec.group_size) : std::string(" ") + to_string(spec.granularity);
  if (spec.double_quant) text += " double-quant";
  return text + ", " + to_string(*weight.layout);
}

// ---- Dense, or decoded when it is loaded

class DenseLinear : public Linear {
 public:
  DenseLinear(const Checkpoint& checkpoint, const Weight& weight, std::vector<float> bias, Product product,
              Workplace& workplace)
      : n_(weight.shape[0]),
        k_(weight.shape[1]),
        matrix_(decoded(checkpoint, weight).data(), n_, k_),
        bias_(std::move(bias)),
        product_(std::move(product)),
        workplace_(workplace) {}

  void forward(const float* x, int64_t m, float* y) override {
    const bool rounded = workplace_.options.dtype == DType::bf16;
    std::vector<float> x_rounded;
    if (rounded) {
      x_rounded.assign(x, x + m * k_);
      for (float& value : x_rounded) value = from_bf16(to_bf16(value));
      x = x_rounded.data();
    }
    matrix_.multiply(x, m, bias_.empty() ? nullptr : bias_.data(), y, workplace_.options.num_threads);
    if (rounded)
      for (int64_t i = 0; i < m * n_; ++i) y[i] = from_bf16(to_bf16(y[i]));
  }
  Product product() const override { return product_; }
  int64_t memory_bytes() const override { return matrix_.num_bytes(); }

 private:
  static std::vector<float> decoded(const Checkpoint& checkpoint, const Weight& weight) {
    std::vector<float> values(static_cast<size_t>(weight.shape[0] * weight.shape[1]));
    checkpoint.decode(weight, 0, static_cast<int64_t>(values.size()), DType::f32, values.data());
    return values;
  }

  int64_t n_, k_;
  DenseMatrix matrix_;
  std::vector<float> bias_;
  Product product_;
  Workplace& workplace_;
};

// ---- Quantized: the product reads the codes

class QuantizedLinear : public Linear {
 public:
  QuantizedLinear(const Checkpoint& checkpoint, const Weight& weight, const std::vector<float>& bias,
                  Workplace& workplace)
      : product_{describe(weight), "fused", "", ""}, workplace_(workplace) {
    const Options& options = workplace.options;
    const Execution execution{.num_threads = options.num_threads};
    packed_ = load_weight(checkpoint, weight.name, {}, execution)
                  .pack(execution)
                  .to(options.device, workplace.stream.handle());
    if (bias.empty()) return;
    const Tensor host({}, options.dtype, {packed_.view().rows});
    for (size_t i = 0; i < bias.size(); ++i)
      if (options.dtype == DType::f32)
        reinterpret_cast<float*>(host.data())[i] = bias[i];
      else
        reinterpret_cast<uint16_t*>(host.data())[i] = to_bf16(bias[i]);
    bias_ = host.to(options.device, workplace.stream.handle());
  }

  void forward(const float* x, int64_t m, float* y) override {
    const auto& [device, dtype, matmul, num_threads] = workplace_.options;
    const int64_t n = packed_.view().rows, k = packed_.view().cols;
    select(m);
    const void* from = x;
    void* to = y;
    if (dtype == DType::bf16) {
      workplace_.x_bf16.resize(static_cast<size_t>(m * k));
      workplace_.y_bf16.resize(static_cast<size_t>(m * n));
      std::transform(x, x + m * k, workplace_.x_bf16.begin(), to_bf16);
      from = workplace_.x_bf16.data();
      to = workplace_.y_bf16.data();
    }
    Qgemm::Args args{.weight = packed_.view()};
    args.x = {from, dtype, {m, k}, {}, device};
    args.y = {to, dtype, {m, n}, {}, device};
    if (plan_->descriptor().bias) args.bias = bias_.view();
    const int64_t x_bytes = m * k * size_of(dtype), y_bytes = m * n * size_of(dtype);
    const bool elsewhere = device != Device{};
    void* stream = workplace_.stream.handle();
    if (elsewhere) {
      void* const x_memory = grown(workplace_.x, x_bytes);
      copy(device, x_memory, from, x_bytes, stream);
      args.x.data = x_memory;
      args.y.data = grown(workplace_.y, y_bytes);
    }
    grown(workplace_.workspace, plan_->workspace_size());
    plan_->run(stream, workplace_.workspace, args);
    if (elsewhere) {
      copy(device, to, args.y.data, y_bytes, stream);
      workplace_.stream.synchronize();
    }
    if (dtype == DType::bf16)
      std::transform(workplace_.y_bf16.begin(), workplace_.y_bf16.end(), y, from_bf16);
  }
  Product product() const override { return product_; }
  int64_t memory_bytes() const override { return packed_.view().num_bytes; }

 private:
  // The plan for m rows: the last one, where it fits.
  void select(int64_t m) {
    if (plan_ && plan_->descriptor().m == m) return;
    const Options& options = workplace_.options;
    plan_ = QgemmPlan::select(options.device,
                              {.spec = packed_.view().spec,
                               .m = m,
                               .n = packed_.view().rows,
                               .k = packed_.view().cols,
                               .dtype = options.dtype,
                               .bias = bias_.num_elements() > 0},
                              {.num_threads = options.num_threads});
    const std::string& kernel = plan_->sku().kernel;
    if (product_.kernel.find(kernel) == std::string::npos)
      product_.kernel += (product_.kernel.empty() ? "" : ", ") + kernel;
  }
  std::byte* grown(Memory& memory, int64_t num_bytes) const {
    if (memory.num_bytes() < num_bytes) memory = Memory(workplace_.options.device, num_bytes);
    return memory.data();
  }

  Product product_;
  Workplace& workplace_;
  PackedTensor packed_;  // on the device, as the bias
  Tensor bias_;
  std::optional<QgemmPlan> plan_;
};

// Why products cannot read the codes of a weight; empty: they can.
std::string refusal(const Weight& weight) {
  try {
    packed_weight_bytes(weight.spec, weight.shape[0], weight.shape[1]);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::usage) throw;
    return error.what();
  }
  return "";
}

}  // namespace

Workplace::Workplace(const Options& wanted) : options(wanted), stream(wanted.device) {}

std::unique_ptr<Linear> make_linear(const Checkpoint& checkpoint, const Weight& weight,
                                    std::vector<float> bias, Workplace& workplace) {
  Product product{describe(weight), weight.layout ? "dequantized" : "dense", "", ""};
  if (weight.layout && workplace.options.matmul == Matmul::fused) {
    product.reason = refusal(weight);
    if (product.reason.empty()) return std::make_unique<QuantizedLinear>(checkpoint, weight, bias, workplace);
  }
  return std::make_unique<DenseLinear>(checkpoint, weight, std::move(bias), std::move(product), workplace);
}

}  // namespace llama
