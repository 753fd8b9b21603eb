"""Simulate other tests of the rule (judge/decision/rule.py) on the cases of verdict_rule.py: more power at the same error rate?

    python tests/perf/verdict_power.py --runs 1000 --only "five gates"

hochberg  today's: McNemar's exact p per gate, Hochberg's adjustment, the pooled p three times the smallest of its three tests
minp      the pooled p from the joint permutation distribution of the smallest of the three (Westfall and Young)
hommel    Hommel's adjustment (Biometrika 75, 1988, 383-386) instead of Hochberg's; it rejects whatever Hochberg's rejects
midp      McNemar's mid-p instead of the exact p
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import binom, rankdata
from verdict_rule import CALL_CASES, CASES, answers, calls

from annie_quant.documents import PairedGate, PooledGates
from annie_quant.judge import judge_members, pairing
from annie_quant.judge.decision import rule
from annie_quant.judge.statistics import hochberg, mcnemar

FLIPS = 1999
TESTS = ("hochberg", "hommel", "hochberg minp", "hommel minp", "hommel minp midp")


def hommel(p_values: Sequence[float]) -> list[float]:
    """Return Hommel's adjusted p-values: of each hypothesis, the largest Simes p of a set that contains it."""
    n = len(p_values)
    order = np.argsort(p_values)
    p = np.asarray(p_values, dtype=float)[order]
    adjusted = p.copy()
    for i in range(n):
        for size in range(1, n + 1):  # the set with the largest Simes p: this hypothesis and the largest others
            others = [j for j in range(n - 1, -1, -1) if j != i][: size - 1]
            chosen = np.sort(p[[i, *others]])
            adjusted[i] = max(adjusted[i], (size * chosen / np.arange(1, size + 1)).min())
    result = np.empty(n)
    result[order] = adjusted
    return result.tolist()


def pooled_p(lost: int, won: int, changes: Sequence[Mapping[str, int]]) -> tuple[float, float]:
    """Return today's pooled p, and that of the joint permutation. Here all changed gates of an answer change in one direction."""
    gates = sorted({gate for change in changes for gate in change})
    if not gates:
        return 1.0, 1.0
    matrix = np.array([[change.get(gate, 0) for gate in gates] for change in changes], dtype=np.float32)
    signs = np.random.default_rng(0).integers(0, 2, (FLIPS, len(matrix))).astype(np.float32) * 2 - 1
    signs = np.vstack([np.ones_like(signs[:1]), signs])  # the first row is observed
    sums, n_changed = signs @ matrix, np.abs(matrix).sum(0)
    fisher = np.zeros(len(sums))
    for column, total in enumerate(n_changed.astype(int)):
        table = -2 * binom.logsf(np.arange(total + 1) - 1, total, 0.5)
        fisher += table[((total - sums[:, column]) // 2).astype(int)]
    whole = -signs @ np.sign(matrix.sum(1))
    statistics = (whole, (-sums / np.sqrt(n_changed)).max(1), fisher)
    p = np.array([rankdata(-s.round(9), method="max") / len(s) for s in statistics])
    smallest = p.min(0)
    return min(1.0, 3 * min(mcnemar(lost, won), p[1, 0], p[2, 0])), float((smallest <= smallest[0] + 1e-12).mean())


def mid_p(exact: Callable[[str, PairedGate], float], name: str, gate: PairedGate) -> float:
    changed = gate.lost + gate.won
    if rule.compares_with_reference(name) or rule.is_two_sided(name) or not changed:
        return exact(name, gate)
    return mcnemar(gate.lost, gate.won) - float(binom.pmf(gate.won, changed, 0.5)) / 2


def shares(draw: Callable[..., Any], case: tuple, runs: int, members: int, seed: int) -> dict[str, dict[str, float]]:
    """Return the share of each verdict under each of TESTS, on the same draws."""
    p_of: dict[int, tuple[float, float]] = {}

    def pooled(n: int, lost: int, won: int, changes: Sequence[Mapping[str, int]]) -> PooledGates:
        row = PooledGates(n=n, lost=lost, won=won)
        p_of[id(row)] = pooled_p(lost, won, changes)
        return row

    rng, exact = np.random.default_rng(seed), rule.p_of_loss
    pairing._pooled = pooled
    counts = {test: dict.fromkeys(("keeps", "loses", "undecided", "fragile"), 0.0) for test in TESTS}
    for _ in range(runs):
        pairs = [pairing.pair_checks(own) for own in draw(rng, case, members)]
        for test in TESTS:
            rule.hochberg = hommel if "hommel" in test else hochberg
            rule.p_of_loss = partial(mid_p, exact) if "midp" in test else exact
            for _, row in pairs:
                row.p = p_of[id(row)]["minp" in test]
            gates = {f"w4a4+{i}": own for i, (own, _) in enumerate(pairs)}
            verdict = judge_members(gates, {f"w4a4+{i}": row for i, (_, row) in enumerate(pairs)})
            counts[test][verdict.verdict] += 1 / runs
        p_of.clear()
    rule.p_of_loss = exact
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="Cases whose name contains this text.")
    options = parser.parse_args()
    cases = [(answers, name, case) for name, case in CASES.items()]
    cases += [(partial(calls, 340), name, case) for name, case in CALL_CASES.items()]
    for draw, name, case in cases:
        if options.only not in name:
            continue
        for test, row in shares(draw, case, options.runs, options.members, options.seed).items():
            text = ", ".join(f"{verdict} {share:.1%}" for verdict, share in row.items())
            print(f"{name}; {test}: {text}", flush=True)


if __name__ == "__main__":
    main()
