"""Operators on weights, QgemmPlans, and the doors to them: values, gradients, fakes, equal bytes."""

import numpy as np
import pytest
import torch

import halfbyte
from halfbyte.torch import _fast
from halfbyte.torch._ops_weight import dequantize_packed, nested_of, part_shapes, quantize_packed, shape_of, sum_rows

ops = torch.ops.halfbyte
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
PACKED = ["nf4", "fp4,group_size=32", "nf4,granularity=flat", "int4,asymmetric,group_size=128", "int8,granularity=channel",
          "int8,granularity=tensor", "affine4,scale_dtype=bf16", "affine8", "nf4,double_quant", "int3,asymmetric", "affine2,scale_dtype=bf16",
          "affine5,group_size=96", "int6,granularity=channel", "nvfp4", "mxfp4", "fp8,group_size=128"]
PLAIN = [spec for spec in PACKED if "double" not in spec] + ["int2,granularity=flat"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

pytestmark = [pytest.mark.parametrize("device", DEVICES),
              pytest.mark.filterwarnings("ignore:.*batching rule", "ignore:.*double precision")]


def randn(*shape, device, dtype=torch.float32, grad=False):
    return torch.randn(*shape, dtype=torch.float64).to(device, dtype).requires_grad_(grad)


def relative(of, reference):
    return float((of.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-300))


@pytest.mark.parametrize("spec", PLAIN)
@pytest.mark.parametrize("shape", [(1, 64), (7, 192), (2, 3, 320)])
def test_quantize_gives_the_shapes_and_values_of_the_library(spec, shape, device):
    x = randn(*shape, device=device)
    codes, scales, zeros, biases, global_scale = parts = ops.quantize(x, spec)
    of, rows, cols = halfbyte.QuantSpec.parse(spec), x.numel() // shape[-1], shape[-1]
    assert tuple(map(tuple, part_shapes(of, rows, cols))) == of.part_shapes(rows, cols)
    assert tuple(codes.shape) == of.part_shapes(rows, cols)[0]
    assert (zeros.numel() > 0, biases.numel() > 0) == (of.has_zeros, of.has_biases)
    assert global_scale.numel() == of.has_global_scale
    host = ops.quantize(x.cpu(), spec)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(parts, host))
    y = ops.dequantize(*parts[:4], spec, list(shape), torch.float32, global_scale)
    limit = 0.04 if of.format == "fp8" else {2: 0.95, 3: 0.5, 4: 0.2, 5: 0.1, 6: 0.05, 8: 0.02}[of.bits]
    assert y.shape == x.shape and relative(y, x) < limit


def test_quantize_refuses_what_is_not_finite(device):
    x = randn(4, 64, device=device)
    x[2, 3] = float("nan")
    with pytest.raises(ValueError, match="num_nonfinite=1, first_nonfinite=131"):
        ops.quantize(x, "nf4")


@pytest.mark.parametrize("spec", PACKED)
def test_unpack_undoes_pack(spec, device):
    n, k = 48, 256
    x = randn(n, k, device=device)
    packed = quantize_packed(x, spec)
    assert packed.numel() == halfbyte.QuantSpec.parse(spec).packed_bytes(n, k)
    codes, scales, zeros, biases, *nested = ops.unpack(packed, spec, n, k)
    nested = nested_of(halfbyte.QuantSpec.parse(spec), *nested)
    assert torch.equal(ops.pack(codes, scales, zeros, biases, nested, spec, n, k), packed)
    assert relative(dequantize_packed(packed, spec, n, k, torch.float32), x) < (0.5 if "affine2" in spec else 0.2)


@pytest.mark.parametrize("spec", ["affine4,group_size=32", "int4,asymmetric,granularity=channel", "nf4,granularity=flat",
                                  "affine3,group_size=48", "int8,granularity=tensor"])
def test_dequantize_has_the_gradients_of_scales_and_biases(spec, device):
    n, k = 5, 64
    x = randn(n, k, device=device, dtype=torch.float64)
    codes, scales, zeros, biases, _ = ops.quantize(x, f"{spec},scale_dtype=f64")
    scales.requires_grad_()
    biases.requires_grad_(biases.numel() > 0)

    def function(scales, biases):
        return ops.dequantize(codes, scales, zeros, biases, f"{spec},scale_dtype=f64", [n, k], torch.float64)

    assert torch.autograd.gradcheck(function, (scales, biases))
    assert torch.autograd.gradgradcheck(function, (scales, biases))


