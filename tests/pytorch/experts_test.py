"""Experts over packed weights: products and gradients, storing, compiling; those of models of transformers."""

import copy
import doctest
import importlib

import pytest
import torch
from torch import nn

from halfbyte.torch import QuantizedExperts, QuantizedLinear, replace_linear


def of_decoded_weights(model, dense):
    """`dense` with the weights of `model`, which are quantized."""
    for name, module in model.named_modules():
        if not isinstance(module, (QuantizedLinear, QuantizedExperts)):
            continue
        to = dense.get_submodule(name)
        for own in module.packed_names:
            weight = module.dequantized(own) if isinstance(module, QuantizedExperts) else module.dequantized()
            turned = getattr(to, "is_transposed", False)
            to.get_parameter(own).data = weight.transpose(-1, -2).contiguous() if turned else weight
    return dense


@pytest.mark.parametrize("spec", ["nf4", "int8,asymmetric"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_experts_and_their_gradients_are_those_of_the_decoded_weights(name, spec):
    transformers = pytest.importorskip("transformers", "5")
    size = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "num_experts_per_tok": 2}
    of_experts = {"num_experts" if name == "Qwen3Moe" else "num_local_experts": 4}
    config = getattr(transformers, name + "Config")(**size, **of_experts)
    source = getattr(transformers, name + "ForCausalLM")(config).eval()
    for parameter_name, parameter in source.named_parameters():
        if parameter_name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    model = copy.deepcopy(source)
    report = replace_linear(model, spec)
    assert {layer.reason for layer in report.dense} == {"embedding", "head", "router"}
    assert [layer.shape for layer in report.quantized if "experts" in layer.name] == [
        tuple(source.get_parameter(layer.name).shape) for layer in report.quantized if "experts" in layer.name]
    dense = of_decoded_weights(model, source)
    ids = torch.arange(24).reshape(2, 12)
    results = [of(ids).logits for of in (model, dense)]
    assert (results[0] - results[1]).norm() < 1e-5 * results[1].norm()
    g = torch.randn_like(results[0])
    for result in results:
        result.backward(g)
    wanted, compared = dict(dense.named_parameters()), set()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            of = wanted[parameter_name].grad
            assert (parameter.grad - of).norm() <= 1e-4 * of.norm(), parameter_name
            compared.add(parameter_name.removeprefix("model.layers.0."))
    router = "mlp.router" if name == "GptOss" else "mlp.gate"
    assert {f"{router}.weight", "model.embed_tokens.weight"} <= compared
    assert ("mlp.experts.down_proj_bias" in compared) == (name == "GptOss")


def test_experts_for_which_there_is_no_layer_are_said_to_be_dense():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.randn(2, 64, 128))

    model = nn.ModuleDict({"experts": Experts(), "up": nn.Linear(64, 64)})
    with pytest.warns(UserWarning, match=r"1 weights stay dense .*: experts.gate_up_proj \(of Experts, for which there is no"):
        report = replace_linear(model, "nf4")
    assert str(report.dense[0].reason) == "of Experts, for which there is no quantized layer"


def experts(spec="nf4", bias=False, **options):
    layer = QuantizedExperts(4, 128, 64, lambda h: nn.functional.silu(h[:, :64]) * h[:, 64:], up_features=128, spec=spec,
                             bias=bias, **options)
    torch.manual_seed(2)
    if layer.down_proj.device.type != "meta":
        layer.set_weight("gate_up_proj", torch.randn(4, 128, 128))
        layer.set_weight("down_proj", torch.randn(4, 128, 64))
    return layer


def test_experts_are_stored_and_loaded(tmp_path):
    layer = experts(bias=True)
    x, chosen, weights = torch.randn(5, 128), torch.randint(0, 4, [5, 2]), torch.rand(5, 2)
    y = layer(x, chosen, weights)
    torch.save(layer.state_dict(), tmp_path / "experts.pt")
    state = torch.load(tmp_path / "experts.pt", weights_only=True)
    other = experts(bias=True, device="meta")
    assert other.load_state_dict(state, assign=True) == ([], [])
    assert torch.equal(other(x, chosen, weights), y) and not other.down_proj.requires_grad
    with pytest.raises(RuntimeError, match="must have spec int8, got nf4"):
        experts("int8", bias=True).load_state_dict(state)
    dense = {name: layer.dequantized(name) for name in layer.packed_names}
    again = experts("int8", bias=True)
    again.load_state_dict({**dense, **{name: of for name, of in state.items() if "bias" in name}})
    assert (again(x, chosen, weights) - y).norm() < 0.02 * y.norm()
    with pytest.raises(ValueError, match=r"down_proj must have the shape \[4, 128, 64\], got \[4, 64, 128\]"):
        layer.set_weight("down_proj", torch.zeros(4, 64, 128))
    assert layer.half().gate_up_proj.dtype == torch.uint8 and layer.down_proj_bias.dtype == torch.float16


