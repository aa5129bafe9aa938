"""Operators of training: integers with scales, fake quantization, observers, affine codes with trained scales.

Each runs one plan, which is kept by its descriptor. On the CPU it uses torch.get_num_threads() threads; the bytes do
not depend on that, nor on the device. Tensors that are not contiguous are copied.

What shares a scale is said by `granularity`, `axis` and `group_size`, as LinearDescriptor has them:

  "tensor"   one scale, of shape []
  "channel"  one for each index of `axis`, of shape [extent]
  "group"    one for `group_size` neighbours along `axis`: the shape of x, with the number of groups there
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _core
from ._library import define
from ._ops_weight import spec_of

_GROUPS = 'str granularity="tensor", int axis=-1, SymInt group_size=0'
_FAKE = f'int q_min=-8, int q_max=7, {_GROUPS}, str? format=None, float[]? table=None'
_LINEAR = f'int q_min=-128, int q_max=127, {_GROUPS}, str code_dtype="i8"'
_RULE = 'str scale_rule="absmax"'
_AFFINE = "int bits=4, SymInt group_size=64, bool packed=True, int n_bins=0"


@functools.lru_cache(maxsize=4096)
def _select(operation: str, descriptor: str, device: torch.device, num_threads: int, fields: tuple) -> object:
    of = getattr(_core, descriptor)(**dict(fields))
    return getattr(_core, f"{operation}Plan").select(device, of, num_threads=num_threads)


def _plan(operation: str, descriptor: str, x: Tensor, **fields: object) -> object:
    threads = torch.get_num_threads() if x.device.type == "cpu" else 0
    given = tuple((name, tuple(value) if isinstance(value, list) else value)
                  for name, value in fields.items() if value is not None)
    return _select(operation, descriptor, x.device, threads, given)


def _alignment(*tensors: Tensor) -> int:
    return 16 if all(t.data_ptr() % 16 == 0 for t in tensors) else tensors[0].element_size()


def _zero_dtype(zero_point: Tensor | None) -> torch.dtype | None:
    return None if zero_point is None else zero_point.dtype


def _scale_shape(shape: Sequence[int], granularity: str = "tensor", axis: int = -1, group_size: int = 0,
                 **_: object) -> list[int]:
    if granularity == "tensor":
        return []
    if granularity == "channel":
        return [shape[axis]]
    groups = list(shape)
    groups[axis] = (groups[axis] + group_size - 1) // group_size
    return groups


def _sum_groups(x: Tensor, granularity: str, axis: int, group_size: int) -> Tensor:
    """The sums over what shares a scale."""
    if granularity == "tensor":
        return x.sum()
    if granularity == "channel":
        return x.movedim(axis, 0).reshape(x.shape[axis], -1).sum(1)
    x = x.movedim(axis, -1)
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % group_size))
    return x.unflatten(-1, (-1, group_size)).sum(-1).movedim(-1, axis)


def _changed(*tensors: Tensor) -> None:
    """Tells autograd, which does not see what a kernel writes."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)


# ---- quantize_linear, dequantize_linear


