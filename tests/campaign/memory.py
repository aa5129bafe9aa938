"""Want of memory: every allocation fails, once and for ever; limits of memory, descriptors, threads, stack, file size.

Each run ends well with the right bytes, or says NO_MEMORY (IO for descriptors and file sizes), and leaves nothing. Not
counted: what happens before main(), in the loader and in static initialisers, NVRTC's and the driver's included. Not
ours either, and left out: glibc ends the process where it has no memory for the thread-local data of a library at its
first use in a thread (the C++ runtime has some), or for the error of the first dlopen() of a thread that fails (oneTBB
looks for an allocator so), and oneTBB where a worker thread has none to begin with; each is ruled out before a run by
what the host does first, or recognised by its message.
"""

import hashlib
import os
import re
import resource
import shutil
import subprocess
from pathlib import Path

import numpy as np

from campaign.base import CODES
from independent import safetensors_io as st

OK, IO, NO_MEMORY, DEVICE = CODES["OK"], CODES["IO"], CODES["NO_MEMORY"], CODES["DEVICE"]
# Of glibc, about thread-local data: see above.
NOT_OURS = (b"cannot allocate memory for thread-local data", b"failed to register TLS destructor")
BLOCK = 200  # allocations of a case of the full campaign
SLOW = {"bench": 50}  # commands that take seconds, and how many of their allocations are drawn instead of all
NOBODY = 65534
STATIC = 1 << 19  # bytes of address space beyond the libraries that static initialisers take: libhwy's throws

# Of the tool. {out}: what a run writes.
COMMANDS = {
    "quantize-nf4": "quantize {model} -o {out} --format nf4 --double-quant",
    "quantize-int4": "quantize {model} -o {out} --format int4 --threads 3",
    "quantize-affine": "quantize {model} -o {out} --format affine4 --layout mlx --threads 1 --json {out}.json",
    "quantize-replace": "quantize {model} -o {old} --format nf4 --force",
    "dequantize": "dequantize {quantized} -o {out}",
    "convert": "convert {quantized} -o {out} --layout compressed-tensors",
    "inspect": "inspect {quantized} --json -",
    "compare": "compare {model} {quantized}",
    "ptx": "ptx dequantize --format int4 --arch sm_80 -o {out}",
    "doctor": "doctor",
    "bench": "bench qgemm --device cpu --quick --threads 2 --format nf4 --shape 256x256 --m 1 --direction forward",
    "help": "--help",
    "wrong": "quantize {model} -o {out} --format nf5",
}