def test_adapters_are_those_of_the_decoded_weights():
    layer = experts(bias=True, lora_rank=3, lora_alpha=6)
    for name, parameter in layer.named_parameters():
        if "lora_b" in name or "bias" in name:
            nn.init.normal_(parameter, std=0.2)
    changed = {name: layer.dequantized(name) + 2 * layer.get_parameter(name + "_lora_b") @ layer.get_parameter(name + "_lora_a")
               for name in layer.packed_names}
    x, chosen = torch.randn(9, 128, requires_grad=True), torch.randint(0, 3, [9, 2])  # one expert has no token
    weights = torch.rand(9, 2, requires_grad=True)
    expected = 0
    for slot in range(2):
        of = chosen[:, slot]
        h = torch.einsum("tk,tnk->tn", x, changed["gate_up_proj"][of]) + layer.gate_up_proj_bias[of]
        y = torch.einsum("tk,tnk->tn", layer.activation(h), changed["down_proj"][of]) + layer.down_proj_bias[of]
        expected = expected + weights[:, slot, None] * y
    y = layer(x, chosen, weights)
    assert (y - expected).norm() < 1e-5 * expected.norm()
    inputs = {"x": x, "routing weights": weights, **{name: p for name, p in layer.named_parameters() if p.requires_grad}}
    assert len(inputs) == 2 + 2 + 4
    g = torch.randn_like(y)
    gradients = [torch.autograd.grad(of, list(inputs.values()), g, retain_graph=True) for of in (y, expected)]
    for name, got, wanted in zip(inputs, *gradients):
        assert (got - wanted).norm() < 1e-5 * wanted.norm(), name
    merged = copy.deepcopy(layer)
    lost = merged.merge_adapter()
    assert lost.keys() == changed.keys() and all(0.01 < loss < 0.2 for loss in lost.values())
    for name, exact in changed.items():
        assert torch.equal(merged.get_parameter(name), merged.packed_of(name, exact))
    assert merged.lora_rank == 0 and not any("lora" in name for name in merged.state_dict())
    with pytest.raises(ValueError, match="no adapter"):
        merged.merge_adapter()
    with pytest.raises(ValueError, match="must be positive, got 0"):
        merged.add_adapter(0)
    other = experts(bias=True, lora_rank=3, lora_alpha=6)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x, chosen, weights), y)


def test_a_model_with_adapters_of_experts_trains():
    transformers = pytest.importorskip("transformers", "5")
    from tiny_models import TINY
    torch.manual_seed(1)
    model = TINY["mixtral"](transformers).requires_grad_(False)
    replace_linear(model, "nf4", lora_rank=4)
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert sum("experts" in name for name in adapters) == 2 * 4 and all(p.requires_grad for p in adapters.values())
    optimizer = torch.optim.AdamW(adapters.values(), 3e-3)
    ids = torch.arange(48).reshape(2, 24)
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] and all(p.abs().max() > 0 for p in adapters.values())


def test_bytes_under_a_floating_storage_dtype():
    layer, plain = experts(storage_dtype=torch.bfloat16), experts()
    assert layer.down_proj.dtype == torch.bfloat16 and torch.equal(layer.down_proj.view(torch.uint8), plain.down_proj)
    x, chosen, weights = torch.randn(5, 128), torch.randint(0, 4, [5, 2]), torch.rand(5, 2)
    assert torch.equal(layer(x, chosen, weights), plain(x, chosen, weights))
    assert torch.equal(layer.dequantized("down_proj"), plain.dequantized("down_proj"))
    with pytest.raises(TypeError, match="would destroy the packed weight"):
        layer.half()


@pytest.mark.parametrize("rank", [0, 4])
def test_experts_compile(rank):
    if rank and torch.__version__ < (2, 15):
        pytest.skip("torch 2.11 cannot trace grouped_mm")
    layer = experts(bias=True, lora_rank=rank)
    for name, parameter in layer.named_parameters():
        if "lora_b" in name:
            nn.init.normal_(parameter, std=0.2)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 7):
        x = torch.randn(tokens, 128, requires_grad=True)
        chosen, weights = torch.randint(0, 4, [tokens, 2]), torch.rand(tokens, 2, requires_grad=True)
        results = [of(x, chosen, weights) for of in (compiled, layer)]
        assert torch.allclose(*results, rtol=1e-5, atol=1e-5)
        gradients = [torch.autograd.grad(y.square().sum(), [x, weights]) for y in results]
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*gradients))


def test_operators_pass_opcheck():
    layer = experts()
    ops = torch.ops.halfbyte
    chosen = torch.randint(0, 4, [5, 2])
    offsets, slots = ops.route(chosen, 4)
    torch.library.opcheck(ops.route.default, (chosen, 4))
    x = torch.randn(5, 128, requires_grad=True)
    torch.library.opcheck(ops.qgemm_grouped.default, (x, layer.gate_up_proj.detach(), offsets, slots, "nf4", 128, 128, 2))
    h, weights = torch.randn(10, 64, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    torch.library.opcheck(ops.qgemm_grouped_sum.default,
                          (h, layer.down_proj.detach(), offsets, slots, weights, "nf4", 128, 64))


def test_docstrings():
    result = doctest.testmod(importlib.import_module("halfbyte.torch.experts"))
    assert result.attempted > 0 and result.failed == 0
