"""Tiny models with random weights, of the architectures in use: a class of transformers, and what its configuration has
that is not made small by rule. They are saved with the names of published checkpoints."""

import json
import random
import re
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto import modeling_auto

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from architectures import REQUIRED  # noqa: E402

HIDDEN, LAYERS = 128, 2

# What a field of a configuration becomes, by its name: the first that matches.
SIZES = [
    (r"(num_experts_per_tok|num_experts_per_token|experts_per_token|moe_topk|moe_top_k|top_k_experts|moe_k|topk)$", 2),
    (r"topk_group|n_group|num_expert_group|n_shared_experts|num_shared_expert|moe_num_shared_experts", 1),
    (r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts)$", 4),
    (r"(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num|attention_head_kv)$", 2),
    (r"num_codebooks$|num_channels$|in_channels$|in_chans$|spatial_merge_size|temporal_patch_size|^merge_size$", None),
    (r"mamba_num_heads|mamba_n_heads|^num_heads_mamba$", 8),
    (r"mamba_d_head|mamba_head_dim", 32),
    (r"heads$|^n_head$|num_attention_head$", 4),
    (r"head_dim$|^kv_channels$|_size_per_head$|^attention_key_size$", 32),
    (r"(num_hidden_layers|num_layers|n_layers?|^depth|encoder_layers|decoder_layers|num_decoder_layers|layers_count)$", LAYERS),
    (r"(vocab_size|vocab_size_per_layer_input)$", 256),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length|max_(source|target)_positions", 128),
    (r"(^|_)(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim_model|lru_width|embedding_size|word_embed_proj_dim)$", HIDDEN),
    (r"(out_hidden_size|projection_dim|d_kv_model|projector_hidden_size|feature_size)$", HIDDEN),
    (r"(intermediate_size|intermediate_size_mlp|ffn_dim|d_ff|ffn_hidden_size|n_inner|intermediate_dim|inner_dim)$", 2 * HIDDEN),
    (r"^image_size$|img_size$", 28),
    (r"^patch_size$", 14),
    (r"_token_(id|index)$|^image_token|^video_token", 200),
]
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "sep_token_id", "cls_token_id")
DROPPED = ("architectures", "transformers_version", "model_type", "id2label", "label2id", "_name_or_path", "dtype")


def shrink(values):
    """The values of a configuration that are other than those of the default."""
    small = {}
    for key, value in values.items():
        if key in DROPPED:
            continue
        if isinstance(value, dict) and (key.endswith("_config") or key in ("encoder", "decoder", "generator")):
            small[key] = {k: v for k, v in value.items() if k == "model_type"} | shrink(value)
        elif key in TOKENS and value is not None:
            small[key] = TOKENS.index(key)
        elif isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES if re.search(pattern, key)), None)
            if size is not None:
                small[key] = size
        elif isinstance(value, list) and key in ("layer_types", "layers_block_type", "mlp_layer_types"):
            small[key] = (value[:1] + [kind for kind in value if kind != value[0]] + value)[:LAYERS]
    return small


def merge(values, overrides):
    both = {k: merge(values[k], v) for k, v in overrides.items() if isinstance(v, dict) and isinstance(values.get(k), dict)}
    return values | overrides | both


def config_of(cls, overrides):
    """A small configuration of a class of models."""
    required = REQUIRED.get(cls.config_class.__name__, {})
    small = shrink(cls.config_class(**required).to_dict())
    return cls.config_class(**(required | merge(small, overrides)))


# Classes in the order of the table, with fields of their configuration.
_MOE = {"moe_intermediate_size": 64}
_MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
        "head_dim": 32, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1} | _MOE
