#!/bin/sh
# Build and run tests/fuzz/codec_driver.c: with ASan and UBSan on this machine, and for aarch64 with qemu-user if both are installed.
# Usage: sh tests/fuzz/codec.sh [executions [start]]
set -eu
cd "$(dirname "$0")/../.."
out=${TMPDIR:-/tmp}/annie_quant_codec_fuzz
mkdir -p "$out"
flags="-std=c11 -g -Wall -Wextra -Werror -ffp-contract=off -fno-math-errno -fopenmp -Icsrc"

build() { # compiler, folder, optimisation and sanitizers, skipped suffixes
    compiler=$1 folder=$out/$2 more=$3 skip=$4
    mkdir -p "$folder"
    rm -f "$folder"/*.o
    for file in csrc/common/*.c csrc/nvfp4/*.c tests/fuzz/codec_driver.c; do
        simd=
        case $file in
        */module.c) continue ;; # these need Python
        *_avx512.c) simd="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c -mbmi2 -mfma" ;;
        *_avx2.c) simd="-mavx2 -mf16c -mbmi2 -mfma" ;;
        esac
        case " $skip " in *" $(echo "$file" | sed 's/.*_//') "*) continue ;; esac
        $compiler $flags $more $simd -c "$file" -o "$folder/$(basename "$file" .c).o"
    done
    $compiler $flags $more "$folder"/*.o -o "$folder/driver" -lm
}

if [ "$(uname -m)" = x86_64 ]; then
    build gcc sanitized "-O2 -fsanitize=address,undefined -fno-sanitize-recover=all" neon.c
    OMP_NUM_THREADS=1 "$out/sanitized/driver" "${1:-1000000}" "${2:-0}"
fi
if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null; then
    build aarch64-linux-gnu-gcc aarch64 "-O2 -static" "avx2.c avx512.c"
    OMP_NUM_THREADS=1 qemu-aarch64 "$out/aarch64/driver" "$(( ${1:-1000000} / 10 ))" "${2:-0}"
fi
