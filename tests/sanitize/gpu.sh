#!/bin/bash
# The GEMM kernels on a CUDA GPU (written for an H200): build, times compared with tests/perf/gemm.md, all GPU tests, 100,000 products from four
# threads, compute-sanitizer. Needs nvcc 13, torch with CUDA, pytest. About five minutes; each step has a time limit and its own log.
# Usage: bash tests/sanitize/gpu.sh [folder of the logs]    PYTHON: the interpreter, python3 if unset
set -u
cd "$(dirname "$0")/../.."
logs=$(realpath -m "${1:-build/gpu}")
python=${PYTHON:-python3}
mkdir -p "$logs"
export PYTHONPATH=$PWD ANNIE_QUANT_ARCHS=${ANNIE_QUANT_ARCHS:-90a,121a} PYTHONUNBUFFERED=1
failed=""

# step NAME SECONDS COMMAND...
step() {
    name=$1 limit=$2
    shift 2
    begin=$(date +%s)
    timeout "$limit" "$@" > "$logs/$name.txt" 2>&1
    rc=$?
    [ $rc = 0 ] || failed="$failed $name($rc)"
    echo "== $name: exit status $rc, $(($(date +%s) - begin)) s"
    tail -n "${tail:-4}" "$logs/$name.txt"
}

# compile FOLDER FLAGS...: all .cu files at the same time, into the objects that setup.py would make
compile() {
    folder=$1
    shift
    mkdir -p "$folder/csrc/gemm"
    codes=$(for a in ${ANNIE_QUANT_ARCHS//,/ }; do echo "-gencode arch=compute_$a,code=sm_$a"; done)
    export codes
    ls csrc/gemm/*.cu | xargs -P 16 -I{} sh -c "nvcc -O3 -std=c++17 -Xcompiler -fPIC,-fvisibility=hidden -Icsrc \$codes $* -c {} -o $folder/{}.o || exit 255"
}
build() {
    compile build/gpu-temp && ANNIE_QUANT_ONLY=_gemm,_nvfp4 "$python" setup.py -q build_ext --inplace --build-temp build/gpu-temp
}
# A second copy of the package for racecheck: there each lane of a warp releases a pipeline stage, because the tool follows only that one.
build_racecheck() {
    ANNIE_QUANT_ARCHS=90a compile build/race-temp -DAQ_RACECHECK &&
        ANNIE_QUANT_ARCHS=90a ANNIE_QUANT_ONLY=_gemm,_nvfp4 "$python" setup.py -q build_ext --build-lib build/race --build-temp build/race-temp &&
        rm -rf build/race-copy && mkdir build/race-copy && cp -r annie_quant tests pyproject.toml csrc build/race-copy/ &&
        cp build/race/annie_quant/*.so build/race-copy/annie_quant/
}
export -f compile build build_racecheck
export python

(timeout 200 bash -c build_racecheck > "$logs/build_racecheck.txt" 2>&1; echo $? > "$logs/build_racecheck.rc") &
race_build=$!
step build 200 bash -c build
wait $race_build
# Alone on the GPU; the rest can share it.
tail=20 step times 170 "$python" tests/perf/bench_gemm.py --tokens "${TOKENS:-1,8,16,32,64,128,256,1024,4096}" --repeats 10 --output "$logs/times.json" --compare tests/perf/gemm.md

# A few tests of each kernel, the launcher's threads, and the reports.
few="test_every_split or (test_every_shape_of_the_wgmma and 139-4-3) or (test_every_cluster and 61-528-1008) or (test_tiles_of_192 and 61-304-1008-3)"
few="$few or (test_every_shape_of_the_few and 7-5) or test_first_call or reports or underflow or small_workspace or bad_plan or emulated"
check() {
    timeout "$3" compute-sanitizer --tool "$1" --error-exitcode 9 --print-limit 5 "$python" -m pytest -q -x -p no:cacheprovider tests/gemm/test_gpu.py \
        tests/gemm/test_gpu_launch.py -k "$2" > "$logs/$1.txt" 2>&1
    echo $? > "$logs/$1.rc"
}
(check memcheck "$few" 110) &
(
    cd build/race-copy && PYTHONPATH=$PWD check racecheck "(test_every_shape_of_the_wgmma and 7-4-3) or (test_every_cluster and 61-528-880-64) or (test_every_split and 2) or (test_every_shape_of_the_few and 7-5)" 110
) &
step tests 200 "$python" -m pytest -q -rs --maxfail=20 -p no:cacheprovider tests/gemm
step threads 90 "$python" tests/sanitize/threads_gemm.py --products "${PRODUCTS:-100000}"
wait
for tool in memcheck racecheck; do
    rc=$(cat "$logs/$tool.rc")
    [ "$rc" = 0 ] || failed="$failed $tool($rc)"
    echo "== $tool: exit status $rc"
    tail -n 4 "$logs/$tool.txt"
done
echo "failed:${failed:- none}"
[ -z "$failed" ]
