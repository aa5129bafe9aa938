"""The exceptions of halfbyte."""


class Error(RuntimeError):
    """What the library reports.

    code: "USAGE", "BAD_INPUT", "VERIFY", "DEVICE", "IO", "NO_MEMORY", "EXISTS", "CORRUPT", "CANCELLED" or "BUG".
    kind: finer than the code: "general", "invalid-argument", "invalid-problem", "unsupported", "misaligned",
    "buffer-too-small", "workspace-too-small", "compilation-failed" or "launch-failed".
    argument, expected, actual: what was wrong, where that is known, else "".
    """

    code = "BUG"
    kind = "general"
    argument = expected = actual = ""


class UsageError(Error, ValueError):
    """Wrong arguments; a ValueError."""


class NoMemoryError(Error, MemoryError):
    """Host memory does not suffice; a MemoryError."""


_CODES = {
    1: ("BUG", Error),
    2: ("USAGE", UsageError),
    3: ("BAD_INPUT", Error),
    4: ("VERIFY", Error),
    5: ("DEVICE", Error),
    6: ("IO", Error),
    7: ("NO_MEMORY", NoMemoryError),
    8: ("EXISTS", Error),
    9: ("CORRUPT", Error),
    130: ("CANCELLED", Error),
}


def make_error(message: str, code: int, kind: str, argument: str, expected: str, actual: str) -> Error:
    name, of = _CODES[code]
    error = of(message)
    error.code, error.kind = name, kind
    error.argument, error.expected, error.actual = argument, expected, actual
    return error
