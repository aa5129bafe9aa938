#!/usr/bin/env python3
"""Who may include whom (ARCHITECTURE.md), and what is forgotten, checked.

    tools/check_layers.py [ROOT]

Refuses an #include that the tables below do not allow, a HWY_TARGET_INCLUDE that is not the file's own
path, a value of a code book outside src/formats/tables.h, a source or test that no CMakeLists.txt lists, and an
operation or variant that a table, test or page does not name.
Prints one line per finding and exits 1 if there is one.
"""

import re
import sys
from os.path import relpath
from pathlib import Path

# The ops that walk grouped tensors, and so may include src/grouped.
GROUPED_OPS = {"quantize_linear", "fake_quantize", "learned_scale", "observe"}

# Our own headers: files -> the includes they may have. First match wins; {op} is the file's op folder, with
# "|grouped" behind it for GROUPED_OPS.
LAYERS = [
    (r"include/halfbyte/", r"halfbyte/"),
    # Freestanding: NVRTC compiles these.
    (r"src/formats/\w+\.h$", r"formats/"),
    (r"src/ops/(?P<op>\w+)/[\w/]+_args\.h$", r"formats/|(ops/{op})/[\w/]+_args\.h$"),  # what a kernel takes: shared with the host
    (r"src/cuda/device/", r"(formats|cuda/device)/"),
    (r"src/ops/(?P<op>\w+)/[\w/]+\.cuh?$", r"(formats|cuda/device)/|(ops/{op})/[\w/]+(_args\.h|\.cuh)$|halfbyte_config\.h$"),
    (r"src/grouped/\w+_args\.h$", r"formats/|grouped/\w+_args\.h$"),
    (r"src/grouped/\w+\.cuh?$", r"(formats|cuda/device)/|grouped/\w+(_args\.h|\.cuh)$|halfbyte_config\.h$"),
    (r"src/benchmark/\w+_args\.h$", r"formats/"),
    (r"src/benchmark/\w+\.cu$", r"(formats|cuda/device)/|benchmark/\w+_args\.h$|halfbyte_config\.h$"),
    (r"src/formats/\w+_test\.cc$", r"(halfbyte|formats|core)/"),
    (r"src/core/\w+_test\.cc$", r"(halfbyte|formats|core)/|io/test_directory\.h$"),
    (r"src/core/", r"(halfbyte|formats|core)/"),
    (r"src/cpu/", r"(halfbyte|formats|core|cpu)/"),
    (r"src/cuda/\w+_test\.cc$", r"(halfbyte|core|cuda)/|io/test_directory\.h$"),
    (r"src/cuda/", r"(halfbyte|formats|core|cuda)/"),
    (r"src/grouped/\w+(_cpu\.cc|-inl\.h)$", r"(halfbyte|formats|core|cpu|grouped)/"),
    (r"src/grouped/\w+_(cuda|kernels)\.(cc|h)$", r"(halfbyte|formats|core|cuda|grouped)/"),
    (r"src/grouped/testing\.h$", r"(halfbyte|formats|core|grouped)/|ops/testing\.h$"),
    (r"src/grouped/", r"(halfbyte|formats|core|grouped)/|cpu/parallel\.h$"),
    (r"src/ops/(?P<op>\w+)/.*(_cpu\.cc|-inl\.h)$", r"(halfbyte|formats|core|cpu|ops/{op})/"),
    (r"src/ops/(?P<op>\w+)/.*_(cuda\.cc|cuda\.h|kernels\.cc)$", r"(halfbyte|formats|core|cuda|ops/{op})/"),
    (r"src/ops/\w+/\w+_bench\.cc$", r"halfbyte/|benchmark/problem\.h$"),  # a table: through the public headers
    (r"src/ops/(?P<op>\w+)/.*_(test\.cc|testing\.h)$", r"(halfbyte|formats|core|cpu|ops/{op})/|ops/(testing|\w+/\w+_ref)\.h$"),
    (r"src/ops/(?P<op>\w+)/", r"(halfbyte|formats|core|ops/{op})/|cpu/parallel\.h$"),
    (r"src/ops/testing\.h$", r"(halfbyte|formats|core)/|cpu/parallel\.h$"),
    (r"src/benchmark/\w+_cpu\.cc$", r"(halfbyte|core|cpu|benchmark)/"),
    (r"src/benchmark/\w+_cuda\.cc$", r"(halfbyte|core|cuda|benchmark)/"),
    (r"src/benchmark/", r"(halfbyte|formats|core|cuda|benchmark)/"),
    (r"src/kernels/", r"(halfbyte|core|cuda|kernels)/|benchmark/benchmark_kernels\.h$|ops/\w+/\w+_cuda\.h$|io/(file|test_directory)\.h$"),
    (r"src/io/\w+_cpu\.cc$", r"(halfbyte|formats|core|cpu|io)/"),
    (r"src/io/\w+_test\.cc$", r"(halfbyte|formats|core|io)/|cpu/parallel\.h$|ops/testing\.h$"),
    (r"src/io/", r"(halfbyte|formats|core|io)/|cpu/parallel\.h$"),
    (r"src/mpi/", r"halfbyte/"),
    (r"src/capi/", r"(halfbyte|capi)/|core/per_thread\.h$"),
    (r"cli/", r"halfbyte/|\w+\.h$"),
    (r"python/", r"halfbyte/|\w+\.h$"),
    (r"examples/llama/", r"halfbyte/|\w+\.h$"),
    (r"examples/", r"halfbyte/|random_values\.h$"),
    (r"tests/", r""),  # what crosses the layers
]
# A folder of an op is a variant of it, whose files only its own files include, but for this one: what variants share.
SHARED_FOLDER = "weight"

