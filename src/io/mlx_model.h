// What mlx-lm makes of the weights of a checkpoint, by the table of architectures: its own names, experts in
// one tensor, layers the other way round. A checkpoint with these tensors is as mlx-lm saves it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "halfbyte/checkpoint.hpp"
#include "io/config.h"
#include "io/output_weight.h"

namespace halfbyte::io {

struct MlxWeight {
  enum class Kind : uint8_t {
    other,  // norms, biases, convolutions: nothing that mlx-lm quantizes
    linear,
    embedding,
    experts,  // [E, out, in]
    heads,    // a linear layer for each head of attention: [heads, out, in]
  };
  OutputWeight weight;
  Kind kind = Kind::other;
  bool quantized = false;            // by default
  bool head = false;                 // it makes logits
  std::optional<MlxGrid> grid = {};  // which mlx-lm gives it whatever the model has
};

class MlxModel {
 public:
  // Of a config.json. Nothing: the table has no model of mlx-lm for its "model_type".
  static std::optional<MlxModel> find(const nlohmann::json& config);

  // Why mlx-lm cannot load what would be written; empty: it can.
  const std::string& refused() const;

  struct Weights {
    std::vector<MlxWeight> weights;  // in the order of the first of their sources
    std::vector<size_t> dropped;     // weights of the input that mlx-lm does not load
  };
  // `input`: all weights of the checkpoint, whose sources the output refers to by their place.
  // Error(bad_input) naming what is missing, or has another shape than the model of the table. refused() must
  // be empty.
  Weights weights(std::span<const Weight> input) const;

 private:
  struct Model;
  explicit MlxModel(std::shared_ptr<const Model> model);
  std::shared_ptr<const Model> model_;
};

}  // namespace halfbyte::io
