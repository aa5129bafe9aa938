"""How values of _core are pickled: by their fields."""

from . import _core


def rebuild(name: str, fields: dict) -> object:
    return getattr(_core, name)(**fields)
