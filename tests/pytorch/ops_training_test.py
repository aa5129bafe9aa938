"""torch.ops.halfbyte.*: operators of training, against plain PyTorch and against the plans."""

import doctest
import zlib

import pytest
import torch

import halfbyte
import halfbyte.torch._ops_training as ops
from torch.library import opcheck

OPS = torch.ops.halfbyte
GROUPS = [
    {"granularity": "tensor"},
    {"granularity": "channel", "axis": 0},
    {"granularity": "channel", "axis": -1},
    {"granularity": "group", "axis": -1, "group_size": 8},
    {"granularity": "group", "axis": 1, "group_size": 3},
]
SHAPE = (5, 7, 19)


@pytest.fixture(autouse=True)
def seed(request):
    torch.manual_seed(zlib.crc32(request.node.name.encode()))


def device_of():
    return "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(device_of(), dtype)


def scale_shape(groups, shape=SHAPE):
    return ops._scale_shape(shape, **groups)


def expanded(values, groups, shape):
    """The value of each element's group."""
    if groups["granularity"] == "tensor":
        return values.expand(shape)
    axis = groups["axis"] % len(shape)
    if groups["granularity"] == "channel":
        return values.view([-1 if i == axis else 1 for i in range(len(shape))]).expand(shape)
    return values.repeat_interleave(groups["group_size"], axis).narrow(axis, 0, shape[axis])


def test_docstrings():
    result = doctest.testmod(ops)
    assert result.attempted > 10 and result.failed == 0


# ---- The oracle: PyTorch, one rounding after the other


def quantize(x, scale, zero_point, q_min, q_max):
    """The codes before they are clamped and the values, in f32 or f64."""
    state = torch.float64 if x.dtype == torch.float64 else torch.float32
    r = torch.round(x.to(state) / scale.to(state)) + zero_point
    y = (r.clamp(q_min, q_max) - zero_point) * scale.to(state)
    return r, (y + 0).to(x.dtype)  # a code of zero gives +0


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("zeros", [False, True])
def test_straight_through(groups, dtype, zeros):
    x = random(*SHAPE, dtype=dtype).requires_grad_()
    scale = random(*scale_shape(groups)).abs() / 16 + 0.05
    zero_point = None
    if zeros:
        zero_point = torch.randint(-9, 9, scale.shape, device=x.device, dtype=torch.int32)
    z = torch.zeros_like(scale) if zero_point is None else zero_point.float()
    r, expected = quantize(x.detach(), expanded(scale, groups, SHAPE), expanded(z, groups, SHAPE).to(
        torch.float64 if dtype == torch.float64 else torch.float32), -8, 7)
    dy = random(*SHAPE, dtype=dtype)
    passes = (r >= -8) & (r <= 7)
    assert passes.any() and not passes.all()
    masked = ops.fake_quantize(x, scale, zero_point, **groups)
    plain = OPS.fake_quantize(x, scale, zero_point, **groups)
    for y in masked, plain:
        assert torch.equal(y, expected)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(dx, torch.where(passes, dy, 0))


