#!/usr/bin/env bash
# Attacks the tool and the library: faults of every system call, kills, power loss, fuzzing, want of memory, hostile
# directories and hosts. Installs and builds what that takes.
#   scripts/campaign.sh [--quick] [--seed WORD] [--time SECONDS] [--restart] [SECTION...]
#       runs the sections named (all of them) and goes on where the last run with this seed was stopped. --quick: a part
#       of each, two minutes in all. --time: each section ends after so long. --restart: forget what earlier runs did.
#       Exit code 1 if something was found.
#   scripts/campaign.sh --case NAME SECTION
#       runs the one case that a finding names
#   scripts/campaign.sh --list
#       names the sections
# Report: build/campaign/report.txt and report.json.
source "$(dirname "$0")/lib.sh"

install_packages "${packages[@]}" "${python_packages[@]}"
if [[ " $* " != *" --quick "* ]]; then install_packages clang-14 libclang-rt-14-dev dosfstools; fi  # libFuzzer, VFAT
configure
cmake --build --preset ci --target halfbyte_cli halfbyte_campaign
PYTHONPATH=tests PYTHONDONTWRITEBYTECODE=1 exec "$venv/bin/python" -m campaign "$@"
