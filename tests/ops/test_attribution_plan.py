"""The planner of `annie-quant attribute`, with simulated faults: it names them within its arms, and no factor without a fault."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from annie_quant.judge.statistics import mcnemar
from annie_quant.ops.attribution import (
    MAX_ARMS,
    NEEDS,
    ArmResult,
    Conclusion,
    Effect,
    Factors,
    pairs_of,
    plan,
)

NAMES = (
    "weights",
    "activations",
    "template",
    "parser",
    "kv",
    "mtp",
    "prefix",
    "graphs",
    "batch",
    "sampling",
)
PAIRS = list(pairs_of(NAMES))
Causes = Sequence[tuple[str, ...]]


def search(
    measure: Callable[[Factors, bool], ArmResult],
    names: Sequence[str] = NAMES,
    max_arms: int = MAX_ARMS,
) -> tuple[Conclusion, list[ArmResult]]:
    results: list[ArmResult] = []
    while not isinstance(step := plan(names, results, max_arms), Conclusion):
        assert (step.factors, step.again) not in [(r.factors, r.again) for r in results], (
            "an arm is measured twice"
        )
        results.append(measure(step.factors, step.again))
        assert len(results) < 40
    assert sum(not r.failure for r in results) <= max_arms
    return step, results


def simulated(causes: Causes, n: int = 200, broken: float = 0.2, noise: float = 0.0, seed: int = 0):
    """Return a function that draws an arm's answers: a cause breaks a share of them, noise turns a share around in every arm."""
    rng = random.Random(seed)
    right = [rng.random() < 0.9 for _ in range(n)]

    def answers(factors: Factors) -> list[bool]:
        drawn = [r != (rng.random() < noise) for r in right]
        for cause in causes:
            if {*cause} <= {*factors}:
                drawn = [r and rng.random() >= broken for r in drawn]
        return drawn

    base = answers(())

    def measure(factors: Factors, again: bool) -> ArmResult:
        if not factors and not again:
            return ArmResult(factors)
        pairs = list(zip(base, answers(factors), strict=True))
        lost, won = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
        return ArmResult(factors, again, Effect(n, lost, won, mcnemar(lost, won)))

    return measure


def named(conclusion: Conclusion) -> set[frozenset[str]]:
    return {frozenset(cause) for cause in conclusion.causes}


@pytest.mark.parametrize("culprit", NAMES)
def test_a_single_culprit_is_named(culprit):
    conclusion, results = search(simulated([(culprit,)], noise=0.01, seed=NAMES.index(culprit)))
    assert named(conclusion) == {frozenset((culprit,))} and not conclusion.unfinished
    # Both are measured: that it breaks answers alone, and that nothing does without it.
    arms = {frozenset(r.factors): r.effect.broken for r in results if r.effect}
    alone = {culprit, NEEDS.get(culprit, culprit)}
    without = {culprit, *(name for name, other in NEEDS.items() if other == culprit)}
    assert arms[frozenset(alone)] and not arms[frozenset(NAMES) - without]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_is_named_as_a_pair(pair):
    conclusion, _ = search(simulated([pair]))
    if pair == (
        "activations",
        "graphs",
    ):  # one arm more would name it: activations cannot be split from the weights
        assert not conclusion.causes and conclusion.open == ((pair,),)
        conclusion, _ = search(simulated([pair]), max_arms=MAX_ARMS + 1)
    assert named(conclusion) == {frozenset(pair)}


@pytest.mark.parametrize("factors", range(1, 11))
def test_a_fault_is_named_among_any_number_of_factors(factors):
    names = NAMES[:factors]
    conclusion, _ = search(simulated([(names[-1],)]), names)
    assert named(conclusion) == {frozenset((names[-1],))}


def test_two_culprits_are_named_and_no_third():
    """Of 45 pairs of culprits within 12 arms at least half completely; what is named is always to blame."""
    complete = 0
    for a, b in itertools.combinations(NAMES, 2):
        conclusion, _ = search(simulated([(a,), (b,)]))
        assert {f for cause in conclusion.causes for f in cause} <= {a, b}
        assert conclusion.causes or any({*sum(each, ())} == {a, b} for each in conclusion.open)
        complete += named(conclusion) == {frozenset((a,)), frozenset((b,))}
    assert complete >= 23


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05, 0.2])
def test_without_a_fault_nobody_is_named(noise):
    """The stated level is 5 % of the runs; the full arm alone decides in almost all of them, after three arms."""
    ends = [search(simulated([], noise=noise, seed=seed)) for seed in range(200)]
    accused = [conclusion for conclusion, _ in ends if conclusion.causes]
    assert len(accused) <= 4
    assert sorted(len(results) for _, results in ends)[190] == 3


