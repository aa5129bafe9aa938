#!/usr/bin/env bash
# What scripts/test.sh leaves out, in stages. Installs what the stages need.
#   scripts/check.sh [--full] [--seed WORD] [STAGE...]
#       runs the stages named (all of them), goes on after a failure, ends with a table and the count of tests;
#       exit code 1 if a stage failed. Some stages take a part of what there is to check, which the seed chooses:
#       that of a commit is its name. --full: everything, which takes hours.
#   scripts/check.sh --list
#       names the stages
# Logs: build/check/STAGE.log.
source "$(dirname "$0")/lib.sh"

full=0 chosen=()
seed=$(git rev-parse --short=10 HEAD 2>/dev/null || echo 0)

# ---- Stages, in their order: a function each. The comment behind its name is what --list says.

stage_layers() {  # who may include whom; sources, tests, operations and variants that a list or page lacks
  python3 tools/check_layers.py
}

stage_format() {  # clang-format
  install_packages clang-format-14
  find include src cli python examples tests bench tools cmake -name '*.cc' -o -name '*.h' -o -name '*.hpp' -o -name '*.c' \
    -o -name '*.cu' -o -name '*.cuh' | sort >"$work/files"
  xargs -P "$(nproc)" -n 20 clang-format-14 --dry-run --Werror <"$work/files"
  echo "$(wc -l <"$work/files") files are formatted"
}

stage_build() {  # everything compiles, benchmarks and GPU tests too, within the compile-time budget
  install_packages "${packages[@]}" "${python_packages[@]}"
  configure
  python3 tools/build_times.py build/release cmake --build --preset ci
}

stage_hostile() {  # files that attack the tool, and calls of the system that fail
  install_packages "${packages[@]}" "${python_packages[@]}"
  configure
  cmake --build --preset ci --target halfbyte_cli halfbyte_campaign
  run_ctest hostile
}

stage_examples() {  # the installed package: examples, pkg-config, the llama program
  install_packages "${packages[@]}" "${python_packages[@]}"
  configure
  cmake --build --preset ci --target halfbyte_cli
  run_ctest examples
}

stage_readers() {  # transformers and mlx-lm load what the tool writes, and the tool what they save
  install_packages "${packages[@]}" "${python_packages[@]}"
  configure
  cmake --build --preset ci --target halfbyte_cli
  make_readers
  local cells=(--seed "$seed" --count 300)
  if ((full)); then cells=(--full); fi
  run_readers tests/interop "${cells[@]}"
}

