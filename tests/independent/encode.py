"""Encoders: codes, scales, zero points and biases of a weight, by the numeric contract.

Everything is IEEE f32: correctly rounded quotients, rounding half to even. Group statistics and
results have the shape [rows, groups]; the codes have the shape of the weight.
"""

from dataclasses import dataclass

import numpy as np

from . import safetensors_io as st
from .tables import BY_NAME, DOUBLE_QUANT_BLOCK, DOUBLE_QUANT_MAP

SMALLEST_SUBNORMAL = {"f32": 2.0**-149, "f16": 2.0**-24, "bf16": 2.0**-133}
FILE_DTYPE = {"f32": "F32", "f16": "F16", "bf16": "BF16"}
EPSILON = {"f32": 2.0**-23, "f16": 2.0**-10, "bf16": 2.0**-7}


@dataclass
class Encoded:
    codes: np.ndarray  # integer formats: signed; table and affine formats: as stored
    scales: np.ndarray  # f32 values of the stored scales
    zeros: np.ndarray | None = None  # signed zero points
    biases: np.ndarray | None = None
    scale_codes: np.ndarray | None = None  # nvfp4, mxfp4: the bytes of the scales
    global_scale: np.float32 | None = None  # nvfp4


def stored(x, dtype):
    """x rounded to a scale dtype; a value that is not zero does not become zero."""
    rounded = st.to_f32(st.from_f32(x, FILE_DTYPE[dtype]))
    lost = (rounded == 0) & (x != 0)
    return np.where(lost, np.copysign(SMALLEST_SUBNORMAL[dtype], x), rounded).astype(np.float32)


def stored_scale(quotient, dtype, is_zero_group):
    """The stored scale of each group. The quotient itself may have underflowed."""
    floored = np.where(
        (quotient == 0) & ~is_zero_group,
        np.copysign(np.float32(SMALLEST_SUBNORMAL["f32"]), quotient),
        quotient,
    )
    return stored(floored, dtype)


class Groups:
    """Cuts a weight into rows and groups; the last group of a row may be short."""

    def __init__(self, weight, granularity, group_size=None):
        self.shape = weight.shape
        if granularity in ("tensor", "flat"):
            self.rows = weight.reshape(1, -1)
        else:
            self.rows = weight.reshape(-1, weight.shape[-1])
        cols = self.rows.shape[1]
        size = cols if granularity in ("tensor", "channel") else group_size
        self.starts = np.arange(0, cols, size)
        self.counts = np.minimum(size, cols - self.starts)
        self.min = np.minimum.reduceat(self.rows, self.starts, axis=1)
        self.max = np.maximum.reduceat(self.rows, self.starts, axis=1)
        self.absmax = np.maximum(-self.min, self.max)

    def spread(self, per_group):
        """One value per group, repeated over its elements."""
        return np.repeat(per_group, self.counts, axis=1)


def nearest(y, ascending, ties=None):
    """Index of the nearest entry; a tie goes to the lower one, or as ties[i] says for the midpoint
    of entries i and i + 1. Midpoints of f32 neighbours are exact in f64."""
    table = ascending.astype(np.float64)
    midpoints = (table[:-1] + table[1:]) / 2
    y = np.asarray(y, np.float64)
    index = np.searchsorted(midpoints, y, side="left")
    if ties is not None:
        at = np.minimum(index, len(midpoints) - 1)
        index = np.where(midpoints[at] == y, ties[at], index)
    return index


def holds(scales, dtype):
    """Whether a dtype can hold each of these f32 scales with 8 bits of precision."""
    magnitude = np.abs(scales[scales != 0])
    largest = {"f32": np.inf, "f16": 65504, "bf16": 2.0**128 - 2.0**120}[dtype]
    return np.all((magnitude >= 2**7 * SMALLEST_SUBNORMAL[dtype]) & (magnitude <= largest))


# Which of two values takes a number in their middle: the lower one, the one nearer to zero, that of even code.
TIES = {
    "nf4": "lower",
    "fp4": "toward-zero",
    "fp4_e2m1": "even",
    "lut4": "lower",
    "nvfp4": "even",
    "mxfp4": "even",
}


