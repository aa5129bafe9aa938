# Shared by the scripts here, which source it: goes to the repository root, installs what is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

# What building takes.
packages=(g++ cmake ninja-build libhwy-dev libtbb-dev libfmt-dev libcli11-dev nlohmann-json3-dev
  libxxhash-dev libgtest-dev pkg-config)
# The tests and the Python package need Python beside it, with its headers.
python_packages=(python3-venv python3-dev)

# install_packages NAME...: installs the Debian packages among these that are missing.
install_packages() {
  if ! command -v apt-get >/dev/null; then
    echo "No apt-get here: going on with what is installed. Debian's names of what is needed: $*"
    return
  fi
  local missing=() name
  for name in "$@"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null) == installed ]] || missing+=("$name")
  done
  if ((${#missing[@]} == 0)); then return; fi
  say "Installing ${missing[*]}"
  local as_root=()
  if ((EUID != 0)); then as_root=(sudo); fi
  "${as_root[@]}" apt-get -q update
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends "${missing[@]}"
}

# The Python of the tests, with NumPy and pytest, and with what builds and tests the package.
venv=$PWD/build/venv
make_venv() {
  if "$venv/bin/python" -c "import ml_dtypes, nanobind, numpy, pytest" 2>/dev/null; then return; fi
  say "Python environment: $venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q ml_dtypes "$(grep -o 'nanobind[^"]*' pyproject.toml)" numpy pytest
}

# What is built and tested: preset ci, in build/release.
configure() {
  make_venv
  # Without what a wheel that took its objects left there (scripts/wheel.sh).
  cmake --preset ci -DHALFBYTE_PYTHON="$venv/bin/python" -U 'SKBUILD*' -U 'Python*' -U 'nanobind*' -U CMAKE_INSTALL_LIBDIR
}

# run_ctest LABEL: the tests of that label (tests/CMakeLists.txt), with the count of them at the end.
run_ctest() {
  ctest --test-dir build/release -L "^$1\$" --no-tests=error --no-label-summary --output-on-failure --timeout 600 \
    -j "$(nproc)"
}

# count_tests LOG...: one line like that of ctest, for all that these have.
count_tests() {
  cat "$@" | awk '/^[0-9]+% tests passed, / { failed += $4; all += $9 } END {
    if (all) printf "%d%% tests passed, %d tests failed out of %d\n", 100 * (all - failed) / all, failed, all }'
}
