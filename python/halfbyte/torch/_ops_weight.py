"""Operators on weights: quantize, dequantize, pack, unpack, qgemm, qgemm_lora.

A spec is the text of a QuantSpec. Parts that it does not have are empty tensors. `weight` is the packed form of a
weight [n, k] as bytes, under any dtype.
"""

import functools
import math

import torch
from torch import Tensor

from .. import _core
from ._library import FLOATS, WORDS, define

# ---- What is known of a spec


@functools.lru_cache(maxsize=1024)
def spec_of(text: str) -> _core.QuantSpec:
    return _core.QuantSpec.parse(text)


def scale_dtype_of(spec: _core.QuantSpec) -> torch.dtype:
    return FLOATS.get(spec.scale_dtype, torch.uint8)  # block floats: the bytes of E4M3 and E8M0


def without_double_quant(spec: _core.QuantSpec) -> _core.QuantSpec:
    return spec.replace(double_quant=False) if spec.double_quant else spec


def group_length(spec: _core.QuantSpec, rows: int, cols: int) -> int:
    """The elements that share a scale."""
    return {"tensor": rows * cols, "channel": cols}.get(spec.granularity, spec.group_size)


def part_shapes(spec: _core.QuantSpec, rows: int, cols: int) -> tuple[list, list]:
    """QuantSpec.part_shapes, also of symbolic sizes."""
    def up(size: int, unit: int) -> int:
        return (size + unit - 1) // unit

    if spec.granularity == "flat":
        return [up(rows * cols * spec.bits, 8)], [up(rows * cols, spec.group_size)]
    codes = [rows, up(cols * spec.bits, 8)]
    if spec.granularity == "tensor":
        return codes, [1]
    return codes, [rows, up(cols, spec.group_size if spec.granularity == "group" else torch.sym_max(cols, 1))]


