#include "linear.h"

#include <algorithm>
#include <optional>

#include "halfbyte/qgemm.hpp"
#include "host_math.h"

namespace llama {
namespace {

using namespace halfbyte;

// ---- Dense, or decoded when it is loaded

class DenseLinear : public Linear {
 public:
  DenseLinear(const Checkpoint& checkpoint, const Weight& weight, std::vector<float> bias, Product product,
              Workplace& workplace, int64_t expert)
      : n_(weight.shape.end()[-2]),
        k_(weight.shape.end()[-1]),
        matrix_(decoded(checkpoint, weight, n_ * k_, expert).data(), n_, k_),
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
  static std::vector<float> decoded(const Checkpoint& checkpoint, const Weight& weight, int64_t count,
                                    int64_t expert) {
    std::vector<float> values(static_cast<size_t>(count));
    checkpoint.decode(weight, expert * count, count, DType::f32, values.data());
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
                  Workplace& workplace, int64_t expert)
      : product_{describe(weight), "fused", "", ""}, workplace_(workplace) {
    const Options& options = workplace.options;
    const Execution execution{.num_threads = options.num_threads};
    packed_ = load_weight(checkpoint, weight.name, {}, execution)
                  .pack(execution, expert)
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
    select(m);
    Qgemm::Args args{.weight = packed_.view()};
    args.x = workplace_.upload(x, m, packed_.view().cols);
    args.y = workplace_.output(y, m, packed_.view().rows);
    if (plan_->descriptor().bias) args.bias = bias_.view();
    workplace_.reserve(workplace_.workspace, plan_->workspace_size());
    plan_->run(workplace_.stream.handle(), workplace_.workspace, args);
    workplace_.download(args.y, y);
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
    product_.add_kernel(plan_->sku().kernel);
  }

  Product product_;
  Workplace& workplace_;
  PackedTensor packed_;  // on the device, as the bias
  Tensor bias_;
  std::optional<QgemmPlan> plan_;
};

}  // namespace

void Product::add_kernel(const std::string& name) {
  if (kernel.find(name) == std::string::npos) kernel += (kernel.empty() ? "" : ", ") + name;
}

Workplace::Workplace(const Options& wanted) : options(wanted), stream(wanted.device) {}

std::byte* Workplace::reserve(Memory& memory, int64_t num_bytes) const {
  if (memory.num_bytes() < num_bytes) memory = Memory(options.device, num_bytes);
  return memory.data();
}

ConstTensorView Workplace::upload(const float* x_values, int64_t m, int64_t columns) {
  const auto& [device, dtype, matmul, num_threads] = options;
  const void* from = x_values;
  if (dtype == DType::bf16) {
    x_bf16.resize(static_cast<size_t>(m * columns));
    std::transform(x_values, x_values + m * columns, x_bf16.begin(), to_bf16);
    from = x_bf16.data();
  }
  if (device != Device{}) {
    const int64_t num_bytes = m * columns * size_of(dtype);
    void* const memory = reserve(x, num_bytes);
    copy(device, memory, from, num_bytes, stream.handle());
    from = memory;
  }
  return {from, dtype, {m, columns}, {}, device};
}

TensorView Workplace::output(float* y_values, int64_t m, int64_t columns) {
  const auto& [device, dtype, matmul, num_threads] = options;
  void* to = y_values;
  if (dtype == DType::bf16) {
    y_bf16.resize(static_cast<size_t>(m * columns));
    to = y_bf16.data();
  }
  if (device != Device{}) to = reserve(y, m * columns * size_of(dtype));
  return {to, dtype, {m, columns}, {}, device};
}

void Workplace::download(const TensorView& from, float* y_values) {
  const bool is_bf16 = options.dtype == DType::bf16;
  const int64_t count = num_elements(from);
  if (options.device != Device{}) {
    void* const to = is_bf16 ? static_cast<void*>(y_bf16.data()) : y_values;
    copy(options.device, to, from.data, count * size_of(from.dtype), stream.handle());
    stream.synchronize();
  }
  if (is_bf16) std::transform(y_bf16.begin(), y_bf16.begin() + count, y_values, from_bf16);
}

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

std::string why_not_packed(const Weight& weight) {
  try {
    packed_weight_bytes(weight.spec, weight.shape.end()[-2], weight.shape.end()[-1]);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::usage) throw;
    return error.what();
  }
  return "";
}

std::unique_ptr<Linear> make_linear(const Checkpoint& checkpoint, const Weight& weight,
                                    std::vector<float> bias, Workplace& workplace, int64_t expert) {
  Product product{describe(weight), weight.layout ? "dequantized" : "dense", "", ""};
  if (weight.layout && workplace.options.matmul == Matmul::fused) {
    product.reason = why_not_packed(weight);
    if (product.reason.empty())
      return std::make_unique<QuantizedLinear>(checkpoint, weight, bias, workplace, expert);
  }
  return std::make_unique<DenseLinear>(checkpoint, weight, std::move(bias), std::move(product), workplace,
                                       expert);
}

}  // namespace llama
