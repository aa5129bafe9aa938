#!/usr/bin/env bash
# What needs a GPU, from programs that were built elsewhere: correctness, compute-sanitizer, time, peers.
#   scripts/gpu_check.sh --bundle [BUILD [PYTHON]]
#       lays out what that takes in build/gpu, from a build directory (build/release); with the module of the Python package,
#       if a Python of 3.12 or later is named that has nanobind: it serves these all. Otherwise section python compiles one.
#   scripts/gpu_check.sh [--from DIR] [--out DIR] [first|second|SECTION...]
#       runs the sections named, or a half of them, or all, with the programs in DIR (HALFBYTE_BUILD, else
#       build/gpu), goes on after a failure, ends with a table; exit code 1 if a section failed. Each half ends within ten
#       minutes. Logs and JSON go to --out (build/gpu_check). Python packages that the machine lacks (bitsandbytes,
#       compressed-tensors) are taken from .whl, where `pip install --target .whl` can put them. Kernels are kept in HALFBYTE_CACHE_DIR, if it is set.
# The first half: tests1 exhaustive sanitize engine interop. The second: tests2 peer latency bench qgemm. tests1 and tests2 share
# the tests. Only where they are named: tests, all at once; qgemm_tests, those about products with quantized weights; python,
# the tests of the Python package, those of halfbyte.torch too; devices, which fails calls of the driver; layers, which times its linear layers beside dense ones and those of
# bitsandbytes; model, which decodes with and trains a model of 8 B weights, beside dense and bitsandbytes; cliffs, which times products at many M and odd shapes; experts, which times those with the weights of experts
# beside torch's grouped_mm; experts_int4 and experts_skewed, the same in int4 and with experts that are chosen unevenly; parallel, which takes several devices: sums over them, and layers cut among them; packs, which compiles every kernel, some minutes of all CPUs, and
# runs the tests with these and without NVRTC.
source "$(dirname "$0")/lib.sh"

