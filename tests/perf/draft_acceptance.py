"""Acceptance of a checkpoint's MTP head in llama.cpp: greedy answers to the workloads' prompts with and without drafts.

    python tests/perf/draft_acceptance.py CHECKPOINT [--drafts 1] [--cases 5]

CHECKPOINT: a folder that annie-quant convert takes; without it tiny-annie with its shipped head. Prints per workload the accepted
drafts with a 95 % Wilson interval, and how many answers equal those of the same server without drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from tiny_variants import save_with_head

import annie_quant as aq
from annie_quant import judge
from annie_quant.evaluate.prompts import Request, Template
from annie_quant.judge.statistics import wilson

WORKLOADS = ("conversational", "factual", "long_response", "reasoning", "tool_memory", "tool_surface", "tool_web")
LIMIT = 200  # tokens per answer


class Served(NamedTuple):
    """One answer: its tokens, drafted tokens and accepted ones."""

    tokens: list[int]
    drafts: int
    accepted: int


def served(file: Path, requests: list[Request], drafts: int) -> list[Served]:
    """Return the greedy answers of llama.cpp, one request at a time."""
    answers = []
    with aq.serve.start(file, drafts=drafts) as server:
        for request in requests:
            body = {"prompt": list(request.prompt), "n_predict": LIMIT, "temperature": 0, "return_tokens": True}
            call = urllib.request.Request(
                server.url + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(call, timeout=300) as response:
                document: dict[str, Any] = json.loads(response.read())
            timings = document["timings"]
            counts = (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
            answers.append(Served(document["tokens"], *counts))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--drafts", type=int, default=1)
    parser.add_argument("--cases", type=int, default=5, help="per workload, evenly spread")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder = options.checkpoint or save_with_head(Path(home) / "bf16")
        file = Path(aq.checkpoint.convert(folder, "gguf", Path(home) / "model.gguf").path)
        template, groups = Template(folder), dict[str, list[Request]]()
        for workload in judge.load_workloads(list(WORKLOADS)):
            cases = workload.cases[:: max(1, len(workload.cases) // options.cases)][: options.cases]
            groups[workload.name] = [template.request(workload, case) for case in cases]
        requests = [r for group in groups.values() for r in group]
        plain, drafted = (served(file, requests, n) for n in (0, options.drafts))
    begin, rows = 0, [("all", 0, len(requests))]
    for name, group in groups.items():
        rows.append((name, begin, begin + len(group)))
        begin += len(group)
    for name, low, high in rows:
        own = drafted[low:high]
        hits, n = sum(a.accepted for a in own), sum(a.drafts for a in own)
        equal = sum(a.tokens == b.tokens for a, b in zip(plain[low:high], own, strict=True))
        interval = " to ".join(f"{x:.1%}" for x in wilson(hits, n))
        print(
            f"{name}: {hits} of {n} drafts accepted ({hits / max(1, n):.1%}; {interval}), {equal} of {len(own)} answers equal"
        )


if __name__ == "__main__":
    main()
