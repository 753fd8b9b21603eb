#!/bin/sh
# Static analysis. C: gcc's -fanalyzer, clang-tidy (.clang-tidy lists the checks, with reasons) and cppcheck. Python: ruff, mypy, stubtest
# (whether the stubs of the C modules are right) and vulture (dead code).
# Prints the time of each; exit code 1 if one of them reports anything. Usage: sh tests/sanitize/analyze.sh [C file]
set -u
cd "$(dirname "$0")/../.."
. tests/sanitize/file_flags.sh
python=${PYTHON:-.venv/bin/python}
bin=$(dirname "$python")

c_file() { # both compilers' analyzers on one file
    file=$1
    simd=$(file_flags "$(uname -m)" "$file") || return 0 # neither compiler has the headers of another machine
    # gcc 12 does not track a vector's elements that are set one by one, or a pointer that is stored in a struct from an argument
    # (vector_grow). The sanitizers check both; libFuzzer and test_nothing_leaks check for leaks.
    case $file in
    csrc/nvfp4/kq_*) known=-Wno-analyzer-use-of-uninitialized-value ;;
    csrc/stream/*) known=-Wno-analyzer-malloc-leak ;;
    *) known= ;;
    esac
    headers="-isystem $("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')"
    case $file in csrc/gemm/*) headers="$headers -DANNIE_QUANT_ARCHS=\"90\"" ;; esac # setup.py defines it
    flags="-std=c11 -pthread -Wall -Wextra -Icsrc $headers"
    tidy=$(command -v clang-tidy || command -v clang-tidy-14)
    # With the unrolled lanes of the sweep it does not end (8 minutes, 8 GB): only clang's analyzer is used.
    case $file in
    csrc/nvfp4/variant_*) known=-fno-analyzer ;;
    esac
    reports=$(gcc -O0 -fanalyzer $known $flags $simd -c "$file" -o /dev/null 2>&1
        "$tidy" --quiet --warnings-as-errors='*' "$file" -- $flags -Wno-unknown-pragmas -O2 $simd 2>/dev/null)
    [ -z "$reports" ] || { echo "$reports"; return 1; }
}
[ $# = 0 ] || { c_file "$1"; exit; }

bad=0
step() { # name, command
    name=$1 start=$(date +%s)
    shift
    "$@" && outcome="no reports" || { outcome="SEE ABOVE"; bad=1; }
    echo "$name: $outcome, $(($(date +%s) - start)) s"
}
c_files() {
    ls csrc/nvfp4/*.c csrc/stream/*.c csrc/gemm/*.c | PYTHON=$python xargs -P "$(nproc)" -n 1 sh tests/sanitize/analyze.sh
}
dead_code() { # --ignore-names: parameters that a protocol requires
    [ -d build/vulture ] || "$python" -m pip install -q --no-deps --target build/vulture vulture==2.14 || return 1
    PYTHONPATH=build/vulture "$python" -m vulture annie_quant --min-confidence 80 --ignore-names exc,unused,compute_capability
}
step "gcc -fanalyzer, clang-tidy" c_files
# Style checks such as knownConditionTrueFalse are off; module.c's Py_BEGIN_ALLOW_THREADS is defined in its library file.
step cppcheck cppcheck --quiet -j "$(nproc)" --std=c11 --enable=warning,performance,portability --inline-suppr --library=python \
    --error-exitcode=1 --suppressions-list=tests/sanitize/cppcheck.txt -Icsrc -D__x86_64__ \
    csrc/common csrc/nvfp4 csrc/stream csrc/gemm/module.c
step ruff "$bin/ruff" check --quiet .
step mypy "$bin/mypy"
step stubtest "$bin/stubtest" annie_quant._nvfp4 annie_quant._stream
step vulture dead_code
exit $bad
