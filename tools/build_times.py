#!/usr/bin/env python3
"""Runs a build with Ninja and keeps it within its compile-time budget.

    tools/build_times.py BUILD_DIR COMMAND...

Prints the CPU seconds of the slowest translation units that COMMAND compiled. .ninja_log knows wall clock
times; they are scaled to the CPU time that the whole build took, so that a busy machine does not fail a good
change. Warns above the budget of ARCHITECTURE.md and exits 1 above the limit.
"""

import resource
import subprocess
import sys
import time
from pathlib import Path

UNIT_BUDGET, UNIT_LIMIT = 15, 60  # CPU seconds of one translation unit
TOTAL_BUDGET, TOTAL_LIMIT = 180, 480  # of the build


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
        print(f"{verdict}: {what} took {seconds:.1f} s of CPU; budget {budget} s, limit {limit} s")
    return seconds <= limit


def main():
    build, command = Path(sys.argv[1]), sys.argv[2:]
    since = time.time()
    if status := subprocess.run(command).returncode:
        return status
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = usage.ru_utime + usage.ru_stime

    steps = wall_seconds(build, since)
    scale = total / max(total, sum(steps.values()))
    units = {output: scale * wall for output, wall in steps.items() if output.endswith(".o")}
    slowest = sorted(units.items(), key=lambda unit: -unit[1])
    print(f"{len(units)} translation units, {total:.1f} s of CPU in all; the slowest:")
    for output, seconds in slowest[:10]:
        print(f"{seconds:7.1f} s  {output.split('.dir/')[-1].removesuffix('.o')}")
    ok = within("the build", total, TOTAL_BUDGET, TOTAL_LIMIT)
    for output, seconds in slowest:
        ok &= within(output, seconds, UNIT_BUDGET, UNIT_LIMIT)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