bundle() {
  local build=$1 python=$2 to=build/gpu
  rm -rf "$to"
  cmake --install "$build" --prefix "$to" >/dev/null
  cmake --install "$build" --prefix "$to" --component bundle >/dev/null
  cmake -S examples -B "$build/examples/gpu" -DCMAKE_PREFIX_PATH="$PWD/$to" -DCMAKE_BUILD_RPATH="\$ORIGIN/../lib" >/dev/null
  cmake --build "$build/examples/gpu" --target llama
  cp "$build/examples/gpu/llama" "$to/bin"
  if [[ $python ]]; then
    cmake -S python -B "$build/abi3" -DCMAKE_PREFIX_PATH="$PWD/$to" -DHALFBYTE_PYTHON="$(command -v "$python")" >/dev/null
    cmake --build "$build/abi3" -j "$(nproc)"
    cmake --install "$build/abi3" --prefix "$to/python" --component python >/dev/null
    ln -s ../../lib ../../bin "$to/python/halfbyte"
  fi
  rm -rf "$to"/lib/pkgconfig
  cmake --build "$build" --target halfbyte_cuda_tests driver_proxy
  cp "$build"/halfbyte_cuda_tests "$to/bin"
  cp "$build"/tests/libdriver_proxy.so "$to/lib"
  strip "$to"/bin/*
  du -sh "$to"
}

from=${HALFBYTE_BUILD:-build/gpu} out=build/gpu_check
chosen=()
while (($#)); do
  case $1 in
    --bundle)
      bundle "${2:-build/release}" "${3-}"
      exit
      ;;
    --from) from=$2 && shift ;;
    --out) out=$2 && shift ;;
    -*)
      sed -n '2,16s/^# \{0,1\}//p' "$0" >&2
      exit 2
      ;;
    *) chosen+=("$1") ;;
  esac
  shift
done
((${#chosen[@]})) || chosen=(first second)

from=$(realpath "$from")
tests=$from/bin/halfbyte_cuda_tests
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HALFBYTE_CLI=$from/bin/halfbyte HALFBYTE_LLAMA=$from/bin/llama HALFBYTE_CACHE_DIR=${HALFBYTE_CACHE_DIR:-$work/cache} HALFBYTE_REQUIRE_CUDA=1
export PYTHONPATH=$PWD/.whl${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export PATH=$PATH:/usr/local/cuda/bin

# ---- Sections: each prints what it finds; exit code 77: skipped

# run_tests FILTER [HALF]: processes share the tests, since NVRTC compiles one kernel at a time in each. HALF, 1 or 2: only
# those of one half of the processes.
run_tests() {
  local shards=$((($(nproc) - 1) | 1)) first=0 last total i failed=0 passed=0 pids=()  # odd, so that no shard gets all of one dtype
  last=$shards total=$shards
  if [[ ${2-} ]]; then total=$((2 * shards + 1)); fi
  if [[ ${2-} == 2 ]]; then first=$shards last=$total; fi
  for ((i = first; i < last; ++i)); do
    GTEST_TOTAL_SHARDS=$total GTEST_SHARD_INDEX=$i "$tests" --gtest_brief=1 --gtest_filter="$1" >"$work/shard$i" 2>&1 &
    pids+=($!)
  done
  for ((i = first; i < last; ++i)); do
    wait "${pids[i - first]}" || failed=1
    grep -v '^Running main' "$work/shard$i"
    passed=$((passed + $(sed -n 's/^\[  PASSED  \] \([0-9]*\) tests\?\.$/\1/p' "$work/shard$i")))
  done
  echo "$passed tests passed"
  ((passed && !failed))
}
section_tests() { run_tests '-Exhaustive*:DeviceMemory.*'; }
section_tests1() { run_tests '-Exhaustive*:DeviceMemory.*' 1; }
section_tests2() { run_tests '-Exhaustive*:DeviceMemory.*' 2; }
section_qgemm_tests() { run_tests '*Qgemm*:*Reorder*-Exhaustive*:Sanitize*'; }
section_exhaustive() { "$tests" --gtest_filter='Exhaustive*:DeviceMemory.*'; }
# Without what needs NVRTC by itself, and what uses lut4, whose kernels are in no pack.
section_packs() {
  local target
  target=$("$HALFBYTE_CLI" doctor | sed -n 's/^cuda:0 .*(\(sm_[0-9a-z]*\)).*/\1/p')
  "$HALFBYTE_CLI" precompile --arch "$target" -o "$work/kernels.hbk" || return 1
  export HALFBYTE_NVRTC=/nonexistent HALFBYTE_KERNEL_PACK=$work/kernels.hbk HALFBYTE_CACHE_DIR=
  "$HALFBYTE_CLI" doctor
  run_tests "-Exhaustive*:DeviceMemory.*:DeviceHeadersCuda.*:PlainKernels.*:Tables.*:*lut4*:$(
  )Quantize.GroupsLargerThanABlockAndWholeTensors:Quantize.AGivenRangeIsThatOfTheTensor"
}
# racecheck, which takes longest, in several processes on all devices; its reports are compared with a list: what is not explained there is a
# failure.
section_sanitize() {
  command -v compute-sanitizer || { echo "no compute-sanitizer on PATH" && return 1; }
  export HALFBYTE_LINE_INFO=1
  run_tests 'Sanitize*' || return 1  # fills the cache of kernels
  local tool pid i shards=$(($(nproc) > 4 ? $(nproc) - 3 : 1)) failed=0 pids=()
  local devices=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader)}
  read -ra devices -d '' <<<"${devices//,/ }" || true
  local options=(--print-limit 0 --show-backtrace no) tests_of=("$tests" "--gtest_filter=Sanitize*")
  for tool in memcheck initcheck; do
    compute-sanitizer --tool "$tool" "${options[@]}" --error-exitcode 9 "${tests_of[@]}" --gtest_brief=1 >"$out/$tool.log" 2>&1 &
    pids+=($!)
  done
  rm -f "$out"/race[0-9]*
  for ((i = 0; i < shards; ++i)); do
    GTEST_TOTAL_SHARDS=$shards GTEST_SHARD_INDEX=$i CUDA_VISIBLE_DEVICES=${devices[i % ${#devices[@]}]} \
      compute-sanitizer --tool racecheck --racecheck-report hazard "${options[@]}" "${tests_of[@]}" >"$out/race$i" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  cat "$out"/race[0-9]* >"$out/racecheck.log"
  for tool in memcheck initcheck; do
    echo "-- $tool"
    grep -q '^========= ERROR SUMMARY: 0 errors' "$out/$tool.log" || { head -n 60 "$out/$tool.log" && failed=1; }
    tail -n 4 "$out/$tool.log"
    grep -A 12 ' Failure$' "$out/$tool.log" | grep -v '^=========' | head -n 40
  done
  echo "-- racecheck"
  python3 scripts/racecheck.py "$out/racecheck.log" --print-entries || failed=1
  grep -v '^=========' "$out/racecheck.log" | grep -vE '^(Running main|\[([=-]*|  PASSED  | RUN      |       OK )\]|Note:|$)' | head -n 20
  return $failed
}
section_engine() {
  python3 -m pytest -q -p no:cacheprovider tests/device_engine_test.py && python3 -m pytest -q -p no:cacheprovider tests/llama_test.py -k cuda
}
# The package: of the bundle, or compiled here.
use_package() {
  local package=$from/python
  if [[ ! -d $package ]]; then
    package=$work/module
    cmake -S python -B "$package" -DCMAKE_PREFIX_PATH="$from" -DHALFBYTE_PYTHON="$(command -v python3)" || return 1
    cmake --build "$package" -j "$(nproc)" || return 1
  fi
  export PYTHONPATH=$package:$PYTHONPATH
}
section_python() {
  use_package || return 1
  local workers=()
  if python3 -c 'import xdist' 2>/dev/null; then workers=(-n 8); fi
  local suite failed=0  # apart, as both have files of one name
  for suite in tests/python tests/pytorch; do
    python3 -m pytest -q -p no:cacheprovider "${workers[@]}" "$suite" || failed=1
  done
  return $failed
}
section_devices() {
  HALFBYTE_BUILD=$from HALFBYTE_CAMPAIGN=$work/campaign HALFBYTE_PROXY=$from/lib/libdriver_proxy.so HALFBYTE_PROXY_DRIVER=libcuda.so.1 \
    PYTHONPATH=tests:$PYTHONPATH python3 -m campaign --quick devices
}
section_layers() {
  use_package || return 1
  python3 bench/peer_linear.py | tee "$out/layers.json" && python3 bench/python_overhead.py | tee -a "$out/layers.json"
}
section_model() {
  use_package || return 1
  python3 bench/peer_model.py | tee "$out/model.json"
}
# What needs two devices or more.
section_parallel() {
  use_package || return 1
  local failed=0
  "$tests" --gtest_filter='AllReduceCuda*' || failed=1
  python3 -m pytest -q -p no:cacheprovider tests/pytorch/parallel_test.py tests/pytorch/distributed_test.py || failed=1
  python3 -m pytest -q -p no:cacheprovider tests/llama_test.py -k cuda_devices || failed=1
  "$HALFBYTE_CLI" bench tensor_parallel --device cuda:all --json "$out/parallel.json" --force || failed=1
  return $failed
}
section_interop() { python3 tests/interop/transformers_check.py; }
section_peer() {
  local peer code result=77
  : >"$out/peer.json"
  for peer in torch bitsandbytes qgemm; do
    code=0
    python3 "bench/peer_$peer.py" | tee -a "$out/peer.json" || code=$?
    ((code == 0 && result == 77)) && result=0
    ((code == 0 || code == 77)) || result=$code
  done
  return $result
}
# With an empty cache of kernels, then in a new process with a full one.
section_latency() {
  export HALFBYTE_CACHE_DIR=$work/fresh
  local failed=0
  "$HALFBYTE_CLI" bench latency --limit-ms 500 --json "$out/latency_compiled.json" --force || failed=1
  "$HALFBYTE_CLI" bench latency --limit-ms 20 --json "$out/latency_loaded.json" --force || failed=1
  return $failed
}
# Lines as they come, so that a time limit loses none; docs/benchmarks.md and docs/qgemm.md say what they are.
section_bench() {
  local op
  for op in $("$HALFBYTE_CLI" bench --list | awk '{ print $1 }'); do  # side by side: to compile, not to measure
    case $op in all | qgemm | latency | memory | checkpoint) ;; *) "$HALFBYTE_CLI" bench "$op" --quick >/dev/null 2>&1 & ;; esac
  done
  wait
  "$HALFBYTE_CLI" bench memory && "$HALFBYTE_CLI" bench all --json "$out/bench.json" --force
}
section_qgemm() {
  "$HALFBYTE_CLI" bench qgemm --dtype bf16 --format nf4,int4 --m 1,2,4,8,16,32,64 --json "$out/qgemm.json" --force
}
section_cliffs() { "$HALFBYTE_CLI" bench qgemm --cliffs --json "$out/cliffs.json" --force; }
# bench_experts OPTION...: each case, one after the other.
bench_experts() {
  local case experts top_k shape
  for case in "128 8 1536x2048" "128 8 2048x768" "128 8 4096x2688" "128 8 2688x2048" "8 2 28672x4096" "8 2 4096x14336" \
    "256 8 512x7168" "256 8 7168x256"; do
    read -r experts top_k shape <<<"$case"
    "$HALFBYTE_CLI" bench qgemm --quick --dtype bf16 --experts "$experts" --top-k "$top_k" --shape "$shape" --force "$@" \
      --json "$out/${FUNCNAME[1]#section_}_${experts}_$shape.json" || return 1
  done
}
section_experts() {
  bench_experts --format nf4 || return 1
  # What makes rows of y of several sums.
  local rest=(--format nf4 --dtype bf16 --experts 128 --top-k 8 --direction forward --quick --force)
  "$HALFBYTE_CLI" bench qgemm "${rest[@]}" --shape 1536x2048 --y swiglu --json "$out/experts_swiglu.json" || return 1
  "$HALFBYTE_CLI" bench qgemm "${rest[@]}" --shape 2048x768 --y sum --json "$out/experts_sum.json" || return 1
  # q, k and v, a launch for each or one.
  "$HALFBYTE_CLI" bench qgemm --quick --format nf4,int4 --dtype bf16 --direction forward --shape 4096x4096,12288x4096 --m 1 --force \
    --json "$out/experts_qkv.json" || return 1
  python3 bench/peer_grouped.py | tee "$out/peer_grouped.json"
}
section_experts_int4() { bench_experts --format int4; }
section_experts_skewed() { bench_experts --format nf4 --skew 1; }

