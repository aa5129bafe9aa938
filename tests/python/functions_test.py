"""The one-line functions and the plans: values against plain NumPy, equal bytes of both, outputs, what they raise."""

import ast
import itertools
import pickle

import halfbyte
import numpy as np
import pytest
from independent import encode as enc

F = np.float32
GRANULARITIES = [
    {"granularity": "tensor"}, {"granularity": "channel", "axis": 0}, {"granularity": "channel", "axis": 1},
    {"granularity": "group", "group_size": 7}, {"granularity": "group", "group_size": 130},
]  # fmt: skip


def random(*shape, seed=0, dtype=F):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def spread(per_group, shape, granularity, axis=-1, group_size=0):
    """A value of each group, for each element."""
    if granularity == "tensor":
        return np.broadcast_to(per_group, shape)
    if granularity == "channel":
        return np.broadcast_to(per_group.reshape([-1 if at == axis % len(shape) else 1 for at in range(len(shape))]), shape)
    return np.repeat(per_group, group_size, axis=-1)[..., : shape[-1]]


def unpacked(codes, dtype, cols):
    if dtype not in ("i4", "u4"):
        return codes.astype(np.int64)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)[..., :cols].astype(np.int64)
    return np.where(pairs > 7, pairs - 16, pairs) if dtype == "i4" else pairs


# quantize_linear


@pytest.mark.parametrize("fields", GRANULARITIES)
@pytest.mark.parametrize("code_dtype", ["i8", "u8", "i4", "u4"])
@pytest.mark.parametrize("zero_point_dtype", [None, "i32"])
def test_quantize_linear(fields, code_dtype, zero_point_dtype):
    x = random(5, 130, seed=3)
    if zero_point_dtype is None and code_dtype.startswith("u"):
        fields = fields | {"zero_point_dtype": "i32", "scale_rule": "minmax"}
    else:
        fields = fields | {"zero_point_dtype": zero_point_dtype}
    linear = halfbyte.quantize_linear(x, code_dtype=code_dtype, **fields)
    d = linear.descriptor
    assert linear.scale.shape == d.scale_shape
    where = {name: fields[name] for name in ("granularity", "axis", "group_size") if name in fields}
    scale = spread(linear.scale, x.shape, **where)
    zero = 0 if linear.zero_point is None else spread(linear.zero_point, x.shape, **where).astype(np.int64)
    wanted = np.clip(np.rint(x / scale).astype(np.int64) + zero, d.q_min, d.q_max)
    codes = unpacked(linear.codes, code_dtype, 130)
    assert np.array_equal(codes, wanted)
    y = halfbyte.dequantize_linear(*linear)
    assert np.array_equal(y, (codes - zero).astype(F) * scale)
    assert np.abs(y - x).max() <= 0.5001 * scale.max()
    # Given scales give the same, in memory that is given.
    out = np.full_like(linear.codes, 0x5A)
    fields.pop("scale_rule", None), fields.pop("zero_point_dtype")
    again = halfbyte.quantize_linear(x, linear.scale, linear.zero_point, code_dtype=code_dtype, out=out, **fields)
    assert again.codes is out and np.array_equal(out, linear.codes)
    # Straight through, within the range.
    dy = random(5, 130, seed=4)
    dx = halfbyte.quantize_linear_backward(again.descriptor, x * 3, dy, linear.scale, linear.zero_point)
    unclamped = np.rint(x * 3 / scale).astype(np.int64) + zero
    assert np.array_equal(dx, np.where((unclamped >= d.q_min) & (unclamped <= d.q_max), dy, 0))
    assert halfbyte.quantize_linear_backward(again.descriptor, x * 3, dy, linear.scale, linear.zero_point, out=dy) is dy
    assert np.array_equal(dy, dx)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_quantize_linear_of_other_dtypes(dtype):
    x = random(3, 70, dtype=dtype)
    linear = halfbyte.quantize_linear(x, granularity="group", group_size=70)
    assert linear.descriptor.dtype == {2: "f16", 8: "f64"}[x.itemsize]
    assert halfbyte.dequantize_linear(*linear).dtype == dtype


