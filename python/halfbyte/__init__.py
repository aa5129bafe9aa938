"""Low-bit weights: quantize, train and multiply weights of 2 to 8 bits on CPU and CUDA."""

from ._core import *  # noqa: F403
from ._core import __version__
from ._errors import Error, NoMemoryError, UsageError
