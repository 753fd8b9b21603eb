"""Simulate the paired rule (judge/decision/rule.py): how often a checkpoint without a difference loses, and a loss is found.

    python tests/perf/verdict_rule.py --runs 2000

Prompts and gates are those of `eval --n 100` with all 240 tool prompts. A share of answers changes between two runs of the same
model for no reason. Measured for W4A4 on tiny-annie (2026-11-22, 141 prompts): answers of the real vLLM under two batch cuts differ
in 15 %; 14, 16 and 16 of 30 tool calls were right, and all other gates agreed. So tool calls are simulated at a rate of 50 % with
10 % of the outcomes changed in each direction (naive), and at 99 % with 1 % (a strategy that keeps).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial

import numpy as np
from scipy.stats import binom, norm

from annie_quant.documents import PairedGate
from annie_quant.judge import judge_members
from annie_quant.judge.decision import judge_gates, rule
from annie_quant.judge.gates import REFERENCE_GATES
from annie_quant.judge.pairing import pair_checks
from annie_quant.judge.statistics import score_interval, wilson

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
    "no difference, tool calls at 50 %, 10 % change each way": (
        {"tools": (0.5, 0.10)},
        (0.98, 0.005),
        {},
    ),
    "no difference, tool calls at 99 %, 1 % change each way": (
        {"tools": (0.98, 0.01)},
        (0.98, 0.005),
        {},
    ),
    "no difference, 3 % of all answers change each way": ({}, (0.9, 0.03), {}),
    "no answer changes": ({}, (1.0, 0.0), {}),
    "tool calls lose 10 points, 1 % change each way": (
        {"tools": (0.98, 0.01)},
        (0.98, 0.005),
        {"tools": 0.10},
    ),
    "tool calls lose 10 points, 3 % change each way": (
        {"tools": (0.95, 0.03)},
        (0.98, 0.005),
        {"tools": 0.10},
    ),
    "tool calls lose 10 points, 10 % change each way": (
        {"tools": (0.6, 0.10)},
        (0.98, 0.005),
        {"tools": 0.10},
    ),
    "tool calls lose 5 points (the margin), 1 % each way": (
        {"tools": (0.98, 0.01)},
        (0.98, 0.005),
        {"tools": 0.05},
    ),
    "every workload loses 4 points, 0.5 % each way": (
        {},
        (0.98, 0.005),
        dict.fromkeys(WORKLOADS, 0.04),
    ),
}


# Cases of gates that compare with bf16's own answers: (prompts, changed share of each gate, gates that lose more, their share).
SAME_CASES = {
    "same_*: 200 prompts, 2 % of each gate's answers change": (200, 0.02, (), 0.0),
    "same_*: 200 prompts, 3 % change": (200, 0.03, (), 0.0),
    "same_*: 200 prompts, 5 % (the margin) change": (200, 0.05, (), 0.0),
    "same_*: 200 prompts, 2 % change, 15 % of the tools": (200, 0.02, ("same_tool",), 0.15),
    "same_*: 200 prompts, 2 % change, 20 % of the tools": (200, 0.02, ("same_tool",), 0.20),
}
# Cases of leaks: (share of the prompts that can have one, its chance there in the reference, in each arithmetic of the checkpoint).
LEAK_CASES = {
    "leaks: no difference, .02 % of all answers": (1.0, 0.0002, 0.0002),
    "leaks: no difference, .1 % of all answers": (1.0, 0.001, 0.001),
    "leaks: no difference, .5 % of all answers": (1.0, 0.005, 0.005),
    "leaks: no difference, half of the answers to .2 % of the prompts": (0.002, 0.5, 0.5),
    "leaks: no difference, half of the answers to 1 % of the prompts": (0.01, 0.5, 0.5),
    "leaks: 1 % of the checkpoint's answers": (1.0, 0.0, 0.01),
    "leaks: 2 % of the checkpoint's answers": (1.0, 0.0, 0.02),
    "leaks: 5 % of the checkpoint's answers": (1.0, 0.0, 0.05),
}
# Gates of a labelled call that one fault fails together, the one that fails most often last.
CALL_GATES = ("tool_schema", "tool_selection", "tool_call", "tool_arguments", "tool_values")
FEWER = (0.5, 0.7, 0.8, 1.0, 1.0)  # share of the faults that fail each of CALL_GATES
# Cases with --n tool calls: (rate of the reference, change each way, true loss, share of the faults that fail each gate).
CALL_CASES = {
    "calls: no difference, 10 % change each way, one gate": (0.6, 0.10, 0.0, (1.0,)),
    "calls: 10 points lost, 10 % change each way, one gate": (0.6, 0.10, 0.10, (1.0,)),
    "calls: no difference, 10 % change each way, five gates fail together": (
        0.6,
        0.10,
        0.0,
        (1.0,) * 5,
    ),
    "calls: 10 points lost, 10 % change each way, five gates fail together": (
        0.6,
        0.10,
        0.10,
        (1.0,) * 5,
    ),
    "calls: no difference, 10 % change each way, five gates fail in part": (0.6, 0.10, 0.0, FEWER),
    "calls: 10 points lost, 10 % change each way, five gates fail in part": (
        0.6,
        0.10,
        0.10,
        FEWER,
    ),
}
BESIDE = (
    "tool_call",
    "tool_arguments",
    "abstention",
    "no_markdown",
    "factual",
    "stop",
    "thinking_leak",
)
Pairs = list[tuple[dict[str, bool], dict[str, bool]]]


def uniforms(rng: np.random.Generator, n: int, members: int, alike: float) -> Iterator[np.ndarray]:
    """Yield one uniform number per prompt for each member; `alike`: the chance that a member has the number of all members."""
    shared = rng.random(n) if alike else np.zeros(n)
    for _ in range(members):
        own = rng.random(n)
        yield np.where(rng.random(n) < alike, shared, own) if alike else own


def calls(
    n: int, rng: np.random.Generator, case: tuple, members: int, alike: float = 0.0
) -> list[Pairs]:
    """As answers(), with n tool calls of which one fault fails several gates: a fault of severity s fails those that reach s."""
    rate, change, loss, shares = case
    gates = CALL_GATES[-len(shares) :]
    rest = {name: workload for name, workload in WORKLOADS.items() if name != "tools"}
    result = answers(rng, ({}, (0.98, 0.005), {}), members, alike, rest)
    old = rng.random(n) < rate
    severity = rng.random(n)  # of a prompt: what it fails where it fails, in both models
    for pairs, draw in zip(result, uniforms(rng, n, members, alike), strict=True):
        new = draw < np.where(old, 1 - (change + loss) / rate, change / (1 - rate))
        for before, after, hard in zip(old, new, severity, strict=True):
            row = [
                {g: bool(ok or hard >= share) for g, share in zip(gates, shares, strict=True)}
                for ok in (before, after)
            ]
            pairs.append((row[0], row[1]))
    return result


def answers(
    rng: np.random.Generator,
    case: tuple,
    members: int,
    alike: float = 0.0,
    workloads: Mapping[str, tuple] = WORKLOADS,
) -> list[Pairs]:
    """Return per member (reference's checks, checkpoint's checks) of each prompt. The reference's are the same for all members."""
    own, default, losses = case
    result: list[Pairs] = [[] for _ in range(members)]
    for name, (n, gate, further) in workloads.items():
        rate, change = own.get(name, default)
        loss = losses.get(name, 0.0)
        old = rng.random(n) < rate
        also = dict.fromkeys(further, True)
        for pairs, draw in zip(result, uniforms(rng, n, members, alike), strict=True):
            # Given that the reference is right, change + loss of all prompts are lost; given that it is wrong, change are won.
            chance = np.where(
                old, 1 - (change + loss) / rate, change / (1 - rate) if rate < 1 else 0.0
            )
            new = draw < chance
            pairs += [
                ({gate: bool(o), **also}, {gate: bool(c), **also})
                for o, c in zip(old, new, strict=True)
            ]
    return result


