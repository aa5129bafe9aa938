"""Weights of experts and products with them: values against plain NumPy, bytes against those of the plan, what they raise."""

import pickle

import halfbyte
import numpy as np
import pytest

F = np.float32
EXPERTS, N, K = 5, 48, 96


def random(*shape, seed=0, dtype=F):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.fixture(scope="module")
def quantized():
    return halfbyte.quantize(random(EXPERTS, N, K), "int4,group_size=32")


@pytest.fixture(scope="module")
def weights(quantized):
    return halfbyte.pack_experts(quantized)


@pytest.fixture(scope="module")
def dense(quantized):
    return quantized.dequantize()


def near(y, wanted):
    return y.shape == wanted.shape and np.allclose(y, wanted, rtol=1e-4, atol=1e-4)


def chosen(tokens, top_k, seed=1):
    return np.random.default_rng(seed).integers(0, EXPERTS, (tokens, top_k)).astype(np.int32)


# PackedExperts


def test_packed_experts(quantized, weights):
    assert (weights.num_experts, len(weights), weights.rows, weights.cols) == (EXPERTS, EXPERTS, N, K)
    assert (weights.spec, weights.device, weights.framework) == (quantized.spec, "cpu", "numpy")
    one = weights.spec.packed_bytes(N, K)
    assert weights.data.shape == (EXPERTS, one) and weights.data.dtype == np.uint8 and weights.num_bytes == EXPERTS * one
    for e in range(EXPERTS):
        assert np.array_equal(weights.data[e], quantized.pack(e).data)
        assert np.shares_memory(weights[e].data, weights.data) and np.array_equal(weights[e].data, weights.data[e])
    assert [each.rows for each in weights] == [N] * EXPERTS
    for none in (-1, EXPERTS):
        with pytest.raises(IndexError):
            weights[none]
    assert repr(weights) == "<PackedExperts int4,group_size=32: (5, 48, 96), cpu>"
    assert np.shares_memory(weights.to("cpu").data, weights.data)


def test_packed_experts_of_single_weights(weights):
    singles = [halfbyte.quantize(each, weights.spec) for each in random(EXPERTS, N, K)]
    mixed = [each.pack() if e % 2 else each for e, each in enumerate(singles)]
    for given in (singles, [each.pack() for each in singles], tuple(mixed)):
        assert np.array_equal(halfbyte.pack_experts(given).data, weights.data)


def test_packed_experts_of_memory(weights):
    shared = halfbyte.PackedExperts.of(weights.spec, N, K, weights.data)
    assert np.shares_memory(shared.data, weights.data) and len(shared) == EXPERTS
    room = np.empty(weights.num_bytes + 65, np.uint8)
    odd = room[1 + -room.ctypes.data % 64 :][: weights.num_bytes].reshape(weights.data.shape)
    odd[...] = weights.data
    with pytest.raises(ValueError, match="aligned to 64 bytes"):
        halfbyte.PackedExperts.of(weights.spec, N, K, odd)
    copied = halfbyte.PackedExperts.copy_of(weights.spec, N, K, odd)
    again = pickle.loads(pickle.dumps(weights))
    for each in (copied, again):
        assert np.array_equal(each.data, weights.data) and not np.shares_memory(each.data, weights.data)
        assert (each.spec, each.rows, each.cols, len(each)) == (weights.spec, N, K, EXPERTS)
    for bad in (weights.data.reshape(-1), weights.data[:, :-1], weights.data.view(np.int8), weights.data[:0]):
        with pytest.raises(ValueError):
            halfbyte.PackedExperts.of(weights.spec, N, K, bad)


def test_weights_that_do_not_fit_together(quantized):
    one = halfbyte.quantize(random(N, K), quantized.spec)
    for other, message in (
        (halfbyte.quantize(random(N, K), "nf4"), r"weights\[1\] must be of int4,group_size=32 as weights\[0\], got nf4"),
        (halfbyte.quantize(random(N, 64), quantized.spec).pack(), r"weights\[1\] must have the shape \(48, 96\) as weights\[0\], got \(48, 64\)"),
    ):
        with pytest.raises(ValueError, match=message):
            halfbyte.pack_experts([one, other])
    with pytest.raises(ValueError, match="at least one weight"):
        halfbyte.pack_experts([])
    with pytest.raises(ValueError, match=r"QuantizedTensor \[num_experts, rows, cols\], got one of shape \(48, 96\)"):
        halfbyte.pack_experts(one)
    for wrong in ([one, random(N, K)], "int4", 3):
        with pytest.raises(TypeError):
            halfbyte.pack_experts(wrong)


