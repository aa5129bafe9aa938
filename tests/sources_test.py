"""Checkpoints as people have them: quantized by other tools, linked from a cache, in other containers."""

import json
import re
import subprocess

import numpy as np
import pytest

from conftest import TINY_LLAMA
from independent import safetensors_io as st
from independent import unpack

BAD_INPUT = 3


def zeros(dtype, *shape):
    return st.Tensor(dtype, np.zeros(shape, st.STORAGE[dtype]))


def dense(rows=64, cols=256):
    return st.from_f32(np.random.default_rng(0).standard_normal((rows, cols)) * 0.02, "BF16")


def write_model(path, tensors, config=None, **files):
    path.mkdir()
    st.write(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | (config or {})))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def inspect(halfbyte, path):
    return json.loads(halfbyte("inspect", path, "--json", "-").stdout)


# Quantized by other tools

P = "model.layers.0.mlp.up_proj"
E = "model.layers.0.mlp.experts.gate_up_proj"

# Of a weight [64, 256], in 7 and in 8 bits, which are not read.
GPTQ = {
    f"{P}.qweight": zeros("I32", 56, 64),
    f"{P}.qzeros": zeros("I32", 2, 14),
    f"{P}.scales": zeros("F16", 2, 64),
    f"{P}.g_idx": zeros("I32", 256),
}
AWQ = {
    f"{P}.qweight": zeros("I32", 256, 16),
    f"{P}.qzeros": zeros("I32", 2, 16),
    f"{P}.scales": zeros("F16", 2, 64),
}
FP8_BLOCKS = {f"{P}.weight": zeros("F8_E4M3", 256, 384), f"{P}.weight_scale_inv": zeros("F32", 2, 3)}
FP8_OTHER = FP8_BLOCKS | {f"{P}.weight_scale_inv": zeros("F32", 4, 6)}  # of blocks that no config names
FP8_CHANNELS = {f"{P}.weight": zeros("F8_E4M3", 64, 256), f"{P}.weight_scale": zeros("BF16", 64, 1)}
FP8_TENSOR = {
    f"{P}.weight": zeros("F8_E4M3", 64, 256),
    f"{P}.weight_scale": zeros("F32"),
    f"{P}.input_scale": zeros("F32"),
}
FP8_ROWS = FP8_TENSOR | {f"{P}.weight_scale": zeros("F32", 64)}  # of one axis: not read
INT8 = {f"{P}.weight": zeros("I8", 64, 256), f"{P}.weight_scale": zeros("BF16", 64, 1)}
LLM_INT8 = {
    f"{P}.weight": zeros("I8", 64, 256),
    f"{P}.SCB": zeros("F32", 64),
    f"{P}.weight_format": zeros("U8"),
}
NVFP4 = {
    f"{P}.weight_packed": zeros("U8", 64, 128),
    f"{P}.weight_scale": zeros("F8_E4M3", 64, 16),
    f"{P}.weight_global_scale": zeros("F32", 1),
    f"{P}.input_global_scale": zeros("F32", 1),
}
NVFP4_MODELOPT = {
    f"{P}.weight": zeros("U8", 64, 128),
    f"{P}.weight_scale": zeros("F8_E4M3", 64, 16),
    f"{P}.weight_scale_2": zeros("F32"),
    f"{P}.input_scale": zeros("F32"),
}
MXFP4 = {f"{P}.weight_packed": zeros("U8", 64, 128), f"{P}.weight_scale": zeros("U8", 64, 8)}


def random_bytes(dtype, *shape, below=256, seed=1):
    return st.Tensor(dtype, np.random.default_rng(seed).integers(0, below, shape, np.uint8))


def mlx(words, groups):
    return {f"{P}.weight": zeros("U32", 64, words), f"{P}.scales": zeros("U8", 64, groups)}


def of_module(codes, scales):
    """As DeepSeek-V4 names them."""
    return {f"{P}.weight": codes, f"{P}.scale": scales}


def compressed(*groups):
    """A config of compressed-tensors: for each group its format, weights, and input activations."""
    entry = {"quant_method": "compressed-tensors", "format": groups[0][0] if len(groups) == 1 else "mixed-precision"}
    entry["config_groups"] = {
        f"group_{i}": {"targets": ["Linear"], "format": form, "weights": weights, "input_activations": activations}
        for i, (form, weights, activations) in enumerate(groups)
    }
    return {"quantization_config": entry}


CHANNEL_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None}
DYNAMIC_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
CHANNEL_INT8 = CHANNEL_FP8 | {"type": "int"}
GROUP_FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
SCHEME_FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}

# Tensors, what config.json (or other files) say: method, layout, source, parameters, a word of the advice.
FOREIGN = {
    "gptq": (
        GPTQ,
        {
            "quantization_config": {
                "quant_method": "gptq",
                "bits": 7,
                "group_size": 128,
                "sym": True,
                "desc_act": False,
                "checkpoint_format": "gptq",
                "damp_percent": 0.01,
            }
        },
        ("gptq", "gptq", "config.json"),
        {"bits": 7, "group_size": 128, "sym": True, "desc_act": False, "checkpoint_format": "gptq"},
    ),
    "gptq-tensors": (GPTQ, {}, ("gptq", "gptq", "tensors"), {"bits": 7, "group_size": 128}),
    "awq": (
        AWQ,
        {
            "quantization_config": {
                "quant_method": "awq",
                "bits": 8,
                "group_size": 128,
                "zero_point": True,
                "version": "gemm",
            }
        },
        ("awq", "awq", "config.json"),
        {"bits": 8, "group_size": 128, "zero_point": True, "version": "gemm"},
    ),
    "awq-tensors": (AWQ, {}, ("awq", "awq", "tensors"), {"bits": 8, "group_size": 128}),
    "fp8-blocks": (
        FP8_OTHER,
        {
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e5m2",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
            }
        },
        ("fp8", "fp8", "config.json"),
        {"weight_block_size": [128, 128], "fmt": "e5m2", "activation_scheme": "dynamic"},
    ),
    "fp8-blocks-tensors": (FP8_OTHER, {}, ("fp8", "fp8", "tensors"), {"weight_block_size": [64, 64]}),
    "fp8-tensors": (FP8_ROWS, {}, ("fp8", None, "tensors"), {"granularity": "channel"}),
    "fp8-modelopt": (
        FP8_ROWS,
        {"hf_quant_config": {"quantization": {"quant_algo": "FP8_PB_WO", "kv_cache_quant_algo": "FP8"}}},
        ("fp8", "modelopt", "hf_quant_config.json"),
        {"quant_algo": "FP8_PB_WO", "kv_cache_quant_algo": "FP8", "granularity": "channel"},
    ),
    "fp8-experts": (
        {E: zeros("F8_E4M3", 2, 256, 128), f"{E}_scale_inv": zeros("F32", 2, 4, 2)},
        {},
        ("fp8", "fp8", "tensors"),
        {"weight_block_size": [64, 64]},
    ),
    "w8a8": (
        INT8,
        compressed(("int-quantized", CHANNEL_INT8, DYNAMIC_FP8 | {"type": "int"})),
        ("int8", "compressed-tensors", "config.json"),
        SCHEME_FP8 | {"type": "int", "activations": "int8 token dynamic"},
    ),
    "w8a8-tensors": (INT8, {}, ("int8", None, "tensors"), {"granularity": "channel"}),
    "llm.int8": (
        LLM_INT8,
        {
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "load_in_8bit": True,
                "load_in_4bit": False,
                "llm_int8_threshold": 6.0,
            }
        },
        ("llm.int8", "bitsandbytes", "config.json"),
        {"llm_int8_threshold": 6.0, "granularity": "channel"},
    ),
    "llm.int8-tensors": (LLM_INT8, {}, ("llm.int8", "bitsandbytes", "tensors"), {"granularity": "channel"}),
    "gpt-oss": (
        {"block.0.mlp.mlp1_weight.blocks": zeros("U8", 2, 64, 8, 16), "block.0.mlp.mlp1_weight.scales": zeros("U8", 2, 64, 8)},
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
        ("mxfp4", "gpt-oss", "tensors"),
        {"group_size": 32},
    ),
    "mlx-another-mode": (
        mlx(48, 8),
        {"quantization": {"group_size": 32, "bits": 6, "mode": "mxfp6"}},
        ("mxfp6", "mlx", "config.json"),
        {"bits": 6, "group_size": 32, "mode": "mxfp6"},
    ),
    "mlx-another-mode-of-a-shape": (
        mlx(64, 8),
        {"quantization": {"group_size": 32, "bits": 8, "mode": "mxfp8_e5m2"}},
        ("mxfp8_e5m2", "mlx", "config.json"),
        {"bits": 8, "group_size": 32, "mode": "mxfp8_e5m2"},
    ),
    "mlx-global-scales": (
        mlx(32, 16) | {f"{P}.global_scale": zeros("F32", 64)},
        {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4", P: {"group_size": 16, "bits": 4, "mode": "nvfp4", "global_scale": True}}},
        ("nvfp4", "mlx", "tensors"),
        {"group_size": 16},
    ),
    "mlx-tensors": (mlx(48, 8), {}, ("unknown", "mlx", "tensors"), {}),
    "fp8-scale-of-module": (
        of_module(zeros("F8_E4M3", 256, 384), zeros("F32", 4, 6)),
        {},
        ("fp8", "fp8", "tensors"),
        {"weight_block_size": [64, 64]},
    ),
    "fp8-one-scale-of-module": (of_module(zeros("F8_E4M3", 64, 256), zeros("F32")), {}, ("fp8", "fp8", "tensors"), {"granularity": "tensor"}),
    "mxfp4-groups-of-128": (
        of_module(zeros("I8", 64, 128), zeros("F8_E8M0", 64, 2)),
        {},
        ("mxfp4", "fp8", "tensors"),
        {"group_size": 128},
    ),
    "mxfp8-groups-of-16": (
        {f"{P}.weight": zeros("F8_E4M3", 64, 256), f"{P}.weight_scale": zeros("U8", 64, 16)},
        {},
        ("fp8", None, "tensors"),
        {"group_size": 16},
    ),
    "another-tool": (
        {f"{P}.Wf": zeros("U8", 4)},
        {"quantization_config": {"quant_method": "vptq", "bits": 2}},
        ("vptq", "vptq", "config.json"),
        {"bits": 2},
    ),
    "auto-round": (
        GPTQ,
        {
            "quantization_config": {
                "quant_method": "auto-round",
                "packing_format": "auto_round:auto_gptq",
                "bits": 7,
                "group_size": 128,
                "sym": True,
            }
        },
        ("gptq", "auto-round", "config.json"),
        {"bits": 7, "group_size": 128, "sym": True, "packing_format": "auto_round:auto_gptq"},
    ),
    "awq-gemv": (  # in a form that no row knows
        {
            f"{P}.qweight": zeros("I32", 64, 32),
            f"{P}.scales": zeros("F16", 64, 8),
        },
        {"quantization_config": {"quant_method": "awq", "version": "gemv"}},
        ("awq", "awq", "config.json"),
        {"version": "gemv", "dtype": "I32"},
    ),
    "traces": ({f"{P}.SCB": zeros("F32", 64)}, {}, ("unknown", None, "tensors"), {"dtype": "F32"}),
}