# ---- Their order, time limits and logs

declare -A halves=([first]="tests1 exhaustive sanitize engine interop" [second]="tests2 peer latency bench qgemm")
# Each has room; a half has less than their sum. A kernel that hangs must not hold a GPU for ever.
declare -A limits=([tests]=540 [tests1]=300 [tests2]=300 [packs]=540 [exhaustive]=240 [sanitize]=360 [engine]=150 [interop]=100 [peer]=150
  [latency]=60 [bench]=330 [qgemm]=150 [cliffs]=240 [experts]=300 [experts_int4]=300 [experts_skewed]=300 [qgemm_tests]=240 [python]=480 [devices]=240 [layers]=150 [model]=240 [parallel]=360)
declare -A logs=([tests]=tests [tests1]=tests [tests2]=tests [packs]=packs [exhaustive]=tests [sanitize]=sanitize [engine]=tests
  [interop]=interop [peer]=interop [latency]=bench [bench]=bench [qgemm]=qgemm [cliffs]=qgemm [experts]=qgemm [experts_int4]=qgemm [experts_skewed]=qgemm [qgemm_tests]=tests [python]=python [devices]=tests [layers]=bench [model]=bench [parallel]=bench)
sections=()
allowed=570
for name in "${chosen[@]}"; do
  [[ -v limits[$name] || -v halves[$name] ]] || { echo "No section is named $name" >&2 && exit 2; }
  [[ $name == second && ${chosen[0]} == first ]] && allowed=1140
  read -ra some <<<"${halves[$name]-$name}"
  sections+=("${some[@]}")
