"""Makes tests/data/runs/schema_1: a benchmark's folder as schema_version 1 has it, which every later version must read.

    python tests/data/make_run_sample.py

Two scripted servers, three prompts, two runs each. Not to be made again when the layout changes: a new one gets a new folder.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "helpers"))
SAMPLE = HERE / "runs/schema_1"
WORKLOAD = {
    "name": "capitals",
    "description": "Three capitals.",
    "system": "Answer in one sentence.",
    "max_tokens": 32,
    "temperature": 0,
    "gates": ["non_empty", "no_markdown", "factual"],
    "cases": [
        {"id": c, "messages": [{"role": "user", "content": f"Capital of {c}?"}], "expect": {"contains": [capital]}}
        for c, capital in (("Japan", "Tokyo"), ("Peru", "Lima"), ("Kenya", "Nairobi"))
    ],
}


def answer(body: dict):
    from fake_server import words

    asked = body["messages"][-1]["content"]
    known = [c["expect"]["contains"][0] for c in WORKLOAD["cases"] if c["id"] in asked]
    return words(f"It is {known[0]}." if known else "Hello.")


def bench(folder: Path, workload: Path) -> int:
    """`annie-quant bench` against two servers that live only meanwhile; its exit code."""
    from click.testing import CliRunner
    from fake_server import FakeServer

    from annie_quant.cli import cli

    with FakeServer(answer) as a, FakeServer(answer) as b:
        words = ["bench", "--backend-a", "a", a.url, "--backend-b", "b", b.url, "--runs", "2", "--warmup", "1"]
        done = CliRunner().invoke(cli, [*words, "--workloads", str(workload), "--output", str(folder), "--json"])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code


if __name__ == "__main__":
    shutil.rmtree(SAMPLE, ignore_errors=True)
    SAMPLE.mkdir(parents=True)
    workload = SAMPLE / "capitals.json"
    workload.write_text(json.dumps(WORKLOAD, indent=1) + "\n")
    bench(SAMPLE, workload)
    for made in ("report.html", "report.md", "comparison.md", "results.csv", ".lock"):
        (SAMPLE / made).unlink(missing_ok=True)
    for folder in ("plots", "stages", "exports"):
        shutil.rmtree(SAMPLE / folder, ignore_errors=True)
