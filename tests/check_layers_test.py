"""tools/check_layers.py finds what it is there for."""

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CHECKER = ROOT / "tools" / "check_layers.py"


def check(root):
    return subprocess.run([sys.executable, CHECKER, root], capture_output=True, text=True)


def test_this_tree_is_clean():
    result = check(ROOT)
    assert result.returncode == 0, result.stdout


ALLOWED = [
    ("include/halfbyte/ops.hpp", '#include <vector>\n#include "halfbyte/tensor.hpp"'),
    ("src/formats/codec.h", '#include "formats/tables.h"'),
    ("src/core/error.cc", "#include <fmt/format.h>"),
    ("src/cpu/parallel.cc", "#include <tbb/parallel_for.h>"),
    ("src/ops/quantize/quantize_cpu.cc", '#define HWY_TARGET_INCLUDE "ops/quantize/quantize_cpu.cc"'),
    ("src/ops/quantize/quantize_cpu.cc", '#include "hwy/foreach_target.h"'),
    ("src/ops/quantize/quantize_test.cc", '#include <gtest/gtest.h>\n#include "ops/dequantize/dequantize_ref.h"'),
    ("src/ops/quantize/quantize.cu", '#include "cuda/device/reduce.cuh"\n#include "formats/codec.h"'),
    ("src/ops/quantize/quantize.cu", '#include "halfbyte_config.h"\n#include "ops/quantize/quantize_args.h"'),
    ("src/ops/quantize/quantize.cuh", '#include "ops/quantize/quantize_args.h"'),
    ("src/ops/quantize/quantize_args.h", '#include "formats/codec.h"'),
    ("src/ops/quantize/quantize_cuda.cc", '#include "cuda/launch.h"\n#include "ops/quantize/quantize_args.h"'),
    ("src/ops/quantize/quantize_kernels.cc", '#include "cuda/kernel.h"\n#include "ops/quantize/quantize_cuda.h"'),
    ("src/ops/qgemm/sm80/sm80.cu", '#include "ops/qgemm/sm80/sm80_args.h"\n#include "ops/qgemm/weight/pairs.cuh"'),
    ("src/ops/qgemm/sm80/sm80_cuda.cc", '#include "ops/qgemm/qgemm_cuda.h"\n#include "ops/qgemm/weight/sum_cuda.h"'),
    ("src/ops/qgemm/cpu/amx/amx_cpu.cc", '#include "ops/qgemm/cpu/amx/amx-inl.h"\n#include "ops/qgemm/weight/units.h"'),
    ("src/ops/qgemm/weight/sum.cu", '#include "ops/qgemm/weight/sum_args.h"'),
    ("src/grouped/linear.h", '#include "core/format.h"\n#include "grouped/linear_args.h"'),
    ("src/grouped/linear.cuh", '#include "cuda/device/chunk.cuh"\n#include "grouped/linear_args.h"'),
    ("src/grouped/linear-inl.h", '#include "cpu/simd-inl.h"\n#include "hwy/cache_control.h"'),
    ("src/grouped/linear_cuda.cc", '#include "cuda/launch.h"\n#include "grouped/linear.h"'),
    ("src/ops/observe/observe.cc", '#include "grouped/grouping.h"\n#include "ops/observe/observe.h"'),
    ("src/ops/observe/observe.cuh", '#include "grouped/ranges.cuh"\n#include "ops/observe/observe_args.h"'),
    ("src/ops/learned_scale/learned_scale_args.h", '#include "grouped/linear_args.h"'),
    ("src/kernels/kernels.cc", '#include "cuda/kernel.h"\n#include "ops/quantize/quantize_cuda.h"'),
    ("src/kernels/kernels.cc", '#include "benchmark/benchmark_kernels.h"'),
    ("src/benchmark/qgemm_bench.cc", '#include "benchmark/backend.h"\n#include "halfbyte/bench.hpp"'),
    ("src/ops/quantize/quantize_bench.cc", '#include "benchmark/problem.h"\n#include "halfbyte/quantize_plan.hpp"'),
    ("src/benchmark/backend_cpu.cc", '#include "cpu/parallel.h"\n#include "benchmark/backend.h"'),
    ("src/benchmark/loops_cpu.cc", '#include <immintrin.h>\n#include "hwy/highway.h"'),
    ("src/benchmark/read_bulk.cu", '#include "benchmark/benchmark_args.h"\n#include "cuda/device/bulk.cuh"'),
    ("src/kernels/pack.cc", '#include "io/file.h"'),
    ("src/core/hash.cc", "#include <xxhash.h>"),
    ("src/io/verify_cpu.cc", '#include "cpu/simd-inl.h"'),
    ("src/io/file.cc", '#include <sys/stat.h>\n#include "cpu/parallel.h"'),
    ("cli/main.cc", '#include <CLI/CLI.hpp>\n#include "halfbyte/checkpoint.hpp"\n#include "output.h"'),
    ("src/formats/tables.h", "float x = 0.6961928f;"),
    ("tests/golden/nf4.h", "0xbf3239b1"),
]