_YARN = {"rope_type": "yarn", "type": "yarn", "rope_theta": 1e4, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
         "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}}
ZOO = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "MixtralForCausalLM": {},
    "Qwen2ForCausalLM": {"tie_word_embeddings": True},
    "Qwen2MoeForCausalLM": _MOE | {"shared_expert_intermediate_size": 128},
    "Qwen3ForCausalLM": {"tie_word_embeddings": True},
    "Qwen3MoeForCausalLM": _MOE | {"head_dim": 32},
    "Qwen3NextForCausalLM": _MOE | {"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2,
                             "shared_expert_intermediate_size": 128},
    "PhiForCausalLM": {},
    "Phi3ForCausalLM": {},
    "PhimoeForCausalLM": {"attention_bias": True, "lm_head_bias": True},
    "GemmaForCausalLM": {},
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {"sliding_window_pattern": 2},
    "GPT2LMHeadModel": {"n_inner": None},
    "GPTBigCodeForCausalLM": {"n_inner": 512},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]]},
    "GPTNeoXForCausalLM": {"intermediate_size": 512},
    "GPTJForCausalLM": {"rotary_dim": 16},
    "CodeGenForCausalLM": {"rotary_dim": 16},
    "OPTForCausalLM": {},
    "BloomForCausalLM": {"hidden_size": HIDDEN},
    "FalconForCausalLM": {},
    "FalconH1ForCausalLM": {"head_dim": 32, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_state": 32},
    "MptForCausalLM": {},
    "StableLmForCausalLM": {},
    "Starcoder2ForCausalLM": {},
    "CohereForCausalLM": {},
    "Cohere2ForCausalLM": {"sliding_window_pattern": 2},
    "OlmoForCausalLM": {},
    "Olmo2ForCausalLM": {},
    "Olmo3ForCausalLM": {},
    "OlmoeForCausalLM": {},
    "GraniteForCausalLM": {},
    "GraniteMoeForCausalLM": {},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 128},
    "DeepseekV2ForCausalLM": _MLA | {"num_experts_per_tok": 2, "rope_parameters": _YARN},
    "DeepseekV3ForCausalLM": _MLA,
    "Llama4ForCausalLM": {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "moe_layers": None},
    "GptOssForCausalLM": {},
    "DbrxForCausalLM": {"clip_qkv": 8, "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": HIDDEN},
                        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "GlmForCausalLM": {},
    "Glm4ForCausalLM": {},
    "Glm4MoeForCausalLM": _MOE | {"head_dim": 32, "first_k_dense_replace": 1},
    "SmolLM3ForCausalLM": {},
    "Ernie4_5ForCausalLM": {},
    "Ernie4_5_MoeForCausalLM": _MOE | {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    "HunYuanDenseV1ForCausalLM": {},
    "HunYuanMoEV1ForCausalLM": {},
    "NemotronForCausalLM": {},
    "NemotronHForCausalLM": {},
    "Exaone4ForCausalLM": {"head_dim": 32},
    "SeedOssForCausalLM": {},
    "MiniMaxForCausalLM": {},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "MambaForCausalLM": {},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 32, "n_groups": 1, "state_size": 32},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
                         "mamba_dt_rank": 64, "use_mamba_kernels": False},
    "RecurrentGemmaForCausalLM": {"num_key_value_heads": 1, "block_types": ["recurrent", "attention"]},
    "T5ForConditionalGeneration": {"d_kv": 32},
    "BartForConditionalGeneration": {},
    "WhisperForConditionalGeneration": {"max_source_positions": 32},
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {},
    "ModernBertForMaskedLM": {},
    "DebertaV2ForMaskedLM": {},
    "LlamaForSequenceClassification": {"pad_token_id": 0},
    "BertForSequenceClassification": {},
    "ViTForImageClassification": {},
    "CLIPModel": {},
    "SiglipModel": {},
    "Gemma3ForConditionalGeneration": {"mm_tokens_per_image": 4, "text_config": {"sliding_window_pattern": 2}},
    "LlavaForConditionalGeneration": {"vision_feature_layer": -1},
    "Mistral3ForConditionalGeneration": {"vision_feature_layer": -1},
    "PaliGemmaForConditionalGeneration": {},
    "Idefics3ForConditionalGeneration": {},
    "Qwen2VLForConditionalGeneration": {"text_config": _MROPE},
    "Qwen2_5_VLForConditionalGeneration": {"text_config": _MROPE, "vision_config": {"fullatt_block_indexes": [1]}},
    "Qwen3VLForConditionalGeneration": {"text_config": _MROPE, "vision_config": {"deepstack_visual_indexes": [0]}},
    "Qwen3VLMoeForConditionalGeneration": {"text_config": _MROPE | _MOE | {"norm_topk_prob": True}, "vision_config": {"deepstack_visual_indexes": [0]}},
    "Llama4ForConditionalGeneration": {"vision_config": {"vision_output_dim": HIDDEN, "projector_input_dim": HIDDEN, "projector_output_dim": HIDDEN,
                                                         "intermediate_size": 512, "num_attention_heads": 4},
                                       "text_config": {"num_hidden_layers": 4, "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
                                                       "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "moe_layers": None}},
}
# Published as the model without its head.
AS_BASE_MODEL = ("GPT2LMHeadModel",)
# Published as [E, in, out], which transformers 5 reads, but does not write.
TRANSPOSED_EXPERTS = ("Qwen3VLMoeForConditionalGeneration",)
# Fields that a model type has in published files.
PUBLISHED = {
    "gpt2": {"n_ctx": 128},
    "deepseek_v2": {"rope_scaling": _YARN},
    "exaone4": {"sliding_window_pattern": "LG"},
    "gemma3": {"vocab_size": 256},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2": {"block_dim": HIDDEN, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False},
    "mamba2": {"intermediate_size": 256},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.25},
}
DTYPES = [torch.bfloat16, torch.float32, torch.float16]


