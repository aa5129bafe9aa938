"""Endurance: mixed operations by 8 threads of one process, and runs of the tool; memory, descriptors, results watched.

An hour; --time shortens it.
"""

import re
import signal
import subprocess
import time
from pathlib import Path

from campaign.hosts import Host
from campaign.memory import Bench, digest

THREADS = 8
COMMANDS = ("quantize-nf4", "quantize-int4", "quantize-affine", "dequantize", "convert", "inspect", "compare")
FIGURES = re.compile(rb"(\d+) runs, (\d+) KiB, (\d+) descriptors, (\d+) threads")


def check_figures(section, rows):
    """Nothing grows after the first third, but for noise: on average, since how much eight threads hold at one moment
    changes by a tenth."""
    warm = rows[len(rows) // 3 :]
    if len(warm) < 4:
        return
    half = len(warm) // 2
    for index, name, allowed in ((1, "KiB of memory", 8192), (2, "descriptors", 40), (3, "threads", 4)):
        first, second = (sum(row[index] for row in part) // len(part) for part in (warm[:half], warm[half:]))
        grown = second - first
        section.check(grown <= max(allowed, first // 10), f"{grown} more {name}: {first}, later {second}")


def run(section):
    seconds = 12 if section.quick else int(section.limit or 3600)
    with section.directory() as name:
        directory = Path(name)
        bench = Bench(section, directory)
        host = Host(section, section.build, directory, {"HALFBYTE_NVRTC": "/nonexistent"})
        outputs = directory / "outputs"
        outputs.mkdir()
        tests = section.build / "tests"
        model = bench.model / "model.safetensors"
        for case in section.cases([f"{seconds} seconds"]):
            words = [tests / "libcampaign_host_ops.so", "endurance", "all", THREADS, model, outputs, seconds]
            command = [str(word) for word in [tests / "campaign_host", *words]]
            # Not through a pipe, which nobody reads meanwhile: its figures would fill it.
            figures = directory / "figures"
            with figures.open("wb") as stdout:
                process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env=host.environment)
            end = time.monotonic() + seconds
            expected = {}
            try:
                while time.monotonic() < end and process.poll() is None:
                    for command in COMMANDS:
                        done = bench.run(command)
                        result = (done.returncode, digest(bench.work / "out"), bench_output(command, done))
                        section.check(expected.setdefault(command, result) == result, f"{command}: another result")
                        section.count("runs of the tool")
                    time.sleep(0.5)
                error = process.communicate(timeout=300)[1]
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                error = process.communicate()[1]
                section.finding("the host does not end")
            rows = [tuple(map(int, row)) for row in FIGURES.findall(figures.read_bytes())]
            section.check(process.returncode == 0, f"exit {process.returncode}: {error.decode(errors='replace')[-1000:]}")
            section.count("operations", rows[-1][0] if rows else 0)
            check_figures(section, rows)
            left = {path.name for path in outputs.iterdir()}
            expected_names = {
                f"{i}-{kind}" for i in range(THREADS) for kind in ("int4", "dense", "converted", "written")
            }
            section.check(left <= expected_names, f"leaves {left - expected_names}")


def bench_output(command, done):
    """What a command prints that does not depend on the time that it took."""
    return done.stdout if command in ("inspect", "compare") else b""
