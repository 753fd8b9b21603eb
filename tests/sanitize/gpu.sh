#!/bin/bash
# The GEMM kernels on a CUDA GPU (written for an H200). Needs nvcc 13, torch with CUDA, pytest. Each step has a time limit and its own log.
#
# Usage: [STEPS="build tests"] bash tests/sanitize/gpu.sh [folder of the logs]
#   build       _gemm and _nvfp4
#   times       times of the kernels compared with tests/perf/gemm.md
#   compare     times of this tree and of the one in OTHER in turn (tests/perf/compare_gemm.py, which needs msgspec); that tree is built, too
#   plans       times of all plans for PLAN_CELLS (tests/perf/bench_gemm.py --explore)
#   tests       all of tests/gemm, several processes on the GPU
#   threads     100,000 products from four threads
#   sanitize    compute-sanitizer: memcheck and racecheck over some tests of each kernel, racecheck in another build
# STEPS: build times tests threads sanitize if unset; they run in the order above. OTHER: a tree of another version.
# TOKENS: of times and compare. COMPARE_CELLS: NxK:M,... instead. EXPERT_CELLS: the same of grouped products. Seconds that a step may take: COMPARE_SECONDS,
# PLAN_SECONDS, TESTS_SECONDS; and all steps in the foreground: SECONDS_IN_ALL.
# Each step writes its results while it runs, and a step that fails does not stop the next one. ANNIE_QUANT_ARCHS: 90a,121a if unset. PYTHON: the interpreter, python3 if unset.
set -u
cd "$(dirname "$0")/../.."
logs=$(realpath -m "${1:-build/gpu}")
python=${PYTHON:-python3}
steps=" ${STEPS:-build times tests threads sanitize} "
other=${OTHER:+$(realpath "$OTHER")}
mkdir -p "$logs"
carried=${PYTHONPATH:+:$PYTHONPATH} # packages that this machine lacks
export PYTHONPATH=$PWD$carried ANNIE_QUANT_ARCHS=${ANNIE_QUANT_ARCHS:-90a,121a} PYTHONUNBUFFERED=1
failed="" end=${SECONDS_IN_ALL:+$(($(date +%s) + SECONDS_IN_ALL))}
for s in $steps; do
    case $s in build | times | compare | plans | tests | threads | sanitize) ;; *) echo "STEPS has $s; expected build, times, compare, plans, tests, threads, sanitize" && exit 2 ;; esac
done
chosen() { [[ $steps == *" $1 "* ]]; }
if chosen compare && [ ! -e "$other/setup.py" ]; then
    echo "the step compare needs a tree of another version in OTHER: git archive main | tar x -C DIR" && exit 2
fi

# step NAME SECONDS COMMAND...
step() {
    name=$1 limit=$2
    shift 2
    begin=$(date +%s)
    if [ "$end" ] && [ $((end - begin)) -lt "$limit" ]; then
        limit=$((end - begin))
        [ $limit -ge 5 ] || { echo "== $name: left out, the time is over" && failed="$failed $name(time)" && return; }
    fi
    timeout -s INT -k 5 "$limit" "$@" > "$logs/$name.txt" 2>&1
    rc=$?
    [ $rc = 0 ] || failed="$failed $name($rc)"
    echo "== $name: exit status $rc, $(($(date +%s) - begin)) s"
    tail -n "${tail:-4}" "$logs/$name.txt"
}
# join NAME PID: wait for a step in the background
join() {
    wait "$2"
    rc=$?
    [ $rc = 0 ] || failed="$failed $1($rc)"
    echo "== $1: exit status $rc"
    tail -n 4 "$logs/$1.txt"
}

