"""From how many prompts on an early look can keep a gate: why the demo's benchmark does not stop early (tests/perf/verdict.md)."""

from __future__ import annotations

from scipy.stats import norm

from annie_quant.bench import plan as planning
from annie_quant.cli.pipeline import DemoSettings
from annie_quant.documents import PairedGate
from annie_quant.judge.decision import decided_at


def first_n_that_keeps(level: float) -> int:
    return next(
        n for n in range(1, 1000) if decided_at("tool_call", PairedGate(n=n, lost=0, won=0), level)
    )


def by_hand(level: float, margin: float = 0.05) -> int:
    """No lost answer of n: the score interval's lower bound is -z^2 / (n + z^2), so n > z^2 (1 - margin) / margin."""
    z2 = norm.isf(level) ** 2
    return int(z2 * (1 - margin) / margin) + 1


def test_an_early_look_needs_three_times_as_many_prompts_as_the_end():
    early, end = first_n_that_keeps(planning.LEVEL), first_n_that_keeps(0.05)
    assert (early, end) == (by_hand(planning.LEVEL), by_hand(0.05)) == (150, 52)


def test_the_demo_has_fewer_prompts_than_an_early_look_needs():
    assert by_hand(0.05) <= DemoSettings().n_served < by_hand(planning.LEVEL)
