#!/bin/sh
# Compare what the codec gives in this tree and in another one: every format, choice of scales, K-quant, product and GPTQ, for each
# variant that this processor runs and, with aarch64-linux-gnu-gcc and qemu-user, for NEON and the serial variant on aarch64.
# Usage: sh tests/perf/compare_codec_bytes.sh OTHER      (git worktree add --detach OTHER COMMIT)
set -eu
cd "$(dirname "$0")/../.."
. tests/sanitize/file_flags.sh
out=${TMPDIR:-/tmp}/annie_quant_codec_bytes
rm -rf "$out"

build() { # compiler, machine, tree, program
    mkdir -p "$4.o"
    for file in "$3"/csrc/common/*.c "$3"/csrc/nvfp4/*.c tests/perf/codec_bytes.c; do
        case $file in */module.c | */exchange.c) continue ;; esac # need Python
        [ -e "$file" ] || continue
        # The flags are those of this tree: a variant of an older tree has no first line with them.
        own=csrc/nvfp4/$(basename "$file")
        simd=
        [ ! -e "$own" ] || simd=$(file_flags "$2" "$own") || continue
        $1 -std=c11 -O3 -ffp-contract=off -fno-math-errno -fopenmp -I"$3/csrc" $simd -c "$file" -o "$4.o/$(basename "$file" .c).o"
    done
    $1 -static -fopenmp "$4.o"/*.o -o "$4" -lm
}

compare() { # compiler, machine, variants, command that runs its programs
    build "$1" "$2" . "$out/$2-ours"
    build "$1" "$2" "$other" "$out/$2-other"
    for variant in $3; do
        for side in ours other; do
            status=0
            OMP_NUM_THREADS=1 $4 "$out/$2-$side" "$variant" >"$out/$2-$variant-$side.txt" || status=$?
            [ $status = 0 ] || break
        done
        if [ $status = 2 ]; then
            echo "$2 $variant: this processor cannot run it"
        elif cmp "$out/$2-$variant-ours.txt" "$out/$2-$variant-other.txt"; then
            echo "$2 $variant: $(wc -l <"$out/$2-$variant-ours.txt") digests, all equal"
        else
            failed=1
        fi
    done
}

failed=
other=$(realpath "$1")
case $(uname -m) in
x86_64) compare gcc x86_64 "serial avx2 avx512" "" ;;
aarch64) compare gcc aarch64 "serial neon" "" ;;
esac
if [ "$(uname -m)" != aarch64 ] && command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64 >/dev/null; then
    compare aarch64-linux-gnu-gcc aarch64 "serial neon" qemu-aarch64
fi
[ -z "$failed" ]
