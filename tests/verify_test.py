"""halfbyte verify finds planted faults by name; halfbyte repair mends global scales."""

import json
import shutil

import numpy as np
import pytest

from conftest import TINY_LLAMA
from independent import moe
from independent import safetensors_io as st
from independent.encode import E4M3, nearest

VERIFY, USAGE = 4, 2
Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"
UP = "model.layers.1.mlp.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts"
GATE_UP = f"{EXPERTS}.gate_up_proj"
LEFT = "model.layers.0.mlp.up_proj.weight"
LEFT_OUT = {
    "bitsandbytes": "--format nf4",
    "pack-quantized": "--format int4 --group-size 128",
    "gptq": "--format int4 --layout gptq",
    "awq": "--format int4 --asymmetric --layout awq",
    "mlx": "--format affine4",
    "halfbyte": "--format int4 --layout halfbyte",
}


class Checkpoint:
    def __init__(self, path):
        self.path = path
        self.tensors, self.metadata = st.read_directory(path)
        self.config = json.loads((path / "config.json").read_text())

    def save(self):
        st.write(self.path / "model.safetensors", self.tensors, self.metadata)
        (self.path / "config.json").write_text(json.dumps(self.config))

    def edit(self, name):
        dtype, data = self.tensors[name]
        self.tensors[name] = st.Tensor(dtype, data.copy())
        return self.tensors[name].data

    @property
    def weights(self):
        return self.config["quantization_config"]["config_groups"]["group_0"]["weights"]


@pytest.fixture(scope="module")
def quantized(halfbyte, tmp_path_factory):
    """Of each layout a model without faults."""
    path = tmp_path_factory.mktemp("quantized")
    halfbyte("quantize", TINY_LLAMA, "-o", path / "compressed-tensors", "--format", "nvfp4")
    halfbyte("quantize", TINY_LLAMA, "-o", path / "modelopt", "--format", "nvfp4", "--layout", "modelopt")
    halfbyte("quantize", TINY_LLAMA, "-o", path / "mxfp4", "--format", "mxfp4", "--layout", "compressed-tensors")
    halfbyte("quantize", TINY_LLAMA, "-o", path / "fp8", "--format", "fp8", "--layout", "fp8")
    halfbyte("quantize", TINY_LLAMA, "-o", path / "float-quantized", "--format", "fp8")
    halfbyte("quantize", TINY_LLAMA, "-o", path / "modelopt-fp8", "--format", "fp8", "--layout", "modelopt")
    make_gpt_oss(path / "gpt-oss")
    # Less than all: what is left dense is listed, or what is not.
    for layout, options in LEFT_OUT.items():
        halfbyte("quantize", TINY_LLAMA, "-o", path / layout, *options.split(), "--exclude", LEFT.removesuffix(".weight"))
    return path


def make_gpt_oss(path):
    """Experts of a layer in one tensor, and what a config says of them."""
    path.mkdir()
    tensors = {"lm_head.weight": st.from_f32(np.ones((8, 32)), "BF16")}
    for name, rows in (("gate_up_proj", 8), ("down_proj", 4)):
        shape = (2, rows, 1)
        tensors[f"{EXPERTS}.{name}_blocks"] = st.Tensor("U8", np.full((*shape, 16), 0x21, np.uint8))
        tensors[f"{EXPERTS}.{name}_scales"] = st.Tensor("U8", np.full(shape, 120, np.uint8))
    st.write(path / "model.safetensors", tensors)
    config = {"model_type": "gpt_oss", "num_hidden_layers": 1, "quantization_config": {"quant_method": "mxfp4"}}
    (path / "config.json").write_text(json.dumps(config))


def rename(c, before, after):
    c.tensors[after] = c.tensors.pop(before)


def reshape_scale(c):
    dtype, data = c.tensors[f"{Q}_scale"]
    c.tensors[f"{Q}_scale"] = st.Tensor(dtype, np.ascontiguousarray(data[:, 1:]))


def cut_scales(c, name):
    dtype, data = c.tensors[name]
    c.tensors[name] = st.Tensor(dtype, np.ascontiguousarray(data[..., :-1]))


def reshape_codes(c):
    dtype, data = c.tensors[f"{Q}_packed"]
    c.tensors[f"{Q}_packed"] = st.Tensor(dtype, np.ascontiguousarray(data[:, 1:]))


def put(c, name, value, index=5):
    c.edit(name).reshape(-1)[index] = value


def drop(c, ending):
    for name in [name for name in c.tensors if name.startswith(ending)]:
        del c.tensors[name]


def set_config(c, **values):
    c.config |= values


