"""What the sections share: cases that are counted and not repeated, findings, programs under limits, a report."""

import json
import multiprocessing
import os
import random
import subprocess
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TINY_LLAMA = ROOT / "examples" / "tiny-llama"
# In the order in which they run. Each is a module here, with a function run(section).
SECTIONS = [
    "fuzz",
    "devices",
    "faults",
    "kills",
    "power",
    "cache",
    "directories",
    "memory",
    "hosts",
    "endurance",
]

# What the tool may exit with, by the names of halfbyte/error.hpp.
CODES = {
    "OK": 0, "BUG": 1, "USAGE": 2, "BAD_INPUT": 3, "VERIFY": 4, "DEVICE": 5, "IO": 6, "NO_MEMORY": 7, "EXISTS": 8,
    "CORRUPT": 9, "CANCELLED": 130,
}  # fmt: skip

SAVE_SECONDS = 5  # at most, of cases that a killed run does again


class Section:
    """One section of a campaign, as its function run() sees it."""

    def __init__(self, campaign, name, state):
        self.campaign, self.name, self.state = campaign, name, state
        self.quick, self.seed = campaign.quick, campaign.seed
        self.random = random.Random(f"{campaign.seed} {name}")
        self.build = campaign.build
        self.started = time.monotonic()
        self.limit = campaign.seconds
        self.is_complete = True
        self.current = None
        self.done = set(state["done"])
        self.seconds_before = state["seconds"]
        self.saved = self.started

    @property
    def expired(self):
        return self.limit is not None and time.monotonic() - self.started > self.limit

    def cases(self, names):
        """Those of the cases that no earlier run has done, one after the other, until the time is over. A case counts as
        done when the next one is asked for; its name says how to run it again."""
        only = self.campaign.case
        for name in names:
            name = str(name)
            if name in self.done if only is None else name != only:
                continue
            if self.expired:
                self.is_complete = False
                return
            self.current = name
            yield name
            self.done.add(name)
            self.state["runs"] += 1
            self.current = None
            if time.monotonic() - self.saved > SAVE_SECONDS:
                self.save()

    def save(self):
        """What was done so far, for the run after one that is killed."""
        self.saved = time.monotonic()
        found = {finding.split(":")[0] for finding in self.state["findings"]}
        self.state["done"] = sorted(self.done - found)
        self.state["seconds"] = self.seconds_before + self.saved - self.started
        path = self.campaign.state_path(self.name)
        path.with_suffix(".new").write_text(json.dumps(self.state, indent=1))
        path.with_suffix(".new").replace(path)

    def sample(self, names, number):
        """Names of cases for a quick run: `number` of them, drawn by the seed, in their order. Otherwise all."""
        names = list(names)
        if not self.quick or self.campaign.case is not None or len(names) <= number:
            return names
        return [names[i] for i in sorted(self.random.sample(range(len(names)), number))]

    def count(self, what, number=1):
        """Adds to a figure of the report: "executions", "kills", "faults"."""
        self.state["counts"][what] = self.state["counts"].get(what, 0) + number

    def finding(self, text):
        """Something that must not be."""
        again = f'\n    again: scripts/campaign.sh --seed {self.seed} {self.name} --case "{self.current}"'
        finding = f"{self.current}: {text}{again}" if self.current else text
        self.state["findings"].append(finding)
        print(f"  FINDING {self.name}: {finding}", flush=True)

    def check(self, condition, text):
        if not condition:
            self.finding(text)
        return bool(condition)

    def directory(self):
        """A new empty directory, removed with all it holds at the end of a with statement."""
        return tempfile.TemporaryDirectory(prefix=f"campaign-{self.name}-", dir=self.campaign.scratch)

    def cli(self, *arguments, timeout=60, **options):
        """Runs the tool. A hang or an end by a signal is a finding, unless `options` has expect_signal=True. A
        subprocess.CompletedProcess; returncode None after a hang."""
        return self.program(self.campaign.cli, *arguments, timeout=timeout, **options)

    def program(self, *command, timeout=60, expect_signal=False, **options):
        command = [str(word) for word in command]
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        options.setdefault("stdin", subprocess.DEVNULL)
        try:
            done = subprocess.run(command, timeout=timeout, **options)
        except subprocess.TimeoutExpired as error:
            self.finding(f"hangs for {timeout} s: {' '.join(command)}")
            return subprocess.CompletedProcess(command, None, error.stdout or b"", error.stderr or b"")
        if done.returncode < 0 and not expect_signal:
            self.finding(f"ended by signal {-done.returncode}: {' '.join(command)}\n{text_of(done.stderr)[-2000:]}")
        return done


def text_of(output):
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


class Campaign:
    def __init__(self, quick, seed, seconds, restart, case=None):
        self.quick, self.seed, self.seconds, self.case = quick, seed, seconds, case
        self.build = Path(os.environ.get("HALFBYTE_BUILD", ROOT / "build" / "release"))
        self.cli = Path(os.environ.get("HALFBYTE_CLI", self.build / "halfbyte"))
        self.folder = Path(os.environ.get("HALFBYTE_CAMPAIGN", ROOT / "build" / "campaign"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.scratch = os.environ.get("HALFBYTE_SCRATCH")  # None: the system's
        self.states, self.ran = {}, []  # by section
        if not restart and not quick:
            files = {name: self.state_path(name) for name in SECTIONS}
            self.states = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}

    def state_path(self, name):
        return self.folder / f"{'quick' if self.quick else 'full'}-{self.seed}-{name}.json"

    def run(self, functions):
        """Runs sections, {name: function}: one for each two CPUs of a machine, since most wait for their tools half the time."""
        self.ran = list(functions)
        with ProcessPoolExecutor(max(2, os.cpu_count() // 2), multiprocessing.get_context("fork")) as pool:
            running = {name: pool.submit(self.run_section, name, function) for name, function in functions.items()}
            self.states |= {name: future.result() for name, future in running.items()}

    def run_section(self, name, function):
        """What became of it."""
        state = self.states.get(name) or {"done": [], "runs": 0, "counts": {}, "seconds": 0.0}
        state["complete"] = False
        state["findings"] = []  # a case with a finding runs again
        section = Section(self, name, state)
        print(f"== {name}", flush=True)
        try:
            function(section)
        except Exception:  # a section that breaks is a finding, and the others still run
            section.finding(traceback.format_exc())
        state["complete"] = section.is_complete
        section.save()
        print(line_of(name, state), flush=True)
        return state

    def finish(self):
        """Writes report.json and report.txt; the exit code."""
        rows = {name: {k: v for k, v in self.states[name].items() if k != "done"} for name in self.states}
        commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        report = {"schema_version": 1, "commit": commit, "seed": self.seed, "quick": self.quick, "sections": rows}
        (self.folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        lines = [f"campaign: commit {commit[:10]}, seed {self.seed}, {'quick' if self.quick else 'full'}"]
        lines += [line_of(name, state) for name, state in self.states.items()]
        lines += [f"{name}: {finding}" for name in self.states for finding in self.states[name]["findings"]]
        text = "\n".join(lines) + "\n"
        (self.folder / "report.txt").write_text(text)
        print("\n" + text, end="")
        return 1 if any(self.states[name]["findings"] for name in self.ran) else 0


def line_of(name, state):
    counts = ", ".join(f"{number:,} {what}" for what, number in state["counts"].items())
    what = f"{state['runs']:,} cases" + (f", {counts}" if counts else "")
    end = "" if state["complete"] else ", not complete"
    return f"{name:12} {what}, {len(state['findings'])} findings, {state['seconds']:.0f} s{end}"
