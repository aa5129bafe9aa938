#!/usr/bin/env python3
"""torch's grouped_mm of bf16 weights, at the shapes of `halfbyte bench qgemm --experts`, for bench/RESULTS.md.

    bench/peer_grouped.py [EXPERTS,TOP_K,NxK ...]

Rows are sorted by expert before; every token takes top_k experts at random. Weights are larger than the second-level
cache; routing takes turns; graphs are replayed. Prints one JSON object per line, with microseconds. Exit code 77 where
torch or a GPU is missing.
"""

import json
import sys

from peer_timing import time_graph_us

CASES = ["128,8,1536x2048", "128,8,2048x768", "128,8,4096x2688", "128,8,2688x2048", "8,2,28672x4096", "8,2,4096x14336",
         "256,8,512x7168", "256,8,7168x256"]  # fmt: skip
TOKENS = [1, 4, 16, 64, 256, 1024, 4096]
ROUTINGS = 16


def main():
    try:
        import torch
    except ImportError as error:
        print(f"SKIP: {error}", file=sys.stderr)
        return 77
    if not torch.cuda.is_available() or not hasattr(torch, "_grouped_mm"):
        print("SKIP: no GPU, or no grouped_mm", file=sys.stderr)
        return 77
    torch.set_grad_enabled(False)
    for case in sys.argv[1:] or CASES:
        experts, top_k, shape = case.split(",")
        experts, top_k = int(experts), int(top_k)
        n, k = (int(extent) for extent in shape.split("x"))
        weights = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16)
        for direction, inputs, operand in (("forward", k, weights.transpose(1, 2)), ("transposed", n, weights)):
            for tokens in TOKENS:
                x = torch.randn(tokens * top_k, inputs, device="cuda", dtype=torch.bfloat16)
                offsets = []
                for _ in range(ROUTINGS):
                    chosen = torch.rand(tokens, experts, device="cuda").topk(top_k).indices.flatten()
                    offsets.append(torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32))
                us = time_graph_us(lambda i: torch._grouped_mm(x, operand, offs=offsets[i % ROUTINGS]), 2 * ROUTINGS)
                print(json.dumps({
                    "peer": "torch grouped_mm bf16 " + torch.__version__, "op": "qgemm_grouped", "experts": experts,
                    "top_k": top_k, "n": n, "k": k, "m": tokens, "direction": direction, "us": round(us, 2),
                }), flush=True)
        del weights, operand
    return 0


if __name__ == "__main__":
    sys.exit(main())
