#include "experts.h"

#include <algorithm>
#include <array>
#include <optional>

#include "halfbyte/qgemm_grouped.hpp"

namespace llama {
namespace {

using namespace halfbyte;

// ---- One after the other

class LoopedExperts : public Experts {
 public:
  LoopedExperts(const Checkpoint& checkpoint, const ExpertWeights& weights, Workplace& workplace)
      : hidden_size_(weights.gate[0]->shape.end()[-1]),
        intermediate_size_(weights.gate[0]->shape.end()[-2]),
        num_threads_(workplace.options.num_threads) {
    for (int64_t expert = 0; expert < weights.num_experts; ++expert) {
      const auto make = [&](const std::vector<const Weight*>& of) {
        return of.size() == 1 ? make_linear(checkpoint, *of[0], {}, workplace, expert)
                              : make_linear(checkpoint, *of[static_cast<size_t>(expert)], {}, workplace);
      };
      experts_.push_back({make(weights.gate), make(weights.up), make(weights.down)});
    }
  }

  void forward(const float* x, int64_t m, const Routing& routing, float* y) override {
    std::fill(y, y + m * hidden_size_, 0.0f);
    for (size_t expert = 0; expert < experts_.size(); ++expert) {
      std::vector<size_t> slots;
      for (size_t slot = 0; slot < routing.experts.size(); ++slot)
        if (routing.experts[slot] == static_cast<int32_t>(expert)) slots.push_back(slot);
      if (slots.empty()) continue;
      const auto token = [&](size_t slot) { return static_cast<int64_t>(slot) / routing.per_token; };
      const auto rows = static_cast<int64_t>(slots.size());
      std::vector<float> own_x, output(static_cast<size_t>(rows * hidden_size_));
      for (const size_t slot : slots)
        own_x.insert(own_x.end(), x + token(slot) * hidden_size_, x + (token(slot) + 1) * hidden_size_);
      std::vector<float> gate(static_cast<size_t>(rows * intermediate_size_)), up = gate;
      const auto& [gate_layer, up_layer, down_layer] = experts_[expert];
      gate_layer->forward(own_x.data(), rows, gate.data());
      up_layer->forward(own_x.data(), rows, up.data());
      silu_multiply(gate.data(), up.data(), static_cast<int64_t>(gate.size()), num_threads_);
      down_layer->forward(gate.data(), rows, output.data());
      const float* from = output.data();
      for (const size_t slot : slots)
        for (int64_t i = 0; i < hidden_size_; ++i)
          y[token(slot) * hidden_size_ + i] += routing.weights[slot] * *from++;
    }
  }
  std::map<Product, int64_t> products() const override {
    std::map<Product, int64_t> counts;
    for (const auto& expert : experts_)
      for (const auto& linear : expert) ++counts[linear->product()];
    return counts;
  }
  int64_t memory_bytes() const override {
    int64_t bytes = 0;
    for (const auto& expert : experts_)
      for (const auto& linear : expert) bytes += linear->memory_bytes();
    return bytes;
  }

 private:
  int64_t hidden_size_, intermediate_size_;
  int num_threads_;
  std::vector<std::array<std::unique_ptr<Linear>, 3>> experts_;  // gate, up, down
};

// ---- All at once: the product reads the codes of those that have rows

PackedExperts load_stack(const Checkpoint& checkpoint, const std::vector<const Weight*>& weights,
                         int64_t num_experts, Execution execution) {
  const std::vector<int64_t>& shape = weights[0]->shape;
  const PackedExperts stack(weights[0]->spec, num_experts, shape.end()[-2], shape.end()[-1]);
  int64_t expert = 0;
  for (const Weight* weight : weights) {
    const QuantizedTensor quantized = load_weight(checkpoint, weight->name, {}, execution);
    for (int64_t i = 0; i < quantized.num_experts(); ++i)
      reorder(quantized.weight_view(i), stack.view(expert++), execution);
  }
  return stack;
}

// Of each expert the rows of gate, then those of up. Throws Error(usage) as PackedTensor::concat_rows.
PackedExperts joined(const PackedExperts& gate, const PackedExperts& up) {
  PackedExperts stack;
  for (int64_t expert = 0; expert < gate.num_experts(); ++expert) {
    const std::array<ConstPackedWeight, 2> parts{gate.view(expert), up.view(expert)};
    const PackedTensor both = PackedTensor::concat_rows(parts);
    const PackedWeight& from = both.view();
    if (expert == 0) stack = PackedExperts(from.spec, gate.num_experts(), from.rows, from.cols);
    const PackedWeight to = stack.view(expert);
    copy({}, to.data, from.data, to.num_bytes);
  }
  return stack;
}

// Products with the weights of one projection, or of gate and up together.
class GroupedProduct {
 public:
  // `descriptor` without what the weights say.
  GroupedProduct(const PackedExperts& weights, QgemmGroupedDescriptor descriptor, Product product,
                 int64_t num_layers, const Workplace& workplace)
      : weights_(weights.to(workplace.options.device, workplace.stream.handle())),
        descriptor_(std::move(descriptor)),
        product_(std::move(product)),
        num_layers_(num_layers) {
    descriptor_.spec = weights.stack().spec;
    descriptor_.num_experts = weights.num_experts();
    descriptor_.n = weights.stack().rows;
    descriptor_.k = weights.stack().cols;
    descriptor_.dtype = workplace.options.dtype;
    descriptor_.rows = ExpertRows::indices;
  }

