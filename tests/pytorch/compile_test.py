"""Layers and models under torch.compile and torch.export: one graph, compiled once for all numbers of rows."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from halfbyte.torch import Linear4bit, LinearAffine, LinearFp8, LinearInt, replace_linear

LAYERS = [(Linear4bit, "nf4"), (Linear4bit, "nf4,double_quant"), (LinearInt, "int4,asymmetric"), (LinearAffine, "affine4"),
          (LinearFp8, "fp8,granularity=channel")]


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("of,spec", LAYERS)
def test_a_layer_is_one_graph_for_all_numbers_of_rows(of, spec, rank):
    layer = of.from_linear(nn.Linear(128, 64), spec, lora_rank=rank)
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for m in range(1, 65):
        x = torch.randn(m, 128)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        assert torch.equal(compiled(x), layer(x)), m
    assert counter.frame_count == 1


def test_dynamic_shapes_have_a_graph_for_one_row_and_one_for_more():
    """dynamic=True takes sizes of 1 for constants, whatever is compiled."""
    layer = Linear4bit.from_linear(nn.Linear(128, 64), "nf4")
    counter = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for m in range(2, 65):
        compiled(torch.randn(m, 128))
    assert counter.frame_count == 1
    compiled(torch.randn(1, 128))
    assert counter.frame_count == 2


def tiny(name):
    transformers = pytest.importorskip("transformers", "5")
    from tiny_models import TINY
    torch.manual_seed(3)
    model = TINY[name](transformers).eval().requires_grad_(False)
    replace_linear(model, "nf4")
    return model


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt-oss"])
def test_a_model_is_one_graph_for_all_lengths(name):
    model = tiny(name)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for length in (2, 3, 7, 8, 33, 64):
        ids = torch.arange(length).reshape(1, length)
        got, expected = (of(ids, use_cache=False).logits for of in (compiled, model))
        assert (got - expected).norm() <= 1e-5 * expected.norm(), length
    assert counter.frame_count == 1


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="torch 2.11 reads buffers to where they are not aligned")
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("of,spec", LAYERS)
def test_exported_layers(of, spec, rank, tmp_path):
    layer = of.from_linear(nn.Linear(128, 64), spec, lora_rank=rank)
    rows = torch.export.Dim("rows", min=1, max=4096)
    program = torch.export.export(layer, (torch.randn(5, 128),), dynamic_shapes=({0: rows},))
    torch.export.save(program, tmp_path / "layer.pt2")
    module = torch.export.load(tmp_path / "layer.pt2").module()
    for m in (1, 5, 64):
        x = torch.randn(m, 128)
        assert torch.allclose(module(x), layer(x), rtol=1e-5, atol=1e-5)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="torch 2.11 finds constraints in the attention of models")
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_exported_models(name):
    model = Logits(tiny(name))
    program = torch.export.export(model, (torch.arange(12).reshape(1, 12),),
                                  dynamic_shapes=({1: torch.export.Dim("length", min=2, max=512)},))
    for length in (2, 12, 40):
        ids = torch.arange(length).reshape(1, length)
        assert torch.allclose(program.module()(ids), model(ids), rtol=1e-4, atol=1e-5)


def test_inductor_trains():
    """Forward and backward of a compiled stack, by the default backend."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    replace_linear(model, "nf4", lora_rank=2)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for m in (3, 9):
        x = torch.randn(m, 64, requires_grad=True)
        inputs = [x, *(p for p in model.parameters() if p.requires_grad)]
        got, expected = (torch.autograd.grad(of(x).square().sum(), inputs) for of in (compiled, model))
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, expected))
