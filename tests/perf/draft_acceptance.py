"""Acceptance of a checkpoint's MTP head in llama.cpp: greedy answers to the workloads' prompts with and without drafts.

    python tests/perf/draft_acceptance.py CHECKPOINT [--drafts 1] [--cases 5]

CHECKPOINT: a folder that annie-quant convert takes; without it tiny-annie with its shipped head. Prints per workload the accepted
drafts with a 95 % Wilson interval, and how many answers equal those of the same server without drafts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from draft_server import served
from tiny_variants import save_with_head

import annie_quant as aq
from annie_quant import judge
from annie_quant.judge.statistics import wilson
from annie_quant.offline.prompts import OfflineRequest, Template

WORKLOADS = (
    "conversational",
    "factual",
    "long_response",
    "reasoning",
    "tool_memory",
    "tool_surface",
    "tool_web",
)
LIMIT, LONGEST = 200, 3800  # tokens per answer, and per prompt: a slot has 4,096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--drafts", type=int, default=1)
    parser.add_argument("--cases", type=int, default=5, help="per workload, evenly spread")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        folder = options.checkpoint or save_with_head(Path(home) / "bf16")
        file = Path(aq.checkpoint.convert(folder, "gguf", Path(home) / "model.gguf").path)
        template, groups = Template(folder), dict[str, list[OfflineRequest]]()
        for workload in judge.load_workloads(list(WORKLOADS)):
            cases = workload.cases[:: max(1, len(workload.cases) // options.cases)][: options.cases]
            requests = [template.request(workload, case) for case in cases]
            groups[workload.name] = [r for r in requests if len(r.prompt) <= LONGEST]
        prompts = [r.prompt for group in groups.values() for r in group]
        plain, drafted = (served(file, prompts, n, LIMIT) for n in (0, options.drafts))
    begin, rows = 0, [("all", 0, len(prompts))]
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
