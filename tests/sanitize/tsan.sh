#!/bin/sh
# The codec and the client with ThreadSanitizer, without Python: tests/sanitize/threads_*.c, each with its module's C files.
# Needs clang and libomp with Archer (Debian: clang libomp-14-dev), so that TSan knows the synchronization of OpenMP.
# Usage: sh tests/sanitize/tsan.sh [rounds]        ANNIE_QUANT_SANITIZE_DIR: where to build (build/tsan)
set -eu
cd "$(dirname "$0")/../.."
. tests/sanitize/threads.sh
out=${ANNIE_QUANT_SANITIZE_DIR:-build/tsan}
rounds=${1:-10}
build_threads clang "-O1 -fsanitize=thread" "$out"
llvm=$(llvm-config --libdir 2>/dev/null || echo /usr/lib/llvm-14/lib)
export TSAN_OPTIONS="halt_on_error=1 ignore_noninstrumented_modules=1"
OMP_TOOL_LIBRARIES=$llvm/libarcher.so OMP_NUM_THREADS=2 "$out/codec" "$rounds"
"$out/stream" "$rounds"
