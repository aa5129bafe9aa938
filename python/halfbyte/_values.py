"""Small values that _core gives, and how its classes are pickled: by their fields."""

import math
from typing import NamedTuple

from . import _core


class QuantizationError(NamedTuple):
    """The error of a quantized weight against the dense one."""

    max_error: float
    """Largest |y - x|."""
    max_error_index: int
    relative_rmse: float
    """sqrt(sum (y - x)^2 / sum x^2); 0 where both are 0."""
    snr_db: float
    """-20 log10(relative_rmse); inf where exact."""


def relative_error(noise: float, signal: float) -> tuple[float, float]:
    """relative_rmse and snr_db of the sums of (y - x)^2 and of x^2."""
    relative = math.sqrt(noise / signal) if signal > 0 else math.inf if noise > 0 else 0.0
    return relative, -20 * math.log10(relative) if 0 < relative < math.inf else math.inf if relative == 0 else -math.inf


class LinearCodes(NamedTuple):
    """Tensors for integer plans, and the descriptor that they fit."""

    descriptor: _core.LinearDescriptor
    codes: object
    scale: object
    zero_point: object


class Conversion(NamedTuple):
    """A weight that was made of other codes, and what that lost."""

    weight: "_core.QuantizedTensor"
    max_error: float
    max_error_index: int


class QParams(NamedTuple):
    """Scale and zero point of integer codes."""

    scale: float
    zero_point: int


class ValueRange(NamedTuple):
    """The smallest and largest finite value, and the others."""

    min: float
    max: float
    num_nonfinite: int
    first_nonfinite: int
    """Row-major index; -1: there is none."""


class QgemmChoice(NamedTuple):
    """An implementation of a product, and why it refuses."""

    variant: str
    reason: str
    packs: bool
    """It takes a view by packing it first, in each run."""


class FormatInfo(NamedTuple):
    """A format."""

    name: str
    kind: str
    """table, integer or affine."""
    bits: int
    default_rule: str


def rebuild(name: str, fields: dict) -> object:
    return getattr(_core, name)(**fields)


def rebuild_quantized(spec: object, shape: tuple, dtype: str, parts: dict) -> object:
    return _core.QuantizedTensor(spec, shape, dtype, **parts)


def rebuild_packed(spec: object, rows: int, cols: int, data: object) -> object:
    return _core.PackedTensor.copy_of(spec, rows, cols, data)


def rebuild_experts(spec: object, rows: int, cols: int, data: object) -> object:
    return _core.PackedExperts.copy_of(spec, rows, cols, data)
