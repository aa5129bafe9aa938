"""The PTX that `halfbyte ptx` prints is what ptxas takes: of every kernel, for every generation of GPUs.

ptxas is HALFBYTE_PTXAS, that of a CUDA toolkit, or that on PATH. Without it or NVRTC the tests are skipped, but fail
where CI is set. That every configuration compiles is tested in tests/jit_compile_test.cc.
"""

import json
import os
import re
import shutil
import subprocess

import pytest

TARGETS = ["sm_75", "sm_80", "sm_90a", "sm_120a"]


def missing(what):
    pytest.fail(what) if os.environ.get("CI") else pytest.skip(what)


@pytest.fixture(scope="session")
def ptxas():
    for path in [os.environ.get("HALFBYTE_PTXAS"), "/usr/local/cuda/bin/ptxas", shutil.which("ptxas")]:
        if path and os.path.exists(path):
            return path
    missing("no ptxas: HALFBYTE_PTXAS may give its path")


@pytest.fixture(scope="session")
def listing(halfbyte):
    document = json.loads(halfbyte("ptx", "--json", "-").stdout)
    if not document["targets"]:
        missing("no NVRTC")
    return document


# What the last value of a key needs beside it, of some kernels or of all: f64 scales go with f64 data, zero points and
# rules with some formats and with each other, what layouts store of a weight with each other.
COMPANIONS = {
    "affine_init scale-dtype": [],
    "affine_init scale-rule": [],
    "asymmetric": ["--format", "int4"],
    "scale-dtype": ["--dtype", "f64"],
    "scale-rule": ["--format", "affine4"],
    "zero-point": ["--bits", "4"],
    "compute_qparams scale-rule": ["--zero-point", "i32"],
    "compute_qparams zero-point": [],
    "fake_chunks zero-point": ["--dtype", "f64"],
    "fake_columns zero-point": ["--dtype", "f64"],
    "fake_elements zero-point": ["--dtype", "f64"],
    "fake_fused scale-rule": ["--zero-point", "i32"],
    "fake_fused zero-point": ["--scale-rule", "minmax"],
    "fake_params scale-rule": ["--zero-point", "i32"],
    "fake_params zero-point": ["--scale-rule", "minmax"],
    "linear_fused scale-rule": ["--zero-point", "i32"],
    "linear_fused zero-point": ["--scale-rule", "minmax"],
    "linear_params scale-rule": ["--zero-point", "i32"],
    "linear_params zero-point": ["--scale-rule", "minmax"],
    "lsq_columns zero-point": ["--dtype", "f64"],
    "lsq_elements zero-point": ["--dtype", "f64"],
    "lsq_rows zero-point": ["--dtype", "f64"],
    "lsq_totals zero-point": ["--dtype", "f64"],
    "math": ["--dtype", "f32"],
    "qgemm_cublas_decode scale-dtype": [],
    "qgemm_sm80 scale-dtype": [],
    "qgemm_simt_rows scale-dtype": [],
    "qgemm_sm90_f32 scale-dtype": [],
    "qgemm_sm90_large features": ["--tokens", "128"],
    "qgemm_sm90_large format": ["--scale-dtype", "f16"],
    "qgemm_sm90_large group-size": ["--format", "int4"],
    "qgemm_sm90_large scale-dtype": ["--format", "int4"],
    "qgemm_sm90_mma format": ["--scale-dtype", "f16"],
    "qgemm_sm90_mma group-size": ["--format", "int4"],
    "qgemm_sm90_mma scale-dtype": ["--format", "int4"],
    "qgemm_sm90_transposed format": ["--scale-dtype", "f16", "--columns", "64"],
    "qgemm_sm90_transposed group-size": ["--format", "int4"],
    "qgemm_sm90_transposed scale-dtype": ["--format", "int4"],
    "qgemm_sm90_wgmma format": ["--scale-dtype", "f16"],
    "qgemm_sm90_wgmma group-size": ["--format", "int4"],
    "qgemm_sm90_wgmma scale-dtype": ["--format", "int4"],
    "qgemm_sum sum": ["--total", "f64", "--dtype", "f32"],
}


def configurations(kernel):
    """The defaults and, key by key, the last value."""
    yield []
    for key in kernel["keys"]:
        option, values = "--" + key["name"], key["values"]
        companions = COMPANIONS.get(f"{kernel['name']} {key['name']}", COMPANIONS.get(key["name"], []))
        if values == ["no", "yes"]:
            yield [option, *companions]
        elif len(values) > 1:
            yield [option, values[-1], *companions]


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_assembles(halfbyte, listing, ptxas, target, tmp_path):
    assert target in listing["targets"]
    for kernel in listing["kernels"]:
        for config in configurations(kernel):
            ptx = halfbyte("ptx", kernel["op"], "--kernel", kernel["name"], "--arch", target, *config).stdout
            assert re.findall(r"^\.target (.*)$", ptx, re.M) == [target]
            assert re.findall(r"\.entry (\w+)", ptx) == [kernel["name"]]
            command = [ptxas, "-arch", target, "-o", tmp_path / "cubin", "-"]
            result = subprocess.run(command, input=ptx, capture_output=True, text=True)
            assert result.returncode == 0, f"{kernel['name']} {config}: {result.stderr}"