REFUSED = [
    ("include/halfbyte/ops.hpp", '#include "core/checks.h"'),
    ("include/halfbyte/ops.hpp", "#include <fmt/format.h>"),
    ("src/formats/codec.h", "#include <cstdint>"),
    ("src/formats/codec.h", '#include "halfbyte/format.hpp"'),
    ("src/core/error.cc", '#include "cpu/parallel.h"'),
    ("src/core/error.cc", '#include "ops/quantize/quantize.h"'),
    ("src/cpu/parallel.h", "#include <tbb/parallel_for.h>"),
    ("src/cpu/parallel.cc", '#include "cuda/jit.h"'),
    ("src/cuda/driver.cc", "#include <cuda.h>"),
    ("src/cuda/nvrtc.cc", "#include <nvrtc.h>"),
    ("src/cuda/jit.cc", '#include "cpu/parallel.h"'),
    ("src/cuda/device/reduce.cuh", "#include <cuda_fp16.h>"),
    ("src/ops/quantize/quantize.cu", "#include <type_traits>"),
    ("src/ops/quantize/quantize.cu", '#include "ops/dequantize/dequantize_args.h"'),
    ("src/ops/quantize/quantize.cu", '#include "ops/quantize/quantize.h"'),
    ("src/ops/quantize/quantize_args.h", "#include <cstdint>"),
    ("src/ops/quantize/quantize_args.h", '#include "cuda/device/reduce.cuh"'),
    ("src/cuda/device/reduce.cuh", '#include "halfbyte_config.h"'),
    ("src/core/hash.h", "#include <xxhash.h>"),
    ("src/ops/quantize/quantize_cpu.cc", '#include "cuda/jit.h"'),
    ("src/ops/qgemm/sm80/sm80.cu", '#include "ops/qgemm/simt/simt.cuh"'),
    ("src/ops/qgemm/sm80/sm80_args.h", '#include "ops/qgemm/simt/simt_args.h"'),
    ("src/ops/qgemm/sm80/sm80_cuda.cc", '#include "ops/qgemm/simt/simt_cuda.h"'),
    ("src/ops/qgemm/cpu/amx/amx_cpu.cc", '#include "ops/qgemm/cpu/avx512/avx512-inl.h"'),
    ("src/ops/qgemm/weight/sum_cuda.cc", '#include "ops/qgemm/sm80/sm80_args.h"'),
    ("src/ops/qgemm/weight/pairs.cuh", '#include "ops/qgemm/sm80/sm80.cuh"'),
    ("src/ops/qgemm/qgemm.cc", '#include "ops/qgemm/simt/simt_cuda.h"'),
    ("src/ops/quantize/quantize_cuda.cc", '#include "cpu/parallel.h"'),
    ("src/ops/quantize/quantize.cc", "#include <hwy/highway.h>"),
    ("src/ops/quantize/quantize.cc", '#include "ops/dequantize/dequantize.h"'),
    ("src/ops/quantize/quantize_test.cc", '#include "ops/dequantize/dequantize.h"'),
    ("src/ops/quantize/quantize_kernels.cc", '#include "kernels/kernels.h"'),
    ("src/ops/quantize/quantize.cc", '#include "grouped/grouping.h"'),
    ("src/ops/quantize/quantize.cu", '#include "grouped/linear.cuh"'),
    ("src/ops/fake_quantize/fake_quantize.cc", '#include "ops/quantize_linear/quantize_linear.h"'),
    ("src/ops/learned_scale/lsq.cuh", '#include "grouped/linear.h"'),
    ("src/grouped/linear.h", '#include "ops/quantize_linear/quantize_linear.h"'),
    ("src/grouped/linear_cuda.cc", '#include "cpu/parallel.h"'),
    ("src/grouped/linear_backward_cpu.cc", '#include "cuda/launch.h"'),
    ("src/grouped/linear.cc", '#include "cuda/launch.h"'),
    ("src/grouped/linear.cuh", "#include <cstdint>"),
    ("src/core/tensor.cc", '#include "grouped/grouping.h"'),
    ("src/kernels/kernels.cc", '#include "ops/quantize/quantize.h"'),
    ("src/kernels/pack.cc", '#include "io/checkpoint.h"'),
    ("src/benchmark/qgemm_bench.cc", '#include "ops/qgemm/qgemm.h"'),
    ("src/ops/quantize/quantize_bench.cc", '#include "ops/quantize/quantize.h"'),
    ("src/ops/quantize/quantize_bench.cc", '#include "benchmark/harness.h"'),
    ("src/benchmark/read_bulk.cu", "#include <cstdint>"),
    ("src/cuda/jit.cc", '#include "kernels/kernels.h"'),
    ("src/io/layout.h", "#include <nlohmann/json.hpp>"),
    ("src/io/layout.cc", '#include "ops/quantize/quantize.h"'),
    ("src/io/layout.cc", '#include "cpu/simd-inl.h"'),
    ("cli/main.cc", '#include "io/file.h"'),
    ("cli/main.cc", "#include <boost/any.hpp>"),
    ("src/ops/quantize/quantize_cpu.cc", '#define HWY_TARGET_INCLUDE "ops/dequantize/dequantize_cpu.cc"'),
    ("src/ops/quantize/quantize_cpu.cc", "const float edge = -0.69619280f;"),
    ("tools/plot.py", "NF4 = [0x3e24cae3]"),
]


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True)
    file.write_text(f"// A comment.\n{text}\n")


