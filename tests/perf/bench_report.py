"""Time to build and to open a report of 10,000 requests: python tests/perf/bench_report.py

The targets are 10 s to build, 2 s until the load event in headless Chromium, 3 MB.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]

import chromium  # noqa: E402
import report_fixture  # noqa: E402

from annie_quant import report  # noqa: E402

REPEATS = 5


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = report_fixture.make_run(Path(place) / "run", n=209)
        requests = sum(1 for _ in (run / "records.jsonl").open())
        built = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            report.build(run)
            built.append(time.perf_counter() - start)
        page = run / "report.html"

        async def visit(tab) -> list[tuple[float, float]]:
            result = []
            for _ in range(REPEATS):
                seconds = await tab.open(page.as_uri())
                start = time.monotonic()
                await tab.evaluate(
                    "new Promise((r) => requestAnimationFrame(() => requestAnimationFrame(r)))"
                )
                result.append((seconds, time.monotonic() - start))
            return result

        opened = chromium.browse(visit) if chromium.find() else []
        print(f"| requests | {requests} |\n|---|---|")
        print(f"| report.html | {page.stat().st_size / 1e6:.2f} MB |")
        print(
            f"| build, median of {REPEATS} (first) | {statistics.median(built):.2f} s ({built[0]:.2f} s) |"
        )
        if opened:
            loaded = [o[0] for o in opened]
            print(
                f"| open until load, median of {REPEATS} (first) | {statistics.median(loaded):.2f} s ({loaded[0]:.2f} s) |"
            )
            print(f"| load until drawn, median | {statistics.median(o[1] for o in opened):.2f} s |")


if __name__ == "__main__":
    main()
