#include "io/mlx_model.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <stdexcept>

#include "halfbyte/error.hpp"
#include "io/architecture.h"

namespace halfbyte::io {
namespace {

using nlohmann::json;
using Kind = MlxWeight::Kind;

Weight weight(std::string name, std::vector<int64_t> shape) {
  Weight result;
  result.name = std::move(name);
  result.shape = std::move(shape);
  result.parts = {0};
  return result;
}

MlxModel model(const json& config) {
  auto found = MlxModel::find(config);
  EXPECT_TRUE(found.has_value()) << config;
  return found.value();
}

const MlxWeight& named(const MlxModel::Weights& all, std::string_view name) {
  for (const MlxWeight& one : all.weights) {
    if (one.weight.name == name) return one;
  }
  throw std::runtime_error("no weight " + std::string(name));
}

std::vector<std::string> names_of(const MlxModel::Weights& all) {
  std::vector<std::string> result;
  for (const MlxWeight& one : all.weights) result.push_back(one.weight.name);
  return result;
}

// The places of the output's elements in the input: 1000 * weight + element.
std::vector<int64_t> elements(const OutputWeight& weight) {
  const int64_t cols = weight.shape.empty() ? 1 : weight.shape.back();
  std::vector<int64_t> result;
  for (const SourceRows& rows : weight.sources) {
    for (int64_t row = 0; row < rows.num_rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        result.push_back(1000 * static_cast<int64_t>(rows.weight) + rows.first + row * rows.row_stride +
                         col * rows.col_stride);
      }
    }
  }
  return result;
}

std::string message(const MlxModel& of, const std::vector<Weight>& input) {
  try {
    static_cast<void>(of.weights(input));
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::bad_input);
    return error.what();
  }
  return "";
}

using Shape = std::vector<int64_t>;
using Elements = std::vector<int64_t>;

TEST(MlxModels, ExpertsAreStacked) {
  const auto qwen = model({{"model_type", "qwen3_moe"}, {"tie_word_embeddings", false}});
  const std::string experts = "model.layers.1.mlp.experts.";
  const std::vector<Weight> input{
      weight(experts + "1.up_proj.weight", {2, 3}), weight("model.layers.1.mlp.gate.weight", {2, 3}),
      weight("model.norm.weight", {3}), weight(experts + "0.up_proj.weight", {2, 3}),
      weight("lm_head.weight", {5, 3})};
  const auto all = qwen.weights(input);
  EXPECT_EQ(names_of(all), (std::vector<std::string>{"model.layers.1.mlp.switch_mlp.up_proj.weight",
                                                     "model.layers.1.mlp.gate.weight", "model.norm.weight",
                                                     "lm_head.weight"}));
  const MlxWeight& up = all.weights[0];
  EXPECT_EQ(up.kind, Kind::experts);
  EXPECT_TRUE(up.quantized);
  EXPECT_FALSE(up.grid.has_value());
  EXPECT_EQ(up.weight.shape, (Shape{2, 2, 3}));
  EXPECT_EQ(elements(up.weight), (Elements{3000, 3001, 3002, 3003, 3004, 3005, 0, 1, 2, 3, 4, 5}));
  const MlxWeight& router = all.weights[1];
  EXPECT_EQ(router.kind, Kind::linear);
  ASSERT_TRUE(router.grid.has_value());
  EXPECT_EQ(router.grid->bits, 8);
  EXPECT_EQ(router.grid->group_size, 64);
  EXPECT_EQ(all.weights[2].kind, Kind::other);
  EXPECT_FALSE(all.weights[2].quantized);
  EXPECT_EQ(all.weights[2].weight.sources.size(), 1U);
  EXPECT_TRUE(all.weights[3].head);
  EXPECT_TRUE(all.dropped.empty());

  EXPECT_NE(message(qwen, {input[0]}).find("expert 0 is missing"), std::string::npos);
  EXPECT_NE(message(qwen, {input[3], weight(experts + "1.up_proj.weight", {3, 2})}).find("has shape [3, 2]"),
            std::string::npos);
  EXPECT_NE(message(qwen, {weight("layers.0.self_attn.q_proj.weight", {3, 3})}).find("no tensor has a name"),
            std::string::npos);
}

