#!/usr/bin/env python3
"""Eager PyTorch at the shapes of the training benchmarks, for bench/RESULTS.md: observers, fake quantization and
gradients, DWQ's affine quant-dequant.

Prints one JSON object per line: microseconds, and the share of what a copy by torch in the same process would need for
the bytes that the operation must move. Where torch has no function for 16-bit data, what a user would write instead.
Exit code 77 where torch or a GPU is missing.
"""

import json
import sys

from peer_timing import SETS, time_us

ROWS = COLS = 8192
GROUP = 64


def main():
    try:
        import torch
    except ImportError as error:
        print(f"SKIP: {error}", file=sys.stderr)
        return 77
    if not torch.cuda.is_available():
        print("SKIP: no GPU", file=sys.stderr)
        return 77

    n = ROWS * COLS
    for dtype in (torch.bfloat16, torch.float32):
        size = dtype.itemsize
        x = [torch.randn(ROWS, COLS, device="cuda", dtype=dtype) * 0.02 for _ in range(SETS)]
        dy = [torch.randn(ROWS, COLS, device="cuda", dtype=dtype) for _ in range(SETS)]
        y = torch.empty_like(x[0])
        grouped = [part.view(-1, GROUP) for part in x]
        codes = [torch.randint(0, 16, (n // GROUP, GROUP), device="cuda", dtype=torch.uint8) for _ in range(SETS)]
        copy_us = time_us(lambda i: y.copy_(x[i]))
        copy_rate = 2 * n * size / copy_us

        def report(op, launch, bytes_per_element):
            us = time_us(launch, launches=6, rounds=5)
            print(json.dumps({
                "peer": "torch " + torch.__version__, "op": op, "dtype": str(dtype).removeprefix("torch."),
                "us": round(us, 2), "of_copy": round(n * bytes_per_element / us / copy_rate, 4),
            }), flush=True)

        report("copy", lambda i: y.copy_(x[i]), 2 * size)
        report("aminmax tensor", lambda i: torch.aminmax(x[i]), size)
        report("aminmax channel", lambda i: torch.aminmax(x[i], dim=1), size)
        report("aminmax channel axis 1", lambda i: torch.aminmax(x[i], dim=0), size)
        report("aminmax group 64", lambda i: torch.aminmax(grouped[i], dim=1), size)

        zero = torch.zeros(ROWS, device="cuda", dtype=torch.int32)
        scale = torch.full((ROWS,), 0.01, device="cuda")
        group_scale = torch.full((n // GROUP,), 0.01, device="cuda")
        group_zero = torch.zeros(n // GROUP, device="cuda", dtype=torch.int32)
        report("fake_quantize tensor", lambda i: torch.fake_quantize_per_tensor_affine(x[i], 0.01, 0, -8, 7), 2 * size)
        report("fake_quantize channel",
               lambda i: torch.fake_quantize_per_channel_affine(x[i], scale, zero, 0, -8, 7), 2 * size)
        report("fake_quantize group 64",
               lambda i: torch.fake_quantize_per_channel_affine(grouped[i], group_scale, group_zero, 0, -8, 7), 2 * size)

        # Backward alone, of graphs that are kept.
        def backward_of(forward, parameters):
            inputs = [part.detach().requires_grad_() for part in x]
            outputs = [forward(part) for part in inputs]
            return lambda i: torch.autograd.grad(outputs[i], [inputs[i], *parameters], dy[i].view_as(outputs[i]),
                                                 retain_graph=True)

        report("STE backward tensor", backward_of(
            lambda part: torch.fake_quantize_per_tensor_affine(part, 0.01, 0, -8, 7), []), 3 * size)
        if dtype == torch.float32:  # the learnable functions take nothing else
            one, none = torch.full((1,), 0.01, device="cuda").requires_grad_(), torch.zeros(1, device="cuda").requires_grad_()
            report("LSQ backward tensor", backward_of(
                lambda part: torch._fake_quantize_learnable_per_tensor_affine(part, one, none, -8, 7, 1.0),
                [one, none]), 3 * size)
            many, zeros = scale.clone().requires_grad_(), torch.zeros(ROWS, device="cuda").requires_grad_()
            report("LSQ backward channel", backward_of(
                lambda part: torch._fake_quantize_learnable_per_channel_affine(part, many, zeros, 0, -8, 7, 1.0),
                [many, zeros]), 3 * size)
            many64 = group_scale.clone().requires_grad_()
            zeros64 = torch.zeros(n // GROUP, device="cuda").requires_grad_()
            report("LSQ backward group 64", backward_of(
                lambda part: torch._fake_quantize_learnable_per_channel_affine(
                    part.view(-1, GROUP), many64, zeros64, 0, -8, 7, 1.0), [many64, zeros64]), 3 * size)

        s = torch.rand(n // GROUP, 1, device="cuda")
        b = torch.rand(n // GROUP, 1, device="cuda")
        report("affine forward u8", lambda i: (codes[i] * s + b).to(dtype), 1 + size)

        def affine_backward(i):
            g = dy[i].view(-1, GROUP)
            return (codes[i] * g).sum(1, dtype=torch.float32), g.sum(1, dtype=torch.float32)

        report("affine backward u8", affine_backward, 1 + size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
