#!/usr/bin/env python3
"""A model of the shape of Llama 3 8B with random weights, on one GPU: dense in bf16, and in NF4 by bitsandbytes and by
halfbyte (scales of f32, as those of bitsandbytes, and of f16), one after the other in one process.

A step of decoding under a CUDA graph, with 512 tokens of context; and a step of QLoRA with 4 x 2048 tokens, adapters of rank
16 beside all linear layers and checkpointed layers: its time and its peak memory. Positions are not encoded, as that costs
all the same. Prints tables, and at the end one JSON line. Exit code 77 where there is no GPU; without bitsandbytes its columns stay
empty.
"""

import gc
import json
import sys
from dataclasses import asdict, dataclass
from functools import partial

import torch
from peer_linear import Adapter
from peer_timing import time_graph_us
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfbyte
import halfbyte.torch

RANK, CONTEXT = 16, 512


@dataclass
class Shape:
    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def of_halfbyte(dense: nn.Linear, rank: int, spec: str = "nf4") -> nn.Module:
    return halfbyte.torch.Linear4bit.from_linear(dense, spec, lora_rank=rank)


def of_bitsandbytes(dense: nn.Linear, rank: int) -> nn.Module:
    import bitsandbytes

    n, k = dense.weight.shape
    layer = bitsandbytes.nn.Linear4bit(k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
    layer.weight = bitsandbytes.nn.Params4bit(dense.weight.detach(), requires_grad=False, quant_type="nf4",
                                              compress_statistics=False).to(dense.weight.device)
    return Adapter(layer, n, k) if rank else layer


KINDS = {"dense": lambda dense, rank: dense, "bitsandbytes": of_bitsandbytes, "halfbyte": of_halfbyte,
         "halfbyte f16": partial(of_halfbyte, spec="nf4,scale_dtype=f16")}


class Layer(nn.Module):
    def __init__(self, shape: Shape, make, device: str) -> None:
        super().__init__()
        self.shape = shape
        kv = shape.kv_heads * shape.head
        for name, n, k in (("q", shape.hidden, shape.hidden), ("k", kv, shape.hidden), ("v", kv, shape.hidden),
                           ("o", shape.hidden, shape.hidden), ("gate", shape.intermediate, shape.hidden),
                           ("up", shape.intermediate, shape.hidden), ("down", shape.hidden, shape.intermediate)):
            dense = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
            self.add_module(name, make(dense))

    def attend(self, x, cache):
        batch, tokens, _ = x.shape
        q, k, v = (layer(x).view(batch, tokens, -1, self.shape.head).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if cache is not None:  # one more token, in the last place
            for of, now in zip(cache, (k, v)):
                of[:, :, -1:] = now
            k, v = cache
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(batch, tokens, -1))

    def forward(self, x, cache=None):
        size = (self.shape.hidden,)
        x = x + self.attend(F.rms_norm(x, size), cache)
        y = F.rms_norm(x, size)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(nn.Module):
    def __init__(self, shape: Shape, kind: str, rank: int, device: str) -> None:
        super().__init__()
        torch.manual_seed(1)  # the same weights for all kinds
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden, device=device, dtype=torch.bfloat16)
        self.embedding.requires_grad_(False)
        self.layers = nn.ModuleList(Layer(shape, lambda dense: KINDS[kind](dense, rank), device) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False, device=device, dtype=torch.bfloat16)
        self.head.requires_grad_(False)

    def forward(self, tokens, caches=None):
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x, caches[i] if caches else None)
        return self.head(F.rms_norm(x, x.shape[-1:]))


@torch.no_grad()
def decode_us(model: Model, shape: Shape, batch: int, device: str) -> float:
    size = (2, batch, shape.kv_heads, CONTEXT, shape.head)
    caches = [tuple(torch.randn(size, device=device, dtype=torch.bfloat16)) for _ in range(shape.layers)]
    tokens = torch.randint(shape.vocabulary, (batch, 1), device=device)
    return time_graph_us(lambda _: model(tokens, caches), 4, 5)


def train(model: Model, shape: Shape, device: str, size=(4, 2048), steps: int = 3) -> dict:
    """The time of the last step, and the most memory that was allocated in it."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4)
    tokens = torch.randint(shape.vocabulary, size, device=device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(steps):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start.record()
        optimizer.zero_grad()
        logits = model(tokens)
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        del logits
        optimizer.step()
        end.record()
        end.synchronize()
    return {"ms": round(start.elapsed_time(end), 1), "peak_mb": round(torch.cuda.max_memory_allocated() / 1e6)}


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    if not torch.cuda.is_available():
        print("SKIP: no GPU", file=sys.stderr)
        return 77
    try:
        import bitsandbytes
        peer = "bitsandbytes " + bitsandbytes.__version__
    except ImportError as error:
        print(f"without bitsandbytes: {error}", file=sys.stderr)
        peer = ""
    kinds = [kind for kind in KINDS if peer or kind != "bitsandbytes"]
    shape, result = Shape(), {}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {peer or 'no bitsandbytes'}")
    print("tokens a second of decoding, batch 1 and 16; a step of QLoRA, ms and MB")
    logits, tokens = {}, torch.arange(8, device="cuda").view(1, 8)
    for kind in kinds:
        model = Model(shape, kind, 0, "cuda").eval()
        with torch.no_grad():
            logits[kind] = model(tokens).float()
        row = result[kind] = {}
        for batch in (1, 16):
            row[f"decode_{batch}"] = round(batch * 1e6 / decode_us(model, shape, batch, "cuda"), 1)
        del model
        release()
        if kind != "dense":
            model = Model(shape, kind, RANK, "cuda")
            row.update(train(model, shape, "cuda"))
            del model
            release()
        print(f"{kind:<13}", *(f"{name} {value:>9}" for name, value in row.items()), flush=True)
    if peer:  # both have the same codes
        ours, theirs = logits["halfbyte"], logits["bitsandbytes"]
        error = float((ours - theirs).norm() / theirs.norm())
        assert error < 0.05, f"logits of halfbyte and bitsandbytes differ by {error}"
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "peer": peer,
                      "halfbyte": halfbyte.__version__, "shape": asdict(shape), "results": result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
