#include "config.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "halfbyte/error.hpp"

namespace llama {
namespace {

using halfbyte::Error;
using halfbyte::ErrorCode;
using nlohmann::json;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::bad_input, "config.json: " + message);
}

// The value of a key, or of its absence (null is absence too). Wrong types end in nlohmann's exceptions.
template <class T>
T value_or(const json& object, const char* key, T absent) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? absent : found->get<T>();
}

template <class T>
T required(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) refuse(std::string("no \"") + key + "\"");
  return found->get<T>();
}

int64_t extent(const char* key, int64_t value) {
  if (value < 1 || value > INT32_MAX)
    refuse(std::string("\"") + key + "\" must be from 1 to 2147483647, got " + std::to_string(value));
  return value;
}

double positive(const char* key, double value) {
  if (!(value > 0) || !std::isfinite(value))
    refuse(std::string("\"") + key + "\" must be positive, got " + std::to_string(value));
  return value;
}

// Frequencies fall from 1 to almost 1 / theta. Scaled kinds serve longer texts than the model was first
// trained on: "linear" divides all of them by a factor, "llama3" those of wavelengths beyond the old length,
// with a ramp.
std::vector<float> rope_frequencies(const json& config, int64_t head_dim) {
  json rope = value_or(config, "rope_parameters", json::object());
  if (rope.empty()) rope = value_or(config, "rope_scaling", json::object());
  const double theta =
      positive("rope_theta", value_or(rope, "rope_theta", value_or(config, "rope_theta", 10000.0)));
  const auto type = value_or(rope, "rope_type", value_or<std::string>(rope, "type", "default"));
  if (type != "default" && type != "linear" && type != "llama3")
    refuse("\"rope_type\" must be default, linear or llama3, got \"" + type + "\"");
  const double factor = type == "default" ? 1 : positive("factor", required<double>(rope, "factor"));
  double low = 0, high = 0, old_length = 0;
  if (type == "llama3") {
    low = positive("low_freq_factor", required<double>(rope, "low_freq_factor"));
    high = positive("high_freq_factor", required<double>(rope, "high_freq_factor"));
    old_length = positive("original_max_position_embeddings",
                          required<double>(rope, "original_max_position_embeddings"));
    if (high <= low) refuse("\"high_freq_factor\" must be larger than \"low_freq_factor\"");
  }
  std::vector<float> frequencies;
  for (int64_t i = 0; i < head_dim / 2; ++i) {
    const double frequency = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
    double kept = 0;  // the share that is not divided by the factor
    if (type == "llama3") {
      const double turns = old_length * frequency / (2 * std::acos(-1.0));  // within the old length
      kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    }
    frequencies.push_back(static_cast<float>(frequency * (kept + (1 - kept) / factor)));
  }
  return frequencies;
}

// What experts there are, and in which layers.
void parse_experts(const json& object, Config& config) {
  const auto get = [&](const char* key) { return extent(key, required<int64_t>(object, key)); };
  const bool is_mixtral = config.model_type == "mixtral";
  const char* const num_experts = is_mixtral ? "num_local_experts" : "num_experts";
  config.num_experts = get(num_experts);
  config.experts_per_token = get("num_experts_per_tok");
  if (config.experts_per_token > config.num_experts)
    refuse(std::string("\"num_experts_per_tok\" must be at most \"") + num_experts + "\", got " +
           std::to_string(config.experts_per_token) + " and " + std::to_string(config.num_experts));
  config.expert_intermediate_size = get(is_mixtral ? "intermediate_size" : "moe_intermediate_size");
  config.normalizes_routing = is_mixtral || value_or(object, "norm_topk_prob", false);
  if (is_mixtral) return;
  config.sparse_step = extent("decoder_sparse_step", value_or<int64_t>(object, "decoder_sparse_step", 1));
  config.dense_layers = value_or(object, "mlp_only_layers", std::vector<int64_t>());
}

Config parse(const json& object) {
  Config config;
  config.model_type = required<std::string>(object, "model_type");
  // mistral and qwen2 are llama with other biases and a window of attention.
  const bool is_mixture = config.model_type == "mixtral" || config.model_type == "qwen3_moe";
  if (config.model_type != "llama" && config.model_type != "mistral" && config.model_type != "qwen2" &&
      !is_mixture)
    refuse("\"model_type\" must be llama, mistral, mixtral, qwen2 or qwen3_moe, got \"" + config.model_type +
           "\"");
  const auto act = value_or<std::string>(object, "hidden_act", "silu");
  if (act != "silu") refuse("\"hidden_act\" must be silu, got \"" + act + "\"");
  if (value_or(object, "partial_rotary_factor", 1.0) != 1) refuse("\"partial_rotary_factor\" must be 1");
  const auto get = [&](const char* key) { return extent(key, required<int64_t>(object, key)); };
  const auto get_or = [&](const char* key, int64_t absent) {
    return extent(key, value_or(object, key, absent));
  };
  config.vocab_size = get("vocab_size");
  if (config.vocab_size != 256)
    refuse("\"vocab_size\" must be 256, as bytes are the tokens, got " + std::to_string(config.vocab_size));
  config.hidden_size = get("hidden_size");
  config.num_layers = get("num_hidden_layers");
  if (is_mixture) parse_experts(object, config);
  // Only layers without experts have it.
  if (!is_mixture || config.sparse_step > 1 || !config.dense_layers.empty())
    config.intermediate_size = get("intermediate_size");
  config.num_heads = get("num_attention_heads");
  config.num_kv_heads = get_or("num_key_value_heads", config.num_heads);
  config.head_dim = get_or("head_dim", config.hidden_size / config.num_heads);
  config.max_positions = get_or("max_position_embeddings", 2048);
  if (config.num_heads % config.num_kv_heads != 0)
    refuse("\"num_attention_heads\" must be a multiple of \"num_key_value_heads\"");
  if (config.head_dim % 2 != 0) refuse("\"head_dim\" must be even, got " + std::to_string(config.head_dim));
  // Within the window of attention there is no difference from full attention.
  if (value_or(object, "use_sliding_window", true) && config.model_type != "llama")
    config.max_positions = std::min(config.max_positions, get_or("sliding_window", INT32_MAX));
  config.rms_norm_eps = static_cast<float>(value_or(object, "rms_norm_eps", 1e-6));
  config.tie_word_embeddings = value_or(object, "tie_word_embeddings", false);
  config.normalizes_heads = config.model_type == "qwen3_moe";
  config.rope_frequencies = rope_frequencies(object, config.head_dim);
  return config;
}

}  // namespace

bool Config::has_experts(int64_t layer) const {
  return num_experts > 0 && (layer + 1) % sparse_step == 0 &&
         std::find(dense_layers.begin(), dense_layers.end(), layer) == dense_layers.end();
}

Config read_config(const std::string& directory) {
  const std::string path = directory + "/config.json";
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(ErrorCode::io, path + ": cannot be opened");
  try {
    return parse(json::parse(file));
  } catch (const json::exception& error) {
    refuse(error.what());
  }
}

}  // namespace llama