@pytest.fixture(params=FOREIGN)
def foreign(request, tmp_path):
    tensors, config, names, parameters = FOREIGN[request.param]
    files = {name: content for name, content in config.items() if name == "hf_quant_config"}
    config = {name: content for name, content in config.items() if name not in files}
    tensors = tensors | {"lm_head.weight": dense(), "model.layers.1.mlp.up_proj.weight": dense()}
    return write_model(tmp_path / "in", tensors, config, **files), names, parameters


def test_foreign_quantization_is_named(halfbyte, foreign):
    path, (method, layout, source), parameters = foreign
    document = inspect(halfbyte, path)
    (found,) = document["foreign"]
    assert (found["method"], found["layout"], found["source"]) == (method, layout, source)
    assert found["parameters"] == parameters
    # All tensors of the quantized weight are marked, and no other.
    marked = {weight["name"] for weight in document["weights"] if weight["foreign"] == method}
    unmarked = {weight["name"] for weight in document["weights"] if weight["foreign"] is None}
    unknown = {f"{P}.Wf"} | ({f"{P}.scales"} if parameters.get("version") == "gemv" else set())
    assert unmarked - unknown == {"lm_head.weight", "model.layers.1.mlp.up_proj.weight"}
    assert found["num_weights"] == (1 if marked else 0) and (found["example"] in marked or not marked)
    assert document["num_quantized"] == 0
    text = halfbyte("inspect", path).stdout
    line = re.search(r"^not read +(.*)$", text, re.M)[1]
    assert line.startswith(method) and line.endswith(f"; from {source}")
    for key, value in parameters.items():
        value = value if isinstance(value, str) else json.dumps(value).replace(" ", "")
        assert f", {key} {value}" in line, line
    assert found["advice"] in text
    assert re.search(rf"^dense +{len(unmarked)} weights$", text, re.M)


@pytest.mark.parametrize("command", ["quantize", "dequantize"])
def test_foreign_quantization_is_refused(halfbyte, foreign, tmp_path, command):
    path, (method, _, source), _ = foreign
    message = halfbyte(command, path, "-o", tmp_path / "out", expect=BAD_INPUT).stderr
    assert f"is already quantized ({method}" in message and "halfbyte does not read that: " in message
    assert f"; from {source})" in message
    assert not (tmp_path / "out").exists()


def test_foreign_quantization_beside_a_layout(halfbyte, tmp_path):
    """Modules of mlx in several modes: those that are read are read, and the others not lost in silence."""
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "mlx", "--format", "affine4", "--keep-embeddings")
    tensors, metadata = st.read_directory(tmp_path / "mlx")
    path = tmp_path / "mixed"
    other = {"group_size": 32, "bits": 6, "mode": "mxfp6"}
    write_model(
        path, tensors | mlx(48, 8), {"quantization": {"group_size": 64, "bits": 4, "mode": "affine", P: other}}
    )
    (path / "model.safetensors").unlink()
    del tensors[f"{P}.biases"]
    st.write(path / "model.safetensors", tensors | mlx(48, 8), metadata)
    document = inspect(halfbyte, path)
    assert document["num_quantized"] == 27
    assert [(found["method"], found["num_weights"]) for found in document["foreign"]] == [("mxfp6", 1)]
    message = halfbyte("dequantize", path, "-o", tmp_path / "out", expect=BAD_INPUT).stderr
    assert "mxfp6 of mlx" in message
    assert "rows of 48 words and 8 scales of a byte" in message and "says mode mxfp6" in message


def test_groups_of_another_size_beside_blocks(halfbyte, tmp_path):
    """The config says what is read, and not what else there is."""
    other = {name.replace("up_proj", "down_proj"): tensor for name, tensor in of_module(zeros("I8", 64, 128), zeros("F8_E8M0", 64, 2)).items()}
    config = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
    path = write_model(tmp_path / "in", FP8_BLOCKS | other, config)
    document = inspect(halfbyte, path)
    (found,) = document["foreign"]
    assert document["num_quantized"] == 1 and (found["method"], found["source"], found["parameters"]) == ("mxfp4", "tensors", {"group_size": 128})
    faults = json.loads(halfbyte("verify", path, "--json", "-", expect=4).stdout)["faults"]
    assert [fault["rule"] for fault in faults] == ["scale-shape"]


def with_random_values(tensors):
    """The tensors of a weight, with values: scales between 2^-6 and 2^0, or about that."""
    values = {}
    for name, tensor in tensors.items():
        if tensor.dtype == "F8_E5M2":  # any but NaN and infinity
            codes = random_bytes("U8", *tensor.data.shape).data
            values[name] = st.Tensor("F8_E5M2", np.where(codes & 0x7C == 0x7C, 0x3D, codes).astype(np.uint8))
        elif tensor.dtype == "F8_E4M3" and not name.endswith("_scale"):  # codes: any but NaN
            codes = random_bytes("U8", *tensor.data.shape).data
            values[name] = st.Tensor("F8_E4M3", np.where(codes & 0x7F == 0x7F, 0x10, codes).astype(np.uint8))
        elif tensor.dtype in ("BF16", "F32") and "global" not in name and "scale_2" not in name:
            scales = np.random.default_rng(3).uniform(0.5, 2, tensor.data.shape).astype(np.float32)
            values[name] = st.Tensor(tensor.dtype, st.from_f32(scales, tensor.dtype).data.reshape(tensor.data.shape))
        elif tensor.dtype == "F8_E4M3":
            values[name] = st.Tensor("F8_E4M3", random_bytes("U8", *tensor.data.shape, below=48, seed=2).data + 8)
        elif tensor.dtype == "F32":
            values[name] = st.Tensor("F32", np.full(tensor.data.shape, 0.37 if "_scale_2" in name else 2.7, "<f4"))
        elif tensor.dtype == "F8_E8M0":  # and the least that there is
            exponents = random_bytes("U8", *tensor.data.shape, below=8, seed=2).data + 120
            exponents.reshape(-1)[-1] = 0
            values[name] = st.Tensor("F8_E8M0", exponents)
        elif tensor.dtype == "U32":  # bytes that are no NaN of E4M3
            codes = random_bytes("U8", *tensor.data.shape[:-1], 4 * tensor.data.shape[-1]).data
            values[name] = st.Tensor("U32", np.where(codes & 0x7F == 0x7F, 0x10, codes).astype(np.uint8).view("<u4"))
        elif tensor.dtype == "I8":
            values[name] = st.Tensor("I8", random_bytes("U8", *tensor.data.shape).data.view(np.int8))
        elif name.endswith(".scales"):  # of E8M0 or of E4M3
            values[name] = st.Tensor("U8", random_bytes("U8", *tensor.data.shape, below=20, seed=2).data + 100)
        elif name.endswith(("_scale", "_scales", "_scale_inv")):
            values[name] = st.Tensor("U8", random_bytes("U8", *tensor.data.shape, below=8, seed=2).data + 120)
        else:
            values[name] = random_bytes("U8", *tensor.data.shape)
    return values


