#!/bin/sh
# The C under gcc's -fanalyzer, clang-tidy (.clang-tidy says what is on, and why the rest is off) and cppcheck; the Python under
# ruff, mypy, stubtest (do the stubs of the C modules agree with them?) and vulture (dead code).
# Says how long each took and exits 1 where one of them has something to say. Usage: sh tests/sanitize/analyze.sh [C file]
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
bin=$(dirname "$python")

c_file() { # both compilers' analyzers over one file
    file=$1 simd=
    case $file in
    *_avx512.c) simd="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c -mbmi2 -mfma" ;;
    *_avx2.c) simd="-mavx2 -mf16c -mbmi2 -mfma" ;;
    *_neon.c) return 0 ;; # neither compiler has its headers here
    esac
    # gcc 12 does not follow a vector's elements as they are set one by one, nor a pointer that is kept in a struct that
    # came as an argument (vector_grow); for both there are sanitizers and, for leaks, libFuzzer and test_nothing_leaks.
    case $file in
    csrc/nvfp4/kq_*) known=-Wno-analyzer-use-of-uninitialized-value ;;
    # A connection's socket is known to the client as long as the connection lives: client_socket gives no NULL for it.
    csrc/stream/plain.c) known="-Wno-analyzer-malloc-leak -Wno-analyzer-null-dereference" ;;
    csrc/stream/*) known=-Wno-analyzer-malloc-leak ;;
    *) known= ;;
    esac
    headers="-isystem $("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')"
    case $file in csrc/gemm/*) headers="$headers -DANNIE_QUANT_ARCHS=\"90\"" ;; esac # setup.py gives it
    flags="-std=c11 -fopenmp -Wall -Wextra -Icsrc $headers"
    libomp=$(ls -d /usr/lib/llvm-*/lib/clang/*/include 2>/dev/null | tail -1)
    tidy=$(command -v clang-tidy || command -v clang-tidy-14)
    # Nor does it come to an end (8 minutes, 8 GB) where the sweep's lanes are unrolled: there is clang's analyzer alone.
    case $file in
    csrc/nvfp4/codec_avx*) known=-fno-analyzer ;;
    esac
    said=$(gcc -O0 -fanalyzer $known $flags $simd -c "$file" -o /dev/null 2>&1
        "$tidy" --quiet --warnings-as-errors='*' "$file" -- $flags -Wno-unknown-pragmas -O2 ${libomp:+-isystem $libomp} $simd 2>/dev/null)
    [ -z "$said" ] || { echo "$said"; return 1; }
}
[ $# = 0 ] || { c_file "$1"; exit; }

bad=0
step() { # name, command
    name=$1 start=$(date +%s)
    shift
    "$@" && came="nothing to say" || { came="SEE ABOVE"; bad=1; }
    echo "$name: $came, $(($(date +%s) - start)) s"
}
c_files() {
    ls csrc/common/*.c csrc/nvfp4/*.c csrc/stream/*.c csrc/gemm/*.c | PYTHON=$python xargs -P "$(nproc)" -n 1 sh tests/sanitize/analyze.sh
}
dead_code() { # what --ignore-names names are parameters that a protocol asks for
    [ -d build/vulture ] || "$python" -m pip install -q --no-deps --target build/vulture vulture==2.14 || return 1
    PYTHONPATH=build/vulture "$python" -m vulture annie_quant --min-confidence 80 --ignore-names exc,unused,compute_capability
}
step "gcc -fanalyzer, clang-tidy" c_files
# knownConditionTrueFalse and the like are style; module.c's Py_BEGIN_ALLOW_THREADS comes from its library file.
step cppcheck cppcheck --quiet -j "$(nproc)" --std=c11 --enable=warning,performance,portability --inline-suppr --library=python \
    --error-exitcode=1 --suppressions-list=tests/sanitize/cppcheck.txt -Icsrc -D__x86_64__ \
    csrc/common csrc/nvfp4 csrc/stream csrc/gemm/module.c
step ruff "$bin/ruff" check --quiet .
step mypy "$bin/mypy"
step stubtest "$bin/stubtest" annie_quant._nvfp4 annie_quant._stream
step vulture dead_code
exit $bad
