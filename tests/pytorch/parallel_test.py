"""Tensor parallelism over two processes: what one process computes, from parts of its weights."""

import copy
from pathlib import Path

import pytest
import torch
from distributed_test import WORLD, spawn
from torch import nn

from halfbyte.torch import QuantizedLinear, replace_linear

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
SPECS = ("nf4", "int4,group_size=32,asymmetric", "int8,granularity=channel", "affine3,group_size=32", "nvfp4", "mxfp4",
         "fp8,granularity=channel", "int8,granularity=tensor", "nf4,granularity=flat", "nf4,double_quant")


class Block(nn.Module):
    def __init__(self, spec, features=128, hidden=256):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(features, hidden), nn.Linear(features, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, features)
        self.dense = nn.Linear(features, 64)
        torch.manual_seed(3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.2)
        replace_linear(self, spec, exclude=["dense"])

    def forward(self, x):
        return self.dense(self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)))


def cut(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import parallelize_module

    from halfbyte.torch.parallel import ColwiseParallel, RowwiseParallel
    mesh = init_device_mesh(next(model.parameters()).device.type, (WORLD,))
    plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel(),
            "dense": ColwiseParallel(output_layouts=Replicate())}  # torch does this one
    return parallelize_module(model, mesh, plan)


def equals_one(rank, folder, device="cpu"):
    for spec in SPECS:
        whole = Block(spec).to(device)
        parts = cut(copy.deepcopy(whole))
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer, of = getattr(parts, name), getattr(whole, name)
            assert layer.weight.numel() < 0.6 * of.weight.numel(), spec
            axis = int(name == "down_proj")
            dense = of.dequantized(torch.float32).chunk(WORLD, axis)[rank]
            assert torch.equal(layer.dequantized(torch.float32), dense), spec
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(4)).to(device)
        results = []
        for model in (whole, parts):
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            y.square().sum().backward()
            bias = model.gate_proj.bias.grad
            results.append((y.detach(), leaf.grad, model.down_proj.bias.grad,
                            bias if model is parts else bias.chunk(WORLD)[rank]))
        for expected, actual in zip(*results):
            assert torch.allclose(expected, actual, rtol=1e-4, atol=1e-4 * float(expected.abs().max())), spec
        with torch.no_grad():
            assert torch.equal(parts(x), results[1][0])  # the same sums without gradients


def exact(rank, folder):
    """Integers: every sum is exact, so all bits are those of one process."""
    whole = QuantizedLinear(256, 96, spec="int4,group_size=32")
    generator = torch.Generator().manual_seed(5)
    weight = torch.randint(-7, 8, (96, 256), generator=generator).float()
    weight[:, ::32] = 7  # of scale 1
    whole.set_weight(weight, scale_rule="absmax")
    assert torch.equal(whole.dequantized(torch.float32), weight)
    whole.bias.data = torch.randint(-9, 9, (96,), generator=generator).float()
    x = torch.randint(-4, 5, (3, 256), generator=generator).float()
    expected = whole(x)

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    from halfbyte.torch.parallel import ColwiseParallel, RowwiseParallel
    mesh = init_device_mesh("cpu", (WORLD,))
    replicated, rows, columns = Replicate(), Shard(0), Shard(-1)
    x_rows = torch.cat([x, x + 1])  # 6: each process has 3
    y_rows = whole(x_rows)
    for style, given, wanted, num_rows in [
            (RowwiseParallel(), x.chunk(WORLD, -1)[rank], expected, 3),
            (RowwiseParallel(input_layouts=replicated), x, expected, 3),
            (RowwiseParallel(output_layouts=rows), x_rows.chunk(WORLD, -1)[rank], y_rows.chunk(WORLD)[rank], 6),
            (ColwiseParallel(), x, expected.chunk(WORLD, -1)[rank], 3),
            (ColwiseParallel(output_layouts=replicated), x, expected, 3),
            (ColwiseParallel(input_layouts=rows, output_layouts=columns), x_rows.chunk(WORLD)[rank],
             y_rows.chunk(WORLD, -1)[rank], 6)]:
        layer = style._apply(copy.deepcopy(whole), mesh)
        leaf = given.clone().requires_grad_()
        y = layer(leaf)
        assert torch.equal(y, wanted), (style, y, wanted)
        y.backward(torch.ones_like(y))
        assert torch.equal(layer(given), wanted)
        assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, num_rows)), style
    layer = ColwiseParallel(use_local_output=False)._apply(copy.deepcopy(whole), mesh)
    assert torch.equal(layer(x).full_tensor(), expected)
    assert torch.equal(copy.deepcopy(layer)(x).full_tensor(), expected)