def same_answers(
    rng: np.random.Generator, case: tuple, members: int, alike: float = 0.0
) -> list[Pairs]:
    """As answers(), of gates that the reference passes by definition; each gate's changes are independent (the worst case)."""
    n, share, worse, worse_share = case
    chances = np.array([worse_share if gate in worse else share for gate in REFERENCE_GATES])
    old = dict.fromkeys(REFERENCE_GATES, True)
    return [
        [
            (old, dict(zip(REFERENCE_GATES, row, strict=True)))
            for row in (draw.reshape(n, len(chances)) >= chances).tolist()
        ]
        for draw in uniforms(rng, n * len(chances), members, alike)
    ]


def leaks(case: tuple, runs: int, seed: int, members: int) -> dict[str, float]:
    """As simulate(), of answers that are all right apart from leaks: the verdict depends on how many are lost and won alone."""
    share, before, after = case
    rng = np.random.default_rng(seed)
    n = sum(row[0] for row in WORKLOADS.values())
    counts = dict.fromkeys(("keeps", "loses", "undecided", "fragile"), 0)
    known: dict[tuple[tuple[int, int], ...], str] = {}
    for _ in range(runs):
        able = rng.random(n) < share
        old = rng.random(n) < before * able
        new = rng.random((members, n)) < after * able
        key = tuple(sorted((int((own & ~old).sum()), int((old & ~own).sum())) for own in new))
        if key not in known:
            known[key] = verdict_of_leaks(n, key)
        counts[known[key]] += 1
    return {name: count / runs for name, count in counts.items()}