# route


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("tokens,top_k", [(0, 2), (1, 1), (40, 3), (300, 8)])
def test_route(dtype, tokens, top_k):
    experts = np.random.default_rng(tokens).integers(-2, EXPERTS + 2, (tokens, top_k)).astype(dtype)
    flat = np.where((experts < 0) | (experts >= EXPERTS), EXPERTS, experts).reshape(-1)
    offsets, slots = halfbyte.route(experts, EXPERTS)
    assert offsets.dtype == slots.dtype == np.int32
    assert np.array_equal(slots, np.argsort(flat, kind="stable"))
    assert np.array_equal(offsets, np.cumsum(np.bincount(flat, minlength=EXPERTS + 1))[:EXPERTS])
    strided = halfbyte.route(np.repeat(experts, 2, axis=1)[:, ::2], EXPERTS)
    assert np.array_equal(strided.offsets, offsets) and np.array_equal(strided.slots, slots)
    plan = halfbyte.RoutePlan.select("cpu", halfbyte.RouteDescriptor(tokens=tokens, top_k=top_k, num_experts=EXPERTS,
                                                                     dtype="i32" if dtype == np.int32 else "i64"))  # fmt: skip
    of_plan = np.full_like(offsets, -9), np.full_like(slots, -9)
    plan.run(experts=experts, offsets=of_plan[0], slots=of_plan[1])
    assert np.array_equal(of_plan[0], offsets) and np.array_equal(of_plan[1], slots)


def test_route_of_what_is_no_routing():
    with pytest.raises(ValueError, match=r"experts must have the shape \[tokens, top_k\], got \[4\]"):
        halfbyte.route(np.zeros(4, np.int32), 2)
    with pytest.raises(ValueError, match="dtype must be i32 or i64, got f32"):
        halfbyte.route(np.zeros((4, 1), F), 2)
    for none in (-1, 0, 1 << 60):
        with pytest.raises(ValueError, match="num_experts must be 1 to"):
            halfbyte.route(np.zeros((4, 1), np.int32), none)


# qgemm_grouped


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_in_the_order_of_experts(weights, dense, transposed):
    counts = [3, 0, 1, 17, 2]
    offsets = np.cumsum(counts).astype(np.int32)
    m = sum(counts) + 2  # two rows are of no expert
    x = random(m, N if transposed else K, seed=2)
    of_row = np.repeat(np.arange(EXPERTS), counts)
    w = dense if transposed else dense.swapaxes(1, 2)
    wanted = np.zeros((m, K if transposed else N), F)
    wanted[:-2] = np.einsum("ri,rio->ro", x[:-2], w[of_row])
    y = halfbyte.qgemm_grouped(x, weights, offsets, transposed=transposed)
    assert near(y, wanted)
    out = np.full_like(y, 7)
    assert halfbyte.qgemm_grouped(x, weights, offsets, transposed=transposed, out=out) is out and np.array_equal(out, y)
    halfbyte.qgemm_grouped(x, weights, offsets, transposed=transposed, out=out, accumulate=True)
    assert near(out, 2 * wanted)
    short = halfbyte.qgemm_grouped(x.astype(np.float16), weights, offsets, transposed=transposed)
    assert short.dtype == np.float16 and np.allclose(short, wanted, atol=0.05)


def test_masked_rows(weights, dense):
    counts = np.array([0, 4, 1, 3, 2], np.int32)
    x, bias = random(EXPERTS, 4, K, seed=3), random(EXPERTS, N, seed=4)
    out = np.full((EXPERTS, 4, N), 7, F)
    halfbyte.qgemm_grouped(x, weights, counts, bias=bias, out=out)
    wanted = x @ dense.swapaxes(1, 2) + bias[:, None]
    counted = np.arange(4) < counts[:, None]
    assert near(out[counted], wanted[counted]) and (out[~counted] == 7).all()
    assert halfbyte.qgemm_grouped(x, weights, counts).shape == out.shape