TEST(MlxModels, NamesChangeWithTheExperts) {
  const auto mixtral = model({{"model_type", "mixtral"}});
  const std::string moe = "model.layers.0.block_sparse_moe.";
  std::vector<Weight> input;
  for (const char* name : {"w1", "w2", "w3"})
    input.push_back(weight(moe + "experts.0." + name + ".weight", {2, 2}));
  const auto all = mixtral.weights(input);
  EXPECT_EQ(names_of(all), (std::vector<std::string>{moe + "switch_mlp.gate_proj.weight",
                                                     moe + "switch_mlp.down_proj.weight",
                                                     moe + "switch_mlp.up_proj.weight"}));
  // As mlx-lm saves it, it stays.
  const auto again =
      mixtral.weights(std::vector<Weight>{weight(moe + "switch_mlp.up_proj.weight", {4, 2, 2})});
  EXPECT_EQ(names_of(again), (std::vector<std::string>{moe + "switch_mlp.up_proj.weight"}));
  EXPECT_EQ(again.weights[0].kind, Kind::experts);
}

TEST(MlxModels, TransposedWithAnotherPrefix) {
  const auto gpt2 = model({{"model_type", "gpt2"}});
  for (const std::string prefix : {"", "transformer."}) {
    const auto all = gpt2.weights(std::vector<Weight>{
        weight(prefix + "h.0.attn.c_attn.weight", {2, 3}), weight(prefix + "h.0.attn.c_attn.bias", {3}),
        weight(prefix + "wte.weight", {4, 2}), weight(prefix + "h.0.attn.bias", {1, 1, 2, 2})});
    EXPECT_EQ(names_of(all), (std::vector<std::string>{"model.h.0.attn.c_attn.weight",
                                                       "model.h.0.attn.c_attn.bias", "model.wte.weight"}));
    EXPECT_EQ(all.weights[0].weight.shape, (Shape{3, 2}));
    EXPECT_EQ(elements(all.weights[0].weight), (Elements{0, 3, 1, 4, 2, 5}));
    EXPECT_EQ(all.weights[2].kind, Kind::embedding);
    EXPECT_EQ(all.dropped, (std::vector<size_t>{3}));  // the mask
  }
  const auto again = gpt2.weights(
      std::vector<Weight>{weight("model.h.0.attn.c_attn.weight", {3, 2}), weight("model.ln_f.weight", {2})});
  EXPECT_EQ(names_of(again), (std::vector<std::string>{"model.h.0.attn.c_attn.weight", "model.ln_f.weight"}));
  EXPECT_EQ(elements(again.weights[0].weight), (Elements{0, 1, 2, 3, 4, 5}));
}

TEST(MlxModels, InterleavedAndTransposed) {
  const auto gpt_oss = model({{"model_type", "gpt_oss"}});
  const std::string experts = "model.layers.0.mlp.experts.";
  const auto all = gpt_oss.weights(std::vector<Weight>{
      weight(experts + "gate_up_proj", {2, 3, 4}), weight(experts + "gate_up_proj_bias", {2, 4}),
      weight(experts + "down_proj", {2, 2, 3}), weight(experts + "down_proj_bias", {2, 3})});
  const MlxWeight& up = named(all, experts + "up_proj.weight");
  EXPECT_EQ(up.kind, Kind::experts);
  EXPECT_EQ(up.weight.shape, (Shape{2, 2, 3}));
  EXPECT_EQ(elements(up.weight), (Elements{1, 5, 9, 3, 7, 11, 13, 17, 21, 15, 19, 23}));
  const MlxWeight& bias = named(all, experts + "gate_proj.bias");
  EXPECT_FALSE(bias.quantized);
  EXPECT_EQ(bias.weight.shape, (Shape{2, 2}));
  EXPECT_EQ(elements(bias.weight), (Elements{1000, 1002, 1004, 1006}));
  EXPECT_EQ(named(all, experts + "down_proj.weight").weight.shape, (Shape{2, 3, 2}));
  EXPECT_EQ(named(all, experts + "down_proj.bias").weight.shape, (Shape{2, 3}));
}

TEST(MlxModels, HalvesAreTransposed) {
  const auto llama4 = model({{"model_type", "llama4"}, {"text_config", {{"num_hidden_layers", 2}}}});
  const std::string experts = "language_model.model.layers.0.feed_forward.experts.";
  const auto all = llama4.weights(std::vector<Weight>{
      weight(experts + "gate_up_proj", {1, 2, 6}), weight("vision_model.class_embedding", {2}),
      weight("language_model.model.layers.2.self_attn.q_proj.weight", {2, 2})});
  EXPECT_EQ(names_of(all),
            (std::vector<std::string>{experts + "gate_proj.weight", experts + "up_proj.weight"}));
  EXPECT_EQ(all.weights[1].weight.shape, (Shape{1, 3, 2}));
  EXPECT_EQ(elements(all.weights[1].weight), (Elements{3, 9, 4, 10, 5, 11}));
  EXPECT_EQ(all.dropped, (std::vector<size_t>{1, 2}));  // what it does not read, and a layer after the last
  EXPECT_NE(message(llama4, {weight(experts + "gate_up_proj", {1, 2, 5})}).find("cannot be made"),
            std::string::npos);
}