def entry(c, **values):
    c.config["quantization_config"] |= values


def list_module(c, key, name):
    """Of lists, and of those of a list."""
    modules = c.config["quantization_config"][key]
    (modules[0] if isinstance(modules[0], list) else modules).append(name.removesuffix(".weight"))


def unlist_module(c, key, name):
    modules = c.config["quantization_config"][key]
    (modules[0] if isinstance(modules[0], list) else modules).remove(name.removesuffix(".weight"))


def tie(c):
    c.config["tie_word_embeddings"] = True


def activation_scale(c, value):
    c.tensors["model.layers.0.self_attn.q_proj.input_global_scale"] = st.Tensor("F32", np.full(1, value, "<f4"))


def experts(c):
    """Three experts, of which the second lacks a projection."""
    for i in range(3):
        for part in ("gate_proj", "up_proj", "down_proj"):
            if (i, part) != (1, "up_proj"):
                c.tensors[f"model.layers.0.mlp.experts.{i}.{part}.weight"] = st.Tensor("BF16", np.zeros((16, 16), "<u2"))
    c.config["num_experts"] = 3


def forget_expert(c):
    experts(c)
    c.tensors["model.layers.0.mlp.experts.1.up_proj.weight"] = st.Tensor("BF16", np.zeros((16, 16), "<u2"))
    c.config["num_experts"] = 4


