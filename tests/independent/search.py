"""Searched scales: of sixteen candidates of each group the one with the least squared error, by docs/numerics.md.

Everything is f32, and of groups of at most 512 elements, whose scales are far from the bounds of their dtype.
"""

import numpy as np

from . import encode as enc
from . import safetensors_io as st
from .tables import BY_NAME

F32 = np.float32
EVEN_FACTORS = {"nf4": (0.8, 1.15), "int4": (0.7, 1.05), "nvfp4": (0.85, 1.75)}
END_STEPS = {"affine4": 0.02, "int4": 0.02}


def factors_and_shifts(format, two_ends):
    """Of the scale of the rule, and of its range, by candidate."""
    i = np.arange(16)
    if two_ends:
        step = F32(END_STEPS[format])
        return F32(1) - step * (i // 4 + i % 4).astype(F32), step * (i // 4).astype(F32)
    least, most = map(F32, EVEN_FACTORS[format])
    factors = most - (most - least) / F32(14) * (i - 1).astype(F32)
    return np.where(i == 0, F32(1), factors), np.zeros(16, F32)


def sum_of_group(terms):
    """Of each row: eight neighbours pairwise, then one eight after the other."""
    rows = len(terms)
    chunks = np.concatenate([terms, np.zeros((rows, -terms.shape[1] % 8), F32)], axis=1).reshape(rows, -1, 8)
    while chunks.shape[2] > 1:
        chunks = chunks[:, :, 0::2] + chunks[:, :, 1::2]
    total = np.zeros(rows, F32)
    for chunk in range(chunks.shape[1]):
        total = total + chunks[:, chunk, 0]
    return total


def search(weight, format, *, group_size, rule, scale_dtype="f16", importance=None):
    """The Encoded of a weight [rows, cols] of whole groups. importance: [cols]."""
    assert weight.dtype == F32 and weight.shape[1] % group_size == 0 and group_size <= 512
    groups = enc.Groups(weight.reshape(-1, group_size), "channel")
    x, low, high = groups.rows, groups.min[:, 0], groups.max[:, 0]
    absmax = groups.absmax[:, 0]
    bits = enc.bits_of(format)
    qmin, qmax = enc.integer_range(bits)
    levels = F32(2**bits - 1)
    affine, asymmetric = format.startswith("affine"), rule == "minmax" and format.startswith("int")
    global_scale = enc.global_scale_of(absmax.max()) if format == "nvfp4" else None

    def stored(scale):
        if global_scale is None:
            return st.to_f32(st.from_f32(scale, enc.FILE_DTYPE[scale_dtype]))
        ties = np.where(np.arange(126) % 2 == 0, np.arange(126), np.arange(1, 127))
        codes = enc.nearest(scale * global_scale, enc.E4M3, ties)
        return np.where(scale * global_scale > 464, F32(np.nan), enc.E4M3[codes] / global_scale)

    bias = np.zeros_like(absmax)
    if affine:
        scale, bias = (column[:, 0] for column in enc.affine_minmax(groups, bits))
    elif asymmetric:
        bottom = np.minimum(low, F32(0))
        scale = (np.maximum(high, F32(0)) - bottom) / levels
    elif format.startswith("int"):
        scale = enc.symmetric_scale(groups, bits, rule)[:, 0]
    else:
        scale = absmax / np.abs(BY_NAME[format]).max()

    unit = np.ldexp(F32(1), 1 - np.frexp(absmax)[1])  # the largest magnitude is in [1, 2)
    w = np.ones_like(x)
    if importance is not None:
        w = np.broadcast_to(importance, weight.shape).reshape(x.shape)
    best = None
    for factor, shift in zip(*factors_and_shifts(format, affine or asymmetric)):
        scales, moved = stored(scale * factor), scale * (levels * shift)
        biases, zeros = np.zeros_like(scales), np.zeros(len(scales), np.int32)
        if affine:
            biases = st.to_f32(st.from_f32(bias + moved, enc.FILE_DTYPE[scale_dtype]))
        if asymmetric:
            ends = np.maximum(-levels, np.minimum(F32(0), bottom + moved) / scales)
            zeros = qmin - np.rint(ends).astype(np.int32)
        s, b = scales * unit, biases * unit
        y = (x * unit[:, None] - b[:, None]) * (F32(1) / s)[:, None]
        if affine:
            value = np.rint(np.clip(y, F32(0), levels))
        elif format.startswith("int"):
            value = np.rint(np.clip(y, (qmin - zeros)[:, None].astype(F32), (qmax - zeros)[:, None].astype(F32)))
        else:
            value = BY_NAME[format][enc.table_codes(y, format)]
        assert y.dtype == value.dtype == F32
        errors = s * s * sum_of_group(w * ((y - value) * (y - value)))
        errors = np.where(np.isnan(errors), np.inf, errors)
        found = (errors, scales, biases, zeros)
        if best is None:
            best = found
        else:
            better = errors < best[0]
            best = tuple(np.where(better, new, old) for new, old in zip(found, best))
    _, scales, biases, zeros = best

    by_row = (len(weight), -1)
    if affine:
        codes = enc.affine_codes(x, scales[:, None], biases[:, None], int(levels))
    elif format.startswith("int"):
        codes = enc.integer_codes(x / scales[:, None], zeros[:, None], qmin, qmax)
    else:
        codes = enc.table_codes(x / scales[:, None], format)
    return enc.Encoded(
        codes.reshape(weight.shape),
        scales.reshape(by_row),
        zeros=zeros.reshape(by_row) if asymmetric else None,
        biases=biases.reshape(by_row) if affine else None,
        global_scale=global_scale,
    )