def table_codes(y, format, table=None):
    """Codes of the values y, in units of the scale."""
    values = table if format == "lut4" else BY_NAME[format]
    ascending, codes = np.unique(values, return_index=True)
    if TIES[format] == "lower":
        ties = np.arange(15)
    elif TIES[format] == "toward-zero":
        ties = np.where(ascending[1:] <= 0, np.arange(1, len(ascending)), np.arange(len(ascending) - 1))
    else:
        ties = np.where(codes[:-1] % 2 == 0, np.arange(len(codes) - 1), np.arange(1, len(codes)))
    result = codes[nearest(y, ascending, ties)]
    negative_zero = np.flatnonzero(values == 0)[-1:]  # a second code of 0 is for negative numbers
    if len(negative_zero):
        result = np.where((values[result] == 0) & (y < 0), negative_zero[0], result)
    return result.astype(np.uint8)


def integer_codes(quotient, zero_point, qmin, qmax):
    """Of the quotient x / scale: the rounding comes before the zero point."""
    return np.clip(np.rint(quotient) + zero_point, qmin, qmax).astype(np.int32)


def affine_codes(x, scale, bias, max_code):
    return np.clip(np.rint((x - bias) / scale), 0, max_code).astype(np.int32)


def _divide(x, scale):
    """x / scale; groups of scale zero are all zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(scale == 0, np.float32(0), x / scale)


def bits_of(format):
    return 4 if format in TIES else int(format[-1])


def integer_range(bits):
    return -(2 ** (bits - 1)), 2 ** (bits - 1) - 1


def encode_table(groups, format, scale_dtype, table):
    values = table if format == "lut4" else BY_NAME[format]
    largest = np.abs(values).max()
    scales = stored_scale(groups.absmax / largest, scale_dtype, groups.absmax == 0)
    y = _divide(groups.rows, groups.spread(scales))
    codes = table_codes(y, format, table)
    return Encoded(codes.reshape(groups.shape), scales)


# The values of E4M3 by code, without sign and NaN.
E4M3 = np.array(
    [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127],
    np.float32,
)
BLOCK_FLOATS = {"nvfp4": 16, "mxfp4": 32}  # elements of a group

# By all 256 codes.
E4M3_VALUES = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]]).astype(np.float32)


def e4m3_codes(y):
    """Nearest, ties to even codes, saturated; -0 and what rounds to it keep their sign."""
    y = np.asarray(y, np.float32)
    even = np.where(np.arange(126) % 2 == 0, np.arange(126), np.arange(1, 127))
    magnitudes = nearest(np.minimum(np.abs(y), 448), E4M3, even)
    return (magnitudes | np.signbit(y) * 0x80).astype(np.uint8)


def fp8_scales(absmax, scale_dtype, zero_group_scale):
    scales = stored_scale(absmax / np.float32(448), scale_dtype, absmax == 0)
    return np.where(absmax == 0, np.float32(zero_group_scale), scales)


def encode_fp8(groups, scale_dtype, zero_group_scale=0.0):
    scales = fp8_scales(groups.absmax, scale_dtype, 0)
    codes = e4m3_codes(_divide(groups.rows, groups.spread(scales)))
    codes = np.where(groups.spread(scales) == 0, 0, codes).astype(np.uint8)
    return Encoded(codes.reshape(groups.shape), np.where(scales == 0, np.float32(zero_group_scale), scales))


FP8_BLOCK = 128


def block_rows(per_block, rows, block=FP8_BLOCK):
    """What blocks of so many rows share, repeated for each row: [..., ceil(rows / block), n] to [..., rows, n]."""
    return np.repeat(per_block, block, axis=-2)[..., :rows, :]


def encode_fp8_blocks(weight, scale_dtype, zero_group_scale=0.0):
    """A scale for blocks of 128 x 128 of each matrix; those of Encoded are of every row."""
    rows, cols = weight.shape[-2:]
    groups = Groups(weight, "group", FP8_BLOCK)
    absmax = groups.absmax.reshape(*weight.shape[:-1], -1)
    absmax = np.maximum.reduceat(absmax, np.arange(0, rows, FP8_BLOCK), axis=-2)
    scales = block_rows(fp8_scales(absmax, scale_dtype, 0), rows).reshape(-1, absmax.shape[-1])
    codes = e4m3_codes(_divide(groups.rows, groups.spread(scales)))
    codes = np.where(groups.spread(scales) == 0, 0, codes).astype(np.uint8)
    return Encoded(codes.reshape(weight.shape), np.where(scales == 0, np.float32(zero_group_scale), scales))


def global_scale_of(absmax):
    """Of tensors with this largest magnitude."""
    if absmax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        return np.clip(np.float32(2688) / absmax, np.float32(2.0**-126), np.finfo(np.float32).max)


def encode_nvfp4(groups, absmax=None):
    """absmax: the largest magnitude of all tensors that share the global scale."""
    scale = global_scale_of(groups.absmax.max(initial=0) if absmax is None else np.float32(absmax))
    wanted = groups.absmax / np.float32(6) * scale
    ties = np.where(np.arange(126) % 2 == 0, np.arange(126), np.arange(1, 127))
    stored_codes = nearest(wanted, E4M3, ties)
    stored_codes = np.where(stored_codes == 0, np.where(groups.absmax == 0, 0x20, 1), stored_codes)
    scales = E4M3[stored_codes] / scale
    codes = table_codes(_divide(groups.rows, groups.spread(scales)), "nvfp4")
    return Encoded(
        codes.reshape(groups.shape), scales, scale_codes=stored_codes.astype(np.uint8), global_scale=scale
    )


def encode_mxfp4(groups):
    mantissa, exponent = np.frexp(groups.absmax.astype(np.float64) / 4)  # mantissa in [1/2, 1)
    exponent = np.where(groups.absmax == 0, -127, exponent - 1 + (mantissa >= 1.75 / 2))
    exponent = np.maximum(exponent, -127)
    scales = np.ldexp(np.float32(1), exponent)
    codes = table_codes(_divide(groups.rows, groups.spread(scales)), "mxfp4")
    return Encoded(codes.reshape(groups.shape), scales, scale_codes=(exponent + 127).astype(np.uint8))


def symmetric_scale(groups, bits, rule):
    qmin, qmax = integer_range(bits)
    if rule == "absmax":
        return groups.absmax / np.float32(qmax)
    if rule == "half-range":
        return groups.absmax / np.float32((qmax - qmin) / 2)
    assert rule == "signed-max", rule
    # Of two extremes of one magnitude the negative one: the scale is then positive.
    extreme = np.where(-groups.min >= groups.max, groups.min, groups.max)
    return extreme / np.float32(qmin)


def encode_symmetric(groups, bits, rule, scale_dtype, zero_group_scale):
    is_zero = groups.absmax == 0
    scales = stored_scale(symmetric_scale(groups, bits, rule), scale_dtype, is_zero)
    scales = np.where(is_zero, np.float32(zero_group_scale), scales)
    quotient = _divide(groups.rows, groups.spread(scales))
    codes = integer_codes(quotient, 0, *integer_range(bits))
    return Encoded(codes.reshape(groups.shape), scales)


def encode_asymmetric(groups, bits, scale_dtype, zero_group_scale):
    qmin, qmax = integer_range(bits)
    low, high = np.minimum(groups.min, 0), np.maximum(groups.max, 0)
    is_zero = groups.absmax == 0
    scales = stored_scale((high - low) / np.float32(2**bits - 1), scale_dtype, is_zero)
    scales = np.where(is_zero, np.float32(zero_group_scale), scales)
    zeros = np.clip(qmin - np.rint(_divide(low, scales)), qmin, qmax).astype(np.int32)
    quotient = _divide(groups.rows, groups.spread(scales))
    codes = integer_codes(quotient, groups.spread(zeros), qmin, qmax)
    return Encoded(codes.reshape(groups.shape), scales, zeros=zeros)


def affine_minmax(groups, bits):
    spread = groups.max - groups.min
    scales = spread / np.float32(2**bits - 1)
    constant = spread == 0
    tiny = (scales == 0) & ~constant
    scales = np.where(tiny, np.float32(SMALLEST_SUBNORMAL["f32"]), scales)
    return np.where(constant, np.float32(1), scales), groups.min


def affine_mlx_edge(groups, bits):
    """The rule of MLX: zero and the larger edge are exact; the scale is negative where the positive
    side dominates."""
    scales = np.maximum((groups.max - groups.min) / np.float32(2**bits - 1), np.float32(1e-7))
    low_dominates = np.abs(groups.min) > np.abs(groups.max)
    scales = np.where(low_dominates, scales, -scales)
    edge = np.where(low_dominates, groups.min, groups.max)
    steps = np.rint(edge / scales)
    moved = steps != 0
    scales = np.where(moved, edge / np.where(moved, steps, np.float32(1)), scales)
    return scales, np.where(moved, edge, np.float32(0))


def encode_affine(groups, bits, rule, scale_dtype, code_scale):
    scales, biases = (affine_minmax if rule == "minmax" else affine_mlx_edge)(groups, bits)
    assert scales.dtype == biases.dtype == np.float32
    stored_scales = stored(scales, scale_dtype)
    stored_biases = st.to_f32(st.from_f32(biases, FILE_DTYPE[scale_dtype]))
    if code_scale == "stored":
        scales, biases = stored_scales, stored_biases
    codes = affine_codes(groups.rows, groups.spread(scales), groups.spread(biases), 2**bits - 1)
    return Encoded(codes.reshape(groups.shape), stored_scales, biases=stored_biases)


def encode(
    weight,
    format,
    *,
    granularity="group",
    group_size=64,
    asymmetric=False,
    rule=None,
    scale_dtype="f32",
    code_scale="stored",
    zero_group_scale=0.0,
    table=None,
):
    """Encodes an f32 weight. zero_group_scale: the scale of an all-zero group (integer formats)."""
    assert weight.dtype == np.float32
    if format in BLOCK_FLOATS:
        groups = Groups(weight, "group", BLOCK_FLOATS[format])
        return encode_nvfp4(groups) if format == "nvfp4" else encode_mxfp4(groups)
    groups = Groups(weight, granularity, group_size)
    if format == "fp8":
        return encode_fp8(groups, scale_dtype, zero_group_scale)
    bits = bits_of(format)
    if format.startswith("affine"):
        return encode_affine(groups, bits, rule or "minmax", scale_dtype, code_scale)
    if not format.startswith("int"):
        return encode_table(groups, format, scale_dtype, table)
    if asymmetric:
        assert rule in (None, "minmax")
        return encode_asymmetric(groups, bits, scale_dtype, zero_group_scale)
    return encode_symmetric(groups, bits, rule or "absmax", scale_dtype, zero_group_scale)


def fixed_order_mean(values):
    """Blocks of 4096: 32 strided partial sums in f64, halved as a tree; blocks in order."""
    total = np.float64(0)
    for begin in range(0, len(values), 4096):
        block = values[begin : begin + 4096].astype(np.float64)
        block = np.concatenate([block, np.zeros(-len(block) % 32)]).reshape(-1, 32)
        partial = np.zeros(32)
        for row in block:
            partial = partial + row
        while len(partial) > 1:
            half = len(partial) // 2
            partial = partial[:half] + partial[half:]
        total += partial[0]
    return np.float32(total / len(values))


def double_quantize(scales, offset=None):
    """Returns (codes u8 [n], absmax f32 [blocks], offset f32) of the flat f32 scales."""
    scales = scales.reshape(-1)
    offset = fixed_order_mean(scales) if offset is None else np.float32(offset)
    blocks = Groups(scales - offset, "flat", DOUBLE_QUANT_BLOCK)
    y = _divide(blocks.rows, blocks.spread(blocks.absmax))
    return nearest(y, DOUBLE_QUANT_MAP).astype(np.uint8)[0], blocks.absmax[0], offset
