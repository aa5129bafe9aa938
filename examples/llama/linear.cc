#include "linear.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <thread>

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

// Of products: in their dtype, on their device. Empty: there is none.
Tensor bias_tensor(const std::vector<float>& bias, const Workplace& workplace) {
  if (bias.empty()) return {};
  const Options& options = workplace.options;
  const Tensor host({}, options.dtype, {static_cast<int64_t>(bias.size())});
  for (size_t i = 0; i < bias.size(); ++i)
    if (options.dtype == DType::f32)
      reinterpret_cast<float*>(host.data())[i] = bias[i];
    else
      reinterpret_cast<uint16_t*>(host.data())[i] = to_bf16(bias[i]);
  return host.to(options.device, workplace.stream.handle());
}

QgemmDescriptor descriptor_of(const PackedTensor& weight, int64_t m, const Tensor& bias,
                              const Options& options) {
  return {.spec = weight.view().spec,
          .m = m,
          .n = weight.view().rows,
          .k = weight.view().cols,
          .dtype = options.dtype,
          .bias = bias.num_elements() > 0,
          .math = options.math};
}

class QuantizedLinear : public Linear {
 public:
  QuantizedLinear(const Checkpoint& checkpoint, const Weight& weight, const std::vector<float>& bias,
                  Workplace& workplace, int64_t expert, const std::string& why_whole = "")
      : product_{describe(weight), "fused", "", why_whole}, workplace_(workplace) {
    const Options& options = workplace.options;
    const Execution execution{.num_threads = options.num_threads};
    packed_ = load_weight(checkpoint, weight.name, {}, execution)
                  .pack(execution, expert)
                  .to(options.device, workplace.stream.handle());
    bias_ = bias_tensor(bias, workplace);
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
    plan_ = QgemmPlan::select(options.device, descriptor_of(packed_, m, bias_, options),
                              {.num_threads = options.num_threads});
    product_.add_kernel(plan_->sku().kernel);
  }

  Product product_;
  Workplace& workplace_;
  PackedTensor packed_;  // on the device, as the bias
  Tensor bias_;
  std::optional<QgemmPlan> plan_;
};

// ---- Quantized, and each member of a group has a part

class ParallelLinear : public Linear {
 public:
  // Throws Error(usage), with the reason, where the weight cannot be cut.
  ParallelLinear(const Checkpoint& checkpoint, const Weight& weight, const std::vector<float>& bias,
                 Workplace& workplace, ParallelStyle style)
      : n_(weight.shape[0]),
        k_(weight.shape[1]),
        style_(style),
        product_{describe(weight), std::string("fused, ") + to_string(style), "", ""},
        workplace_(workplace),
        parts_(workplace.group.size()) {
    const int axis = style == ParallelStyle::rowwise ? 1 : 0;
    // Whole groups; of rows whole strips, where there are some, so that the parts need no padding.
    const int64_t unit = axis == 1 ? weight.spec.group_size : n_ % 32 == 0 ? 32 : 1;
    for_each_member(false, [&](const Communicator& member, Workplace& own, Part& part) {
      const Execution execution{.num_threads = own.options.num_threads};
      part.slice = part_of(axis, weight.shape[static_cast<size_t>(axis)], unit, member.rank(), member.size());
      part.weight = load_weight(checkpoint, weight.name, {}, execution, part.slice)
                        .pack(execution)
                        .to(own.options.device, own.stream.handle());
      const bool cut = axis == 0 && !bias.empty();
      part.bias = bias_tensor(
          cut ? std::vector(bias.begin() + part.slice.begin, bias.begin() + part.slice.end) : bias, own);
    });
  }