@pytest.mark.parametrize("tokens,top_k", [(1, 1), (7, 2), (40, 4), (0, 2)])
@pytest.mark.parametrize("per_slot", [False, True])
def test_rows_where_they_lie(weights, dense, tokens, top_k, per_slot):
    experts = chosen(tokens, top_k)
    routing = halfbyte.route(experts, EXPERTS)
    x = random(tokens * (top_k if per_slot else 1), K, seed=5)
    of_slot = x if per_slot else np.repeat(x, top_k, axis=0)
    bias, routing_weights = random(EXPERTS, N, seed=6), random(tokens, top_k, seed=7)
    product = np.einsum("si,soi->so", of_slot, dense[experts.reshape(-1)])
    fields = {"top_k": top_k}
    assert near(halfbyte.qgemm_grouped(x, weights, *routing, **fields), product)
    product = (product + bias[experts.reshape(-1)]) * routing_weights.reshape(-1, 1)
    assert near(halfbyte.qgemm_grouped(x, weights, *routing, routing_weights, bias=bias), product)
    total = product.reshape(tokens, top_k, N).sum(axis=1)
    y = halfbyte.qgemm_grouped(x, weights, *routing, routing_weights, bias=bias, sum_slots=True)
    assert near(y, total)
    out = total.copy()
    halfbyte.qgemm_grouped(x, weights, *routing, routing_weights, bias=bias, sum_slots=True, out=out, accumulate=True)
    assert near(out, 2 * total)


def silu(v):
    return v / (1 + np.exp(-v))


