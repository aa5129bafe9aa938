"""The package: what it has, what importing it takes, the tool that it brings, the lines of README.md."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import halfbyte
import pytest
from halfbyte import _core

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = Path(_core.__file__).parent
VERSION = re.search(r"^project\(halfbyte VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text(), re.MULTILINE)[1]


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, **options)


def installed():
    """The distribution that the package is of; None if it is one of a build directory."""
    for found in importlib.metadata.distributions(name="halfbyte"):
        if Path(found.locate_file("halfbyte")).resolve() == PACKAGE.resolve():
            return found
    return None


def test_one_version():
    assert halfbyte.__version__ == halfbyte.system_info().version == VERSION
    if found := installed():
        assert found.version == VERSION
        assert found.metadata["Requires-Python"] == ">=3.10"
        assert [word for word in found.requires if "extra" not in word] == ["numpy"]


def test_typed():
    assert (PACKAGE / "py.typed").is_file()
    stubs = ast.parse((PACKAGE / "_core.pyi").read_text())
    stubbed = {node.name for node in stubs.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    public = {name for name, value in vars(_core).items() if not name.startswith("_") and callable(value)}
    assert public and public == stubbed


def test_only_what_runs():
    if not installed():
        pytest.skip("the package of a build directory")
    files = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*") if path.is_file()}
    files = {name for name in files if not name.endswith((".py", ".pyc"))}
    libraries = {name for name in files if name.startswith("lib/")}
    assert files - libraries == {"bin/halfbyte", "py.typed", "_core.pyi", Path(_core.__file__).name}
    version = VERSION.rpartition(".")[0]
    assert f"lib/libhalfbyte.so.{version}" in libraries
    stems = {name.partition(".so")[0] for name in libraries}
    assert len(stems) == len(libraries), libraries  # no library twice, under two names


def test_import():
    code = "import sys, numpy, time; start = time.perf_counter(); import halfbyte; print(time.perf_counter() - start, *sys.modules)"
    times = []
    for _ in range(5):
        took, *modules = python("-c", code, check=True).stdout.split()
        assert not {"torch", "ml_dtypes", "pandas", "matplotlib", "tqdm"} & set(modules)
        times.append(float(took))
    assert min(times) < 0.1  # scripts/wheel.sh measures


def test_tool():
    result = python("-m", "halfbyte", "--version")
    assert (result.returncode, result.stdout.strip()) == (0, f"halfbyte {VERSION}")
    result = python("-m", "halfbyte", "inspect", "/nonexistent")
    assert result.returncode == 6 and 'cannot open "/nonexistent"' in result.stderr


def test_console_script():
    found = installed()
    if not found:
        pytest.skip("the package of a build directory")
    (script,) = (entry for entry in found.entry_points if entry.group == "console_scripts")
    assert script.name == "halfbyte"
    script = Path(sys.executable).parent / "halfbyte"
    result = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.strip()) == (0, f"halfbyte {VERSION}")


def test_nvrtc_of_the_interpreter(tmp_path):
    """That of the wheels beside the packages of this interpreter goes before what the machine has."""
    stub = Path(os.environ.get("HALFBYTE_STUBS", "/nonexistent")) / "libstub_nvrtc.so"
    if not stub.exists():
        pytest.skip("no stand-in for NVRTC: HALFBYTE_STUBS")
    library = tmp_path / "nvidia/cu13/lib/libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    shutil.copy(stub, library)
    environment = {name: value for name, value in os.environ.items() if name != "HALFBYTE_NVRTC"}
    environment["HALFBYTE_CUDA_DRIVER"] = "/nonexistent"
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import halfbyte; print(halfbyte.cuda_info().nvrtc_path)"
    assert python("-c", code, check=True, env=environment).stdout.strip() == str(library)


def test_readme():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        if "import torch" in block and importlib.util.find_spec("torch") is None:
            continue
        result = python("-c", block)
        assert result.returncode == 0, result.stderr
