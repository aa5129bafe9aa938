"""Several processes of the tool, started by a launcher of MPI: HALFBYTE_MPIRUN is its command, HALFBYTE_MPI the plug-in
that was built for it."""

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import time

import pytest

from conftest import TINY_LLAMA

BUG, USAGE, BAD_INPUT, EXISTS, CANCELLED = 1, 2, 3, 8, 130
LAUNCHER = shlex.split(os.environ.get("HALFBYTE_MPIRUN", "mpirun"))
QUANTIZE = ["quantize", TINY_LLAMA, "--shard-size", "100KB", "--format", "nvfp4", "--threads", "1", "-o"]


def start(cli, count, *arguments, **environment):
    return subprocess.Popen(
        [*LAUNCHER, "-n", str(count), cli, *map(str, arguments)], text=True, env=os.environ | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


@pytest.fixture
def run(cli):
    def run(count, *arguments, code=0, **environment):
        process = start(cli, count, *arguments, **environment)
        out, errors = process.communicate(timeout=120)
        assert process.returncode == code, f"{count} processes: exit {process.returncode}\n{errors}"
        return out, [line for line in errors.splitlines() if line.startswith("halfbyte: ")]

    return run


def content_of(out):
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def report_of(text):
    """Without what differs from run to run."""
    report = json.loads(text)
    differing = ("output", "input", "bottleneck")
    return {key: value for key, value in report.items() if not key.endswith("_seconds") and key not in differing}


@pytest.fixture(scope="module")
def want(cli, tmp_path_factory):
    out = tmp_path_factory.mktemp("want") / "out"
    subprocess.run([cli, *QUANTIZE, out], check=True, stdout=subprocess.DEVNULL)
    return out


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_bytes_of_one_process(run, want, tmp_path, count):
    out, alone = tmp_path / "out", tmp_path / "alone"
    text, _ = run(count, *QUANTIZE, out, "--json", "-")
    assert content_of(out) == content_of(want)
    expected, _ = run(1, *QUANTIZE, alone, "--json", "-")
    assert report_of(text) == report_of(expected)
    shutil.rmtree(alone)
    run(1, "dequantize", out, "-o", tmp_path / "dense-1", "--threads", "1")
    run(count, "dequantize", out, "-o", tmp_path / "dense", "--threads", "1")
    assert content_of(tmp_path / "dense") == content_of(tmp_path / "dense-1")
    assert sorted(os.listdir(tmp_path)) == ["dense", "dense-1", "out"]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("arguments", [("--layout", "modelopt"), ("--layout", "mlx", "--requantize")], ids=["codes", "anew"])
def test_converting(run, want, tmp_path, count, arguments):
    out, alone = tmp_path / "out", tmp_path / "alone"
    text, _ = run(count, "convert", want, "-o", out, *arguments, "--threads", "1", "--json", "-")
    expected, _ = run(1, "convert", want, "-o", alone, *arguments, "--threads", "1", "--json", "-")
    assert content_of(out) == content_of(alone) and len(content_of(out)) > 8
    assert report_of(text) == report_of(expected)
    assert sorted(os.listdir(tmp_path)) == ["alone", "out"]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_dry_run_estimates_the_slowest(run, tmp_path, count):
    text, _ = run(count, *QUANTIZE, tmp_path / "out", "--dry-run", "--json", "-")
    plan = json.loads(text)
    assert 0 < plan["run_seconds"] < plan["total_seconds"] < 60 and plan["time_note"] == ""
    assert os.listdir(tmp_path) == []


def test_errors_are_of_all_and_said_once(run, want, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(want, out)
    _, errors = run(3, *QUANTIZE, out, code=EXISTS)
    assert errors == [f'halfbyte: error: output "{out}" exists, and replacing it was not asked for']
    report = tmp_path / "report.json"
    report.write_text("{}")
    _, errors = run(3, *QUANTIZE, tmp_path / "new", "--json", report, code=EXISTS)
    assert len(errors) == 1 and "--json" in errors[0]
    _, errors = run(2, *QUANTIZE, tmp_path / "new", "--group-size", "5", code=USAGE)
    assert len(errors) == 1
    _, errors = run(2, "convert", want, "-o", tmp_path / "new", "--layout", "mlx", code=BAD_INPUT)
    assert len(errors) == 1 and "weights cannot be converted with the codes that they have" in errors[0]
    _, errors = run(2, "repair", want, "-o", tmp_path / "new", code=USAGE)
    assert errors[0].startswith("halfbyte: error: repair runs in one process, and 2 were started")
    _, errors = run(2, *QUANTIZE, tmp_path / "new", code=USAGE, HALFBYTE_MPI="/nowhere/libhalfbyte_mpi.so")
    assert "2 processes were started, which MPI connects, and libhalfbyte_mpi.so cannot be opened" in errors[0]
    assert sorted(os.listdir(tmp_path)) == ["out", "report.json"]


def test_what_is_alone(cli, run, want, tmp_path):
    """What only reads; and a process that a program of MPI has started."""
    out, _ = run(2, "inspect", want)
    assert out.count("nvfp4") > 1
    command = [cli, *QUANTIZE, tmp_path / "out"]
    launched = os.environ | {"OMPI_COMM_WORLD_SIZE": "8", "HALFBYTE_MPI": ""}
    assert subprocess.run(command, env=launched, stdout=subprocess.DEVNULL).returncode == 0
    assert content_of(tmp_path / "out") == content_of(want)


def ranks_of(cli, out):
    """The processes of a run that are at work."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
        except OSError:
            continue
        if words[:2] == [str(cli).encode(), b"quantize"] and str(out).encode() in words:
            found.append(int(pid))
    return found


def complete_files(work):
    """Of a run that is at work; 0 where it moves its files at this moment."""
    try:
        return sum(max(0, path.read_bytes().count(b"\n") - 1) for path in work.glob(".out.halfbyte-*/journal*"))
    except OSError:
        return 0


def interrupt(cli, work, count, how, rank, files):
    """Starts a run, and ends one of its processes when so many files are complete. Whether it was at work."""
    process = start(cli, count, *QUANTIZE, work / "out", "--search", "--resume")
    while process.poll() is None and complete_files(work) < files:
        time.sleep(0.001)
    pids = ranks_of(cli, work / "out")
    at_work = process.poll() is None and len(pids) == count
    if at_work:
        try:
            os.kill(pids[rank % count], how)
        except ProcessLookupError:
            at_work = False
    _, errors = process.communicate(timeout=120)
    end = time.monotonic() + 20
    while ranks_of(cli, work / "out") and time.monotonic() < end:
        time.sleep(0.01)
    return at_work, process.returncode, errors


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_lost_process(cli, run, tmp_path, how):
    """Whichever it is, and however many processes go on: the bytes are the same, and nothing is left."""
    rng = random.Random(f"{how}")
    work, searched = tmp_path / "work", tmp_path / "want"
    work.mkdir()
    run(1, *QUANTIZE, searched, "--search")
    ended, most = 0, 0
    for attempt in range(40):
        count = rng.randint(2, 4)
        files = complete_files(work) + rng.randint(1, 4)
        at_work, code, errors = interrupt(cli, work, count, how, rng.randrange(4), files)
        ended += at_work
        if (work / "out").exists():
            assert content_of(work / "out") == content_of(searched)
            assert os.listdir(work) == ["out"]
            shutil.rmtree(work / "out")
        else:
            assert code != 0 and code != BUG, errors
            most = max(most, complete_files(work))
        if ended >= 7:
            break
    assert ended >= 5 and most >= 2, f"only {ended} of {attempt + 1} runs were interrupted"
    text, _ = run(rng.randint(1, 4), *QUANTIZE, work / "out", "--search", "--resume", "--json", "-")
    assert json.loads(text)["ok"]
    assert content_of(work / "out") == content_of(searched) and os.listdir(work) == ["out"]