def _codes_shape(shape: Sequence[int], code_dtype: str) -> tuple[list[int], torch.dtype]:
    if code_dtype in ("i4", "u4"):
        return [*shape[:-1], (shape[-1] + 1) // 2], torch.uint8
    return list(shape), torch.uint8 if code_dtype == "u8" else torch.int8


def _quantize_linear(x: Tensor, scale: Tensor, zero_point: Tensor | None, *, code_dtype: str = "i8",
                     **options: object) -> Tensor:
    x = x.contiguous()
    shape, dtype = _codes_shape(x.shape, code_dtype)
    codes = torch.empty(shape, dtype=dtype, device=x.device)
    _plan("QuantizeLinear", "LinearDescriptor", x, shape=x.shape, dtype=x.dtype, scale_dtype=scale.dtype,
          zero_point_dtype=_zero_dtype(zero_point), alignment=_alignment(x), code_dtype=code_dtype,
          **options).run(x=x, codes=codes, scale=scale.contiguous(),
                         zero_point=None if zero_point is None else zero_point.contiguous())
    return codes


def _fake_of_quantize_linear(x: Tensor, scale: Tensor, zero_point: Tensor | None, *, code_dtype: str = "i8",
                             **_: object) -> Tensor:
    shape, dtype = _codes_shape(x.shape, code_dtype)
    return x.new_empty(shape, dtype=dtype)


_quantize_linear_op = define(
    f"quantize_linear(Tensor x, Tensor scale, Tensor? zero_point, *, {_LINEAR}) -> Tensor", _quantize_linear,
    _fake_of_quantize_linear)


def _quantize_linear_computed(x: Tensor, *, code_dtype: str = "i8", scale_dtype: torch.dtype | None = None,
                              zero_point_dtype: torch.dtype | None = None, **options: object) -> tuple:
    x = x.contiguous()
    made = _fake_of_quantize_linear_computed(x, code_dtype=code_dtype, scale_dtype=scale_dtype,
                                             zero_point_dtype=zero_point_dtype, **options)
    codes, scale, zero_point = made
    _plan("QuantizeLinear", "LinearDescriptor", x, shape=x.shape, dtype=x.dtype, scale_dtype=scale.dtype,
          zero_point_dtype=zero_point_dtype, alignment=_alignment(x), code_dtype=code_dtype, computed=True,
          **options).run(x=x, codes=codes, scale=scale,
                         zero_point=None if zero_point_dtype is None else zero_point)
    return made


def _state_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _computed(x: Tensor, scale_dtype: torch.dtype | None, zero_point_dtype: torch.dtype | None,
              options: dict) -> tuple[Tensor, Tensor]:
    """Scales and zero points to be written; no elements where there are no zero points."""
    shape = _scale_shape(x.shape, **options)
    scale = x.new_empty(shape, dtype=scale_dtype or _state_dtype(x))
    return scale, x.new_empty([0] if zero_point_dtype is None else shape, dtype=zero_point_dtype or torch.int32)


def _fake_of_quantize_linear_computed(x: Tensor, *, code_dtype: str = "i8", scale_dtype: torch.dtype | None = None,
                                      zero_point_dtype: torch.dtype | None = None, **options: object) -> tuple:
    codes = _fake_of_quantize_linear(x, x, None, code_dtype=code_dtype)
    return (codes, *_computed(x, scale_dtype, zero_point_dtype, options))


_quantize_linear_computed_op = define(
    f"quantize_linear_computed(Tensor x, *, {_LINEAR}, {_RULE}, ScalarType? scale_dtype=None, "
    "ScalarType? zero_point_dtype=None) -> (Tensor, Tensor, Tensor)", _quantize_linear_computed,
    _fake_of_quantize_linear_computed)


def _dequantize_linear(codes: Tensor, scale: Tensor, zero_point: Tensor | None, *, code_dtype: str = "i8",
                       cols: int = -1, dtype: torch.dtype | None = None, **options: object) -> Tensor:
    y = _fake_of_dequantize_linear(codes, scale, zero_point, code_dtype=code_dtype, cols=cols, dtype=dtype)
    _plan("DequantizeLinear", "LinearDescriptor", y, shape=y.shape, dtype=y.dtype, scale_dtype=scale.dtype,
          zero_point_dtype=_zero_dtype(zero_point), code_dtype=code_dtype,
          **options).run(codes=codes.contiguous(), scale=scale.contiguous(), y=y,
                         zero_point=None if zero_point is None else zero_point.contiguous())
    return y


def _fake_of_dequantize_linear(codes: Tensor, scale: Tensor, zero_point: Tensor | None, *, code_dtype: str = "i8",
                               cols: int = -1, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    shape = list(codes.shape)
    if code_dtype in ("i4", "u4"):
        shape[-1] = 2 * shape[-1] if cols == -1 else cols
    return codes.new_empty(shape, dtype=dtype or scale.dtype)


def _setup_dequantize_linear(ctx: object, inputs: tuple, keyword_only_inputs: dict, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _dequantize_linear_backward(ctx: object, dy: Tensor) -> tuple:
    codes, scale, zero_point = ctx.saved_tensors
    if not ctx.needs_input_grad[1]:
        return None, None, None
    of = ctx.options
    state = _state_dtype(dy)
    values = _dequantize_linear_op(codes, torch.ones_like(scale, dtype=state), zero_point, **of | {"dtype": state})
    dscale = _sum_groups(values * dy.to(state), of["granularity"], of["axis"], of["group_size"])
    return None, dscale.to(scale.dtype), None


_dequantize_linear_op = define(
    f"dequantize_linear(Tensor codes, Tensor scale, Tensor? zero_point, *, {_LINEAR}, SymInt cols=-1, "
    "ScalarType? dtype=None) -> Tensor", _dequantize_linear, _fake_of_dequantize_linear,
    setup_context=_setup_dequantize_linear, backward=_dequantize_linear_backward)


def quantize_linear(x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, *,
                    scale_rule: str = "absmax", scale_dtype: torch.dtype | None = None,
                    zero_point_dtype: torch.dtype | None = None,
                    **options: object) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """clamp(rne(x / scale) + zero_point, q_min, q_max).

    x: f32, f64, f16 or bf16, of any shape. scale: f32 or the dtype of x, of the shape that the module says.
    zero_point: i32 or the dtype of the codes, of the shape of the scale; None: 0. options: q_min=-128, q_max=127,
    code_dtype="i8" (or "u8"; "i4" and "u4": bytes of two codes along the last axis, the first in the low half),
    granularity, axis, group_size. Returns the codes. Without a scale it is computed by `scale_rule`: returns (codes,
    scale, zero_point), with zero points where `zero_point_dtype` is given (needs scale_rule="minmax"). No gradients;
    raises ValueError.

    >>> codes, scale, _ = quantize_linear(torch.tensor([-1.0, 0.25, 1.0]))
    >>> codes
    tensor([-127,   32,  127], dtype=torch.int8)
    >>> dequantize_linear(codes, scale)
    tensor([-1.0000,  0.2520,  1.0000])
    """
    x = x.detach()
    if scale is not None:
        return _quantize_linear_op(x, scale.detach(), zero_point, **options)
    codes, scale, zero_point = _quantize_linear_computed_op(x, scale_rule=scale_rule, scale_dtype=scale_dtype,
                                                            zero_point_dtype=zero_point_dtype, **options)
    return codes, scale, None if zero_point_dtype is None else zero_point


def dequantize_linear(codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, cols: int = -1,
                      dtype: torch.dtype | None = None, **options: object) -> Tensor:
    """(codes - zero_point) * scale in `dtype` (None: that of the scale), with the gradient of the scale.

    The options are those of `quantize_linear`. cols: of packed codes, the last extent of the result; -1: even.

    >>> dequantize_linear(torch.tensor([[0x21, 0x03]], dtype=torch.uint8), torch.tensor(0.5), code_dtype="i4", q_min=-8,
    ...                   q_max=7, cols=3)
    tensor([[0.5000, 1.0000, 1.5000]])
    """
    return _dequantize_linear_op(codes, scale, zero_point, cols=cols, dtype=dtype, **options)


# ---- fake_quantize


def _run_fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, mask: Tensor | None,
                       options: dict) -> Tensor:
    y = torch.empty_like(x)
    _plan("FakeQuantize", "FakeQuantizeDescriptor", x, shape=x.shape, dtype=x.dtype, scale_dtype=scale.dtype,
          zero_point_dtype=_zero_dtype(zero_point), alignment=_alignment(x), mask=mask is not None,
          **options).run(x=x, y=y, scale=scale, zero_point=zero_point, mask=mask)
    return y


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.contiguous() for t in tensors]


def _fake_quantize(x: Tensor, scale: Tensor, zero_point: Tensor | None, *, gradient_scale: float = 1.0,
                   **options: object) -> Tensor:
    x, scale, zero_point = _contiguous(x, scale, zero_point)
    return _run_fake_quantize(x, scale, zero_point, None, options)


def _like(x: Tensor, **_: object) -> Tensor:
    return x.new_empty(x.shape)


def _setup_fake_quantize(ctx: object, inputs: tuple, keyword_only_inputs: dict, output: Tensor) -> None:
    ctx.save_for_backward(*inputs)
    ctx.options = keyword_only_inputs


def _fake_quantize_gradient(ctx: object, dy: Tensor) -> tuple:
    x, scale, zero_point = ctx.saved_tensors
    if not any(ctx.needs_input_grad[1:]):
        options = {name: value for name, value in ctx.options.items() if name != "gradient_scale"}
        return _fake_quantize_backward_op(dy, x, scale, zero_point, **options), None, None
    dx, dscale, dzero_point = _fake_quantize_learned_backward_op(dy, x, scale, zero_point, **ctx.options)
    learned = zero_point is not None and zero_point.is_floating_point()
    return dx, dscale.to(scale.dtype), dzero_point if learned else None


_fake_quantize_op = define(
    f"fake_quantize(Tensor x, Tensor scale, Tensor? zero_point, *, {_FAKE}, float gradient_scale=1.0) -> Tensor",
    _fake_quantize, lambda x, scale, zero_point, **_: _like(x), setup_context=_setup_fake_quantize,
    backward=_fake_quantize_gradient)


def _fake_quantize_backward(dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None,
                            **options: object) -> Tensor:
    dy, x, scale, zero_point = _contiguous(dy, x, scale, zero_point)
    dx = torch.empty_like(dy)
    _plan("FakeQuantizeBackward", "FakeQuantizeDescriptor", x, shape=x.shape, dtype=x.dtype, scale_dtype=scale.dtype,
          zero_point_dtype=_zero_dtype(zero_point), alignment=_alignment(x, dy),
          **options).run(x=x, dy=dy, scale=scale, zero_point=zero_point, dx=dx)
    return dx


_fake_quantize_backward_op = define(
    f"fake_quantize_backward(Tensor dy, Tensor x, Tensor scale, Tensor? zero_point, *, {_FAKE}) -> Tensor",
    _fake_quantize_backward, lambda dy, x, scale, zero_point, **_: _like(dy))


def _fake_quantize_learned_backward(dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None,
                                    **options: object) -> tuple[Tensor, Tensor, Tensor]:
    dy, x, scale, zero_point = _contiguous(dy, x, scale, zero_point)
    dx, dscale, dzero_point = _fake_of_learned_backward(dy, x, scale, zero_point)
    _plan("FakeQuantizeLearnedBackward", "FakeQuantizeDescriptor", x, shape=x.shape, dtype=x.dtype,
          scale_dtype=scale.dtype, zero_point_dtype=_zero_dtype(zero_point), alignment=_alignment(x, dy),
          **options).run(x=x, dy=dy, scale=scale, zero_point=zero_point, dx=dx, dscale=dscale,
                         dzero_point=dzero_point if dzero_point.shape == scale.shape else None)
    return dx, dscale, dzero_point


def _fake_of_learned_backward(dy: Tensor, x: Tensor, scale: Tensor, zero_point: Tensor | None,
                              **_: object) -> tuple[Tensor, Tensor, Tensor]:
    state = _state_dtype(x)
    learned = zero_point is not None and zero_point.is_floating_point()
    return (dy.new_empty(dy.shape), scale.new_empty(scale.shape, dtype=state),
            scale.new_empty(scale.shape if learned else [0], dtype=state))


_fake_quantize_learned_backward_op = define(
    f"fake_quantize_learned_backward(Tensor dy, Tensor x, Tensor scale, Tensor? zero_point, *, {_FAKE}, "
    "float gradient_scale=1.0) -> (Tensor, Tensor, Tensor)", _fake_quantize_learned_backward,
    _fake_of_learned_backward)


# Forms that leave a bit an element for backward, instead of x.


def _new_mask(x: Tensor) -> Tensor:
    shape = [*x.shape[:-1], (x.shape[-1] + 7) // 8] if x.ndim > 0 else [1]
    return x.new_empty(shape, dtype=torch.uint8)


def _fake_quantize_masked(x: Tensor, scale: Tensor, zero_point: Tensor | None,
                          **options: object) -> tuple[Tensor, Tensor]:
    x, scale, zero_point = _contiguous(x, scale, zero_point)
    mask = _new_mask(x)
    return _run_fake_quantize(x, scale, zero_point, mask, options), mask


def _setup_masked(ctx: object, inputs: tuple, keyword_only_inputs: dict, output: tuple) -> None:
    mask = output[-1]
    ctx.save_for_backward(mask)
    ctx.num_inputs = len(inputs)


def _masked_gradient(ctx: object, dy: Tensor, *_: object) -> tuple:
    (mask,) = ctx.saved_tensors
    return (_fake_quantize_mask_backward_op(dy, mask), *[None] * (ctx.num_inputs - 1))


_fake_quantize_masked_op = define(
    f"fake_quantize_masked(Tensor x, Tensor scale, Tensor? zero_point, *, {_FAKE}) -> (Tensor, Tensor)",
    _fake_quantize_masked, lambda x, scale, zero_point, **_: (_like(x), _new_mask(x)), setup_context=_setup_masked,
    backward=_masked_gradient)


def _fake_quantize_computed(x: Tensor, *, scale_dtype: torch.dtype | None = None, asymmetric: bool = False,
                            **options: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    made = _fake_of_computed(x, scale_dtype=scale_dtype, asymmetric=asymmetric, **options)
    y, scale, zero_point, mask = made
    _plan("FakeQuantize", "FakeQuantizeDescriptor", x, shape=x.shape, dtype=x.dtype, scale_dtype=scale.dtype,
          zero_point_dtype=zero_point.dtype if asymmetric else None, alignment=_alignment(x), mask=True, computed=True,
          **options).run(x=x, y=y, scale=scale, zero_point=zero_point if asymmetric else None, mask=mask)
    return made


def _fake_of_computed(x: Tensor, *, scale_dtype: torch.dtype | None = None, asymmetric: bool = False,
                      **options: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale, zero_point = _computed(x, scale_dtype, torch.int32 if asymmetric else None, options)
    return _like(x), scale, zero_point, _new_mask(x)


_fake_quantize_computed_op = define(
    f"fake_quantize_computed(Tensor x, *, {_FAKE}, {_RULE}, float eps=0.0, bool asymmetric=False, "
    "ScalarType? scale_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)", _fake_quantize_computed, _fake_of_computed,
    setup_context=_setup_masked, backward=_masked_gradient)


# Block floats: scales of 8 bits, which the format makes of each tensor.

BLOCK_FLOATS = ("nvfp4", "mxfp4")


def _fake_quantize_block_floats(x: Tensor, global_scale: Tensor | None, *, format: str, axis: int = -1) -> Tensor:
    x, global_scale = _contiguous(x, global_scale)
    spec = spec_of(format)
    groups = {"granularity": spec.granularity, "axis": axis, "group_size": spec.group_size}
    y = torch.empty_like(x)
    scale = x.new_empty(_scale_shape(x.shape, **groups), dtype=torch.uint8)
    computed = spec.has_global_scale and global_scale is None
    if computed:
        global_scale = x.new_empty([1], dtype=torch.float32)
    _plan("FakeQuantize", "FakeQuantizeDescriptor", x, shape=x.shape, dtype=x.dtype, format=format,
          scale_dtype=spec.scale_dtype, computed=True, computed_global_scale=computed, alignment=_alignment(x),
          **groups).run(x=x, y=y, scale=scale, global_scale=global_scale)
    return y


# The straight-through estimator without a mask, as in torchao (torchao/prototype/qat/nvfp4.py): only the rounding of
# scales clips.
_fake_quantize_block_floats_op = define(
    "fake_quantize_block_floats(Tensor x, Tensor? global_scale, *, str format, int axis=-1) -> Tensor",
    _fake_quantize_block_floats, lambda x, global_scale, **_: _like(x), setup_context=lambda *_, **__: None,
    backward=lambda ctx, dy: (dy, None))


def _fake_quantize_mask_backward(dy: Tensor, mask: Tensor) -> Tensor:
    dy = dy.contiguous()
    dx = torch.empty_like(dy)
    _plan("FakeQuantizeBackward", "FakeQuantizeDescriptor", dy, shape=dy.shape, dtype=dy.dtype, mask=True,
          alignment=_alignment(dy)).run(mask=mask, dy=dy, dx=dx)
    return dx


_fake_quantize_mask_backward_op = define(
    "fake_quantize_mask_backward(Tensor dy, Tensor mask) -> Tensor", _fake_quantize_mask_backward,
    lambda dy, mask: _like(dy))


def fake_quantize(x: Tensor, scale: Tensor | None = None, zero_point: Tensor | None = None, *,
                  global_scale: Tensor | None = None, gradient_scale: float = 1.0, scale_rule: str = "absmax",
                  eps: float = 0.0, asymmetric: bool = False, scale_dtype: torch.dtype | None = None,
                  **options: object) -> Tensor:
    """x rounded to the values of a quantized tensor: (clamp(rne(x / scale) + zero_point, q_min, q_max) - zero_point)
    * scale, in the dtype of x. Of a table format, the nearest value times scale.

    The gradient passes straight through: dy where the rounded x lies within the codes, else 0. Where scale or
    zero_point require gradients, they get those of LSQ and LSQ+, times `gradient_scale`.

    x: f32, f64, f16 or bf16, of any shape. scale: f32 or the dtype of x, of the shape that the module says; None:
    computed from x by `scale_rule` ("minmax" with asymmetric=True), at least `eps`, in `scale_dtype`. zero_point:
    i32; or to be learned f32 (f64 for f64), which is rounded half to even and clamped to the codes where it is used.
    options: q_min=-8, q_max=7, granularity, axis, group_size; format ("nf4", "fp4", "fp4_e2m1", or "lut4" with
    table=16 values) instead of integers. A scale that is negative or not finite counts as 0, which gives 0. Raises
    ValueError.

    Of format "nvfp4" and "mxfp4" the only other option is axis: the format makes the scales of each x, in groups of 16
    and 32, and the result is, bit by bit, what a quantized x decodes to. global_scale: f32 [1], of nvfp4; None: that of
    x. The gradient is dy everywhere, as in torchao.

    >>> x = torch.tensor([-0.3, 0.26, 9.0], requires_grad=True)
    >>> y = fake_quantize(x, torch.tensor(0.5))
    >>> y.detach()
    tensor([-0.5000,  0.5000,  3.5000])
    >>> y.sum().backward()
    >>> x.grad
    tensor([1., 1., 0.])
    """
    if options.get("format") in BLOCK_FLOATS:
        if scale is not None or zero_point is not None:
            raise ValueError(f"fake_quantize: format {options['format']} makes its scales of x: scale and zero_point must "
                             "be None")
        return _fake_quantize_block_floats_op(x, global_scale, **options)
    if scale is None:
        return _fake_quantize_computed_op(x, scale_rule=scale_rule, eps=eps, asymmetric=asymmetric,
                                          scale_dtype=scale_dtype, **options)[0]
    learned = scale.requires_grad or (zero_point is not None and zero_point.requires_grad)
    if x.requires_grad and not learned and torch.is_grad_enabled():
        return _fake_quantize_masked_op(x, scale, zero_point, **options)[0]
    return _fake_quantize_op(x, scale, zero_point, gradient_scale=gradient_scale, **options)


# ---- observe, compute_qparams

_OBSERVER = ('str kind="min-max", float momentum=0.99, float percentile=99.99, int q_min=-128, int q_max=127, '
             'bool asymmetric=False, str scale_rule="absmax"')


@functools.lru_cache(maxsize=256)
def _observer(kind: str, momentum: float, percentile: float, q_min: int, q_max: int, asymmetric: bool,
              scale_rule: str) -> object:
    qparams = _core.QParamsConfig(q_min=q_min, q_max=q_max, asymmetric=asymmetric, scale_rule=scale_rule)
    return _core.ObserverConfig(kind, momentum=momentum, percentile=percentile, qparams=qparams)


def _observe(x: Tensor, min: Tensor, max: Tensor, num_batches: Tensor, *, kind: str = "min-max",
             momentum: float = 0.99, percentile: float = 99.99, q_min: int = -128, q_max: int = 127,
             asymmetric: bool = False, scale_rule: str = "absmax", **options: object) -> None:
    x = x.contiguous()
    observer = _observer(kind, momentum, percentile, q_min, q_max, asymmetric, scale_rule)
    _plan("Observe", "ObserveDescriptor", x, shape=x.shape, dtype=x.dtype, alignment=_alignment(x), observer=observer,
          **options).run(x=x, min=min, max=max, num_batches=num_batches)
    _changed(min, max, num_batches)


_observe_op = define(
    f"observe(Tensor x, Tensor(a!) min, Tensor(b!) max, Tensor(c!) num_batches, *, {_OBSERVER}, {_GROUPS}) -> ()",
    _observe, lambda *_, **__: None)


def observe(x: Tensor, min: Tensor, max: Tensor, num_batches: Tensor, **options: object) -> None:
    """Adds the batch x to what an observer has seen: min and max (f32; f64 for f64; the shape of scales) and
    num_batches (i64; []; of "percentile" and "mse" the shape of scales) are changed in place. Before the first batch
    they are +inf, -inf and 0. Values that are not finite are ignored.

    options: kind="min-max" ("moving-average" with momentum=0.99, "percentile" with percentile=99.99, "mse" with
    q_min, q_max, asymmetric and scale_rule of the codes whose error is least), granularity, axis, group_size.

    >>> low, high, count = torch.tensor(torch.inf), torch.tensor(-torch.inf), torch.tensor(0)
    >>> observe(torch.tensor([1.0, -2.0, 3.0]), low, high, count)
    >>> low, high, count
    (tensor(-2.), tensor(3.), tensor(1))
    >>> compute_qparams(low, high, q_min=-8, q_max=7, asymmetric=True, scale_rule="minmax")
    (tensor(0.3333), tensor(-2, dtype=torch.int32))
    """
    _observe_op(x.detach(), min, max, num_batches, **options)


def _compute_qparams(min: Tensor, max: Tensor, *, scale_dtype: torch.dtype | None = None,
                     zero_point_dtype: torch.dtype | None = None, q_min: int = -128, q_max: int = 127,
                     asymmetric: bool = False, scale_rule: str = "absmax", eps: float = 0.0) -> tuple[Tensor, Tensor]:
    min, max = _contiguous(min, max)
    scale, zero_point = _fake_of_compute_qparams(min, max, scale_dtype=scale_dtype, zero_point_dtype=zero_point_dtype)
    config = _core.QParamsConfig(q_min=q_min, q_max=q_max, asymmetric=asymmetric, scale_rule=scale_rule, eps=eps)
    _plan("ComputeQParams", "QParamsDescriptor", min, shape=min.shape, dtype=min.dtype, scale_dtype=scale.dtype,
          zero_point_dtype=zero_point_dtype, config=config).run(
              min=min, max=max, scale=scale, zero_point=None if zero_point_dtype is None else zero_point)
    return scale, zero_point


def _fake_of_compute_qparams(min: Tensor, max: Tensor, *, scale_dtype: torch.dtype | None = None,
                             zero_point_dtype: torch.dtype | None = None, **_: object) -> tuple[Tensor, Tensor]:
    return (min.new_empty(min.shape, dtype=scale_dtype),
            min.new_empty([0] if zero_point_dtype is None else min.shape, dtype=zero_point_dtype or torch.int32))


_compute_qparams_op = define(
    f"compute_qparams(Tensor min, Tensor max, *, int q_min=-128, int q_max=127, bool asymmetric=False, {_RULE}, "
    "float eps=0.0, ScalarType? scale_dtype=None, ScalarType? zero_point_dtype=None) -> (Tensor, Tensor)",
    _compute_qparams, _fake_of_compute_qparams)


def compute_qparams(min: Tensor, max: Tensor, *, q_min: int = -128, q_max: int = 127, asymmetric: bool = False,
                    scale_rule: str = "absmax", eps: float = 0.0, scale_dtype: torch.dtype | None = None,
                    zero_point_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points of ranges, as QParamsConfig says. min, max: f32 or f64, any shape, which that of the
    results is. scale_dtype None: that of min. Zero points are i32, or `zero_point_dtype` (i8, u8); None where they
    are 0."""
    if zero_point_dtype is None and (asymmetric or q_min >= 0):
        zero_point_dtype = torch.int32
    scale, zero_point = _compute_qparams_op(min.detach(), max.detach(), q_min=q_min, q_max=q_max,
                                            asymmetric=asymmetric, scale_rule=scale_rule, eps=eps,
                                            scale_dtype=scale_dtype, zero_point_dtype=zero_point_dtype)
    return scale, None if zero_point_dtype is None else zero_point


# ---- affine codes with trained scales and biases


def _groups(cols: int, group_size: int) -> int:
    return (cols + group_size - 1) // group_size


def _affine_init(w: Tensor, *, scale_dtype: torch.dtype | None = None,
                 **options: object) -> tuple[Tensor, Tensor, Tensor]:
    w = w.contiguous()
    codes, scales, biases = _fake_of_affine_init(w, scale_dtype=scale_dtype, **options)
    rows, cols = w.shape
    _plan("AffineInit", "AffineQdqDescriptor", w, rows=rows, cols=cols, dtype=w.dtype, scale_dtype=scales.dtype,
          alignment=_alignment(w), **options).run(w=w, codes=codes, scales=scales, biases=biases)
    return codes, scales, biases


def _fake_of_affine_init(w: Tensor, *, bits: int = 4, group_size: int = 64, packed: bool = True,
                         scale_dtype: torch.dtype | None = None, **_: object) -> tuple[Tensor, Tensor, Tensor]:
    rows, cols = w.shape
    codes = w.new_empty([rows, (cols * bits + 7) // 8 if packed else cols], dtype=torch.uint8)
    groups = [rows, _groups(cols, group_size)]
    dtype = scale_dtype or torch.float32
    return codes, w.new_empty(groups, dtype=dtype), w.new_empty(groups, dtype=dtype)


_affine_init_op = define(
    f"affine_init(Tensor w, *, {_AFFINE}, ScalarType? scale_dtype=None, str scale_rule=\"minmax\", "
    "str rounding=\"half-even\", bool refit=False) -> (Tensor, Tensor, Tensor)", _affine_init, _fake_of_affine_init)


def affine_init(w: Tensor, *, scale_dtype: torch.dtype | None = None,
                **options: object) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and biases of a matrix [rows, cols]: what training of scales and biases starts from.

    w: f32, f16 or bf16. options: bits=4 (2, 3, 4, 5, 6, 8), group_size=64 (along a row; the last may be short),
    packed=True (codes as QuantSpec.part_shapes says; False: a byte each), n_bins=0 (levels; 0: 2^bits),
    scale_rule="minmax" or "mlx-edge", rounding="half-even" or "half-away", refit=False (True: scales and biases that
    fit the codes best). Returns codes (u8), scales and biases ([rows, groups], `scale_dtype`; None: f32).

    >>> codes, scales, biases = affine_init(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), bits=2, group_size=4)
    >>> codes, scales, biases
    (tensor([[228]], dtype=torch.uint8), tensor([[1.]]), tensor([[0.]]))
    >>> affine_qdq(codes, scales, biases, cols=4, bits=2, group_size=4)
    tensor([[0., 1., 2., 3.]])
    """
    return _affine_init_op(w.detach(), scale_dtype=scale_dtype, **options)


def _affine_qdq(codes: Tensor, scales: Tensor, biases: Tensor, *, cols: int, dtype: torch.dtype | None = None,
                **options: object) -> Tensor:
    codes, scales, biases = _contiguous(codes, scales, biases)
    y = _fake_of_affine_qdq(codes, scales, biases, cols=cols, dtype=dtype)
    _plan("AffineQdq", "AffineQdqDescriptor", y, rows=math.prod(codes.shape[:-1]), cols=cols, dtype=y.dtype,
          scale_dtype=scales.dtype, **options).run(codes=codes, scales=scales, biases=biases, y=y)
    return y


def _fake_of_affine_qdq(codes: Tensor, scales: Tensor, biases: Tensor, *, cols: int,
                        dtype: torch.dtype | None = None, **_: object) -> Tensor:
    return scales.new_empty([*codes.shape[:-1], cols], dtype=dtype or torch.float32)


def _setup_affine_qdq(ctx: object, inputs: tuple, keyword_only_inputs: dict, output: Tensor) -> None:
    codes, scales, biases = inputs
    ctx.save_for_backward(codes)
    ctx.shapes = scales.shape, biases.shape
    ctx.dtypes = scales.dtype, biases.dtype
    ctx.options = {name: keyword_only_inputs[name] for name in ("bits", "group_size", "packed", "n_bins")}


def _affine_qdq_gradient(ctx: object, dy: Tensor) -> tuple:
    (codes,) = ctx.saved_tensors
    dscales, dbiases = _affine_qdq_backward_op(dy, codes, **ctx.options)
    return (None, dscales.view(ctx.shapes[0]).to(ctx.dtypes[0]), dbiases.view(ctx.shapes[1]).to(ctx.dtypes[1]))


_affine_qdq_op = define(
    f"affine_qdq(Tensor codes, Tensor scales, Tensor biases, *, SymInt cols, {_AFFINE}, "
    "ScalarType? dtype=None) -> Tensor", _affine_qdq, _fake_of_affine_qdq, setup_context=_setup_affine_qdq,
    backward=_affine_qdq_gradient)


def _affine_qdq_backward(dy: Tensor, codes: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    dy, codes = _contiguous(dy, codes)
    dscales, dbiases = _fake_of_affine_qdq_backward(dy, codes, **options)
    _plan("AffineQdqBackward", "AffineQdqDescriptor", dy, rows=math.prod(dy.shape[:-1]), cols=dy.shape[-1],
          dtype=dy.dtype, alignment=_alignment(dy), **options).run(codes=codes, dy=dy, dscales=dscales,
                                                                   dbiases=dbiases)
    return dscales, dbiases


def _fake_of_affine_qdq_backward(dy: Tensor, codes: Tensor, *, group_size: int = 64,
                                 **_: object) -> tuple[Tensor, Tensor]:
    shape = [math.prod(dy.shape[:-1]), _groups(dy.shape[-1], group_size)]
    return dy.new_empty(shape, dtype=torch.float32), dy.new_empty(shape, dtype=torch.float32)


_affine_qdq_backward_op = define(
    f"affine_qdq_backward(Tensor dy, Tensor codes, *, {_AFFINE}) -> (Tensor, Tensor)", _affine_qdq_backward,
    _fake_of_affine_qdq_backward)


def affine_qdq(codes: Tensor, scales: Tensor, biases: Tensor, *, cols: int, dtype: torch.dtype | None = None,
               **options: object) -> Tensor:
    """codes * scales + biases in `dtype` (None: f32), [..., cols], with the gradients of scales and biases.

    codes: u8 [..., bytes of a row]. scales, biases: f32, f16 or bf16, [..., groups]. options: bits=4, group_size=64,
    packed=True, n_bins=0, as `affine_init` has them. See its example."""
    return _affine_qdq_op(codes, scales, biases, cols=cols, dtype=dtype, **options)


def _affine_adam_step(dy: Tensor, codes: Tensor, scales: Tensor, biases: Tensor, scale_m: Tensor, scale_v: Tensor,
                      bias_m: Tensor, bias_v: Tensor, *, step: int, learning_rate: float = 1e-3, beta1: float = 0.9,
                      beta2: float = 0.999, epsilon: float = 1e-8, **options: object) -> None:
    dy, codes = _contiguous(dy, codes)
    adam = _core.AdamStep(learning_rate=learning_rate, beta1=beta1, beta2=beta2, epsilon=epsilon, step=step)
    _plan("AffineQdqBackward", "AffineQdqDescriptor", dy, rows=math.prod(dy.shape[:-1]), cols=dy.shape[-1],
          dtype=dy.dtype, alignment=_alignment(dy), adam=True,
          **options).run(codes=codes, dy=dy, scales=scales, biases=biases, scale_m=scale_m, scale_v=scale_v,
                         bias_m=bias_m, bias_v=bias_v, adam=adam)
    _changed(scales, biases, scale_m, scale_v, bias_m, bias_v)


_affine_adam_step_op = define(
    "affine_adam_step(Tensor dy, Tensor codes, Tensor(a!) scales, Tensor(b!) biases, Tensor(c!) scale_m, "
    "Tensor(d!) scale_v, Tensor(e!) bias_m, Tensor(f!) bias_v, *, int step, float learning_rate=0.001, "
    f"float beta1=0.9, float beta2=0.999, float epsilon=1e-08, {_AFFINE}) -> ()", _affine_adam_step,
    lambda *_, **__: None)


def affine_adam_step(dy: Tensor, codes: Tensor, scales: Tensor, biases: Tensor, scale_m: Tensor, scale_v: Tensor,
                     bias_m: Tensor, bias_v: Tensor, *, step: int, learning_rate: float = 1e-3,
                     **options: object) -> None:
    """A step of Adam on scales and biases in one pass over dy, the gradient of what `affine_qdq` gave: scales, biases
    and their four moments (f32, [rows, groups]; the moments 0 before step 1) are changed in place. options:
    beta1=0.9, beta2=0.999, epsilon=1e-8, and those of `affine_qdq`. The bytes are those of the gradients and
    PyTorch's formula, each operation rounded to f32."""
    state = (t.detach() for t in (scales, biases, scale_m, scale_v, bias_m, bias_v))
    _affine_adam_step_op(dy.detach(), codes, *state, step=step, learning_rate=learning_rate, **options)
