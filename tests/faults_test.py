"""Faults, kills, power loss and changing inputs: some of what the campaign (tests/campaign) does in full."""

import os
import random
import signal
from pathlib import Path

import pytest

from campaign import base, commands, faults, kills, power


class Section(base.Section):
    """A section whose findings fail a test."""

    def __init__(self, folder):
        os.environ["HALFBYTE_CAMPAIGN"] = str(folder / "report")
        os.environ["HALFBYTE_BUILD"] = str(Path(os.environ["HALFBYTE_STUBS"]).parent)
        state = {"done": [], "runs": 0, "counts": {}, "findings": [], "seconds": 0.0}
        super().__init__(base.Campaign(True, "0", None, False), "test", state)

    def finding(self, text):
        pytest.fail(f"{self.current}: {text}")


@pytest.fixture
def bench(tmp_path):
    (tmp_path / "bench").mkdir()
    return commands.Bench(Section(tmp_path), tmp_path / "bench")


def command_of(bench, name):
    return next(bench.commands([name]))


def sample(items, number):
    items = list(items)
    return [items[i] for i in sorted(random.Random(1).sample(range(len(items)), min(number, len(items))))]


def test_failing_calls(bench):
    command = command_of(bench, "quantize-file")
    bench.run(command, faults={})
    calls = bench.calls()
    removing = faults.removing_calls(calls)
    cases = list(faults.cases_of(command, calls))
    interrupted = [case for case in cases if case.endswith("error EINTR")]
    assert len(interrupted) > 30
    for case in sample(interrupted, 25) + sample(cases, 50):
        faults.fail_call(bench.section, bench, command, removing, case)
    assert bench.section.state["counts"]["faults"] > 60


def test_a_pack_that_cannot_be_read_is_not_damaged(bench):
    command = command_of(bench, "precompile-packed")
    bench.run(command, faults={})
    calls = bench.calls()
    removing = faults.removing_calls(calls)
    reads = [call.number for call in calls if call.kind == "read" and call.path.endswith("kernels.hbk")]
    assert len(reads) >= 5
    for number in reads:
        faults.fail_call(bench.section, bench, command, removing, f"{command.name} | {number} read error EIO")


@pytest.mark.parametrize("name", ["quantize-mlx", "convert", "compare", "inspect"])
def test_input_that_changes(bench, name):
    command = command_of(bench, name)
    bench.run(command, faults={})
    reads = [call.number for call in bench.calls() if call.kind == "read" and str(bench.input) in call.path]
    for number in sample(reads, 6):
        for change in ["shorter", "rewritten", "replaced"]:
            faults.change_input(bench.section, bench, command, number, change)
    assert bench.section.state["counts"]["changes of the input"] >= 6


def test_a_kill_between_the_two_names_of_a_link(bench):
    command = command_of(bench, "quantize-file without renameat2")
    bench.run(command, faults={})
    (number,) = [call.number for call in bench.calls() if call.kind == "link"]
    kills.kill_at_call(bench.section, bench, command, number, "after")
    assert bench.section.state["counts"]["kills"] == 1


@pytest.mark.parametrize("name", ["quantize-file --force", "quantize-shards", "ptx"])
def test_kills(bench, name):
    command = command_of(bench, name)
    bench.run(command, faults={})
    changes = [call.number for call in bench.calls() if call.kind in commands.CHANGES and call.path[0] == "/"]
    for number in sample(changes, 8):
        for when in ["before", "after"]:
            kills.kill_at_call(bench.section, bench, command, number, when)
    assert bench.section.state["counts"]["kills"] >= 8


@pytest.mark.parametrize(
    "name",
    ["quantize-file", "quantize-mlx", "quantize-shards", "convert --force", "inspect", "precompile-jobs"],
)
def test_power_loss(bench, name):
    power.check_command(bench.section, bench, command_of(bench, name), most=20)
    assert bench.section.state["counts"]["crashes"] > 10


# The model of a file system must find what is not safe: each of these records lacks a sync.
RECORDS = {
    "data": "create t; write t; rename t out; sync .",
    "name": "create t; write t; sync t; rename t out",
    "directory": "mkdir t; create t/a; write t/a; sync t/a; rename t out; sync .",
    "in place": "truncate out; write out; sync out",
    "safe": "create t; write t; sync t; rename t out; sync .",
    "safe directory": "mkdir t; create t/a; write t/a; sync t/a; sync t; rename t out; sync .",
}


@pytest.mark.parametrize("what", RECORDS)
def test_the_model_of_power_loss(bench, what):
    record = []
    for words in RECORDS[what].split("; "):
        kind, *names = words.split()
        paths = [f"/w/{name}".removesuffix("/.") for name in names]
        data = b"new" if kind == "write" else b""
        record.append(power.Change(kind, *paths, *[""] * (2 - len(paths)), 0, data))
    root = power.Directory()
    root.entries["out"] = power.File(b"old") if "in place" in what else power.Directory()
    steps = power.Steps("/w", root, record)
    contents = []
    for end in range(len(steps.steps) + 1):
        for lost in power.subsets(bench.section, steps.uncertain(end), 1000):
            content = steps.disk(end, lost, lambda i: 0).entries["out"].content()
            contents.append((end == len(steps.steps), content))
    old = b"old" if "in place" in what else {}
    new = {"a": b"new"} if "directory" in what else b"new"
    safe = all(content == new or (content == old and not complete) for complete, content in contents)
    assert safe == what.startswith("safe")


def test_a_killed_campaign_goes_on(monkeypatch, tmp_path):
    monkeypatch.setenv("HALFBYTE_CAMPAIGN", str(tmp_path))
    monkeypatch.setattr(base, "SAVE_SECONDS", -1)
    ran = []

    def section(section, killed_at):
        for case in section.cases(range(4)):
            if case == killed_at:
                raise KeyboardInterrupt
            ran.append(case)
            section.count("things", 10)

    with pytest.raises(KeyboardInterrupt):
        base.Campaign(False, "k", None, False).run_section("fuzz", lambda s: section(s, "2"))
    campaign = base.Campaign(False, "k", None, False)
    assert campaign.states["fuzz"]["done"] == ["0", "1"] and not campaign.states["fuzz"]["complete"]
    state = campaign.run_section("fuzz", lambda s: section(s, None))
    assert ran == ["0", "1", "2", "3"]
    assert state["counts"] == {"things": 40} and state["complete"]
