// What config.json says of a model of the Llama type, or of one whose layers have experts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace llama {

struct Config {
  std::string model_type;
  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0;
  int64_t num_layers = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0;
  int64_t max_positions = 0;  // that attention may span
  float rms_norm_eps = 0;
  bool tie_word_embeddings = false;
  bool normalizes_heads = false;  // queries and keys, head by head, before they are rotated
  int64_t num_experts = 0, experts_per_token = 0, expert_intermediate_size = 0;
  bool normalizes_routing = false;  // the routing weights of a token sum to 1
  // The last of every sparse_step layers has experts, unless it is one of dense_layers.
  int64_t sparse_step = 1;
  std::vector<int64_t> dense_layers;
  std::vector<float> rope_frequencies;  // [head_dim / 2]: radians a position

  bool has_experts(int64_t layer) const;
};

// Of `directory`/config.json. Throws halfbyte::Error: io, or bad_input for what the model here has not.
Config read_config(const std::string& directory);

}  // namespace llama