def verdict_of_leaks(n: int, key: tuple[tuple[int, int], ...]) -> str:
    """Return the verdict of members with (lost, won) of n answers each, by the leak gate next to the others of all prompts."""

    def rows(lost: int, won: int) -> Pairs:
        leaking = [(True, False)] * lost + [(False, True)] * won + [(True, True)] * (n - lost - won)
        return [
            ({"thinking_leak": o, "non_empty": True}, {"thinking_leak": c, "non_empty": True})
            for o, c in leaking
        ]

    pairs = {f"w4a4+{i}": pair_checks(rows(*counts)) for i, counts in enumerate(key)}
    return judge_members(
        {k: v[0] for k, v in pairs.items()}, {k: v[1] for k, v in pairs.items()}
    ).verdict


def simulate(
    draw: Callable[..., list[Pairs]], case: tuple, alike: float, runs: int, seed: int, members: int
) -> dict[str, float]:
    """Shares of runs per verdict. members: arithmetics of the ensemble; alike: as in uniforms."""
    rng = np.random.default_rng(seed)
    counts = dict.fromkeys(("keeps", "loses", "undecided", "fragile"), 0)
    for _ in range(runs):
        pairs = [pair_checks(own) for own in draw(rng, case, members, alike)]
        verdict = judge_members(
            {f"w4a4+{i}": gates for i, (gates, _) in enumerate(pairs)},
            {f"w4a4+{i}": pooled for i, (_, pooled) in enumerate(pairs)},
        )
        counts[verdict.verdict] += 1
    return {name: count / runs for name, count in counts.items()}


def table_of(n: int, lost: float, won: float) -> np.ndarray:
    """P(lost = i, won = j) of n prompts, float64 [n + 1, n + 1]."""
    table = np.zeros((n + 1, n + 1))
    for changed, chance in enumerate(binom.pmf(np.arange(n + 1), n, lost + won)):
        i = np.arange(changed + 1)
        table[i, changed - i] = chance * binom.pmf(i, changed, lost / (lost + won))
    return table


def powers(n: int, change: float, loss: float, level: float) -> dict[str, float]:
    """Power of four tests of one gate, by enumeration. "best": a bound that no test of this level exceeds (Neyman-Pearson).

    The bound is the power of the most powerful test against one member of the hypothesis "as many lost as won": the one with
    the same share of changed prompts. A test that keeps the level for all members keeps it for this one.
    """
    truth = table_of(n, change + loss, change)
    null = table_of(n, change + loss / 2, change + loss / 2)
    lost, won = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
    exact = binom.cdf(won, lost + won, 0.5)
    mid = exact - binom.pmf(won, lost + won, 0.5) / 2
    score = norm.sf((lost - won) / np.sqrt(np.maximum(lost + won, 1)))
    result = {
        name: float(truth[p <= level].sum())
        for name, p in (("exact", exact), ("mid-p", mid), ("score", score))
    }
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.argsort(-np.where(null > 0, truth / null, np.inf), axis=None)
    level_used = np.cumsum(null.ravel()[order])
    cut = int(np.searchsorted(level_used, level))
    rest = level - (level_used[cut - 1] if cut else 0.0)
    power = truth.ravel()[order]
    return result | {
        "best": float(power[:cut].sum() + power[cut] * rest / null.ravel()[order][cut])
    }


def least_prompts(change: float, loss: float, level: float, power: float = 0.95) -> int:
    """The smallest n, in steps of 10, at which McNemar's exact test has the power."""
    return next(n for n in range(50, 2000, 10) if powers(n, change, loss, level)["exact"] >= power)


def same_gate(n: int, share: float) -> dict[str, float]:
    """Chance of each verdict of one `same_*` gate alone in which this share of the answers changes (exact binomial)."""
    chances = dict.fromkeys(("keeps", "loses", "undecided"), 0.0)
    for lost, chance in enumerate(binom.pmf(np.arange(n + 1), n, share)):
        gates, _ = judge_gates({"served": {"same_text": PairedGate(n, lost, 0)}})
        chances[gates["served"]["same_text"].verdict] += float(chance)
    return chances