def test_integers_become_weights_and_back():
    for code_dtype, spec in (("i4", "int4"), ("i8", "int8")):
        x = random(32, 128)
        linear = halfbyte.quantize_linear(x, code_dtype=code_dtype, granularity="group", group_size=64)
        q = halfbyte.from_linear(*linear)
        assert q.spec.format == spec and np.array_equal(q.dequantize(), halfbyte.dequantize_linear(*linear))
        again = halfbyte.to_linear(q)
        assert np.array_equal(again.codes, linear.codes) and np.array_equal(again.scale, linear.scale)
        assert again.zero_point is None and again.descriptor.code_dtype == code_dtype
    asymmetric = halfbyte.to_linear(halfbyte.quantize(x, "int8,asymmetric"))
    assert np.array_equal(halfbyte.dequantize_linear(*asymmetric), halfbyte.quantize(x, "int8,asymmetric").dequantize())


# Fake quantization


@pytest.mark.parametrize("fields", GRANULARITIES)
def test_fake_quantize_is_what_a_quantized_tensor_holds(fields):
    x, dy = random(5, 130, seed=5), random(5, 130, seed=6)
    fake = halfbyte.fake_quantize(x, mask=True, **fields)
    linear = halfbyte.quantize_linear(x, fake.scale, code_dtype="i4", **fields)
    assert np.array_equal(fake.y, halfbyte.dequantize_linear(*linear))
    dx = halfbyte.fake_quantize_backward(fake.descriptor, dy, mask=fake.mask)
    given = halfbyte.fake_quantize(x, fake.scale, **fields)
    assert np.array_equal(given.y, fake.y) and given.mask is None
    assert np.array_equal(halfbyte.fake_quantize_backward(given.descriptor, dy, x=x, scale=fake.scale), dx)
    y = x.copy()
    assert halfbyte.fake_quantize(y, fake.scale, out=y, **fields).y is y and np.array_equal(y, fake.y)


@pytest.mark.parametrize("format", ["nf4", "fp4"])
def test_fake_quantize_of_a_table(format):
    x = random(3, 128)
    fake = halfbyte.fake_quantize(x, format=format, granularity="group", group_size=64)
    assert np.array_equal(fake.y, halfbyte.quantize(x, format).dequantize())


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_fake_quantize_of_block_floats(format):
    x = random(3, 130)
    fake = halfbyte.fake_quantize(x, format=format)
    stored = halfbyte.quantize(x, format)
    assert np.array_equal(fake.y, stored.dequantize())
    assert fake.scale.dtype == np.uint8 and np.array_equal(fake.scale.ravel(), np.asarray(stored.scales).ravel())
    assert (fake.global_scale is None) == (format == "mxfp4")
    if fake.global_scale is not None:
        assert np.array_equal(fake.global_scale, stored.global_scale)
        assert np.array_equal(halfbyte.fake_quantize(x, format=format, global_scale=fake.global_scale).y, fake.y)
    again = halfbyte.fake_quantize(x, fake.scale, format=format, global_scale=fake.global_scale)
    assert np.array_equal(again.y, fake.y) and again.scale is fake.scale
    rows = halfbyte.fake_quantize(np.ascontiguousarray(x.T), format=format, axis=0)
    assert np.array_equal(rows.y.T, fake.y)
    with pytest.raises(ValueError, match=f"format {format} has no plans of gradients: dx is dy"):
        halfbyte.fake_quantize_backward(fake.descriptor, x, x=x, scale=fake.scale)


def test_learned_backward_sums_its_group():
    x, dy = random(4, 64, seed=7) * 9, random(4, 64, seed=8)
    scale, zero = np.full(4, 0.75, F), np.array([0.0, 1.25, -2.0, 3.0], F)
    fake = halfbyte.fake_quantize(x, scale, zero, granularity="channel", axis=0, gradient_scale=0.5)
    dx, dscale, dzero = halfbyte.fake_quantize_learned_backward(fake.descriptor, x, dy, scale, zero)
    rounded = np.clip(np.rint(zero), -8, 7)[:, None]
    v = x / scale[:, None]
    inside = (np.rint(v) + rounded >= -8) & (np.rint(v) + rounded <= 7)
    bound = np.where(np.rint(v) + rounded < -8, -8 - rounded, 7 - rounded)
    assert np.array_equal(dx, np.where(inside, dy, 0))
    wanted = np.where(inside, dy * (np.rint(v) - v), dy * bound).sum(1) * 0.5
    assert np.allclose(dscale, wanted, rtol=1e-5, atol=1e-5)
    assert np.allclose(dzero, -(scale * np.where(inside, 0, dy).sum(1)) * 0.5, rtol=1e-5, atol=1e-5)
    no_zero = halfbyte.fake_quantize(x, scale, granularity="channel", axis=0)
    assert halfbyte.fake_quantize_learned_backward(no_zero.descriptor, x, dy, scale)[2] is None