stage_python() {  # the Python package: halfbyte.torch with the torch of the readers; the wheel where there is no compiler
  install_packages "${packages[@]}" "${python_packages[@]}"
  configure
  cmake --build --preset ci --target halfbyte_cli halfbyte_python
  make_readers
  export PYTHONDONTWRITEBYTECODE=1
  PYTHONPATH=$PWD/build/release/python run_readers tests/pytorch
  scripts/wheel.sh --build-dir build/release  # half a minute, not five
  configure
  # README and pages with torch, by the wheel.
  python3 -m zipfile -e build/wheel/dist/*-cp3"$(python3 -c 'import sys; print(sys.version_info.minor)')"-*.whl "$work/site"
  PYTHONPATH=$work/site "$readers" -m pytest -q -p no:cacheprovider tests/docs_test.py -k run
}

stage_mpi() {  # several processes of the tool, connected by Open MPI and by MPICH, by Slurm, and on two hosts
  install_packages "${packages[@]}" "${python_packages[@]}" libopenmpi-dev openmpi-bin libmpich-dev mpich slurm-wlm iproute2
  configure
  cmake --build --preset ci --target halfbyte_cli
  # As root in a container, with more processes than cores.
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  build_mpi openmpi
  build_mpi mpich
  # Side by side: most of the time is spent in waiting, of Slurm's above all.
  local code=0
  (test_mpi openmpi "mpirun.openmpi --oversubscribe --bind-to none" && test_mpi mpich mpirun.mpich) >"$work/here" 2>&1 &
  test_mpi openmpi "mpirun.openmpi --oversubscribe --bind-to none" hosts -k "not 15 and not errors_are" || code=1
  # A process is lost tens of times in a test, which Slurm takes seconds to notice.
  test_mpi openmpi "srun -K --mpi=pmix" slurm -k "not 15" || code=1
  test_mpi mpich "srun -K --mpi=pmi2" slurm -k "bytes_of_one or errors_are" || code=1
  wait $! || code=1
  cat "$work/here"
  return $code
}

stage_kernels() {  # every kernel for every GPU generation, by NVRTC and ptxas
  install_packages "${packages[@]}" "${python_packages[@]}"
  configure
  # Both from one release of the toolkit: ptxas must not be older than NVRTC.
  HALFBYTE_NVRTC=$(find_in_toolkit "${HALFBYTE_NVRTC:-}" lib64/libnvrtc.so 'lib/libnvrtc.so.*')
  HALFBYTE_PTXAS=$(find_in_toolkit "${HALFBYTE_PTXAS:-}" bin/ptxas bin/ptxas)
  if [[ -z $HALFBYTE_NVRTC || -z $HALFBYTE_PTXAS ]]; then
    "$venv/bin/pip" install -q --no-deps "nvidia-cuda-nvrtc>=13,<14" "nvidia-cuda-nvcc>=13,<14"
    HALFBYTE_NVRTC=$(find_in_toolkit "" "" 'lib/libnvrtc.so.*')
    HALFBYTE_PTXAS=$(find_in_toolkit "" "" bin/ptxas)
  fi
  echo "NVRTC: $HALFBYTE_NVRTC"
  echo "ptxas: $HALFBYTE_PTXAS"
  export HALFBYTE_NVRTC HALFBYTE_PTXAS CI=true  # so that a test that finds none fails
  if ((full)); then export HALFBYTE_JIT_FULL=1; else export HALFBYTE_JIT_SEED=$seed; fi
  cmake --build --preset ci --target halfbyte_cli halfbyte_kernel_tests
  run_ctest kernels
}

stage_lint() {  # clang-tidy over kernels, changed units, and a part of the others
  install_packages "${packages[@]}" "${python_packages[@]}" clang-tidy-14 libopenmpi-dev
  configure
  cmake --build --preset ci --target halfbyte_kernel_configs
  # Not these: clang refuses shared memory of types with initial values, which NVRTC takes.
  build/release/halfbyte_kernel_configs "$work/configs" | grep -v '/observe_mse_' >"$work/kernels"
  find src cli -name '*.cc' ! -name '*_test.cc' ! -name '*_bench.cc' | sort >"$work/units"
  { changed_units <"$work/units" | sort -u | part 16 && part 8 <"$work/units"; } | sort -u >"$work/chosen"
  echo "$(wc -l <"$work/kernels") kernels, $(wc -l <"$work/chosen") of $(wc -l <"$work/units") units"
  cmake --preset lint -DHALFBYTE_MPI=ON >/dev/null
  local failed=0
  xargs -P "$(nproc)" -n 1 bash -c 'lint_unit "$@"' lint <"$work/chosen" || failed=1
  xargs -P "$(nproc)" -L 1 bash -c 'lint_kernel "$@"' lint <"$work/kernels" || failed=1
  return $failed
}

stage_arm() {  # unit tests of what computes, on ARM with NEON, under emulation; hashes of what every op gives
  install_packages "${packages[@]}" g++-aarch64-linux-gnu qemu-user
  make_arm_root
  choose_units src/{cpu,formats} -- src/{core,grouped,ops}
  cmake --preset arm -DHALFBYTE_TEST_UNITS="$units" >/dev/null
  cmake --build --preset arm --target halfbyte_tests halfbyte_op_hashes
  # A process for each test: QEMU ends some that have done much. It does not fork processes with threads.
  export QEMU_LD_PREFIX=$PWD/build/arm-root
  qemu-aarch64 build/arm/halfbyte_tests --gtest_list_tests | name_tests | grep -v DeathTest | part 60 >"$work/chosen"
  echo "$(wc -l <"$work/chosen") tests"
  xargs -P "$(nproc)" -I '{}' qemu-aarch64 build/arm/halfbyte_tests --gtest_brief=1 --gtest_filter='{}' <"$work/chosen"
  local count=8
  if ((full)); then count=80; fi
  qemu-aarch64 build/arm/halfbyte_op_hashes --count $count --variant qgemm_ref >"$work/hashes"
  awk -v count=$count '$2 < count' tests/golden/op_hashes.txt | cmp - "$work/hashes"
  echo "$(wc -l <"$work/hashes") hashes are those of x86"
}

stage_sanitizers() {  # unit tests under AddressSanitizer and UndefinedBehaviorSanitizer, or under ThreadSanitizer
  install_packages "${packages[@]}"
  # Instrumented kernels compile for minutes: one of two vector targets is left out, where this machine has both.
  if ((full)) || ! grep -qw avx512bw /proc/cpuinfo; then
    printf '%s\n' asan tsan
  else
    printf '%s\n' {asan,tsan}' '{HWY_AVX2,'HWY_AVX3;HWY_AVX3_DL'}
  fi | part 1 >"$work/sanitizers"
  local preset without
  # All tests of what untrusted input reaches, or of what has threads; and a part of the others.
  local asan=(src/{core,cuda,io,kernels} tests/*_test.cc) tsan=(src/{cpu,cuda} src/ops/all_reduce
    src/io/{block_worker,checkpoint,file,output_weight,resume,team,verify_span,whole_tensors}_test.cc)
  while read -r preset without <&3; do
    local -n paths=$preset
    run_sanitizer "$preset" "$without" "${paths[@]}"
  done 3<"$work/sanitizers"
}

stage_campaign() {  # attacks on the tool and the library: a part of each section of scripts/campaign.sh
  local part=(--quick --seed "$seed")
  if ((full)); then part=(--seed "$seed"); fi
  scripts/campaign.sh "${part[@]}"
}

# ---- What they use

# build_mpi LIBRARY: the plug-in for one implementation of MPI.
build_mpi() {
  cmake -S . -B "build/mpi-$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DHALFBYTE_MPI=ON -DHALFBYTE_CLI=OFF \
    -DHALFBYTE_TESTS=OFF -DHALFBYTE_WERROR=ON -DMPI_CXX_COMPILER="mpicxx.$1" >/dev/null
  cmake --build "build/mpi-$1" --target halfbyte_mpi
}

# test_mpi LIBRARY LAUNCHER [CLUSTER [ARGUMENT...]]: its tests, with the cluster of tests/mpi/cluster.sh, where this machine allows one.
# A TMPDIR of its own: all runs of Open MPI share a directory there, and a run that ends removes it while another makes
# its own in it.
test_mpi() {
  local library=$1 launcher=$2 cluster=() code=0 directory
  directory=$(mktemp -d -p "$work")
  if [[ ${3-} ]]; then cluster=(tests/mpi/cluster.sh "$3"); fi
  TMPDIR=$directory HALFBYTE_MPI=$PWD/build/mpi-$library/libhalfbyte_mpi.so HALFBYTE_MPIRUN=$launcher "${cluster[@]}" \
    "$venv/bin/python" -m pytest -q -p no:cacheprovider tests/mpi "${@:4}" || code=$?
  ((code == 0 || (code == 77 && ${#cluster[@]})))
}

# find_in_toolkit GIVEN NAME WHEEL_NAME: GIVEN, or the path of NAME in a CUDA toolkit, or of WHEEL_NAME in a wheel.
find_in_toolkit() {
  local path
  for path in "$1" "${CUDA_HOME:-/usr/local/cuda}/$2" "$venv"/lib/python*/site-packages/nvidia/*/$3; do
    if [[ -f $path ]]; then
      echo "$path"
      return
    fi
  done
}

# The Python of tests/interop and tests/pytorch, with the readers: that of $HALFBYTE_READERS, or one in the cache, whose name goes by
# what it has. 3 GB are loaded where the builds of torch for CPUs cannot be reached, a tenth of it otherwise.
make_readers() {
  readers=${HALFBYTE_READERS:-}
  if [[ -n $readers ]]; then return; fi
  local wanted=tests/interop/requirements.txt builds=https://download.pytorch.org/whl/cpu index=() folder
  folder=${XDG_CACHE_HOME:-$HOME/.cache}/halfbyte/readers-$(sha256sum $wanted | cut -c1-12)
  readers=$folder/bin/python
  if [[ -e $folder/complete ]]; then return; fi
  if python3 -c "import urllib.request; urllib.request.urlopen('$builds/torch/', timeout=10)" 2>/dev/null; then
    index=(--extra-index-url "$builds")
  fi
  say "Python environment: $folder"
  python3 -m venv --clear "$folder"
  "$folder/bin/pip" install -q "${index[@]}" -r $wanted
  touch "$folder/complete"
}

# run_readers ARGUMENT...: pytest with the readers, in as many processes as there are CPUs, each of one thread.
run_readers() { OMP_NUM_THREADS=1 "$readers" -m pytest -q -p no:cacheprovider -n "$(nproc)" "$@"; }

# part COUNT: of the lines that it reads, those that the seed chooses, or all with --full.
part() {
  if ((full)); then
    cat
  else
    python3 -c 'import random, sys; lines = sys.stdin.readlines(); random.Random(sys.argv[1]).shuffle(lines)
sys.stdout.writelines(lines[:int(sys.argv[2])])' "$seed" "$1"
  fi
}

# changed_units: of the units that it reads, those of the last commits, and those that include a header of these.
changed_units() {
  local changed units
  changed=$(git log -5 --first-parent -m --name-only --format= -- src cli include 2>/dev/null | sort -u) || true
  units=$(cat)
  grep -Fx "$changed" <<<"$units" || true
  grep '\.h' <<<"$changed" | sed -E 's,^(src|cli|include)/(.*),#include "\2",' >"$work/includes" || true
  xargs grep -lFf "$work/includes" <<<"$units" || true
}

# clang-tidy over one unit; a Highway unit for one target, since the others come of the same lines.
lint_unit() {
  clang-tidy-14 -quiet -p build/lint --extra-arg=-Wno-unknown-warning-option \
    --extra-arg=-UHWY_COMPILE_ALL_ATTAINABLE --extra-arg=-DHWY_COMPILE_ONLY_STATIC "$1" 2>/dev/null && echo "clean: $1"
}

# lint_kernel SOURCE FOLDER: the same over a kernel, with the halfbyte_config.h in the folder, as CUDA for sm_90a: clang 14
# knows sm_86 at most, but does not read what is in asm. Left out is what asm misleads: it changes variables of loops, and
# lists of operands are macros; and arguments without a value, since a lambda that ignores one may be given one.
lint_kernel() {
  clang-tidy-14 -quiet \
    --checks=-bugprone-infinite-loop,-bugprone-macro-parentheses,-clang-analyzer-core.CallAndMessage "$1" -- \
    -x cuda --cuda-device-only --cuda-gpu-arch=sm_86 -nocudainc -nocudalib -std=c++20 \
    -Wno-unknown-cuda-version -Wno-builtin-macro-redefined \
    -U__CUDA_ARCH__ -D__CUDA_ARCH__=900 -D__CUDA_ARCH_FEAT_SM90_ALL -D__CUDACC__ \
    -include tools/nvrtc_prelude.h -Isrc -I"$2" 2>/dev/null && echo "clean: $1"
}

# run_sanitizer PRESET WITHOUT PATH...: without targets of Highway, the tests of the units there and a part of the others.
run_sanitizer() {
  local preset=$1 without=$2 chosen
  shift 2
  say "preset $preset${without:+, without $without}"
  choose_units "$@" -- src
  cmake --preset "$preset" -DHALFBYTE_TEST_UNITS="$units" -DHALFBYTE_WITHOUT_TARGETS="$without" >/dev/null
  cmake --build --preset "$preset" --target halfbyte_tests
  "build/$preset/halfbyte_tests" --gtest_list_tests | name_tests >"$work/all"
  tests_of "$@" <"$work/all" >"$work/always"
  { cat "$work/always" && grep -vFxf "$work/always" "$work/all" | part 60; } >"$work/chosen"
  mapfile -t chosen <"$work/chosen"
  run_tests "build/$preset/halfbyte_tests" "${chosen[@]}"
}

# choose_units PATH... -- PATH...: sets units, for HALFBYTE_TEST_UNITS: the units of tests in the first, and a part of the others.
choose_units() {
  local always=()
  while [[ $1 != -- ]]; do always+=("$1") && shift; done
  { find "${always[@]}" -name '*_test.cc' && find "${@:2}" -name '*_test.cc' | sort | part 12; } >"$work/test_units"
  units=$(sed 's,^tests/,^,' "$work/test_units" | paste -sd '|')
}

# name_tests: Suite.test, a line each, of the list of GoogleTest that it reads.
name_tests() { awk '/^[^ ]/ { suite = $1 } /^ / { print suite $1 }'; }

# tests_of PATH...: of the tests that it reads, those that the units there define.
tests_of() {
  find "$@" -name '*_test.cc' -print0 | xargs -0 grep -hoE '^TEST(_F|_P)?\(\w+' | sed 's/.*(//' >"$work/suites"
  awk -F. 'NR == FNR { suites[$1]; next } $1 in suites' "$work/suites" -
}

# What programs for ARM are linked with, in build/arm-root: Debian's packages, for which this machine needs no other
# architecture.
make_arm_root() {
  local root=$PWD/build/arm-root apt
  if [[ -e $root/complete ]]; then return; fi
  say "Libraries of ARM: $root"
  apt=$work/apt
  rm -rf "$root"
  mkdir -p "$root" "$apt"/{state/lists,cache/archives}/partial
  : >"$apt/status"
  cat >"$apt/apt.conf" <<EOF
Dir::State "$apt/state";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
APT::Architecture "arm64";
APT::Architectures "arm64";
APT::Sandbox::User "";
EOF
  APT_CONFIG=$apt/apt.conf apt-get -q update
  APT_CONFIG=$apt/apt.conf apt-get -q install -y --no-install-recommends --download-only libhwy-dev libtbb-dev libfmt-dev \
    libcli11-dev nlohmann-json3-dev libxxhash-dev libgtest-dev
  find "$apt/cache/archives" -name '*.deb' -exec dpkg -x '{}' "$root" ';'
  touch "$root/complete"
}

# run_tests PROGRAM TEST...: as many processes as there are CPUs share them.
run_tests() {
  local program=$1 shards i failed=0 pids=()
  shards=$(nproc)
  shift
  echo "$# tests"
  for ((i = 0; i < shards; ++i)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i "$program" --gtest_brief=1 --gtest_filter="$(IFS=: && echo "$*")" &
    pids+=($!)
  done
  for i in "${pids[@]}"; do wait "$i" || failed=1; done
  return $failed
}

# ---- One after the other

stages() { sed -nE 's/^stage_([a-z]+)\(\) \{  # (.*)/\1 \2/p' scripts/check.sh; }
while (($#)); do
  case $1 in
    --full) full=1 ;;
    --seed) seed=$2 && shift ;;
    --list)
      stages | while read -r name what; do printf '%-12s %s\n' "$name" "$what"; done
      exit
      ;;
    -*)
      sed -n '2,10s/^# \{0,1\}//p' scripts/check.sh >&2
      exit 2
      ;;
    *)
      [[ $(type -t "stage_$1") == function ]] || { echo "No stage is named $1: scripts/check.sh --list" >&2 && exit 2; }
      chosen+=("$1")
      ;;
  esac
  shift
done
((${#chosen[@]})) || read -r -d '' -a chosen < <(stages | cut -d' ' -f1) || true

cpu_seconds() {  # sets cpu: what the children of this shell have taken so far
  times >"$work/times"
  cpu=$(tail -n 1 "$work/times" | sed 's/[ms]/ /g' | awk '{ printf "%d", 60 * ($1 + $3) + $2 + $4 }')
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p build/check
export -f lint_unit lint_kernel
echo "Seed $seed (--seed $seed chooses the same again); full: $full"
table=() logs=() failures=() failed=0
for stage in "${chosen[@]}"; do
  say "$stage"
  log=build/check/$stage.log start=$SECONDS
  cpu_seconds && cpu_start=$cpu
  set +e  # a stage stops at its first failure, this loop does not
  (set -e; "stage_$stage") </dev/null 2>&1 | tee "$log"
  code=${PIPESTATUS[0]}
  set -e
  logs+=("$log")
  result=pass
  if ((code != 0)); then result="FAIL" failed=1 failures+=("$log"); fi
  cpu_seconds
  table+=("$(printf '%-12s %-5s %5d s, %5d s of CPU' "$stage" "$result" $((SECONDS - start)) $((cpu - cpu_start)))")
  echo "${table[-1]}"
done

for log in "${failures[@]}"; do  # again, where they are found
  say "The end of $log"
  tail -n 40 "$log"
done
say "Summary"
printf '%s\n' "${table[@]}"
count_tests "${logs[@]}"
exit $failed
