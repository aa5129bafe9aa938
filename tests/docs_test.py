"""What the pages say compiles, runs and exists: every block of C++, C and Python of README.md and docs/, the commands of the
tool in README.md and what they print, the programs and tests that docs/migrating.md names, the tests of the catalogues in
docs/reliability.md and docs/security.md.

A block is part of a program. What it uses and does not declare, a comment in front of it declares, which readers do not
see: <!-- compile: DECLARATIONS -->. `...` stands for code that is left out. The blocks of Python of a page are one program;
they run where the package is built.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from campaign.base import SECTIONS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- compile:\n?(?P<before>.*?)-->\n+)?^```(?P<language>cpp|c)\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
FLAGS = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{ROOT / 'include'}", *(f"-I{path}" for path in os.environ.get("HALFBYTE_INCLUDE", "").split(":") if path)]


def blocks():
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            yield pytest.param(match, id=f"{page.name}:{line}")


def program(match):
    """The block as the body of a function, after its includes and declarations."""
    lines = match["code"].replace("for (...)", "for (;;)").replace(" ...", " {}").splitlines()
    is_head = [line.startswith(("#include", "using namespace")) for line in lines]
    head = [line for line, first in zip(lines, is_head) if first]
    body = [line for line, first in zip(lines, is_head) if not first]
    return "\n".join([*head, match["before"] or "", "void block();", "void block() {", *body, "}", ""])


@pytest.mark.parametrize("match", list(blocks()))
def test_blocks_compile(match, tmp_path):
    is_cpp = match["language"] == "cpp"
    source = tmp_path / ("block.cc" if is_cpp else "block.c")
    source.write_text(program(match))
    compiler = [os.environ.get("CXX", "c++"), "-std=c++20"] if is_cpp else [os.environ.get("CC", "cc"), "-std=c99", "-pedantic"]
    result = subprocess.run([*compiler, *FLAGS, str(source)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr + source.read_text()


def test_the_tables_of_costs():
    tables = subprocess.run([sys.executable, str(ROOT / "tools" / "cost.py")], capture_output=True, text=True, check=True).stdout
    assert all(table in (ROOT / "docs" / "scale.md").read_text() for table in tables.split("\n\n"))


PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("halfbyte") is None, reason="the Python package is not built")
@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON.search(page.read_text())], ids=lambda page: page.name)
def test_blocks_run(page, tmp_path):
    program = "\n".join(PYTHON.findall(page.read_text()))
    for package in ("torch", "transformers", "peft"):
        if re.search(rf"^\s*(import|from) {package}|halfbyte\.{package}", program, re.MULTILINE):
            pytest.importorskip(package)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    # peft 0.21 asks transformers 5 for what is deprecated there.
    strict = ["-W", "error", "-W", "ignore::FutureWarning:transformers.modeling_utils"]
    result = subprocess.run([sys.executable, *strict, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


# What the tool prints, with "..." for lines that are left out.
SESSION = re.compile(r"^```console\n\$ (?P<command>halfbyte .*)\n(?P<output>(?:.*\n)*?)^```", re.MULTILINE)
COMMANDS = re.compile(r"^```sh\n((?:.*\n)*?)^```", re.MULTILINE)


def run_in_readme(command, cli, directory):
    environment = os.environ | {"PATH": f"{cli.parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, shell=True, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def test_readme_says_what_the_tool_prints(cli, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (session,) = SESSION.finditer((ROOT / "README.md").read_text())
    printed = iter(run_in_readme(session["command"], cli, tmp_path).splitlines())
    for line in session["output"].splitlines():
        assert line == "..." or line in printed, line  # in this order


def test_readme_commands_work_as_typed(cli, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    lines = "".join(COMMANDS.findall((ROOT / "README.md").read_text())).splitlines()
    # `bench` takes many seconds; cli_test.py runs it.
    commands = [line for line in lines if line.startswith("halfbyte ") and not line.startswith("halfbyte bench ")]
    assert len(commands) >= 8
    for command in commands:
        run_in_readme(command, cli, tmp_path)


def test_migrating_names_what_there_is():
    page = (ROOT / "docs" / "migrating.md").read_text()
    source = (ROOT / "tests" / "migrating_test.cc").read_text()
    tests = {".".join(match) for match in re.findall(r"^TEST\((\w+), (\w+)\)", source, re.MULTILINE)}
    named = set(re.findall(r"`(Migrating\w\.\w+)`", page))
    assert named and named <= tests, named - tests
    for link in re.findall(r"\]\(\.\./([^)#]+)\)", page):
        assert (ROOT / link).exists(), link


def known_tests():
    """As the catalogues name them."""
    known = {f"campaign `{section}`" for section in SECTIONS}
    script = (ROOT / "scripts" / "gpu_check.sh").read_text()
    known |= {f"gpu_check `{section}`" for section in re.findall(r"^section_(\w+)\(\)", script, re.MULTILINE)}
    for source in [*(ROOT / "src").rglob("*_test.cc"), *(ROOT / "tests").glob("*_test.cc")]:
        found = re.findall(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", source.read_text(), re.MULTILINE)
        known |= {f"`{suite}.{test}`" for suite, test in found}
    for source in (ROOT / "tests").rglob("*_test.py"):
        name = source.relative_to(ROOT / "tests")
        known.add(f"`{name}`")
        known |= {f"`{name}::{test}`" for test in re.findall(r"^def (test_\w+)", source.read_text(), re.MULTILINE)}
    return known


def rows_with_tests(page):
    """Of the tables whose last column is "test": their cells."""
    inside = False
    for line in (ROOT / "docs" / page).read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells:
            inside = False
        elif cells[-1] == "test":
            inside = True
        elif inside and set(cells[-1]) != {"-"}:
            yield cells


@pytest.mark.parametrize("page", ["reliability.md", "security.md"])
def test_every_row_has_a_test_that_exists(page):
    known, rows = known_tests(), list(rows_with_tests(page))
    assert rows
    for cells in rows:
        named = re.split(r",\s*", cells[-1]) if cells[-1] else []
        assert named or cells[-2].startswith("does not apply: "), f"{cells[0]} names no test"
        assert set(named) <= known, f"{cells[0]} names {set(named) - known}"


def test_the_catalogue_is_whole():
    ids = [cells[0] for cells in rows_with_tests("reliability.md")]
    last = {"F": 20, "O": 12, "C": 10, "P": 11, "V": 11}
    assert ids == [f"{letter}{number}" for letter, count in last.items() for number in range(1, count + 1)]
