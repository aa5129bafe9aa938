#include "linear.h"

#include <algorithm>
#include <nlohmann/json.hpp>
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

// What the layouts call the parts of the weight of a module.
struct PartNames {
  std::string codes = {}, scales = {}, zeros = {}, biases = {}, absmax = {}, map = {};
  std::string description = {}, offset = {};  // a text in JSON, and its key
};

PartNames part_names(const Weight& weight) {
  switch (*weight.layout) {
    case Layout::halfbyte:
      return {.codes = ".weight",
              .scales = ".weight.scales",
              .zeros = ".weight.zeros",
              .biases = ".weight.biases",
              .absmax = ".weight.scales_absmax",
              .description = ".weight.quant_spec",
              .offset = "scales_offset"};
    case Layout::bitsandbytes:
      return {
          .codes = ".weight",
          .scales = ".weight.absmax",
          .absmax = ".weight.nested_absmax",
          .map = ".weight.nested_quant_map",
          .description = std::string(".weight.quant_state.bitsandbytes__") + info(weight.spec.format).name,
          .offset = "nested_offset"};
    case Layout::compressed_tensors:
      return {.codes = ".weight_packed", .scales = ".weight_scale", .zeros = ".weight_zero_point"};
    case Layout::mlx:
      return {.codes = ".weight", .scales = ".scales", .biases = ".biases"};
    case Layout::gptq:
    case Layout::awq:
      break;
  }
  throw Error(ErrorCode::bug, "a layout without names");
}

// A quantized weight as it is stored, in host memory.
class StoredWeight {
 public:
  StoredWeight(const Checkpoint& checkpoint, const Weight& weight)
      : checkpoint_(checkpoint),
        weight_(weight),
        module_(weight.name.substr(0, weight.name.rfind(".weight"))) {
    const PartNames names = part_names(weight);
    view_.spec = weight.spec;
    view_.rows = weight.shape[0];
    view_.cols = weight.shape[1];
    view_.layout = *weight.layout;
    const WeightViewBytes bytes = weight_view_bytes(view_.spec, view_.rows, view_.cols, view_.layout);
    view_.codes = read(names.codes, bytes.codes);
    view_.scales = read(names.scales, bytes.scales);
    view_.zeros = read(names.zeros, bytes.zeros);
    view_.biases = read(names.biases, bytes.biases);
    if (!view_.spec.double_quant) return;
    view_.absmax = reinterpret_cast<float*>(read(names.absmax, bytes.absmax));
    // That of bitsandbytes stands in each file; ours is always the same.
    view_.map = names.map.empty() ? const_cast<float*>(double_quant_map())
                                  : reinterpret_cast<float*>(read(names.map, bytes.map));
    std::string text(part(names.description).num_bytes, '\0');
    checkpoint.read(part(names.description), 0, std::as_writable_bytes(std::span(text)));
    offset_ = nlohmann::json::parse(text).at(names.offset).get<float>();
    view_.offset = &offset_;
  }
  StoredWeight(const StoredWeight&) = delete;
  StoredWeight& operator=(const StoredWeight&) = delete;

  const WeightView& view() const { return view_; }

 private:
  const StoredTensor& part(const std::string& name) const {
    for (const int index : weight_.parts) {
      const StoredTensor& tensor = checkpoint_.tensors()[static_cast<size_t>(index)];
      if (tensor.name == module_ + name) return tensor;
    }
    throw Error(ErrorCode::bad_input, weight_.name + ": no part is named \"" + module_ + name + "\"");
  }
  std::byte* read(const std::string& name, int64_t num_bytes) {
    if (num_bytes == 0) return nullptr;
    const StoredTensor& tensor = part(name);
    if (tensor.num_bytes != static_cast<uint64_t>(num_bytes))
      throw Error(ErrorCode::bad_input, tensor.name + ": must have " + std::to_string(num_bytes) +
                                            " bytes, got " + std::to_string(tensor.num_bytes));
    const Memory& memory = parts_.emplace_back(Device{}, num_bytes);
    checkpoint_.read(tensor, 0, {memory.data(), static_cast<size_t>(num_bytes)});
    return memory.data();
  }

  const Checkpoint& checkpoint_;
  const Weight& weight_;
  std::string module_;
  std::vector<Memory> parts_;
  float offset_ = 0;
  WeightView view_;
};