# build MODULES OPTIONS...: of the tree in the current folder
build() {
    modules=$1
    shift
    PYTHONPATH=$PWD$carried ANNIE_QUANT_ONLY=$modules "$python" setup.py -q build_ext --parallel 16 --build-temp build/gpu-temp "$@"
}
build_other() {
    cd "$other" && compile_for_older_setup && build _gemm --inplace
}
# An older setup.py compiles one .cu file after the other: all at the same time, into its objects.
compile_for_older_setup() {
    grep -q self.parallel setup.py && return
    mkdir -p build/gpu-temp/csrc/gemm
    codes=$(for a in ${ANNIE_QUANT_ARCHS//,/ }; do echo "-gencode arch=compute_$a,code=sm_$a"; done)
    export codes
    ls csrc/gemm/*.cu | xargs -P 16 -I{} sh -c "nvcc -O3 -std=c++17 -Xcompiler -fPIC,-fvisibility=hidden -Icsrc \$codes -c {} -o build/gpu-temp/{}.o || exit 255"
}
# A second copy of the package for racecheck: there each lane of a warp releases a pipeline stage, because the tool follows only that one.
build_racecheck() {
    NVCC_APPEND_FLAGS=-DAQ_RACECHECK ANNIE_QUANT_ARCHS=90a build _gemm,_nvfp4 --build-lib build/race --build-temp build/race-temp &&
        rm -rf build/race-copy && mkdir build/race-copy && cp -r annie_quant tests pyproject.toml csrc build/race-copy/ &&
        cp build/race/annie_quant/*.so build/race-copy/annie_quant/
}
export -f compile_for_older_setup build build_other build_racecheck
export python other carried

race_build="" other_build=""
if chosen sanitize; then
    timeout 200 bash -c build_racecheck > "$logs/build_racecheck.txt" 2>&1 &
    race_build=$!
fi
if chosen compare; then
    timeout 200 bash -c build_other > "$logs/build_other.txt" 2>&1 &
    other_build=$!
fi
chosen build && step build 200 bash -c "build _gemm,_nvfp4 --inplace"
[ "$race_build" ] && join build_racecheck $race_build
[ "$other_build" ] && join build_other $other_build
# Alone on the GPU; the rest can share it.
chosen times && tail=20 step times 170 "$python" tests/perf/bench_gemm.py --tokens "${TOKENS:-1,8,16,32,64,128,256,1024,4096}" --repeats 10 --output "$logs/times.json" --compare tests/perf/gemm.md
chosen compare && tail=80 step compare "${COMPARE_SECONDS:-170}" "$python" tests/perf/compare_gemm.py "$other" --tokens "${TOKENS:-1,256,4096}" --cells "${COMPARE_CELLS:-}" --output "$logs/compare.json"
chosen compare && tail=40 step experts 60 "$python" tests/perf/compare_gemm.py "$other" --experts "${EXPERT_CELLS:-1024x2048:1,1024x2048:4,1024x2048:32,2048x512:1,2048x512:4,2048x512:32}" --output "$logs/experts.json"
chosen plans && tail=80 step plans "${PLAN_SECONDS:-120}" "$python" tests/perf/bench_gemm.py --explore --repeats 10 --cells "${PLAN_CELLS:-17408x5120:64,4096x12288:64}" --seconds "${PLAN_SECONDS:-120}" --output "$logs/plans.json"

# A few tests of each kernel, the launcher's threads, and the reports.
few="test_every_split or (test_every_shape_of_the_wgmma and 139-4-3) or (test_every_cluster and 61-528-1008) or (test_tiles_of_192 and 61-304-1008-3)"
few="$few or (test_every_shape_of_the_few and 7-5) or test_first_call or reports or underflow or small_workspace or bad_plan or emulated"
few="$few or (test_sums_in_the_launch and 7-5-6)"
few_experts="test_each_pair and 528 and 2-8-dtype0"
# check TOOL LOG TESTS FILES...
check() {
    tool=$1 log=$2 tests=$3
    shift 3
    timeout 110 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 5 "$python" -m pytest -q -x -p no:cacheprovider "$@" -k "$tests" > "$logs/$log.txt" 2>&1
}
# Many processes: most of the time is the oracle's, on the CPU. With pytest-xdist each result is printed when it is known.
all_tests() {
    files=$(ls tests/gemm/test_*.py)
    if ! "$python" -c "import msgspec" 2> /dev/null; then
        echo "left out: tests/gemm/test_stack_*.py, because msgspec is not installed here, which the checkpoint package needs"
        files=$(echo "$files" | grep -v test_stack_)
    fi
    export OMP_NUM_THREADS=2 OPENBLAS_NUM_THREADS=2
    if "$python" -c "import xdist" 2> /dev/null; then
        exec "$python" -m pytest -v -rs -n 12 --maxfail=20 -p no:cacheprovider $files
    fi
    echo "$files" | xargs -P 8 -n 1 "$python" -m pytest -q -rs --maxfail=20 -p no:cacheprovider
}
export -f all_tests
export logs

checks=""
if chosen sanitize; then
    products="tests/gemm/test_gpu.py tests/gemm/test_gpu_launch.py"
    check memcheck memcheck "$few" $products &
    checks="memcheck $!"
    check memcheck memcheck_experts "$few_experts" tests/gemm/test_grouped_gpu.py &
    checks="$checks memcheck_experts $!"
    few="(test_every_shape_of_the_wgmma and 7-4-3) or (test_every_cluster and 61-528-880-64) or (test_every_split and 2) or (test_every_shape_of_the_few and 7-5)"
    few="$few or (test_sums_in_the_launch and 7-5-6)"
    (cd build/race-copy && PYTHONPATH=$PWD$carried check racecheck racecheck "$few" $products) &
    checks="$checks racecheck $!"
    (cd build/race-copy && PYTHONPATH=$PWD$carried check racecheck racecheck_experts "$few_experts" tests/gemm/test_grouped_gpu.py) &
    checks="$checks racecheck_experts $!"
fi
if chosen tests; then
    tail=0 step tests "${TESTS_SECONDS:-200}" bash -c all_tests
    grep -E "^left out|^FAILED|^ERROR|^=.*(passed|failed|skipped)|^[0-9]+ (passed|failed|skipped)|error" "$logs/tests.txt" | tail -n 60
fi
chosen threads && step threads 90 "$python" tests/sanitize/threads_gemm.py --products "${PRODUCTS:-100000}"
set -- $checks
while [ $# != 0 ]; do
    join "$1" "$2"
    shift 2
done
echo "failed:${failed:- none}"
[ -z "$failed" ]