NAN = float("nan")
# The layout, what is done to it, the rule that finds it, and the name that the fault has.
FAULTS = {
    "missing scale": ("compressed-tensors", lambda c: c.tensors.pop(f"{Q}_scale"), "scale-missing", Q),
    "missing global scale": (
        "compressed-tensors",
        lambda c: c.tensors.pop(f"{Q}_global_scale"),
        "global-scale-missing",
        Q,
    ),
    "missing codes": ("compressed-tensors", lambda c: c.tensors.pop(f"{Q}_packed"), "codes-missing", Q),
    "shape of scales": ("compressed-tensors", reshape_scale, "scale-shape", Q),
    "shape of codes": ("compressed-tensors", reshape_codes, "codes-shape", Q),
    "NaN scale": ("compressed-tensors", lambda c: put(c, f"{Q}_scale", 0x7F), "scale-nan", Q),
    "zero scale": ("compressed-tensors", lambda c: put(c, f"{Q}_scale", 0), "scale-zero", Q),
    "negative scale": ("compressed-tensors", lambda c: put(c, f"{Q}_scale", 0xB0), "scale-negative", Q),
    "NaN exponent": ("mxfp4", lambda c: put(c, f"{Q}_scale", 0xFF), "scale-nan", Q),
    "global scale 0": ("compressed-tensors", lambda c: put(c, f"{Q}_global_scale", 0, 0), "global-scale-invalid", Q),
    "global scale NaN": (
        "compressed-tensors",
        lambda c: put(c, f"{Q}_global_scale", NAN, 0),
        "global-scale-invalid",
        Q,
    ),
    "global scales of q and k": (
        "compressed-tensors",
        lambda c: put(c, f"{Q}_global_scale", 99, 0),
        "global-scale-mismatch",
        Q,
    ),
    "global scales of gate and up": (
        "modelopt",
        lambda c: c.edit(f"{UP}_scale_2").fill(0.5),
        "global-scale-mismatch",
        UP,
    ),
    "modelopt without scale": ("modelopt", lambda c: c.tensors.pop(f"{UP}_scale"), "scale-missing", UP),
    "modelopt without global scale": (
        "modelopt",
        lambda c: c.tensors.pop(f"{UP}_scale_2"),
        "global-scale-missing",
        UP,
    ),
    "NaN norm": (
        "compressed-tensors",
        lambda c: put(c, "model.norm.weight", 0x7FC0),
        "dense-nonfinite",
        "model.norm.weight",
    ),
    "activation scale": ("compressed-tensors", lambda c: activation_scale(c, NAN), "activation-scale-invalid", Q),
    "missing layer": ("compressed-tensors", lambda c: drop(c, "model.layers.2."), "layers-incomplete", "model.layers.2"),
    "expert without a part": (
        "compressed-tensors",
        experts,
        "experts-incomplete",
        "model.layers.0.mlp.experts.1",
    ),
    "missing expert": (
        "compressed-tensors",
        forget_expert,
        "experts-incomplete",
        "model.layers.0.mlp.experts.3",
    ),
    "tied head": ("compressed-tensors", tie, "tied-weights", "lm_head.weight"),
    "no quantization_config": (
        "compressed-tensors",
        lambda c: c.config.pop("quantization_config"),
        "config-missing",
        "config.json",
    ),
    "format of config": (
        "compressed-tensors",
        lambda c: c.config["quantization_config"].update(format="mxfp4-pack-quantized"),
        "config-format",
        "config.json",
    ),
    "group size of config": (
        "compressed-tensors",
        lambda c: c.weights.update(group_size=32),
        "config-group-size",
        "config.json",
    ),
    "bits of config": ("mxfp4", lambda c: c.weights.update(num_bits=8), "config-bits", "config.json"),
    "quantized and ignored": (
        "compressed-tensors",
        lambda c: c.config["quantization_config"]["ignore"].append(Q.removesuffix(".weight")),
        "config-ignore",
        Q,
    ),
    "table of config": ("bitsandbytes", lambda c: entry(c, bnb_4bit_quant_type="fp4"), "config-format", "config.json"),
    "skipped and quantized": (
        "bitsandbytes",
        lambda c: list_module(c, "llm_int8_skip_modules", Q),
        "config-ignore",
        Q,
    ),
    "dense and not skipped": (
        "bitsandbytes",
        lambda c: unlist_module(c, "llm_int8_skip_modules", LEFT),
        "dense-unlisted",
        LEFT,
    ),
    "format of config, pack-quantized": (
        "pack-quantized",
        lambda c: entry(c, format="dense"),
        "config-format",
        "config.json",
    ),
    "group size of config, pack-quantized": (
        "pack-quantized",
        lambda c: c.weights.update(group_size=32),
        "config-group-size",
        "config.json",
    ),
    "parent of what is dense": (
        "pack-quantized",
        lambda c: entry(c, ignore=["lm_head", "model.layers.0.mlp"]),
        "dense-unlisted",
        LEFT,
    ),
    "group size of config, awq": ("awq", lambda c: entry(c, group_size=64), "config-group-size", "config.json"),
    "quantized and not in a block": (
        "gptq",
        lambda c: unlist_module(c, "modules_in_block_to_quantize", Q),
        "config-ignore",
        Q,
    ),
    "dense and in a block": (
        "gptq",
        lambda c: list_module(c, "modules_in_block_to_quantize", LEFT),
        "dense-unlisted",
        LEFT,
    ),
    "fp8 without scale": ("fp8", lambda c: c.tensors.pop(f"{Q}_scale_inv"), "scale-missing", Q),
    "fp8 without codes": ("fp8", lambda c: c.tensors.pop(Q), "codes-missing", Q),
    "shape of block scales": ("fp8", lambda c: cut_scales(c, f"{Q}_scale_inv"), "scale-shape", Q),
    "block scales of another dtype": (
        "fp8",
        lambda c: c.tensors.update({f"{Q}_scale_inv": st.Tensor("U8", np.zeros((2, 2), np.uint8))}),
        "scale-dtype",
        Q,
    ),
    "NaN block scale": ("fp8", lambda c: put(c, f"{Q}_scale_inv", NAN, 1), "scale-nan", Q),
    "negative block scale": ("fp8", lambda c: put(c, f"{Q}_scale_inv", -1, 1), "scale-negative", Q),
    "NaN code": ("fp8", lambda c: put(c, Q, 0xFF), "code-nan", Q),
    "blocks of config": (
        "fp8",
        lambda c: c.config["quantization_config"].update(weight_block_size=[64, 64]),
        "config-group-size",
        "config.json",
    ),
    "method of config": (
        "fp8",
        lambda c: c.config["quantization_config"].update(quant_method="modelopt"),
        "config-format",
        "config.json",
    ),
    "rows without scale": ("float-quantized", lambda c: c.tensors.pop(f"{Q}_scale"), "scale-missing", Q),
    "infinite scale of a row": (
        "float-quantized",
        lambda c: put(c, f"{Q}_scale", 0x7F80),
        "scale-nan",
        Q,
    ),
    "NaN code of a row": ("float-quantized", lambda c: put(c, Q, 0x7F), "code-nan", Q),
    "format of config, float-quantized": (
        "float-quantized",
        lambda c: c.config["quantization_config"].update(format="pack-quantized"),
        "config-format",
        "config.json",
    ),
    "NaN scale of a tensor": ("modelopt-fp8", lambda c: c.edit(f"{Q}_scale").fill(NAN), "scale-nan", Q),
    "tensor without scale": ("modelopt-fp8", lambda c: c.tensors.pop(f"{Q}_scale"), "scale-missing", Q),
    "experts without scales": ("gpt-oss", lambda c: c.tensors.pop(f"{GATE_UP}_scales"), "scale-missing", GATE_UP),
    "experts without codes": ("gpt-oss", lambda c: c.tensors.pop(f"{GATE_UP}_blocks"), "codes-missing", GATE_UP),
    "shape of scales of experts": ("gpt-oss", lambda c: cut_scales(c, f"{GATE_UP}_scales"), "scale-shape", GATE_UP),
    "shape of codes of experts": ("gpt-oss", lambda c: cut_scales(c, f"{GATE_UP}_blocks"), "codes-shape", GATE_UP),
    "NaN exponent of experts": ("gpt-oss", lambda c: put(c, f"{GATE_UP}_scales", 0xFF), "scale-nan", GATE_UP),
    "method of config, gpt-oss": (
        "gpt-oss",
        lambda c: c.config["quantization_config"].update(quant_method="fp8"),
        "config-format",
        "config.json",
    ),
    "hidden size": ("compressed-tensors", lambda c: set_config(c, hidden_size=512), "config-shape", Q),
    "vocabulary": (
        "compressed-tensors",
        lambda c: set_config(c, vocab_size=300),
        "config-shape",
        "model.embed_tokens.weight",
    ),
}


