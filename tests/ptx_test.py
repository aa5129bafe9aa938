"""The PTX that `halfbyte ptx` prints. Without NVRTC the tests are skipped, but fail where CI is set.

That every kernel compiles, and that ptxas takes its PTX, is tested in tests/jit_compile_test.cc; what needs no NVRTC in
tests/cli_test.py.
"""

import json
import os
import re

import pytest

USAGE, EXISTS = 2, 8


@pytest.fixture(scope="session", autouse=True)
def needs_nvrtc(halfbyte):
    if json.loads(halfbyte("doctor", "--json", "-").stdout)["cuda"]["nvrtc_path"] == "":
        pytest.fail("no NVRTC") if os.environ.get("CI") else pytest.skip("no NVRTC")


def test_targets(halfbyte):
    assert {"sm_75", "sm_90a"} <= set(json.loads(halfbyte("ptx", "--json", "-").stdout)["targets"])


@pytest.mark.parametrize(
    "options, kernel",
    [
        ("quantize", "halfbyte_quantize"),
        ("quantize --group-size 64", "quantize_groups"),
        ("quantize --group-size 100 --dtype bf16", "quantize_spans"),
        ("quantize --format int4 --asymmetric --unaligned", "quantize_spans"),
        ("quantize --kernel value_range", "value_range"),
        ("dequantize --format lut4 --table " + ",".join(map(str, range(16))), "halfbyte_dequantize"),
        ("dequantize --kernel dequantize", "dequantize"),
        ("observe", "halfbyte_observe"),
        ("quantize_linear", "linear_elements"),
        ("fake_quantize --format nf4", "halfbyte_fake_quantize"),
        ("affine_qdq", "halfbyte_affine_qdq"),
        ("qgemm --dtype f32", "halfbyte_qgemm"),
        ("reorder", "reorder_codes"),
        ("compute_qparams", "compute_qparams"),
    ],
)
def test_one_module_with_the_kernel_that_the_options_choose(halfbyte, options, kernel):
    document = json.loads(halfbyte("ptx", *options.split(), "--arch", "sm_80", "--json", "-").stdout)
    ptx = document["ptx"]
    assert (document["kernel"], document["target"], document["num_bytes"]) == (kernel, "sm_80", len(ptx))
    assert halfbyte("ptx", *options.split(), "--arch", "sm_80").stdout == ptx
    assert ptx.lstrip().startswith("//") and len(re.findall(r"^\.version", ptx, re.M)) == 1
    assert re.findall(r"^\.target (.*)$", ptx, re.M) == ["sm_80"]
    assert re.findall(r"\.entry (\w+)", ptx) == [kernel]


def test_output_is_replaced_on_request_only(halfbyte, tmp_path):
    ptx = halfbyte("ptx", "quantize", "--arch", "sm_90a").stdout
    output = tmp_path / "kernel.ptx"
    options = ["quantize", "--arch", "sm_90a", "-o", output]
    assert "halfbyte_quantize for sm_90a" in halfbyte("ptx", *options).stdout
    assert output.read_text() == ptx
    output.write_text("old")
    assert "kernel.ptx" in halfbyte("ptx", *options, expect=EXISTS).stderr
    halfbyte("ptx", "quantize", "--arch", "sm_1", "-o", output, "--force", expect=USAGE)
    assert output.read_text() == "old"
    halfbyte("ptx", *options, "--force")
    assert output.read_text() == ptx and os.listdir(tmp_path) == ["kernel.ptx"]


@pytest.mark.parametrize("target", ["sm_91", "90a", "", "compute_90", "sm_75a"])
def test_unknown_targets(halfbyte, target):
    message = halfbyte("ptx", "quantize", "--arch=" + target, expect=USAGE).stderr
    assert "--arch" in message if target == "" else f"'{target}'" in message and "sm_75, sm_80" in message
