"""halfbyte convert: every layout to every other that holds its weights, and back, byte for byte."""

import itertools
import json

import numpy as np
import pytest

from independent import safetensors_io as st

INTEGERS = {"compressed-tensors": (4, 8), "gptq": (2, 3, 4, 8), "awq": (4,)}
AFFINE = (2, 3, 4, 5, 6, 8)
SHAPES = {"a.0.up_proj.weight": (96, 128), "a.0.down_proj.weight": (64, 96), "a.1.up_proj.weight": (96, 128)}
CONFIG = {"architectures": ["OddForCausalLM"], "model_type": "odd", "dtype": "float16"}


def sources():
    """(id, layout, arguments of quantize, form, bits, group)."""
    for layout, widths in INTEGERS.items():
        for bits, asymmetric in itertools.product(widths, (False, True)):
            extra = ["--asymmetric"] * asymmetric
            yield layout, [f"--format=int{bits}", "--group-size=32", *extra], "asymmetric" if asymmetric else "symmetric", bits
    for bits in AFFINE:
        yield "mlx", [f"--format=affine{bits}", "--group-size=32"], "affine", bits
    for name in ("nf4", "fp4"):
        yield "bitsandbytes", [f"--format={name}", "--group-size=32"], name, 4
        yield "bitsandbytes", [f"--format={name}", "--group-size=32", "--double-quant"], name + " nested", 4
    for name in ("nf4", "fp4"):
        yield "halfbyte", [f"--format={name}", "--group-size=32", "--scale-dtype=f32"], name, 4
    for bits, asymmetric in itertools.product((2, 3, 4, 5, 6, 8), (False, True)):
        yield "halfbyte", [f"--format=int{bits}", "--group-size=32"] + ["--asymmetric"] * asymmetric, "asymmetric" if asymmetric else "symmetric", bits


LAYOUTS = ("halfbyte", "bitsandbytes", "compressed-tensors", "mlx", "gptq", "awq")


def holds(layout, form, bits):
    """Whether codes and parameters of the form have a place in the layout without a loss. None: the data decides."""
    if layout == "halfbyte":
        return True
    if form.split()[0] in ("nf4", "fp4"):
        return layout == "bitsandbytes"
    if layout == "mlx":
        return form in ("affine", "symmetric") or None  # -zero * scale may need more bits than f16 has
    if layout == "bitsandbytes":
        return False
    if bits not in INTEGERS[layout]:
        return False
    return True if form != "affine" else None


def content(path):
    """What a reader of the directory gets: tensors, and how they are quantized. Only files of layout halfbyte say which rule
    chose the scales; it does not survive another layout."""
    tensors, _ = st.read(path / "model.safetensors")
    values = {name: (tensor.dtype, tensor.data.shape, tensor.data.tobytes()) for name, tensor in tensors.items()}
    for name in values:
        if name.endswith(".quant_spec"):
            spec = json.loads(values[name][2])
            spec.pop("scale_rule", None)
            values[name] = spec
    return values, json.loads((path / "config.json").read_text())


def write_model(directory, shapes):
    rng = np.random.default_rng(1)
    tensors = {
        name: st.Tensor("F16", (rng.standard_normal(shape) * 0.05).astype(np.float16)) for name, shape in shapes.items()
    }
    tensors["a.norm.weight"] = st.Tensor("F16", np.ones(96, np.float16))
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    st.write(directory / "model.safetensors", tensors)
    return directory


def check_round_trip(halfbyte, source, target, layout, back, directory):
    """source was converted to target: its weights have the same values, and come back as they were."""
    rows = json.loads(halfbyte("compare", source, target, "--json", "-").stdout)["rows"]
    assert rows and all(not row["problem"] and row["max_error"] == 0 for row in rows)
    halfbyte("convert", target, "-o", directory, "--layout", back, "--reader", "none", "--force")
    assert content(directory) == content(source)


@pytest.mark.parametrize(
    "layout, arguments, form, bits", list(sources()), ids=lambda value: "-".join(value) if type(value) is list else str(value)
)
def test_every_layout_to_every_other(halfbyte, tmp_path, layout, arguments, form, bits):
    source = tmp_path / "source"
    halfbyte(
        "quantize", write_model(tmp_path / "dense", SHAPES), "-o", source, "--layout", layout, "--reader", "none", *arguments
    )
    num_held = 0
    for to in LAYOUTS:
        expected = holds(to, form, bits)
        target = tmp_path / to
        command = ["convert", source, "-o", target, "--layout", to, "--reader", "none"]
        if expected is None:
            dry = json.loads(halfbyte(*command, "--dry-run", "--requantize", "--json", "-").stdout)
            expected = not any(weight["note"] for weight in dry["weights"])
        if to == layout:
            expected = True
        if not expected:
            assert "--requantize" in halfbyte(*command, expect=3).stderr
            assert not target.exists()
            continue
        halfbyte(*command)
        check_round_trip(halfbyte, source, target, to, layout, tmp_path / "back")
        num_held += 1
    assert num_held >= (1 if layout == "halfbyte" else 2)  # itself, and halfbyte