  // The plan for so many tokens: the last one, where it fits.
  void select(int64_t tokens, int64_t top_k, Workplace& workplace) {
    if (!plan_ || descriptor_.m != tokens) {
      descriptor_.m = tokens;
      descriptor_.top_k = top_k;
      plan_ = QgemmGroupedPlan::select(workplace.options.device, descriptor_,
                                       {.num_threads = workplace.options.num_threads});
      product_.add_kernel(plan_->sku().kernel);
    }
    workplace.reserve(workplace.workspace, plan_->workspace_size());
  }
  void run(QgemmGrouped::Args args, const Workplace& workplace) const {
    args.weight = weights_.stack();
    if (!descriptor_.routing_weights) args.routing_weights = {};
    plan_->run(workplace.stream.handle(), workplace.workspace, args);
  }
  void count(std::map<Product, int64_t>& products) const { products[product_] += num_layers_; }
  int64_t memory_bytes() const { return weights_.stack().num_bytes; }

 private:
  PackedExperts weights_;  // on the device
  QgemmGroupedDescriptor descriptor_;
  Product product_;
  int64_t num_layers_;
  std::optional<QgemmGroupedPlan> plan_;
};

class GroupedExperts : public Experts {
 public:
  GroupedExperts(const Checkpoint& checkpoint, const ExpertWeights& weights, Workplace& workplace)
      : num_experts_(weights.num_experts),
        hidden_size_(weights.gate[0]->shape.end()[-1]),
        intermediate_size_(weights.gate[0]->shape.end()[-2]),
        workplace_(workplace) {
    const Execution execution{.num_threads = workplace.options.num_threads};
    const auto load = [&](const std::vector<const Weight*>& of) {
      return load_stack(checkpoint, of, num_experts_, execution);
    };
    const auto add = [&](const PackedExperts& stack, const QgemmGroupedDescriptor& descriptor,
                         const Weight& weight, int64_t projections, const std::string& reason) {
      products_.emplace_back(stack, descriptor, Product{describe(weight), "grouped", "", reason},
                             projections * num_experts_, workplace);
    };
    const PackedExperts gate = load(weights.gate), up = load(weights.up);
    try {
      add(joined(gate, up), {.swiglu = true}, *weights.gate[0], 2, "");
    } catch (const Error& error) {
      if (error.code() != ErrorCode::usage) throw;
      add(gate, {}, *weights.gate[0], 1, error.what());
      add(up, {}, *weights.up[0], 1, error.what());
    }
    add(load(weights.down), {.x_per_slot = true, .sum_slots = true, .routing_weights = true},
        *weights.down[0], 1, "");
  }

  void forward(const float* x, int64_t m, const Routing& routing, float* y) override {
    select(m, routing.per_token);
    const int64_t slots = m * routing.per_token;
    QgemmGrouped::Args args = enqueue_route(m, routing);
    const ConstTensorView hidden =
        products_.size() == 2 ? enqueue_gate_up(x, m, slots, args) : multiply_on_host(x, m, slots, args);
    args.x = hidden;
    args.y = workplace_.output(y, m, hidden_size_);
    products_.back().run(args, workplace_);
    workplace_.download(args.y, y);
  }
  std::map<Product, int64_t> products() const override {
    std::map<Product, int64_t> counts;
    for (const GroupedProduct& product : products_) product.count(counts);
    return counts;
  }
  int64_t memory_bytes() const override {
    int64_t bytes = 0;
    for (const GroupedProduct& product : products_) bytes += product.memory_bytes();
    return bytes;
  }

