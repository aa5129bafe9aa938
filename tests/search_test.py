"""Searched scales of the tool: the codes and scales of the independent search, what they gain, and the file of importance."""

import json

import numpy as np
import pytest

from conftest import TINY_LLAMA
from independent import safetensors_io as st
from independent import unpack
from independent.search import search

NAME = "model.layers.0.mlp.up_proj.weight"
ROWS, COLS = 48, 320


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A file with one weight, and its values."""
    path = tmp_path_factory.mktemp("search") / "model.safetensors"
    weight = np.random.default_rng(1).standard_normal((ROWS, COLS), np.float32)
    st.write(path, {NAME: st.Tensor("F32", weight)})
    return path, weight


@pytest.fixture(scope="module")
def importance(tmp_path_factory):
    path = tmp_path_factory.mktemp("importance") / "importance.safetensors"
    values = np.exp(np.random.default_rng(2).standard_normal(COLS)).astype(np.float32)
    st.write(path, {NAME: st.Tensor("F32", values), "unused.weight": st.Tensor("F32", values[:3])})
    return path, values


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "format, rule, group_size",
    [
        ("nf4", "absmax", 64),
        ("int4", "half-range", 32),
        ("int4", "signed-max", 160),
        ("int4", "minmax", 64),
        ("affine4", "minmax", 64),
        ("nvfp4", "absmax", 16),
    ],
)
def test_equals_the_independent_search(halfbyte, tmp_path, source, importance, format, rule, group_size, weighted):
    path, weight = source
    options = ["--layout", "halfbyte", "--format", format, "--search"]
    if format != "nvfp4":
        options += ["--group-size", group_size, "--scale-dtype", "f16", "--scale-rule", rule]
    if (format, rule) == ("int4", "minmax"):
        options.append("--asymmetric")
    if weighted:
        options += ["--importance", importance[0]]
    halfbyte("quantize", path, "-o", tmp_path / "q.safetensors", *options)
    found = unpack.halfbyte(st.read(tmp_path / "q.safetensors")[0], NAME)
    wanted = search(
        weight, format, group_size=group_size, rule=rule, importance=importance[1] if weighted else None
    )
    assert np.array_equal(found.scales, wanted.scales)
    assert np.array_equal(found.codes, wanted.codes)
    if wanted.biases is not None:
        assert np.array_equal(found.biases, wanted.biases)
    if wanted.zeros is not None:
        assert np.array_equal(found.zeros, wanted.zeros)


def snr(halfbyte, path, output, *options):
    document = json.loads(halfbyte("quantize", path, "-o", output, *options, "--json", "-").stdout)
    (found,) = {weight["encoding"]["search"] for weight in document["weights"] if weight["quantized"]}
    return found, {weight["name"]: weight["snr_db"] for weight in document["weights"] if weight["quantized"]}


# In the layouts that other tools read, of a model.
@pytest.mark.parametrize("format, gain", [("nf4", 0.5), ("int4", 0.6), ("affine4", 0.5), ("nvfp4", 1.0), ("mxfp4", 0)])
def test_every_weight_gains(halfbyte, tmp_path, format, gain):
    is_searched, before = snr(halfbyte, TINY_LLAMA, tmp_path / "plain", "--format", format)
    assert is_searched is False
    is_searched, after = snr(halfbyte, TINY_LLAMA, tmp_path / "searched", "--format", format, "--search")
    assert is_searched is True
    gains = [after[name] - before[name] for name in before]
    assert min(gains) >= 0 and np.mean(gains) > gain
    st.read(tmp_path / "searched" / "model.safetensors")


def test_the_report_says_so(halfbyte, tmp_path, source, importance):
    assert "scales" not in halfbyte("quantize", source[0], "--dry-run").stdout
    assert "scales       searched\n" in halfbyte("quantize", source[0], "--dry-run", "--search").stdout
    text = halfbyte("quantize", source[0], "--dry-run", "--search", "--importance", importance[0]).stdout
    assert f"scales       searched by {importance[0]}\n" in text


def test_bitsandbytes_blocks_cross_rows(halfbyte, tmp_path):
    """Groups of 64 of rows of 96: importance follows the columns."""
    weight = np.random.default_rng(3).standard_normal((4, 96), np.float32)
    values = np.exp(np.random.default_rng(4).standard_normal(96)).astype(np.float32)
    st.write(tmp_path / "w.safetensors", {NAME: st.Tensor("F32", weight)})
    st.write(tmp_path / "i.safetensors", {NAME: st.Tensor("F32", values)})
    halfbyte("quantize", tmp_path / "w.safetensors", "-o", tmp_path / "q.safetensors", "--search", "--importance", tmp_path / "i.safetensors")
    found = unpack.bitsandbytes(st.read(tmp_path / "q.safetensors")[0], NAME)
    wanted = search(
        weight.reshape(1, -1), "nf4", group_size=64, rule="absmax", scale_dtype="f32", importance=np.tile(values, 4)
    )
    assert np.array_equal(found.scales.reshape(-1), wanted.scales.reshape(-1))
    assert np.array_equal(found.codes.reshape(-1), wanted.codes.reshape(-1))


@pytest.mark.parametrize(
    "tensors, words",
    [
        ({}, ["has nothing for 1 of 1 weights", NAME]),
        ({NAME: st.Tensor("F32", np.ones(COLS + 1, np.float32))}, [NAME, f"F32 [{COLS}], got F32 [{COLS + 1}]"]),
        ({NAME: st.Tensor("F32", np.ones((1, COLS), np.float32))}, [NAME, f"got F32 [1, {COLS}]"]),
        ({NAME: st.from_f32(np.ones(COLS, np.float32), "F16")}, [NAME, f"got F16 [{COLS}]"]),
        ({NAME: st.Tensor("F32", np.r_[np.ones(COLS - 1), -1].astype(np.float32))}, [NAME, f"-1 at index {COLS - 1}"]),
        ({NAME: st.Tensor("F32", np.r_[np.nan, np.ones(COLS - 1)].astype(np.float32))}, [NAME, "nan at index 0"]),
        ({NAME: st.Tensor("F32", np.full(COLS, np.inf, np.float32))}, [NAME, "inf at index 0"]),
    ],
)
def test_importance_that_does_not_fit_is_named(halfbyte, tmp_path, source, tensors, words):
    path = tmp_path / "importance.safetensors"
    st.write(path, tensors)
    result = halfbyte(
        "quantize", source[0], "-o", tmp_path / "out", "--search", "--importance", path, expect=3
    )
    assert str(path) in result.stderr and all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "out").exists()
