# Shared by demo.sh and test.sh, which source it: goes to the repository root, installs what is missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\n== %s\n' "$*"; }

# What building takes.
packages=(g++ cmake ninja-build libhwy-dev libtbb-dev libfmt-dev libcli11-dev nlohmann-json3-dev
  libxxhash-dev libgtest-dev pkg-config)

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