TESTING = r".*(_test\.cc|/testing\.h|/test_\w+\.h)$|tests/"
FREESTANDING = r"src/formats/\w+\.h$|src/cuda/device/|src/(grouped|ops|benchmark)/[\w/]+_args\.h$|.*\.cuh?$"

# Headers of others: includes -> the files that may have them. First match wins; no match is refused, so
# a toolkit header is.
OTHERS = [
    (r"[a-z0-9_]+$", r""),  # <vector>
    (r"stdint\.h$", r"include/halfbyte/\w+\.h$|examples/c/"),  # C
    (r"stddef\.h$", r"include/halfbyte/\w+\.h$"),
    (r"(errno|execinfo|limits|stdarg|stdbool|stdio|string)\.h$", r"examples/c/|tests/campaign/"),
    (r"math\.h$", r"examples/c/"),
    (r"((sys|linux)/\w+|dirent|dlfcn|fcntl|grp|poll|pthread|pwd|sched|signal|spawn|stdlib|unistd)\.h$", rf"(src/(io|cpu|cuda)|cli|examples/c)/|src/core/(directory|fork|per_thread|system_call|temporary)\.|{TESTING}"),
    (r"cpuid\.h$", r"src/cpu/features\.cc$"),
    (r"immintrin\.h$", r"src/(ops|benchmark)/.*_cpu\.cc$|src/ops/qgemm/weight/bf16_decode\.h$"),
    (r"fmt/", r"(src|cli|tests)/"),
    (r"hwy/", rf"src/(cpu/.*|.*_cpu\.cc|.*-inl\.h)$|{TESTING}"),
    (r"(tbb|sanitizer)/", r"src/cpu/parallel\.cc$"),
    (r"nlohmann/json_fwd\.hpp$", r"(src/io|cli)/"),
    (r"nlohmann/", rf"(src/io|src/kernels|cli|examples/llama)/.*\.cc$|src/io/journal\.h$|{TESTING}"),
    (r"xxhash\.h$", r"src/core/.*\.cc$"),
    (r"CLI/", r"cli/.*\.cc$"),
    (r"mpi\.h$", r"src/mpi/"),
    (r"(gtest|gmock)/", TESTING),
    (r"nanobind/", r"python/"),
]

