"""Experts in the forms of bitsandbytes, with its own code: what `convert --experts parametrize` writes, bitsandbytes.nn.parametrize
loads, and what that saves is read. Experts4bit is in no release: its tensors are made of those of quantize_4bit, an expert at a time,
as its module does."""

import json

import bitsandbytes.functional
import pytest
import torch
from bitsandbytes.nn import parametrize
from safetensors.torch import load_file, save_file

PREFIX = "model.layers.0.mlp.experts."
CONFIG = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "float32", "hidden_size": 128}
SHAPES = {"gate_up_proj": (4, 128, 128), "down_proj": (4, 128, 64)}


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in SHAPES.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False))


def write(path, tensors, form):
    path.mkdir()
    save_file({PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    entry = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": form}
    (path / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": entry}))
    return path


def convert(halfbyte, source, target, form):
    halfbyte("convert", source, "-o", target, "--layout", "bitsandbytes", "--experts", form)
    return target


def saved(path):
    return {name.removeprefix(PREFIX): tensor for name, tensor in load_file(path / "model.safetensors").items()}


@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_parametrize(halfbyte, tmp_path, form):
    module = Experts()
    for name in SHAPES:
        parametrize.replace_parameter_4bit(module, name, quant_type=form, blocksize=64)
    source = write(tmp_path / "saved", module.state_dict(), form)
    halfbyte("dequantize", source, "-o", tmp_path / "dense")
    dense = saved(tmp_path / "dense")
    per_expert = convert(halfbyte, source, tmp_path / "per-expert", "per-expert")
    again = saved(convert(halfbyte, per_expert, tmp_path / "again", "parametrize"))
    own = Experts()
    for name in SHAPES:
        setattr(own, name, torch.nn.Parameter(again[name], requires_grad=False))
        state = {key.removeprefix(name + "."): tensor for key, tensor in again.items() if key.startswith(name + ".")}
        parametrize.replace_parameter_4bit_prequantized(own, name, state, torch.device("cpu"))
        assert torch.equal(getattr(module, name), dense[name]) and torch.equal(getattr(own, name), dense[name])


@pytest.mark.parametrize("form", ["nf4", "fp4"])
def test_experts4bit(halfbyte, tmp_path, form):
    tensors, expected = {}, {}
    for name, parameter in Experts().named_parameters():
        each = [bitsandbytes.functional.quantize_4bit(w, blocksize=64, quant_type=form) for w in parameter]
        tensors[name] = torch.stack([codes.reshape(-1) for codes, _ in each])
        tensors[name.removesuffix("_proj") + "_absmax"] = torch.stack([state.absmax for _, state in each])
        expected[name] = torch.stack([bitsandbytes.functional.dequantize_4bit(codes, state) for codes, state in each])
    source = write(tmp_path / "saved", tensors, form)
    halfbyte("dequantize", source, "-o", tmp_path / "dense")
    dense = saved(tmp_path / "dense")
    assert all(torch.equal(dense[name], expected[name]) for name in SHAPES)
    parametrized = convert(halfbyte, source, tmp_path / "parametrize", "parametrize")
    again = saved(convert(halfbyte, parametrized, tmp_path / "again", "experts4bit"))
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)