@pytest.mark.parametrize("spec", PACKED)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [(), (1,), (3, 5), (0, 2), (130,)])
def test_qgemm_and_its_gradients_against_the_dense_weight(spec, dtype, rows, device):
    n, k, r = 96, 192, 4
    if "flat" in spec and k % 64:
        pytest.skip("no packed form")
    packed = quantize_packed(randn(n, k, device=device), spec)
    dense = dequantize_packed(packed, spec, n, k, torch.float32).double()
    x, bias = randn(*rows, k, device=device, dtype=dtype, grad=True), randn(n, device=device, dtype=dtype, grad=True)
    a, b = randn(r, k, device=device, dtype=dtype, grad=True), randn(n, r, device=device, dtype=dtype, grad=True)
    exact = [of.detach().double().requires_grad_() for of in (x, bias, a, b)]
    for adapter in (False, True):
        reference = exact[0] @ dense.T + exact[1]
        if adapter:
            reference = reference + 0.5 * (exact[0] @ exact[2].T) @ exact[3].T
        inputs = (x, bias, a, b) if adapter else (x, bias)
        g = randn(*rows, n, device=device, dtype=dtype)
        expected = torch.autograd.grad(reference, exact[: len(inputs)], g.double())
        shape = shape_of(spec, n, k)
        doors = ([lambda: ops.qgemm_lora(x, packed, bias, a, b, 0.5, spec, n, k),
                  lambda: _fast.linear_lora(x, packed, bias, a, b, 0.5, shape)] if adapter else
                 [lambda: ops.qgemm(x, packed, bias, spec, n, k), lambda: _fast.linear(x, packed, bias, shape)])
        results = []
        for door in doors:
            y = door()
            results.append([y.detach(), *torch.autograd.grad(y, inputs, g)])
        assert all(torch.equal(p, q) for p, q in zip(*results))  # the same bytes by both doors
        for of, want in zip(results[0], [reference.detach(), *expected]):
            assert of.shape == want.shape and of.dtype == dtype
            assert of.numel() == 0 or relative(of, want) < 2 * TOLERANCE[dtype], adapter
        with torch.no_grad():
            assert all(torch.equal(door(), results[0][0]) for door in doors)


def test_the_bytes_are_those_of_a_plan(device):
    n, k, m, spec = 64, 128, 3, "int4,group_size=32"
    packed = quantize_packed(randn(n, k, device=device), spec)
    x, bias = randn(m, k, device=device, dtype=torch.bfloat16), randn(n, device=device, dtype=torch.bfloat16)
    y = torch.full([m, n], float("nan"), dtype=torch.bfloat16, device=device)
    threads = torch.get_num_threads()
    plan = halfbyte.QgemmPlan.select(device, halfbyte.QgemmDescriptor(spec=spec, m=m, n=n, k=k, bias=True),
                                     num_threads=threads)
    plan.run(x=x, weight=packed, bias=bias, y=y)
    assert torch.equal(ops.qgemm(x, packed, bias, spec, n, k), y)
    assert torch.equal(_fast.linear(x, packed, bias, shape_of(spec, n, k)), y)
    plans = halfbyte.QgemmPlans(spec, n, k, bias=True, device=device, num_threads=threads)
    assert torch.equal(plans(x.reshape(m, 1, 1, k), packed.view(torch.bfloat16).view(-1, 2), bias).reshape(m, n), y)
    given = torch.full_like(y, float("nan"))
    assert plans(x, packed, bias, given) is given and torch.equal(given, y)
    adding = halfbyte.QgemmPlans(spec, n, k, accumulate=True, device=device)
    ones = torch.ones_like(y)
    assert adding(x, packed, out=ones) is ones
    assert relative(ones, x.double() @ dequantize_packed(packed, spec, n, k, torch.float64).T + 1) < 2e-2
    assert plans.weight_bytes == packed.numel() and plans.workspace_size(m) > 0 and plans.at(m).descriptor.m == m


def test_qgemm_plans_name_what_does_not_fit(device):
    n, k = 64, 128
    plans = halfbyte.QgemmPlans("nf4", n, k, "f32", device=device)
    packed = quantize_packed(randn(n, k, device=device), "nf4")
    x = randn(2, k, device=device)
    for arguments, text in [((x[:, :64], packed), r"x must have the shape \[\.\.\., 128\], got \[2, 64\]"),
                            ((x.t().contiguous().t(), packed), "x must be contiguous"),
                            ((x.half(), packed), "x must be f32, got f16"),
                            ((x, packed.view(torch.bfloat16).float()), "a cast destroys them"),
                            ((x, packed[:-64]), "weight must be the"),
                            ((x, packed, None, x.new_empty(2, n + 1)), r"out must have the shape \[2, 64\]")]:
        with pytest.raises(ValueError, match=text):
            plans(*arguments)
    with pytest.raises(ValueError, match="out must be given"):
        halfbyte.QgemmPlans("nf4", n, k, "f32", accumulate=True, device=device)(x, packed)
    with pytest.raises(TypeError, match="x must be an array"):
        plans([1.0], packed)


def test_qgemm_plans_take_numpy(device):
    if device != "cpu":
        pytest.skip("NumPy is on the CPU")
    n, k = 32, 64
    packed = quantize_packed(randn(n, k, device="cpu"), "affine4")
    x = np.random.default_rng(5).standard_normal((4, k), dtype=np.float32)
    y = halfbyte.QgemmPlans("affine4", n, k, "f32", num_threads=1)(x, packed.numpy())
    assert isinstance(y, np.ndarray)
    assert relative(torch.from_numpy(y), torch.from_numpy(x) @ dequantize_packed(packed, "affine4", n, k, torch.float32).T) < 2e-6