  void forward(const float* x, int64_t m, float* y) override {
    for_each_member(true, [&](const Communicator& member, Workplace& own, Part& part) {
      const int64_t k = part.weight.view().cols, n = part.weight.view().rows;
      if (!part.plan || part.plan->descriptor().m != m)
        part.plan = ParallelQgemmPlan::select(member, descriptor_of(part.weight, m, part.bias, own.options),
                                              style_, {.num_threads = own.options.num_threads});
      const int64_t first = style_ == ParallelStyle::rowwise ? part.slice.begin : 0;
      part.x.resize(static_cast<size_t>(m * k));
      for (int64_t row = 0; row < m; ++row) std::copy_n(x + row * k_ + first, k, part.x.begin() + row * k);
      part.y.resize(static_cast<size_t>(m * n));
      Qgemm::Args args{.weight = part.weight.view()};
      args.x = own.upload(part.x.data(), m, k);
      args.y = own.output(part.y.data(), m, n);
      if (part.plan->descriptor().bias) args.bias = part.bias.view();
      own.reserve(own.workspace, part.plan->workspace_size());
      part.plan->run(own.stream.handle(), own.workspace, args);
      own.download(args.y, part.y.data());
    });
    product_.add_kernel(parts_[0].plan->sku().kernel);
    for (const Part& part : parts_) {
      const int64_t n = part.weight.view().rows;
      const int64_t first = style_ == ParallelStyle::colwise ? part.slice.begin : 0;
      for (int64_t row = 0; row < m; ++row) std::copy_n(part.y.begin() + row * n, n, y + row * n_ + first);
      if (style_ == ParallelStyle::rowwise) break;  // all have the sum
    }
  }
  Product product() const override { return product_; }
  int64_t memory_bytes() const override {
    int64_t sum = 0;
    for (const Part& part : parts_) sum += part.weight.view().num_bytes;
    return sum;
  }

 private:
  struct Part {
    Slice slice;  // of the weight
    PackedTensor weight;
    Tensor bias;
    std::optional<ParallelQgemmPlan> plan;  // the last one
    std::vector<float> x, y;
  };

  // Each member in a thread of its own; may_wait: for others, in `body`. Throws what the first threw that
  // no other one has ended.
  void for_each_member(bool may_wait,
                       const std::function<void(const Communicator&, Workplace&, Part&)>& body) {
    std::vector<std::exception_ptr> errors(parts_.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < parts_.size(); ++i)
      threads.emplace_back([&, i] {
        try {
          body(workplace_.group[i], workplace_.of_members[i], parts_[i]);
        } catch (...) {
          errors[i] = std::current_exception();
          if (may_wait) workplace_.group[i].abort();
        }
      });
    for (std::thread& thread : threads) thread.join();
    std::exception_ptr thrown;
    for (const std::exception_ptr& error : errors)
      if (error && (!thrown || is_cancelled(thrown))) thrown = error;
    if (thrown) std::rethrow_exception(thrown);
  }
  // By the failure of another member.
  static bool is_cancelled(const std::exception_ptr& thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      return error.code() == ErrorCode::cancelled;
    } catch (...) {
      return false;
    }
  }

  int64_t n_, k_;
  ParallelStyle style_;
  Product product_;
  Workplace& workplace_;
  std::vector<Part> parts_;
};

}  // namespace

void Product::add_kernel(const std::string& name) {
  if (kernel.find(name) == std::string::npos) kernel += (kernel.empty() ? "" : ", ") + name;
}

Workplace::Workplace(const Options& wanted) : options(wanted), stream(wanted.device) {
  if (options.members.size() < 2) return;
  group = Communicator::of_devices(options.members);
  for (const Device& device : options.members) {
    Options own = options;
    own.device = device;
    own.members.clear();
    own.num_threads = std::max(1, options.num_threads / static_cast<int>(options.members.size()));
    of_members.emplace_back(own);
  }
}

std::byte* Workplace::reserve(Memory& memory, int64_t num_bytes) const {
  if (memory.num_bytes() < num_bytes) memory = Memory(options.device, num_bytes);
  return memory.data();
}

ConstTensorView Workplace::upload(const float* x_values, int64_t m, int64_t columns) {
  const Device device = options.device;
  const DType dtype = options.dtype;
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
  const Device device = options.device;
  const DType dtype = options.dtype;
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
                                    std::vector<float> bias, Workplace& workplace, int64_t expert,
                                    std::optional<ParallelStyle> style) {
  Product product{describe(weight), weight.layout ? "dequantized" : "dense", "", ""};
  if (weight.layout && workplace.options.matmul == Matmul::fused) {
    product.reason = why_not_packed(weight);
    if (product.reason.empty() && style && !workplace.group.empty()) {
      try {
        return std::make_unique<ParallelLinear>(checkpoint, weight, bias, workplace, *style);
      } catch (const Error& error) {
        if (error.code() != ErrorCode::usage) throw;
        return std::make_unique<QuantizedLinear>(checkpoint, weight, bias, workplace, expert, error.what());
      }
    }
    if (product.reason.empty())
      return std::make_unique<QuantizedLinear>(checkpoint, weight, bias, workplace, expert);
  }
  return std::make_unique<DenseLinear>(checkpoint, weight, std::move(bias), std::move(product), workplace,
                                       expert);
}

}  // namespace llama