def faults(halfbyte, path):
    return json.loads(halfbyte("verify", path, "--json", "-").stdout)["faults"]


@pytest.mark.parametrize(
    "layout",
    ["compressed-tensors", "modelopt", "mxfp4", "fp8", "float-quantized", "modelopt-fp8", "gpt-oss", *LEFT_OUT],
)
def test_what_is_written_has_no_faults(halfbyte, quantized, layout):
    assert faults(halfbyte, quantized / layout) == []


def test_modules_may_be_listed_by_their_parents_and_endings(halfbyte, quantized, tmp_path):
    shutil.copytree(quantized / "bitsandbytes", tmp_path / "in")
    checkpoint = Checkpoint(tmp_path / "in")
    for name in ("model.layers.0", "0.mlp", "mlp.up_proj"):
        entry(checkpoint, llm_int8_skip_modules=["lm_head", name])
        checkpoint.save()
        assert faults(halfbyte, tmp_path / "in") == [], name


def test_patterns_of_gptq_may_say_otherwise(halfbyte, quantized, tmp_path):
    shutil.copytree(quantized / "gptq", tmp_path / "in")
    checkpoint = Checkpoint(tmp_path / "in")
    entry(checkpoint, group_size=32)
    checkpoint.save()
    halfbyte("verify", tmp_path / "in", expect=VERIFY)
    entry(checkpoint, dynamic={r"+:model\.layers\..*": {"group_size": 128}})
    checkpoint.save()
    assert faults(halfbyte, tmp_path / "in") == []


# Of a model with a dense layer beside those with experts, which transformers has stacked: they stay dense, and a list
# names their parent.
@pytest.mark.parametrize("options", ["nf4", "int4", "int4 --layout gptq", "int4 --asymmetric --layout awq", "affine4"])
def test_experts_that_are_written_have_no_faults(halfbyte, tmp_path, options):
    model = tmp_path / "model"  # its config
    moe.write_model(model, layers=2, experts=4, hidden=512, width=256, vocabulary=512, sparse=True)
    shapes = moe.shapes_of(0, 0, 512, 0) | moe.shapes_of(1, 4, 512, 256)
    shapes |= {f"model.layers.0.mlp.{name}_proj.weight": (512, 512) for name in ("gate", "up", "down")}
    shapes |= {"model.embed_tokens.weight": (512, 512), "lm_head.weight": (512, 512), "model.norm.weight": (512,)}
    del shapes["model.layers.0.mlp.gate.weight"]
    random = np.random.default_rng(0)
    tensors = {name: st.from_f32(random.standard_normal(shape, "f4"), "BF16") for name, shape in shapes.items()}
    config = json.loads((model / "config.json").read_text()) | {"mlp_only_layers": [0], "intermediate_size": 512}
    (tmp_path / "one").mkdir()
    st.write(tmp_path / "one" / "model.safetensors", tensors)
    (tmp_path / "one" / "config.json").write_text(json.dumps(config))
    halfbyte("quantize", tmp_path / "one", "-o", tmp_path / "out", "--format", *options.split())
    assert faults(halfbyte, tmp_path / "out") == []