TEST(MlxModels, TheShapeTellsWhichWayExpertsAre) {
  const auto qwen = model({{"model_type", "qwen3_vl_moe"}, {"text_config", {{"hidden_size", 3}}}});
  const std::string experts = "model.language_model.layers.0.mlp.experts.";
  const auto published = qwen.weights(std::vector<Weight>{weight(experts + "gate_up_proj", {1, 3, 4}),
                                                          weight(experts + "down_proj", {1, 2, 3})});
  const auto saved = qwen.weights(std::vector<Weight>{weight(experts + "gate_up_proj", {1, 4, 3}),
                                                      weight(experts + "down_proj", {1, 3, 2})});
  const std::string targets = "language_model.model.layers.0.mlp.switch_mlp.";
  for (const auto& all : {published, saved}) {
    EXPECT_EQ(named(all, targets + "up_proj.weight").weight.shape, (Shape{1, 2, 3}));
    EXPECT_EQ(named(all, targets + "down_proj.weight").weight.shape, (Shape{1, 3, 2}));
  }
  EXPECT_EQ(elements(named(published, targets + "up_proj.weight").weight), (Elements{2, 6, 10, 3, 7, 11}));
  EXPECT_EQ(elements(named(saved, targets + "up_proj.weight").weight), (Elements{6, 7, 8, 9, 10, 11}));
}

TEST(MlxModels, KeysAndValuesOfHeads) {
  const json config{
      {"model_type", "deepseek_v3"}, {"num_attention_heads", 2}, {"qk_nope_head_dim", 1}, {"v_head_dim", 2}};
  const std::string attention = "model.layers.0.self_attn.";
  const auto all = model(config).weights(std::vector<Weight>{weight(attention + "kv_b_proj.weight", {6, 2})});
  EXPECT_EQ(all.weights[0].kind, Kind::heads);
  EXPECT_EQ(named(all, attention + "embed_q.weight").weight.shape, (Shape{2, 2, 1}));
  EXPECT_EQ(elements(named(all, attention + "embed_q.weight").weight), (Elements{0, 1, 6, 7}));
  EXPECT_EQ(named(all, attention + "unembed_out.weight").weight.shape, (Shape{2, 2, 2}));
  EXPECT_EQ(elements(named(all, attention + "unembed_out.weight").weight),
            (Elements{2, 3, 4, 5, 8, 9, 10, 11}));
  EXPECT_NE(message(model({{"model_type", "deepseek_v3"}}), {weight(attention + "kv_b_proj.weight", {6, 2})})
                .find("needs \"num_attention_heads\""),
            std::string::npos);
}

TEST(MlxModels, KernelsOfConvolutions) {
  const auto mamba = model({{"model_type", "mamba"}});
  const std::string kernel = "backbone.layers.0.mixer.conv1d.weight";
  for (const Shape& shape : {Shape{3, 1, 2}, Shape{3, 2, 1}}) {  // the latter is mlx-lm's
    const auto all = mamba.weights(
        std::vector<Weight>{weight(kernel, shape), weight("backbone.layers.0.mixer.in_proj.weight", {2, 2})});
    EXPECT_EQ(all.weights[0].weight.shape, (Shape{3, 2, 1}));
    EXPECT_EQ(elements(all.weights[0].weight), (Elements{0, 1, 2, 3, 4, 5}));
    EXPECT_EQ(all.weights[0].weight.sources.size(), 1U);
    EXPECT_EQ(all.weights[0].kind, Kind::other);
  }
}

