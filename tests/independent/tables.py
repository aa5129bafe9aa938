"""The code books."""

import numpy as np

NF4 = np.array(
    [
        -1, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1,
    ],
    np.float32,
)  # fmt: skip

# By code; bit 3 is the sign. Code 8 decodes to +0.
_FP4_TWELFTHS = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3])
FP4_MAGNITUDES = (_FP4_TWELFTHS / 12).astype(np.float32)
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _signed(magnitudes):
    return np.concatenate([magnitudes, 0 - magnitudes])


FP4 = _signed(FP4_MAGNITUDES)
FP4_E2M1 = _signed(E2M1_MAGNITUDES)

BY_NAME = {"nf4": NF4, "fp4": FP4, "fp4_e2m1": FP4_E2M1, "nvfp4": FP4_E2M1, "mxfp4": FP4_E2M1}


def _linspace(num):
    """num points of [0.1, 1] as an f32 FMA computes them: from the start for the first half, from
    the end for the second. The f64 sums are exact enough to round once."""
    start, end = np.float32(0.1), np.float32(1)
    step = (end - start) / np.float32(num - 1)
    i = np.arange(num)
    from_start = np.float64(start) + np.float64(step) * i
    from_end = np.float64(end) - np.float64(step) * (num - 1 - i)
    return np.where(i < num // 2, from_start, from_end).astype(np.float32)


def _double_quant_map():
    """The signed dynamic 8-bit map: seven decades, each twice as finely divided as the one below."""
    entries = [np.array([0, 1], np.float32)]
    for decade in range(7):
        bounds = _linspace(2**decade + 1)
        means = (bounds[:-1] + bounds[1:]) / np.float32(2)
        values = means * np.float32(10.0 ** (decade - 6))
        entries += [values, -values]
    return np.sort(np.concatenate(entries))


DOUBLE_QUANT_MAP = _double_quant_map()
DOUBLE_QUANT_BLOCK = 256