class QuantizedLinear : public Linear {
 public:
  QuantizedLinear(const Checkpoint& checkpoint, const Weight& weight, const std::vector<float>& bias,
                  Workplace& workplace)
      : product_{describe(weight), "fused", "", ""}, workplace_(workplace) {
    const Options& options = workplace.options;
    const StoredWeight stored(checkpoint, weight);
    packed_.spec = weight.spec;
    packed_.rows = weight.shape[0];
    packed_.cols = weight.shape[1];
    packed_.num_bytes = packed_weight_bytes(packed_.spec, packed_.rows, packed_.cols);
    const Memory host(Device{}, packed_.num_bytes);
    packed_.data = host.data();
    reorder(stored.view(), packed_, {.num_threads = options.num_threads});
    memory_ = to_device(host, packed_.num_bytes);
    packed_.data = memory_.data();
    packed_.device = options.device;
    if (bias.empty()) return;
    const auto bias_bytes = static_cast<int64_t>(bias.size()) * size_of(options.dtype);
    const Memory host_bias(Device{}, bias_bytes);
    for (size_t i = 0; i < bias.size(); ++i)
      if (options.dtype == DType::f32)
        reinterpret_cast<float*>(host_bias.data())[i] = bias[i];
      else
        reinterpret_cast<uint16_t*>(host_bias.data())[i] = to_bf16(bias[i]);
    bias_ = to_device(host_bias, bias_bytes);
  }

  void forward(const float* x, int64_t m, float* y) override {
    const auto& [device, dtype, matmul, num_threads] = workplace_.options;
    const int64_t n = packed_.rows, k = packed_.cols;
    select(m);
    void *from = const_cast<float*>(x), *to = y;
    if (dtype == DType::bf16) {
      workplace_.x_bf16.resize(static_cast<size_t>(m * k));
      workplace_.y_bf16.resize(static_cast<size_t>(m * n));
      std::transform(x, x + m * k, workplace_.x_bf16.begin(), to_bf16);
      from = workplace_.x_bf16.data();
      to = workplace_.y_bf16.data();
    }
    Qgemm::Args args{.weight = packed_};
    args.x = {from, dtype, {m, k}, {}, device};
    args.y = {to, dtype, {m, n}, {}, device};
    if (plan_->descriptor().bias) args.bias = {bias_.data(), dtype, {n}, {}, device};
    const int64_t x_bytes = m * k * size_of(dtype), y_bytes = m * n * size_of(dtype);
    const bool elsewhere = device != Device{};
    void* stream = workplace_.stream.handle();
    if (elsewhere) {
      args.x.data = grown(workplace_.x, x_bytes);
      args.y.data = grown(workplace_.y, y_bytes);
      copy(device, args.x.data, from, x_bytes, stream);
    }
    plan_->run(stream, grown(workplace_.workspace, plan_->workspace_size()), args);
    if (elsewhere) {
      copy(device, to, args.y.data, y_bytes, stream);
      workplace_.stream.synchronize();
    }
    if (dtype == DType::bf16)
      std::transform(workplace_.y_bf16.begin(), workplace_.y_bf16.end(), y, from_bf16);
  }
  Product product() const override { return product_; }
  int64_t memory_bytes() const override { return packed_.num_bytes; }

 private:
  // The plan for m rows: the last one, where it fits.
  void select(int64_t m) {
    if (plan_ && plan_->descriptor().m == m) return;
    const Options& options = workplace_.options;
    plan_ = QgemmPlan::select(options.device,
                              {.spec = packed_.spec,
                               .m = m,
                               .n = packed_.rows,
                               .k = packed_.cols,
                               .dtype = options.dtype,
                               .bias = bias_.data() != nullptr},
                              {.num_threads = options.num_threads});
    const std::string& kernel = plan_->sku().kernel;
    if (product_.kernel.find(kernel) == std::string::npos)
      product_.kernel += (product_.kernel.empty() ? "" : ", ") + kernel;
  }
  Memory to_device(const Memory& host, int64_t num_bytes) const {
    if (workplace_.options.device == Device{}) return host;
    Memory memory(workplace_.options.device, num_bytes);
    copy(workplace_.options.device, memory.data(), host.data(), num_bytes, workplace_.stream.handle());
    workplace_.stream.synchronize();
    return memory;
  }
  std::byte* grown(Memory& memory, int64_t num_bytes) const {
    if (memory.num_bytes() < num_bytes) memory = Memory(workplace_.options.device, num_bytes);
    return memory.data();
  }

  Product product_;
  Workplace& workplace_;
  Memory memory_, bias_;  // of the device
  PackedWeight packed_;   // in memory_
  std::optional<QgemmPlan> plan_;
};

// Why products cannot read the codes of a weight; empty: they can.
std::string refusal(const Weight& weight) {
  const int64_t rows = weight.shape[0], cols = weight.shape[1];
  try {
    weight_view_bytes(weight.spec, rows, cols, *weight.layout);
    packed_weight_bytes(weight.spec, rows, cols);
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
