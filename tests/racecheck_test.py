"""scripts/racecheck.py: only what is listed, with a reason, passes."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKER = Path(__file__).resolve().parent.parent / "scripts" / "racecheck.py"

KERNEL = """// A kernel.
__device__ __forceinline__ void put(int* to, int v) {
  *to = v;
}
extern "C" __global__ void __launch_bounds__(threads(32))
    sum_all(const __grid_constant__ Args args) {
  put(shared, 1);
  const int got = shared[1];
}
"""
PUT, GET = "ops/sum/sum.cu:3", "ops/sum/sum.cu:8"
PASSED = "[  PASSED  ] 2 tests.\n"
ENTRY = """kernel sum_all: race
  Read  ops/sum/sum.cu | sum_all | const int got = shared[1];
  Write ops/sum/sum.cu | put | *to = v;
"""


def summary(num):
    return f"========= RACECHECK SUMMARY: {num} hazard{'s' * (num != 1)} displayed ({num} errors, 0 warnings)\n"


def report(first, *others, level="Error"):
    lines = [f"========= {level}: Race reported between {first}", *(f"=========     and {other}" for other in others)]
    return "========= COMPUTE-SANITIZER\n" + "\n".join(lines) + "\n========= \n"


# As versions of 2023 and of 2025 print it.
OLD = report(f"Write access at 0x570 in /tmp/{PUT}:put(int *, int)", f"Read access at 0x1f0 in /tmp/{GET}:sum_all [31 hazards]")
NEW = report(f"Write access at put(int *, int)+0x570 in {PUT}", f"Read access at sum_all+0x1f0 in {GET} [31 hazards]",
             level="Warning")
ONE_LINE = report(f"Read access at 0x1f0 in {GET}:sum_all by thread (1,0,0) and Write access at 0x570 in sum.cu:3:put [4 hazards]")


@pytest.fixture
def check(tmp_path):
    source = tmp_path / "src/ops/sum/sum.cu"
    source.parent.mkdir(parents=True)
    source.write_text(KERNEL)

    def run(log, allowed="", *arguments):
        (tmp_path / "log").write_text(log)
        (tmp_path / "allowed").write_text(allowed)
        result = subprocess.run([sys.executable, CHECKER, tmp_path / "log", "--allowed", tmp_path / "allowed",
                                 "--sources", tmp_path / "src", *arguments], capture_output=True, text=True)
        assert not result.stderr
        return result

    return run


@pytest.mark.parametrize("log", [OLD, NEW, ONE_LINE], ids=["old", "new", "one_line"])
def test_a_hazard_fails_until_it_is_listed(check, log):
    log += PASSED + summary(1)
    result = check(log, "", "--print-entries")
    assert result.returncode == 1
    assert ENTRY in result.stdout and "1 not listed" in result.stdout
    printed = result.stdout.split("# ---- Entries that are missing\n")[1].split("racecheck:")[0]
    assert check(log, printed).returncode == 1  # without a reason
    result = check(log, printed.replace("REASON MISSING", "It is ordered\n  by a barrier."))
    assert result.returncode == 0, result.stdout


def hazard(thread, kind="WAR", writer=256):
    return f"""========= Error: Potential {kind} hazard detected at __shared__ 0x18410 in block (0,0,0) :
=========     Read Thread ({thread},0,0) at sum_all+0x13b0 in sum.cu:8
=========     Write Thread ({writer},0,0) at device::put(int *, int)+0x5240 in sum.cu:3
=========     Current Value : 0, Incoming Value : ?
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: cuLaunchKernelEx [0x39fc2f] in libcuda.so.1
=========         Host Frame:  [0x99095] in halfbyte_cuda_tests
========= 
"""


def test_hazards_by_themselves(check):
    allowed = ENTRY.replace("race", "WAR") + "  It is ordered.\n"
    assert check(hazard(1) + hazard(33) + PASSED + summary(2), allowed).returncode == 0
    result = check(hazard(1) + hazard(64) + PASSED + summary(2), allowed)  # the lane that arrives
    assert result.returncode == 1 and "kernel sum_all: WAR, the earlier by a first lane\n" in result.stdout
    result = check(hazard(1, "RAW", 257) + PASSED + summary(1), allowed)
    assert result.returncode == 1 and "kernel sum_all: RAW\n" in result.stdout
    allowed = allowed.replace("WAR", "RAW")
    assert check(hazard(32, "RAW", 257) + PASSED + summary(1), allowed).returncode == 0
    result = check(hazard(1, "RAW", 256) + PASSED + summary(1), allowed)
    assert result.returncode == 1 and "kernel sum_all: RAW, the earlier by a first lane\n" in result.stdout


def test_each_pair_counts(check):
    log = report(f"Write access at put+0x1 in {PUT}", f"Read access at sum_all+0x2 in {GET} [1 hazards]",
                 f"Write access at put+0x3 in {PUT} [1 hazards]") + PASSED + summary(1)
    result = check(log, ENTRY + "  It is ordered.\n")
    assert result.returncode == 1 and "2 hazards, 1 not listed" in result.stdout


def test_a_clean_log_passes_and_names_unused_entries(check):
    result = check(PASSED + summary(0), ENTRY + "  It is ordered.\n")
    assert result.returncode == 0 and "not reported any more" in result.stdout and "1 of 1 entries" in result.stdout


@pytest.mark.parametrize("log, message", [
    (OLD + PASSED, "no RACECHECK SUMMARY"),
    (OLD + PASSED + summary(1) + OLD + PASSED, "no RACECHECK SUMMARY"),
    (OLD + summary(1), "no test passed"),
    (OLD + PASSED + summary(3), "3 hazards displayed, 1 reports"),
    (report("Write access at put+0x570", "Read access at sum_all+0x1f0 [1 hazards]") + PASSED + summary(1), "no file and line"),
    (OLD.replace("sum.cu:8", "sum.cu:80") + PASSED + summary(1), "has no line 80"),
    (OLD.replace("sum.cu:8", "other.cu:8") + PASSED + summary(1), "is no file"),
    ("========= Warning: Maximum number of hazards reached.\n" + PASSED + summary(0), "not understood"),
    ("========= Error: Potential WAR hazard detected at __shared__ 0x4 in block (0,0,0) :\n" + PASSED + summary(0),
     "not an access of a hazard"),
    ("========= Internal Sanitizer Error\n" + PASSED + summary(0), "not understood"),
], ids=lambda value: value if " " in value and "\n" not in value else "")
def test_what_is_not_understood_fails(check, log, message):
    result = check(log, ENTRY + "  It is ordered.\n")
    assert result.returncode == 1 and message in result.stdout, result.stdout


def test_a_list_that_is_not_understood_fails(check):
    for allowed in ("kernel sum_all\n", ENTRY, ENTRY.replace("race", ""), ENTRY.replace("Read ", "Reads") + "  Why.\n"):
        assert check(PASSED + summary(0), allowed).returncode == 1
