"""The operations on arrays, one function each: a plan of the arguments, which is kept, and new arrays for its results.

Arrays are contiguous, or copied first if they are only read. Results are arrays of the framework of the first argument,
on its device, unless they are given.
"""

import functools
from typing import Any, NamedTuple

from . import _core
from ._core import (
    AdamStep,
    AffineQdqDescriptor,
    FakeQuantizeDescriptor,
    LinearDescriptor,
    ObserveDescriptor,
    PackedExperts,
    PackedTensor,
    QgemmDescriptor,
    QgemmGroupedDescriptor,
    RouteDescriptor,
)
from ._errors import make_error
from ._values import LinearCodes

_USAGE, _BAD_INPUT = 2, 3
_BLOCK_FLOATS = ("nvfp4", "mxfp4")
_RANGES = {"i8": (-128, 127), "u8": (0, 255), "i4": (-8, 7), "u4": (0, 15)}


class FakeQuantized(NamedTuple):
    """What fake_quantize gives, and its gradients are given; None: there is none."""

    descriptor: FakeQuantizeDescriptor
    y: Any
    scale: Any
    zero_point: Any
    mask: Any
    global_scale: Any = None


class Observed(NamedTuple):
    """The arrays of an observer's state."""

    min: Any
    max: Any
    num_batches: Any


class AffineCodes(NamedTuple):
    """A matrix as codes, scales and biases."""

    descriptor: AffineQdqDescriptor
    codes: Any
    scales: Any
    biases: Any


class Routing(NamedTuple):
    """Slots in the order of their experts. Slot t * top_k + j is the j-th expert of token t."""

    offsets: Any
    """i32 [num_experts]: where the slots of an expert end."""
    slots: Any
    """i32 [tokens * top_k]; those of no expert come last."""


@functools.lru_cache(maxsize=256)
def _descriptor(of: type, **fields: Any) -> Any:
    return of(**fields)


@functools.lru_cache(maxsize=256)
def _plan(of: type, device: str, num_threads: int, descriptor: Any) -> Any:
    return of.select(device, descriptor, num_threads=num_threads)


@functools.lru_cache(maxsize=256)
def _products(spec, n, k, dtype, transposed, bias, accumulate, device, num_threads) -> _core.QgemmPlans:
    return _core.QgemmPlans(spec, n, k, dtype, transposed=transposed, bias=bias, accumulate=accumulate, device=device,
                            num_threads=num_threads)  # fmt: skip


def _bad_argument(name: str, rule: str, actual: Any) -> Exception:
    return make_error(f"{name} must {rule}, got {actual}", _USAGE, "invalid-argument", name, rule, str(actual))


def _need_out(out: Any, accumulate: bool) -> None:
    if accumulate and out is None:
        raise _bad_argument("out", "be given to products that accumulate", None)


def _product(extents: tuple) -> int:
    product = 1
    for extent in extents:
        product *= extent
    return product


def _dtype_of(array: Any, name: str) -> str | None:
    return None if array is None else _core._describe(array, name)[1]


def _run(of: type, descriptor: Any, like: Any, stream: Any, num_threads: int, check: bool = False, **tensors: Any) -> None:
    """Runs the plan on the device of `like`. With `check` it waits, and raises what it found in the data."""
    plan = _plan(of, _core._describe(like, "x")[2], num_threads, descriptor)
    if not check:
        plan.run(stream=stream, **tensors)
        return
    workspace = _core._empty(like, "u8", (plan.workspace_size,))
    plan.run(workspace=workspace, stream=stream, **tensors)
    status = plan.status(workspace, stream)
    if status.ok:
        return
    found = []
    if status.num_nonfinite:
        found.append(f"{status.num_nonfinite} non-finite elements, the first at index {status.first_nonfinite}")
    if status.num_unheld_scales:
        found.append(f"{status.num_unheld_scales} scales that their dtype cannot hold")
    if status.num_invalid_scales:
        found.append(f"{status.num_invalid_scales} scales that are negative or not finite")
    if status.num_invalid_zero_points:
        found.append(f"{status.num_invalid_zero_points} zero points outside of the range of the codes")
    raise make_error(f"{plan.sku.op}: {'; '.join(found)}", _BAD_INPUT, "general", "", "", "")


