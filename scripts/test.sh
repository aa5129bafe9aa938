#!/usr/bin/env bash
# The verdict on a change, in minutes: installs what is missing, builds library, tool and tests with warnings as
# errors, runs the tests. All other checks: scripts/check.sh.
source "$(dirname "$0")/lib.sh"

install_packages "${packages[@]}" "${python_packages[@]}"
say "Build"
configure
build() { python3 tools/build_times.py build/release cmake --build --preset ci --target "$@"; }
build halfbyte_cli halfbyte_tests halfbyte_op_hashes
build halfbyte_python halfbyte_stubs
say "Tests"
run_ctest tests | tee build/test.log
grep 'tests passed' build/test.log