def pairwise(terms):
    """The sum over the last axis as the library defines it: S(i, 2m) = S(i, m) + S(i + m, m)."""
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms = torch.nn.functional.pad(terms, (0, 1))
        terms = terms[..., 0::2] + terms[..., 1::2]
    return terms[..., 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("learned_zero", [False, True])
def test_learned(dtype, learned_zero):
    state = torch.float64 if dtype == torch.float64 else torch.float32
    rows, cols, size, q_min, q_max, factor = 6, 75, 16, -4, 3, 0.37
    groups = {"granularity": "group", "axis": -1, "group_size": size}
    x = random(rows, cols, dtype=dtype).requires_grad_()
    scale = (random(rows, 5).abs() / 3 + 0.05).to(state).requires_grad_()
    zero_point = (2 * random(rows, 5)).to(state).requires_grad_() if learned_zero else None
    dy = random(rows, cols, dtype=dtype)
    y = ops.fake_quantize(x, scale, zero_point, q_min=q_min, q_max=q_max, gradient_scale=factor, **groups)
    grads = torch.autograd.grad(y, [x, scale] + ([zero_point] if learned_zero else []), dy)

    with torch.no_grad():
        of = lambda values: torch.nn.functional.pad(values, (0, -cols % size)).unflatten(1, (-1, size))  # noqa: E731
        z = torch.round(zero_point).clamp(q_min, q_max) if learned_zero else torch.zeros_like(scale)
        v = of(x.to(state)) / scale[..., None]
        r = torch.round(v)
        low, high = (q_min - z)[..., None], (q_max - z)[..., None]
        passes = (r >= low) & (r <= high)
        values = (r.clamp(low, high) * scale[..., None] + 0).flatten(1)[:, :cols].to(dtype)
        assert torch.equal(y, values)
        g = of(dy.to(state))
        assert torch.equal(grads[0], torch.where(passes, of(dy), 0).flatten(1)[:, :cols])
        bound = torch.where(r > high, high, low)
        assert torch.equal(grads[1], pairwise(torch.where(passes, g * (r - v), g * bound)) * factor)
        if learned_zero:
            assert torch.equal(grads[2], -(scale * pairwise(torch.where(passes, 0, g))) * factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["nvfp4", "mxfp4"])
def test_block_floats(form, dtype):
    """What is stored, bit by bit; all gradients pass, those of what the rounding of scales clips too."""
    x, dy = random(9, 83, dtype=dtype).requires_grad_(), random(9, 83, dtype=dtype)
    y = ops.fake_quantize(x, format=form)
    codes, scales, zeros, biases, global_scale = OPS.quantize(x.detach(), form)
    assert torch.equal(y, OPS.dequantize(codes, scales, zeros, biases, form, list(x.shape), dtype, global_scale))
    assert not torch.equal(y, x)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dy)
    assert torch.equal(ops.fake_quantize(x.T, format=form, axis=0).T, y)
    if form == "nvfp4":
        assert torch.equal(ops.fake_quantize(x, format=form, global_scale=global_scale), y)
        assert not torch.equal(ops.fake_quantize(x, format=form, global_scale=global_scale * 64), y)
    with pytest.raises(ValueError, match=f"format {form} makes its scales of x"):
        ops.fake_quantize(x, scales, format=form)


@pytest.mark.parametrize("form", ["nf4", "fp4", "fp4_e2m1"])
def test_tables_and_plans(form):
    """Bytes of the plans called directly: computed scales, masks, learned scales of a table."""
    x, dy = random(9, 80), random(9, 80)
    fields = {"granularity": "group", "axis": -1, "group_size": 32, "format": form}
    y, scale, zero_point, mask = OPS.fake_quantize_computed(x, **fields)
    assert zero_point.numel() == 0
    d = halfbyte.FakeQuantizeDescriptor(shape=x.shape, computed=True, mask=True, **fields)
    expected = [torch.empty_like(t) for t in (y, scale, mask)]
    plan = halfbyte.FakeQuantizePlan.select(str(x.device), d)
    plan.run(x=x, y=expected[0], scale=expected[1], mask=expected[2])
    assert all(torch.equal(a, b) for a, b in zip((y, scale, mask), expected))
    assert torch.equal(ops.fake_quantize(x, **fields), y)
    assert torch.equal(ops.fake_quantize(x, scale, **fields), y)
    x.requires_grad_()
    scale.requires_grad_()
    dx, dscale = torch.autograd.grad(ops.fake_quantize(x, scale, gradient_scale=2.0, **fields), (x, scale), dy)
    d = halfbyte.FakeQuantizeDescriptor(shape=x.shape, gradient_scale=2.0, **fields)
    expected = torch.empty_like(dx), torch.empty_like(dscale)
    halfbyte.FakeQuantizeLearnedBackwardPlan.select(str(x.device), d).run(
        x=x.detach(), dy=dy, scale=scale.detach(), dx=expected[0], dscale=expected[1])
    assert torch.equal(dx, expected[0]) and torch.equal(dscale, expected[1])


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("code_dtype", ["i8", "u8", "i4", "u4"])
def test_quantize_linear(groups, code_dtype):
    q_min, q_max = {"i8": (-100, 90), "u8": (0, 255), "i4": (-8, 7), "u4": (0, 15)}[code_dtype]
    options = {"q_min": q_min, "q_max": q_max, "code_dtype": code_dtype} | groups
    x = random(*SHAPE)
    codes, scale, zero_point = ops.quantize_linear(x, scale_rule="minmax", zero_point_dtype=torch.int32, **options)
    assert scale.shape == zero_point.shape == torch.Size(scale_shape(groups))
    assert torch.equal(codes, ops.quantize_linear(x, scale, zero_point, **options))
    y = ops.dequantize_linear(codes, scale, zero_point, cols=SHAPE[-1], **options)
    z = expanded(zero_point.float(), groups, SHAPE)
    _, expected = quantize(x, expanded(scale, groups, SHAPE), z, q_min, q_max)
    assert torch.equal(y, expected)
    if code_dtype in ("i8", "u8"):
        assert torch.equal((codes.float() - z) * expanded(scale, groups, SHAPE) + 0, expected)
    half = ops.dequantize_linear(codes, scale, zero_point, cols=SHAPE[-1], dtype=torch.bfloat16, **options)
    assert torch.equal(half, expected.to(torch.bfloat16))


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.filterwarnings("ignore:Input #")  # that the inputs are f32
def test_gradient_of_dequantize_linear(groups):
    x = random(*SHAPE)
    codes, scale, zero_point = ops.quantize_linear(x, scale_rule="minmax", zero_point_dtype=torch.int8, **groups)
    scale.requires_grad_()
    y = ops.dequantize_linear(codes, scale, zero_point, **groups)
    dy = random(*SHAPE)
    (dscale,) = torch.autograd.grad(y, scale, dy)
    values = codes.double() - expanded(zero_point.double(), groups, SHAPE)
    exact = scale.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(values * expanded(exact, groups, SHAPE), exact, dy.double())
    torch.testing.assert_close(dscale.double(), expected, rtol=1e-5, atol=1e-3)
    # linear in the scale (which is positive), so that a wide step has no error of its own
    assert torch.autograd.gradcheck(lambda s: ops.dequantize_linear(codes, s, zero_point, **groups),
                                    (scale.detach() + 1).requires_grad_(), eps=0.5, atol=0.05, rtol=1e-3, nondet_tol=0)


