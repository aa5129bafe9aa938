"""Small values that _core gives, and how its classes are pickled: by their fields."""

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


def rebuild(name: str, fields: dict) -> object:
    return getattr(_core, name)(**fields)


def rebuild_quantized(spec: object, shape: tuple, dtype: str, parts: dict) -> object:
    return _core.QuantizedTensor(spec, shape, dtype, **parts)


def rebuild_packed(spec: object, rows: int, cols: int, data: object) -> object:
    return _core.PackedTensor.copy_of(spec, rows, cols, data)