# Observers


@pytest.mark.parametrize("kind", ["min-max", "moving-average", "percentile", "mse"])
def test_observers(kind):
    config = halfbyte.ObserverConfig(kind, momentum=0.75, percentile=100.0)
    batches = [random(4, 96, seed=seed) for seed in range(3)]
    arrays = None
    state = halfbyte.ObserverState.empty(4, kind=kind)
    for batch in batches:
        arrays = halfbyte.observe(batch, arrays, granularity="channel", axis=0, observer=config)
        if kind != "mse":
            state.update(config, batch.min(1), batch.max(1))
    loaded = halfbyte.load_observer(*arrays)
    if kind != "mse":
        assert np.allclose(loaded.min, state.min) and np.allclose(loaded.max, state.max)
        assert loaded.num_batches == state.num_batches
    if kind == "min-max":
        assert loaded == state
    assert pickle.loads(pickle.dumps(loaded)) == loaded
    copies = [np.zeros_like(each) for each in arrays]
    halfbyte.store_observer(loaded, *copies)
    assert all(np.array_equal(a, b) for a, b in zip(arrays, copies))
    params = loaded.qparams(halfbyte.QParamsConfig.of_bits(8))
    assert [each for each in params] == [halfbyte.compute_qparams(*pair, halfbyte.QParamsConfig.of_bits(8)) for pair in zip(loaded.min, loaded.max)]
    other = pickle.loads(pickle.dumps(loaded))
    loaded.merge(config, other)
    assert np.allclose(loaded.max, other.max)
    halfbyte.reset_observer(*arrays)
    assert np.isposinf(arrays.min).all() and not arrays.num_batches.any()
    with pytest.raises(ValueError, match="no data"):
        halfbyte.load_observer(*arrays).qparams(halfbyte.QParamsConfig())


def test_a_state_is_unchanged_by_a_bad_batch():
    state = halfbyte.ObserverState.empty(1)
    for bad in (np.nan, [1.0, 2.0]):
        with pytest.raises(halfbyte.Error):
            state.update("min-max", bad, bad)
        assert state == halfbyte.ObserverState.empty(1)


# Affine


@pytest.mark.parametrize("bits, packed", list(itertools.product([2, 3, 4, 5, 6, 8], [True, False])))
def test_affine(bits, packed):
    w, dy = random(5, 130, seed=9), random(5, 130, seed=10)
    affine = halfbyte.affine_init(w, bits=bits, packed=packed)
    y = halfbyte.affine_qdq(*affine)
    q = halfbyte.quantize(w, f"affine{bits}")
    assert np.array_equal(y, q.dequantize())
    if packed:
        assert np.array_equal(affine.codes, q.codes)
    codes = np.rint((y - spread(affine.biases, w.shape, "group", group_size=64)) / spread(affine.scales, w.shape, "group", group_size=64))
    dscales, dbiases = halfbyte.affine_qdq_backward(affine.descriptor, affine.codes, dy)
    starts = [0, 64, 128]
    assert np.allclose(dscales, np.add.reduceat(codes * dy, starts, axis=1), rtol=1e-4, atol=1e-4)
    assert np.allclose(dbiases, np.add.reduceat(dy, starts, axis=1), rtol=1e-4, atol=1e-4)


def test_a_step_of_adam():
    w, dy = random(4, 64, seed=11), random(4, 64, seed=12)
    affine = halfbyte.affine_init(w, adam=True)
    scales, biases, *moments = affine.scales.copy(), affine.biases.copy(), *(np.zeros((4, 1), F) for _ in range(4))
    adam = halfbyte.AdamStep(learning_rate=0.01)
    names = dict(zip(("scale_m", "scale_v", "bias_m", "bias_v"), moments))
    dscales, dbiases = halfbyte.affine_qdq_backward(affine.descriptor, affine.codes, dy, scales=scales, biases=biases, adam=adam, **names)
    # The first step moves by the learning rate, against the gradient.
    assert np.allclose(scales - affine.scales, -0.01 * np.sign(dscales), atol=1e-5)
    assert np.allclose(biases - affine.biases, -0.01 * np.sign(dbiases), atol=1e-5)
    assert np.allclose(moments[0], 0.1 * dscales, rtol=1e-5)


