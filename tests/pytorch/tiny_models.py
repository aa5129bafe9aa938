"""Tiny models of transformers with random weights, one of each kind that is tested."""

import torch

from halfbyte.torch import QuantizedExperts, QuantizedLinear

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512, "pad_token_id": 0}
TINY = {
    "llama": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, attention_bias=True)),
    "tied": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "gemma": lambda t: t.Gemma3ForCausalLM(t.Gemma3TextConfig(**SMALL, head_dim=32, bos_token_id=1, eos_token_id=2)),
    "qwen3-moe": lambda t: t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(
        **SMALL, head_dim=32, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2)),
    "mixtral": lambda t: t.MixtralForCausalLM(t.MixtralConfig(**SMALL, num_local_experts=4)),
    "gpt-oss": lambda t: t.GptOssForCausalLM(t.GptOssConfig(
        **SMALL, head_dim=32, num_local_experts=4, num_experts_per_tok=2)),
    "gpt2": lambda t: t.GPT2LMHeadModel(t.GPT2Config(
        n_embd=128, n_layer=2, n_head=4, vocab_size=512, bos_token_id=1, eos_token_id=2, pad_token_id=0)),
}


def load(path, **options):
    import transformers
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


@torch.no_grad()
def logits(model):
    return model(torch.arange(24).reshape(2, 12)).logits


def quantized_modules(model):
    return {name: module for name, module in model.named_modules()
            if isinstance(module, (QuantizedLinear, QuantizedExperts))}