done
readonly deadline=$((SECONDS + allowed))

say "Device"
"$HALFBYTE_CLI" doctor
rm -f "$out"/{tests,packs,sanitize,memcheck,initcheck,racecheck,interop,bench,qgemm,python}.log "$out"/{peer,latency_compiled,latency_loaded,bench,qgemm,cliffs,layers}.json "$out"/summary.txt
table=() failed=0
export -f run_tests use_package bench_experts $(compgen -A function section_)
export tests from out work
for section in "${sections[@]}"; do
  say "$section"
  limit=$((deadline - SECONDS < limits[$section] ? deadline - SECONDS : limits[$section]))
  start=$SECONDS code=0 log=$work/log
  if ((limit < 10)); then
    echo "no time is left" >"$log" && code=124
  else
    timeout --kill-after=5 "$limit" bash -o pipefail -c "section_$section" >"$log" 2>&1 || code=$?
  fi
  case $code in
    0) result=pass ;;
    77) result=skipped ;;
    124 | 137) result="TIMEOUT" && failed=1 ;;
    *) result="FAIL ($code)" && failed=1 ;;
  esac
  { echo "==== $section: $result" && cat "$log"; } >>"$out/${logs[$section]}.log"
  if [[ $section =~ ^(bench|latency|peer|qgemm|cliffs|experts.*|layers|parallel)$ ]]; then
    cat "$log"
  elif ((code == 0)); then
    tail -n 6 "$log" | cut -c1-300
  else
    { head -n 40 "$log" && echo ... && tail -n 15 "$log"; } | cut -c1-300
  fi
  table+=("$(printf '%-14s %-10s %4d s' "$section" "$result" $((SECONDS - start)))")
done

say "Summary"
printf '%s\n' "${table[@]}" | tee "$out/summary.txt"
exit $failed
