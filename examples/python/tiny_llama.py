"""A model of the Llama type in PyTorch, with the names of transformers: enough for examples/tiny-llama, whose tokens
are bytes."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfbyte

TINY_LLAMA = Path(__file__).resolve().parent.parent / "tiny-llama"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Attention(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.head_dim = c["head_dim"]
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.q_proj = nn.Linear(c["hidden_size"], heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(c["hidden_size"], kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(c["hidden_size"], kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, c["hidden_size"], bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.gate_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.up_proj = nn.Linear(c["hidden_size"], c["intermediate_size"], bias=False)
        self.down_proj = nn.Linear(c["intermediate_size"], c["hidden_size"], bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, c: dict):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.theta, self.head_dim = c["rope_parameters"]["rope_theta"], c["head_dim"]

    def forward(self, tokens: Tensor) -> Tensor:
        half = torch.arange(0, self.head_dim, 2, device=tokens.device) / self.head_dim
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] / self.theta**half
        cos, sin = (torch.cat((f(angles),) * 2, -1) for f in (torch.cos, torch.sin))
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos.to(x.dtype), sin.to(x.dtype))
        return self.norm(x)


class Llama(nn.Module):
    """tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, config: dict):
        super().__init__()
        self.model = Model(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens))


def load(path: Path = TINY_LLAMA, dtype: torch.dtype = torch.float32) -> Llama:
    """A dense or quantized checkpoint, decoded."""
    checkpoint = halfbyte.Checkpoint(path)
    model = Llama(json.loads((path / "config.json").read_text())).to(dtype)
    model.load_state_dict({w.name: checkpoint.load_dense(w, dtype, framework="torch") for w in checkpoint.weights})
    return model


def windows(path: Path, length: int) -> Tensor:
    """A text as rows of `length` bytes; what is over at the end is left out."""
    text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    return text[: len(text) // length * length].view(-1, length)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Nats per byte: of every byte after the first of a row, from those before it."""
    return F.cross_entropy(model(tokens)[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