BLOCK_FLOATS = {
    "nvfp4": (NVFP4, compressed(("nvfp4-pack-quantized", GROUP_FP4 | {"symmetric": True}, None))),
    "mxfp4": (
        MXFP4,
        compressed(
            (
                "mxfp4-pack-quantized",
                GROUP_FP4 | {"symmetric": True, "strategy": "group", "group_size": 32},
                None,
            )
        ),
    ),
    "modelopt": (NVFP4_MODELOPT, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}),
}
FP8_CONFIG = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}


def fp8_config(block, **values):
    return {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": block} | values}


BLOCK_FP8 = CHANNEL_FP8 | {"strategy": "block", "block_structure": [128, 128]}
FP8 = {
    "fp8-channels": (FP8_CHANNELS, compressed(("float-quantized", CHANNEL_FP8, DYNAMIC_FP8))),
    "fp8-tensor": (
        FP8_CHANNELS | {f"{P}.weight_scale": zeros("F32", 1), f"{P}.input_scale": zeros("F32", 1)},
        compressed(("float-quantized", CHANNEL_FP8 | {"strategy": "tensor"}, None)),
    ),
    "fp8-modelopt": (FP8_TENSOR, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}),
    "fp8-ct-blocks": (
        {f"{P}.weight": zeros("F8_E4M3", 300, 384), f"{P}.weight_scale": zeros("BF16", 3, 3)},
        compressed(("float-quantized", BLOCK_FP8, None)),
    ),
    "fp8-blocks": (FP8_BLOCKS, FP8_CONFIG),
    "fp8-short-blocks": (
        {f"{P}.weight": zeros("F8_E4M3", 300, 256), f"{P}.weight_scale_inv": zeros("F32", 3, 2)},
        FP8_CONFIG,
    ),
    "fp8-ue8m0": (FP8_BLOCKS | {f"{P}.weight_scale_inv": zeros("F8_E8M0", 2, 3)}, fp8_config([128, 128], scale_fmt="ue8m0")),
    "fp8-ue8m0-blocks": (
        {f"{P}.weight": zeros("F8_E4M3", 300, 384), f"{P}.weight_scale_inv": zeros("F8_E8M0", 5, 3)},
        fp8_config([64, 160], scale_fmt="ue8m0"),
    ),
    "fp8-other-blocks": (
        {f"{P}.weight": zeros("F8_E4M3", 300, 384), f"{P}.weight_scale_inv": zeros("BF16", 5, 3)},
        fp8_config([64, 128]),
    ),
    "fp8-blocks-of-rows": (
        {f"{P}.weight": zeros("F8_E4M3", 48, 256), f"{P}.weight_scale_inv": zeros("F32", 48, 2)},
        fp8_config([1, 128]),
    ),
    "fp8-ct-other-blocks": (
        {f"{P}.weight": zeros("F8_E4M3", 300, 384), f"{P}.weight_scale": zeros("F32", 10, 6)},
        compressed(("float-quantized", BLOCK_FP8 | {"block_structure": [32, 64]}, None)),
    ),
    "fp8-e5m2": (FP8_BLOCKS | {f"{P}.weight": zeros("F8_E5M2", 256, 384)}, fp8_config([128, 128], fmt="e5m2")),
    "fp8-e5m2-rows": (
        FP8_CHANNELS | {f"{P}.weight": zeros("F8_E5M2", 64, 256)},
        compressed(("float-quantized", CHANNEL_FP8, None)),
    ),
    "fp8-e5m2-modelopt": (
        FP8_TENSOR | {f"{P}.weight": zeros("F8_E5M2", *FP8_TENSOR[f"{P}.weight"].data.shape)},
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
    ),
    "fp8-one-scale": (
        {f"{P}.weight": zeros("F8_E4M3", 64, 256), f"{P}.weight_scale_inv": zeros("BF16"), f"{P}.activation_scale": zeros("BF16")},
        fp8_config(None, activation_scheme="static"),
    ),
}


GROUP_FP8 = CHANNEL_FP8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
ROWS_FP8 = {f"{P}.weight": zeros("F8_E4M3", 64, 256)}


def mlx_mode(mode, bits, group_size, *shape):
    """A weight of this shape, as mlx-lm writes it."""
    tensors = {f"{P}.weight": zeros("U32", *shape[:-1], shape[-1] * bits // 32), f"{P}.scales": zeros("U8", *shape[:-1], shape[-1] // group_size)}
    return tensors, {"quantization": {"group_size": group_size, "bits": bits, "mode": mode}}


# Forms that are read only: tensors, config, format.
ONLY_READ = {
    "deepseek-v4": (
        of_module(zeros("F8_E4M3", 256, 384), zeros("F8_E8M0", 2, 3)),
        fp8_config([128, 128], scale_fmt="ue8m0") | {"expert_dtype": "fp4"},
        "fp8",
    ),
    "deepseek-v4-base": (of_module(zeros("F8_E4M3", 256, 384), zeros("F32", 2, 3)), fp8_config([128, 128]), "fp8"),
    "deepseek-v4.1": (of_module(zeros("F8_E4M3", 300, 384), zeros("F8_E8M0", 10, 12)), fp8_config([32, 32], scale_fmt="ue8m0"), "fp8"),
    "deepseek-v4.1-rows": (of_module(zeros("F8_E4M3", 300, 256), zeros("F8_E8M0", 300, 8)), fp8_config([32, 32], scale_fmt="ue8m0"), "fp8"),
    "deepseek-v4-experts": (of_module(zeros("I8", 64, 128), zeros("F8_E8M0", 64, 8)), fp8_config([128, 128]) | {"expert_dtype": "fp4"}, "mxfp4"),
    "mxfp8": (ROWS_FP8 | {f"{P}.weight_scale": zeros("U8", 64, 8)}, compressed(("mxfp8-quantized", GROUP_FP8, DYNAMIC_FP8)), "fp8"),
    "mxfp8-modelopt": (
        ROWS_FP8 | {f"{P}.weight_scale": zeros("U8", 64, 8)},
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}},
        "fp8",
    ),
    "mxfp8-sglang": (ROWS_FP8 | {f"{P}.weight_scale_inv": zeros("U8", 64, 8)}, fp8_config([1, 32], quant_method="mxfp8", scale_fmt="ue8m0"), "fp8"),
    "mlx-mxfp4": (*mlx_mode("mxfp4", 4, 32, 64, 256), "mxfp4"),
    "mlx-mxfp8": (*mlx_mode("mxfp8", 8, 32, 64, 256), "fp8"),
    "mlx-nvfp4": (*mlx_mode("nvfp4", 4, 16, 64, 256), "nvfp4"),
    "mlx-mxfp8-experts": (*mlx_mode("mxfp8", 8, 32, 3, 20, 64), "fp8"),
}
SOURCES = BLOCK_FLOATS | FP8 | {form: (tensors, config) for form, (tensors, config, _) in ONLY_READ.items() if "mlx-mxfp8-experts" != form}