def few_answers(name: str, n: int, share: float) -> float:
    """Chance that a gate with n answers, of which this share is lost, keeps next to gates of 100 that lose nothing."""
    kept = 0.0
    for lost, chance in enumerate(binom.pmf(np.arange(n + 1), n, share)):
        gates = {gate: PairedGate(100, 0, 0, passed=100) for gate in BESIDE} | {
            name: PairedGate(n, lost, 0, passed=n)
        }
        kept += float(chance) * (judge_members({"w4a4": gates}).verdict == "keeps")
    return kept


def coverage(rng: np.random.Generator, runs: int) -> list[tuple[int, float, float, float]]:
    """(n, discordant share each way, true difference, share of 90 % intervals that contain it)."""
    rows = []
    for n, change, loss in (
        (25, 0.02, 0.0),
        (100, 0.02, 0.0),
        (100, 0.02, 0.05),
        (240, 0.1, 0.05),
        (505, 0.01, 0.02),
    ):
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
    parser.add_argument(
        "--alike",
        type=float,
        default=0.0,
        help="Chance that a member changes an answer as all members do.",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--n", type=int, default=340, help="Tool calls in the cases that begin with 'calls'."
    )
    parser.add_argument("--only", default="", help="Cases whose name contains this text.")
    parser.add_argument(
        "--same",
        action="store_true",
        help="Only the chances of one gate that compares with bf16's answer.",
    )
    parser.add_argument(
        "--few", action="store_true", help="Only the chances that gates with few answers keep."
    )
    parser.add_argument(
        "--power",
        action="store_true",
        help="Only the power of the tests of one gate, by enumeration.",
    )
    options = parser.parse_args()
    start = time.monotonic()
    print(json.dumps(vars(options)))
    if options.power:
        # 5 % / 6: five gates that fail together and the pooled verdict by Holm's method; 2.5 % by Hochberg's.
        for n_prompts, level, change in itertools.product(
            (240, 340), (0.05, 0.025, 0.05 / 6), (0.01, 0.03, 0.10)
        ):
            text = ", ".join(
                f"{name} {power:.1%}"
                for name, power in powers(n_prompts, change, 0.10, level).items()
            )
            n = least_prompts(change, 0.10, level)
            print(
                f"n {n_prompts}, loss 10 points, {change:.0%} each way, level {level:.1%}: {text}; exact reaches 95 % at n = {n}"
            )
        return
    if options.same:
        shares = (0.0, 0.01, 0.02, 0.03, 0.05, 0.08, 0.10, 0.15)
        print(
            "keeps / loses, by the true share of changed answers: "
            + ", ".join(f"{s:.0%}" for s in shares)
        )
        for n in (60, 100, 200, 400):
            rows = [same_gate(n, share) for share in shares]
            print(
                f"n {n}: " + ", ".join(f"{row['keeps']:.2f} / {row['loses']:.2f}" for row in rows)
            )
        return
    if options.few:
        sizes = (9, 10, 20, 30, 40, 51, 52, 100)
        for name, share in itertools.product(
            ("same_language", "same_tool", "call_rate", "same_validity"), (0.01, 0.1)
        ):
            text = ", ".join(f"n {n} {few_answers(name, n, share):.1%}" for n in sizes)
            print(f"{name}, {share:.0%} lost: keeps {text}")
        return
    cases = [(answers, name, case) for name, case in CASES.items()]
    cases += [(partial(calls, options.n), name, case) for name, case in CALL_CASES.items()]
    cases += [(same_answers, name, case) for name, case in SAME_CASES.items()]
    for unused in (
        "least_n",
        "detectable_loss",
        "detectable_excess",
    ):  # no verdict depends on them, and they are slow
        setattr(rule.stats, unused, lambda *_: None)
    rule.stats.score_interval = lru_cache(None)(score_interval)
    functions = {name: partial(simulate, draw, case, options.alike) for draw, name, case in cases}
    functions |= {name: partial(leaks, case) for name, case in LEAK_CASES.items()}
    for name, function in functions.items():
        if options.only not in name:
            continue
        shares = function(options.runs, options.seed, options.members)
        low, high = wilson(
            round((shares["loses"] + shares["fragile"]) * options.runs), options.runs
        )
        text = ", ".join(f"{k} {v:.1%}" for k, v in shares.items())
        print(f"{name}: {text}; loses or fragile {low:.1%} to {high:.1%} (95 %)", flush=True)
    for n, change, difference, inside in (
        () if options.only else coverage(np.random.default_rng(options.seed), options.runs)
    ):
        print(
            f"coverage of the 90 % interval, n {n}, {change:.0%} change each way, true {difference:+.0%}: {inside:.1%}"
        )
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