@pytest.mark.parametrize("spec", ["nf4", "int8,asymmetric", "affine4,scale_dtype=bf16", "nf4,double_quant"])
def test_opcheck(spec, device):
    n, k, check = 32, 128, torch.library.opcheck
    x = randn(n, k, device=device)
    if "double" not in spec:
        *parts, _ = ops.quantize(x, spec)
        check(ops.quantize.default, (x, spec))
        check(ops.pack.default, (*parts, [], spec, n, k))
        trained = [part.requires_grad_() if part.is_floating_point() and part.numel() else part for part in parts]
        check(ops.dequantize.default, (*trained, spec, [n, k], torch.float32))
    packed = quantize_packed(x, spec)
    check(ops.unpack.default, (packed, spec, n, k))
    bias, a, b = (randn(*size, device=device, grad=True) for size in ([n], [4, k], [n, 4]))
    for rows in ([], [3, 2]):
        x = randn(*rows, k, device=device, grad=True)
        check(ops.qgemm.default, (x, packed, bias, spec, n, k))
        check(ops.qgemm.default, (x, packed, None, spec, n, k), {"transposed": False})
        check(ops.qgemm_lora.default, (x, packed, bias, a, b, 0.5, spec, n, k))


def test_gradcheck_of_products(device):
    n, k = 32, 64
    packed = quantize_packed(randn(n, k, device=device), "affine4")
    x = randn(3, k, device=device, grad=True)
    a, b = randn(2, k, device=device, grad=True), randn(n, 2, device=device, grad=True)
    shape = shape_of("affine4", n, k)
    for function, inputs in [(lambda x: ops.qgemm(x, packed, None, "affine4", n, k), (x,)),
                             (lambda x: _fast.linear(x, packed, None, shape), (x,)),
                             (lambda *of: _fast.linear_lora(of[0], packed, None, *of[1:], 0.5, shape), (x, a, b)),
                             (lambda *of: ops.qgemm_lora(of[0], packed, None, *of[1:], 0.5, "affine4", n, k), (x, a, b))]:
        # f32: wide steps, as products are linear in each input.
        assert torch.autograd.gradcheck(function, inputs, eps=1e-1, atol=2e-2, rtol=2e-2, nondet_tol=0.0)
        y = function(*inputs)
        first = torch.autograd.grad(y, inputs, torch.ones_like(y).requires_grad_(), create_graph=True)
        assert all(grad.requires_grad for grad in first)


def test_the_slow_door_takes_over(device):
    n, k = 32, 64
    packed = quantize_packed(randn(n, k, device=device), "nf4")
    shape, x = shape_of("nf4", n, k), randn(4, k, device=device)
    y = _fast.linear(x, packed, None, shape)
    assert _fast.is_open(x, packed) and _fast.is_open(torch.nn.Parameter(x), packed)

    class Mine(torch.Tensor):
        pass

    assert not _fast.is_open(x.as_subclass(Mine), packed)
    torch.testing.assert_close(torch.vmap(lambda row: _fast.linear(row, packed, None, shape))(x), y)
    compiled = torch.compile(lambda x: _fast.linear(x, packed, None, shape), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), y)
    assert _fast.linear(x.to("meta"), packed.to("meta"), None, shape).shape == (4, n)
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode() as mode:
        fake = _fast.linear(mode.from_tensor(x), mode.from_tensor(packed), None, shape)
    assert fake.shape == (4, n) and fake.device.type == device
    exported = torch.export.export(Product(packed, shape), (x,), dynamic_shapes={"x": {0: torch.export.Dim("m")}})
    assert torch.equal(exported.module()(x[:3]), Product(packed, shape)(x[:3]))


class Product(torch.nn.Module):
    def __init__(self, packed, shape):
        super().__init__()
        self.register_buffer("packed", packed)
        self.shape = shape

    def forward(self, x):
        return _fast.linear(x, self.packed, None, self.shape)


def test_a_transposed_view_of_x(device):
    n, k = 32, 64
    packed = quantize_packed(randn(n, k, device=device), "nf4")
    x = randn(k, 5, device=device).t()
    assert torch.equal(_fast.linear(x, packed, None, shape_of("nf4", n, k)), ops.qgemm(x.contiguous(), packed, None, "nf4", n, k))
    assert sum_rows(x).shape == (k,)


def test_results_on_cuda_belong_to_the_allocator(device):
    if device != "cuda":
        pytest.skip("needs a GPU")
    n = k = 1024
    packed = quantize_packed(randn(n, k, device=device), "nf4")
    x, side = randn(4, k, device=device), torch.cuda.Stream()
    y = _fast.linear(x, packed, None, shape_of("nf4", n, k))
    address = y.data_ptr()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    y.record_stream(side)
    del y
    assert torch.empty(4, n, device=device).data_ptr() != address  # still in use on the other stream
    graph = torch.cuda.CUDAGraph()
    expected = _fast.linear(x, packed, None, shape_of("nf4", n, k))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = _fast.linear(x, packed, None, shape_of("nf4", n, k))
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, expected)
