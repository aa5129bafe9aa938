// What config.json says of a model of the Llama type.
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
  std::vector<float> rope_frequencies;  // [head_dim / 2]: radians a position
};

// Of `directory`/config.json. Throws halfbyte::Error: io, or bad_input for what the model here has not.
Config read_config(const std::string& directory);

}  // namespace llama
