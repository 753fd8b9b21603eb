"""Write tests/data/runs/schema_N: a benchmark's run directory in the current layout, which every later version must read.

    python tests/data/make_run_sample.py

Two scripted servers, three prompts, two runs each. N is the current schema version. Folders of older versions stay as they
are.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "helpers"))
WORKLOAD = {
    "name": "capitals",
    "description": "Three capitals.",
    "system": "Answer in one sentence.",
    "max_tokens": 32,
    "temperature": 0,
    "gates": ["non_empty", "no_markdown", "factual"],
    "cases": [
        {
            "id": c,
            "messages": [{"role": "user", "content": f"Capital of {c}?"}],
            "expect": {"contains": [capital]},
        }
        for c, capital in (("Japan", "Tokyo"), ("Peru", "Lima"), ("Kenya", "Nairobi"))
    ],
}


def answer(body: dict):
    from fake_server import words

    question = body["messages"][-1]["content"]
    capitals = [c["expect"]["contains"][0] for c in WORKLOAD["cases"] if c["id"] in question]
    return words(f"It is {capitals[0]}." if capitals else "Hello.")


def bench(folder: Path, workload: Path) -> int:
    """Run `annie-quant bench` against two scripted servers; return its exit code."""
    from command_line import CliRunner
    from fake_server import FakeServer

    from annie_quant.cli import app as cli

    with FakeServer(answer) as a, FakeServer(answer) as b:
        command = [
            "bench",
            "--backend-a",
            "a",
            a.url,
            "--backend-b",
            "b",
            b.url,
            "--runs",
            "2",
            "--warmup",
            "1",
        ]
        done = CliRunner().invoke(
            cli, [*command, "--workloads", str(workload), "--output", str(folder), "--json"]
        )
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code


if __name__ == "__main__":
    from annie_quant.documents import SCHEMA_VERSION

    sample = HERE / f"runs/schema_{SCHEMA_VERSION}"
    shutil.rmtree(sample, ignore_errors=True)
    sample.mkdir(parents=True)
    capitals = sample / "capitals.json"
    capitals.write_text(json.dumps(WORKLOAD, indent=1) + "\n")
    bench(sample, capitals)
    for name in ("report.html", "report.md", "comparison.md", "results.csv", ".lock"):
        (sample / name).unlink(missing_ok=True)
    for name in ("plots", "stages", "exports"):
        shutil.rmtree(sample / name, ignore_errors=True)
