#!/bin/sh
# The codec and the client under ThreadSanitizer, without Python: tests/sanitize/threads_*.c, each with its module's C files.
# Wants clang and libomp with Archer (Debian: clang libomp-14-dev), so that TSan knows what OpenMP orders.
# Usage: sh tests/sanitize/tsan.sh [rounds]        ANNIE_QUANT_SANITIZE_DIR: where to build (build/tsan)
set -eu
cd "$(dirname "$0")/../.."
out=${ANNIE_QUANT_SANITIZE_DIR:-build/tsan}
rounds=${1:-10}
flags="-std=c11 -g -O1 -fsanitize=thread -ffp-contract=off -fno-math-errno -Wall -Wextra -Wno-unknown-pragmas -Icsrc"
mkdir -p "$out"

build() { # name, flags of its own, files
    name=$1 more=$2
    shift 2
    objects=
    for file in csrc/common/*.c "$@" "tests/sanitize/threads_$name.c"; do
        simd=
        case $file in
        */module.c | */exchange.c) continue ;; # these need Python
        *_avx512.c) simd="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c -mbmi2 -mfma" ;;
        *_avx2.c) simd="-mavx2 -mf16c -mbmi2 -mfma" ;;
        esac
        case $file in
        *_avx*.c) [ "$(uname -m)" = x86_64 ] || continue ;;
        *_neon.c) [ "$(uname -m)" = aarch64 ] || continue ;;
        esac
        object=$out/$name-$(basename "$file" .c).o
        set -f
        clang $flags $more $simd -c "$file" -o "$object"
        set +f
        objects="$objects $object"
    done
    clang $flags $more $objects -o "$out/$name" -lm $(pkg-config --libs libcurl)
}

llvm=$(llvm-config --libdir 2>/dev/null || echo /usr/lib/llvm-14/lib)
# TSan's run time is not up yet when the loader asks a clone's resolver, so that there is one clone.
build codec "-fopenmp -Dtarget_clones(...)=" csrc/nvfp4/*.c
build stream "$(pkg-config --cflags libcurl)" csrc/stream/*.c
export TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1"
OMP_TOOL_LIBRARIES=$llvm/libarcher.so OMP_NUM_THREADS=2 "$out/codec" "$rounds"
"$out/stream" "$rounds"
