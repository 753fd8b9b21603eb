#!/bin/sh
# Build the C modules with AddressSanitizer and UBSan into build/asan and run their Python tests with them; before that run the
# codec and the client in threads and without Python (tests/sanitize/threads_*.c), with leak detection.
# Usage: sh tests/sanitize/asan.sh [pytest arguments; without any: the codec's and the client's tests]
#   no leak detection with Python, which never frees some memory.
#   test_nothing_leaks measures resident memory, which ASan's quarantine fills.
set -eu
cd "$(dirname "$0")/../.."
. tests/sanitize/threads.sh
root=$PWD
python=${PYTHON:-$root/.venv/bin/python}
export UBSAN_OPTIONS=print_stacktrace=1
options=allocator_may_return_null=1:strict_string_checks=1

if [ $# = 0 ]; then
    build_threads gcc "-O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all" build/asan/threads
    for part in codec stream; do
        ASAN_OPTIONS=$options:detect_leaks=1 OMP_NUM_THREADS=2 build/asan/threads/$part 3
    done
    set -- tests/nvfp4/test_formats.py tests/nvfp4/test_pack.py tests/nvfp4/test_search.py \
        tests/nvfp4/test_variants.py tests/nvfp4/test_layout.py tests/nvfp4/test_fake_quant.py tests/nvfp4/test_gemv.py tests/nvfp4/test_valid.py tests/nvfp4/test_kquant_bytes.py \
        tests/stream/test_decode.py tests/stream/test_framing.py tests/stream/test_http1.py tests/stream/test_run.py \
        tests/stream/test_faults.py tests/stream/test_recorded.py tests/stream/test_reuse.py tests/stream/test_cancel.py tests/stream/test_request.py \
        tests/stream/test_routes.py tests/stream/test_loop.py tests/nvfp4/test_kquant_denormal.py --deselect tests/stream/test_loop.py::test_nothing_leaks
fi
ANNIE_QUANT_ONLY=_nvfp4,_stream CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=all -g -fno-omit-frame-pointer" \
    "$python" setup.py -q build --build-base build/asan/temp --build-lib build/asan/lib
export PYTHONPATH=$root/build/asan/lib PYTHONMALLOC=malloc ASAN_OPTIONS=$options:detect_leaks=0
# libstdc++ must be loaded first, else ASan cannot see the exceptions that other extension modules throw.
libraries="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so) $(gcc -print-file-name=libstdc++.so)"
# Not `python -m pytest`, which would put the checkout with its modules without sanitizers first.
(cd build && LD_PRELOAD=$libraries "$python" -c '
import annie_quant._nvfp4 as a, annie_quant._stream as b
assert all("build/asan/lib" in m.__file__ for m in (a, b)), (a, b)')
LD_PRELOAD=$libraries exec "$(dirname "$python")/pytest" -q -p no:cacheprovider "$@"
