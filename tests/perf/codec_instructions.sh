#!/bin/sh
# Instructions per block of 16 bf16 weights, executed under qemu-user: NEON, AVX2 and the serial reference on both.
# The difference between two lengths of a tensor, less the same difference without the operation. Exact, on any machine with
# qemu-user (7.2 or newer), gcc for x86-64 and aarch64-linux-gnu-gcc. Usage: sh tests/perf/codec_instructions.sh [operations]
set -eu
cd "$(dirname "$0")/../.."
. tests/sanitize/file_flags.sh
out=${TMPDIR:-/tmp}/annie_quant_codec_instructions
mkdir -p "$out"
gcc -O2 -shared -fPIC -Wall -Wextra -Werror -o "$out/count.so" tests/perf/count_instructions.c

build() { # compiler, machine
    mkdir -p "$out/$2"
    objects=
    for file in csrc/nvfp4/*.c tests/perf/codec_work.c; do
        case $file in */module.c) continue ;; esac # needs Python
        simd=$(file_flags "$2" "$file") || continue
        $1 -std=c11 -O3 -ffp-contract=off -fno-math-errno -pthread -Icsrc $simd -c "$file" -o "$out/$2/$(basename "$file" .c).o"
        objects="$objects $out/$2/$(basename "$file" .c).o"
    done
    $1 -static -pthread $objects -o "$out/$2/work" -lm 2>/dev/null
}

count() { # machine, variant, operation, blocks
    case $1 in x86_64) cpu="-cpu max" ;; *) cpu= ;; esac
    OMP_NUM_THREADS=1 "qemu-$1" $cpu -plugin "$out/count.so" "$out/$1/work" "$2" "$3" "$4" 2>&1 >/dev/null | tail -1
}

build gcc x86_64
build aarch64-linux-gnu-gcc aarch64
few=1024 many=3072
for operation in ${*:-pack amax unpack fake_quant gemv1 gemv4 four_over_six sweep}; do
    line=$operation
    for pair in aarch64:neon x86_64:avx2; do
        machine=${pair%:*} variant=${pair#*:}
        idle=$(($(count "$machine" "$variant" nothing $many) - $(count "$machine" "$variant" nothing $few)))
        work=$(($(count "$machine" "$variant" "$operation" $many) - $(count "$machine" "$variant" "$operation" $few)))
        line="$line $(awk "BEGIN { printf \"%.1f\", ($work - $idle) / ($many - $few) }")"
    done
    echo "$line" | awk '{ printf "%-14s NEON %7s  AVX2 %7s  ratio %.2f\n", $1, $2, $3, $2 / $3 }'
done
