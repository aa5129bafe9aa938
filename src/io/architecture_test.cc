#include "io/architecture.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace halfbyte::io {
namespace {

using nlohmann::json;

Architecture architecture(const json& config) {
  auto found = Architecture::find(config);
  EXPECT_TRUE(found.has_value()) << config;
  return *found;
}

ModuleInfo module(const Architecture& of, std::string_view tensor) {
  auto found = of.find_tensor(tensor);
  EXPECT_TRUE(found.has_value()) << of.name() << " " << tensor;
  return found.value_or(ModuleInfo{});
}

TEST(Architectures, DenseModel) {
  const auto llama = architecture({{"model_type", "llama"}, {"architectures", {"LlamaForCausalLM"}}});
  EXPECT_EQ(llama.name(), "LlamaForCausalLM");
  EXPECT_FALSE(llama.tied());
  const ModuleInfo q = module(llama, "model.layers.17.self_attn.q_proj.weight");
  EXPECT_EQ(q.kind, ModuleKind::linear);
  EXPECT_EQ(q.role, ModuleRole::plain);
  EXPECT_EQ(q.module, "model.layers.17.self_attn.q_proj");
  EXPECT_EQ(module(llama, "model.embed_tokens.weight").kind, ModuleKind::embedding);
  const ModuleInfo head = module(llama, "lm_head.weight");
  EXPECT_EQ(head.role, ModuleRole::head);
  EXPECT_EQ(head.tied_to, "model.embed_tokens");
  EXPECT_FALSE(llama.find_tensor("model.norm.weight").has_value());  // one dimension
  EXPECT_FALSE(llama.find_tensor("model.layers.0.extra.weight").has_value());
  // As published without the name of the base model.
  EXPECT_EQ(module(llama, "layers.3.mlp.up_proj.weight").module, "model.layers.3.mlp.up_proj");
}

TEST(Architectures, TransposedAndTied) {
  const auto gpt2 = architecture({{"model_type", "gpt2"}, {"architectures", {"GPT2LMHeadModel"}}});
  EXPECT_TRUE(gpt2.tied());
  EXPECT_EQ(module(gpt2, "h.0.attn.c_attn.weight").kind, ModuleKind::conv1d);
  EXPECT_EQ(module(gpt2, "transformer.h.0.attn.c_attn.weight").kind, ModuleKind::conv1d);
  const auto whisper = architecture({{"model_type", "whisper"},
                                     {"architectures", {"WhisperForConditionalGeneration"}},
                                     {"tie_word_embeddings", true}});
  EXPECT_EQ(module(whisper, "proj_out.weight").role, ModuleRole::head);
  EXPECT_EQ(module(whisper, "proj_out.weight").tied_to, "model.decoder.embed_tokens");
  EXPECT_EQ(module(whisper, "model.encoder.layers.1.fc1.weight").role, ModuleRole::audio);
  EXPECT_EQ(module(whisper, "model.decoder.layers.1.fc1.weight").role, ModuleRole::plain);
}

TEST(Architectures, ExpertsOnTheirWayToOneTensor) {
  const auto mixtral = architecture({{"model_type", "mixtral"}, {"architectures", {"MixtralForCausalLM"}}});
  const ModuleInfo up = module(mixtral, "model.layers.1.block_sparse_moe.experts.7.w3.weight");
  EXPECT_EQ(up.kind, ModuleKind::experts);
  EXPECT_FALSE(up.transposed);
  EXPECT_EQ(up.module, "model.layers.1.mlp.experts.gate_up_proj");
  EXPECT_EQ(up.operations, "stack 0, concat 1");
  EXPECT_EQ(module(mixtral, "model.layers.1.block_sparse_moe.gate.weight").role, ModuleRole::router);
  EXPECT_EQ(module(mixtral, "model.layers.1.mlp.experts.down_proj").operations, "");
  const auto gpt_oss = architecture({{"model_type", "gpt_oss"}, {"architectures", {"GptOssForCausalLM"}}});
  const ModuleInfo both = module(gpt_oss, "model.layers.0.mlp.experts.gate_up_proj");
  EXPECT_TRUE(both.transposed);
  EXPECT_TRUE(both.interleaved);
}

TEST(Architectures, ModelsWithinAModel) {
  const json config = {{"model_type", "llava"},
                       {"architectures", {"LlavaForConditionalGeneration"}},
                       {"text_config", {{"model_type", "mixtral"}}},
                       {"vision_config", {{"model_type", "siglip_vision_model"}}}};
  const auto llava = architecture(config);
  // Names of transformers 4 and 5; the text model is that of its own configuration.
  for (const char* name : {"language_model.model.layers.0.self_attn.q_proj.weight",
                           "model.language_model.layers.0.self_attn.q_proj.weight"}) {
    EXPECT_EQ(module(llava, name).module, "model.language_model.layers.0.self_attn.q_proj");
  }
  EXPECT_EQ(module(llava, "language_model.model.layers.0.block_sparse_moe.experts.0.w2.weight").kind,
            ModuleKind::experts);
  const ModuleInfo vision =
      module(llava, "vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight");
  EXPECT_EQ(vision.module, "model.vision_tower.encoder.layers.0.self_attn.q_proj");
  EXPECT_EQ(vision.role, ModuleRole::vision);
  EXPECT_EQ(module(llava, "vision_tower.vision_model.head.attention.out_proj.weight").kind,
            ModuleKind::attention);
  EXPECT_EQ(module(llava, "multi_modal_projector.linear_1.weight").role, ModuleRole::projector);
  EXPECT_EQ(module(llava, "language_model.lm_head.weight").module, "lm_head");
}

// Published names that are neither those of transformers 5 nor those that it writes, by hand.
TEST(Architectures, PublishedNames) {
  const auto qwen = architecture({{"architectures", {"Qwen2_5_VLForConditionalGeneration"}}});
  EXPECT_EQ(module(qwen, "model.layers.0.self_attn.q_proj.weight").module,
            "model.language_model.layers.0.self_attn.q_proj");
  EXPECT_EQ(module(qwen, "visual.blocks.0.attn.qkv.weight").role, ModuleRole::vision);
  const auto neox = architecture({{"architectures", {"GPTNeoXForCausalLM"}}});
  EXPECT_EQ(module(neox, "embed_out.weight").role, ModuleRole::head);
  const auto llama4 = architecture({{"architectures", {"Llama4ForConditionalGeneration"}}});
  EXPECT_TRUE(module(llama4, "language_model.model.layers.0.feed_forward.experts.gate_up_proj").transposed);
  EXPECT_EQ(module(llama4, "language_model.model.layers.0.feed_forward.router.weight").role,
            ModuleRole::router);
  const auto granite = architecture({{"architectures", {"GraniteMoeForCausalLM"}}});
  EXPECT_EQ(module(granite, "model.layers.0.block_sparse_moe.input_linear.weight").kind, ModuleKind::experts);
  EXPECT_EQ(module(granite, "model.layers.0.block_sparse_moe.router.layer.weight").role, ModuleRole::router);
  const auto vit = architecture({{"architectures", {"ViTForImageClassification"}}});
  EXPECT_EQ(module(vit, "vit.encoder.layer.0.attention.attention.query.weight").module,
            "vit.layers.0.attention.q_proj");
  const auto falcon = architecture({{"architectures", {"FalconForCausalLM"}}});
  EXPECT_EQ(module(falcon, "transformer.h.0.mlp.dense_h_to_4h.weight").kind, ModuleKind::linear_subclass);
  const auto siglip = architecture({{"architectures", {"SiglipModel"}}});
  EXPECT_EQ(module(siglip, "vision_model.head.attention.out_proj.weight").kind, ModuleKind::attention);
}

TEST(Architectures, UnknownAndByModelTypeOnly) {
  EXPECT_FALSE(Architecture::find({{"model_type", "nobody"}}).has_value());
  EXPECT_FALSE(Architecture::find({{"architectures", {1, "Nobody"}}}).has_value());
  EXPECT_FALSE(Architecture::find(json::array()).has_value());
  const auto own = architecture({{"model_type", "qwen3_moe"}, {"architectures", {"MyQwen"}}});
  EXPECT_EQ(own.name(), "Qwen3MoeForCausalLM");
  EXPECT_EQ(module(own, "model.layers.0.mlp.experts.3.up_proj.weight").kind, ModuleKind::experts);
}

// Every row can be read, with those that it refers to.
TEST(Architectures, EveryRowIsRead) {
  const json all = json::parse(architectures_json());
  int64_t count = 0;
  for (const auto& [model_type, classes] : all["types"].items()) {
    for (const auto& [name, entry] : classes.items()) {
      const auto found = Architecture::find({{"model_type", model_type}, {"architectures", {name}}});
      ASSERT_TRUE(found.has_value()) << name;
      EXPECT_FALSE(found->find_tensor("").has_value()) << name;
      EXPECT_FALSE(found->find_tensor("nothing.of.this.kind").has_value()) << name;
      ++count;
    }
  }
  EXPECT_GT(count, 1500);
}

}  // namespace
}  // namespace halfbyte::io
