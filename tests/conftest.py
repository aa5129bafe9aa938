"""Fixtures of the tests that drive the command line tool."""

import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY_LLAMA = ROOT / "examples" / "tiny-llama"

# The words of the layouts: halfbyte.h has an enumerator of each, or src/capi/checkpoint.cc does not compile.
LAYOUTS = [
    name.lower().replace("_", "-")
    for name in re.findall(r"HALFBYTE_LAYOUT_(\w+) =", (ROOT / "include/halfbyte/halfbyte.h").read_text())
]


@pytest.fixture(scope="session")
def cli():
    """The path of the tool: $HALFBYTE_CLI, or that of the release preset."""
    path = Path(os.environ.get("HALFBYTE_CLI", ROOT / "build" / "release" / "halfbyte")).resolve()
    if not path.is_file():
        pytest.fail(f"{path} does not exist: build it, or set HALFBYTE_CLI")
    return path


@pytest.fixture(scope="session")
def stubs(cli):
    """The directory of the stand-ins for the CUDA driver and NVRTC (tests/stub): $HALFBYTE_STUBS, or beside the tool."""
    return Path(os.environ.get("HALFBYTE_STUBS", cli.parent / "tests")).resolve()


@pytest.fixture(scope="session")
def halfbyte(cli):
    """Runs the tool and checks its exit code."""

    def run(*arguments, expect=0):
        command = [str(cli), *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert result.returncode == expect, (
            f"{' '.join(command)}: exit {result.returncode}, expected {expect}\n{result.stderr}"
        )
        return result

    return run


@pytest.fixture
def unprivileged(cli):
    """A directory that all can reach, and options that run the tool as a user whom file modes bind. That user may not
    reach the build: the tool is copied."""
    with tempfile.TemporaryDirectory() as name:
        directory, tool = Path(name) / "work", Path(name) / "tool"
        for folder in (Path(name), directory, tool):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
        for file in (cli, *cli.parent.glob("libhalfbyte.so*")):
            shutil.copy(file, tool)
        options = {"executable": tool / cli.name, "env": {**os.environ, "LD_LIBRARY_PATH": str(tool)}}
        if os.geteuid() == 0:
            options |= {"user": 65534, "group": 65534, "extra_groups": []}
        yield directory, options
        directory.chmod(0o755)


@pytest.fixture(scope="session")
def device(halfbyte):
    """A CUDA device that can be used: "cuda:0"."""
    cuda = json.loads(halfbyte("doctor", "--json", "-").stdout)["cuda"]
    usable = [found for found in cuda["devices"] if not found["problem"]]
    if not cuda["usable"]:
        pytest.skip(cuda["problem"])
    return f"cuda:{usable[0]['index']}"