def test_gates_of_rows_where_they_lie(weights, dense):
    experts = chosen(7, 2)
    routing = halfbyte.route(experts, EXPERTS)
    x, bias, routing_weights = random(7, K, seed=13) / 8, random(EXPERTS, N, seed=14), random(7, 2, seed=15)
    product = np.einsum("si,soi->so", np.repeat(x, 2, axis=0), dense[experts.reshape(-1)]) + bias[experts.reshape(-1)]
    wanted = silu(product[:, : N // 2]) * product[:, N // 2 :]
    assert near(halfbyte.qgemm_grouped(x, weights, *routing, top_k=2, bias=bias, swiglu=True), wanted)
    wanted = (wanted * routing_weights.reshape(-1, 1)).reshape(7, 2, N // 2).sum(axis=1)
    y = halfbyte.qgemm_grouped(x, weights, *routing, routing_weights, bias=bias, sum_slots=True, swiglu=True)
    assert near(y, wanted)
    out = wanted.copy()
    halfbyte.qgemm_grouped(x, weights, *routing, routing_weights, bias=bias, sum_slots=True, swiglu=True, out=out, accumulate=True)
    assert near(out, 2 * wanted)


def test_gates_of_rows_in_the_order_of_experts(weights, dense):
    counts = np.array([1, 0, 3, 2, 1], np.int32)
    x = random(EXPERTS, 3, K, seed=16) / 8
    product = x @ dense.swapaxes(1, 2)
    wanted = silu(product[..., : N // 2]) * product[..., N // 2 :]
    counted = np.arange(3) < counts[:, None]
    assert near(halfbyte.qgemm_grouped(x, weights, counts, swiglu=True)[counted], wanted[counted])
    y = halfbyte.qgemm_grouped(x[counted], weights, np.cumsum(counts).astype(np.int32), swiglu=True)
    assert near(y, wanted[counted])


def test_slots_of_a_token_are_counted(weights):
    x, routing = random(6, K), halfbyte.route(chosen(6, 2), EXPERTS)
    y = halfbyte.qgemm_grouped(x, weights, *routing, sum_slots=True)
    assert y.shape == (6, N) and np.array_equal(y, halfbyte.qgemm_grouped(x, weights, *routing, top_k=2, sum_slots=True))
    of_slots = np.repeat(x, 2, axis=0)
    assert np.array_equal(halfbyte.qgemm_grouped(of_slots, weights, *routing, top_k=2, sum_slots=True), y)
    assert halfbyte.qgemm_grouped(of_slots, weights, *routing, sum_slots=True).shape == (12, N)  # one slot for each row


def test_products_give_the_bytes_of_their_plan(weights):
    tokens, top_k = 9, 3
    x, experts = random(tokens, K, seed=8), chosen(tokens, top_k)
    routing, routing_weights = halfbyte.route(experts, EXPERTS), random(tokens, top_k, seed=9)
    y = halfbyte.qgemm_grouped(x, weights, *routing, routing_weights, sum_slots=True)
    d = halfbyte.QgemmGroupedDescriptor(spec=weights.spec, num_experts=EXPERTS, m=tokens, n=N, k=K, dtype="f32", rows="indices",
                                        top_k=top_k, sum_slots=True, routing_weights=True)  # fmt: skip
    plan = halfbyte.QgemmGroupedPlan.select("cpu", d)
    out = np.full_like(y, np.nan)
    given = {"x": x, "weight": weights.data, "offsets": routing.offsets, "slots": routing.slots, "routing_weights": routing_weights}
    plan.run(**given, y=out)
    assert np.array_equal(out, y)
    workspace = np.empty(plan.workspace_size, np.uint8)
    plan.run(**given, y=out, workspace=workspace)
    assert np.array_equal(out, y) and plan.status(workspace).ok
    variant = next(each.variant for each in halfbyte.explain_qgemm_grouped("cpu", d) if not each.reason)
    assert np.array_equal(halfbyte.qgemm_grouped(x, weights, *routing, routing_weights, sum_slots=True, variant=variant), y)
    assert "slots" in plan.can_implement(**(given | {"slots": None}), y=out)
    with pytest.raises(TypeError, match="QgemmGroupedPlan has no tensor view; it has x, offsets, slots"):
        plan.run(view=x)


def test_gradient_of_routing_weights(weights, dense):
    tokens, top_k = 6, 2
    experts = chosen(tokens, top_k)
    routing, routing_weights = halfbyte.route(experts, EXPERTS), random(tokens, top_k, seed=10)
    dy, forward_x = random(tokens, N, seed=11), random(tokens * top_k, K, seed=12)
    d = halfbyte.QgemmGroupedDescriptor(spec=weights.spec, num_experts=EXPERTS, m=tokens, n=N, k=K, dtype="f32", rows="indices",
                                        top_k=top_k, transposed=True, routing_weights=True, routing_gradient=True)  # fmt: skip
    plan = halfbyte.QgemmGroupedPlan.select("cpu", d)
    dx, gradient = np.full((tokens * top_k, K), np.nan, F), np.full((tokens, top_k), np.nan, F)
    plan.run(x=dy, weight=weights.data, offsets=routing.offsets, slots=routing.slots, routing_weights=routing_weights,
             forward_x=forward_x, routing_grad=gradient, y=dx)  # fmt: skip
    product = np.einsum("sn,snk->sk", np.repeat(dy, top_k, axis=0), dense[experts.reshape(-1)])
    assert near(gradient, (product * forward_x).sum(axis=1).reshape(tokens, top_k))
    assert near(dx, product * routing_weights.reshape(-1, 1))


def test_products_that_do_not_fit(weights):
    x, offsets = random(4, K), np.array([1, 1, 2, 3, 4], np.int32)
    routing = halfbyte.route(chosen(4, 2), EXPERTS)
    for arguments, options in (
        ((random(4, K - 1), weights, offsets), {}),
        ((x, weights, offsets[:-1]), {}),
        ((x, weights, offsets.astype(np.int64)), {}),
        ((x, weights, offsets), {"accumulate": True, "out": np.zeros((4, N + 1), F)}),
        ((x, weights, offsets), {"bias": random(N)}),
        ((x, weights, offsets), {"sum_slots": True}),
        ((x, weights, offsets), {"swiglu": True, "out": np.zeros((4, N), F)}),
        ((random(4, N), weights, offsets), {"swiglu": True, "transposed": True}),
        ((x, weights, offsets), {"variant": "qgemm_none"}),
        ((x.astype(np.float64), weights, offsets), {}),
        ((random(K), weights, offsets), {}),
        ((random(EXPERTS, 1, K), weights, *routing), {}),
        ((random(3, K), weights, *routing), {}),
        ((x, weights, *routing), {"top_k": 0}),
        ((x, weights, *routing), {"top_k": 3}),
        ((x, weights, *routing, random(4, 3)), {}),
        ((x, weights, *routing, np.array(1, F)), {}),
        ((x, weights, *routing, random(4, 2, dtype=np.float64)), {}),
    ):
        with pytest.raises((ValueError, halfbyte.Error)) as caught:
            halfbyte.qgemm_grouped(*arguments, **options)
        assert isinstance(caught.value, halfbyte.Error), caught.value
    with pytest.raises(TypeError, match="weights must be PackedExperts, got PackedTensor"):
        halfbyte.qgemm_grouped(x, weights[0], offsets)
    with pytest.raises(ValueError, match="out must be given to products that accumulate, got None"):
        halfbyte.qgemm_grouped(x, weights, offsets, accumulate=True)


def test_descriptors_are_values():
    d = halfbyte.QgemmGroupedDescriptor(spec="nf4", num_experts=8, m=4, n=64, k=128, rows="masked")
    assert d == pickle.loads(pickle.dumps(d)) and d.replace(rows="offsets") != d and d.rows == "masked"
    route = halfbyte.RouteDescriptor(tokens=4, num_experts=8)
    assert route == pickle.loads(pickle.dumps(route)) and (route.top_k, route.dtype) == (1, "i32")
    with pytest.raises(ValueError, match="rows: .*offsets, indices, masked"):
        d.replace(rows="sorted")
