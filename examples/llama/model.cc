#include "model.h"

#include <algorithm>

namespace llama {

using halfbyte::Checkpoint;
using halfbyte::DType;
using halfbyte::Error;
using halfbyte::ErrorCode;
using halfbyte::ParallelStyle;
using halfbyte::Weight;

Model::Model(const std::string& directory, const Options& options)
    : config_(read_config(directory)), checkpoint_(Checkpoint::open(directory)), workplace_(options) {
  const Config& c = config_;
  const int64_t hidden = c.hidden_size, q_size = c.num_heads * c.head_dim,
                kv_size = c.num_kv_heads * c.head_dim;
  embedding_ = &take("model.embed_tokens.weight", {c.vocab_size, hidden});
  for (int64_t i = 0; i < c.num_layers; ++i) {
    const std::string layer = "model.layers." + std::to_string(i) + ".";
    Layer& added = layers_.emplace_back();
    added.input_norm = take_values(layer + "input_layernorm.weight", {hidden});
    added.post_attention_norm = take_values(layer + "post_attention_layernorm.weight", {hidden});
    if (c.normalizes_heads) {
      added.q_norm = take_values(layer + "self_attn.q_norm.weight", {c.head_dim});
      added.k_norm = take_values(layer + "self_attn.k_norm.weight", {c.head_dim});
    }
    added.q = take_linear(layer + "self_attn.q_proj", q_size, hidden, ParallelStyle::colwise);
    added.k = take_linear(layer + "self_attn.k_proj", kv_size, hidden, ParallelStyle::colwise);
    added.v = take_linear(layer + "self_attn.v_proj", kv_size, hidden, ParallelStyle::colwise);
    added.o = take_linear(layer + "self_attn.o_proj", hidden, q_size, ParallelStyle::rowwise);
    if (c.has_experts(i))
      take_experts(layer, added);
    else
      take_feed_forward(layer, added);
  }
  norm_ = take_values("model.norm.weight", {hidden});
  head_ = c.tie_word_embeddings
              ? make_linear(checkpoint_, *embedding_, {}, workplace_, 0, ParallelStyle::colwise)
              : take_linear("lm_head", c.vocab_size, hidden, ParallelStyle::colwise);
  refuse_unused();
  const auto is_fused = [](const auto& entry) {
    return entry.first.kind.starts_with("fused") || entry.first.kind == "grouped";
  };
  const std::map<Product, int64_t> all = products();
  if (options.device != halfbyte::Device{} && std::none_of(all.begin(), all.end(), is_fused))
    throw Error(ErrorCode::usage,
                to_string(options.device) +
                    ": must have fused products with quantized weights to compute; this model "
                    "has none, and dense ones are computed on the host");
}

const Weight& Model::take(const std::string& name, std::vector<int64_t> shape) {
  const Weight* weight = checkpoint_.find(name);
  if (weight == nullptr) throw Error(ErrorCode::bad_input, "the checkpoint has no weight \"" + name + "\"");
  if (weight->shape != shape) {
    const auto text = [](const std::vector<int64_t>& extents) {
      std::string list;
      for (const int64_t extent : extents) list += (list.empty() ? "" : ", ") + std::to_string(extent);
      return "[" + list + "]";
    };
    throw Error(ErrorCode::bad_input, name + ": must have the shape " + text(shape) +
                                          " by config.json, got " + text(weight->shape));
  }
  if (!weight->dtype)
    throw Error(ErrorCode::bad_input, name + ": must be of f32, f16, bf16 or f64, or quantized by halfbyte");
  taken_.insert(name);
  stored_bytes_ += static_cast<int64_t>(weight->num_bytes);
  return *weight;
}

std::vector<float> Model::take_values(const std::string& name, std::vector<int64_t> shape) {
  const Weight& weight = take(name, std::move(shape));
  std::vector<float> values(static_cast<size_t>(weight.shape[0]));
  checkpoint_.decode(weight, 0, weight.shape[0], DType::f32, values.data());
  return values;
}

std::unique_ptr<Linear> Model::take_linear(const std::string& module, int64_t n, int64_t k,
                                           std::optional<ParallelStyle> style) {
  const Weight& weight = take(module + ".weight", {n, k});
  std::vector<float> bias;
  if (checkpoint_.find(module + ".bias") != nullptr) bias = take_values(module + ".bias", {n});
  return make_linear(checkpoint_, weight, std::move(bias), workplace_, 0, style);
}

void Model::take_feed_forward(const std::string& layer, Layer& result) {
  const int64_t hidden = config_.hidden_size, intermediate = config_.intermediate_size;
  result.gate = take_linear(layer + "mlp.gate_proj", intermediate, hidden, ParallelStyle::colwise);
  result.up = take_linear(layer + "mlp.up_proj", intermediate, hidden, ParallelStyle::colwise);
  result.down = take_linear(layer + "mlp.down_proj", hidden, intermediate, ParallelStyle::rowwise);
}

void Model::take_experts(const std::string& layer, Layer& result) {
  const int64_t hidden = config_.hidden_size, intermediate = config_.expert_intermediate_size;
  const bool is_mixtral = config_.model_type == "mixtral";
  const std::string block = layer + (is_mixtral ? "block_sparse_moe." : "mlp.");
  result.router = take_linear(block + "gate", config_.num_experts, hidden);
  ExpertWeights weights{.num_experts = config_.num_experts};
  const auto take_all = [&](const std::string& name, const char* mixtral_name, int64_t n, int64_t k) {
    // MLX has the experts of a layer in one tensor.
    const std::string stack = block + "switch_mlp." + name + ".weight";
    if (checkpoint_.find(stack) != nullptr) return std::vector{&take(stack, {config_.num_experts, n, k})};
    std::vector<const Weight*> all;
    for (int64_t expert = 0; expert < config_.num_experts; ++expert)
      all.push_back(&take(
          block + "experts." + std::to_string(expert) + "." + (is_mixtral ? mixtral_name : name) + ".weight",
          {n, k}));
    return all;
  };
  weights.gate = take_all("gate_proj", "w1", intermediate, hidden);
  weights.up = take_all("up_proj", "w3", intermediate, hidden);
  weights.down = take_all("down_proj", "w2", hidden, intermediate);
  result.experts = make_experts(checkpoint_, weights, workplace_);
}

// A weight that nothing reads belongs to a model that computes something else.
void Model::refuse_unused() const {
  for (const Weight& weight : checkpoint_.weights()) {
    const bool derived = weight.name.ends_with("rotary_emb.inv_freq") ||
                         (config_.tie_word_embeddings && weight.name == "lm_head.weight");
    if (!derived && taken_.count(weight.name) == 0)
      throw Error(ErrorCode::bad_input, "weight \"" + weight.name + "\" is none of a model of the type \"" +
                                            config_.model_type + "\" with config.json's sizes");
  }
}

std::vector<const Linear*> Model::linears() const {
  std::vector<const Linear*> all{head_.get()};
  for (const Layer& layer : layers_)
    for (const auto* linear :
         {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down, &layer.router})
      if (*linear) all.push_back(linear->get());
  return all;
}

std::map<Product, int64_t> Model::products() const {
  std::map<Product, int64_t> counts;
  for (const Linear* linear : linears()) ++counts[linear->product()];
  for (const Layer& layer : layers_)
    if (layer.experts)
      for (const auto& [product, count] : layer.experts->products()) counts[product] += count;
  return counts;
}

int64_t Model::memory_bytes() const {
  int64_t bytes = 0;
  for (const Linear* linear : linears()) bytes += linear->memory_bytes();
  for (const Layer& layer : layers_)
    if (layer.experts) bytes += layer.experts->memory_bytes();
  return bytes;
}

Model::Cache Model::make_cache(int64_t capacity) const {
  Cache cache;
  for (int64_t i = 0; i < config_.num_layers; ++i)
    cache.layers.emplace_back(config_.num_kv_heads, config_.head_dim, capacity);
  return cache;
}

std::vector<float> Model::forward(std::span<const uint8_t> tokens, Cache& cache, int64_t num_logits) {
  const Config& c = config_;
  const int threads = workplace_.options.num_threads;
  const auto m = static_cast<int64_t>(tokens.size());
  const int64_t hidden = c.hidden_size, first = cache.length;
  const auto matrix = [](int64_t rows, int64_t columns) {
    return std::vector<float>(static_cast<size_t>(rows * columns));
  };
  std::vector<float> x = matrix(m, hidden), normed = x, output = x;
  std::vector<float> q = matrix(m, c.num_heads * c.head_dim), attended = q;
  std::vector<float> k = matrix(m, c.num_kv_heads * c.head_dim), v = k;
  std::vector<float> gate = matrix(m, c.intermediate_size), up = gate;
  std::vector<float> router_logits = matrix(m, c.num_experts);
  const auto normalize = [&](const std::vector<float>& weight) {
    rms_norm(x.data(), m, hidden, weight.data(), c.rms_norm_eps, normed.data(), threads);
  };
  const auto normalize_heads = [&](std::vector<float>& heads, const std::vector<float>& weight) {
    if (!weight.empty())
      rms_norm(heads.data(), static_cast<int64_t>(heads.size()) / c.head_dim, c.head_dim, weight.data(),
               c.rms_norm_eps, heads.data(), threads);
  };
  const auto add_output = [&] {
    for (size_t i = 0; i < x.size(); ++i) x[i] += output[i];
  };

  for (int64_t row = 0; row < m; ++row)
    checkpoint_.decode(*embedding_, tokens[static_cast<size_t>(row)] * hidden, hidden, DType::f32,
                       x.data() + row * hidden);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Layer& layer = layers_[i];
    normalize(layer.input_norm);
    layer.q->forward(normed.data(), m, q.data());
    layer.k->forward(normed.data(), m, k.data());
    layer.v->forward(normed.data(), m, v.data());
    normalize_heads(q, layer.q_norm);
    normalize_heads(k, layer.k_norm);
    rope(q.data(), m, c.num_heads, c.rope_frequencies, first, threads);
    rope(k.data(), m, c.num_kv_heads, c.rope_frequencies, first, threads);
    cache.layers[i].store(k.data(), v.data(), m, first);
    attention(q.data(), m, c.num_heads, cache.layers[i], first, attended.data(), threads);
    layer.o->forward(attended.data(), m, output.data());
    add_output();
    normalize(layer.post_attention_norm);
    if (layer.experts) {
      layer.router->forward(normed.data(), m, router_logits.data());
      layer.experts->forward(
          normed.data(), m,
          route(router_logits.data(), m, c.num_experts, c.experts_per_token, c.normalizes_routing),
          output.data());
    } else {
      layer.gate->forward(normed.data(), m, gate.data());
      layer.up->forward(normed.data(), m, up.data());
      silu_multiply(gate.data(), up.data(), static_cast<int64_t>(gate.size()), threads);
      layer.down->forward(gate.data(), m, output.data());
    }
    add_output();
  }
  cache.length += m;
  normalize(norm_);
  // From the start of memory, where the rows are aligned.
  std::copy(normed.end() - num_logits * hidden, normed.end(), normed.begin());
  std::vector<float> logits = matrix(num_logits, c.vocab_size);
  head_->forward(normed.data(), num_logits, logits.data());
  return logits;
}

}  // namespace llama
