# For asan.sh and tsan.sh: codec and client without Python, each with a caller in threads, tests/sanitize/threads_*.c.
#   build_threads COMPILER FLAGS FOLDER     makes FOLDER/codec and FOLDER/stream
. tests/sanitize/file_flags.sh

build_threads() {
    mkdir -p "$3"
    build_one "$1" "$2 -pthread" "$3/codec" csrc/nvfp4/*.c tests/sanitize/threads_codec.c
    build_one "$1" "$2 $(pkg-config --cflags libcurl)" "$3/stream" csrc/stream/*.c tests/sanitize/threads_stream.c
}

build_one() { # compiler, flags, program, files
    compiler=$1 flags="-std=c11 -g -ffp-contract=off -fno-math-errno -Wall -Wextra -Wno-unknown-pragmas -Icsrc $2" program=$3
    shift 3
    objects=
    for file in "$@"; do
        case $file in */module.c) continue ;; esac # needs Python
        simd=$(file_flags "$(uname -m)" "$file") || continue
        object=$program-$(basename "$file" .c).o
        set -f # a flag may contain ( and *
        "$compiler" $flags $simd -c "$file" -o "$object"
        set +f
        objects="$objects $object"
    done
    set -f
    "$compiler" $flags $objects -o "$program" -lm $(pkg-config --libs libcurl)
    set +f
}