# ---- Observers


@pytest.mark.parametrize("kind", ["min-max", "moving-average", "percentile", "mse"])
@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_observe(kind, groups):
    shape = scale_shape(groups)
    state = [torch.full(shape, torch.inf), torch.full(shape, -torch.inf),
             torch.zeros(shape if kind in ("percentile", "mse") else [], dtype=torch.int64)]
    state = [t.to(device_of()) for t in state]
    expected = [t.clone() for t in state]
    fields = {"momentum": 0.75, "percentile": 90.0}
    qparams = {"q_min": -8, "q_max": 7}
    config = halfbyte.ObserverConfig(kind, **fields, qparams=halfbyte.QParamsConfig(**qparams))
    d = halfbyte.ObserveDescriptor(shape=SHAPE, observer=config, **groups)
    plan = halfbyte.ObservePlan.select(str(state[0].device), d)
    for _ in range(3):
        x = random(*SHAPE)
        versions = [t._version for t in state]
        ops.observe(x, *state, kind=kind, **fields, **qparams, **groups)
        assert all(t._version > v for t, v in zip(state, versions))
        plan.run(x=x, min=expected[0], max=expected[1], num_batches=expected[2])
        assert all(torch.equal(a, b) for a, b in zip(state, expected))
    if kind == "moving-average" and groups["granularity"] == "tensor":
        oracle = torch.ao.quantization.MovingAverageMinMaxObserver(averaging_constant=0.25)
        torch.testing.assert_close(ops_average(groups, oracle), oracle.max_val)
    scale, zero_point = ops.compute_qparams(state[0], state[1], q_min=-8, q_max=7)
    assert zero_point is None and scale.shape == torch.Size(shape)
    # the negative end may lie at most half a step beyond the codes
    high = torch.maximum(state[1].abs(), state[0].abs())
    torch.testing.assert_close(scale, high / 7)


def ops_average(groups, oracle):
    state = torch.tensor(torch.inf), torch.tensor(-torch.inf), torch.tensor(0)
    for _ in range(4):
        x = torch.randn(40)
        oracle(x)
        ops.observe(x, *state, kind="moving-average", momentum=0.75)
    return state[1]


def test_qparams_of_unsigned_codes():
    low, high = torch.tensor([-1.0, 0.5]), torch.tensor([3.0, 2.0])
    scale, zero_point = ops.compute_qparams(low, high, q_min=0, q_max=255, asymmetric=True, scale_rule="minmax")
    assert zero_point.dtype == torch.int32
    assert torch.equal(scale, torch.tensor([4.0, 2.0]) / 255) and zero_point.tolist() == [64, 0]


