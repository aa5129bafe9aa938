#!/usr/bin/env python3
"""Runs a build with Ninja and keeps it within its compile-time budget.

    tools/build_times.py BUILD_DIR COMMAND...

Prints the CPU seconds of the slowest translation units that COMMAND compiled. .ninja_log knows wall clock
times; they are scaled to the CPU time that the whole build took. CPU time itself doubles on a slow or a shared
machine, so it is divided by how much slower than the machine of the budget this one compiles
tools/reference_unit.cc, on all CPUs at once, before and after the build. Warns above the budget of
ARCHITECTURE.md and exits 1 above the limit.
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UNIT_BUDGET, UNIT_LIMIT = 15, 60  # seconds of one translation unit
TOTAL_BUDGET, TOTAL_LIMIT = 180, 480  # of the build
# CPU seconds of the reference unit where these hold: where the Python module takes 45 s.
REFERENCE_SECONDS = 2.1
REFERENCE_UNIT = Path(__file__).with_name("reference_unit.cc")


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def reference_seconds():
    """CPU seconds of the reference unit, while each CPU compiles it."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = os.environ.get("CXX", "g++")
        before, copies = cpu_seconds(), os.cpu_count()
        running = [
            subprocess.Popen([compiler, "-std=c++20", "-O1", "-c", REFERENCE_UNIT, "-o", f"{folder}/{i}.o"])
            for i in range(copies)
        ]
        for process in running:
            if process.wait():
                sys.exit(f"{REFERENCE_UNIT} does not compile")
        return (cpu_seconds() - before) / copies


def wall_seconds(build, since):
    """Output -> seconds of its last build step, for the outputs written after `since`."""
    seconds = {}
    for line in (build / ".ninja_log").read_text().splitlines()[1:]:
        start, end, _, output, _ = line.split("\t")
        if (build / output).exists() and (build / output).stat().st_mtime >= since:
            seconds[output] = (int(end) - int(start)) / 1000
    return seconds


def within(what, seconds, budget, limit):
    if seconds > budget:
        verdict = "FAIL, over the limit" if seconds > limit else "warning, over the budget"
        print(f"{verdict}: {what} took {seconds:.1f} s; budget {budget} s, limit {limit} s")
    return seconds <= limit


def main():
    build, command = Path(sys.argv[1]), sys.argv[2:]
    reference = reference_seconds()
    since, before = time.time(), cpu_seconds()
    if status := subprocess.run(command).returncode:
        return status
    cpu = cpu_seconds() - before
    slowness = (reference + reference_seconds()) / 2 / REFERENCE_SECONDS
    total = cpu / slowness

    steps = wall_seconds(build, since)
    scale = total / max(cpu, sum(steps.values()))
    units = {output: scale * wall for output, wall in steps.items() if output.endswith(".o")}
    slowest = sorted(units.items(), key=lambda unit: -unit[1])
    print(
        f"{len(units)} translation units, {cpu:.1f} s of CPU in all; this machine compiles {slowness:.2f} times as "
        f"slowly as that of the budget, where it is {total:.1f} s; there the slowest:"
    )
    for output, seconds in slowest[:10]:
        print(f"{seconds:7.1f} s  {output.split('.dir/')[-1].removesuffix('.o')}")
    ok = within("the build", total, TOTAL_BUDGET, TOTAL_LIMIT)
    for output, seconds in slowest:
        ok &= within(output, seconds, UNIT_BUDGET, UNIT_LIMIT)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