TEST(MlxModels, OtherModelsOfAType) {
  const std::string layer = "model.layers.0.";
  const std::vector<Weight> input{weight(layer + "shared_mlp.input_linear.weight", {4, 2})};
  EXPECT_EQ(names_of(model({{"model_type", "granitemoehybrid"}, {"num_local_experts", 6}}).weights(input)),
            (std::vector<std::string>{input[0].name}));
  const auto all = model({{"model_type", "granitemoehybrid"}, {"num_local_experts", 0}}).weights(input);
  EXPECT_EQ(names_of(all),
            (std::vector<std::string>{layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight"}));
  EXPECT_EQ(elements(all.weights[1].weight), (Elements{4, 5, 6, 7}));
}

TEST(MlxModels, BiasOfAHead) {
  const auto phi = model({{"model_type", "phi"}});
  const auto all =
      phi.weights(std::vector<Weight>{weight("lm_head.weight", {4, 2}), weight("lm_head.bias", {4})});
  EXPECT_EQ(all.weights.size(), 2U);
  EXPECT_EQ(all.weights[1].kind, Kind::other);
}

TEST(MlxModels, TiedHead) {
  const std::vector<Weight> input{weight("model.embed_tokens.weight", {4, 2}),
                                  weight("lm_head.weight", {4, 2})};
  EXPECT_EQ(model({{"model_type", "llama"}, {"tie_word_embeddings", false}}).weights(input).weights.size(),
            2U);
  EXPECT_EQ(model({{"model_type", "llama"}}).weights(input).dropped, (std::vector<size_t>{1}));
  EXPECT_EQ(model({{"model_type", "qwen3"}, {"tie_word_embeddings", true}}).weights(input).dropped,
            (std::vector<size_t>{1}));
}

TEST(MlxModels, HeadThatIsTheEmbedding) {
  const std::vector<Weight> input{weight("model.embed_tokens.weight", {4, 2})};
  const auto all = model({{"model_type", "glm4"}, {"tie_word_embeddings", true}}).weights(input);
  EXPECT_EQ(names_of(all), (std::vector<std::string>{"model.embed_tokens.weight", "lm_head.weight"}));
  EXPECT_TRUE(all.weights[1].head);
  EXPECT_EQ(elements(all.weights[1].weight), elements(all.weights[0].weight));
  EXPECT_EQ(model({{"model_type", "glm4"}, {"tie_word_embeddings", false}}).weights(input).weights.size(),
            1U);
  EXPECT_EQ(
      model({{"model_type", "gemma3_text"}, {"tie_word_embeddings", true}}).weights(input).weights.size(),
      1U);
}

TEST(MlxModels, RefusedAndUnknown) {
  EXPECT_FALSE(MlxModel::find({{"model_type", "bert"}}).has_value());
  EXPECT_FALSE(MlxModel::find({{"model_type", 1}}).has_value());
  EXPECT_FALSE(MlxModel::find(json::array()).has_value());
  EXPECT_EQ(model({{"model_type", "llama"}}).refused(), "");
  const auto falcon = model({{"model_type", "falcon_h1"}});
  EXPECT_NE(falcon.refused().find("multiplies"), std::string::npos);
  EXPECT_THROW(static_cast<void>(falcon.weights({})), Error);
}

// mlx-lm adds 1 to norms, unless the experts of the checkpoint are stacked already.
TEST(MlxModels, NormsPlusOne) {
  const auto next = model({{"model_type", "qwen3_next"}});
  const std::string layer = "model.layers.0.";
  std::vector<Weight> input{weight(layer + "input_layernorm.weight", {2}),
                            weight(layer + "linear_attn.norm.weight", {2}),
                            weight(layer + "mlp.experts.0.up_proj.weight", {2, 2}),
                            weight("mtp.layers.0.mlp.experts.0.up_proj.weight", {2, 2})};
  auto all = next.weights(input);
  EXPECT_EQ(all.weights[0].weight.plus, 1);
  EXPECT_EQ(all.weights[1].weight.plus, 0);
  EXPECT_EQ(all.weights[2].weight.plus, 0);
  EXPECT_EQ(all.dropped, (std::vector<size_t>{3}));
  input[2] = weight(layer + "mlp.switch_mlp.up_proj.weight", {2, 2, 2});
  EXPECT_EQ(next.weights(input).weights[0].weight.plus, 0);
}

// Every row can be read.
TEST(MlxModels, EveryRowIsRead) {
  for (const auto& [model_type, entry] : architectures()["mlx"].items()) {
    if (model_type.find(' ') != std::string::npos) continue;
    const auto found = model({{"model_type", model_type}});
    if (found.refused().empty()) {
      EXPECT_NE(message(found, {weight("nothing.of.this.kind", {2, 2})}), "") << model_type;
    }
  }
}

}  // namespace
}  // namespace halfbyte::io
