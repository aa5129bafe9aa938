#!/usr/bin/env python3
"""bitsandbytes at the shapes of `halfbyte bench quantize`, for bench/RESULTS.md: NF4 quantize and dequantize of bf16 weights.

Prints one JSON object per line; rates are bytes read and written per second, "of_copy" their ratio to a copy by
torch in the same process. Exit code 77 where bitsandbytes or a GPU is missing.
"""

import json
import sys

from peer_timing import SETS, time_us


def main():
    try:
        import bitsandbytes
        import torch
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    except ImportError as error:
        print(f"SKIP: {error}", file=sys.stderr)
        return 77
    if not torch.cuda.is_available():
        print("SKIP: no GPU", file=sys.stderr)
        return 77

    for rows, cols in ((8192, 8192), (28672, 8192)):
        x = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(SETS)]
        y = [torch.empty_like(x[0]) for _ in range(SETS)]
        dense_bytes = rows * cols * 2
        copy_us = time_us(lambda i: y[i].copy_(x[i]))
        copy_rate = 2 * dense_bytes / copy_us

        def report(op, us, num_bytes, **more):
            rate = num_bytes / us
            print(json.dumps({
                "peer": "bitsandbytes " + bitsandbytes.__version__, "op": op, "rows": rows, "cols": cols, **more,
                "us": round(us, 2), "gb_per_s": round(rate * 1e-3, 1), "of_copy": round(rate / copy_rate, 4),
            }), flush=True)

        report("torch copy", copy_us, 2 * dense_bytes)
        for blocksize in (64, 128):
            moved = dense_bytes + rows * cols // 2 + rows * cols // blocksize * 4
            quantized = [quantize_4bit(part, blocksize=blocksize, quant_type="nf4") for part in x]
            out = [codes for codes, _ in quantized]

            def quantize(i):
                quantize_4bit(x[i], absmax=quantized[i][1].absmax, out=out[i], blocksize=blocksize, quant_type="nf4")

            def dequantize(i):
                dequantize_4bit(quantized[i][0], quantized[i][1], out=y[i])

            report("quantize nf4", time_us(quantize), moved, group=blocksize)
            report("dequantize nf4", time_us(dequantize), moved, group=blocksize)
    return 0


if __name__ == "__main__":
    sys.exit(main())
