"""Simulate the paired rule (judge/decision/paired.py): how often a checkpoint without a difference loses, and a loss is found.

    python tests/perf/verdict_rule.py --runs 2000

Prompts and gates are those of `eval --n 100` with all 240 tool prompts. A share of answers changes between two runs of the same
model for no reason. Measured for W4A4 on tiny-annie (2026-11-22, 141 prompts): answers of the real vLLM under two batch cuts differ
in 15 %; 14, 16 and 16 of 30 tool calls were right, and all other gates agreed. So tool calls are simulated at a rate of 50 % with
10 % of the outcomes changed in each direction (naive), and at 99 % with 1 % (a strategy that keeps).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

import numpy as np

from annie_quant.judge import judge_members
from annie_quant.judge.paired import score_interval
from annie_quant.judge.pairing import pair_checks
from annie_quant.judge.statistics import wilson

# workload → (prompts, its own gate, further gates): a third of the workloads, with the shares of gates of the built-in ones.
WORKLOADS = {
    "tools": (240, "tool_call", ("non_empty", "thinking_leak")),
    "facts": (100, "factual", ("non_empty", "thinking_leak", "no_markdown", "repetition", "stop")),
    "sums": (100, "reasoning", ("non_empty", "thinking_leak", "no_markdown", "repetition", "stop")),
    "no tool": (100, "abstention", ("non_empty", "thinking_leak", "no_markdown")),
    "words": (105, "no_markdown", ("non_empty", "thinking_leak", "repetition", "stop")),
}
CASES = {
    # name: (rate of the reference, discordant share in each direction, true loss) of each workload's own gate
    "no difference, tool calls at 50 %, 10 % change each way": ({"tools": (0.5, 0.10)}, (0.98, 0.005), {}),
    "no difference, tool calls at 99 %, 1 % change each way": ({"tools": (0.98, 0.01)}, (0.98, 0.005), {}),
    "no difference, 3 % of all answers change each way": ({}, (0.9, 0.03), {}),
    "no answer changes": ({}, (1.0, 0.0), {}),
    "tool calls lose 10 points, 1 % change each way": ({"tools": (0.98, 0.01)}, (0.98, 0.005), {"tools": 0.10}),
    "tool calls lose 10 points, 3 % change each way": ({"tools": (0.95, 0.03)}, (0.98, 0.005), {"tools": 0.10}),
    "tool calls lose 10 points, 10 % change each way": ({"tools": (0.6, 0.10)}, (0.98, 0.005), {"tools": 0.10}),
    "tool calls lose 5 points (the margin), 1 % each way": ({"tools": (0.98, 0.01)}, (0.98, 0.005), {"tools": 0.05}),
    "every workload loses 4 points, 0.5 % each way": ({}, (0.98, 0.005), dict.fromkeys(WORKLOADS, 0.04)),
}


def answers(
    rng: np.random.Generator, case: tuple[dict, tuple[float, float], dict[str, float]]
) -> Iterator[tuple[dict[str, bool], dict[str, bool]]]:
    own, default, losses = case
    for name, (n, gate, further) in WORKLOADS.items():
        rate, change = own.get(name, default)
        loss = losses.get(name, 0.0)
        # Four outcomes of the pair: both right, lost, won, both wrong.
        p = np.array([rate - change - loss, change + loss, change, max(0.0, 1 - rate - change)])
        for outcome in rng.choice(4, n, p=p / p.sum()):
            old, new = outcome in (0, 1), outcome in (0, 2)
            also = {g: True for g in further}
            yield {gate: old, **also}, {gate: new, **also}


def simulate(case: tuple, runs: int, seed: int, members: int) -> dict[str, float]:
    """Shares of runs per verdict. members: arithmetics of the ensemble; each draws its own changes (the worst case)."""
    rng = np.random.default_rng(seed)
    counts = dict.fromkeys(("keeps", "loses", "undecided", "fragile"), 0)
    for _ in range(runs):
        pairs = [pair_checks(answers(rng, case)) for _ in range(members)]
        verdict = judge_members(
            {f"w4a4+{i}": gates for i, (gates, _) in enumerate(pairs)},
            {f"w4a4+{i}": pooled for i, (_, pooled) in enumerate(pairs)},
        )
        counts[verdict.verdict] += 1
    return {name: count / runs for name, count in counts.items()}


def coverage(rng: np.random.Generator, runs: int) -> list[tuple[int, float, float, float]]:
    """(n, discordant share each way, true difference, share of 90 % intervals that contain it)."""
    rows = []
    for n, change, loss in ((25, 0.02, 0.0), (100, 0.02, 0.0), (100, 0.02, 0.05), (240, 0.1, 0.05), (505, 0.01, 0.02)):
        draws = rng.multinomial(n, [change + loss, change, 1 - 2 * change - loss], runs)
        inside = 0
        for lost, won, _ in draws:
            low, high = score_interval(int(lost), int(won), n)
            inside += low <= -loss <= high
        rows.append((n, change, -loss, inside / runs))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="Cases whose name contains this text.")
    options = parser.parse_args()
    start = time.monotonic()
    print(json.dumps(vars(options)))
    for name, case in ((name, case) for name, case in CASES.items() if options.only in name):
        shares = simulate(case, options.runs, options.seed, options.members)
        low, high = wilson(round((shares["loses"] + shares["fragile"]) * options.runs), options.runs)
        text = ", ".join(f"{k} {v:.1%}" for k, v in shares.items())
        print(f"{name}: {text}; loses or fragile {low:.1%} to {high:.1%} (95 %)", flush=True)
    for n, change, difference, inside in coverage(np.random.default_rng(options.seed), options.runs):
        print(
            f"coverage of the 90 % interval, n {n}, {change:.0%} change each way, true {difference:+.0%}: {inside:.1%}"
        )
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
