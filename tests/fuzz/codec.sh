#!/bin/sh
# Build and run tests/fuzz/codec_driver.c: with ASan and UBSan on this machine, and for aarch64 with qemu-user if both are installed.
# Usage: sh tests/fuzz/codec.sh [executions [start]]
set -eu
cd "$(dirname "$0")/../.."
. tests/sanitize/file_flags.sh
out=${TMPDIR:-/tmp}/annie_quant_codec_fuzz
mkdir -p "$out"
flags="-std=c11 -g -Wall -Wextra -Werror -ffp-contract=off -fno-math-errno -pthread -Icsrc"

build() { # compiler, machine, folder, optimisation and sanitizers
    compiler=$1 machine=$2 folder=$out/$3 more=$4
    mkdir -p "$folder"
    rm -f "$folder"/*.o
    for file in csrc/nvfp4/*.c tests/fuzz/codec_driver.c; do
        case $file in */module.c) continue ;; esac # needs Python
        simd=$(file_flags "$machine" "$file") || continue
        $compiler $flags $more $simd -c "$file" -o "$folder/$(basename "$file" .c).o"
    done
    $compiler $flags $more "$folder"/*.o -o "$folder/driver" -lm
}

if [ "$(uname -m)" = x86_64 ]; then
    build gcc x86_64 sanitized "-O2 -fsanitize=address,undefined -fno-sanitize-recover=all"
    OMP_NUM_THREADS=1 "$out/sanitized/driver" "${1:-1000000}" "${2:-0}"
fi
if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null; then
    build aarch64-linux-gnu-gcc aarch64 aarch64 "-O2 -static"
    OMP_NUM_THREADS=1 qemu-aarch64 "$out/aarch64/driver" "$(( ${1:-1000000} / 10 ))" "${2:-0}"
fi