@pytest.mark.parametrize("form", SOURCES)
def test_published_models_are_a_source(halfbyte, tmp_path, form):
    """Decoded by rows and quantized: with codes of 8 bits the error is small against the decoded weight."""
    tensors, config = SOURCES[form]
    tensors = with_random_values(tensors)
    hf_quant_config = {"quantization": {"quant_algo": "NVFP4"}} if form == "modelopt" else None
    files = {"hf_quant_config": hf_quant_config} if hf_quant_config else {}
    path = write_model(tmp_path / "in", tensors | {"lm_head.weight": dense()}, config, **files)
    document = inspect(halfbyte, path)
    assert document["num_quantized"] == 1 and document["foreign"] == []
    (weight,) = unpack.weights(tensors, config).values()

    halfbyte("dequantize", path, "-o", tmp_path / "dense", "--dtype", "f32")
    decoded, _ = st.read_directory(tmp_path / "dense")
    assert set(decoded) == {f"{P}.weight", "lm_head.weight"}
    assert np.array_equal(decoded[f"{P}.weight"].data, weight.weights)

    report = json.loads(
        halfbyte("quantize", path, "-o", tmp_path / "int8", "--format", "int8", "--json", "-").stdout
    )
    (row,) = [row for row in report["weights"] if row["quantized"]]
    name = ONLY_READ[form][2] if form in ONLY_READ else "fp8" if form in FP8 else "mxfp4" if form == "mxfp4" else "nvfp4"
    layout = config.get("quantization_config", {"quant_method": "mlx"})["quant_method"]
    layout = {"mxfp8-modelopt": "compressed-tensors", "mxfp8-sglang": "fp8"}.get(form, layout)
    assert row["note"] == f"decoded from {name} ({layout}), against which the error is"
    quantized, _ = st.read_directory(tmp_path / "int8")
    output = json.loads((tmp_path / "int8" / "config.json").read_text())
    assert output["quantization_config"]["format"] == "pack-quantized"
    assert not (tmp_path / "int8" / "hf_quant_config.json").exists() and "expert_dtype" not in output
    (again,) = unpack.weights(quantized, output).values()
    source = st.to_f32(st.from_f32(weight.weights, "BF16"))
    error = np.abs(again.weights - source).max() / np.abs(source).max()
    assert error < 1 / 127
    assert quantized["lm_head.weight"].data.tobytes() == dense().data.tobytes()


def test_conversions_between_block_floats_keep_codes_and_scales(halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "ct", "--format", "nvfp4")
    halfbyte("convert", tmp_path / "ct", "-o", tmp_path / "modelopt", "--layout", "modelopt")
    halfbyte("convert", tmp_path / "modelopt", "-o", tmp_path / "back", "--layout", "compressed-tensors")
    halfbyte("convert", tmp_path / "ct", "-o", tmp_path / "own", "--layout", "halfbyte")
    halfbyte("convert", tmp_path / "own", "-o", tmp_path / "same", "--layout", "compressed-tensors")
    ct, modelopt, back, same = (st.read_directory(tmp_path / each)[0] for each in ("ct", "modelopt", "back", "same"))
    names = [name.removesuffix("_packed") for name in ct if name.endswith("_packed")]
    assert len(names) == 28 and set(same) == set(ct) == set(back)
    for name in names:
        assert modelopt[name].data.tobytes() == ct[f"{name}_packed"].data.tobytes()
        assert modelopt[f"{name}_scale"].data.tobytes() == ct[f"{name}_scale"].data.tobytes()
        reciprocal = np.float32(1) / ct[f"{name}_global_scale"].data[0]
        assert modelopt[f"{name}_scale_2"].data[()] == reciprocal
        assert back[f"{name}_global_scale"].data[0] == np.float32(1) / reciprocal
    for name in ct:
        assert same[name].data.tobytes() == ct[name].data.tobytes(), name
        if not name.endswith("_global_scale"):
            assert back[name].data.tobytes() == ct[name].data.tobytes(), name


def test_conversions_between_fp8_keep_codes_and_scales(halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "fp8", "--format", "fp8", "--layout", "fp8")
    halfbyte("convert", tmp_path / "fp8", "-o", tmp_path / "ct", "--layout", "compressed-tensors")
    halfbyte("convert", tmp_path / "ct", "-o", tmp_path / "own", "--layout", "halfbyte")
    halfbyte("convert", tmp_path / "own", "-o", tmp_path / "back", "--layout", "fp8")
    config = json.loads((tmp_path / "ct" / "config.json").read_text())
    weights = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights["strategy"] == "block" and weights["block_structure"] == [128, 128]
    fp8, ct, back = (st.read_directory(tmp_path / each)[0] for each in ("fp8", "ct", "back"))
    names = [name.removesuffix("_scale_inv") for name in fp8 if name.endswith("_scale_inv")]
    assert len(names) == 28 and set(fp8) == set(back)
    for name in names:
        assert ct[name].data.tobytes() == fp8[name].data.tobytes()
        assert st.to_f32(ct[f"{name}_scale"]).tobytes() == fp8[f"{name}_scale_inv"].data.tobytes()
    for name in fp8:
        assert back[name].data.tobytes() == fp8[name].data.tobytes(), name
    # Rows with scales of their own are no blocks.
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "rows", "--format", "fp8", "--layout", "halfbyte", "--group-size", 128)
    message = halfbyte("convert", tmp_path / "rows", "-o", tmp_path / "no", "--layout", "fp8", expect=BAD_INPUT).stderr
    assert "layout fp8: has a scale for a group of 128 rows, in which they differ" in message


OTHER_BLOCKS = ("fp8-ue8m0", "fp8-ue8m0-blocks", "fp8-other-blocks", "fp8-blocks-of-rows", "fp8-ct-other-blocks", "fp8-one-scale")


@pytest.mark.parametrize("form", OTHER_BLOCKS)
def test_forms_of_fp8_that_are_read_and_not_written(halfbyte, tmp_path, form):
    """Codes and scales stay where a layout has the blocks, and the report names what it has."""
    tensors, config = FP8[form]
    tensors = with_random_values(tensors)
    path = write_model(tmp_path / "in", tensors, config)
    halfbyte("verify", path)
    (weight,) = unpack.weights(tensors, config).values()
    block = {"fp8-ue8m0": "128x128", "fp8-ue8m0-blocks": "64x160", "fp8-other-blocks": "64x128", "fp8-ct-other-blocks": "32x64"}
    (found,) = [found for found in inspect(halfbyte, path)["weights"] if found["layout"]]
    words = {"fp8-blocks-of-rows": "128", "fp8-one-scale": "tensor"}
    extents = [int(extent) for extent in block[form].split("x")] if form in block else None
    assert found["spec"]["block_size"] == extents and found["spec"]["scale_dtype"] in ("f32", "bf16")
    row = next(line for line in halfbyte("inspect", path).stdout.splitlines() if line.startswith(f"{P}.weight"))
    assert (block | words)[form] in row.split()
    halfbyte("convert", path, "-o", tmp_path / "own", "--layout", "halfbyte")
    own, _ = st.read_directory(tmp_path / "own")
    (again,) = unpack.weights(own, {}).values()
    assert np.array_equal(again.weights, weight.weights) and np.array_equal(again.codes, weight.codes)
    if form == "fp8-ue8m0":
        halfbyte("convert", path, "-o", tmp_path / "out", "--layout", "fp8")
        out, _ = st.read_directory(tmp_path / "out")
        assert out[f"{P}.weight"].data.tobytes() == tensors[f"{P}.weight"].data.tobytes()
        scales = np.ldexp(np.float32(1), tensors[f"{P}.weight_scale_inv"].data.astype(np.int32) - 127)
        assert np.array_equal(out[f"{P}.weight_scale_inv"].data, scales)
    else:
        message = halfbyte("convert", path, "-o", tmp_path / "out", "--layout", "fp8", expect=BAD_INPUT).stderr
        assert "layout fp8: has" in message and not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ONLY_READ)
def test_forms_that_are_only_read_keep_their_codes(halfbyte, tmp_path, form):
    """Every code and scale is in halfbyte and, of block floats, in compressed-tensors; the input has no faults."""
    tensors, config, format = ONLY_READ[form]
    tensors = with_random_values(tensors)
    path = write_model(tmp_path / "in", tensors, config)
    halfbyte("verify", path)
    (weight,) = unpack.weights(tensors, config).values()
    (found,) = [found for found in inspect(halfbyte, path)["weights"] if found["layout"]]
    assert found["name"] == f"{P}.weight" and found["shape"] == list(weight.weights.shape)
    assert found["spec"]["format"] == format and found["spec"]["group_size"] == weight.spec["group_size"]
    halfbyte("convert", path, "-o", tmp_path / "own", "--layout", "halfbyte")
    (again,) = unpack.weights(st.read_directory(tmp_path / "own")[0], {}).values()
    assert np.array_equal(again.weights, weight.weights) and np.array_equal(again.codes, weight.codes)
    if format != "fp8":
        halfbyte("convert", path, "-o", tmp_path / "ct", "--layout", "compressed-tensors", "--reader", "none")
        ct, _ = st.read_directory(tmp_path / "ct")
        assert ct[f"{P}.weight_packed"].data.tobytes() == tensors[f"{P}.weight"].data.tobytes()
        scales = tensors[f"{P}.scales" if "mlx" in form else f"{P}.scale"]
        assert ct[f"{P}.weight_scale"].data.tobytes() == scales.data.tobytes()
    refused = ["convert", path, "-o", tmp_path / "out", "--layout", "mlx" if "mlx" in form else "fp8", "--reader", "none"]
    if form not in ("deepseek-v4", "deepseek-v4-base"):
        message = halfbyte(*refused, expect=BAD_INPUT).stderr
        assert "cannot be converted with the codes that they have" in message
    else:  # in the blocks that are written
        halfbyte(*refused)
        (again,) = unpack.weights(st.read_directory(tmp_path / "out")[0], fp8_config([128, 128])).values()
        assert np.array_equal(again.weights, weight.weights)


