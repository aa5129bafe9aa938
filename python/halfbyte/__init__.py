"""Low-bit weights: quantize, train and multiply weights of 2 to 8 bits on CPU and CUDA."""

from ._core import *  # noqa: F403
from ._core import __version__
from ._errors import Error, NoMemoryError, UsageError
from ._functions import (
    AffineCodes,
    FakeQuantized,
    Observed,
    Routing,
    affine_init,
    affine_qdq,
    affine_qdq_backward,
    dequantize_linear,
    fake_quantize,
    fake_quantize_backward,
    fake_quantize_learned_backward,
    observe,
    qgemm,
    qgemm_grouped,
    quantize_linear,
    quantize_linear_backward,
    route,
)
from ._report import Report, report
from ._values import Conversion, FormatInfo, LinearCodes, QgemmChoice, QParams, QuantizationError, ValueRange
