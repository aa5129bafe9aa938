#!/usr/bin/env python3
"""Runs a build with Ninja and keeps it within its compile-time budget.

    tools/build_times.py BUILD_DIR COMMAND...

Prints the CPU seconds of the slowest translation units that COMMAND compiled. .ninja_log knows wall clock
times; they are scaled to the CPU time that the whole build took. CPU time itself doubles on a slow or a shared
machine, so it is divided by how much slower than the machine of the budget this one compiles
tools/reference_unit.cc, again and again during the build. Warns above the budget of ARCHITECTURE.md and exits 1
above the limit.
"""

import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

UNIT_BUDGET, UNIT_LIMIT = 15, 60  # seconds of one translation unit
TOTAL_BUDGET, TOTAL_LIMIT = 180, 480  # of the build
# CPU seconds of the reference unit on the machine of these figures, which builds the Python module in 45 s. Not measured
# there: where the module took 61 s, the unit took 2.85.
REFERENCE_SECONDS = 2.1
SAMPLE_INTERVAL = 15  # seconds: costs a few percent
REFERENCE_UNIT = Path(__file__).with_name("reference_unit.cc")


def cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def reference_seconds(folder):
    before = cpu_seconds()
    compiler = os.environ.get("CXX", "g++")
    subprocess.run([compiler, "-std=c++20", "-O1", "-c", REFERENCE_UNIT, "-o", f"{folder}/unit.o"], check=True)
    return cpu_seconds() - before


def run_build(command):
    """Its status and CPU seconds; those of the reference unit, which is compiled again and again meanwhile."""
    before, samples = cpu_seconds(), []
    with tempfile.TemporaryDirectory() as folder:
        build = subprocess.Popen(command)
        while build.poll() is None or not samples:
            samples.append(reference_seconds(folder))
            with contextlib.suppress(subprocess.TimeoutExpired):
                build.wait(SAMPLE_INTERVAL)
    return build.returncode, cpu_seconds() - before - sum(samples), sum(samples) / len(samples)


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
    since = time.time()
    status, cpu, reference = run_build(command)
    if status:
        return status
    slowness = reference / REFERENCE_SECONDS
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
