"""How often is a server that eats the memory stopped before the limit, and how much memory was left?

    python tests/perf/memory_guard.py --runs 20

The eater is real, the machine's meminfo is a file (tests/helpers/memory_eater.py): control groups cannot be made everywhere.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

from memory_eater import LIMIT, Machine, eater  # noqa: E402

from annie_quant.core.errors import ServerError  # noqa: E402
from annie_quant.ops import server as process  # noqa: E402


def run(keep_free_bytes: int, workers: int) -> tuple[bool, int]:
    """Return whether the eater was stopped before the limit, and the least memory that was left."""
    with tempfile.TemporaryDirectory() as home:
        done = Path(home) / "limit"
        with Machine(Path(home) / "meminfo") as machine:
            guard = process.Guard(keep_free_bytes, str(machine.path))
            server = process.spawn(eater(done, workers), Path(home) / "log", "eater", guard=guard)
            machine.watch(server.pid)
            try:
                server.wait()
            except ServerError as error:
                return "memory guard" in error.message and not done.exists(), machine.least
    return False, 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    runs = parser.parse_args().runs
    print(
        "| kept free, share of the machine | processes | stopped before the limit | least left: median, worst |"
    )
    print("|---|---|---|---|")
    for share in (0.25, 0.125):
        for workers in (0, 2):
            results = [run(round(share * LIMIT), workers) for _ in range(runs)]
            stopped = sum(ok for ok, _ in results)
            left = [least / 1e6 for _, least in results]
            print(
                f"| {share * LIMIT / 1e6:.0f} MB, {share:.3f} | {max(1, workers)} | {stopped} of {runs} "
                f"| {statistics.median(left):.0f}, {min(left):.0f} MB |"
            )


if __name__ == "__main__":
    main()
