#!/usr/bin/env python3
"""What halfbyte.torch costs a call beside its kernel, against a dense nn.Linear and an empty operator in one process.

CPU: M = 1, 64 x 64, one thread. CUDA, if there is a device: M = 1, 4096 x 4096. Each number is the least of many
rounds, in us; forward without and with gradients, forward + backward. Overhead: of the CPU the time of the same module
at 1 x 1, where the kernel has nothing to do; of CUDA that of the host, which enqueues without waiting. Prints tables,
and at the end one JSON line.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F

import halfbyte
import halfbyte.torch
from halfbyte.torch._ops_weight import shape_of

_LIBRARY = torch.library.Library("halfbyte_bench", "DEF")
_LIBRARY.define("empty(Tensor x) -> Tensor")
_LIBRARY.impl("empty", torch.empty_like, "CompositeExplicitAutograd")


class Empty(torch.autograd.Function):
    """A function that computes nothing, with a gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        _ = ctx.saved_tensors
        return dy, None


def least_us(calls: dict, device: str, rounds: int, launches: int) -> dict:
    """The least time of each, taken in turns, so that what else the machine does meets all of them."""
    times = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(launches):
                call()
            times[name] = min(times[name], (time.perf_counter() - begin) / launches * 1e6)
    return {name: round(us, 2) for name, us in times.items()}


def measure(device: str, size: int, rounds: int, launches: int) -> dict:
    dense = torch.nn.Linear(size, size, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    layer = halfbyte.torch.Linear4bit.from_linear(dense)
    x = torch.randn(1, size, device=device, dtype=torch.bfloat16)
    trained, g = x.clone().requires_grad_(), torch.randn_like(x)
    y, weight = torch.empty_like(x), layer.weight
    threads = torch.get_num_threads()
    plans = halfbyte.QgemmPlans(str(layer.spec), size, size, device=device, num_threads=threads)
    plan = shape_of(str(layer.spec), size, size)

    def backward(forward):
        def call():
            trained.grad = None
            forward(trained).backward(g)
        return call

    with torch.no_grad():
        forward = least_us({
            "halfbyte module": lambda: layer(x), "halfbyte product": lambda: plan.multiply(x, weight, None, False),
            "halfbyte product, y given": lambda: plans(x, weight, None, y),
            "halfbyte operator": lambda: torch.ops.halfbyte.qgemm(x, weight, None, "nf4", size, size),
            "dense module": lambda: dense(x), "dense F.linear": lambda: F.linear(x, dense.weight),
            "empty operator": lambda: torch.ops.halfbyte_bench.empty(x)}, device, rounds, launches)
    with_gradients = least_us({"halfbyte module": lambda: layer(trained), "dense module": lambda: dense(trained),
                               "empty function": lambda: Empty.apply(trained, weight)}, device, rounds, launches)
    both = least_us({"halfbyte module": backward(layer), "dense module": backward(dense),
                     "empty function": backward(lambda x: Empty.apply(x, weight))}, device, rounds, launches)
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu", "size": size, "forward": forward,
        "forward with gradients": with_gradients, "forward + backward": both,
        "module / dense": round(forward["halfbyte module"] / forward["dense module"], 2),
        "module - empty operator": round(forward["halfbyte module"] - forward["empty operator"], 2),
        "with gradients / dense": round(with_gradients["halfbyte module"] / with_gradients["dense module"], 2),
        "forward + backward / dense": round(both["halfbyte module"] / both["dense module"], 2)}
    print(f"\n{result['device']}, M = 1, {size} x {size}, bf16, nf4, us a call, torch {torch.__version__}")
    for kind in ("forward", "forward with gradients", "forward + backward"):
        for name, us in result[kind].items():
            print(f"  {kind:24} {name:26} {us:9.2f}")
    for name in ("module / dense", "with gradients / dense", "forward + backward / dense", "module - empty operator"):
        print(f"  {name:51} {result[name]:9.2f}")
    return result


def main() -> int:
    torch.set_num_threads(1)
    results = [measure("cpu", size, 500, 50) for size in (64, 1)]  # short rounds: some meet an idle core
    if torch.cuda.is_available():
        results.append(measure("cuda", 4096, 60, 100))
    print(json.dumps({"torch": torch.__version__, "halfbyte": halfbyte.__version__, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
