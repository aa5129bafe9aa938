#!/usr/bin/env bash
# Everything that CI checks: installs what is missing, layers, formatting, build with warnings as errors,
# compile times, lint, all tests, then the unit tests under the sanitizers.
#   HALFBYTE_SKIP_SANITIZERS=1   without the last
source "$(dirname "$0")/lib.sh"

install_packages "${packages[@]}" clang-format-14 clang-tidy-14 python3-venv

say "Python environment"
venv=build/venv
if [[ ! -x $venv/bin/pytest ]]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q numpy pytest
fi

# find_nvrtc: prints a path of NVRTC, which compiles the codecs for every GPU; no GPU is needed.
find_nvrtc() {
  local path
  for path in "${HALFBYTE_NVRTC:-}" "${CUDA_HOME:-/usr/local/cuda}"/lib64/libnvrtc.so \
      "$PWD/$venv"/lib/python*/site-packages/nvidia/*/lib/libnvrtc.so.*; do
    if [[ -e $path ]]; then
      echo "$path"
      return
    fi
  done
  { /sbin/ldconfig -p || true; } 2>/dev/null | awk '/libnvrtc\.so/ && !found++ {print $NF}'
}
HALFBYTE_NVRTC=$(find_nvrtc)
if [[ -z $HALFBYTE_NVRTC ]]; then
  "$venv/bin/pip" install -q "nvidia-cuda-nvrtc>=13,<14"
  HALFBYTE_NVRTC=$(find_nvrtc)
fi
export HALFBYTE_NVRTC
echo "NVRTC: $HALFBYTE_NVRTC"

# find_ptxas: prints a path of ptxas, which takes the PTX of every kernel; it must not be older than NVRTC.
find_ptxas() {
  local path
  for path in "${HALFBYTE_PTXAS:-}" "${CUDA_HOME:-/usr/local/cuda}"/bin/ptxas \
      "$PWD/$venv"/lib/python*/site-packages/nvidia/*/bin/ptxas; do
    if [[ -x $path ]]; then
      echo "$path"
      return
    fi
  done
}
HALFBYTE_PTXAS=$(find_ptxas)
if [[ -z $HALFBYTE_PTXAS ]]; then
  "$venv/bin/pip" install -q --no-deps "nvidia-cuda-nvcc>=13,<14"
  HALFBYTE_PTXAS=$(find_ptxas)
fi
export HALFBYTE_PTXAS
echo "ptxas: $HALFBYTE_PTXAS"

say "Layers"
python3 tools/check_layers.py

say "Formatting"
find include src cli examples tests bench \( -name '*.cc' -o -name '*.h' -o -name '*.hpp' -o -name '*.c' \) -print0 |
  xargs -0 clang-format-14 --dry-run --Werror
echo "clean"

say "Build"
cmake --preset ci -DHALFBYTE_PYTHON="$PWD/$venv/bin/python"
# The budget is that of what is built to be used and tested here; benchmarks, and tests that need a GPU, only must compile.
python3 tools/build_times.py build/release cmake --build --preset ci --target halfbyte halfbyte_cli halfbyte_tests
cmake --build --preset ci

say "Lint"
cmake --preset lint -DHALFBYTE_PYTHON="$PWD/$venv/bin/python"
run-clang-tidy-14 -quiet -p build/lint -extra-arg=-Wno-unknown-warning-option \
  "^$PWD/(src|cli)/((?!_test|_bench).)*$" 2>/dev/null

say "Tests"
ctest --test-dir build/release --output-on-failure --timeout 900 -j "$(nproc)" | tee build/ctest.log

if [[ ${HALFBYTE_SKIP_SANITIZERS:-0} != 1 ]]; then
  for sanitizer in asan tsan; do
    say "Unit tests, preset $sanitizer"
    cmake --preset "$sanitizer"
    cmake --build --preset "$sanitizer" --target halfbyte_tests
    "build/$sanitizer/halfbyte_tests" --gtest_brief=1 --gtest_filter='-*FormatsNvrtc*:*JitCompile*'
  done
fi

say "All checks passed"
grep 'tests passed' build/ctest.log