@pytest.mark.parametrize("planted", FAULTS)
def test_planted_fault_is_found(halfbyte, quantized, tmp_path, planted):
    layout, plant, rule, name = FAULTS[planted]
    shutil.copytree(quantized / layout, tmp_path / "in")
    checkpoint = Checkpoint(tmp_path / "in")
    plant(checkpoint)
    checkpoint.save()
    document = json.loads(halfbyte("verify", tmp_path / "in", "--json", "-", expect=VERIFY).stdout)
    found = {(fault["rule"], fault["name"]) for fault in document["faults"]}
    if rule == "global-scale-mismatch":  # either is named
        assert {found_rule for found_rule, _ in found} == {rule}
    else:
        assert (rule, name) in found, found
        assert {found_rule for found_rule, _ in found} <= {rule, "config-shape"}, found


def test_damaged_file(halfbyte, quantized, tmp_path):
    shutil.copytree(quantized / "mxfp4", tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    document = json.loads(halfbyte("verify", tmp_path / "in", "--json", "-", expect=VERIFY).stdout)
    assert [fault["rule"] for fault in document["faults"]] == ["file"]


def test_incomplete_index(halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "in", "--format", "nvfp4", "--shard-size", "1MB")
    index = tmp_path / "in" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"].pop(f"{Q}_scale")
    index.write_text(json.dumps(content))
    document = json.loads(halfbyte("verify", tmp_path / "in", "--json", "-", expect=VERIFY).stdout)
    assert [fault["rule"] for fault in document["faults"]] == ["index"]


def rescale(codes, ratio):
    """E4M3 times ratio, to nearest even, not to 0."""
    ties = np.where(np.arange(126) % 2 == 0, np.arange(126), np.arange(1, 127))
    return np.maximum(nearest(E4M3[codes] * np.float32(ratio), E4M3, ties), 1).astype(np.uint8)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_repair(halfbyte, quantized, tmp_path, layout):
    """g = the larger weight_scale_2; the scales of the other are multiplied by own / g."""
    shutil.copytree(quantized / layout, tmp_path / "in")
    before = Checkpoint(tmp_path / "in")
    ending = "_scale_2" if layout == "modelopt" else "_global_scale"
    before.edit(f"{K}{ending}")[...] *= np.float32(0.3 if layout == "modelopt" else 3.7)
    before.save()
    halfbyte("verify", tmp_path / "in", expect=VERIFY)
    halfbyte("repair", tmp_path / "in", "-o", tmp_path / "out")
    halfbyte("verify", tmp_path / "out")
    after = Checkpoint(tmp_path / "out")
    assert after.config == before.config and set(after.tensors) == set(before.tensors)
    shared, own = before.tensors[f"{Q}{ending}"].data, before.tensors[f"{K}{ending}"].data
    ratio = own / shared if layout == "modelopt" else shared / own
    assert after.tensors[f"{K}{ending}"].data.tobytes() == shared.tobytes()
    expected = rescale(before.tensors[f"{K}_scale"].data, np.float32(ratio.reshape(())))
    assert np.array_equal(after.tensors[f"{K}_scale"].data, expected)
    changed = {name for name in after.tensors if after.tensors[name].data.tobytes() != before.tensors[name].data.tobytes()}
    assert changed == {f"{K}{ending}", f"{K}_scale"}


def test_numbers_beyond_any_list(halfbyte, quantized, tmp_path):
    shutil.copytree(quantized / "mxfp4", tmp_path / "in")
    c = Checkpoint(tmp_path / "in")
    c.tensors["model.layers.9223372036854775807.norm.weight"] = c.tensors["model.norm.weight"]
    c.save()
    document = json.loads(halfbyte("verify", c.path, "--json", "-", expect=VERIFY).stdout)
    assert {fault["rule"] for fault in document["faults"]} == {"layers-incomplete"}
    assert any(fault["name"] == "model.layers.9223372036854775807" for fault in document["faults"])


def test_repair_copies_all_files(halfbyte, quantized, tmp_path):
    shutil.copytree(quantized / "compressed-tensors", tmp_path / "in")
    c = Checkpoint(tmp_path / "in")
    c.edit(f"{Q}_global_scale")[0] *= 2
    c.save()
    (c.path / "tokenizer.model").write_bytes(np.random.default_rng(5).bytes(3 * 2**20 + 17))
    halfbyte("repair", c.path, "-o", tmp_path / "mended")
    assert sorted(f.name for f in (tmp_path / "mended").iterdir()) == sorted(f.name for f in c.path.iterdir())
    for file in c.path.iterdir():
        if file.suffix != ".safetensors":
            assert (tmp_path / "mended" / file.name).read_bytes() == file.read_bytes()


def test_nothing_to_repair(halfbyte, quantized, tmp_path):
    message = halfbyte("repair", quantized / "modelopt", "-o", tmp_path / "out", expect=USAGE).stderr
    assert "no weights of one product with several global scales" in message
    assert not (tmp_path / "out").exists()