@pytest.mark.parametrize("form", [form for form in ONLY_READ if form not in ("deepseek-v4-base", "mlx-nvfp4")])
def test_exponents_of_nan(halfbyte, tmp_path, form):
    """255 is NaN, as in the OCP Microscaling Formats; no tool writes it."""
    tensors, config, _ = ONLY_READ[form]
    tensors = with_random_values(tensors)
    (scales,) = [tensor.data for name, tensor in tensors.items() if tensor.dtype in ("F8_E8M0", "U8")]
    scales.reshape(-1)[1] = 0xFF
    path = write_model(tmp_path / "in", tensors, config)
    faults = json.loads(halfbyte("verify", path, "--json", "-", expect=4).stdout)["faults"]
    assert [(fault["rule"], f"1 of {scales.size} scales" in fault["text"]) for fault in faults] == [("scale-nan", True)]
    halfbyte("dequantize", path, "-o", tmp_path / "dense", "--dtype", "f32")
    decoded = st.read_directory(tmp_path / "dense")[0][f"{P}.weight"].data
    assert 0 < np.isnan(decoded).sum() < decoded.size


def test_zero_scales_of_mlx(halfbyte, tmp_path):
    """MLX has no global scale: what underflows, and groups of zeros, have a scale of 0."""
    tensors, config, _ = ONLY_READ["mlx-nvfp4"]
    path = write_model(tmp_path / "in", tensors, config)
    assert inspect(halfbyte, path)["num_quantized"] == 1
    halfbyte("verify", path)
    message = halfbyte("repair", tmp_path / "in", "-o", tmp_path / "out", expect=2).stderr
    assert "no weights of one product with several global scales" in message


