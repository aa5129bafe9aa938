"""The bytes that every op gives for a thousand random problems are those of golden/op_hashes.txt: on every machine, with any
number of threads. Of products those of qgemm_ref, the only ones that do not depend on the machine.

CONTRIBUTING.md says how to make the file again, and when.
"""

import os
import subprocess
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = (ROOT / "tests" / "golden" / "op_hashes.txt").read_text().splitlines()
ARGUMENTS = ["--count", "80", "--variant", "qgemm_ref"]


@pytest.mark.parametrize("threads", ["1", "3"])
def test_no_byte_changed(threads):
    program = os.environ.get("HALFBYTE_OP_HASHES", ROOT / "build" / "release" / "halfbyte_op_hashes")
    command = [str(program), *ARGUMENTS, "--threads", threads]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    pairs = zip_longest(GOLDEN, result.stdout.splitlines(), fillvalue="nothing")
    different = [f"expected {old}\n     got {new}" for old, new in pairs if old != new]
    if different:
        pytest.fail(f"{len(different)} lines differ:\n" + "\n".join(different[:10]), pytrace=False)