# The values of NF4 but -1, 0 and 1, and the smallest of FP4: their decimals, and their bits as f32.
CODE_BOOK = re.compile(
    r"\b0\.(69619|52507|39491|28444|18477|09105|07958|16093|24611|33791|44070|56261|72295|00520?8)\d*"
    r"|(?<![0-9a-f])[3b](f3239b1|f066b30|eca32a0|e91a24d|e3d353f|dba7871|da2faff|e24cae3|e7c04dd|ead033a|ee1a4b8"
    r"|f1007ab|f3913b3)(?![0-9a-f])",
    re.IGNORECASE,
)
# A test that took its golden values from the tables under test would prove nothing.
CODE_BOOK_HOMES = r"src/formats/tables\.h$|.*_test\.(cc|py)$|tests/(golden|independent)/"

SUFFIXES = {".h", ".hpp", ".def", ".cc", ".cu", ".cuh", ".c", ".py"}
FOLDERS = ("include", "src", "cli", "python", "examples", "tests", "bench", "tools")


# What is compiled or run, and the file that lists it: by its path from there, or by its name alone.
LISTS = [
    # Of tests/interop the stage `readers` runs all, of tests/mpi the stage `mpi`.
    (r"src/.*_test\.cc$|tests/(?!interop/|mpi/|pytorch/).*(\.cc|_test\.py)$", "tests/CMakeLists.txt"),
    (r"(src|cli|bench)/.*\.cc$", "CMakeLists.txt"),
    (r"python/src/.*\.cc$", "python/CMakeLists.txt"),
    (r"examples/.*\.cc?$", "examples/CMakeLists.txt"),
]
LISTED_BY_NAME = r"tests/(python/)?\w+_test\.py$|examples/cpp/"

# What is declared or defined, and who must name it: files, and a pattern whose group is a name (without a group: the file
# is named), then the files of which one must have the pattern with that NAME.
NAMED = [
    # An operation is a plan.
    (
        "include/halfbyte/*.hpp",
        r"^using \w+ = Plan<(\w+)>;",
        [
            ("include/halfbyte/*.hpp", r"^extern template class Plan<NAME>;"),
            ("src/ops/*/*_test.cc", r"\bNAME(Plan)?\b"),
            ("tests/cuda/*.cc", r"\bNAME(Plan)?\b"),
            ("tests/op_hashes.cc", r"\bNAME\b"),
            ("src/capi/*.cc", r"^HALFBYTE_PLAN\(\w+, NAME,"),
            ("python/src/*.cc", r"\bPlanClass<NAME>"),
        ],
    ),
    # Of compute_qparams there is nothing to measure: it takes a value a group.
    (
        "include/halfbyte/*.hpp",
        r"^using \w+ = Plan<((?!ComputeQParams)\w+)>;",
        [("src/**/*_bench.cc", r"\b(bench_run<NAME>|NAMEPlan\b)")],
    ),
    (
        "include/halfbyte/*.hpp",
        r"^using \w+ = Plan<",
        [("CHANGELOG.md", r"<halfbyte/NAME\.hpp>"), ("ARCHITECTURE.md", r"\bNAME\b")],
    ),
    ("src/capi/*.cc", r"^HALFBYTE_PLAN\((\w+),", [("README.md", r"`NAME`")]),
    ("src/ops/*/*_bench.cc", r"^BenchProblems (\w+)\(", [("src/benchmark/ops_bench.cc", r"\bNAME\}")]),
    (
        "include/halfbyte/halfbyte.h",
        r"^typedef struct halfbyte_(\w+) \{\n  size_t struct_size;",
        [("tests/capi_test.cc", r"EXPECT_NO_TAIL\(NAME,")],
    ),
    ("src/ops/qgemm/**/*.cc", r"^const QgemmVariant (\w+) =", [("src/ops/qgemm/qgemm.cc", r"&NAME\b")]),
    ("src/ops/qgemm/**/*.cc", r"^const QgemmVariant \w+ = \{\{\"(\w+)\"", [("docs/qgemm.md", r"`NAME`")]),
]


