"""halfbyte.torch.dwq: scales and biases trained over codes that stay."""

import copy
import doctest
import math
import sys
import zlib

import pytest
import torch
from torch import nn

import halfbyte
from halfbyte.torch.dwq import DwqLinear, dwq, kl_divergence, prepare_dwq

MODULE = sys.modules["halfbyte.torch.dwq"]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seed(request):
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def test_docstrings():
    result = doctest.testmod(MODULE)
    assert result.attempted > 1 and result.failed == 0


def test_divergence_and_its_gradient():
    student = torch.tensor([[[1.0, 1.0]]], requires_grad=True)
    value = kl_divergence(student, torch.tensor([[[2.0, 0.0]]]))
    value.backward()
    assert math.isclose(value.item(), 0.110944071672, rel_tol=1e-6)
    torch.testing.assert_close(student.grad, torch.tensor([[[-0.115529289, 0.115529289]]]))
    a, b = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
    p, q = (b / 3).softmax(-1), (a / 3).softmax(-1)
    torch.testing.assert_close(kl_divergence(a, b, 3.0), (p * (p / q).log()).sum(-1).mean())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_start_is_what_the_tool_stores(bits, dtype):
    linear = nn.Linear(150, 17, device=DEVICE, dtype=dtype)
    layer = DwqLinear.from_linear(linear, f"affine{bits},group_size=32")
    q = halfbyte.quantize(linear.weight.detach(), layer.spec, encoding=halfbyte.Encoding("mlx-edge",
                                                                                       code_scale="unrounded"))
    assert torch.equal(layer.codes, q.codes) and torch.equal(layer.scales.to(dtype), q.scales)
    assert torch.equal(layer.dequantized(dtype), q.dequantize(dtype))
    assert torch.equal(layer.quantized().dequantize(dtype), q.dequantize(dtype))
    same = DwqLinear.from_quantized(q, linear.bias)
    x = torch.randn(3, 150, device=DEVICE, dtype=dtype)
    assert torch.equal(same(x), layer(x)) and same(x).dtype == dtype
    torch.testing.assert_close(layer(x), nn.functional.linear(x, q.dequantize(dtype), linear.bias))
    fitted = DwqLinear.from_linear(linear, f"affine{bits},group_size=32", refit=True)
    error = lambda of: (of.dequantized() - linear.weight.float()).square().sum()  # noqa: E731
    assert torch.equal(fitted.codes, layer.codes) and error(fitted) <= error(layer)


def models(dtype=torch.float32, bits=2):
    teacher = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Dropout(0.5),
                            nn.Linear(64, 11))
    teacher = teacher.to(DEVICE, dtype)
    return prepare_dwq(copy.deepcopy(teacher), f"affine{bits},group_size=32"), teacher


def batches(count, dtype=torch.float32):
    return [2 * torch.randn(64, 64, device=DEVICE, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 4])
def test_it_learns(bits, dtype):
    student, teacher = models(dtype, bits)
    codes = [m.codes.clone() for m in student.modules() if isinstance(m, DwqLinear)]
    before = {name: p.clone() for name, p in teacher.state_dict().items()}
    data, held_out = batches(40, dtype), batches(4, dtype)
    measure = lambda model: sum(kl_divergence(model(b), teacher(b)).item() for b in held_out)  # noqa: E731
    teacher.eval()
    with torch.no_grad():
        start = measure(student.eval())
    student.train()
    teacher.train()
    report = dwq(student, teacher, data, steps=150)
    assert student.training and teacher.training
    teacher.eval()
    with torch.no_grad():
        end = measure(student.eval())
    assert report.best_loss < 0.6 * report.start_loss and end < 0.7 * start
    assert len(report.trained) == 150 and report.validated[0] == (0, report.start_loss)
    layers = [m for m in student.modules() if isinstance(m, DwqLinear)]
    assert all(torch.equal(m.codes, c) for m, c in zip(layers, codes))
    for layer in layers:  # what is stored is what was validated
        assert torch.equal(layer.scales, layer.scales.to(dtype).float()) and layer.scales.grad is None
        assert torch.equal(torch.as_tensor(layer.quantized().dequantize("f32")), layer.dequantized().detach())
    assert all(torch.equal(p, before[name]) for name, p in teacher.state_dict().items())


def test_it_never_ends_worse():
    student, teacher = models(bits=8)
    start = {name: p.clone() for name, p in student.state_dict().items()}
    report = dwq(student, teacher, batches(9), steps=20, learning_rate=30.0)
    assert report.best_step == 0 and report.best_loss == report.start_loss
    assert min(loss for _, loss in report.validated[1:]) > report.start_loss
    assert all(torch.equal(p, start[name]) for name, p in student.state_dict().items())
    assert all(p.requires_grad == name.endswith(("scales", "biases")) for name, p in student.named_parameters())


def test_batches_of_dicts_and_objects():
    class Wrapped(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, *, inputs, scale):
            return type("Output", (), {"logits": self.model(inputs) * scale})

    student, teacher = (Wrapped(m) for m in models())
    data = [{"inputs": b, "scale": 2.0} for b in batches(10)]
    squares = lambda a, b: (a - b).square().mean()  # noqa: E731
    report = dwq(student, teacher, data[2:], validation=data[:2], steps=40, loss=squares, validate_every=7)
    assert report.best_loss < report.start_loss and [s for s, _ in report.validated] == [0, 7, 14, 21, 28, 35, 40]


def test_what_is_refused():
    student, teacher = models()
    with pytest.raises(ValueError, match="DwqLinear"):
        dwq(teacher, teacher, batches(4))
    with pytest.raises(ValueError, match="0 batches to train on"):
        dwq(student, teacher, batches(1))
    with pytest.raises(ValueError, match="affine"):
        prepare_dwq(teacher, "int4")
    with pytest.raises(TypeError, match="float64"):
        DwqLinear.from_linear(nn.Linear(64, 4, dtype=torch.float64))


def test_scales_keep_f32():
    student, _ = models()
    scales = student[0].scales.clone()
    student.bfloat16()
    assert torch.equal(student[0].scales, scales) and student[0].bias.dtype == torch.bfloat16
    assert isinstance(student[0].scales, nn.Parameter)
    state = copy.deepcopy(student.state_dict())
    other, _ = models()
    other.load_state_dict(state)
    x = torch.randn(3, 64, device=DEVICE)
    assert torch.equal(other[0](x), student[0](x))


def test_checkpointing_and_autocast():
    student, _ = models()
    x = torch.randn(8, 64, device=DEVICE)
    student.eval()
    grads = []
    for again in False, True:
        y = torch.utils.checkpoint.checkpoint(student, x, use_reentrant=False) if again else student(x)
        grads.append(torch.autograd.grad(y.sin().sum(), list(student.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    with torch.autocast(DEVICE, torch.bfloat16):
        y = student(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert student[0].scales.grad.dtype == torch.float32