# ---- Affine codes


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.filterwarnings("ignore:Input #")  # that the inputs are f32
def test_affine(bits, packed):
    rows, cols, size = 5, 77, 32
    options = {"bits": bits, "group_size": size, "packed": packed}
    w = random(rows, cols)
    codes, scales, biases = ops.affine_init(w, **options)
    y = ops.affine_qdq(codes, scales, biases, cols=cols, **options)
    of = {"granularity": "group", "axis": 1, "group_size": size}
    step = expanded(scales, of, w.shape)
    q = torch.round((y - expanded(biases, of, w.shape)) / step)
    assert torch.equal(q * step + expanded(biases, of, w.shape), y)
    assert ((y - w).abs() <= step * 0.5001).all()
    if not packed:
        assert torch.equal(q.to(torch.uint8), codes)
    dy = random(rows, cols)
    scales.requires_grad_()
    biases.requires_grad_()
    dscales, dbiases = torch.autograd.grad(ops.affine_qdq(codes, scales, biases, cols=cols, **options),
                                           (scales, biases), dy)
    pad = lambda t: torch.nn.functional.pad(t, (0, -cols % size)).unflatten(1, (-1, size))  # noqa: E731
    assert torch.equal(dscales, pairwise(pad(q * dy))) and torch.equal(dbiases, pairwise(pad(dy)))
    small = ops.affine_init(random(2, 11), bits=bits, group_size=4, packed=packed)
    inputs = [t.requires_grad_() for t in small[1:]]
    # linear in both, so that a wide step has no error of its own
    assert torch.autograd.gradcheck(
        lambda s, b: ops.affine_qdq(small[0], s, b, cols=11, bits=bits, group_size=4, packed=packed), inputs, eps=0.5,
        atol=0.05, rtol=1e-3, nondet_tol=0)


def test_adam_step():
    rows, cols, options = 4, 96, {"bits": 3, "group_size": 32}
    codes, scales, biases = ops.affine_init(random(rows, cols), **options)
    parameters = [scales.clone().requires_grad_(), biases.clone().requires_grad_()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    state = [scales, biases, *(torch.zeros_like(scales) for _ in range(4))]
    for step in range(1, 6):
        dy = random(rows, cols)
        y = ops.affine_qdq(codes, *parameters, cols=cols, **options)
        optimizer.zero_grad()
        y.backward(dy)
        optimizer.step()
        version = scales._version
        ops.affine_adam_step(dy, codes, *state, step=step, learning_rate=0.01, **options)
        assert scales._version > version
    for mine, theirs in zip(state, parameters):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-6, atol=1e-7)


# ---- As operators