def allowed_layer(path):
    for files, includes in LAYERS:
        if match := re.match(files, path):
            op = match.groupdict().get("op", "")
            return includes.format(op=op + "|grouped" if op in GROUPED_OPS else op)
    return r"(?!)"


def is_of_another_variant(path, header):
    """Whether the header lies in the folder of a variant that the file `path` is not of."""
    folder = re.match(r"ops/\w+/((cpu/)?\w+)/", header)
    return bool(folder) and folder[1] != SHARED_FOLDER and not path.startswith(f"src/{folder[0]}")


def check_include(path, bracket, header):
    """The finding about one #include of the file `path`, or None."""
    own = bracket == '"' or re.match(r"(halfbyte|formats|core|cpu|cuda|grouped|ops|io|capi)/", header)
    if own and not header.startswith("hwy/"):  # Highway's own examples write "hwy/highway.h"
        if is_of_another_variant(path, header):
            return f"{header} is of a variant: only its own files may include it"
        return None if re.match(allowed_layer(path), header) else f"{header} is not allowed here"
    if re.match(FREESTANDING, path):
        return f"{header}: this file is freestanding"
    for includes, files in OTHERS:
        if re.match(includes, header):
            return None if re.match(files, path) else f"{header} belongs in other files ({files})"
    return f"{header} is not one of the headers that this project uses"


def forgotten(root):
    """A finding for each file that its list does not have."""
    words = {}
    for _, list_file in LISTS:
        if (root / list_file).exists():
            words[list_file] = set(re.split(r"[\s()]+", (root / list_file).read_text(encoding="utf-8")))
    files = [file for folder in ("src", "cli", "python", "bench", "tests", "examples") for file in (root / folder).rglob("*.*")]
    for path in sorted(file.relative_to(root).as_posix() for file in files):
        list_file = next((list_file for pattern, list_file in LISTS if re.match(pattern, path)), None)
        if list_file not in words:
            continue
        entry = relpath(path, Path(list_file).parent)
        if re.match(LISTED_BY_NAME, path):
            entry = entry.removesuffix(".py") if list_file.startswith("tests/") else Path(path).stem
        if entry not in words[list_file]:
            yield f"{path}: {list_file} does not list it ({entry})"


def unnamed(root):
    """A finding for each name that a place of NAMED does not have."""
    texts = {}  # of the files of each place

    def text_of(places):
        if places not in texts:
            texts[places] = "\n".join(file.read_text(encoding="utf-8") for file in sorted(root.glob(places)))
        return texts[places]

    for files, pattern, places in NAMED:
        for file in sorted(root.glob(files)):
            for match in re.finditer(pattern, file.read_text(encoding="utf-8"), re.MULTILINE):
                name = match[1] if match.re.groups else file.stem
                for place, naming in places:
                    if text_of(place) and not re.search(naming.replace("NAME", name), text_of(place), re.MULTILINE):
                        yield f"{file.relative_to(root).as_posix()}: {place} does not name {name}"


def findings(root):
    yield from forgotten(root)
    yield from dict.fromkeys(unnamed(root))
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*")):
            if file.suffix not in SUFFIXES:
                continue
            path = file.relative_to(root).as_posix()
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
                where = f"{path}:{number}: "
                if include := re.match(r'\s*#\s*include\s*(["<])([^">]+)[">]', line):
                    if problem := check_include(path, *include.groups()):
                        yield where + problem
                if target := re.match(r'\s*#\s*define\s+HWY_TARGET_INCLUDE\s+"([^"]+)"', line):
                    own = path.removeprefix("src/")
                    if target[1] != own:
                        yield where + f"HWY_TARGET_INCLUDE is {target[1]}, must be {own}"
                if not re.match(CODE_BOOK_HOMES, path) and (value := CODE_BOOK.search(line)):
                    yield where + f"{value[0]} is a code book value: src/formats/tables.h is its only place"


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    count = 0
    for finding in findings(root):
        print(finding)
        count += 1
    print(f"check_layers: {count} findings")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
