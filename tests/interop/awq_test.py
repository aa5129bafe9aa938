"""What the layout awq writes, compressed-tensors converts and mlx-lm loads, as `halfbyte dequantize` has it."""

import json
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from mlx_lm.utils import load_model
from safetensors.torch import load_file

TINY_LLAMA = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
GROUP = 64


@pytest.fixture(params=[False, True], ids=["symmetric", "asymmetric"])
def saved(request, halfbyte, tmp_path):
    """The directory of the output, and its weights in f32."""
    arguments = ["--layout", "awq", "--format", "int4", "--group-size", GROUP, *["--asymmetric"] * request.param]
    halfbyte("quantize", TINY_LLAMA, "-o", tmp_path / "q", *arguments)
    halfbyte("dequantize", tmp_path / "q", "-o", tmp_path / "dense", "--dtype", "f32")
    return tmp_path / "q", load_file(tmp_path / "dense" / "model.safetensors")


def test_converter_of_compressed_tensors(saved):
    path, expected = saved
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    converter = AutoAWQConverter.from_autoawq_config(config)
    converter.validate(dict(tensors))
    converted = converter.process(tensors)
    modules = [name.removesuffix(".weight_packed") for name in converted if name.endswith(".weight_packed")]
    assert len(modules) == 28
    for module in modules:
        shape = torch.Size(converted[f"{module}.weight_shape"].tolist())
        scales = converted[f"{module}.weight_scale"].float()
        codes = unpack_from_int32(converted[f"{module}.weight_packed"], 4, shape).float()
        zeros = unpack_from_int32(converted[f"{module}.weight_zero_point"], 4, scales.shape, packed_dim=0).float()
        values = (codes - zeros.repeat_interleave(GROUP, 1)) * scales.repeat_interleave(GROUP, 1)
        assert torch.equal(values, expected[f"{module}.weight"]), module


def test_mlx_lm(saved):
    """It stores a bias in place of the zero point, rounded to f16."""
    path, expected = saved
    layers = [(name, layer) for name, layer in load_model(path, lazy=False)[0].named_modules() if isinstance(layer, nn.QuantizedLinear)]
    assert len(layers) == 28
    for name, layer in layers:
        scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
        values = np.array(mx.dequantize(layer.weight, scales, biases, layer.group_size, layer.bits))
        weight = expected[f"{name}.weight"].numpy()
        assert np.abs(values - weight).max() <= 2**-11 * 15 * np.abs(np.array(scales)).max(), name
