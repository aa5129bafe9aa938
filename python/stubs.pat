# What nanobind's stubs leave out: names with underscores, and what signatures that are given as text name.
_core.__prefix__:
    from collections.abc import Callable, Sequence

    from ._values import Conversion, FormatInfo, LinearCodes, QgemmChoice, QParams, QuantizationError, ValueRange

    __version__: str

