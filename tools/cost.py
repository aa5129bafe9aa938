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
FILES_AT_ONCE = 4


@dataclass(frozen=True)
class Host:
    """What one process runs on. Rates are bytes of the source a second, of bench/RESULTS.md: 32 threads, verified."""

    name: str
    nf4: float  # writing files beside verifying others
    nvfp4: float | None  # None: not measured
    start: float  # s: threads, devices, and the first files


# Fitted on nf4, 17.2 GB in memory. CPU: 1.74 s not verified and 13.4 GB/s writing, so 0.46 s of start; 2.45 s verified.
# Devices hide verifying: 6.4 and 7.65 GB/s writing; 17.2 GB at 4.4 and 4.7 GB/s in all. nvfp4: 5.4 and 5.8 GB/s writing,
# and of the CPU verifying besides, which at 24 GB/s is what makes nf4 8.6 GB/s of 13.4.
CPU = Host("CPU", 8.6 * GB, 4.4 * GB, 0.5)
GPU = Host("1 GPU", 6.4 * GB, None, 1.2)
GPUS = Host("2 GPUs", 7.65 * GB, 5.8 * GB, 1.4)
VERIFY = 24 * GB  # of the last files, which nothing hides


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
    rate = getattr(host, layout)
    read = share * source / min(storage.link, storage.read / active)
    write = share * output / min(storage.link, storage.write / active)
    work = share * source / rate
    ranges = read if layout == "nvfp4" else 0  # the pass that finds global scales
    last = min(FILES_AT_ONCE * FILE_BYTES, share * source) / VERIFY
    total = host.start + ranges + max(read + write, work) + last
    limit = "compute" if work > ranges + read + write else "read" if ranges + read > write else "write"
    return total, limit


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
