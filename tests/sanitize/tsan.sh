#!/bin/sh
# The codec and the client with ThreadSanitizer, without Python: tests/sanitize/threads_*.c, each with its module's C files.
# Needs clang (Debian: clang libclang-rt-14-dev).
# Usage: sh tests/sanitize/tsan.sh [rounds]        ANNIE_QUANT_SANITIZE_DIR: where to build (build/tsan)
set -eu
cd "$(dirname "$0")/../.."
. tests/sanitize/threads.sh
out=${ANNIE_QUANT_SANITIZE_DIR:-build/tsan}
rounds=${1:-10}
build_threads clang "-O1 -fsanitize=thread" "$out"
export TSAN_OPTIONS="halt_on_error=1"
OMP_NUM_THREADS=2 "$out/codec" "$rounds"
"$out/stream" "$rounds"