def rows_of(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _empty_parts(like: Tensor, spec: _core.QuantSpec, rows: int, cols: int) -> tuple[Tensor, ...]:
    """codes, scales, zeros, biases; not initialized."""
    codes, groups = part_shapes(spec, rows, cols)
    scale_dtype = torch.uint8 if spec.double_quant else scale_dtype_of(spec)
    return (like.new_empty(codes, dtype=torch.uint8), like.new_empty(groups, dtype=scale_dtype),
            like.new_empty(groups if spec.has_zeros else [0], dtype=torch.uint8),
            like.new_empty(groups if spec.has_biases else [0], dtype=scale_dtype_of(spec)))


def _present(**parts: Tensor) -> dict[str, Tensor]:
    return {name: part.contiguous() for name, part in parts.items() if part.numel() > 0}


# ---- quantize, dequantize


@functools.lru_cache(maxsize=256)
def _quantize_plan(device: torch.device, spec: str, rows: int, cols: int, dtype: str, scale_rule: str | None,
                   code_scale: str) -> _core.QuantizePlan:
    descriptor = _core.QuantizeDescriptor(spec=spec, rows=rows, cols=cols, dtype=dtype,
                                          encoding=_core.Encoding(scale_rule, code_scale=code_scale))
    return _core.QuantizePlan.select(device, descriptor)


@functools.lru_cache(maxsize=256)
def _dequantize_plan(device: torch.device, spec: str, rows: int, cols: int, dtype: str) -> _core.DequantizePlan:
    return _core.DequantizePlan.select(
        device, _core.QuantizeDescriptor(spec=spec, rows=rows, cols=cols, dtype=dtype))


def _word(dtype: torch.dtype, name: str) -> str:
    if dtype not in WORDS:
        raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {dtype}")
    return WORDS[dtype]


def _quantize(x: Tensor, spec: str, scale_rule: str | None = None,
              code_scale: str = "stored") -> tuple[Tensor, ...]:
    of, rows, cols = spec_of(spec), rows_of(x), x.shape[-1]
    parts = *_empty_parts(x, of, rows, cols), _empty_global_scale(x, of)
    if x.numel() == 0:
        return parts
    plan = _quantize_plan(x.device, spec, rows, cols, _word(x.dtype, "x"), scale_rule, code_scale)
    workspace = x.new_empty([plan.workspace_size], dtype=torch.uint8)
    plan.run(x=x.contiguous(), workspace=workspace, **_present(**dict(zip(_PARTS, parts))))
    status = plan.status(workspace)
    if not status.ok:
        raise ValueError(f"quantize: x cannot be held by {spec}: {status}")
    return parts


def _quantize_fake(x: Tensor, spec: str, scale_rule: str | None = None,
                   code_scale: str = "stored") -> tuple[Tensor, ...]:
    of = spec_of(spec)
    return *_empty_parts(x, of, rows_of(x), x.shape[-1]), _empty_global_scale(x, of)


quantize = define(
    "quantize(Tensor x, str spec, str? scale_rule=None, str code_scale='stored') "
    "-> (Tensor codes, Tensor scales, Tensor zeros, Tensor biases, Tensor global_scale)", _quantize, _quantize_fake)


def _dequantize(codes: Tensor, scales: Tensor, zeros: Tensor, biases: Tensor, spec: str, shape: list[int],
                dtype: torch.dtype, global_scale: Tensor | None = None) -> Tensor:
    y = codes.new_empty(shape, dtype=dtype)
    if y.numel() > 0:
        plan = _dequantize_plan(codes.device, spec, rows_of(y), y.shape[-1], _word(dtype, "dtype"))
        parts = codes, scales, zeros, biases, codes.new_empty(0) if global_scale is None else global_scale
        plan.run(y=y, **_present(**dict(zip(_PARTS, parts))))
    return y


def _dequantize_fake(codes: Tensor, scales: Tensor, zeros: Tensor, biases: Tensor, spec: str, shape: list[int],
                     dtype: torch.dtype, global_scale: Tensor | None = None) -> Tensor:
    return codes.new_empty(shape, dtype=dtype)


def _dequantize_setup(ctx, inputs: tuple, output: Tensor) -> None:
    codes, scales, zeros, biases, ctx.spec, ctx.shape, *_ = inputs
    ctx.save_for_backward(codes, scales, zeros, biases)


def _sum_groups(x: Tensor, spec: _core.QuantSpec, groups: torch.Size) -> Tensor:
    """The sum of each group."""
    rows, cols = rows_of(x), x.shape[-1]
    width = rows * cols if spec.granularity in ("flat", "tensor") else cols
    length = group_length(spec, rows, cols)
    x = torch.nn.functional.pad(x.reshape(-1, width), (0, -width % length))
    return x.reshape(-1, length).sum(-1).reshape(groups)


def _dequantize_backward(ctx, dy: Tensor) -> tuple:
    codes, scales, zeros, biases = ctx.saved_tensors
    spec = spec_of(ctx.spec)
    of_scales = of_biases = None
    exact = torch.float64 if dy.dtype == torch.float64 else torch.float32
    dy = dy.to(exact)
    if ctx.needs_input_grad[1]:
        # y is linear in the scales: what they are multiplied by is y where they are 1.
        units = dequantize(codes, torch.ones_like(scales), zeros, torch.zeros_like(biases), ctx.spec, ctx.shape, exact)
        of_scales = _sum_groups(dy * units, spec, scales.shape).to(scales.dtype)
    if ctx.needs_input_grad[3] and spec.has_biases:
        of_biases = _sum_groups(dy, spec, biases.shape).to(biases.dtype)
    return None, of_scales, None, of_biases, None, None, None, None


dequantize = define(
    "dequantize(Tensor codes, Tensor scales, Tensor zeros, Tensor biases, str spec, SymInt[] shape, ScalarType dtype, "
    "Tensor? global_scale=None) -> Tensor", _dequantize, _dequantize_fake, setup_context=_dequantize_setup, backward=_dequantize_backward)

# ---- pack, unpack


def packed_bytes(spec: str, n: int, k: int) -> int:
    return spec_of(spec).packed_bytes(n, k)


_PARTS = ("codes", "scales", "zeros", "biases", "global_scale")
_NESTED = ("absmax", "map", "offset")


def _empty_global_scale(like: Tensor, spec: _core.QuantSpec) -> Tensor:
    return like.new_empty([int(spec.has_global_scale)], dtype=torch.float32)


def nested_of(spec: _core.QuantSpec, absmax: Tensor, table: Tensor, offset: Tensor,
              global_scale: Tensor) -> list[Tensor]:
    """What pack takes beside the parts of groups: that of double quantization, or the global scale."""
    if spec.double_quant:
        return [absmax, table, offset]
    return [global_scale] if spec.has_global_scale else []


def _pack(codes: Tensor, scales: Tensor, zeros: Tensor, biases: Tensor, nested: list[Tensor], spec: str, n: int,
          k: int, layout: str = "halfbyte") -> Tensor:
    packed = codes.new_empty([packed_bytes(spec, n, k)], dtype=torch.uint8)
    names = _PARTS[4:] if spec_of(spec).has_global_scale else _NESTED
    parts = _present(codes=codes, scales=scales, zeros=zeros, biases=biases, **dict(zip(names, nested)))
    if not parts:  # of a weight without elements: padding
        return packed.zero_()
    _core.reorder(spec, n, k, layout, out=packed, **parts)
    return packed


def _pack_fake(codes: Tensor, scales: Tensor, zeros: Tensor, biases: Tensor, nested: list[Tensor], spec: str, n: int,
               k: int, layout: str = "halfbyte") -> Tensor:
    return codes.new_empty([packed_bytes(spec, n, k)], dtype=torch.uint8)


pack = define(
    "pack(Tensor codes, Tensor scales, Tensor zeros, Tensor biases, Tensor[] nested, str spec, int n, int k, "
    "str layout='halfbyte') -> Tensor", _pack, _pack_fake)


def as_bytes(weight: Tensor, spec: str, n: int, k: int) -> Tensor:
    """The bytes of a packed weight, which may be stored under another dtype."""
    bytes_ = weight.reshape(-1).view(torch.uint8)
    needed = packed_bytes(spec, n, k)
    if bytes_.numel() != needed:
        raise ValueError(f"weight must be the {needed} bytes of a packed weight {spec} [{n}, {k}], got "
                         f"{bytes_.numel()} bytes ({weight.dtype} {list(weight.shape)}): a cast destroys them")
    return bytes_


def _empty_unpacked(weight: Tensor, spec: str, n: int, k: int) -> tuple[Tensor, ...]:
    of = spec_of(spec)
    parts = _empty_parts(weight, of, n, k)
    blocks = -(-parts[1].numel() // 256)
    sizes = [blocks, 256, 1] if of.double_quant else [0, 0, 0]
    return *parts, *(weight.new_empty([size], dtype=torch.float32) for size in sizes), _empty_global_scale(weight, of)


def _unpack(weight: Tensor, spec: str, n: int, k: int) -> tuple[Tensor, ...]:
    packed = as_bytes(weight, spec, n, k)
    parts = _empty_unpacked(weight, spec, n, k)
    names = (*_PARTS[:4], *_NESTED, *_PARTS[4:])
    if present := _present(**dict(zip(names, parts))):
        _core._unpack(spec, n, k, packed, **present)
    return parts


unpack = define(
    "unpack(Tensor weight, str spec, int n, int k) -> (Tensor codes, Tensor scales, Tensor zeros, Tensor biases, "
    "Tensor absmax, Tensor map, Tensor offset, Tensor global_scale)", _unpack, _empty_unpacked)


def expand_scales(scales: Tensor, absmax: Tensor, table: Tensor, offset: Tensor) -> Tensor:
    """Scales in f32 of those that are quantized too; the bytes of the library."""
    of_block = absmax.repeat_interleave(256)[: scales.numel()].reshape(scales.shape)
    return table[scales.long()] * of_block + offset


def double_quantize(scales: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Scales in f32 as codes of 8 bits; absmax, map and offset. Computed on the host."""
    codes, absmax, offset = _core.double_quantize(scales.cpu().contiguous())
    nested = (absmax, torch.tensor(_core.double_quant_map()), torch.tensor([offset]))
    return codes.to(scales.device), [part.to(scales.device) for part in nested]


def aligned(weight: Tensor) -> Tensor:
    """A packed weight where products take it: a copy, if it is of a mapped file and lies at no multiple of 64."""
    is_plain = type(weight) in (Tensor, torch.nn.Parameter) and weight.is_cpu
    return weight.clone() if is_plain and weight.data_ptr() % 64 != 0 else weight


def quantize_packed(x: Tensor, spec: str, scale_rule: str | None = None, code_scale: str = "stored") -> Tensor:
    """The packed weight of a dense one [n, k]."""
    of = spec_of(spec)
    codes, scales, zeros, biases, global_scale = quantize(x, str(without_double_quant(of)), scale_rule, code_scale)
    nested = [global_scale] if of.has_global_scale else []
    if of.double_quant:
        scales, nested = double_quantize(scales)
    return pack(codes, scales, zeros, biases, nested, spec, *x.shape)


def dequantize_packed(weight: Tensor, spec: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """W [n, k] of a packed weight."""
    of = spec_of(spec)
    codes, scales, zeros, biases, *nested, global_scale = unpack(weight, spec, n, k)
    if of.double_quant:
        scales = expand_scales(scales, *nested)
    return dequantize(codes, scales, zeros, biases, str(without_double_quant(of)), [n, k], dtype, global_scale)


# ---- qgemm


class Shape:
    """The shape of a weight: its spec, n and k; with its products. Made by shape_of, one for all equal ones.

    multiply(x, weight, bias, transposed, out=None): the product, without gradients; added to `out` where it is given.
    """

    __slots__ = ("spec", "n", "k", "multiply")

    def __init__(self, spec: str, n: int, k: int) -> None:
        self.spec, self.n, self.k = spec, n, k
        self.multiply = _core._AnyProducts(spec, n, k).multiply

    def __reduce__(self) -> tuple:
        return shape_of, (self.spec, self.n, self.k)

    def multiply_lora(self, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float,
                      transposed: bool) -> tuple[Tensor, Tensor]:
        """The product with an adapter, without gradients, and h = scaling * x A^T."""
        h = torch.mm(x.reshape(-1, x.shape[-1]), a.t()).mul_(scaling)
        y = torch.mm(h, b.t()).view(*x.shape[:-1], b.shape[0])
        return self.multiply(x, weight, bias, transposed, y), h


@functools.lru_cache(maxsize=4096)
def shape_of(spec: str, n: int, k: int) -> Shape:
    return Shape(spec, n, k)


def _qgemm(x: Tensor, weight: Tensor, bias: Tensor | None, spec: str, n: int, k: int,
           transposed: bool = False) -> Tensor:
    return shape_of(spec, n, k).multiply(x, weight, bias, transposed)


def _qgemm_fake(x: Tensor, weight: Tensor, bias: Tensor | None, spec: str, n: int, k: int,
                transposed: bool = False) -> Tensor:
    torch._check(x.shape[-1] == (n if transposed else k))
    return x.new_empty([*x.shape[:-1], k if transposed else n])


def _qgemm_setup(ctx, inputs: tuple, output: Tensor) -> None:
    _, weight, _, ctx.spec, ctx.n, ctx.k, ctx.transposed = inputs
    ctx.save_for_backward(weight)


def sum_rows(dy: Tensor) -> Tensor:
    """The gradient of a bias."""
    return dy.sum_to_size(dy.shape[-1:])


def _qgemm_backward(ctx, dy: Tensor) -> tuple:
    (weight,) = ctx.saved_tensors
    dx = qgemm(dy, weight, None, ctx.spec, ctx.n, ctx.k, not ctx.transposed) if ctx.needs_input_grad[0] else None
    of_bias = sum_rows(dy) if ctx.needs_input_grad[2] else None
    return dx, None, of_bias, None, None, None, None


qgemm = define(
    "qgemm(Tensor x, Tensor weight, Tensor? bias, str spec, int n, int k, bool transposed=False) -> Tensor",
    _qgemm, _qgemm_fake, setup_context=_qgemm_setup, backward=_qgemm_backward)


# ---- qgemm_lora: y = x W^T (+ bias) + scaling * (x A^T) B^T, A [r, in], B [out, r]


def _qgemm_lora(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, spec: str,
                n: int, k: int, transposed: bool = False) -> Tensor:
    return shape_of(spec, n, k).multiply_lora(x, weight, bias, a, b, scaling, transposed)[0]


def _qgemm_lora_fake(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, spec: str,
                     n: int, k: int, transposed: bool = False) -> Tensor:
    return _qgemm_fake(x, weight, bias, spec, n, k, transposed)


def _qgemm_lora_setup(ctx, inputs: tuple, output: Tensor) -> None:
    x, weight, _, a, b, ctx.scaling, ctx.spec, ctx.n, ctx.k, ctx.transposed = inputs
    ctx.save_for_backward(x, weight, a, b)


def _qgemm_lora_backward(ctx, dy: Tensor) -> tuple:
    x, weight, a, b = ctx.saved_tensors
    dx = of_bias = of_a = of_b = None
    if ctx.needs_input_grad[0]:
        dx = qgemm_lora(dy, weight, None, b.t(), a.t(), ctx.scaling, ctx.spec, ctx.n, ctx.k, not ctx.transposed)
    if ctx.needs_input_grad[2]:
        of_bias = sum_rows(dy)
    x, rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    if ctx.needs_input_grad[3]:
        of_a = torch.mm((torch.mm(rows, b) * ctx.scaling).t(), x)
    if ctx.needs_input_grad[4]:
        of_b = torch.mm(rows.t(), torch.mm(x, a.t()) * ctx.scaling)
    return dx, None, of_bias, of_a, of_b, None, None, None, None, None


qgemm_lora = define(
    "qgemm_lora(Tensor x, Tensor weight, Tensor? bias, Tensor a, Tensor b, float scaling, str spec, int n, int k, "
    "bool transposed=False) -> Tensor",
    _qgemm_lora, _qgemm_lora_fake, setup_context=_qgemm_lora_setup, backward=_qgemm_lora_backward)
