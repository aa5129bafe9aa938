"""The examples in the docstrings of the package run and print what they say."""

import doctest
import inspect
import pkgutil
from pathlib import Path

import halfbyte
import numpy as np
import pytest

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny-llama"
PARSER = doctest.DocTestParser()


def documented():
    """Name and docstring of whatever the package and its modules without PyTorch export."""
    seen = {}
    modules = [halfbyte, *(getattr(halfbyte, info.name) for info in pkgutil.iter_modules(halfbyte.__path__) if hasattr(halfbyte, info.name))]
    for module in modules:
        for name, item in vars(module).items():
            if not str(getattr(item, "__module__", "")).startswith("halfbyte"):
                continue
            seen.setdefault(id(item), (name, item))
            if inspect.isclass(item):
                for member, value in vars(item).items():
                    if not member.startswith("_"):
                        seen.setdefault(id(value), (f"{name}.{member}", getattr(item, member)))
    for name, item in seen.values():
        text = inspect.getdoc(item) or ""
        if ">>>" in text:
            yield pytest.param(text, id=name)


@pytest.mark.parametrize("text", sorted(documented(), key=lambda each: each.id))
def test_docstring(text, tmp_path):
    names = {"halfbyte": halfbyte, "np": np, "model": MODEL, "output": tmp_path / "output", "second": tmp_path / "second"}
    problems = []
    example = PARSER.get_doctest(text, names, "docstring", None, None)
    doctest.DocTestRunner().run(example, out=problems.append)
    assert not problems, "".join(problems)


PUBLIC = [name for name in dir(halfbyte) if not name.startswith("_") and not inspect.ismodule(getattr(halfbyte, name))]


@pytest.mark.parametrize("name", PUBLIC)
def test_is_documented(name):
    item = getattr(halfbyte, name)
    assert inspect.getdoc(item), name
    made = inspect.isclass(item) and name.endswith(("Plan", "Plans", "Descriptor", "Config", "Step", "Encoding", "QuantSpec", "QuantizedTensor", "PackedTensor", "Writer", "Checkpoint"))
    if made or inspect.isfunction(item) or type(item).__name__ == "nb_func":
        assert ">>>" in inspect.getdoc(item), f"{name} has no example"