def cases():
    x, scale = random(4, 33), random(4, 3).abs() + 0.1
    groups = {"granularity": "group", "axis": -1, "group_size": 16}
    learned = random(4, 3)
    zero = torch.ones(4, 3, dtype=torch.int32, device=x.device)
    grad = lambda t: t.clone().requires_grad_()  # noqa: E731
    codes = OPS.quantize_linear(x, scale, zero, **groups)
    packed = OPS.quantize_linear(x, scale, zero, q_min=-8, q_max=7, code_dtype="i4", **groups)
    affine = OPS.affine_init(x, bits=3, group_size=16)
    inf = torch.full((4, 3), torch.inf, device=x.device)
    count = torch.tensor(0, device=x.device)
    mask = OPS.fake_quantize_masked(x, scale, None, **groups)[1]
    dy = random(4, 33)
    moments = [torch.zeros_like(affine[1]) for _ in range(4)]
    return {
        "quantize_linear": ((x, scale, zero), groups),
        "quantize_linear_computed": ((x,), {"q_min": -8, "q_max": 7, "code_dtype": "u8"} | {
            "q_min": 0, "scale_rule": "minmax", "zero_point_dtype": torch.int32} | groups),
        "dequantize_linear": ((codes, grad(scale), zero), groups),
        "dequantize_linear of i4": ((packed, grad(scale), zero), {"cols": 33, "code_dtype": "i4", "q_min": -8,
                                                                  "q_max": 7, "dtype": torch.bfloat16} | groups),
        "fake_quantize": ((grad(x), scale, zero), groups),
        "fake_quantize of lsq": ((grad(x), grad(scale), None), {"gradient_scale": 0.1} | groups),
        "fake_quantize of lsq+": ((grad(x), grad(scale), grad(learned)), groups),
        "fake_quantize of a table": ((grad(x), grad(scale), None), {"format": "lut4", "table": [
            i / 8 - 1 for i in range(16)]} | groups),
        "fake_quantize_masked": ((grad(x), scale, zero), groups),
        "fake_quantize_block_floats": ((grad(x), None), {"format": "nvfp4"}),
        "fake_quantize_block_floats of mxfp4": ((grad(x), None), {"format": "mxfp4", "axis": 0}),
        "fake_quantize_computed": ((grad(x),), {"asymmetric": True, "scale_rule": "minmax"} | groups),
        "fake_quantize_backward": ((dy, x, scale, zero), groups),
        "fake_quantize_learned_backward": ((dy, x, scale, learned), groups),
        "fake_quantize_mask_backward": ((dy, mask), {}),
        "observe": ((x, inf, -inf, count), groups),
        "compute_qparams": ((-scale, scale), {"scale_dtype": torch.float16, "q_min": 0, "q_max": 15, "asymmetric": True,
                                              "scale_rule": "minmax", "zero_point_dtype": torch.int32}),
        "affine_init": ((x,), {"bits": 3, "group_size": 16, "scale_dtype": torch.bfloat16, "refit": True}),
        "affine_qdq": ((affine[0], grad(affine[1]), grad(affine[2])), {"cols": 33, "bits": 3, "group_size": 16}),
        "affine_qdq of bf16": ((affine[0], grad(affine[1].bfloat16()), grad(affine[2].bfloat16())), {
            "cols": 33, "bits": 3, "group_size": 16, "dtype": torch.bfloat16}),
        "affine_qdq_backward": ((dy, affine[0]), {"bits": 3, "group_size": 16}),
        "affine_adam_step": ((dy, affine[0], affine[1], affine[2], *moments), {"step": 1, "bits": 3, "group_size": 16}),
    }


@pytest.mark.parametrize("name", cases())
def test_opcheck(name):
    inputs, options = cases()[name]
    opcheck(getattr(OPS, name.split()[0]).default, inputs, options)


def test_every_operator_is_checked():
    defined = {name for name, value in vars(ops).items() if name.endswith("_op")}
    assert defined == {f"_{name.split()[0]}_op" for name in cases()}


def test_compile_with_any_extent():
    def step(x, scale, codes, scales, biases):
        w = ops.affine_qdq(codes, scales, biases, cols=x.shape[-1], bits=3, group_size=16)
        groups = {"granularity": "group", "axis": -1, "group_size": x.shape[-1]}
        return ops.fake_quantize(x, scale, **groups) @ w.T

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, cols in (3, 32), (5, 48), (1, 40):
        x, scale = random(rows, cols).requires_grad_(), random(rows, 1).abs().requires_grad_()
        affine = ops.affine_init(random(7, cols), bits=3, group_size=16)
        results = [f(x, scale, *affine) for f in (step, compiled)]
        grads = [torch.autograd.grad(y.sum(), (x, scale)) for y in results]
        torch.testing.assert_close(results[0], results[1])
        torch.testing.assert_close(grads[0], grads[1])


def test_errors_name_the_argument():
    x = random(4, 33)
    with pytest.raises(ValueError, match="scale"):
        ops.fake_quantize(x, random(4, 2), granularity="group", group_size=16)
    with pytest.raises(ValueError, match="q_min"):
        ops.fake_quantize(x, random(), q_min=3, q_max=2)
    with pytest.raises(RuntimeError, match="nonsense"):
        ops.fake_quantize(x, random(), nonsense=2)


def test_strided_and_negative_views():
    x, scale = random(33, 4), torch.tensor(0.3, device=device_of())
    assert torch.equal(ops.fake_quantize(x.T, scale), ops.fake_quantize(x.T.contiguous(), scale))
    view = torch._neg_view(x)
    assert view.is_neg() and torch.equal(ops.fake_quantize(view, scale), ops.fake_quantize(-x, scale))
    assert torch.equal(ops.fake_quantize(x.flatten()[1:], scale), ops.fake_quantize(x.flatten(), scale)[1:])