@pytest.mark.parametrize("path, text", ALLOWED)
def test_allowed(tmp_path, path, text):
    write(tmp_path, path, text)
    result = check(tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("path, text", REFUSED)
def test_refused(tmp_path, path, text):
    write(tmp_path, path, text)
    result = check(tmp_path)
    assert result.returncode == 1
    assert result.stdout.startswith(f"{path}:2: "), result.stdout


LISTED = {
    "CMakeLists.txt": "add_library(x\n  src/core/a.cc\n  cli/a.cc)",
    "tests/CMakeLists.txt": "add_executable(x ../src/core/a_test.cc cuda/a_test.cc)\nhalfbyte_pytest(a_test tests)",
    "examples/CMakeLists.txt": "foreach(name IN ITEMS a b)\nadd_executable(llama llama/a.cc)",
}


@pytest.mark.parametrize(
    "path, forgotten",
    [
        ("src/core/a.cc", "src/core/b.cc"),
        ("cli/a.cc", "cli/b.cc"),
        ("src/core/a_test.cc", "src/core/b_test.cc"),
        ("tests/cuda/a_test.cc", "tests/a_test.cc"),
        ("tests/a_test.py", "tests/b_test.py"),
        ("examples/cpp/a.cc", "examples/cpp/c.cc"),
        ("examples/llama/a.cc", "examples/llama/b.cc"),
    ],
)
def test_what_no_list_has_is_named(tmp_path, path, forgotten):
    for file, text in LISTED.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).touch()
    assert check(tmp_path).returncode == 0
    (tmp_path / forgotten).touch()
    result = check(tmp_path)
    assert result.returncode == 1 and result.stdout.startswith(f"{forgotten}: ")


# What must name an operation, a structure of C, a benchmark and a variant: each line is one that can be forgotten.
NAMES = {
    "include/halfbyte/negate.hpp": ["using NegatePlan = Plan<Negate>;"],
    "include/halfbyte/halfbyte.h": ["typedef struct halfbyte_negate_args {\n  size_t struct_size;\n  int x;"],
    "src/ops/negate/negate_bench.cc": ["BenchProblems negate_problems(DeviceKind) {"],
    "src/ops/qgemm/sm1/sm1_cuda.cc": ['const QgemmVariant kQgemmSm1 = {{"qgemm_sm1", x}};'],
}
NAMING = {
    "include/halfbyte/negate.hpp": ["extern template class Plan<Negate>;"],
    "src/ops/negate/negate_test.cc": ["NegatePlan::select({}, d);"],
    "tests/cuda/negate_test.cc": ["NegatePlan::select({}, d);"],
    "tests/op_hashes.cc": ["p.run<Negate>(d, args);"],
    "src/capi/negate.cc": ["HALFBYTE_PLAN(negate, Negate, halfbyte_negate_descriptor)"],
    "python/src/plans_negate.cc": ["PlanClass<Negate> plan(module, \"NegatePlan\", doc);"],
    "src/ops/negate/negate_bench.cc": ["return bench_run<Negate>(memory);"],
    "CHANGELOG.md": ["(`<halfbyte/negate.hpp>`)"],
    "ARCHITECTURE.md": ["affine_qdq negate"],
    "README.md": ["| `negate` |"],
    "src/benchmark/ops_bench.cc": ['{{"negate", "minus x"}, negate_problems},'],
    "tests/capi_test.cc": ["EXPECT_NO_TAIL(negate_args, x);"],
    "src/ops/qgemm/qgemm.cc": ["{&kQgemmSm1},"],
    "docs/qgemm.md": ["| `qgemm_sm1` |"],
}


def lay_out(root, forgotten=None):
    naming = {**NAMING, forgotten: ["// Nothing."]} if forgotten else NAMING
    for path in {**NAMES, **NAMING}:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("\n".join(NAMES.get(path, []) + naming.get(path, [])) + "\n")


def test_what_is_named_everywhere_is_clean(tmp_path):
    lay_out(tmp_path)
    result = check(tmp_path)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("place", NAMING)
def test_a_place_without_a_name_is_named(tmp_path, place):
    lay_out(tmp_path, place)
    result = check(tmp_path)
    assert result.returncode == 1
    found = re.match(r"\S+: (\S+) does not name (\w+)\n", result.stdout)
    assert found and fnmatch(place, found[1].replace("**", "*")), result.stdout
