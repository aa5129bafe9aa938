"""What other tools write, the tool reads: models that bitsandbytes, compressed-tensors (as llm-compressor does) and mlx-lm quantize and
save. `halfbyte dequantize` gives the weights that the tool that wrote them gives."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import readers
import torch
import transformers
import zoo

BITSANDBYTES, COMPRESSED_TENSORS, MLX = readers.READERS


@pytest.fixture
def dense(tmp_path, request):
    """The directory of the model that the test names."""
    path = tmp_path / "dense"
    zoo.model(request.getfixturevalue("name")).save(path)
    return path


@pytest.fixture
def compare(halfbyte, tmp_path):
    """Compares a model with what dequantize makes of the save of it."""

    def run(reader, model, saved):
        weights = reader.read(model)[0]
        halfbyte("dequantize", saved, "-o", tmp_path / "dequantized", *reader.dequantize)
        expected = reader.read(reader.load_dense(tmp_path / "dequantized"))[0]
        assert weights.keys() == expected.keys()
        different = [name for name, weight in weights.items() if not reader.equal(weight, expected[name])]
        assert not different

    return run


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("form", ["nf4", "fp4"])
@pytest.mark.parametrize("name", [
    "LlamaForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "WhisperForConditionalGeneration",
    "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration",
])
def test_bitsandbytes(name, form, double, dense, compare, tmp_path):
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=form, bnb_4bit_use_double_quant=double)
    zoo.model(name).cls.from_pretrained(dense, quantization_config=config).save_pretrained(tmp_path / "saved")
    compare(BITSANDBYTES, BITSANDBYTES.load(tmp_path / "saved"), tmp_path / "saved")


EXPONENTS = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
SCALES_E4M3 = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
SCHEMES = {  # targets: arguments of the weights
    "W4A16": {"Linear": {"num_bits": 4, "strategy": "group", "group_size": 64}},
    "W4A16 asymmetric": {"Linear": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False}},
    "W8A16 channel": {"Linear": {"num_bits": 8, "strategy": "channel"}},
    "W8A16 tensor": {"Linear": {"num_bits": 8, "strategy": "tensor"}},
    "W3A16": {"Linear": {"num_bits": 3, "strategy": "group", "group_size": 128}},
    "W5A16": {"Linear": {"num_bits": 5, "strategy": "group", "group_size": 128}},
    "W6A16": {"Linear": {"num_bits": 6, "strategy": "channel"}},
    "FP8 channel": {"Linear": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    "FP8 tensor": {"Linear": {"num_bits": 8, "type": "float", "strategy": "tensor"}},
    "FP8 block": {"Linear": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}},
    "NVFP4": {"Linear": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, **SCALES_E4M3}},
    "MXFP4": {"Linear": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, **EXPONENTS}},
    "MXFP8": {"Linear": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, **EXPONENTS}},
    "mixed": {
        r"re:.*down_proj$": {"num_bits": 8, "strategy": "channel"},
        "Linear": {"num_bits": 4, "strategy": "group", "group_size": 64},
    },
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_compressed_tensors(name, scheme, dense, compare, tmp_path):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    if name == "Qwen3ForCausalLM" and scheme in ("NVFP4", "MXFP4", "MXFP8"):
        pytest.skip("compressed-tensors makes it bf16 in a model of f16, and then cannot compute with it")
    model = zoo.model(name).cls.from_pretrained(dense)
    groups = {
        f"group_{i}": {"targets": [target], "weights": arguments} for i, (target, arguments) in enumerate(SCHEMES[scheme].items())
    }
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            observe(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "saved")
    compressor.update_config(tmp_path / "saved")
    compare(COMPRESSED_TENSORS, model, tmp_path / "saved")


def observe(module):
    """Sets scales and zero points from the range of each group."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    arguments, weight = module.quantization_scheme.weights, module.weight.data
    size = arguments.group_size or (weight.numel() if arguments.strategy == "tensor" else weight.shape[1])
    groups = weight.reshape(-1, size)
    low, high, global_scale = groups.amin(1), groups.amax(1), None
    if arguments.strategy == "block":  # no more of a block than there is
        blocks = [block for rows in weight.split(128) for block in rows.split(128, dim=1)]
        low, high = (torch.stack([each(block) for block in blocks]) for each in (torch.amin, torch.amax))
    if arguments.strategy == "tensor_group":
        global_scale = generate_gparam(weight.amin(), weight.amax())
        module.weight_global_scale.data.copy_(global_scale)
    scale, zero_point = calculate_qparams(low, high, arguments, global_scale=global_scale)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero_point.reshape(module.weight_zero_point.shape))


MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}  # groups and bits


@pytest.mark.parametrize("recipe", ["affine4", "mixed_4_6", "mixed_3_4", *MODES])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "Gemma3ForCausalLM"])
def test_mlx(name, recipe, dense, compare, tmp_path):
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import quantize_model, save_config, save_model

    model = MLX.load_dense(dense)
    predicate = mixed_quant_predicate_builder(recipe, model) if recipe.startswith("mixed") else None
    mode, (group_size, bits) = recipe if recipe in MODES else "affine", MODES.get(recipe, (64, 4))
    dense_config = json.loads((dense / "config.json").read_text())
    model, config = quantize_model(model, dense_config, group_size, bits, mode=mode, quant_predicate=predicate)
    save_model(tmp_path / "saved", model)
    save_config(config, tmp_path / "saved" / "config.json")
    compare(MLX, MLX.load(tmp_path / "saved"), tmp_path / "saved")
