"""The examples in the docstrings of the package run and print what they say."""

import ast
import builtins
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


def test_signatures_name_what_there_is():
    """Those of the module are texts, which nothing compiles."""
    stubs = ast.parse((Path(halfbyte._core.__file__).parent / "_core.pyi").read_text())
    known = set(dir(builtins))
    for node in stubs.body:
        known |= {each.asname or each.name for each in getattr(node, "names", ())}
        known |= {getattr(node, "name", "")}
    functions = [node for node in ast.walk(stubs) if isinstance(node, ast.FunctionDef)]
    parts = [part for node in functions for part in (*(each.annotation for each in ast.walk(node.args) if isinstance(each, ast.arg)), node.returns)]
    used = {each.id for part in parts if part is not None for each in ast.walk(part) if isinstance(each, ast.Name)}
    assert used <= known, used - known