def test_a_model_of_deepseek(halfbyte, tmp_path):
    """Its names, blocks of fp8 beside experts of mxfp4, and what stays dense."""
    tensors = {"embed.weight": dense(64, 128), "layers.0.attn_norm.weight": st.from_f32(np.ones(128), "BF16")}

    def add(module, codes, scales):
        pair = {f"{P}.weight": codes, f"{P}.scale": scales}
        values = {name.replace(P, module): tensor for name, tensor in with_random_values(pair).items()}
        tensors.update(values)

    for name, rows, cols in (("wq_a", 128, 128), ("wkv", 192, 128), ("wo_b", 128, 256)):
        add(f"layers.0.attn.{name}", zeros("F8_E4M3", rows, cols), zeros("F8_E8M0", -(-rows // 128), cols // 128))
    for expert in range(2):
        for name, rows, cols in (("w1", 64, 128), ("w2", 128, 64), ("w3", 64, 128)):
            add(f"layers.0.ffn.experts.{expert}.{name}", zeros("I8", rows, cols // 2), zeros("F8_E8M0", rows, cols // 32))
    config = fp8_config([128, 128], scale_fmt="ue8m0") | {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}
    config |= {"expert_dtype": "fp4", "dtype": "bfloat16", "n_routed_experts": 2}
    path = write_model(tmp_path / "in", tensors, config)
    halfbyte("verify", path)
    document = inspect(halfbyte, path)
    assert document["num_quantized"] == 9 and document["foreign"] == []
    text = halfbyte("inspect", path).stdout
    assert "not read" not in text and "128x128" in text and "mxfp4" in text
    expected = unpack.weights(tensors, config)
    assert len(expected) == 9
    halfbyte("dequantize", path, "-o", tmp_path / "dense", "--dtype", "f32")
    decoded, _ = st.read_directory(tmp_path / "dense")
    assert set(decoded) == {*expected, "embed.weight", "layers.0.attn_norm.weight"}
    for name, weight in expected.items():
        assert np.array_equal(decoded[name].data, weight.weights), name
    output = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert "quantization_config" not in output and "expert_dtype" not in output


@pytest.mark.parametrize("form", ["fp8-e5m2", "fp8-e5m2-rows", "fp8-e5m2-modelopt"])
def test_codes_of_e5m2_are_decoded_only(halfbyte, tmp_path, form):
    """No format has them: what would keep codes says so, and quantizes the decoded values where it may."""
    tensors, config = FP8[form]
    tensors = with_random_values(tensors)
    path = write_model(tmp_path / "in", tensors, config)
    halfbyte("verify", path)
    assert "1 weights: codes of E5M2" in halfbyte("inspect", path).stdout
    convert = ["convert", path, "-o", tmp_path / "out", "--layout", "halfbyte"]
    message = halfbyte(*convert, expect=BAD_INPUT).stderr
    assert "its codes are of E5M2, which no format of halfbyte has" in message and not (tmp_path / "out").exists()
    halfbyte(*convert, "--requantize")
    rows = json.loads(halfbyte("compare", path, tmp_path / "out", "--json", "-").stdout)["rows"]
    assert not rows[0]["problem"] and 0 < rows[0]["relative_rmse"] < 0.1
    for code in (0x7C, 0x7E, 0xFF):
        tensors[f"{P}.weight"].data[3, 5] = code
        st.write(path / "model.safetensors", tensors)
        faults = json.loads(halfbyte("verify", path, "--json", "-", expect=4).stdout)["faults"]
        assert [fault["rule"] for fault in faults] == ["code-nan"]


def test_exponents_that_are_no_scales_are_found(halfbyte, tmp_path):
    tensors, config = FP8["fp8-ue8m0"]
    tensors = with_random_values(tensors)
    tensors[f"{P}.weight_scale_inv"].data[1, 2] = 0xFF
    path = write_model(tmp_path / "in", tensors, config)
    faults = json.loads(halfbyte("verify", path, "--json", "-", expect=4).stdout)["faults"]
    assert [(fault["rule"], "1 of 6 scales" in fault["text"]) for fault in faults] == [("scale-nan", True)]


def test_blocks_are_named_as_blocks(halfbyte, tmp_path):
    report = json.loads(halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "fp8", "--format", "fp8", "--layout", "fp8", "--json", "-").stdout)
    halfbyte("convert", tmp_path / "fp8", "-o", tmp_path / "ct", "--layout", "compressed-tensors")
    for weights in (report["weights"], inspect(halfbyte, tmp_path / "fp8")["weights"], inspect(halfbyte, tmp_path / "ct")["weights"]):
        specs = [weight["spec"] for weight in weights if weight["spec"]]
        assert specs and all((spec["group_size"], spec["block_size"]) == (128, [128, 128]) for spec in specs)
    for path in ("fp8", "ct"):
        assert "128x128" in halfbyte("inspect", tmp_path / path).stdout
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "rows", "--format", "fp8", "--layout", "halfbyte", "--group-size", 128)
    assert "128x128" not in halfbyte("inspect", tmp_path / "rows").stdout


def gpt_oss_model(path, experts=3, width=96, hidden=64):
    """Experts of two layers as gpt-oss has them, with biases."""
    rng = np.random.default_rng(5)
    tensors = {"lm_head.weight": dense(32, hidden)}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for name, rows, cols in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            shape = (experts, rows, cols // 32)
            tensors[f"{prefix}.{name}_blocks"] = st.Tensor("U8", rng.integers(0, 256, (*shape, 16), np.uint8))
            tensors[f"{prefix}.{name}_scales"] = st.Tensor("U8", rng.integers(110, 130, shape, np.uint8))
            tensors[f"{prefix}.{name}_bias"] = st.from_f32(rng.standard_normal((experts, rows)), "BF16")
    config = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return write_model(path, tensors, config), tensors, config


def test_experts_of_gpt_oss_are_converted_exactly(halfbyte, tmp_path):
    """One tensor of all experts, whose gate and up take turns, and a matrix for each: the same codes and exponents."""
    path, tensors, config = gpt_oss_model(tmp_path / "in")
    assert inspect(halfbyte, path)["foreign"] == []
    options = ["--layout", "compressed-tensors", "--reader", "none"]
    halfbyte("convert", path, "-o", tmp_path / "ct", *options)
    ct, _ = st.read_directory(tmp_path / "ct")
    rows = {"gate_proj": ("gate_up_proj", slice(0, None, 2)), "up_proj": ("gate_up_proj", slice(1, None, 2))}
    rows["down_proj"] = ("down_proj", slice(None))
    seen = {"lm_head.weight"}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        for expert in range(3):
            for own, (fused, part) in rows.items():
                name = f"{prefix}.{expert}.{own}"
                packed, scale, bias = (ct[f"{name}.{each}"] for each in ("weight_packed", "weight_scale", "bias"))
                blocks = tensors[f"{prefix}.{fused}_blocks"].data[expert][part]
                assert np.array_equal(packed.data, blocks.reshape(len(blocks), -1))
                assert scale.dtype == "U8" and np.array_equal(scale.data, tensors[f"{prefix}.{fused}_scales"].data[expert][part])
                assert np.array_equal(bias.data, tensors[f"{prefix}.{fused}_bias"].data[expert][part])
                seen |= {f"{name}.weight_packed", f"{name}.weight_scale", f"{name}.bias"}
    assert set(ct) == seen
    halfbyte("convert", tmp_path / "ct", "-o", tmp_path / "back", "--layout", "gpt-oss")
    back, _ = st.read_directory(tmp_path / "back")
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].data.tobytes() == tensor.data.tobytes(), name
    assert json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"


FUSED = {
    "nvfp4": ("compressed-tensors", ["--format", "nvfp4"]),
    "mxfp4": ("compressed-tensors", ["--format", "mxfp4"]),
    "int4": ("compressed-tensors", ["--format", "int4", "--group-size", 64, "--scale-dtype", "bf16"]),
    "int4-asymmetric": ("compressed-tensors", ["--format", "int4", "--group-size", 64, "--scale-dtype", "bf16", "--asymmetric"]),
    "int8-rows": ("compressed-tensors", ["--format", "int8", "--group-size", "channel", "--scale-dtype", "bf16"]),
    "fp8-rows": ("compressed-tensors", ["--format", "fp8", "--group-size", "channel", "--scale-dtype", "bf16"]),
    "int3": ("gptq", ["--format", "int3", "--group-size", 64]),
    "int4-awq": ("awq", ["--format", "int4", "--group-size", 64, "--asymmetric"]),
}


@pytest.mark.parametrize("form", FUSED)
def test_fused_experts_become_linear_layers(halfbyte, tmp_path, form):
    """A weight for each expert and projection, with the codes and values that the tensor of all has."""
    (layout, arguments), (experts, width, hidden), rng = FUSED[form], (3, 64, 128), np.random.default_rng(7)
    prefix = "model.layers.0.mlp.experts"
    shapes = {"gate_up_proj": (experts, 2 * width, hidden), "down_proj": (experts, hidden, width)}
    tensors = {f"{prefix}.{name}": st.from_f32(rng.standard_normal(shape) * 0.02, "BF16") for name, shape in shapes.items()}
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
    path = write_model(tmp_path / "dense", tensors, config)
    halfbyte("quantize", path, "-o", tmp_path / "own", "--layout", "halfbyte", *arguments)
    halfbyte("convert", tmp_path / "own", "-o", tmp_path / "out", "--layout", layout, "--reader", "vllm")
    before = unpack.weights(st.read_directory(tmp_path / "own")[0], {})
    after = unpack.weights(st.read_directory(tmp_path / "out")[0], json.loads((tmp_path / "out" / "config.json").read_text()))
    assert len(after) == 3 * experts
    for e in range(experts):
        both = [after[f"{prefix}.{e}.{name}_proj.weight"] for name in ("gate", "up")]
        down = after[f"{prefix}.{e}.down_proj.weight"]
        assert np.array_equal(np.concatenate([part.weights for part in both]), before[f"{prefix}.gate_up_proj"].weights[e])
        assert np.array_equal(down.weights, before[f"{prefix}.down_proj"].weights[e])


def test_fused_experts_are_taken_apart_exactly(halfbyte, tmp_path):
    """Where readers want a matrix for each expert: gate comes first, and all have the global scale of the tensor."""
    experts, width, hidden = 2, 128, 256
    prefix = "model.layers.0.mlp.experts"
    rng = np.random.default_rng(6)
    shapes = {"gate_up_proj": (experts, 2 * width, hidden), "down_proj": (experts, hidden, width)}
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
    tensors = {f"{prefix}.{name}": st.from_f32(rng.standard_normal(shape) * 0.02, "BF16") for name, shape in shapes.items()}
    rows = {"gate_proj": ("gate_up_proj", slice(0, width)), "up_proj": ("gate_up_proj", slice(width, None))}
    rows["down_proj"] = ("down_proj", slice(None))
    matrices = [(f"{prefix}.{e}.{own}.weight", f"{prefix}.{fused}", e, part) for e in range(experts) for own, (fused, part) in rows.items()]

    path = write_model(tmp_path / "dense", tensors, config)
    halfbyte("quantize", path, "-o", tmp_path / "own", "--format", "nvfp4", "--layout", "halfbyte")
    halfbyte("convert", tmp_path / "own", "-o", tmp_path / "modelopt", "--layout", "modelopt")
    own, modelopt = (st.read_directory(tmp_path / each)[0] for each in ("own", "modelopt"))
    assert len(modelopt) == 3 * len(matrices)
    for name, fused, expert, part in matrices:
        assert np.array_equal(modelopt[name].data, own[fused].data[expert, part])
        assert np.array_equal(modelopt[f"{name}_scale"].data, own[f"{fused}.scales"].data[expert, part])
        assert modelopt[f"{name}_scale_2"].data[()] == np.float32(1) / own[f"{fused}.global_scale"].data[0]

    fp8 = {}
    for name, (_, out, cols) in shapes.items():
        fp8[f"{prefix}.{name}"] = zeros("F8_E4M3", experts, out, cols)
        fp8[f"{prefix}.{name}_scale_inv"] = zeros("F32", experts, out // 128, cols // 128)
    fp8 = with_random_values(fp8)
    path = write_model(tmp_path / "fused", fp8, config | FP8_CONFIG)
    halfbyte("convert", path, "-o", tmp_path / "fp8", "--layout", "fp8")
    apart, _ = st.read_directory(tmp_path / "fp8")
    assert len(apart) == 2 * len(matrices)
    for name, fused, expert, part in matrices:
        blocks = slice(part.start and part.start // 128, part.stop and part.stop // 128)
        assert np.array_equal(apart[name].data, fp8[fused].data[expert, part])
        assert np.array_equal(apart[f"{name}_scale_inv"].data, fp8[f"{fused}_scale_inv"].data[expert, blocks])


def test_gpt_oss_is_a_source(halfbyte, tmp_path):
    path, tensors, config = gpt_oss_model(tmp_path / "in")
    found = unpack.weights(tensors, config)
    halfbyte("dequantize", path, "-o", tmp_path / "dense", "--dtype", "f32")
    decoded, _ = st.read_directory(tmp_path / "dense")
    assert set(decoded) == {"lm_head.weight", *found, *(f"{name}_bias" for name in found)}
    for name, weight in found.items():  # the transpose
        assert np.array_equal(decoded[name].data, weight.weights), name
    # From the dense model to the same values; and each expert of either model for itself.
    halfbyte("quantize", tmp_path / "dense", "-o", tmp_path / "again", "--format", "mxfp4", "--layout", "gpt-oss")
    again, _ = st.read_directory(tmp_path / "again")
    other = unpack.weights(again, config)
    for name, weight in found.items():
        bound = 2.0**-2 * np.abs(weight.weights).max()
        assert np.abs(other[name].weights - weight.weights).max() <= bound
        assert again[f"{name}_blocks"].data.shape == tensors[f"{name}_blocks"].data.shape
    for source in ("in", "dense"):
        options = ["--format", "fp8", "--layout", "fp8", "--reader", "none"]
        halfbyte("quantize", tmp_path / source, "-o", tmp_path / f"{source}-fp8", *options)
        fp8, _ = st.read_directory(tmp_path / f"{source}-fp8")
        config = json.loads((tmp_path / f"{source}-fp8" / "config.json").read_text())
        experts = unpack.weights(fp8, config)
        assert len(experts) == 2 * 3 * 3
        for name, weight in experts.items():
            layer, expert, part = re.fullmatch(r"model\.layers\.(\d)\.mlp\.experts\.(\d)\.(\w+)\.weight", name).groups()
            fused = "down_proj" if part == "down_proj" else "gate_up_proj"
            rows = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2), "down_proj": slice(None)}[part]
            wanted = found[f"model.layers.{layer}.mlp.experts.{fused}"].weights[int(expert)].T[rows]
            assert np.abs(weight.weights - wanted).max() <= 2.0**-4 * np.abs(wanted).max()


def test_groups_of_several_methods(halfbyte, tmp_path):
    other = {name.replace("up_proj", "down_proj"): tensor for name, tensor in INT8.items()}
    groups = [("nvfp4-pack-quantized", GROUP_FP4, None), ("int-quantized", CHANNEL_INT8, None)]
    groups.append(("int-quantized", CHANNEL_INT8 | {"strategy": "tensor"}, None))
    path = write_model(tmp_path / "in", NVFP4 | other, compressed(*groups))
    found = {entry["method"]: entry for entry in inspect(halfbyte, path)["foreign"]}
    assert set(found) == {"int8"} and found["int8"]["num_weights"] == 1  # nvfp4 is read
    assert found["int8"]["parameters"]["strategy"] == ["channel", "tensor"]
    assert "CompressedTensorsDequantizer" in found["int8"]["advice"]


def test_a_config_left_over_refuses_nothing(halfbyte, tmp_path):
    path = write_model(tmp_path / "in", {f"{P}.weight": dense()}, quantize_config={"bits": 4, "group_size": 128})
    assert inspect(halfbyte, path)["foreign"] == []
    halfbyte("quantize", path, "-o", tmp_path / "out")


READ = {
    "a.weight": zeros("U32", 64, 32),
    "a.scales": zeros("F16", 64, 4),
    "a.biases": zeros("F16", 64, 4),
    "b.weight_packed": zeros("I32", 64, 32),
    "b.weight_scale": zeros("F16", 64, 1),
    "b.weight_shape": st.Tensor("I64", np.array([64, 256])),
}


@pytest.mark.parametrize("tensors", [FP8_ROWS, READ], ids=["foreign", "read"])
def test_configs_of_strangers(cli, tmp_path, tensors):
    """Whatever a config says, the tool answers with a weight, or an error of its input."""
    odd = [None, 1, "x", [], {}, [1], {"a": 1}, True, -1e300]
    configs = list(odd)
    for key in ("quant_method", "bits", "group_size", "config_groups", "quantized_layers", "mode", "format"):
        configs += [{key: value} for value in odd]
    for method in ("compressed-tensors", "mlx", "modelopt", "bitsandbytes", "gptq", "\x1b[31m"):
        base = {"quant_method": method}
        configs += [base, base | {"load_in_8bit": 1, "config_groups": {"g": {"weights": [], "input_activations": {}}}}]
        configs += [base | {"config_groups": {"g": {"weights": {"num_bits": value, "type": value}}}} for value in odd]
    path = write_model(tmp_path / "in", tensors)
    for number, config in enumerate(configs):
        key = ("quantization_config", "quantization", "compression_config", "text_config")[number % 4]
        (path / "config.json").write_text(json.dumps({key: config}))
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": config}))
        result = subprocess.run([cli, "inspect", path], capture_output=True, text=True)
        assert result.returncode in (0, BAD_INPUT), (config, result.stderr)
        assert result.stdout.isascii() and "\x1b" not in result.stdout + result.stderr


def test_own_outputs_are_not_foreign(halfbyte, tmp_path):
    for layout in ("nf4", "int4", "affine4", "int3"):
        halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / layout, "--format", layout)
        assert inspect(halfbyte, tmp_path / layout)["foreign"] == []


# Snapshots of the Hugging Face cache


@pytest.fixture
def hub(tmp_path):
    """tiny-llama as the hub's cache has it: a snapshot of links to blobs, one of them below a directory."""
    repository = tmp_path / "models--org--tiny"
    snapshot = repository / "snapshots" / "0123abcd"
    (repository / "blobs").mkdir(parents=True)
    (snapshot / "sub").mkdir(parents=True)
    for number, file in enumerate(sorted(TINY_LLAMA.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    (repository / "blobs" / "ff").write_text("# code")
    (snapshot / "sub" / "code.py").symlink_to("../../../blobs/ff")
    return snapshot


def test_a_snapshot_of_the_cache(halfbyte, hub, tmp_path):
    arguments = ("--format", "nf4")
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "plain", *arguments)
    halfbyte("quantize", hub, "-o", tmp_path / "out", *arguments)
    for path in (tmp_path / "plain").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert (tmp_path / "out/sub/code.py").read_text() == "# code"
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_symlink()]
    assert inspect(halfbyte, hub)["num_quantized"] == 0


def test_other_links_are_refused(halfbyte, hub, tmp_path):
    (tmp_path / "outside").write_text("secret")
    (hub / "notes.txt").symlink_to("../../../outside")
    message = halfbyte("quantize", hub, "-o", tmp_path / "out", expect=BAD_INPUT).stderr
    assert 'notes.txt" is a link, and below a model directory only those of a Hugging Face cache' in message
    (hub / "notes.txt").unlink()
    hub.parents[1].rename(tmp_path / "renamed")  # no longer a repository of the cache
    renamed = tmp_path / "renamed" / "snapshots" / hub.name
    assert "is a link" in halfbyte("inspect", renamed, expect=BAD_INPUT).stderr
    message = halfbyte("inspect", tmp_path / "renamed", expect=BAD_INPUT).stderr
    assert "give a directory in its snapshots/" in message


# Modules of MLX that leave something to its defaults


def test_mlx_defaults(halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "mlx", "--format", "affine4", "--keep-embeddings")
    halfbyte("dequantize", tmp_path / "mlx", "-o", tmp_path / "dense")
    expected = (tmp_path / "dense" / "model.safetensors").read_bytes()
    config = json.loads((tmp_path / "mlx" / "config.json").read_text())
    module = {"group_size": None, "bits": 4}
    for number, quantization in enumerate(
        [
            {"group_size": None, "bits": 4, "mode": "affine"},
            {"group_size": 64, "bits": None},
            {"bits": 4},
            {"group_size": 32, "bits": 8}
            | {f"model.layers.{i}.{name}": module for i in range(4) for name in MODULES},
        ]
    ):
        config["quantization"] = quantization
        (tmp_path / "mlx" / "config.json").write_text(json.dumps(config))
        out = tmp_path / f"out{number}"
        halfbyte("dequantize", tmp_path / "mlx", "-o", out)
        assert (out / "model.safetensors").read_bytes() == expected
    config["quantization"] = {"group_size": None, "bits": 8}
    (tmp_path / "mlx" / "config.json").write_text(json.dumps(config))
    assert "does not fit" in halfbyte("inspect", tmp_path / "mlx", expect=BAD_INPUT).stderr


MODULES = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]


# What compressed-tensors packs with other numbers of bits


def pack(codes, bits, axis=1):
    """Unsigned codes [rows, cols] as a bit stream in words along an axis, as compressed-tensors 0.18 packs them."""
    codes = codes.T if axis == 0 else codes
    stream = (codes[:, :, None] >> np.arange(bits)) & 1
    stream = stream.reshape(codes.shape[0], -1)
    stream = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 32))).reshape(codes.shape[0], -1, 32)
    words = (stream.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)
    return np.ascontiguousarray(words.T if axis == 0 else words)


