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
