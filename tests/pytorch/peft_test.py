"""Adapters of peft on quantized models: trained, saved, reloaded, merged."""

import pytest
import torch
from torch import nn

from halfbyte.torch import QuantizedLinear

transformers = pytest.importorskip("transformers", "5")
peft = pytest.importorskip("peft")
from halfbyte.torch.peft import merge_and_unload  # noqa: E402
from halfbyte.torch.transformers import HalfbyteConfig  # noqa: E402
from tiny_models import TINY, load, logits, quantized_modules  # noqa: E402

IDS = torch.arange(48).reshape(2, 24)


def adapted(path, spec="nf4", **options):
    """A quantized model in f32 with adapters, ready to train."""
    model = load(path, quantization_config=HalfbyteConfig(spec), dtype=torch.float32)
    model = peft.prepare_model_for_kbit_training(model)
    torch.manual_seed(5)
    # peft's "all-linear" would have the parameters of experts, too, and decode them in each step.
    linear = r".*\.(q_proj|k_proj|v_proj|o_proj|c_attn|c_fc|c_proj)|.*\d\.mlp\.\w+_proj"
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 16, "target_modules": linear, "task_type": "CAUSAL_LM", **options})
    return peft.get_peft_model(model, config)


def train(model, steps=3):
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-3)
    losses = []
    for _ in range(steps):
        loss = model(IDS, labels=IDS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}], ids=["lora", "rslora"])
@pytest.mark.parametrize("name", TINY)
def test_adapters_are_trained_saved_reloaded_and_merged(name, options, models, tmp_path):
    model = adapted(models / name, **options)
    packed = {path: parameter.clone() for path, parameter in model.named_parameters() if parameter.dtype == torch.uint8}
    losses = train(model)
    assert losses[2] < losses[0]
    assert packed and all(torch.equal(model.get_parameter(path), before) for path, before in packed.items())
    layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]
    assert layers and all(isinstance(layer.get_base_layer(), QuantizedLinear) for layer in layers)
    assert all(layer.lora_B["default"].weight.abs().max() > 0 for layer in layers)

    with_adapters = logits(model)
    model.save_pretrained(tmp_path)
    base = load(models / name, quantization_config=HalfbyteConfig("nf4"), dtype=torch.float32)
    without = logits(base)
    again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert torch.equal(logits(again), with_adapters)

    merged, reports = merge_and_unload(again)
    assert len(reports) == len(layers) and all(0 < report.relative_rmse < 0.15 for report in reports.values())
    assert not any("lora" in path for path, _ in merged.named_modules())
    assert (logits(merged) - with_adapters).norm() < 0.9 * (without - with_adapters).norm()
    assert len(quantized_modules(merged)) == len(quantized_modules(model))
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits(load(tmp_path / "merged")), logits(merged))


def test_what_a_merge_cannot_add_is_refused(models):
    model = adapted(models / "llama", lora_bias=True)
    with pytest.raises(ValueError, match="layers.0.self_attn.q_proj: adapter default must be LoRA without a bias"):
        merge_and_unload(model)


def test_dense_layers_are_merged_by_peft(models):
    model = adapted(models / "llama", spec="int8", target_modules=["q_proj", "lm_head"])
    nn.init.normal_(model.get_base_model().lm_head.lora_B["default"].weight, std=0.1)
    before = logits(model)
    merged, reports = merge_and_unload(model)
    assert sorted(reports) == [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    assert (logits(merged) - before).norm() < 0.01 * before.norm() and type(merged.lm_head) is nn.Linear


def test_adapters_of_the_parameters_of_experts_are_an_error_and_not_a_wrong_result(models):
    model = adapted(models / "mixtral", target_modules="all-linear")
    with pytest.raises(ValueError, match="may not change the dtype"):
        model(IDS)


def test_dora_is_an_error_and_not_a_wrong_result(models):
    """It needs the dense weight, which peft decodes for the kinds of layers that it knows."""
    with pytest.raises(RuntimeError, match="size of tensor"):
        adapted(models / "llama", use_dora=True)
