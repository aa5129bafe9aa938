// A model of the Llama type, with experts or without: a checkpoint, and what it says comes next.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "config.h"
#include "experts.h"
#include "host_math.h"
#include "linear.h"

namespace llama {

class Model {
 public:
  // `directory`: config.json and safetensors, in shards too; dense, or as halfbyte writes it.
  // Throws halfbyte::Error: io, bad_input for a checkpoint that is none of a model of this type, usage for a
  // CUDA device that would have nothing to compute.
  Model(const std::string& directory, const Options& options);

  // Keys and values of a text.
  struct Cache {
    std::vector<KeyValueCache> layers;
    int64_t length = 0;  // positions that are filled
  };
  Cache make_cache(int64_t capacity) const;
  // Runs tokens behind those in the cache. The logits of the last num_logits of them: [num_logits,
  // vocab_size]
  std::vector<float> forward(std::span<const uint8_t> tokens, Cache& cache, int64_t num_logits);

  const Config& config() const { return config_; }
  std::map<Product, int64_t> products() const;            // and how many linear layers have it
  int64_t stored_bytes() const { return stored_bytes_; }  // of the tensors in the files
  int64_t memory_bytes() const;                           // of the linear layers as loaded

 private:
  struct Layer {
    std::vector<float> input_norm, post_attention_norm, q_norm, k_norm;  // empty: there is none
    std::unique_ptr<Linear> q, k, v, o;
    std::unique_ptr<Linear> gate, up, down;  // of a layer without experts
    std::unique_ptr<Linear> router;          // of one with experts
    std::unique_ptr<Experts> experts;
  };

  const halfbyte::Weight& take(const std::string& name, std::vector<int64_t> shape);
  std::vector<float> take_values(const std::string& name, std::vector<int64_t> shape);
  std::unique_ptr<Linear> take_linear(const std::string& module, int64_t n, int64_t k,
                                      std::optional<halfbyte::ParallelStyle> style = {});
  void take_feed_forward(const std::string& layer, Layer& result);
  void take_experts(const std::string& layer, Layer& result);
  void refuse_unused() const;
  std::vector<const Linear*> linears() const;

  Config config_;
  halfbyte::Checkpoint checkpoint_;
  Workplace workplace_;
  std::set<std::string> taken_;
  int64_t stored_bytes_ = 0;
  const halfbyte::Weight* embedding_ = nullptr;  // its rows are decoded as tokens want them
  std::vector<Layer> layers_;
  std::vector<float> norm_;
  std::unique_ptr<Linear> head_;
};

}  // namespace llama
