#!/usr/bin/env python3
"""Linear layers on one GPU, in one process: dense bf16 nn.Linear, Linear4bit of bitsandbytes, Linear4bit of halfbyte.

Forward and backward (the gradient of x) at 1, 16, 128, 2048 and 8192 tokens, nf4 in groups of 64, by CUDA events
around several calls on weights that take turns, so that they come from memory; and the peak memory of a QLoRA step with
adapters of rank 16. Prints tables, and at the end one JSON line. Exit code 77 where there is no GPU; without bitsandbytes its
columns stay empty.
"""

import gc
import json
import statistics
import sys

import torch
from torch import nn

import halfbyte
import halfbyte.torch

SIZES = ((4096, 4096), (14336, 4096))  # out, in
TOKENS = (1, 16, 128, 2048, 8192)
RANK = 16
COLD_BYTES = 160 << 20  # more than the second-level cache of any GPU, of packed weights


class Adapter(nn.Module):
    """y = layer(x) + (x A^T) B^T, as QLoRA has it around the layer of bitsandbytes."""

    def __init__(self, layer: nn.Module, n: int, k: int) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.randn(RANK, k, device="cuda", dtype=torch.bfloat16) * 0.01)
        self.b = nn.Parameter(torch.zeros(n, RANK, device="cuda", dtype=torch.bfloat16))

    def forward(self, x):
        return self.layer(x) + (x @ self.a.t()) @ self.b.t()


def theirs(dense: nn.Linear) -> nn.Module:
    import bitsandbytes

    layer = bitsandbytes.nn.Linear4bit(dense.in_features, dense.out_features, bias=False, quant_type="nf4",
                                       compute_dtype=torch.bfloat16, compress_statistics=False)
    layer.load_state_dict({"weight": dense.weight.detach().cpu()})
    return layer.to("cuda")


def time_us(call, budget_ms: float) -> float:
    """The median of rounds of several calls; call(i) takes the number of the call."""
    for i in range(3):
        call(i)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(0)
    end.record()
    end.synchronize()
    calls = max(3, min(50, int(budget_ms / 8 / max(start.elapsed_time(end), 0.01))))
    times = []
    for _ in range(7):
        start.record()
        for i in range(calls):
            call(i)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def measure(layers: list[nn.Module], tokens: int, k: int, n: int) -> float:
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16)

    def call(i):
        x.grad = None
        layers[i % len(layers)](x).backward(g)

    return time_us(call, 300)


def peak_of_step(layer: nn.Module, tokens: int, k: int, n: int) -> int:
    """Bytes above what was allocated before the layer was made, in the second step of training its adapter."""
    optimizer = torch.optim.AdamW([p for p in layer.parameters() if p.requires_grad], 1e-4)
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for step in range(2):
        if step == 1:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        x.grad = None
        layer(x).square().mean().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


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
    rows, peaks = [], []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {peer or 'no bitsandbytes'}: "
          "forward + backward, us")
    print(f"{'weight':>14} {'tokens':>7} {'dense bf16':>11} {'bitsandbytes':>13} {'halfbyte':>10} {'x bnb':>7} {'x dense':>8}")
    for n, k in SIZES:
        copies = max(2, COLD_BYTES * 2 // (n * k))
        dense = [nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
                 for _ in range(max(2, copies // 4))]
        of = {"dense": dense,
              "halfbyte": [halfbyte.torch.Linear4bit.from_linear(dense[i % len(dense)]) for i in range(copies)]}
        if peer:
            of["bitsandbytes"] = [theirs(dense[i % len(dense)]) for i in range(copies)]
        x = torch.randn(64, k, device="cuda", dtype=torch.bfloat16)
        exact = x.float() @ of["halfbyte"][0].dequantized(torch.float32).t()
        for name in of:  # all compute the same product, or nothing is measured
            error = float((of[name][0](x).float() - exact).norm() / exact.norm())
            assert error < (0.2 if name == "dense" else 0.02), (name, error)
        for tokens in TOKENS:
            us = {name: measure(layers, tokens, k, n) for name, layers in of.items()}
            row = {"n": n, "k": k, "tokens": tokens, **{name: round(time, 1) for name, time in us.items()}}
            row["of_dense"] = round(us["dense"] / us["halfbyte"], 2)
            if peer:
                row["of_bitsandbytes"] = round(us["bitsandbytes"] / us["halfbyte"], 2)
            rows.append(row)
            print(f"{n:>7} x {k:<4} {tokens:>7} {row['dense']:>11} {row.get('bitsandbytes', ''):>13} {row['halfbyte']:>10} "
                  f"{row.get('of_bitsandbytes', ''):>7} {row['of_dense']:>8}", flush=True)
        del of, dense, x, exact
        torch.cuda.empty_cache()
    print("\npeak memory of a QLoRA step, rank 16, MB")
    for n, k in SIZES:
        for tokens in (128, 2048, 8192):
            row = {"n": n, "k": k, "tokens": tokens}
            for name in ("halfbyte", "bitsandbytes") if peer else ("halfbyte",):
                gc.collect()  # what the layer before left in cycles
                torch.cuda.empty_cache()
                before = torch.cuda.memory_allocated()
                dense = nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
                layer = (halfbyte.torch.Linear4bit.from_linear(dense, lora_rank=RANK) if name == "halfbyte"
                         else Adapter(theirs(dense), n, k))
                del dense
                row[name] = round((peak_of_step(layer, tokens, k, n) - before) / 1e6, 1)
                del layer
            peaks.append(row)
            print(f"{n:>7} x {k:<4} {tokens:>7} bitsandbytes {row.get('bitsandbytes', ''):>9} halfbyte {row['halfbyte']:>9}",
                  flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "peer": peer,
                      "halfbyte": halfbyte.__version__, "times": rows, "peak_mb": peaks}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
