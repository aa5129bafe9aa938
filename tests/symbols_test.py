"""What the shared library exports is what its public headers declare."""

import os
import re
import subprocess
from pathlib import Path

import pytest

INCLUDE = Path(__file__).resolve().parent.parent / "include/halfbyte"
LIBRARY = os.environ.get("HALFBYTE_LIBRARY", "")

pytestmark = pytest.mark.skipif(not LIBRARY.endswith(".so"), reason="the library is not a shared one")


def exported(*options):
    """The names of the symbols that are defined for others."""
    text = subprocess.run(
        ["nm", "-D", "--defined-only", "-P", *options, LIBRARY], capture_output=True, text=True, check=True
    ).stdout
    return {re.split(r" [A-Za-z] (?=[0-9a-f])", line)[0] for line in text.splitlines()}


def test_the_soname_changes_with_the_minor_version():
    text = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    version = re.search(r"VERSION (\d+\.\d+)\.\d+", (INCLUDE.parent.parent / "CMakeLists.txt").read_text())[1]
    assert re.search(r"SONAME.*\[(.*)\]", text)[1] == f"libhalfbyte.so.{version}"


def test_nothing_internal_is_exported():
    for name in exported("-C"):
        assert re.match(r"(halfbyte_|((typeinfo( name)?|vtable) for )?halfbyte::)", name), f"{name} is not ours"
        inner = re.match(r"halfbyte::(\w+)::", name)
        assert not (inner and inner[1].islower()), f"{name} is of an inner namespace"
        assert "::Impl" not in name, name


def test_nothing_ends_with_the_process():
    """An object that exit() destroys may be in use by another thread at that moment: `static auto& x = *new X`."""
    text = subprocess.run(["nm", "-D", "--undefined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
    assert "__cxa_finalize" in text
    assert "__cxa_atexit" not in text


def declared_in_c():
    text = (INCLUDE / "halfbyte.h").read_text()
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return set(re.findall(r"HALFBYTE_API[\w\s*]*?\b(halfbyte_\w+)\(", text))


def test_the_c_functions_are_those_of_the_header():
    assert {name for name in exported() if name.startswith("halfbyte_")} == declared_in_c()


def test_every_c_function_is_tested():
    # INITIALISED(x) calls halfbyte_x_init.
    text = (Path(__file__).parent / "capi_test.cc").read_text()
    names = set(re.findall(r"\bhalfbyte_\w+", text))
    names |= {f"halfbyte_{name}_init" for name in re.findall(r"\bINITIALISED\((\w+)\)", text)}
    assert declared_in_c() - names == set()


def test_every_cpp_function_of_the_headers_is_marked():
    """One that is not could be called within the library only."""
    function = re.compile(r"^(?!HALFBYTE_API|inline|constexpr|using|struct|class|enum|template|extern|namespace|#|//|\s)[\w:<>,&* ]+\(")
    for header in sorted(INCLUDE.glob("*.hpp")):
        before = ""
        for line in header.read_text().splitlines():
            is_template = before.startswith("template")  # whose definition the header has
            assert is_template or not function.match(line), f"{header.name}: {line}"
            before = line
