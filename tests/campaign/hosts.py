"""Hosts of the library: dlopen and dlclose, fork and exit during work, 64 threads, wrong calls of every function.

In full also in builds with ThreadSanitizer and AddressSanitizer, below build/campaign.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from campaign.base import ROOT, TINY_LLAMA
from campaign.memory import make_model

# Those that start threads, and one that has files.
OPERATIONS = ("quantize", "products", "training_plans", "read_checkpoint")
CALLS = 2000  # of one process


class Host:
    def __init__(self, section, build, directory, environment):
        self.section, self.build, self.directory = section, build, directory
        self.model = directory / "model"
        if not self.model.exists():
            make_model(self.model)
            shutil.copy(TINY_LLAMA / "model.safetensors", directory / "model.safetensors")
        self.environment = os.environ | environment

    def run(self, mode, operation, threads, number, timeout=120):
        tests = self.build / "tests"
        words = [tests / "libcampaign_host_ops.so", mode, operation, threads, self.model, self.directory / "out", number]
        done = self.section.program(tests / "campaign_host", *words, timeout=timeout, env=self.environment)
        if done.returncode is not None and done.returncode > 0:
            self.section.finding(f"exit {done.returncode}: {done.stderr.decode(errors='replace')[-2000:]}")

    def calls(self, seed, first, last):
        """Calls in a process each; where one ends it, the others still follow."""
        library = self.build / "libhalfbyte.so"
        words = ["-m", "campaign.calls", library, seed]
        environment = self.environment | {"PYTHONPATH": str(ROOT / "tests")}
        while first < last:
            done = self.section.program(
                sys.executable, *words, first, last, cwd=self.directory, env=environment, timeout=600, expect_signal=True
            )
            text = done.stderr.decode(errors="replace")
            numbers = re.findall(r"^(\d+) (halfbyte_\w+)$", text, re.MULTILINE)
            if done.returncode == 0:
                self.section.count("calls", last - first)
                return
            number, name = numbers[-1] if numbers else (first, "no call")
            command = f"python -m campaign.calls libhalfbyte.so {seed} {number} {int(number) + 1}"
            self.section.finding(f"{name}: exit {done.returncode}: {command}: {text[-800:]}")
            self.section.count("calls", int(number) + 1 - first)
            first = int(number) + 1


def sanitized(section, sanitizer):
    """The build of a sanitizer, made or brought up to date. None where that fails, which is a finding."""
    build = ROOT / "build" / "campaign" / sanitizer
    compiler = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    configure = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DHALFBYTE_SANITIZE={sanitizer}", f"-DHALFBYTE_PYTHON={sys.executable}", *compiler]
    make = ["cmake", "--build", build, "--target", "campaign_host", "campaign_host_ops"]
    for command in (configure, make):
        done = section.program(*command, timeout=7200)
        if not section.check(done.returncode == 0, f"{sanitizer}: {' '.join(map(str, command))} fails"):
            return None
    return build


def run(section):
    with section.directory() as name:
        directory = Path(name)
        host = Host(section, section.build, directory, {"HALFBYTE_NVRTC": "/nonexistent"})
        quick = section.quick
        cases = {}
        for operation in OPERATIONS:
            cases[f"unload {operation}"] = ("unload", operation, 4, 10 if quick else 300)
            cases[f"fork {operation}"] = ("fork", operation, 4, 10 if quick else 300)
            cases[f"fork during {operation}"] = ("fork_threads", operation, 4, 10 if quick else 300)
            cases[f"threads {operation}"] = ("threads", operation, 2, 300_000 if quick else 20_000_000)
            cases[f"exit after {operation}"] = ("exit", operation, 4, 0)
            for i in range(5 if quick else 200):
                cases[f"exit during {operation} {i}"] = ("exit_threads", operation, 4, section.random.randrange(60_000))
        batches = 8 if quick else 1000
        calls = {f"calls {section.seed} {i * CALLS}": i * CALLS for i in range(batches)}
        sanitizers = [] if quick else [f"{kind} {operation}" for kind in ("thread", "address") for operation in OPERATIONS]
        for case in section.cases([*cases, *calls, *sanitizers]):
            if case in cases:
                host.run(*cases[case])
                section.count("hosts")
            elif case in calls:
                host.calls(section.seed, calls[case], calls[case] + CALLS)
            else:
                kind, operation = case.split()
                build = sanitized(section, kind)
                if build is None:
                    continue
                suppressions = directory / "suppressions"
                suppressions.write_text("called_from_lib:libtbb.so\n")
                # A child of a process with threads is none that ThreadSanitizer knows.
                environment = {"TSAN_OPTIONS": f"suppressions={suppressions}", "HALFBYTE_NVRTC": "/nonexistent"}
                Host(section, build, directory, environment).run("threads", operation, 2, 30_000_000, timeout=600)
                section.count("hosts")
