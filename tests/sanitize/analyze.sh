#!/bin/sh
# The C under gcc's -fanalyzer, clang-tidy (.clang-tidy says what is on, and why the rest is off) and cppcheck.
# Exits 1 where one of them has something to say. Usage: sh tests/sanitize/analyze.sh
set -u
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
tidy=$(command -v clang-tidy || command -v clang-tidy-14)
headers=$("$python" -c 'import numpy, sysconfig
print("-isystem", sysconfig.get_paths()["include"], "-isystem", numpy.get_include())')
flags="-std=c11 -fopenmp -Wall -Wextra -Icsrc $headers -DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION -DNPY_TARGET_VERSION=NPY_1_25_API_VERSION"
libomp=$(ls -d /usr/lib/llvm-*/lib/clang/*/include 2>/dev/null | tail -1)
bad=0
for file in csrc/common/*.c csrc/nvfp4/*.c csrc/stream/*.c csrc/gemm/*.c; do
    simd=
    case $file in
    *_avx512.c) simd="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c -mbmi2 -mfma" ;;
    *_avx2.c) simd="-mavx2 -mf16c -mbmi2 -mfma" ;;
    *_neon.c) continue ;; # neither compiler has its headers here
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
    said=$(gcc -O0 -fanalyzer $known $flags $simd -c "$file" -o /dev/null 2>&1)
    [ -z "$said" ] || { echo "$said"; bad=1; }
    said=$("$tidy" --quiet --warnings-as-errors='*' "$file" -- $flags -Wno-unknown-pragmas -O2 ${libomp:+-isystem $libomp} $simd 2>/dev/null)
    [ -z "$said" ] || { echo "$said"; bad=1; }
done
# knownConditionTrueFalse and the like are style; module.c's Py_BEGIN_ALLOW_THREADS comes from its library file.
cppcheck --quiet --std=c11 --enable=warning,performance,portability --inline-suppr --library=python --error-exitcode=1 \
    --suppressions-list=tests/sanitize/cppcheck.txt -Icsrc -D__x86_64__ csrc/common csrc/nvfp4 csrc/stream csrc/gemm/module.c || bad=1
exit $bad