def test_pack_is_that_of_compressed_tensors():
    """The words that compressed-tensors makes of 0..7 repeated, minus 4, in 3 bits."""
    words = pack(np.arange(32)[None] % 8, 3)[0]
    assert [f"{word:08x}" for word in words.view(np.uint32)] == ["88fac688", "c688fac6", "fac688fa"]


def packed_weight(rng, name, rows, cols, bits, strategy, symmetric=True):
    """Its tensors, its dense values in f32, and its weights in the config."""
    codes = rng.integers(0, 2**bits, (rows, cols))
    groups = {"group": cols // 32, "channel": 1, "tensor": 1}[strategy]
    shape = (1,) if strategy == "tensor" else (rows, groups)
    scales = rng.standard_normal(shape).astype(np.float32)
    zeros = np.full((rows, groups), 2 ** (bits - 1))
    tensors = {
        f"{name}.weight_packed": st.Tensor("I32", pack(codes, bits)),
        f"{name}.weight_scale": st.Tensor("F32", scales),
        f"{name}.weight_shape": st.Tensor("I64", np.array([rows, cols])),
    }
    if not symmetric:
        zeros = rng.integers(0, 2**bits, (rows, groups))
        tensors[f"{name}.weight_zero_point"] = st.Tensor("I32", pack(zeros, bits, axis=0))
    wide = np.repeat(np.broadcast_to(scales, (rows, groups)), cols // groups, 1)
    values = (codes - np.repeat(zeros, cols // groups, 1)).astype(np.float32) * wide
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    return tensors, values, weights | {"group_size": 32 if strategy == "group" else None}


@pytest.mark.parametrize("with_config", [True, False])
def test_compressed_tensors_of_any_bits(halfbyte, tmp_path, with_config):
    """Several groups with schemes of their own in one file."""
    rng = np.random.default_rng(3)
    tensors, expected, groups = {}, {}, []
    for bits in (2, 3, 4, 5, 6, 8):
        for strategy, symmetric in [("group", True), ("group", False), ("channel", False), ("tensor", True)]:
            name = f"model.layers.{bits}.{strategy}{int(symmetric)}_proj"
            rows = 2400 if (bits, strategy, symmetric) == (3, "group", False) else 70  # more than a block of rows
            own, values, weights = packed_weight(rng, name, rows, 256, bits, strategy, symmetric)
            tensors |= own
            expected[f"{name}.weight"] = values
            groups.append(("pack-quantized", weights, None))
    path = write_model(tmp_path / "in", tensors, compressed(*groups) if with_config else {})
    document = inspect(halfbyte, path)
    assert document["num_quantized"] == len(expected) and document["foreign"] == []
    specs = {weight["name"]: weight["spec"] for weight in document["weights"]}
    assert specs["model.layers.3.group0_proj.weight"]["format"] == "int3"
    assert specs["model.layers.5.tensor1_proj.weight"]["granularity"] == "tensor"
    halfbyte("dequantize", path, "-o", tmp_path / "out")
    decoded = st.read(tmp_path / "out" / "model.safetensors")[0]
    assert set(decoded) == set(expected)
    for name, values in expected.items():
        assert np.array_equal(decoded[name].data, values), name


def test_compressed_tensors_that_are_not_read(halfbyte, tmp_path):
    rng = np.random.default_rng(4)

    def refused(name, tensors, config):
        path = write_model(tmp_path / name, tensors, config)
        return halfbyte("inspect", path, expect=BAD_INPUT).stderr

    tensors, _, weights = packed_weight(rng, "a", 8, 256, 7, "channel")
    config = compressed(("pack-quantized", weights, None))
    assert "config.json has weights of 7 bits, which halfbyte does not read" in refused("seven", tensors, config)
    assert "has codes of 7 bits" in refused("seven_alone", tensors, {})
    # Ten codes of 3 bits in a word.
    tensors, _, weights = packed_weight(rng, "a", 8, 256, 3, "channel")
    config = compressed(("pack-quantized", weights, None))
    old = tensors | {"a.weight_packed": zeros("I32", 8, 26)}
    assert "10 codes of 3 bits in a word, as old versions" in refused("old", old, config)
    config = compressed(("pack-quantized", weights | {"num_bits": 4}, None))
    assert "24 words for 256 columns are not codes of 4 bits" in refused("other", tensors, config)
    tensors, _, weights = packed_weight(rng, "a", 8, 256, 4, "tensor")
    tensors["a.weight_zero_point"] = zeros("I32", 1, 1)
    assert "a zero point of the whole tensor is not supported" in refused("tensor", tensors, {})


# Other containers, adapters

CONTAINERS = {
    "GGUF": (b"GGUF\x03\0\0\0" + bytes(64), ".gguf", "a GGUF file"),
    "zip": (b"PK\x03\x04\0\0\x08\x08" + bytes(64), ".bin", "a pickle, as torch.save writes"),
    "pickle": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(64), ".pth", "a pickle, as torch.save writes"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(64), ".h5", "an HDF5 file"),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_other_containers_are_named(halfbyte, tmp_path, name):
    content, ending, what = CONTAINERS[name]
    (tmp_path / "in").mkdir()
    for file in (tmp_path / "in" / f"model{ending}", tmp_path / "misnamed.safetensors"):
        file.write_bytes(content)
        message = halfbyte("quantize", file, "-o", tmp_path / "out", expect=BAD_INPUT).stderr
        assert f"{file.name} is {what}" in message and ", not a safetensors file: " in message
    message = halfbyte("inspect", tmp_path / "in", expect=BAD_INPUT).stderr
    assert "has no .safetensors file; " in message and f'"model{ending}" is {what}' in message


def test_a_pointer_of_git_lfs(halfbyte, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "a pointer of Git LFS" in halfbyte("inspect", path, expect=BAD_INPUT).stderr


def test_adapters_are_refused(halfbyte, tmp_path):
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for prefix in ("", "base_model.model."):
        st.write(path / "adapter_model.safetensors", {prefix + name: dense(8, 256)})
        message = halfbyte("quantize", path, "-o", tmp_path / "out", expect=BAD_INPUT).stderr
        assert "is an adapter of PEFT" in message and "merge_and_unload" in message
    file = path / "adapter_model.safetensors"
    message = halfbyte("quantize", file, "-o", tmp_path / "out", expect=BAD_INPUT).stderr
    assert f'is an adapter of PEFT (tensor "base_model.model.{name}")' in message
    # A model with an adapter beside it is a model.
    st.write(path / "model.safetensors", {"model.layers.0.self_attn.q_proj.weight": dense()})
    halfbyte("quantize", path, "-o", tmp_path / "out")


# --shard-size


def shards_of(path):
    return sorted(file.name for file in path.glob("*.safetensors"))


@pytest.mark.parametrize("arguments", [("quantize", "--format", "nf4"), ("quantize", "--format", "affine4")])
def test_shard_size(halfbyte, tmp_path, arguments):
    command, *options = arguments
    limit = 300_000
    halfbyte(command, TINY_LLAMA, "-o", tmp_path / "one", *options)
    halfbyte(command, TINY_LLAMA, "-o", tmp_path / "many", *options, "--shard-size", "300KB")
    one, metadata = st.read_directory(tmp_path / "one")
    many, first_metadata = st.read_directory(tmp_path / "many")  # checks the index, and its total
    assert set(one) == set(many) and first_metadata.items() <= metadata.items()
    for name, tensor in one.items():
        assert tensor.dtype == many[name].dtype and np.array_equal(tensor.data, many[name].data), name
    files = shards_of(tmp_path / "many")
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    sizes = [sum(t.data.nbytes for t in st.read(tmp_path / "many" / file)[0].values()) for file in files]
    assert max(sizes) <= limit and all(a + b > limit for a, b in zip(sizes, sizes[1:]))
    # A weight and its scales lie in one file.
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    module = "model.layers.2.mlp.up_proj."
    assert len({file for name, file in index.items() if name.startswith(module)}) == 1
    # And back into one.
    dense = ("--shard-size", "1GiB")
    halfbyte("dequantize", tmp_path / "many", "-o", tmp_path / "dense", *dense)
    assert shards_of(tmp_path / "dense") == ["model.safetensors"]
    assert not (tmp_path / "dense" / "model.safetensors.index.json").exists()
    halfbyte("dequantize", tmp_path / "one", "-o", tmp_path / "plain")
    expected = (tmp_path / "plain" / "model.safetensors").read_bytes()
    assert (tmp_path / "dense" / "model.safetensors").read_bytes() == expected
    halfbyte("dequantize", tmp_path / "one", "-o", tmp_path / "dense_shards", "--shard-size", "1MB")
    assert len(shards_of(tmp_path / "dense_shards")) == 8
    assert set(st.read_directory(tmp_path / "dense_shards")[0]) == set(st.read_directory(tmp_path / "plain")[0])


def test_shard_size_below_a_tensor(halfbyte, tmp_path):
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "out", "--shard-size", "1")
    assert len(shards_of(tmp_path / "out")) == len(inspect(halfbyte, TINY_LLAMA)["weights"])


def test_wrong_shard_sizes(halfbyte, tmp_path):
    for size in ("0", "5TB", "GB", "-1", "1.5GB", "5 GB", "99999999999GB", "5gb"):
        arguments = ("quantize", TINY_LLAMA, "-o", tmp_path / "out", f"--shard-size={size}")
        assert "--shard-size: expected a number above 0" in halfbyte(*arguments, expect=2).stderr
    file = TINY_LLAMA / "model.safetensors"
    message = halfbyte("quantize", file, "-o", tmp_path / "out", "--shard-size", "1MB", expect=2).stderr
    assert "shard size 1000000" in message and "is a single file" in message
