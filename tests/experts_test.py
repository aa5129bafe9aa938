"""The forms that layout bitsandbytes has for experts: per expert, one tensor (parametrize), Experts4bit. Each becomes each
other with the same codes and scales; what is written is read by independent code, and what others write is read."""

import itertools
import json

import numpy as np
import pytest

from independent import safetensors_io as st
from independent import unpack

BAD_INPUT, USAGE, VERIFY = 3, 2, 4
EXPERTS, HIDDEN, WIDTH = 3, 128, 64
PREFIX = "model.layers.0.mlp.experts."
Q = "model.layers.0.self_attn.q_proj.weight"
CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_size": HIDDEN}
FORMS = ("per-expert", "parametrize", "experts4bit")


def write(path, tensors, config):
    path.mkdir()
    st.write(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps(config))
    return path


def dense(hidden=HIDDEN, width=WIDTH):
    rng = np.random.default_rng(3)
    shapes = {Q: (256, hidden)}
    for e, (name, shape) in itertools.product(
        range(EXPERTS), {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}.items()
    ):
        shapes[f"{PREFIX}{e}.{name}_proj.weight"] = shape
    return {name: st.from_f32(rng.standard_normal(shape).astype(np.float32) * 0.05, "BF16") for name, shape in shapes.items()}


def quantize(halfbyte, tmp_path, *arguments, **sizes):
    source = write(tmp_path / "dense", dense(**sizes), CONFIG | {"hidden_size": sizes.get("hidden", HIDDEN)})
    halfbyte("quantize", source, "-o", tmp_path / "per-expert", "--reader", "transformers-4", *arguments)
    return tmp_path / "per-expert"


def convert(halfbyte, source, output, form, *arguments, expect=0):
    return halfbyte(
        "convert", source, "-o", output, "--layout", "bitsandbytes", "--experts", form, *arguments, expect=expect
    )


def content(path):
    tensors, _ = st.read_directory(path)
    return {name: (tensor.dtype, tensor.data.shape, tensor.data.tobytes()) for name, tensor in tensors.items()}, json.loads(
        (path / "config.json").read_text()
    )


def read(path):
    """Codes, scales and weights of all experts [E, out, in], whatever the form, by independent code."""
    tensors, _ = st.read_directory(path)
    found = unpack.weights(tensors, json.loads((path / "config.json").read_text()))
    if f"{PREFIX}gate_up_proj" in found:
        return {name: found[PREFIX + name] for name in ("gate_up_proj", "down_proj")}, found[Q]
    all_of = {}
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        each = [[found[f"{PREFIX}{e}.{part}_proj.weight"] for part in parts] for e in range(EXPERTS)]
        stack = lambda of: np.stack([np.concatenate([of(part) for part in expert]) for expert in each])  # noqa: E731
        scales = np.concatenate([part.scales.reshape(-1) for expert in each for part in expert])
        all_of[name] = unpack.Unpacked({}, stack(lambda x: x.codes), scales, stack(lambda x: x.weights))
    return all_of, found[Q]