def _new(like: Any, dtype: str, shape: tuple, given: Any = None) -> Any:
    return _core._empty(like, dtype, shape) if given is None else given


def _bytes_shape(dtype: str, shape: tuple) -> tuple:
    """4-bit elements are two in a byte along the last axis."""
    if dtype not in ("i4", "u4"):
        return tuple(shape)
    return (*shape[:-1], (shape[-1] + 1) // 2) if shape else (1,)


def _array_dtype(dtype: str) -> str:
    return "u8" if dtype in ("i4", "u4", "f8_e4m3", "f8_e8m0") else dtype


def quantize_linear(
    x: Any,
    scale: Any = None,
    zero_point: Any = None,
    *,
    out: Any = None,
    check: bool = True,
    num_threads: int = 0,
    stream: Any = None,
    **fields: Any,
) -> LinearCodes:
    """Integers: codes = clamp(rne(x / scale) + zero_point, q_min, q_max).

    x: f32, f64, f16 or bf16, any shape. Without scale, scale and zero_point are computed of x; with, they have the
    shape descriptor.scale_shape. fields: those of LinearDescriptor but shape and dtype: granularity ("tensor"), axis,
    group_size, code_dtype ("i8"; "i4" and "u4" give bytes [..., ceil(K / 2)]), q_min, q_max (default: all codes),
    zero_point_dtype (None: symmetric), scale_dtype, scale_rule. out: the codes. check: wait, and raise Error
    (BAD_INPUT) for values that are not finite and bad scales. Raises ValueError for what does not fit together.

    >>> linear = halfbyte.quantize_linear(np.array([[1, -2, 127], [0, 4, 8]], np.float32), granularity="tensor")
    >>> linear.codes
    array([[  1,  -2, 127],
           [  0,   4,   8]], dtype=int8)
    >>> halfbyte.dequantize_linear(*linear)
    array([[  1.,  -2., 127.],
           [  0.,   4.,   8.]], dtype=float32)
    """
    x = _core._contiguous(x, "x")
    shape, dtype, _ = _core._describe(x, "x")
    code_dtype = fields.setdefault("code_dtype", "i8")
    if code_dtype in _RANGES:
        for name, bound in zip(("q_min", "q_max"), _RANGES[code_dtype]):
            fields.setdefault(name, bound)
    computed = scale is None
    if computed:
        if fields.get("zero_point_dtype") is not None:
            fields.setdefault("scale_rule", "minmax")
    else:
        fields.update(scale_dtype=_dtype_of(scale, "scale"))
        if zero_point is not None and fields.get("zero_point_dtype") is None:
            fields.update(zero_point_dtype=_dtype_of(zero_point, "zero_point"))
    d = _descriptor(LinearDescriptor, shape=shape, dtype=dtype, computed=computed, **fields)
    codes = _new(x, _array_dtype(d.code_dtype), _bytes_shape(d.code_dtype, shape), out)
    if computed:
        scale = _new(x, d.scale_dtype, d.scale_shape)
        if d.zero_point_dtype is not None:
            shape = _bytes_shape(d.zero_point_dtype, d.scale_shape)
            zero_point = _new(x, _array_dtype(d.zero_point_dtype), shape)
    _run(_core.QuantizeLinearPlan, d, x, stream, num_threads, check, x=x, codes=codes, scale=scale, zero_point=zero_point)
    give = functools.partial(_core._give_back, x)
    if computed:
        scale, zero_point = give(scale), None if zero_point is None else give(zero_point)
    return LinearCodes(d, give(codes) if out is None else out, scale, zero_point)


def dequantize_linear(
    descriptor: LinearDescriptor,
    codes: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    out: Any = None,
    num_threads: int = 0,
    stream: Any = None,
) -> Any:
    """y = (codes - zero_point) * scale, of descriptor.shape and descriptor.dtype: what quantize_linear gives, back.

    >>> d = halfbyte.LinearDescriptor(shape=[3])
    >>> halfbyte.dequantize_linear(d, np.array([1, -2, 3], np.int8), np.array(0.5, np.float32))
    array([ 0.5, -1. ,  1.5], dtype=float32)
    """
    codes = _core._contiguous(codes, "codes")
    y = _new(codes, descriptor.dtype, descriptor.shape, out)
    plan = _core.DequantizeLinearPlan
    _run(plan, descriptor, codes, stream, num_threads, codes=codes, scale=scale, zero_point=zero_point, y=y)
    return _core._give_back(codes, y) if out is None else out


def quantize_linear_backward(
    descriptor: LinearDescriptor,
    x: Any,
    dy: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    out: Any = None,
    num_threads: int = 0,
    stream: Any = None,
) -> Any:
    """The straight-through estimator: dx = dy where q_min <= rne(x / scale) + zero_point <= q_max, else 0.

    out: dx, which may be dy.

    >>> x = np.array([1, 200, -300], np.float32)
    >>> d = halfbyte.LinearDescriptor(shape=[3])
    >>> halfbyte.quantize_linear_backward(d, x, np.ones(3, np.float32), np.array(1, np.float32))
    array([1., 0., 0.], dtype=float32)
    """
    x, dy = _core._contiguous(x, "x"), _core._contiguous(dy, "dy")
    dx = _new(x, descriptor.dtype, descriptor.shape, out)
    plan = _core.QuantizeLinearBackwardPlan
    _run(plan, descriptor, x, stream, num_threads, x=x, dy=dy, scale=scale, zero_point=zero_point, dx=dx)
    return _core._give_back(x, dx) if out is None else out


def fake_quantize(
    x: Any,
    scale: Any = None,
    zero_point: Any = None,
    *,
    global_scale: Any = None,
    state: Observed | None = None,
    out: Any = None,
    check: bool = False,
    num_threads: int = 0,
    stream: Any = None,
    **fields: Any,
) -> FakeQuantized:
    """x rounded to the values that a quantized tensor could hold, in its dtype (f32, f64, f16, bf16).

    Without scale, scale and zero_point are computed of x; with, they have the shape descriptor.scale_shape. fields:
    those of FakeQuantizeDescriptor but shape and dtype: granularity ("tensor"), axis, group_size, format (None: integers
    in [q_min, q_max]; "nf4", ...), zero_point_dtype, scale_rule, mask, observer, ... state: the observer's, which is
    updated, where there is an observer. out: y, which may be x. check: wait, and raise Error (BAD_INPUT) for what the
    status counts. NaN stays NaN.

    format "nvfp4" and "mxfp4" say granularity, group_size and scale_dtype by themselves; scale is of bytes. global_scale
    (f32 [1]) is of nvfp4: given, or where scale and it are None, that of x. Without scale, y is what decoding the
    quantized x gives, bit by bit. The gradient of x is that of y.

    >>> fake = halfbyte.fake_quantize(np.array([0.1, -0.6, 7.0], np.float32))
    >>> fake.y, fake.scale
    (array([ 0., -1.,  7.], dtype=float32), array(1., dtype=float32))
    """
    x = _core._contiguous(x, "x")
    shape, dtype, _ = _core._describe(x, "x")
    computed = scale is None
    computed_global_scale = computed and global_scale is None and fields.get("format") == "nvfp4"
    if fields.get("format") in _BLOCK_FLOATS:
        spec = _core.QuantSpec.parse(fields["format"])
        for name in "granularity", "group_size", "scale_dtype":
            fields.setdefault(name, getattr(spec, name))
    elif not computed:
        fields.update(scale_dtype=_dtype_of(scale, "scale"))
    if computed and fields.get("zero_point_dtype") is not None:
        fields.setdefault("scale_rule", "minmax")
    elif not computed and zero_point is not None:
        fields.update(zero_point_dtype=_dtype_of(zero_point, "zero_point"))
    d = _descriptor(FakeQuantizeDescriptor, shape=shape, dtype=dtype, computed=computed,
                    computed_global_scale=computed_global_scale, **fields)  # fmt: skip
    y = _new(x, dtype, shape, out)
    if computed_global_scale:
        global_scale = _new(x, "f32", (1,))
    if computed:
        scale = _new(x, _array_dtype(d.scale_dtype), d.scale_shape)
        if d.zero_point_dtype is not None:
            zero_point = _new(x, d.zero_point_dtype, d.scale_shape)
    mask = _new(x, "u8", d.mask_shape) if d.mask else None
    low, high, count = state or (None, None, None)
    _run(_core.FakeQuantizePlan, d, x, stream, num_threads, check, x=x, y=y, scale=scale, zero_point=zero_point,
         mask=mask, min=low, max=high, num_batches=count, global_scale=global_scale)  # fmt: skip
    give = functools.partial(_core._give_back, x)
    if computed:
        scale, zero_point = give(scale), None if zero_point is None else give(zero_point)
    if computed_global_scale:
        global_scale = give(global_scale)
    return FakeQuantized(d, give(y) if out is None else out, scale, zero_point, None if mask is None else give(mask),
                         global_scale)  # fmt: skip


def fake_quantize_backward(
    descriptor: FakeQuantizeDescriptor,
    dy: Any,
    *,
    x: Any = None,
    scale: Any = None,
    zero_point: Any = None,
    mask: Any = None,
    out: Any = None,
    num_threads: int = 0,
    stream: Any = None,
) -> Any:
    """The straight-through estimator: dx = dy where x lies in the range of the codes, else 0.

    Of a descriptor with mask: mask and nothing else; otherwise x, scale and zero_point. out: dx, which may be dy.

    >>> fake = halfbyte.fake_quantize(np.array([0.1, 9.0], np.float32), np.array(1, np.float32), mask=True)
    >>> halfbyte.fake_quantize_backward(fake.descriptor, np.ones(2, np.float32), mask=fake.mask)
    array([1., 0.], dtype=float32)
    """
    dy = _core._contiguous(dy, "dy")
    dx = _new(dy, descriptor.dtype, descriptor.shape, out)
    _run(_core.FakeQuantizeBackwardPlan, descriptor, dy, stream, num_threads, x=x, mask=mask, dy=dy, scale=scale,
         zero_point=zero_point, dx=dx)  # fmt: skip
    return _core._give_back(dy, dx) if out is None else out


def fake_quantize_learned_backward(
    descriptor: FakeQuantizeDescriptor,
    x: Any,
    dy: Any,
    scale: Any,
    zero_point: Any = None,
    *,
    out: Any = None,
    num_threads: int = 0,
    stream: Any = None,
) -> tuple[Any, Any, Any]:
    """(dx, dscale, dzero_point): the gradients of x and of learned scales and zero points (LSQ, LSQ+).

    dscale and dzero_point have the shape of scale, f32 (f64 for f64); dzero_point is None but for zero points in floating
    point. descriptor.gradient_scale multiplies both. out: dx, which may be dy.

    >>> fake = halfbyte.fake_quantize(np.array([0.25, 9.0], np.float32), np.array(1, np.float32))
    >>> x, dy = np.array([0.25, 9.0], np.float32), np.ones(2, np.float32)
    >>> halfbyte.fake_quantize_learned_backward(fake.descriptor, x, dy, fake.scale)[:2]
    (array([1., 0.], dtype=float32), array(6.75, dtype=float32))
    """
    d = descriptor
    x, dy = _core._contiguous(x, "x"), _core._contiguous(dy, "dy")
    dx = _new(x, d.dtype, d.shape, out)
    dscale = _new(x, d.state_dtype, d.scale_shape)
    learned = d.zero_point_dtype not in (None, "i32")
    dzero_point = _new(x, d.state_dtype, d.scale_shape) if learned else None
    _run(_core.FakeQuantizeLearnedBackwardPlan, d, x, stream, num_threads, x=x, dy=dy, scale=scale,
         zero_point=zero_point, dx=dx, dscale=dscale, dzero_point=dzero_point)  # fmt: skip
    give = functools.partial(_core._give_back, x)
    return give(dx) if out is None else out, give(dscale), give(dzero_point) if learned else None


def observe(
    x: Any,
    state: Observed | None = None,
    *,
    check: bool = False,
    num_threads: int = 0,
    stream: Any = None,
    **fields: Any,
) -> Observed:
    """Adds a batch x to the state of an observer: arrays (min, max, num_batches), which are changed; None: a new one.

    fields: those of ObserveDescriptor but shape and dtype: observer ("min-max", an ObserverConfig), granularity
    ("tensor"), axis, group_size. Only finite values count; check: wait, and raise Error (BAD_INPUT) if there are others.
    load_observer makes it plain values, reset_observer empty again.

    >>> state = halfbyte.observe(np.array([1, -2], np.float32))
    >>> halfbyte.observe(np.array([5, 0], np.float32), state)
    Observed(min=array(-2., dtype=float32), max=array(5., dtype=float32), num_batches=array(2))
    """
    x = _core._contiguous(x, "x")
    shape, dtype, _ = _core._describe(x, "x")
    d = _descriptor(ObserveDescriptor, shape=shape, dtype=dtype, **fields)
    made = state is None
    if made:
        state = Observed(*(_new(x, d.state_dtype, d.state_shape) for _ in range(2)), _new(x, "i64", d.count_shape))
        _core.reset_observer(*state, stream=stream)
    low, high, count = state
    _run(_core.ObservePlan, d, x, stream, num_threads, check, x=x, min=low, max=high, num_batches=count)
    return Observed(*(_core._give_back(x, each) for each in state)) if made else Observed(low, high, count)


def affine_init(
    w: Any,
    *,
    check: bool = True,
    num_threads: int = 0,
    stream: Any = None,
    **fields: Any,
) -> AffineCodes:
    """Codes, scales and biases of a matrix w [..., cols] (f32, f16, bf16), group by group: what their training starts from.

    fields: those of AffineQdqDescriptor but rows, cols and dtype: bits (4), group_size (64), packed, scale_dtype,
    scale_rule ("minmax", "mlx-edge"), rounding, refit, n_bins. codes u8 descriptor.code_shape; scales and biases
    descriptor.scale_shape. check: wait, and raise Error (BAD_INPUT) if w is not finite.

    >>> affine = halfbyte.affine_init(np.array([[0, 1, 2, 3]], np.float32), bits=2, packed=False)
    >>> affine.codes.tolist(), affine.scales.tolist(), affine.biases.tolist()
    ([[0, 1, 2, 3]], [[1.0]], [[0.0]])
    """
    w = _core._contiguous(w, "w")
    shape, dtype, _ = _core._describe(w, "w")
    cols = shape[-1] if shape else 1
    d = _descriptor(AffineQdqDescriptor, rows=_product(shape[:-1]), cols=cols, dtype=dtype, **fields)
    codes = _new(w, "u8", d.code_shape)
    scales, biases = (_new(w, d.scale_dtype, d.scale_shape) for _ in range(2))
    _run(_core.AffineInitPlan, d, w, stream, num_threads, check, w=w, codes=codes, scales=scales, biases=biases)
    give = functools.partial(_core._give_back, w)
    return AffineCodes(d, give(codes), give(scales), give(biases))


def affine_qdq(
    descriptor: AffineQdqDescriptor,
    codes: Any,
    scales: Any,
    biases: Any,
    *,
    out: Any = None,
    num_threads: int = 0,
    stream: Any = None,
) -> Any:
    """y [rows, cols] = codes * scales + biases, in descriptor.dtype.

    >>> w = np.array([[0, 1, 2, 3]], np.float32)
    >>> halfbyte.affine_qdq(*halfbyte.affine_init(w, bits=2))
    array([[0., 1., 2., 3.]], dtype=float32)
    """
    scales = _core._contiguous(scales, "scales")
    y = _new(scales, descriptor.dtype, (descriptor.rows, descriptor.cols), out)
    _run(_core.AffineQdqPlan, descriptor, scales, stream, num_threads, codes=codes, scales=scales, biases=biases, y=y)
    return _core._give_back(scales, y) if out is None else out


def affine_qdq_backward(
    descriptor: AffineQdqDescriptor,
    codes: Any,
    dy: Any,
    *,
    scales: Any = None,
    biases: Any = None,
    scale_m: Any = None,
    scale_v: Any = None,
    bias_m: Any = None,
    bias_v: Any = None,
    adam: AdamStep | None = None,
    num_threads: int = 0,
    stream: Any = None,
) -> tuple[Any, Any]:
    """(dscales, dbiases), f32 descriptor.scale_shape: the sums of codes * dy and of dy over each group.

    With descriptor.adam also a step of Adam, in place: scales, biases and their moments, f32 descriptor.scale_shape.

    >>> affine = halfbyte.affine_init(np.array([[0, 1, 2, 3]], np.float32), bits=2)
    >>> dscales, dbiases = halfbyte.affine_qdq_backward(affine.descriptor, affine.codes, np.ones((1, 4), np.float32))
    >>> dscales.tolist(), dbiases.tolist()
    ([[6.0]], [[4.0]])
    """
    dy = _core._contiguous(dy, "dy")
    dscales, dbiases = (_new(dy, "f32", descriptor.scale_shape) for _ in range(2))
    _run(_core.AffineQdqBackwardPlan, descriptor, dy, stream, num_threads, codes=codes, dy=dy, dscales=dscales,
         dbiases=dbiases, scales=scales, biases=biases, scale_m=scale_m, scale_v=scale_v, bias_m=bias_m,
         bias_v=bias_v, adam=adam)  # fmt: skip
    return _core._give_back(dy, dscales), _core._give_back(dy, dbiases)


def qgemm(
    x: Any,
    weight: PackedTensor,
    *,
    bias: Any = None,
    transposed: bool = False,
    out: Any = None,
    accumulate: bool = False,
    math: str = "auto",
    variant: str = "",
    num_threads: int = 0,
    stream: Any = None,
) -> Any:
    """y = x W^T (+ bias), or transposed y = x W, with a quantized weight W [rows, cols].

    x: bf16, f16 or f32 [..., cols] (transposed [..., rows]); y of its dtype [..., rows] (transposed [..., cols]); bias:
    [rows]. accumulate: out += instead of a new y. math: "auto", "tf32" or "f64" (both f32 only), or "int8" (the CPU, not
    transposed: x is rounded to 8 bits). variant: only that
    implementation; see explain_qgemm. Raises ValueError for shapes, dtypes and devices that do not fit, and Error
    (DEVICE) where no implementation takes them.

    >>> w = halfbyte.quantize(np.eye(64, dtype=np.float32), "nf4").pack()
    >>> x = np.ones((2, 64), np.float32)
    >>> bool((halfbyte.qgemm(x, w) == x).all())
    True
    """
    if not isinstance(weight, PackedTensor):
        raise TypeError(f"weight must be a PackedTensor, got {type(weight).__name__}")
    _need_out(out, accumulate)
    x = _core._contiguous(x, "x")
    shape, dtype, device = _core._describe(x, "x")
    n, k = weight.rows, weight.cols
    if math == "auto" and not variant:
        plans = _products(weight.spec, n, k, dtype, transposed, bias is not None, accumulate, device, num_threads)
        return plans(x, weight, bias, out, stream)
    m = _product(shape[:-1])
    d = _descriptor(QgemmDescriptor, spec=weight.spec, m=m, n=n, k=k, transposed=transposed, dtype=dtype,
                    bias=bias is not None, accumulate=accumulate, math=math, variant=variant)  # fmt: skip
    outer = k if transposed else n
    y = _new(x, dtype, (*shape[:-1], outer), out)
    rows, to = (each if len(shape) == 2 else each.reshape(m, -1) for each in (x, y))
    _run(_core.QgemmPlan, d, x, stream, num_threads, x=rows, weight=weight.data, bias=bias, y=to)
    return _core._give_back(x, y) if out is None else out


def route(experts: Any, num_experts: int, *, num_threads: int = 0, stream: Any = None) -> Routing:
    """Who gets which row: the slots of experts [tokens, top_k] (i32 or i64), sorted by their expert.

    Those of one expert are in the order of their numbers. Slots of what is no expert, a negative number or one that is
    too large, come last: offsets count only the others. Nothing waits for the device. Raises ValueError for other dtypes
    and ranks.

    >>> halfbyte.route(np.array([[2, 0], [0, 2]]), 3)
    Routing(offsets=array([2, 2, 4], dtype=int32), slots=array([1, 2, 0, 3], dtype=int32))
    """
    experts = _core._contiguous(experts, "experts")
    shape, dtype, device = _core._describe(experts, "experts")
    if len(shape) != 2:
        raise _bad_argument("experts", "have the shape [tokens, top_k]", list(shape))
    d = _descriptor(RouteDescriptor, tokens=shape[0], top_k=shape[1], num_experts=num_experts, dtype=dtype)
    _plan(_core.RoutePlan, device, num_threads, d)  # checks num_experts, before there are arrays of that length
    offsets, slots = _new(experts, "i32", (num_experts,)), _new(experts, "i32", (shape[0] * shape[1],))
    _run(_core.RoutePlan, d, experts, stream, num_threads, experts=experts, offsets=offsets, slots=slots)
    return Routing(_core._give_back(experts, offsets), _core._give_back(experts, slots))


def qgemm_grouped(
    x: Any,
    weights: PackedExperts,
    offsets: Any,
    slots: Any = None,
    routing_weights: Any = None,
    *,
    top_k: int | None = None,
    bias: Any = None,
    transposed: bool = False,
    sum_slots: bool = False,
    swiglu: bool = False,
    out: Any = None,
    accumulate: bool = False,
    variant: str = "",
    num_threads: int = 0,
    stream: Any = None,
) -> Any:
    """y[row] = x[row] W[e]^T (+ bias[e]), or transposed x[row] W[e], of the expert e that the row was given to.

    x: bf16, f16 or f32; y of its dtype; bias: [num_experts, rows of a weight]. Which rows an expert has, the device reads:

    - offsets alone: rows of x [m, in] and y [m, out] lie in the order of the experts, those of expert e end before
      offsets[e];
    - slots too, as `route` gives them: x has a row for each token, or for each slot; y has a row for each slot, or with
      sum_slots for each token, the sum of its slots. routing_weights: then f32 [tokens, top_k], which products are
      multiplied by. top_k: None: as many as routing_weights have columns, or as there are slots for a row of x;
    - x [num_experts, m, in]: of each expert offsets[e] rows. The others of y [num_experts, m, out] are not written.

    swiglu (not transposed): the first half of the rows of a weight is a gate, the others what it opens: y has half as many
    columns, silu(gate) * other. accumulate: out += instead of a new y. variant: only that implementation; see
    explain_qgemm_grouped. Raises ValueError for shapes, dtypes and devices that do not fit, and Error (DEVICE) where no implementation takes them. Gradients of
    routing weights: QgemmGroupedPlan.

    >>> w = halfbyte.pack_experts([halfbyte.quantize(i * np.eye(64, dtype=np.float32), "int8") for i in (1, 2, 3)])
    >>> x = np.ones((2, 64), np.float32)
    >>> offsets, slots = halfbyte.route(np.array([[2, 0], [0, 1]]), 3)
    >>> halfbyte.qgemm_grouped(x, w, offsets, slots)[:, 0].round(3)
    array([3., 1., 1., 2.], dtype=float32)
    >>> halfbyte.qgemm_grouped(x, w, offsets, slots, np.full((2, 2), 0.5, np.float32), sum_slots=True)[:, 0].round(3)
    array([2. , 1.5], dtype=float32)
    """
    if not isinstance(weights, PackedExperts):
        raise TypeError(f"weights must be PackedExperts, got {type(weights).__name__}")
    _need_out(out, accumulate)
    x = _core._contiguous(x, "x")
    shape, dtype, device = _core._describe(x, "x")
    if len(shape) not in ((2,) if slots is not None else (2, 3)):
        rule = "have the shape [rows, in]" + ("" if slots is not None else ", or [num_experts, m, in]")
        raise _bad_argument("x", rule, list(shape))
    outer = weights.cols if transposed else weights.rows // (2 if swiglu else 1)
    rows = "offsets" if len(shape) == 2 else "masked"
    m, y_shape, of_slots = shape[-2], (*shape[:-1], outer), {}
    if slots is not None:
        rows, num_slots = "indices", _product(_core._describe(slots, "slots")[0])
        if top_k is None and routing_weights is not None:
            top_k = _product(_core._describe(routing_weights, "routing_weights")[0][-1:])
        elif top_k is None:
            top_k = max(1, num_slots // max(1, m))
        x_per_slot = top_k > 1 and m == num_slots
        m = num_slots // max(1, top_k)
        y_shape = (m if sum_slots else num_slots, outer)
        of_slots = {"top_k": top_k, "x_per_slot": x_per_slot, "routing_weights": routing_weights is not None}
    d = _descriptor(QgemmGroupedDescriptor, spec=weights.spec, num_experts=weights.num_experts, m=m, n=weights.rows,
                    k=weights.cols, transposed=transposed, dtype=dtype, rows=rows, sum_slots=sum_slots,
                    bias=bias is not None, swiglu=swiglu, accumulate=accumulate, variant=variant, **of_slots)  # fmt: skip
    y = _new(x, dtype, y_shape, out)
    _run(_core.QgemmGroupedPlan, d, x, stream, num_threads, x=x, weight=weights.data, offsets=offsets, slots=slots,
         routing_weights=routing_weights, bias=bias, y=y)  # fmt: skip
    return _core._give_back(x, y) if out is None else out
