"""The library in other programs: loaded and unloaded, in children of fork, at the end of a process, without memory and
without threads, called wrongly. scripts/campaign.sh does the same at length (memory, hosts)."""

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "examples" / "tiny-llama" / "model.safetensors"
NO_MEMORY = 7


@pytest.fixture
def host(stubs, tmp_path):
    """Runs tests/campaign/host.cc; a pattern that its output must match."""
    program, operations = stubs / "campaign_host", stubs / "libcampaign_host_ops.so"
    if not program.exists():
        pytest.skip("the library is not a shared one")

    def run(mode, operation, threads, *numbers, shim=False):
        environment = os.environ | {"HALFBYTE_NVRTC": "/nonexistent"}
        if shim:
            environment["LD_PRELOAD"] = str(stubs / "libcampaign_memory_shim.so")
        words = [program, operations, mode, operation, threads, MODEL, tmp_path / "out", *numbers]
        done = subprocess.run(list(map(str, words)), capture_output=True, timeout=120, env=environment)
        assert done.returncode == 0, f"exit {done.returncode}: {done.stderr.decode()[-1000:]}"
        return done.stdout.decode()

    return run


def test_unloaded_after_use(host):
    host("unload", "quantize", 4, 8)


def test_fork_after_use(host):
    host("fork", "quantize", 4, 5)


def test_fork_while_others_compute(host):
    host("fork_threads", "quantize", 4, 20)


@pytest.mark.parametrize("microseconds", [0, 3000, 20000])
def test_exit_while_others_compute(host, microseconds):
    host("exit_threads", "products", 4, microseconds)


@pytest.mark.parametrize("forever", [0, 1])
@pytest.mark.parametrize(
    "operation, step",
    [("errors", 1), ("quantize_plans", 13), ("training_plans", 13), ("products", 13), ("read_checkpoint", 13)],
)
def test_an_allocation_fails(host, operation, step, forever):
    text = host("memory", operation, 3, 1, 1 << 40, step, forever, 0, shim=True)
    assert int(re.search(r"(\d+) failures", text)[1]) >= 2


@pytest.mark.parametrize("forever", [0, 1])
def test_an_allocation_of_the_first_error_fails(host, forever):
    """Before the thread has memory for a text."""
    for number in range(1, 1000):
        if "\n0 failures" in "\n" + host("memory", "errors", 1, number, number, 1, forever, 1, shim=True):
            break
    assert 20 < number < 999


def content(path):
    """Of a file, or of all in a directory."""
    return path.read_bytes() if path.is_file() else {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("model", [MODEL, MODEL.parent], ids=["file", "directory"])
def test_the_tool_when_an_allocation_fails(cli, stubs, tmp_path, model, forever):
    shim = stubs / "libcampaign_memory_shim.so"
    if not shim.exists():
        pytest.skip("the library is not a shared one")
    output, count = tmp_path / "out", tmp_path / "count"
    environment = os.environ | {"LD_PRELOAD": str(shim), "CAMPAIGN_MEMORY_COUNT": str(count)}
    environment["HALFBYTE_NVRTC"] = "/nonexistent"
    command = [cli, "quantize", model, "-o", output, "--format", "int4", "--layout", "halfbyte", "--threads", "1"]

    def run(number):
        failing = environment | {"CAMPAIGN_MEMORY_FAIL": str(number)}
        return subprocess.run(command, capture_output=True, timeout=60, env=failing)

    assert run(0).returncode == 0
    expected = content(output)
    output.unlink() if output.is_file() else shutil.rmtree(output)
    total = int(count.read_text().split()[0])
    if forever:
        environment["CAMPAIGN_MEMORY_FOREVER"] = "1"
    for number in range(1, total, total // 15):
        done = run(number)
        assert done.returncode in (0, NO_MEMORY), f"allocation {number}: exit {done.returncode}: {done.stderr.decode()}"
        if done.returncode != 0:
            assert done.stderr == b"halfbyte: error: out of memory\n"
        if output.exists():  # complete, also where only the report of it failed
            assert content(output) == expected
            output.unlink() if output.is_file() else shutil.rmtree(output)
        assert list(tmp_path.iterdir()) == [count], f"allocation {number} leaves something"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without other processes")
def test_threads_that_do_not_start(unprivileged):
    directory, options = unprivileged
    (directory / "in.safetensors").write_bytes(MODEL.read_bytes())
    directory.chmod(0o777)
    options["env"]["HALFBYTE_NVRTC"] = "/nonexistent"
    for most in (1, 2, 3):
        output = directory / f"out{most}"
        command = ["halfbyte", "quantize", directory / "in.safetensors", "-o", output, "--threads", "8"]
        limit = lambda most=most: resource.setrlimit(resource.RLIMIT_NPROC, (most, most))  # noqa: E731
        done = subprocess.run(command, capture_output=True, timeout=60, preexec_fn=limit, **options)
        assert done.returncode == 0, f"{most}: exit {done.returncode}: {done.stderr.decode()}"


def test_wrong_calls_of_every_function(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(MODEL.read_bytes())
    library = os.environ.get("HALFBYTE_LIBRARY", "")
    if not library.endswith(".so"):
        pytest.skip("the library is not a shared one")
    command = [sys.executable, "-m", "campaign.calls", library, "0", "0", "2000"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "HALFBYTE_NVRTC": "/nonexistent"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr.decode()[-1000:]


def test_wrong_calls_know_every_function():
    sys.path.insert(0, str(ROOT / "tests"))
    from campaign.calls import Header  # noqa: PLC0415

    header = Header()
    text = (ROOT / "include/halfbyte/halfbyte.h").read_text()
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    assert set(header.functions) == set(re.findall(r"\b(halfbyte_\w+)\(", code))
    assert set(header.structures) == set(re.findall(r"^\} (\w+);", text, re.MULTILINE))