@pytest.mark.parametrize("arguments", [("--format", "nf4"), ("--format", "fp4", "--group-size", "32")], ids=str)
def test_every_form_becomes_every_other(halfbyte, tmp_path, arguments):
    quantize(halfbyte, tmp_path, *arguments)
    for form in FORMS[1:]:
        convert(halfbyte, tmp_path / "per-expert", tmp_path / form, form)
    expected, q = read(tmp_path / "per-expert")
    group = 32 if "32" in arguments else 64
    for form in FORMS[1:]:
        experts, own = read(tmp_path / form)
        assert np.array_equal(own.weights, q.weights)
        for name in expected:
            assert np.array_equal(experts[name].codes, expected[name].codes)
            assert np.array_equal(experts[name].scales.reshape(-1), expected[name].scales)
            assert np.array_equal(experts[name].weights, expected[name].weights)
    tensors, _ = st.read_directory(tmp_path / "experts4bit")
    for name, rows, cols in (("gate_up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
        assert tensors[f"{PREFIX}{name}_proj"].data.shape == (EXPERTS, rows * cols // 2)
        scales = tensors[f"{PREFIX}{name}_absmax"]
        assert scales.dtype == "F32" and scales.data.shape == (EXPERTS, rows * cols // group)
    assert not any("experts" in name and "quant_state" in name for name in tensors)
    for source, form in itertools.product(FORMS, FORMS):
        convert(halfbyte, tmp_path / source, tmp_path / "again", form, "--force")
        assert content(tmp_path / "again") == content(tmp_path / form)
        halfbyte("verify", tmp_path / "again")


def experts4bit(path, config=None, **changes):
    """What Experts4bit saves of random codes: packed bytes and scales, and a config of the model."""
    rng = np.random.default_rng(5)
    tensors = {Q: st.from_f32(np.ones((8, HIDDEN), np.float32), "BF16")}
    for name, n in (("gate_up", 2 * WIDTH * HIDDEN), ("down", HIDDEN * WIDTH)):
        tensors[f"{PREFIX}{name}_proj"] = st.Tensor("U8", rng.integers(0, 256, (EXPERTS, n // 2), np.uint8))
        tensors[f"{PREFIX}{name}_absmax"] = st.Tensor("F32", rng.random((EXPERTS, n // 64), np.float32))
    tensors |= {PREFIX + name: tensor for name, tensor in changes.items() if tensor is not None}
    for name in [name for name, tensor in changes.items() if tensor is None]:
        del tensors[PREFIX + name]
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    return write(path, tensors, config if config is not None else CONFIG | {"quantization_config": quantization})


def test_what_the_module_saves_is_read(halfbyte, tmp_path):
    source = experts4bit(tmp_path / "source")
    document = json.loads(halfbyte("inspect", source, "--json", "-").stdout)
    shapes = {weight["name"]: weight["shape"] for weight in document["weights"] if weight["layout"] == "bitsandbytes"}
    assert shapes == {f"{PREFIX}gate_up_proj": [3, 2 * WIDTH, HIDDEN], f"{PREFIX}down_proj": [3, HIDDEN, WIDTH]}
    assert "2 weights: Experts4bit" in halfbyte("inspect", source).stdout
    halfbyte("dequantize", source, "-o", tmp_path / "dense", "--dtype", "f32")
    written, _ = st.read_directory(tmp_path / "dense")
    found = unpack.weights(st.read_directory(source)[0], json.loads((source / "config.json").read_text()))
    for name in shapes:
        assert np.array_equal(written[name].data, found[name].weights)
    convert(halfbyte, source, tmp_path / "per-expert", "per-expert")
    convert(halfbyte, tmp_path / "per-expert", tmp_path / "back", "experts4bit")
    back, before = content(tmp_path / "back")[0], content(source)[0]
    assert back == before


def test_experts_that_cannot_be_divided(halfbyte, tmp_path):
    """96 columns are no whole groups of 64: flat groups cross the rows, as bitsandbytes has them."""
    source = quantize(halfbyte, tmp_path, "--format", "nf4", hidden=96)
    for form in FORMS[1:]:
        message = convert(halfbyte, source, tmp_path / "out", form, expect=BAD_INPUT).stderr
        assert f"cannot become {form}" in message and "groups of 64 cross rows: 96 columns are not a multiple" in message
    tensors = {f"{PREFIX}gate_up_proj": st.from_f32(np.ones((2, 128, 96), np.float32), "BF16")}
    stacked = write(tmp_path / "stacked", tensors, CONFIG)
    halfbyte("quantize", stacked, "-o", tmp_path / "parametrize", "--reader", "none")
    message = convert(halfbyte, tmp_path / "parametrize", tmp_path / "out", "per-expert", expect=BAD_INPUT).stderr
    assert "cannot become per-expert: groups of 64 cross rows: 96 columns" in message
    message = convert(halfbyte, tmp_path / "parametrize", tmp_path / "out", "experts4bit", expect=USAGE).stderr
    assert "whole groups in a row: 96 columns" in message
    assert not (tmp_path / "out").exists()


def test_forms_that_are_refused(halfbyte, tmp_path):
    nested = quantize(halfbyte, tmp_path, "--format", "nf4", "--double-quant")
    message = convert(halfbyte, nested, tmp_path / "out", "parametrize", expect=BAD_INPUT).stderr
    assert "double quantized scales are not of one expert" in message
    halfbyte("quantize", tmp_path / "dense", "-o", tmp_path / "flat", "--reader", "transformers-4")
    message = halfbyte(
        "convert", tmp_path / "flat", "-o", tmp_path / "out", "--layout", "halfbyte", "--experts", "experts4bit", expect=USAGE
    ).stderr
    assert "layout halfbyte has one form of experts" in message
    assert "must be one of per-expert" in convert(halfbyte, tmp_path / "flat", tmp_path / "out", "stacked", expect=USAGE).stderr
    config = json.loads((tmp_path / "flat" / "config.json").read_text())
    for changed, wanted in (
        ({"architectures": ["Odd"], "model_type": "odd"}, "a known architecture"),
        ({"hidden_size": 256}, 'must be 128, and is 256'),
        ({"hidden_size": None}, 'must be 128, and is not there'),
    ):
        (tmp_path / "flat" / "config.json").write_text(json.dumps(config | changed))
        result = halfbyte("convert", tmp_path / "flat", "-o", tmp_path / "out", "--layout", "bitsandbytes", "--experts",
                          "experts4bit", expect=BAD_INPUT if "known" in wanted else USAGE)  # fmt: skip
        assert wanted in result.stderr
    assert not (tmp_path / "out").exists()


U8, F32 = (lambda *shape: st.Tensor("U8", np.zeros(shape, np.uint8))), (lambda *shape: st.Tensor("F32", np.ones(shape, np.float32)))
FAULTS = {
    "scales of fewer experts": ({"down_absmax": F32(2, 128)}, {}, r"must be F32 [experts, groups]"),
    "scales of one axis": ({"down_absmax": F32(384)}, {}, r"must be F32 [experts, groups]"),
    "scales of another dtype": ({"down_absmax": st.Tensor("BF16", np.zeros((3, 128), "<u2"))}, {}, ""),
    "no codes": ({"down_proj": U8(3, 0)}, {}, r"must be F32 [experts, groups]"),
    "no scales": ({"down_absmax": F32(3, 0)}, {}, r"must be F32 [experts, groups]"),
    "groups that no kernel has": ({"down_absmax": F32(3, 8192)}, {}, "groups must be of 32, 64"),
    "groups that do not divide": ({"down_absmax": F32(3, 127)}, {}, "groups must be of 32, 64"),
    "groups across rows": ({"down_proj": U8(3, 128 * 48), "down_absmax": F32(3, 192)}, {}, "96 columns are not a multiple of 64"),
    "another hidden_size": ({}, {"hidden_size": 127}, "no rows of hidden_size 127"),
    "a negative hidden_size": ({}, {"hidden_size": -128}, "no hidden_size"),
    "a huge hidden_size": ({}, {"hidden_size": 2**70}, "no hidden_size"),
    "no hidden_size": ({}, {"hidden_size": "128"}, "no hidden_size"),
    "no quantization_config": ({}, {"quantization_config": None}, "no bnb_4bit_quant_type"),
    "another type": ({}, {"quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "int4"}}, "of nf4 or fp4"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named(halfbyte, tmp_path, fault):
    tensors, changes, wanted = FAULTS[fault]
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    source = experts4bit(tmp_path / "source", CONFIG | {"quantization_config": quantization} | changes, **tensors)
    assert wanted in halfbyte("inspect", source).stdout
    message = halfbyte("dequantize", source, "-o", tmp_path / "out", expect=BAD_INPUT).stderr
    assert "already quantized" in message and not (tmp_path / "out").exists()
    found = json.loads(halfbyte("verify", source, "--json", "-", expect=VERIFY).stdout)["faults"]
    assert "experts4bit" in {row["rule"] for row in found}


def test_parts_that_are_missing_are_found(halfbyte, tmp_path):
    for index, (missing, rule) in enumerate((("down_absmax", "scale-missing"), ("down_proj", "codes-missing"))):
        source = experts4bit(tmp_path / str(index), **{missing: None})
        found = json.loads(halfbyte("verify", source, "--json", "-", expect=VERIFY).stdout)["faults"]
        assert [(row["rule"], row["name"]) for row in found] == [(rule, PREFIX + "down" + ("" if rule[0] == "c" else "_proj"))]


def test_a_file_alone_is_named(halfbyte, tmp_path):
    source = experts4bit(tmp_path / "source")
    text = halfbyte("inspect", source / "model.safetensors").stdout
    assert "experts4bit (bitsandbytes), 2 weights" in text and "in config.json, which there is not" in text
