"""Packed weights of the tensors that other tools hold in memory, exactly, and back to those of bitsandbytes."""

import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _core
from ._ops_weight import dequantize, pack, unpack


class Packed(NamedTuple):
    data: Tensor  # u8
    spec: _core.QuantSpec
    n: int
    k: int


def _refuse(layout: str, text: str) -> None:
    raise ValueError(f"{layout}: {text}")


def _take(layout: str, tensors: Mapping[str, Tensor], *names: str) -> list[Tensor]:
    missing = [name for name in names if name not in tensors]
    if missing:
        _refuse(layout, f"tensor {missing[0]} is missing; there are {', '.join(sorted(tensors))}")
    return [tensors[name].detach() for name in names]


def _empty(like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty([0], dtype=dtype)


def _pack(codes: Tensor, scales: Tensor, zeros: Tensor | None, biases: Tensor | None, spec: _core.QuantSpec, n: int,
          k: int, layout: str = "halfbyte", nested: tuple[Tensor, ...] = ()) -> Packed:
    zeros = _empty(codes, torch.uint8) if zeros is None else zeros
    biases = _empty(scales, scales.dtype) if biases is None else biases
    return Packed(pack(codes, scales, zeros, biases, list(nested), str(spec), n, k, layout), spec, n, k)


class Grid(NamedTuple):
    """What the tensors of a layout do not say of themselves."""
    bits: int = 4
    group_size: int | None = None  # None: as many columns as make the number of groups, all of one size
    version: int = 1  # of gptq

    def granularity(self, layout: str, groups: int, k: int) -> dict:
        if groups == 1 and self.group_size in (None, -1, k):
            return {"granularity": "channel"}
        length = -(-k // groups) if self.group_size is None else self.group_size
        if length <= 0 or -(-k // length) != groups:
            _refuse(layout, f"rows of {k} have {groups} scales, which are no groups of {length}")
        return {"group_size": length}


def book_of(spec: _core.QuantSpec, device: torch.device) -> Tensor:
    """The sixteen values of a table format, f32."""
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8, device=device)
    one = codes.new_ones([1, 1], dtype=torch.float32)
    plain = _core.QuantSpec(spec.format, group_size=16, table=spec.table)
    return dequantize(codes, one, _empty(codes, torch.uint8), _empty(one, torch.float32), str(plain), [16],
                      torch.float32)


# ---- bitsandbytes


def from_bitsandbytes(data: Tensor, absmax: Tensor, book: Tensor, quant_type: str, blocksize: int,
                      shape: tuple[int, ...], nested: tuple[Tensor, Tensor, Tensor] | None = None) -> Packed:
    """nested: absmax, map and offset of scales that are quantized too."""
    n, k = shape
    spec = _core.QuantSpec(quant_type, granularity="group" if k % blocksize == 0 else "flat", group_size=blocksize,
                           double_quant=nested is not None)
    if not torch.equal(book.float().cpu(), book_of(spec, torch.device("cpu"))):
        _refuse("bitsandbytes", f"the code book is not that of {quant_type}")
    scales = absmax if nested is not None else absmax.float()
    parts = () if nested is None else tuple(part.float().reshape(-1).to(data.device) for part in nested)
    return _pack(data.reshape(-1).view(torch.uint8), scales, None, None, spec, n, k, "bitsandbytes", parts)


def from_bitsandbytes_state(state: object, data: Tensor) -> Packed:
    """Of a bitsandbytes.functional.QuantState and the data of its Params4bit."""
    nested = (state.state2.absmax, state.state2.code, state.offset) if state.nested else None
    return from_bitsandbytes(data, state.absmax, state.code, state.quant_type, state.blocksize, tuple(state.shape),
                             nested)


def from_bitsandbytes_keys(tensors: Mapping[str, Tensor]) -> Packed:
    """Of the tensors of a file: weight, absmax, quant_map, quant_state.bitsandbytes__*, nested_absmax,
    nested_quant_map; all but the first may have the prefix `weight.`."""
    tensors = {name.removeprefix("weight."): tensor for name, tensor in tensors.items()}
    data, absmax, book = _take("bitsandbytes", tensors, "weight", "absmax", "quant_map")
    states = [tensor for name, tensor in tensors.items() if name.startswith("quant_state.bitsandbytes__")]
    if not states:
        _refuse("bitsandbytes", "tensor quant_state.bitsandbytes__nf4 or __fp4 is missing")
    state = json.loads(bytes(states[0].cpu().tolist()))
    nested = None
    if "nested_absmax" in tensors:
        offset = torch.tensor([state["nested_offset"]], dtype=torch.float32)
        nested = (*_take("bitsandbytes", tensors, "nested_absmax", "nested_quant_map"), offset)
    return from_bitsandbytes(data, absmax, book, state["quant_type"], state["blocksize"], tuple(state["shape"]), nested)


def to_bitsandbytes_keys(packed: Tensor, spec: _core.QuantSpec, n: int, k: int,
                         dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a file of bitsandbytes, which has nf4 and fp4 with groups of one size."""
    flat = spec.granularity == "flat" or (spec.granularity == "group" and k % spec.group_size == 0)
    if spec.format not in ("nf4", "fp4") or not flat or spec.scale_dtype != "f32":
        _refuse("bitsandbytes", f"it holds nf4 and fp4 with scales in f32 and groups that divide the rows, not {spec} "
                                f"with rows of {k}")
    codes, scales, _, _, absmax, table, offset, _ = unpack(packed, str(spec), n, k)
    codes = codes.reshape(-1, 1)
    state = {"quant_type": spec.format, "blocksize": spec.group_size, "dtype": str(dtype).removeprefix("torch."),
             "shape": [n, k]}
    tensors = {"weight": (codes << 4) | (codes >> 4), "weight.absmax": scales.reshape(-1),
               "weight.quant_map": book_of(spec, packed.device)}
    if spec.double_quant:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        tensors |= {"weight.nested_absmax": absmax, "weight.nested_quant_map": table}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors | {f"weight.quant_state.bitsandbytes__{spec.format}": text}


# ---- compressed-tensors, MLX, GPTQ, AWQ


def _from_compressed_tensors(tensors: Mapping[str, Tensor], grid: Grid) -> Packed:
    words, scales, shape = _take("compressed-tensors", tensors, "weight_packed", "weight_scale", "weight_shape")
    n, k = (int(extent) for extent in shape)
    if scales.numel() == 1:
        grouping = {"granularity": "tensor"}
    else:
        grouping = grid.granularity("compressed-tensors", scales.shape[-1], k)
    zeros = tensors.get("weight_zero_point")
    if tensors.get("weight_g_idx") is not None:
        _refuse("compressed-tensors", "weight_g_idx: groups of columns in another order (act-order) are not read")
    spec = _core.QuantSpec(f"int{grid.bits}", asymmetric=zeros is not None, scale_dtype=scales.dtype, **grouping)
    return _pack(words, scales, zeros, None, spec, n, k, "compressed-tensors")


def _from_mlx(tensors: Mapping[str, Tensor], grid: Grid) -> Packed:
    words, scales, biases = _take("mlx", tensors, "weight", "scales", "biases")
    n, k = words.shape[0], words.shape[1] * 32 // grid.bits
    spec = _core.QuantSpec(f"affine{grid.bits}", scale_dtype=scales.dtype,
                           **grid.granularity("mlx", scales.shape[-1], k))
    return _pack(words, scales, None, biases, spec, n, k, "mlx")


def _fields(words: Tensor, bits: int) -> Tensor:
    """[..., words] -> [..., words, fields], from the lowest bits on."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words.view(torch.int32).unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).to(torch.uint8)


def _of_columns(layout: str, codes: Tensor, zeros: Tensor, scales: Tensor, grid: Grid) -> Packed:
    """codes [k, n], zeros and scales [groups, n]: what gptq and awq have, turned."""
    k, n = codes.shape
    if scales.shape[-1] != n or zeros.shape != scales.shape:
        _refuse(layout, f"qweight has {n} columns, scales has the shape {list(scales.shape)} and qzeros that of "
                        f"{list(zeros.shape)}")
    codes = codes.t().contiguous()
    if grid.bits == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
    symmetric = bool((zeros == 1 << (grid.bits - 1)).all())
    spec = _core.QuantSpec(f"int{grid.bits}", asymmetric=not symmetric, scale_dtype=scales.dtype,
                           **grid.granularity(layout, scales.shape[0], k))
    return _pack(codes, scales.t(), None if symmetric else zeros.t(), None, spec, n, k)


def _from_gptq(tensors: Mapping[str, Tensor], grid: Grid) -> Packed:
    words, zero_words, scales = _take("gptq", tensors, "qweight", "qzeros", "scales")
    if grid.bits not in (4, 8):
        _refuse("gptq", f"codes of 4 and 8 bits are read, not of {grid.bits}")
    codes = _fields(words.t().contiguous(), grid.bits).flatten(1).t()
    zeros = _fields(zero_words, grid.bits).flatten(1)[:, : scales.shape[-1]]
    if grid.version == 1:  # stores one less
        zeros = (zeros + 1) & ((1 << grid.bits) - 1)
    order = tensors.get("g_idx")
    if order is not None:
        length = grid.granularity("gptq", scales.shape[0], codes.shape[0]).get("group_size", codes.shape[0])
        if not torch.equal(order.cpu().long(), torch.arange(codes.shape[0]) // length):
            _refuse("gptq", "g_idx: groups of columns in another order (act-order) are not read")
    return _of_columns("gptq", codes, zeros, scales, grid)


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the field of each column


def _from_awq(tensors: Mapping[str, Tensor], grid: Grid) -> Packed:
    words, zero_words, scales = _take("awq", tensors, "qweight", "qzeros", "scales")
    if grid.bits != 4:
        _refuse("awq", f"it has codes of 4 bits, not {grid.bits}")
    order = torch.tensor(_AWQ_ORDER, device=words.device)
    codes, zeros = (_fields(of, 4)[..., order].flatten(1) for of in (words, zero_words))
    return _of_columns("awq", codes, zeros, scales, grid)


_READERS: dict[str, Callable[[Mapping[str, Tensor], Grid], Packed]] = {
    "bitsandbytes": lambda tensors, grid: from_bitsandbytes_keys(tensors),
    "compressed-tensors": _from_compressed_tensors, "mlx": _from_mlx, "gptq": _from_gptq, "awq": _from_awq}


def from_tensors(layout: str, tensors: Mapping[str, Tensor], grid: Grid) -> Packed:
    if layout not in _READERS:
        raise ValueError(f"layout must be one of {', '.join(_READERS)}, got {layout}")
    if grid.bits not in (2, 3, 4, 5, 6, 8):
        raise ValueError(f"bits must be 2 to 6 or 8, got {grid.bits}")
    return _READERS[layout](tensors, grid)
