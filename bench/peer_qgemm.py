#!/usr/bin/env python3
"""Products with 4-bit weights by others, at the shapes of `halfbyte bench qgemm`, for bench/RESULTS.md: torch's INT4
(tinygemm, g128), bitsandbytes' NF4 (g64; backward is dequantize and matmul), torch's bf16 matmul.

    bench/peer_qgemm.py [NxK ...]

Cold weights: buffers take turns over 300 MB and more; graphs are replayed. Prints one JSON object per line: microseconds,
and what a bare read of the same weight bytes takes in this process (by Triton, where it is installed). What is not
installed is said. Exit code 77 where torch or a GPU is missing.
"""

import json
import sys

from peer_timing import time_graph_us

SHAPES = ["4096x4096", "14336x4096", "8192x8192", "28672x8192"]
M = [1, 2, 4, 8, 16, 32, 64]
ROTATION = 300e6  # bytes of weights
GRAPH_US, LEAST_LAUNCHES = 400, 24


def make_read():
    """read(words) for a tensor of int32, or None."""
    try:
        import torch
        import triton
        import triton.language as tl
    except ImportError as error:
        print(f"SKIP: bare reads: {error}", file=sys.stderr)
        return None
    block = 2048  # 4 loads of 16 bytes a thread

    @triton.jit
    def kernel(words, never, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        total = tl.xor_sum(tl.load(words + at, mask=at < count, other=0), 0)
        if total == 1234567890:
            tl.store(never, total)

    never = torch.zeros(1, device="cuda", dtype=torch.int32)
    return lambda words: kernel[(triton.cdiv(words.numel(), block),)](words, never, words.numel(), BLOCK=block)


def main():
    try:
        import torch
    except ImportError as error:
        print(f"SKIP: {error}", file=sys.stderr)
        return 77
    if not torch.cuda.is_available():
        print("SKIP: no GPU", file=sys.stderr)
        return 77
    try:
        import bitsandbytes
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except ImportError as error:
        print(f"SKIP: {error}", file=sys.stderr)
        bitsandbytes = None
    torch.set_grad_enabled(False)
    read = make_read()

    for shape in sys.argv[1:] or SHAPES:
        n, k = (int(extent) for extent in shape.split("x"))

        def sets_of(num_bytes):
            return max(3, -int(-ROTATION // num_bytes))

        def launches_of(us, sets):
            wanted = max(LEAST_LAUNCHES, int(GRAPH_US / us))
            return -(-wanted // sets) * sets

        def measure(peer, direction, m, weights, launch, read_us=None):
            launches = launches_of(read_us or 10, len(weights))
            us = time_graph_us(lambda i: launch(i % len(weights)), launches)
            print(json.dumps({
                "peer": peer, "op": "qgemm", "n": n, "k": k, "m": m, "direction": direction, "us": round(us, 2),
                **({"read_us": round(read_us, 2), "read_of_us": round(read_us / us, 4)} if read_us else {}),
            }), flush=True)

        def read_us_of(words):
            if read is None:
                return None
            launches = launches_of(words[0].numel() * 4 / 4e6, len(words))
            return time_graph_us(lambda i: read(words[i % len(words)]), launches)

        def inputs(cols):
            return {m: torch.randn(m, cols, device="cuda", dtype=torch.bfloat16) for m in M}

        x, dy = inputs(k), inputs(n)

        # bf16 weights.
        dense = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(sets_of(n * k * 2))]
        for m in M:
            measure("torch bf16 " + torch.__version__, "forward", m, dense, lambda i: torch.matmul(x[m], dense[i].t()))
            measure("torch bf16 " + torch.__version__, "transposed", m, dense, lambda i: torch.matmul(dy[m], dense[i]))
        base = dense[0]
        del dense

        # INT4, one bf16 scale and zero for 128.
        group = 128
        count = sets_of(n * k // 2 + n * k // group * 4)
        try:
            some = torch._convert_weight_to_int4pack(
                torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8), 8)
            packed = [torch.randint(-2**31, 2**31, some.shape, device="cuda", dtype=torch.int32) for _ in range(count)]
            scales = [torch.rand(k // group, n, 2, device="cuda").to(torch.bfloat16) for _ in range(count)]
            words = [torch.cat([p.flatten(), s.flatten().view(torch.int32)]) for p, s in zip(packed, scales)]
            read_us = read_us_of(words)
            del words, some
            for m in M:
                measure("torch int4 g128 " + torch.__version__, "forward", m, packed,
                        lambda i: torch._weight_int4pack_mm(x[m], packed[i], group, scales[i]), read_us)
            del packed, scales
        except (AttributeError, RuntimeError) as error:
            print(f"SKIP: torch int4: {error}", file=sys.stderr)

        # NF4, one f32 scale for 64.
        if bitsandbytes is None:
            continue
        count = sets_of(n * k // 2 + n * k // 64 * 4)
        codes, states = [], []
        for _ in range(count):
            quantized, state = quantize_4bit(base, blocksize=64, quant_type="nf4")
            codes.append(torch.randint(0, 256, quantized.shape, device="cuda", dtype=torch.uint8))
            states.append(state)
        words = [torch.cat([c.flatten().view(torch.int32), s.absmax.view(torch.int32)]) for c, s in zip(codes, states)]
        read_us = read_us_of(words)
        del words
        for m in M:
            measure("bitsandbytes nf4 g64 " + bitsandbytes.__version__, "forward", m, codes,
                    lambda i: bitsandbytes.matmul_4bit(x[m], codes[i].t(), quant_state=states[i]), read_us)
            measure("bitsandbytes nf4 g64 " + bitsandbytes.__version__, "transposed", m, codes,
                    lambda i: torch.matmul(dy[m], dequantize_4bit(codes[i], states[i])), read_us)
    return 0


if __name__ == "__main__":
    sys.exit(main())
