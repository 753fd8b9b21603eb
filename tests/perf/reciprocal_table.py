"""Derive the table of annie_quant/offline/deltanet_cpu.py from this processor's VRCP14PS, and compare.

    python tests/perf/reciprocal_table.py      # exit code 1 if the processor's table is another; needs AVX-512 and a C compiler

The instruction is called for all 2^23 mantissas. In each of 64 parts of [1, 2) its results, 17 bits, are the floor of a line; the
first line with integer coefficients that gives all of them is printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [
    str(Path(__file__).resolve().parents[2]),
    str(Path(__file__).resolve().parents[1] / "helpers"),
]

from vrcp14 import instruction  # noqa: E402

from annie_quant.offline.deltanet_cpu import RECIPROCALS  # noqa: E402


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    bits = np.arange(1 << 23, dtype=np.uint32) | 0x3F800000
    results = instruction(bits.view(np.float32)).view(np.uint32).astype(np.int64)
    used = np.concatenate(
        ([results[1]], results[128::128])
    )  # the results of an input's first 16 bits; 1 itself is exact
    if (np.repeat(used, 128)[1:] != results[1:]).any():
        print("this processor's instruction reads other bits of its input")
        return 1
    values = (((1 << 23) | (used & 0x7FFFFF)) >> 7).reshape(64, 1024)
    table = tuple(line(part) for part in values)
    for i in range(0, 64, 6):
        print("    " + " ".join(f"({begin}, {fall})," for begin, fall in table[i : i + 6]))
    print(
        "equal to approximate.py"
        if table == RECIPROCALS
        else "another table than approximate.py's",
        file=sys.stderr,
    )
    return int(table != RECIPROCALS)


def line(values: np.ndarray) -> tuple[int, int]:
    """Return (begin in halves, fall in 1/512) of the first line whose floor is `values`."""
    steps = np.arange(len(values))
    for fall in range(100, 1200):
        raised = (
            values << 9
        ) + fall * steps  # the begin is at least each of them, and less than each and 512
        begin = -(-int(raised.max()) // 256) * 256
        if begin < int(raised.min()) + 512:
            return begin // 256, fall
    raise SystemExit("no line with these units gives the processor's results")


if __name__ == "__main__":
    sys.exit(main())