# Products


@pytest.mark.parametrize("spec", ["nf4", "int4,asymmetric,group_size=32", "int8,granularity=channel", "affine4", "nf4,double_quant"])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3), (0,), ()])
def test_products(spec, shape):
    q = halfbyte.quantize(random(96, 160, seed=13), spec)
    w, packed = q.dequantize("f64"), q.pack()
    x, bias = random(*shape, 160, seed=14), random(96, seed=15)
    y = halfbyte.qgemm(x, packed, bias=bias)
    assert y.shape == (*shape, 96) and np.allclose(y, x @ w.T + bias, rtol=1e-5, atol=1e-5)
    exact = halfbyte.qgemm(x, packed, bias=bias, math="f64")
    assert exact.shape == y.shape and np.allclose(exact, x @ w.T + bias, rtol=1e-6, atol=1e-6)
    out = np.full((*shape, 96), 7, F)
    assert halfbyte.qgemm(x, packed, out=out) is out and np.allclose(out, x @ w.T, rtol=1e-5, atol=1e-5)
    before = out.copy()
    halfbyte.qgemm(x, packed, out=out, accumulate=True)
    assert np.allclose(out, 2 * before, rtol=1e-6, atol=1e-6)
    back = random(*shape, 96, seed=16)
    assert np.allclose(halfbyte.qgemm(back, packed, transposed=True), back @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spec", ["nf4", "int4,asymmetric,group_size=32", "int8,granularity=channel", "affine4", "affine3"])
def test_products_with_activations_of_8_bits(spec):
    """On the CPU whatever the package runs on: with x as it is rounded, integer codes give exact sums."""
    q = halfbyte.quantize(random(96, 160, seed=13), spec)
    x = random(5, 160, seed=14)
    rounded = np.empty_like(x)
    for begin in range(0, 160, 64):
        part = x[:, begin : begin + 64]
        scale = np.abs(part).max(1, keepdims=True) / F(127)
        rounded[:, begin : begin + 64] = np.rint(part / scale) * scale
    w = q.dequantize("f64")
    y = halfbyte.qgemm(x, q.pack(), math="int8")
    error = np.linalg.norm(y - rounded @ w.T) / np.linalg.norm(y)
    assert error < (1e-2 if spec == "nf4" else 1e-6)  # entries of a code book have 8 bits, too
    assert np.linalg.norm(y - x @ w.T) / np.linalg.norm(y) < 2e-2
    with pytest.raises(ValueError, match="math int8 needs transposed false"):
        halfbyte.qgemm(random(5, 96), q.pack(), math="int8", transposed=True)


def test_products_give_the_bytes_of_their_plan():
    q = halfbyte.quantize(random(64, 128), "nf4")
    packed, x = q.pack(), random(5, 128, seed=17)
    y = halfbyte.qgemm(x, packed, num_threads=1)
    d = halfbyte.QgemmDescriptor(spec=q.spec, m=5, n=64, k=128, dtype="f32")
    plan = halfbyte.QgemmPlan.select("cpu", d, num_threads=1)
    out = np.full((5, 64), np.nan, F)
    plan.run(x=x, weight=packed.data, y=out)
    assert np.array_equal(out, y)
    view = halfbyte.QgemmPlan.select("cpu", d.replace(packed=False, variant="qgemm_ref"))
    view.run(x=x, codes=q.codes, scales=q.scales, y=out)
    assert np.allclose(out, y, rtol=1e-5, atol=1e-5)
    variant = next(each.variant for each in halfbyte.explain_qgemm("cpu", d) if not each.reason)
    assert np.array_equal(halfbyte.qgemm(x, packed, variant=variant, num_threads=1), y)
    of_view = halfbyte.QgemmPlan.select("cpu", d.replace(packed=False), num_threads=1)
    out[:] = np.nan
    of_view.run(x=x, codes=q.codes, scales=q.scales, y=out)
    assert np.array_equal(out, y) and of_view.workspace_size > plan.workspace_size
    packs = {each.variant: each.packs for each in halfbyte.explain_qgemm("cpu", of_view.descriptor)}
    assert packs[variant] and not packs["qgemm_ref"]


def test_products_that_do_not_fit():
    packed = halfbyte.quantize(random(64, 128), "nf4").pack()
    for x, options in ((random(2, 127), {}), (random(2, 128), {"transposed": True}), (random(2, 128), {"accumulate": True}),
                       (random(2, 128), {"accumulate": True, "variant": "qgemm_ref"}),
                       (random(2, 128), {"out": np.zeros((2, 65), F)}), (random(2, 128), {"bias": random(63)}),
                       (random(2, 128, dtype=np.float64), {}), (random(2, 128), {"variant": "qgemm_none"})):  # fmt: skip
        with pytest.raises((ValueError, halfbyte.Error)) as caught:
            halfbyte.qgemm(x, packed, **options)
        assert isinstance(caught.value, halfbyte.Error), caught.value
    with pytest.raises(ValueError, match="must divide the columns"):
        halfbyte.quantize(random(64, 96), "int3,granularity=flat").pack()


@pytest.mark.parametrize("spec", ["int2", "int3,asymmetric", "int5", "int6,granularity=channel",
                                  "affine2", "affine3", "affine5,group_size=32", "affine6,scale_dtype=bf16"])
def test_products_of_bit_streams(spec):
    q = halfbyte.quantize(random(70, 192), spec)
    packed, dense = q.pack(), halfbyte.dequantize(q, "f32")
    x, dy = random(3, 192), random(5, 70)
    assert np.allclose(halfbyte.qgemm(x, packed), x @ dense.T, rtol=1e-5, atol=1e-4)
    assert np.allclose(halfbyte.qgemm(dy, packed, transposed=True), dy @ dense, rtol=1e-5, atol=1e-4)


# Flat buffers


@pytest.mark.parametrize("n", [0, 1, 63, 129])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_of_flat_buffers(n, symmetric):
    x = random(n, seed=n)
    codes, scales, zeros = halfbyte.quantize_int4(x, group_size=32, symmetric=symmetric)
    assert codes.size == (n + 1) // 2 and scales.size == (n + 31) // 32 and (zeros is None) == symmetric
    y = halfbyte.dequantize_int4(codes, scales, zeros, n=n, group_size=32, symmetric=symmetric)
    if n:
        spec = f"int4,granularity=flat,group_size=32{'' if symmetric else ',asymmetric'}"
        assert np.array_equal(y, halfbyte.quantize(x.reshape(1, -1), spec).dequantize().ravel())
    given = tuple(np.full_like(each, 3) for each in (codes, scales, zeros) if each is not None)
    halfbyte.quantize_int4(x, group_size=32, symmetric=symmetric, out=given)
    assert np.array_equal(given[0], codes) and np.array_equal(given[1], scales)
    out = np.full(n, np.nan, np.float16)
    assert halfbyte.dequantize_int4(codes, scales, zeros, group_size=32, symmetric=symmetric, out=out) is out
    assert np.array_equal(out, y.astype(np.float16))


def test_nf4_of_flat_buffers():
    x = random(5, 27)
    codes, scales = halfbyte.quantize_nf4(x, group_size=20, scale_dtype="f16")
    y = halfbyte.dequantize_nf4(codes, scales, n=135, group_size=20)
    assert np.array_equal(y, halfbyte.quantize(x, "nf4,granularity=flat,group_size=20,scale_dtype=f16").dequantize().ravel())
    made = halfbyte.from_flat((5, 27), codes, scales, format="nf4", group_size=20)
    assert np.array_equal(made.weight.dequantize("f32").ravel(), y) and made.max_error == 0
    with pytest.raises(ValueError, match="scales"):
        halfbyte.dequantize_nf4(codes, scales[:5], n=135, group_size=20)
    with pytest.raises(halfbyte.Error) as caught:
        halfbyte.quantize_nf4(np.array([np.nan], F))
    assert caught.value.code == "BAD_INPUT"


def test_from_flat_with_zero_points_in_floating_point():
    codes = np.arange(32, dtype=np.uint8)
    scales, zeros = np.array([0.5, 2.0], F), np.array([7.5, 8.25], F)
    made = halfbyte.from_flat((4, 16), codes, scales, zeros, symmetric=False, group_size=32)
    stored = np.stack([codes & 15, codes >> 4], 1).ravel().astype(F)
    wanted = (stored - np.repeat(zeros, 32)) * np.repeat(scales, 32)
    assert made.weight.spec.format == "affine4" and np.allclose(made.weight.dequantize().ravel(), wanted)


# The rest


def test_double_quantization():
    scales = np.abs(random(700, seed=18)) + F(0.1)
    codes, absmax, offset = halfbyte.double_quantize(scales)
    wanted = enc.double_quantize(scales)
    assert np.array_equal(codes, wanted[0]) and np.array_equal(absmax, wanted[1]) and offset == wanted[2]
    assert np.abs(halfbyte.double_dequantize(codes, absmax, offset) - scales).max() < 0.02
    assert np.array_equal(halfbyte.double_quant_map(), enc.DOUBLE_QUANT_MAP)
    halfbyte.double_quant_map()[0] = 5  # a copy
    assert halfbyte.double_quant_map()[0] != 5
    with pytest.raises(ValueError, match="scales must be f32"):
        halfbyte.double_quantize(scales.astype(np.float64))


def test_value_range():
    x = random(3, 50)
    x[1, 2], x[2, 0] = np.inf, np.nan
    finite = x[np.isfinite(x)]
    assert halfbyte.value_range(x) == (finite.min(), finite.max(), 2, 52)
    assert halfbyte.value_range(x[:0]) == (np.inf, -np.inf, 0, -1)


def test_functions_raise_what_a_run_found():
    x = random(2, 64)
    x[0, 5] = np.nan
    for call in (
        lambda: halfbyte.quantize_linear(x),
        lambda: halfbyte.fake_quantize(x, check=True),
        lambda: halfbyte.observe(x, check=True),
        lambda: halfbyte.affine_init(x),
    ):
        with pytest.raises(halfbyte.Error, match="1 non-finite elements, the first at index 5") as caught:
            call()
        assert caught.value.code == "BAD_INPUT"
    halfbyte.quantize_linear(x, check=False), halfbyte.observe(x)
    with pytest.raises(halfbyte.Error, match="1 scales that are negative"):
        halfbyte.quantize_linear(random(2, 64), np.array(-1, F))
    with pytest.raises(TypeError, match="no field kind"):
        halfbyte.quantize_linear(x, kind="i8")
    with pytest.raises(ValueError, match="group_size"):
        halfbyte.quantize_linear(x, granularity="group")


def test_plans_keep_the_status_in_a_workspace():
    x = random(2, 64)
    x[1, 1] = -np.inf
    d = halfbyte.LinearDescriptor(shape=x.shape, computed=True)
    plan = halfbyte.QuantizeLinearPlan.select("cpu", d)
    codes, scale, workspace = np.zeros((2, 64), np.int8), np.zeros((), F), np.zeros(plan.workspace_size, np.uint8)
    plan.run(x=x, codes=codes, scale=scale, workspace=workspace)
    status = plan.status(workspace)
    assert (status.num_nonfinite, status.first_nonfinite, status.ok) == (1, 65, False)
    assert "num_nonfinite=1" in repr(status)
    assert plan.can_implement(x=x, codes=codes, scale=scale) is None
    assert "codes" in plan.can_implement(x=x, codes=codes[:1], scale=scale)
    with pytest.raises(ValueError, match="workspace") as caught:
        plan.run(x=x, codes=codes, scale=scale, workspace=workspace[:1])
    assert caught.value.argument == "workspace"
    assert (d == pickle.loads(pickle.dumps(d))) and hash(d) == hash(d.replace()) and d != d.replace(q_max=7)


def test_what_this_build_is():
    formats = {each.name: each for each in halfbyte.all_formats()}
    assert {"nf4", "int4", "affine3"} <= set(formats) and formats["int8"].bits == 8 and formats["affine3"].kind == "affine"
    info = halfbyte.system_info()
    assert info.num_threads >= 1 and info.simd_target in info.compiled_targets + ["SCALAR"]
    assert "halfbyte" in repr(info) and repr(halfbyte.cuda_info()).startswith("<CudaInfo")


FIELDS = [each for each in vars(halfbyte).values() if isinstance(each, type) and hasattr(each, "replace")]


@pytest.mark.parametrize("of", FIELDS, ids=lambda of: of.__name__)
def test_the_defaults_that_signatures_say(of):
    arguments = ast.parse(of.__init__.__nb_signature__[0][0] + ": ...").body[0].args
    positional = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    said = [*zip(positional, arguments.defaults), *zip(arguments.kwonlyargs, arguments.kw_defaults)]
    defaults = {each.arg: ast.literal_eval(value) for each, value in said if value is not None}
    value = of()
    assert {name: getattr(value, name) for name, default in defaults.items() if default is not ...} == {
        name: default for name, default in defaults.items() if default is not ...}
