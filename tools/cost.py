#!/usr/bin/env python3
"""How long `halfbyte quantize` takes, by the formula of docs/scale.md, for models and machines that are not at hand.

    tools/cost.py

Prints the tables of that page; tests/docs_test.py compares them. On a machine that is at hand, `halfbyte quantize
--dry-run` measures instead.
"""

import math
from dataclasses import dataclass

GB = 1e9
FILE_BYTES = 5 * GB  # of a published model
FILES_AT_ONCE = 8


@dataclass(frozen=True)
class Rates:
    """Bytes of the source a second."""

    run: float  # reading, quantizing and writing files, beside the completion of others
    complete: float  # verifying and hashing them


@dataclass(frozen=True)
class Host:
    """What one process runs on."""

    name: str
    nf4: Rates
    nvfp4: Rates | None  # None: not measured
    start: float  # s: the program, devices, threads


# With 32 threads, of bench/RESULTS.md: nf4 33.7 GB in 31 files, nvfp4 16.2 GB in 15, in memory.
CPU = Host("CPU", Rates(32.7 * GB, 15.8 * GB), Rates(28.7 * GB, 10.8 * GB), 0.3)
GPU = Host("1 GPU", Rates(18.3 * GB, 15.5 * GB), None, 0.6)
GPUS = Host("2 GPUs", Rates(29.7 * GB, 16.2 * GB), Rates(27.5 * GB, 10.4 * GB), 0.8)


@dataclass(frozen=True)
class Storage:
    name: str
    read: float  # of all processes together
    write: float
    link: float  # of one process


NVME = Storage("NVMe", 7 * GB, 5 * GB, math.inf)
SHARED = Storage("parallel", 100 * GB, 100 * GB, 25 * GB)
MEMORY = Storage("memory", math.inf, math.inf, math.inf)

MODELS = {"70 B": 70e9, "671 B": 671e9, "1 T": 1e12, "10 T": 10e12}
PLACES = [(MEMORY, CPU, 1), (NVME, CPU, 1), (NVME, GPU, 1), (NVME, GPUS, 1), (SHARED, CPU, 1), (SHARED, CPU, 8), (SHARED, CPU, 64)]
BITS = 4.5  # a weight: nf4 with scales in f32 for 64, nvfp4 with scales of 8 bits for 16
MEMORY_BYTES = 1e12  # of a host, where input and output lie in memory


def estimate(num_weights, layout, storage, host, ranks):
    """Seconds, and what limits."""
    source = 2 * num_weights
    output = num_weights * BITS / 8
    num_files = math.ceil(source / FILE_BYTES)
    active = min(ranks, num_files)
    share = math.ceil(num_files / ranks) / num_files  # of the busiest
    rates = getattr(host, layout)
    read = share * source / min(storage.link, storage.read / active)
    write = share * output / min(storage.link, storage.write / active)
    compute = share * source / rates.run
    complete = share * source / rates.complete
    ranges = read if layout == "nvfp4" else 0  # the pass that finds global scales
    run = max(read + write, compute)
    batch = min(1, FILES_AT_ONCE * FILE_BYTES / (share * source))  # the first is written alone, the last completed alone
    total = host.start + ranges + batch * run + (1 - batch) * max(run, complete) + batch * complete
    if complete > ranges + run:
        return total, "verify"
    return total, "compute" if compute > ranges + read + write else "read" if ranges + read > write else "write"


def seconds_text(seconds):
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def cell(num_weights, layout, storage, host, ranks):
    if getattr(host, layout) is None:
        return "-"
    if storage is MEMORY and num_weights * (2 + BITS / 8) > MEMORY_BYTES:
        return "-"
    total, limit = estimate(num_weights, layout, storage, host, ranks)
    return f"{seconds_text(total)}, {limit}"


def table(layout):
    titles = [f"{storage.name}, {f'{ranks} hosts' if ranks > 1 else host.name}" for storage, host, ranks in PLACES]
    lines = [f"| `{layout}` | {' | '.join(titles)} |", "|---" * (len(PLACES) + 1) + "|"]
    for name, num_weights in MODELS.items():
        lines.append(f"| {name} | {' | '.join(cell(num_weights, layout, *place) for place in PLACES)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print("\n\n".join(table(layout) for layout in ("nf4", "nvfp4")))
