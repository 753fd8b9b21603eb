"""Error rate and power of the comparison: complete aggregates of simulated servers.

    python tests/perf/bench_power.py       A/A: at most 5 of 100 runs may show a difference; planted differences of 2 % and 5 %

Each run: 3 workloads of 34 prompts, 2 repeats, a TTFT per prompt (log-normal), 5 % noise per request; Holm over all comparisons.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "helpers"))

from flat_records import record_of

from annie_quant.bench.aggregates import aggregate_records
from annie_quant.documents import BenchConfig, Comparison, Identity, RequestRecord, WorkloadSettings

WORKLOADS, PROMPTS, REPEATS = ("greeting", "factual", "long_response"), 34, 2


def comparisons(seed: int, shift: float) -> list[Comparison]:
    """One simulated run; side b's TTFT is longer by the factor 1 + shift."""
    rng = np.random.default_rng(seed)
    rows = []
    for workload in WORKLOADS:
        for case in range(PROMPTS):
            own, tokens, pace = (
                rng.lognormal(4.5, 0.3),
                int(rng.integers(10, 60)),
                rng.normal(28, 1),
            )
            rows += [
                record(
                    rng,
                    side,
                    workload,
                    case,
                    repeat,
                    own * (1 + shift * (side == "b")),
                    pace,
                    tokens,
                )
                for side in "ab"
                for repeat in range(REPEATS)
            ]
    sides = {
        name: Identity(
            name=name,
            model=name,
            runtime="llama.cpp",
            chat_template_sha256="one",
            meta={"source": "one model"},
        )
        for name in "ab"
    }
    config = BenchConfig(workloads={name: WorkloadSettings() for name in WORKLOADS})
    return aggregate_records(rows, config, sides).comparisons


def record(
    rng, side: str, workload: str, case: int, repeat: int, own: float, pace: float, tokens: int
) -> RequestRecord:
    ttft, tpot = own * rng.normal(1, 0.05), pace * rng.normal(1, 0.03)
    return record_of(
        id=f"{side}/{workload}/{case}/{repeat}",
        backend=side,
        workload=workload,
        case=str(case),
        repeat=repeat,
        text="Hi there you.",
        first_content_ms=ttft,
        itl_ms=list(tpot * rng.normal(1, 0.05, 5)),
        tpot_ms=tpot,
        e2e_ms=ttft + tokens * tpot,
        decode_tok_s=1000 / tpot,
        completion_tokens=tokens,
        usage={"prompt_tokens": 20},
    )


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    runs = [comparisons(seed, 0.0) for seed in range(100)]
    alarms = sum(any(row.significant for row in rows) for rows in runs)
    print(f"A/A: {alarms} of 100 runs show any difference over {len(runs[0])} comparisons")
    for shift in (0.02, 0.05):
        runs = [comparisons(1000 + seed, shift) for seed in range(40)]
        ttft = [[row for row in rows if row.metric == "ttft_content_ms"] for rows in runs]
        pooled = sum(
            any(row.significant and row.workload == "all" for row in rows) for rows in ttft
        )
        alone = sum(row.significant for rows in ttft for row in rows if row.workload != "all")
        print(
            f"planted {shift:.0%}: detected over all {3 * PROMPTS} prompts in {pooled} of 40 runs, in a workload of "
            f"{PROMPTS} in {alone} of 120"
        )


if __name__ == "__main__":
    main()