 private:
  void select(int64_t m, int64_t top_k) {
    const Options& options = workplace_.options;
    if (!route_ || route_->descriptor().tokens != m)
      route_ = RoutePlan::select(options.device, {.tokens = m, .top_k = top_k, .num_experts = num_experts_},
                                 {.num_threads = options.num_threads});
    workplace_.reserve(workplace_.workspace, route_->workspace_size());
    for (GroupedProduct& product : products_) product.select(m, top_k, workplace_);
  }

  // The arguments of all products.
  QgemmGrouped::Args enqueue_route(int64_t m, const Routing& routing) {
    const Device device = workplace_.options.device;
    void* const stream = workplace_.stream.handle();
    const int64_t slots = m * routing.per_token;
    std::byte* memory = workplace_.reserve(workplace_.routing, (num_experts_ + 3 * slots) * 4);
    const auto next = [&](DType dtype, const Extents& shape) {
      const TensorView tensor{memory, dtype, shape, {}, device};
      memory += num_elements(tensor) * 4;
      return tensor;
    };
    const TensorView offsets = next(DType::i32, {num_experts_}), sorted = next(DType::i32, {slots}),
                     experts = next(DType::i32, {m, routing.per_token}),
                     weights = next(DType::f32, {m, routing.per_token});
    copy(device, experts.data, routing.experts.data(), slots * 4, stream);
    copy(device, weights.data, routing.weights.data(), slots * 4, stream);
    route_->run(stream, workplace_.workspace, {.experts = experts, .offsets = offsets, .slots = sorted});
    QgemmGrouped::Args args;
    args.offsets = offsets;
    args.slots = sorted;
    args.routing_weights = weights;
    return args;
  }

  // What the weights of down meet, on the device.
  ConstTensorView enqueue_gate_up(const float* x, int64_t m, int64_t slots, QgemmGrouped::Args args) {
    const Device device = workplace_.options.device;
    const DType dtype = workplace_.options.dtype;
    std::byte* const memory =
        workplace_.reserve(workplace_.hidden, slots * intermediate_size_ * size_of(dtype));
    args.x = workplace_.upload(x, m, hidden_size_);
    args.y = {memory, dtype, {slots, intermediate_size_}, {}, device};
    products_[0].run(args, workplace_);
    return args.y;
  }
  ConstTensorView multiply_on_host(const float* x, int64_t m, int64_t slots, QgemmGrouped::Args args) {
    gate_.resize(static_cast<size_t>(slots * intermediate_size_));
    up_.resize(gate_.size());
    args.x = workplace_.upload(x, m, hidden_size_);
    for (const auto& [product, to] : {std::pair(&products_[0], &gate_), std::pair(&products_[1], &up_)}) {
      args.y = workplace_.output(to->data(), slots, intermediate_size_);
      product->run(args, workplace_);
      workplace_.download(args.y, to->data());
    }
    silu_multiply(gate_.data(), up_.data(), slots * intermediate_size_, workplace_.options.num_threads);
    return workplace_.upload(gate_.data(), slots, intermediate_size_);
  }

  int64_t num_experts_, hidden_size_, intermediate_size_;
  Workplace& workplace_;
  std::vector<GroupedProduct> products_;  // gate and up together, or gate, up; then down
  std::optional<RoutePlan> route_;
  std::vector<float> gate_, up_;
};

// Whether products can read the codes of these in one run.
bool is_stack(const std::vector<const Weight*>& weights) {
  return std::all_of(weights.begin(), weights.end(), [&](const Weight* weight) {
    return weight->layout && weight->spec == weights[0]->spec && why_not_packed(*weight).empty();
  });
}

}  // namespace

std::unique_ptr<Experts> make_experts(const Checkpoint& checkpoint, const ExpertWeights& weights,
                                      Workplace& workplace) {
  if (workplace.options.matmul == Matmul::fused && is_stack(weights.gate) && is_stack(weights.up) &&
      is_stack(weights.down))
    return std::make_unique<GroupedExperts>(checkpoint, weights, workplace);
  return std::make_unique<LoopedExperts>(checkpoint, weights, workplace);
}

}  // namespace llama
