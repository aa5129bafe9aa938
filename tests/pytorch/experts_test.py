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


def test_experts_compile():
    layer = experts(bias=True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 7):
        x = torch.randn(tokens, 128, requires_grad=True)
        chosen, weights = torch.randint(0, 4, [tokens, 2]), torch.rand(tokens, 2, requires_grad=True)
        results = [of(x, chosen, weights) for of in (compiled, layer)]
        assert torch.equal(*results)
        gradients = [torch.autograd.grad(y.square().sum(), [x, weights]) for y in results]
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(*gradients))


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