def make_model(directory):
    """A model of three layers whose runs take milliseconds."""
    directory.mkdir()
    random = np.random.default_rng(1)
    tensors = {
        f"model.layers.{layer}.mlp.{name}_proj.weight": st.from_f32(random.standard_normal((48, 128), "f4"), "BF16")
        for layer in range(2)
        for name in ("gate", "up", "down")
    }
    tensors["model.norm.weight"] = st.from_f32(np.ones(128, "f4"), "BF16")
    st.write(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    return directory


def digest(path):
    """Of a file or a tree: names and bytes."""
    if not path.exists():
        return None
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    total = hashlib.sha256()
    for file in files:
        total.update(str(file.relative_to(path)).encode() + b"\0")
        if file.is_file():
            total.update(file.read_bytes())
    return total.hexdigest()


class Bench:
    """Where the runs of the tool happen, and how each must end."""

    def __init__(self, section, directory):
        self.section, self.directory = section, directory
        self.model = make_model(directory / "model")
        self.work = directory / "work"
        self.quantized = directory / "quantized"
        self.cli = section.campaign.cli
        done = section.cli("quantize", self.model, "-o", self.quantized, "--format", "int4", "--group-size", "32")
        section.check(done.returncode == OK, f"the model cannot be quantized: {done.stderr.decode()}")
        self.expected = {}

    def arguments(self, name):
        places = {"model": self.model, "quantized": self.quantized, "out": self.work / "out", "old": self.work / "old"}
        return COMMANDS[name].format(**places).split()

    def run(self, name, environment=(), **options):
        """One run in an empty directory (with an older output, for --force)."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        self.work.chmod(0o777)
        if "{old}" in COMMANDS[name]:
            shutil.copytree(self.quantized, self.work / "old")
            for path in [self.work / "old", *(self.work / "old").iterdir()]:
                path.chmod(0o777)
        # Not NVRTC itself: its static initialisers end the process where memory fails.
        nvrtc = self.section.build / "tests" / "libstub_nvrtc.so"
        environment = os.environ | {"HALFBYTE_NVRTC": str(nvrtc), "HALFBYTE_CACHE_DIR": ""} | dict(environment)
        return self.section.program(self.cli, *self.arguments(name), env=environment, **options)

    def reference(self, name):
        """What a run gives that nothing befalls: exit code, digests of what it writes."""
        if name not in self.expected:
            done = self.run(name)
            self.expected[name] = (done.returncode, digest(self.work / "out"), digest(self.work / "old"))
        return self.expected[name]

    def check(self, name, done, allowed, what):
        """The outcome of a run: as without the fault, or an allowed code that leaves things as they were."""
        code, out, old = self.reference(name)
        if done.returncode is None or done.returncode < 0:
            return  # a finding already
        message = done.stderr.decode(errors="replace")
        left = sorted(path.name for path in self.work.iterdir())
        ours = {"out", "out.json", "old"}
        check = self.section.check
        check(set(left) <= ours, f"{what}: leaves {set(left) - ours}")
        if done.returncode == code:
            if name != "quantize-replace" or code != OK:
                check(digest(self.work / "out") == out, f"{what}: another output")
            check(digest(self.work / "old") == old, f"{what}: another output")
            return
        check(done.returncode in allowed, f"{what}: exit {done.returncode}: {message[-500:]}")
        check("halfbyte: error: " in message, f"{what}: exit {done.returncode} without a message: {message[-500:]}")
        # An output may be complete where only the report of it failed.
        check(digest(self.work / "out") in (None, out), f"{what}: a part of an output")
        if old is not None:
            check(digest(self.work / "old") in (old, digest(self.quantized)), f"{what}: the old output is damaged")


class Failing:
    """Allocations that fail, by memory_shim."""

    def __init__(self, section, bench):
        self.section, self.bench = section, bench
        tests = section.build / "tests"
        self.shim, self.host = tests / "libcampaign_memory_shim.so", tests / "campaign_host"
        self.operations = tests / "libcampaign_host_ops.so"
        self.count = bench.directory / "count"

    def environment(self, number, forever):
        values = {"LD_PRELOAD": self.shim, "CAMPAIGN_MEMORY_FAIL": number, "CAMPAIGN_MEMORY_COUNT": self.count}
        if forever:
            values["CAMPAIGN_MEMORY_FOREVER"] = 1
        return {name: str(value) for name, value in values.items()}

    def total(self, name):
        self.bench.run(name, self.environment(0, False))
        return int(self.count.read_text().split()[0])

    def tool(self, name, numbers, forever):
        for number in numbers:
            done = self.bench.run(name, self.environment(number, forever), timeout=120)
            what = f"allocation {number} of {name} fails {'for ever' if forever else 'once'}"
            self.bench.check(name, done, {NO_MEMORY}, what)
            self.section.count("failed allocations")

    def library(self, operation, threads, first, last, step, forever, cold):
        """Runs of the host; its standard error ends with the number of the allocation that ended it."""
        shutil.rmtree(self.bench.work, ignore_errors=True)
        self.bench.work.mkdir()
        model = self.bench.model / "model.safetensors"
        words = [self.operations, "memory", operation, threads, model, self.bench.work / "out", first, last, step]
        environment = os.environ | {"LD_PRELOAD": str(self.shim), "HALFBYTE_NVRTC": "/nonexistent"}
        done = self.section.program(self.host, *words, int(forever), int(cold), env=environment, timeout=3600)
        text = done.stderr.decode(errors="replace")
        not_ours = any(message in done.stderr for message in NOT_OURS)
        self.section.check(done.returncode in (0, None) or done.returncode < 0 or not_ours, f"{text[-500:]}")
        left = {path.name for path in self.bench.work.iterdir()} if self.bench.work.exists() else set()
        outputs = {f"out-{kind}" for kind in ("int4", "dense", "converted", "written")}
        self.section.check(left <= outputs, f"leaves {left - outputs}")
        failures = re.search(rb"(\d+) failures", done.stdout)
        self.section.count("failed allocations", int(failures[1]) if failures else 1)
        return done


def host_operations(failing):
    """Of host_ops.cc, in its order."""
    text = (Path(__file__).parent / "host_ops.cc").read_text()
    table = text[text.index("kOperations[]") :]
    return [line.split('"')[1] for line in table.splitlines() if line.strip().startswith('{"')]


def limits(section, bench):
    """Rows: name of a case, resource, value, command, codes that are allowed."""
    mib = 1 << 20
    rows = []
    address_space = [16, 24, 48, 96, 192, 384] if section.quick else range(8, 512, 4)
    descriptors = [4, 6, 9] if section.quick else range(3, 24)
    for name in ("quantize-int4", "dequantize") if section.quick else COMMANDS:
        rows += [("AS", resource.RLIMIT_AS, size * mib, name, {NO_MEMORY}) for size in address_space]
        rows += [("NOFILE", resource.RLIMIT_NOFILE, number, name, {IO, NO_MEMORY}) for number in descriptors]
        rows += [("FSIZE", resource.RLIMIT_FSIZE, size, name, {IO}) for size in (0, 1, 4096, 20000)]
        rows += [("STACK", resource.RLIMIT_STACK, size << 10, name, {NO_MEMORY}) for size in (256, 1024)]
    rows += [("NPROC", resource.RLIMIT_NPROC, number, "quantize-int4", {NO_MEMORY}) for number in (1, 2, 3)]
    return {f"limit {kind} {value} {name}": (number, value, name, allowed) for kind, number, value, name, allowed in rows}


def not_loaded(done):
    """The loader's own failures, before main(): 127, or 1 where even that has no memory."""
    return done.returncode == 127 and b"error while loading shared libraries" in done.stderr


def run_limit(section, bench, number, value, name, allowed):
    options = {"preexec_fn": lambda: resource.setrlimit(number, (value, value))}
    if number == resource.RLIMIT_NPROC and os.geteuid() == 0:
        options |= {"user": NOBODY, "group": NOBODY, "extra_groups": []}  # it does not bind root
    if number == resource.RLIMIT_FSIZE:
        options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    bench.reference(name)
    section.count("limits")
    if number == resource.RLIMIT_AS:
        less = {"preexec_fn": lambda: resource.setrlimit(number, (value - STATIC, value - STATIC))}
        if not_loaded(section.program(bench.cli, "--version", expect_signal=True, **less)):
            return
    done = bench.run(name, **options)
    if not not_loaded(done):
        bench.check(name, done, allowed, "under the limit")


def run(section):
    with section.directory() as name:
        directory = Path(name)
        directory.chmod(0o755)
        if section.campaign.scratch is None and os.geteuid() == 0:  # for the user whom limits of processes bind
            tool = directory / "tool"
            tool.mkdir(mode=0o755)
            for file in (section.campaign.cli, *section.campaign.cli.parent.glob("libhalfbyte.so*")):
                shutil.copy(file, tool)
        bench = Bench(section, directory)
        if (directory / "tool").exists():
            bench.cli = directory / "tool" / section.campaign.cli.name
            os.environ["LD_LIBRARY_PATH"] = str(directory / "tool")
        failing = Failing(section, bench)
        cases = {}
        operations = host_operations(failing)
        for operation in operations:
            for threads in (1, 3):
                for forever in (False, True):
                    how = f"{operation} threads {threads} {'forever' if forever else 'once'}"
                    cases[f"library {how}"] = (operation, threads, forever)
                    for number in [1, *section.random.sample(range(2, 100), 2)] if section.quick else range(1, 200):
                        cases[f"first {how} {number}"] = (operation, threads, forever, number)
        under = limits(section, bench)
        cases |= under
        for command in COMMANDS:
            total = failing.total(command)
            for forever in (False, True):
                how = "forever" if forever else "once"
                if section.quick:
                    cases[f"tool {command} {how}"] = section.random.sample(range(1, total + 1), 1 if command in SLOW else 6)
                elif command in SLOW:
                    cases[f"tool {command} {how}"] = section.random.sample(range(1, total + 1), SLOW[command])
                else:
                    for first in range(1, total + 1, BLOCK):
                        numbers = range(first, min(first + BLOCK, total + 1))
                        cases[f"tool {command} {how} {first}"] = numbers
        names = sorted(cases) if section.quick else section.random.sample(sorted(cases), len(cases))
        for case in section.cases(names):
            value = cases[case]
            if case in under:
                run_limit(section, bench, *value)
            elif case.startswith("tool"):
                command, how = case.split()[1:3]
                failing.tool(command, value, how == "forever")
            elif case.startswith("first"):
                operation, threads, forever, number = value
                failing.library(operation, threads, number, number, 1, forever, cold=True)
            else:
                operation, threads, forever = value
                step = 1
                if section.quick:
                    step = 101 if operation == "write_checkpoints" else 17
                first = section.random.randrange(step) + 1
                failing.library(operation, threads, first, 1 << 40, step, forever, cold=False)