@pytest.mark.parametrize("layout, format", [("compressed-tensors", "int4"), ("compressed-tensors", "int8"), ("mlx", "affine4")])
def test_experts_of_three_dimensions(halfbyte, tmp_path, layout, format):
    dense = write_model(tmp_path / "dense", {"a.0.mlp.switch_mlp.up_proj.weight": (3, 40, 64), "a.0.q_proj.weight": (64, 64)})
    source = tmp_path / "source"
    halfbyte("quantize", dense, "-o", source, "--layout", layout, "--format", format, "--reader", "none",
             "--include", "proj", "--group-size", "32", "--force-layout")  # fmt: skip
    for to in ("halfbyte", "compressed-tensors", "mlx"):
        if to == "compressed-tensors" and layout == "mlx":
            continue
        halfbyte("convert", source, "-o", tmp_path / to, "--layout", to, "--reader", "none", "--force-layout")
        rows = json.loads(halfbyte("compare", source, tmp_path / to, "--json", "-").stdout)["rows"]
        assert len(rows) == 3 and all(not row["problem"] and row["max_error"] == 0 for row in rows)
        halfbyte("convert", tmp_path / to, "-o", tmp_path / f"{to}-back", "--layout", layout, "--reader", "none", "--force-layout")
        assert content(tmp_path / f"{to}-back") == content(source)


def test_what_is_lost_is_said(halfbyte, tmp_path):
    dense = write_model(tmp_path / "dense", SHAPES)
    source = tmp_path / "source"
    halfbyte("quantize", dense, "-o", source, "--layout", "halfbyte", "--format", "int4", "--group-size", "40", "--reader", "none")
    result = halfbyte("convert", source, "-o", tmp_path / "out", "--layout", "gptq", expect=3)
    for text in ("3 of 3 weights", "a.0.down_proj.weight", "--requantize", "group"):
        assert text in result.stderr
    assert not (tmp_path / "out").exists()
    halfbyte("convert", source, "-o", tmp_path / "out", "--layout", "gptq", "--requantize", "--reader", "none", expect=2)
    nf4 = tmp_path / "nf4"
    halfbyte("quantize", dense, "-o", nf4, "--format", "nf4", "--group-size", "32", "--reader", "none")
    document = json.loads(
        halfbyte("convert", nf4, "-o", tmp_path / "out", "--layout", "mlx", "--requantize", "--reader", "none", "--json", "-").stdout
    )
    weights = [weight for weight in document["weights"] if weight["quantized"]]
    assert len(weights) == 3
    for weight in weights:
        assert weight["note"].startswith("requantized: layout mlx: does not hold nf4")
        assert 0 < weight["relative_rmse"] < 0.2


def test_tails_stay_in_halfbyte(halfbyte, tmp_path):
    dense = write_model(tmp_path / "dense", SHAPES)
    halfbyte("quantize", dense, "-o", tmp_path / "a", "--layout", "halfbyte", "--format", "nf4", "--group-size", "40",
             "--scale-dtype", "f32", "--reader", "none")  # fmt: skip
    halfbyte("convert", tmp_path / "a", "-o", tmp_path / "b", "--layout", "halfbyte", "--reader", "none", "--shard-size", "8KB")
    rows = json.loads(halfbyte("compare", tmp_path / "a", tmp_path / "b", "--json", "-").stdout)["rows"]
    assert all(not row["problem"] and row["max_error"] == 0 for row in rows)
    assert len(list((tmp_path / "b").glob("*.safetensors"))) > 1


def test_a_dense_checkpoint_is_refused(halfbyte, tmp_path):
    dense = write_model(tmp_path / "dense", SHAPES)
    assert "no quantized weights" in halfbyte("convert", dense, "-o", tmp_path / "out", "--layout", "mlx", expect=2).stderr


@pytest.mark.parametrize("layout, to", itertools.product(("bitsandbytes", "halfbyte"), ("halfbyte", "bitsandbytes", "gptq")))
def test_conv1d_is_turned_for_its_reader(halfbyte, tmp_path, layout, to):
    """[in, out] in the model, [out, in] in the layouts whose readers make a linear layer of it; one is square."""
    shapes = {f"h.0.{name}.weight": shape for name, shape in
              {"attn.c_attn": (64, 192), "attn.c_proj": (64, 64), "mlp.c_fc": (64, 256)}.items()}  # fmt: skip
    dense = write_model(tmp_path / "dense", shapes)
    (dense / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}))
    source = tmp_path / "source"
    halfbyte("quantize", dense, "-o", source, "--layout", layout, "--format", "nf4", "--group-size", "32")
    command = ["convert", source, "-o", tmp_path / "out", "--layout", to]
    if (layout == "halfbyte") != (to == "halfbyte"):
        assert "Conv1D" in halfbyte(*command, expect=3).stderr
    halfbyte(*command, "--requantize")
    rows = json.loads(halfbyte("compare", dense, tmp_path / "out", "--json", "-").stdout)["rows"]
    assert len(rows) == 4 and all(not row["problem"] and row["relative_rmse"] < 0.2 for row in rows)
