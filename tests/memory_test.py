"""What quantizing takes of memory does not depend on the model: models of the shape of Qwen3-30B-A3B, scaled down."""

import json
import subprocess
import sys

import pytest

from independent import moe
from independent import safetensors_io as st

# Each is as large as the largest difference that is allowed, and more.
SHAPE = {"experts": 16, "hidden": 512, "width": 256, "vocabulary": 512}
SMALL, LARGE = 1, 9  # layers of 13 MB
ALLOWED = 24 << 20  # of names, and of what the allocator keeps

LAUNCHER = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    for layers in (SMALL, LARGE):
        moe.write_model(path / str(layers), layers=layers, **SHAPE)
    return path


def peak_bytes(cli, *arguments):
    """Of the tool alone: a process in between has none of the memory of this one."""
    command = [sys.executable, "-c", LAUNCHER, str(cli), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    code, peak = map(int, done.stdout.split())
    assert code == 0, done.stderr
    return peak


@pytest.mark.parametrize("options", ["nvfp4", "mxfp4", "fp8", "fp8 --layout fp8"])
def test_peak_of_quantize(cli, models, tmp_path, options):
    arguments = ["--format", *options.split(), "--threads", 2]
    peaks = [peak_bytes(cli, "quantize", models / str(n), "-o", tmp_path / str(n), *arguments) for n in (SMALL, LARGE)]
    sizes = [sum(file.stat().st_size for file in (models / str(n)).iterdir()) for n in (SMALL, LARGE)]
    assert sizes[1] - sizes[0] > 4 * ALLOWED
    assert peaks[1] - peaks[0] < ALLOWED, peaks
    tensors, _ = st.read_directory(tmp_path / str(SMALL))
    method = json.loads((tmp_path / str(SMALL) / "config.json").read_text())["quantization_config"]["quant_method"]
    assert method == ("fp8" if "layout" in options else "compressed-tensors")
    names = {name.removesuffix("_packed") for name, tensor in tensors.items() if tensor.dtype in ("U8", "F8_E4M3")}
    assert {name for name in moe.shapes_of(0, 16, 512, 256) if "experts" in name} <= names
