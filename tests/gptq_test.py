"""Models as the tools of GPTQ and AWQ write them, made by an independent writer: every value, and what is refused."""

import json

import numpy as np
import pytest

from independent import safetensors_io as st
from independent import words

BAD_INPUT, USAGE = 3, 2
P = "model.layers.0.mlp.up_proj"


def write_model(path, tensors, quantization=None, file="config.json", **config):
    path.mkdir()
    st.write(path / "model.safetensors", tensors)
    config = {"model_type": "llama"} | config
    if file == "config.json" and quantization is not None:
        config["quantization_config"] = quantization
    elif quantization is not None:
        (path / file).write_text(json.dumps(quantization))
    (path / "config.json").write_text(json.dumps(config))
    return path


def inspect(halfbyte, path):
    return json.loads(halfbyte("inspect", path, "--json", "-").stdout)


def random_weight(seed, out, width, size, bits, symmetric, order=False, least_zero=1):
    """codes, scales, zeros, groups of columns"""
    rng = np.random.default_rng(seed)
    num_groups = -(-width // size)
    groups = np.arange(width) // size
    if order:
        groups = rng.permutation(groups)
    codes = rng.integers(0, 2**bits, (out, width))
    zeros = np.full((out, num_groups), 2 ** (bits - 1))
    if not symmetric:
        zeros = rng.integers(least_zero, 2**bits, (out, num_groups))
        zeros[0, 0] = 2**bits - 1
    return codes, rng.standard_normal((out, num_groups)).astype(np.float16), zeros, groups


def gptq_config(bits, symmetric, **more):
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": symmetric, "desc_act": False} | more


def check_decoded(halfbyte, tmp_path, path, expected):
    """All values, and those of a copy that is compared."""
    halfbyte("dequantize", path, "-o", tmp_path / "dense", "--dtype", "f32", "--threads", 2)
    dense, _ = st.read_directory(tmp_path / "dense")
    for name, values in expected.items():
        assert dense[name].dtype == "F32" and np.array_equal(dense[name].data, values), name
    compared = json.loads(halfbyte("compare", path, tmp_path / "dense", "--json", "-").stdout)
    assert all(row["max_error"] == 0 and not row["problem"] for row in compared["rows"])


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_gptq(halfbyte, tmp_path, bits, version, symmetric):
    """Groups of 48, tails, one group, columns in any order; with and without the index of groups."""
    tensors, expected, orders = {}, {}, set()
    # Groups of 48 as the config says, the last one short; one group; other groups than the config says.
    shapes = [(64, 128, 48), (32, 96, 48), (32, 352, 48), (128, 64, 64), (416, 8192, 128)]
    for number, (out, width, size) in enumerate(shapes):
        for order, index in ((False, True), (False, False), (True, True)):
            name = f"model.layers.{number}.{'order' if order else 'plain'}{int(index)}_proj"
            weight = random_weight(number, out, width, size, bits, symmetric, order, 0 if version == 2 else 1)
            tensors |= words.gptq_tensors(name, *weight[:3], bits, weight[3], version, index=index)
            expected[f"{name}.weight"] = words.values(*weight)
            if order and width > size:
                orders.add(f"{name}.weight")
            if width == 8192:
                break  # more than a block once is enough
    name = "model.layers.9.large_order_proj"
    weight = random_weight(9, 416, 8192, 128, bits, symmetric, order=True)
    tensors |= words.gptq_tensors(name, *weight[:3], bits, weight[3], version)
    expected[f"{name}.weight"] = words.values(*weight)
    orders.add(f"{name}.weight")
    config = gptq_config(bits, symmetric, checkpoint_format="gptq" if version == 1 else "gptq_v2", group_size=48)
    path = write_model(tmp_path / "in", tensors, config)
    document = inspect(halfbyte, path)
    assert document["num_quantized"] == len(expected) == len(document["weights"]) and document["foreign"] == []
    for weight in document["weights"]:
        assert weight["layout"] == "gptq" and weight["dtype"] == "f16"
        assert weight["spec"]["format"] == f"int{bits}" and weight["spec"]["asymmetric"] != symmetric
        assert weight["note"] == ("act-order" if weight["name"] in orders else None)
    text = halfbyte("inspect", path).stdout
    assert f"{len(orders)} weights: act-order" in text
    check_decoded(halfbyte, tmp_path, path, expected)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("bits, form", [(3, "gptq_p"), (4, "gptq_p"), (5, "gptq"), (5, "gptq_v2"), (6, "gptq_v2")])
def test_planar(halfbyte, tmp_path, bits, form, symmetric):
    version = 1 if form == "gptq" else 2
    weight = random_weight(1, 64, 192, 32, bits, symmetric, order=True)
    tensors = words.gptq_tensors(P, *weight[:3], bits, weight[3], version, planar=True)
    path = write_model(tmp_path / "in", tensors, gptq_config(bits, symmetric, checkpoint_format=form))
    document = inspect(halfbyte, path)
    if form == "gptq_p" and not symmetric:  # what its zero points are is not known
        assert document["num_quantized"] == 0 and "it is not known which" in document["foreign"][0]["advice"]
        return
    assert document["num_quantized"] == 1
    check_decoded(halfbyte, tmp_path, path, {f"{P}.weight": words.values(*weight)})


def test_zero_points_of_symmetric_weights_tell_their_version(halfbyte, tmp_path):
    """There are models that say "gptq" and have the zero points of version 2."""
    for number, (version, said) in enumerate([(2, "gptq"), (1, "gptq_v2"), (1, None), (2, None), (1, "gptq")]):
        weight = random_weight(number, 64, 128, 32, 4, True)
        tensors = words.gptq_tensors(P, *weight[:3], 4, weight[3], version)
        more = {"checkpoint_format": said} if said else {}
        (tmp_path / str(number)).mkdir()
        path = write_model(tmp_path / str(number) / "in", tensors, gptq_config(4, True, **more))
        (found,) = inspect(halfbyte, path)["weights"]
        assert not found["spec"]["asymmetric"]
        wrong = said is not None and said != ("gptq" if version == 1 else "gptq_v2")
        note = f'zero points as gptq{"_v2" if version == 2 else ""} has them, though the config says "{said}"'
        assert found["note"] == (note if wrong else None)
        check_decoded(halfbyte, tmp_path / str(number), path, {f"{P}.weight": words.values(*weight)})
        report = halfbyte("dequantize", path, "-o", tmp_path / str(number) / "two").stdout
        assert ("zero points as gptq" in report) == wrong


def test_zero_points_field_by_field(halfbyte, tmp_path):
    """1 is added to each by itself; what is all ones is 0."""
    for bits in (2, 3, 4, 8):
        weight = random_weight(bits, 64, 128, 32, bits, False, least_zero=0)
        weight[2][1, 1] = 0
        tensors = words.gptq_tensors(P, *weight[:3], bits, weight[3], 1)
        (tmp_path / str(bits)).mkdir()
        path = write_model(tmp_path / str(bits) / "in", tensors, gptq_config(bits, False, checkpoint_format="gptq"))
        check_decoded(halfbyte, tmp_path / str(bits), path, {f"{P}.weight": words.values(*weight)})


def test_zero_points_that_nothing_tells(halfbyte, tmp_path):
    weight = random_weight(1, 64, 128, 32, 4, False)
    tensors = words.gptq_tensors(P, *weight[:3], 4, weight[3], 1)
    path = write_model(tmp_path / "in", tensors, gptq_config(4, False))
    (found,) = inspect(halfbyte, path)["foreign"]
    assert found["method"] == "gptq" and found["num_weights"] == 1 and found["example"] == f"{P}.qweight"
    for command in ("quantize", "dequantize"):
        message = halfbyte(command, path, "-o", tmp_path / "out", expect=BAD_INPUT).stderr
        assert 'no "checkpoint_format" says which these are' in message and '"gptq_v2"' in message
    alone = tmp_path / "alone.safetensors"
    st.write(alone, tensors)
    assert "checkpoint_format" in halfbyte("dequantize", alone, "-o", tmp_path / "d", expect=BAD_INPUT).stderr


@pytest.mark.parametrize("symmetric", [True, False])
def test_auto_round(halfbyte, tmp_path, symmetric):
    """Its zero points are those of version 1. Scales may be negative."""
    weight = random_weight(1, 64, 128, 32, 4, symmetric)
    tensors = words.gptq_tensors(P, *weight[:3], 4, weight[3], 1)
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
    path = write_model(tmp_path / "in", tensors, config | {"sym": symmetric})
    check_decoded(halfbyte, tmp_path, path, {f"{P}.weight": words.values(*weight)})


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json"])
def test_configs_of_old_tools(halfbyte, tmp_path, file):
    """Beside config.json; a dense output does not have it."""
    awq = file == "quant_config.json"
    weight = random_weight(1, 64, 128, 32, 4, False)
    if awq:
        tensors = words.awq_tensors(P, *weight[:3])
        config = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    else:
        tensors = words.gptq_tensors(P, *weight[:3], 4, weight[3], 1)
        config = {"bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
    path = write_model(tmp_path / "in", tensors, config, file, torch_dtype="bfloat16")
    (found,) = inspect(halfbyte, path)["weights"]
    assert found["layout"] == ("awq" if awq else "gptq") and found["dtype"] == "bf16"
    check_decoded(halfbyte, tmp_path, path, {f"{P}.weight": words.values(*weight)})
    assert not (tmp_path / "dense" / file).exists()


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("kind", ["zeros", "no zeros", "eights"])
def test_every_awq(halfbyte, tmp_path, kind, dtype):
    """Any number of columns, groups that the config does not have, one group, more than a block."""
    tensors, expected = {}, {}
    for number, (out, width, size) in enumerate([(64, 128, 32), (8, 77, 7), (24, 33, 33), (520, 4096, 128)]):
        name = f"model.layers.{number}.mlp.up_proj"
        codes, scales, zeros, groups = random_weight(number, out, width, size, 4, kind != "zeros", least_zero=0)
        scales = st.to_f32(st.from_f32(scales.astype(np.float32), dtype))
        tensors |= words.awq_tensors(name, codes, scales, None if kind == "no zeros" else zeros, dtype)
        expected[f"{name}.weight"] = words.values(codes, scales, zeros, groups)
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": kind != "no zeros", "version": "gemm"}
    path = write_model(tmp_path / "in", tensors, config)
    document = inspect(halfbyte, path)
    assert document["num_quantized"] == len(expected) and document["foreign"] == []
    assert {weight["spec"]["asymmetric"] for weight in document["weights"]} == {kind == "zeros"}
    check_decoded(halfbyte, tmp_path, path, expected)


def test_awq_with_a_short_group(halfbyte, tmp_path):
    weight = random_weight(3, 16, 100, 48, 4, False)
    config = {"quant_method": "awq", "bits": 4, "group_size": 48, "zero_point": True, "version": "gemm"}
    path = write_model(tmp_path / "in", words.awq_tensors(P, *weight[:3]), config)
    check_decoded(halfbyte, tmp_path, path, {f"{P}.weight": words.values(*weight)})


def of_bits(bits):
    weight = random_weight(1, 64, 128, 32, bits, True)
    return words.gptq_tensors(P, *weight[:3], bits, weight[3], 1, planar=bits == 7)


AWQ = words.awq_tensors(P, *random_weight(1, 64, 128, 32, 4, True)[:3])
AWQ8 = {
    f"{P}.qweight": st.Tensor("I32", np.zeros((128, 16), np.int32)),
    f"{P}.qzeros": st.Tensor("I32", np.zeros((4, 16), np.int32)),
    f"{P}.scales": st.Tensor("F16", np.zeros((4, 64), np.uint16).view(np.float16)),
}
NOT_READ = {
    "7 bits": (of_bits(7), gptq_config(7, True, checkpoint_format="gptq"), "gptq", "it has codes of 7 bits"),
    "marlin": (of_bits(4), gptq_config(4, True, checkpoint_format="marlin"), "gptq", 'its format "marlin" is not known'),
    "no zero points": (
        {name: tensor for name, tensor in of_bits(4).items() if "qzeros" not in name},
        gptq_config(4, True, checkpoint_format="gptq"),
        "gptq",
        "it has no zero points (.qzeros)",
    ),
    "gemv": (AWQ, {"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq", 'its format "gemv" is not known'),
    "awq of 8 bits": (AWQ8, {"quant_method": "awq", "bits": 8, "version": "gemm"}, "awq", "only 4 bits are read"),
    "another tool": (of_bits(4), {"quant_method": "nobody", "bits": 4}, "gptq", 'its quant_method is "nobody"'),
}


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_is_named(halfbyte, tmp_path, name):
    tensors, config, method, reason = NOT_READ[name]
    path = write_model(tmp_path / "in", tensors, config)
    document = inspect(halfbyte, path)
    (found,) = document["foreign"]
    assert found["method"] == method and reason in found["advice"] and document["num_quantized"] == 0
    for command in ("quantize", "dequantize"):
        assert reason in halfbyte(command, path, "-o", tmp_path / "out", expect=BAD_INPUT).stderr


def test_a_weight_that_is_read_beside_one_that_is_not(halfbyte, tmp_path):
    other = {name.replace(".0.", ".1."): tensor for name, tensor in of_bits(7).items()}
    path = write_model(tmp_path / "in", of_bits(4) | other, gptq_config(4, True, checkpoint_format="gptq"))
    document = inspect(halfbyte, path)
    assert document["num_quantized"] == 1 and document["foreign"][0]["num_weights"] == 1
    assert "7 bits" in halfbyte("dequantize", path, "-o", tmp_path / "out", expect=BAD_INPUT).stderr


def test_quantized_models_are_not_quantized_again(halfbyte, tmp_path):
    path = write_model(tmp_path / "in", of_bits(4), gptq_config(4, True, checkpoint_format="gptq"))
    message = halfbyte("quantize", path, "-o", tmp_path / "out", expect=BAD_INPUT).stderr
    assert f'weight "{P}.weight" is already quantized (layout gptq)' in message


@pytest.mark.parametrize("layout", ["gptq", "awq"])
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_file_that_stands_alone_says_what_it_is(halfbyte, tmp_path, layout, asymmetric):
    x = st.from_f32(np.random.default_rng(1).standard_normal((64, 256)).astype(np.float32), "BF16")
    st.write(tmp_path / "in.safetensors", {f"{P}.weight": x})
    arguments = ["--format", "int4", "--layout", layout, *["--asymmetric"] * asymmetric]
    halfbyte("quantize", tmp_path / "in.safetensors", "-o", tmp_path / "q.safetensors", *arguments)
    tensors, metadata = st.read(tmp_path / "q.safetensors")
    config = json.loads(metadata["quantization_config"])
    assert config["quant_method"] == layout and config["dtype"] == "bfloat16"
    halfbyte("dequantize", tmp_path / "q.safetensors", "-o", tmp_path / "dense.safetensors")
    dense, metadata = st.read(tmp_path / "dense.safetensors")
    assert dense[f"{P}.weight"].dtype == "BF16" and "quantization_config" not in metadata


def test_readers(halfbyte, tmp_path):
    """What is known of readers: none of these was run."""
    x = {
        f"model.layers.0.{name}.weight": st.from_f32(np.random.default_rng(1).standard_normal(shape) * 0.02, "BF16")
        for name, shape in {"self_attn.q_proj": (64, 128), "mlp.up_proj": (128, 128)}.items()
    }
    path = write_model(tmp_path / "in", x, architectures=["LlamaForCausalLM"])

    def quantize(*arguments, expect=0):
        command = ["quantize", path, "-o", tmp_path / "out", "--force", *arguments]
        return halfbyte(*command, "--json", "-", expect=expect)

    text = halfbyte("quantize", path, "-o", tmp_path / "out", "--format", "int4", "--layout", "awq").stdout
    assert text.splitlines()[-1].split(maxsplit=2)[2] == ", ".join(
        f"{reader} (by its rules, not run)" for reader in ("transformers-5", "transformers-4", "vllm")
    )
    report = json.loads(quantize("--format", "int4", "--layout", "gptq", "--asymmetric").stdout)
    verdicts = {verdict["reader"]: verdict for verdict in report["readers"]}
    assert verdicts["transformers-5"]["loads"] and not verdicts["vllm"]["loads"]
    message = quantize("--format", "int3", "--layout", "gptq", "--reader", "vllm", expect=USAGE).stderr
    assert "vllm reads gptq of 4 and 8 bits without zero points only" in message and "--force-layout" in message
