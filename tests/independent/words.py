"""The words of GPTQ and AWQ, packed and unpacked, and whole weights in these layouts.

A weight [out, in] has codes [out, in] and per group of inputs zero points and scales [out, groups]; its tensors are
transposed. Arrays of words are I32.
"""

import numpy as np

from . import safetensors_io as st

# Columns of a word of AWQ, from the lowest nibble on.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def _bits_of(codes, bits):
    """[n, m] -> [n * bits, m] of 0 and 1: the bits of each code, the lowest first."""
    planes = codes.astype(np.int64)[:, None] >> np.arange(bits)[None, :, None] & 1
    return planes.reshape(-1, codes.shape[1])


def _words_of(planes):
    """[32 n, m] of 0 and 1 -> [n, m] words."""
    planes = planes.reshape(-1, 32, planes.shape[1]).astype(np.uint64)
    return (planes << np.arange(32, dtype=np.uint64)[None, :, None]).sum(axis=1).astype(np.uint32).view(np.int32)


def plane_widths(bits):
    return [width for width in (8, 4, 2, 1) if bits & width]


def pack(codes, bits, planar=False):
    """Codes [n, m] -> words [n * bits / 32, m], along the first axis."""
    if not planar:
        return _words_of(_bits_of(codes, bits))
    words = []
    for first in range(0, len(codes), 32):
        unit, low = codes[first : first + 32].astype(np.int64), 0
        for width in plane_widths(bits):
            words.append(_words_of(_bits_of(unit >> low & (1 << width) - 1, width)))
            low += width
    return np.concatenate(words)


def unpack(words, bits, planar=False):
    """The reverse."""
    planes = words.view(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32)[None, :, None] & 1
    planes = planes.astype(np.int64).reshape(-1, words.shape[1])

    def codes_of(planes, width):
        return (planes.reshape(-1, width, words.shape[1]) << np.arange(width)[None, :, None]).sum(axis=1)

    if not planar:
        return codes_of(planes, bits)
    codes = []
    for first in range(0, len(planes), 32 * bits):
        unit, low = np.zeros((32, words.shape[1]), np.int64), 0
        for width in plane_widths(bits):
            begin = first + 32 * low
            unit += codes_of(planes[begin : begin + 32 * width], width) << low
            low += width
        codes.append(unit)
    return np.concatenate(codes)


def pack_awq(codes):
    """Codes [n, m] of 4 bits -> words [n, m / 8], along the last axis."""
    ordered = codes.reshape(len(codes), -1, 8)[:, :, AWQ_ORDER].reshape(len(codes), -1)
    return np.ascontiguousarray(pack(ordered.T, 4).T)


def unpack_awq(words):
    ordered = unpack(np.ascontiguousarray(words.T), 4).T.reshape(len(words), -1, 8)
    codes = np.empty_like(ordered)
    codes[:, :, AWQ_ORDER] = ordered
    return codes.reshape(len(words), -1)


def gptq_tensors(module, codes, scales, zeros, bits, groups, version=1, planar=False, index=True, dtype="F16"):
    """`zeros` as they are; `groups` [in]: the group of each column. A zero point of 0 is all ones in version 1."""
    stored = (zeros - (1 if version == 1 else 0)) & (1 << bits) - 1
    tensors = {
        f"{module}.qweight": st.Tensor("I32", pack(codes.T, bits, planar)),
        f"{module}.qzeros": st.Tensor("I32", np.ascontiguousarray(pack(stored, bits, planar).T)),
        f"{module}.scales": st.from_f32(np.ascontiguousarray(scales.T), dtype),
    }
    if index:
        tensors[f"{module}.g_idx"] = st.Tensor("I32", np.asarray(groups, np.int32))
    return tensors


def awq_tensors(module, codes, scales, zeros=None, dtype="F16"):
    tensors = {
        f"{module}.qweight": st.Tensor("I32", pack_awq(codes.T)),
        f"{module}.scales": st.from_f32(np.ascontiguousarray(scales.T), dtype),
    }
    if zeros is not None:
        tensors[f"{module}.qzeros"] = st.Tensor("I32", pack_awq(zeros.T))
    return tensors


def values(codes, scales, zeros, groups):
    """What the weight is, in f32."""
    return (codes - zeros[:, groups]).astype(np.float32) * scales.astype(np.float32)[:, groups]