def states(rank, folder):
    for spec in SPECS:
        whole = Block(spec)
        state = {name: of.clone() for name, of in whole.state_dict().items()}
        parts = cut(copy.deepcopy(whole))
        gathered = {name: of.full_tensor() if hasattr(of, "full_tensor") else of for name, of in parts.state_dict().items()}
        assert list(gathered) == list(state)
        if "double_quant" in spec:  # whose scales are f32 now
            again = Block("nf4")
            again.load_state_dict(gathered)
            assert torch.equal(again.down_proj.dequantized(), whole.down_proj.dequantized())
            continue
        for name, of in state.items():
            assert torch.equal(gathered[name].view(torch.uint8), of.view(torch.uint8)), (spec, name)
        other = cut(Block(spec))
        with torch.no_grad():
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(other, name).weight.zero_()
        missing = other.load_state_dict({name: of for name, of in state.items() if not name.startswith("dense")},
                                        strict=False)
        assert all(name.startswith("dense") for name in missing.missing_keys) and not missing.unexpected_keys
        for name in ("gate_proj", "up_proj", "down_proj"):
            for key, of in getattr(other, name).named_parameters():
                assert torch.equal(of, getattr(getattr(parts, name), key)), (spec, name, key)


def refused(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh

    from halfbyte.torch.parallel import ColwiseParallel, RowwiseParallel
    mesh = init_device_mesh("cpu", (WORLD,))
    for layer, style, text in [
            (QuantizedLinear(128, 65), ColwiseParallel(), "65 out_features are not a multiple of the 2 devices"),
            (QuantizedLinear(192, 64), RowwiseParallel(), "element 96 is not the first of a group of 64"),
            (QuantizedLinear(128, 64, lora_rank=2), ColwiseParallel(), "adapter of its own")]:
        with pytest.raises(ValueError, match=text):
            style._apply(layer, mesh)
    layer = ColwiseParallel()._apply(QuantizedLinear(128, 64), mesh)
    with pytest.raises(ValueError, match="cut already"):
        RowwiseParallel()._apply(layer, mesh)
    with pytest.raises(ValueError, match="has no adapter of its own"):
        layer.add_adapter(2)
    with pytest.raises(RuntimeError, match=r"must have the shape \[64, 128\], got \[64, 64\]"):
        layer.load_state_dict(QuantizedLinear(64, 64).state_dict())
    with pytest.raises(RuntimeError, match="with weight_spec"):
        layer.load_state_dict(nn.Linear(128, 64).state_dict())


@pytest.mark.parametrize("of", [equals_one, exact, states, refused])
def test_two_processes(tmp_path, of):
    spawn(of, tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two GPUs")
def test_two_gpus(tmp_path):
    spawn(equals_one, tmp_path, "cuda")


def transformers_model(rank, folder):
    transformers = pytest.importorskip("transformers")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from halfbyte.torch.parallel import plan_of

    def load():
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        replace_linear(model, "nf4", exclude=["lm_head"])
        return model

    whole, parts = load(), load()
    plan = plan_of(parts)
    assert len(plan) == 4 * 7 + 1  # layers of attention and MLP, and the head, which is dense
    parallelize_module(parts, init_device_mesh("cpu", (WORLD,)), plan)
    layer = parts.model.layers[0].self_attn.q_proj
    assert isinstance(layer, QuantizedLinear) and layer.out_features == 256 // WORLD
    tokens = torch.tensor([list(b"The sea was")])
    with torch.no_grad():
        expected, actual = whole(tokens).logits, parts(tokens).logits
    assert torch.allclose(expected, actual, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(whole.generate(tokens, **options), parts.generate(tokens, **options))


def test_a_model_of_transformers(tmp_path):
    spawn(transformers_model, tmp_path)
