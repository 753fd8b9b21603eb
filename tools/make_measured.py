"""Make the measured pages again: the generated part of tests/perf/search.md, strategies.md's table, the README's picture.

python tools/make_measured.py [--output runs/measured] [--only data,search,strategies,picture] [--strategies NAMES] [--seeds 1]

Needed when the embedded model, a workload or the rule changes. Every step resumes: run the same command again. CPU time, one
core of an AMD EPYC (Zen 4): an evaluation with n = 100 takes 203 s (505 answers, two profiles with their ensembles, measured
on 2026-11-22). From that, estimated: the search 40 minutes per seed, the strategies' table 60 minutes, the demo 15 minutes.
Text around the generated parts is written by hand.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "annie_quant/assets/tiny-annie"
# The order of a search of this model, without auto_mixed, which needs a GPU for an hour's work.
STRATEGIES = (
    "best@0.004115,naive,best,direct,awq_lite,gptq,w4a16_mixed,best@0.00517,best@0.00566,best@0.00664,mlp_only,"
    "best@0.008599"
)
ROWS = "naive,direct,direct four_over_six,direct sweep,awq_lite,mlp_only,w4a16_mixed,gptq,gptq W4A16,best"
STEPS = ("data", "search", "strategies", "picture")
BEGIN = "<!-- begin: {name}, tools/make_measured.py -->"
END = "<!-- end: {name} -->"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/measured"))
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument(
        "--rows",
        default=ROWS,
        help="rows of the strategies' table; with a GPU also auto_mixed",
    )
    parser.add_argument("--seeds", type=int, default=1, help="calibration draws of the search")
    options = parser.parse_args()
    out = options.output
    out.mkdir(parents=True, exist_ok=True)
    steps = options.only.split(",")
    calibration = out / "calibration.jsonl"
    command = [sys.executable, "-m", "annie_quant"]
    if "data" in steps and not calibration.is_file():
        run(
            [
                *command,
                "data",
                "--persona",
                "annie",
                "--teacher",
                "offline",
                "--n",
                "500",
                "--output",
                calibration,
            ]
        )
    if "search" in steps:
        arguments = [
            "--model",
            MODEL,
            "--calib-data",
            calibration,
            "--output",
            out / "search",
            "--all",
        ]
        # Exit code 1: no strategy keeps every gate. That is a result.
        run(
            [
                *command,
                "search",
                *arguments,
                "--strategies",
                options.strategies,
                "--seeds",
                options.seeds,
            ],
            accepted=(0, 1),
        )
        replace(ROOT / "tests/perf/search.md", "search", body(out / "search/search.md"))
    if "strategies" in steps:
        script = [
            sys.executable,
            "tests/perf/strategies.py",
            "--output",
            out / "strategies",
            "--calib-data",
            calibration,
        ]
        run([*script, "--only", options.rows])
        table = subprocess.run(
            [*map(str, script), "--table"], check=True, capture_output=True, text=True, cwd=ROOT
        ).stdout
        replace(ROOT / "tests/perf/strategies.md", "table", table.strip())
    if "picture" in steps:
        run([*command, "demo", "--output", out / "demo"])
        run([sys.executable, "tools/screenshot.py", out / "demo", ROOT / "docs/report.png"])


def run(command: list[object], accepted: tuple[int, ...] = (0,)) -> None:
    """Run a command in the checkout; end with its exit code if that is not an accepted one."""
    text = [str(part) for part in command]
    print("$", *text, flush=True)
    code = subprocess.run(text, cwd=ROOT, check=False).returncode
    if code not in accepted:
        sys.exit(code)


def body(page: Path) -> str:
    """Return a page without its title, its headings one level deeper."""
    return re.sub(
        r"^#", "##", page.read_text(encoding="utf-8").split("\n", 1)[1].strip(), flags=re.MULTILINE
    )


def replace(page: Path, name: str, text: str) -> None:
    """Replace the generated part of a page. Raises ValueError where the page has no such part."""
    begin = BEGIN.format(name=name)
    end = END.format(name=name)
    old = page.read_text(encoding="utf-8")
    if old.count(begin) != 1 or old.count(end) != 1 or old.index(begin) > old.index(end):
        raise ValueError(f"{page}: expected one part between {begin} and {end}")
    head, rest = old.split(begin)
    page.write_text(f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