def test_beside_a_culprit_no_innocent_is_named():
    innocents = 0
    for seed in range(60):
        culprit = NAMES[seed % len(NAMES)]
        conclusion, _ = search(simulated([(culprit,)], noise=0.03, broken=0.25, seed=seed))
        innocents += bool({f for cause in conclusion.causes for f in cause} - {culprit})
    assert innocents <= 3


def test_a_factor_without_effect_is_left_out_and_reported():
    """An arm whose prefix cache had no hits is invalid: what it lost is not counted, and the search goes on without the factor."""
    measure = simulated([("kv",)])

    def without_hits(factors: Factors, again: bool) -> ArmResult:
        result = measure(factors, again)
        reasons = {"prefix": "no hits"} if "prefix" in factors else {}
        return ArmResult(factors, again, result.effect, ineffective=reasons)

    conclusion, results = search(without_hits)
    assert conclusion.untested == {"prefix": "no hits"} and named(conclusion) == {
        frozenset(("kv",))
    }
    assert sum("prefix" in r.factors for r in results) == 1


def test_a_refused_factor_is_found_and_the_rest_goes_on():
    measure = simulated([("batch",)])

    def refusing(factors: Factors, again: bool) -> ArmResult:
        return (
            ArmResult(factors, failure="unknown option")
            if "mtp" in factors
            else measure(factors, again)
        )

    conclusion, results = search(refusing)
    assert conclusion.untested == {"mtp": "unknown option"} and named(conclusion) == {
        frozenset(("batch",))
    }
    assert sum(bool(r.failure) for r in results) <= 5


def test_factors_that_are_refused_together_only():
    measure = simulated([])

    def refusing(factors: Factors, again: bool) -> ArmResult:
        return (
            ArmResult(factors, failure="out of memory")
            if {"mtp", "kv"} <= {*factors}
            else measure(factors, again)
        )

    conclusion, _ = search(refusing, ("weights", "kv", "mtp"))
    assert (
        not conclusion.causes
        and conclusion.unfinished == "no server starts with kv and mtp together"
    )
    conclusion, _ = search(refusing)
    assert not conclusion.causes and "kv and mtp and" in conclusion.unfinished


def test_too_few_arms_leave_explanations_open():
    conclusion, results = search(simulated([("mtp", "prefix")]), max_arms=5)
    assert len(results) == 5 and conclusion.unfinished and not conclusion.causes and conclusion.open


def test_a_loss_that_is_not_significant_is_not_called_none():
    """Seven lost answers are significant at 5 %, and not at the level of all arms together."""
    conclusion, results = search(
        lambda f, again: ArmResult(f, again, Effect(14, 7 * bool(f), 0, mcnemar(7 * bool(f), 0)))
    )
    assert not conclusion.causes and "larger --n" in conclusion.unfinished and len(results) == 3


def test_the_base_alone_says_nothing():
    assert plan([], [ArmResult(()), ArmResult((), True, Effect(9, 0, 0, 1.0))]) == Conclusion()


def test_a_factor_is_measured_only_with_the_one_it_needs():
    for culprit in ("weights", "activations", "kv"):
        conclusion, results = search(simulated([(culprit,)]))
        assert named(conclusion) == {frozenset((culprit,))}
        assert all("weights" in r.factors for r in results if "activations" in r.factors)
    # Without the weights as a factor, all arms have the same ones.
    conclusion, _ = search(simulated([("activations",)]), NAMES[1:])
    assert named(conclusion) == {frozenset(("activations",))}


def test_a_factor_is_untested_if_the_one_it_needs_is_refused():
    measure = simulated([])

    def without_weights(factors: Factors, again: bool) -> ArmResult:
        return (
            ArmResult(factors, failure="not loaded")
            if "weights" in factors
            else measure(factors, again)
        )

    conclusion, _ = search(without_weights)
    assert {*conclusion.untested} == {"weights", "activations"} and not conclusion.causes