class Model:
    """One of them. The dtype, and whether it is in several files, go by its place."""

    def __init__(self, name, overrides, place):
        self.name, self.overrides, self.place = name, overrides, place
        self.cls = getattr(transformers, name)
        self.dtype = DTYPES[place % len(DTYPES)]
        self.title = f"{name}, {str(self.dtype).removeprefix('torch.')}"

    def build(self):
        torch.manual_seed(0)
        model = self.cls(config_of(self.cls, self.overrides)).eval()
        with torch.no_grad():  # weights that begin as zeros or ones say little
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        return model.to(self.dtype)

    def save(self, directory):
        """As published: config.json has all fields, and those that transformers 5 has elsewhere and mlx-lm wants."""
        model = self.build()
        part = getattr(model, model.base_model_prefix) if self.name in AS_BASE_MODEL else model
        part.save_pretrained(directory, max_shard_size="500KB" if self.place % 4 == 1 else "1GB")
        if self.name in TRANSPOSED_EXPERTS:
            for file in directory.glob("*.safetensors"):
                tensors = load_file(file)
                tensors |= {name: t.mT.contiguous() for name, t in tensors.items() if ".experts." in name}
                save_file(tensors, file, metadata={"format": "pt"})
        config = published(model.config, model.config.to_dict())
        config |= {"architectures": [self.name]} | PUBLISHED.get(config["model_type"], {})
        (directory / "config.json").write_text(json.dumps(config, indent=2))


def published(config, values):
    """The fields of a configuration, by the names that transformers 5 gave up too."""
    values = dict(values)
    for key in config.sub_configs:
        if isinstance(values.get(key), dict):
            values[key] = published(getattr(config, key), values[key])
    if "text_config" in values:
        values["text_config"]["tie_word_embeddings"] = values.get("tie_word_embeddings", False)
    rope = values.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    values |= {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    values |= {alias: values[key] for alias, key in config.attribute_map.items() if key in values}
    values.setdefault("rope_scaling", None)
    return values


MODELS = {name: Model(name, overrides, place) for place, (name, overrides) in enumerate(ZOO.items())}


def model(name):
    return MODELS.get(name) or Model(name, {}, sum(map(ord, name)))


def draw(count, seed):
    """Names of other classes, of different model types, that can be built tiny."""
    types = {MODELS[name].cls.config_class.model_type for name in MODELS}
    groups = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM")
    mappings = [getattr(modeling_auto, f"MODEL_FOR_{group}_MAPPING_NAMES") for group in groups] + [modeling_auto.MODEL_MAPPING_NAMES]
    others = sorted(set(modeling_auto.MODEL_MAPPING_NAMES) - types)
    random.Random(seed).shuffle(others)
    found = []
    for model_type in others:
        if len(found) == count:
            break
        name = next(mapping[model_type] for mapping in mappings if model_type in mapping)
        name = name if isinstance(name, str) else name[0]
        try:
            if sum(p.numel() for p in model(name).build().parameters()) < 50e6:
                found.append(name)
        except Exception as error:  # most of its sizes depend on each other
            print(f"{name} is not tiny: {type(error).__name__}")
    return found
