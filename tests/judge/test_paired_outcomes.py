"""Statistics of paired outcomes, against published examples and figures of R packages."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, chi2

from annie_quant.judge.pairing import pair_checks, sign_flips
from annie_quant.judge.statistics import (
    detectable_loss,
    excess_loss,
    mcnemar,
    mid_p,
    paired_n_to_decide,
    score_interval,
    wilson,
)

# (lost, won, n, confidence, low, high, digits). Sources:
#   Cavo 2012 and Bentur 2009: Fagerland, Lydersen, Laake, "Statistical Analysis of Contingency Tables" (2017), chapter 8, and the
#   tests of its R package contingencytables 3.0.0; Bentur also in ratesci 1.0.
#   Agresti and Min 2005 (16, 8 of 86); Tango 1998 (9, 3 of 32 and 0, 1 of 44): tests of the R package ratesci 0.3.
#   25, 28 of 618: PropCIs::scoreci.mp(25, 28, 618, 0.9) = -0.0148 to 0.0247.
TANGO = [
    (16, 6, 161, 0.95, -0.1240, -0.0054, 4),
    (7, 1, 21, 0.95, -0.517, -0.026, 3),
    (8, 16, 86, 0.95, -0.020, 0.207, 3),
    (3, 9, 32, 0.95, -0.027, 0.390, 3),
    (1, 0, 44, 0.90, -0.096, 0.037, 3),
    (25, 28, 618, 0.90, -0.0148, 0.0247, 4),
]


@pytest.mark.parametrize(("lost", "won", "n", "confidence", "low", "high", "digits"), TANGO)
def test_the_score_interval_is_tangos(lost, won, n, confidence, low, high, digits):
    assert [round(x, digits) for x in score_interval(lost, won, n, confidence)] == [low, high]


def square_and_add_interval(
    both: int, lost: int, won: int, neither: int, confidence: float = 0.9
) -> tuple[float, float]:
    """Return Newcombe's interval of (won - lost) / n: Wilson intervals of both rates, squared and added.

    Method 10 of Newcombe 1998 (Statistics in Medicine 17: 2635-2650), whose correlation has a continuity correction.
    both, neither: prompts that both sides pass or fail.
    """
    n = both + lost + won + neither
    if n == 0:
        return -1.0, 1.0
    ours, theirs = (both + won) / n, (both + lost) / n
    low_a, high_a = wilson(both + won, n, confidence)
    low_b, high_b = wilson(both + lost, n, confidence)
    margins = (both + lost) * (won + neither) * (both + won) * (lost + neither)
    cross = both * neither - lost * won
    phi = (max(cross - n / 2, 0) if cross > 0 else cross) / math.sqrt(margins) if margins else 0.0

    def distance(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    difference = ours - theirs
    return difference - distance(ours - low_a, high_b - theirs), difference + distance(
        high_a - ours, theirs - low_b
    )


def test_the_second_interval_is_newcombes():
    # contingencytables 3.0.0, Cavo 2012: (59, 6, 16, 80).
    assert [round(x, 4) for x in square_and_add_interval(59, 16, 6, 80, 0.95)] == [-0.1186, -0.0046]


@pytest.mark.parametrize(
    ("both", "lost", "won", "neither"), [(85, 8, 3, 4), (180, 30, 12, 18), (400, 10, 9, 86)]
)
def test_both_intervals_agree(both, lost, won, neither):
    n = both + lost + won + neither
    first, second = score_interval(lost, won, n), square_and_add_interval(both, lost, won, neither)
    assert max(abs(a - b) for a, b in zip(first, second, strict=True)) < 0.015


def test_no_change_has_the_closed_form():
    """For lost = won = 0 the score's square is n d / (1 - d): the bound is z^2 / (n + z^2)."""
    z = 1.6448536269514722
    for n in (1, 25, 55, 240, 1680):
        low, high = score_interval(0, 0, n)
        assert low == pytest.approx(-z * z / (n + z * z)) and high == pytest.approx(-low)
    assert score_interval(0, 0, 0) == (-1.0, 1.0)
    with pytest.raises(ValueError, match="counts"):
        score_interval(3, 3, 5)


@given(
    st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(0, 400)).filter(lambda c: sum(c))
)
def test_the_interval_contains_the_difference_and_mirrors(counts):
    lost, won, same = counts
    n = lost + won + same
    low, high = score_interval(lost, won, n)
    assert -1 <= low <= (won - lost) / n + 1e-9 and (won - lost) / n - 1e-9 <= high <= 1
    mirrored = score_interval(won, lost, n)
    assert mirrored[0] == pytest.approx(-high, abs=1e-6) and mirrored[1] == pytest.approx(
        -low, abs=1e-6
    )
    wider = score_interval(lost, won, n, 0.99)
    assert wider[0] <= low + 1e-9 and wider[1] >= high - 1e-9


@pytest.mark.parametrize(
    ("n", "change", "loss"), [(100, 0.02, 0.05), (240, 0.1, 0.05), (240, 0.05, 0.0)]
)
def test_coverage_of_the_interval(n, change, loss):
    draws = np.random.default_rng(1).multinomial(
        n, [change + loss, change, 1 - 2 * change - loss], 2000
    )
    inside = sum(
        low <= -loss <= high
        for low, high in (score_interval(int(a), int(b), n) for a, b, _ in draws)
    )
    assert 0.87 <= inside / 2000 <= 0.95


@given(st.integers(0, 80), st.integers(0, 80))
def test_mcnemar_is_the_exact_binomial_test(lost, won):
    expected = binomtest(lost, lost + won, alternative="greater").pvalue if lost + won else 1.0
    assert mcnemar(lost, won) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_a_published_table():
    # contingencytables 3.0.0, Cavo 2012: the exact conditional test has P = 0.052479, two-sided.
    assert 2 * mcnemar(16, 6) == pytest.approx(0.052479, abs=1e-6)
    assert mcnemar(900, 1100) > 0.99 and 0 < mcnemar(1100, 900) < 1e-5


def test_the_mid_p_of_published_tables():
    """Bentur 2009 and Cavo 2012 in Fagerland, Lydersen, Laake (BMC Medical Research Methodology 13:91, 2013): .039 and .035."""
    assert round(2 * mid_p(7, 1), 3) == 0.039 and round(2 * mid_p(16, 6), 3) == 0.035
    assert (
        mid_p(0, 0) == 1
        and mid_p(5, 5) == pytest.approx(0.5)
        and 0 < mid_p(1100, 900) < mcnemar(1100, 900)
    )


def test_the_detectable_loss_has_its_power():
    loss = detectable_loss(240, 0.02, 0.05)
    draws = np.random.default_rng(2).multinomial(240, [0.02 + loss, 0.02, 1 - 0.04 - loss], 4000)
    share = sum(mcnemar(int(a), int(b)) <= 0.05 for a, b, _ in draws) / 4000
    assert 0.775 < share < 0.825
    assert detectable_loss(240, 0.0, 0.05) < loss < detectable_loss(100, 0.02, 0.05)
    assert detectable_loss(4, 0.0, 0.05) is None, "four answers are never significant"


def decides(lost, won, n, count, margin, limit, level, excess):
    """The rule for one number of prompts, by the intervals and the tests themselves."""
    low, high = score_interval(lost * count / n, won * count / n, count)
    if low > -margin:
        return True
    if limit is not None and high >= limit:
        return False
    whole = (lost * count // n, math.ceil(Fraction(won * count, n)))
    if not excess:
        return mcnemar(*whole) < level
    return excess_loss(whole[0], count, margin, whole[1]) < level


@pytest.mark.parametrize("excess", [False, True])
@pytest.mark.parametrize(
    ("lost", "won", "n"),
    [
        (5, 1, 40),
        (7, 2, 50),
        (3, 0, 30),
        (2, 2, 45),
        (9, 3, 60),
        (4, 1, 90),
        (1, 6, 33),
        (8, 0, 80),
    ],
)
def test_n_to_decide_by_brute_force(lost, won, n, excess):
    """From this number on every number of prompts decides, and the one before does not."""
    for margin, limit, level in ((0.05, 0.0, 0.005), (0.05, -0.05, 0.01), (0.05, None, 0.05)):
        arguments = (margin, limit, level, excess)
        result = paired_n_to_decide(lost, won, n, *arguments)
        decided = [decides(lost, won, n, count, *arguments) for count in range(n + 1, 1200)]
        last_open = max((i for i, ok in enumerate(decided, n + 1) if not ok), default=n)
        if last_open == 1199:
            assert result is None or result > 1199
        else:
            assert result == last_open + 1


def test_n_to_decide_where_a_larger_number_of_prompts_leaves_open_what_a_smaller_one_decides():
    rule = (0.05, 0.0, 0.005, False)
    assert decides(5, 1, 40, 120, *rule) and not decides(5, 1, 40, 121, *rule)
    assert decides(7, 2, 50, 143, *rule) and not decides(7, 2, 50, 155, *rule)
    assert paired_n_to_decide(7, 2, 50, *rule) > 157
    assert paired_n_to_decide(2, 2, 40, 0.0, 0.0, 0.05) is None, "as many lost as won"


def checks(**gates):
    return dict(gates)


def test_a_gate_counts_where_it_applies_to_the_references_answer():
    pairs = [
        (checks(tool_call=True, non_empty=True), checks(tool_call=False, non_empty=True)),
        (checks(tool_call=False, non_empty=True), checks(tool_call=True, non_empty=False)),
        (checks(factual=True), checks(non_empty=True)),
        (checks(tool_call_raw=True), checks(tool_call_raw=False)),
    ]
    gates, pooled = pair_checks(pairs)
    assert {name: (g.n, g.lost, g.won) for name, g in gates.items()} == {
        "tool_call": (2, 1, 1),
        "non_empty": (2, 1, 0),
        "factual": (1, 1, 0),  # it does not apply to the checkpoint's answer, so that one fails
        "tool_call_raw": (1, 1, 0),
    }
    assert {name: g.passed for name, g in gates.items()} == {
        "tool_call": 1, "non_empty": 2, "factual": 1, "tool_call_raw": 1,
    }  # fmt: skip
    # By answer: the first and the third were right and are wrong; the second was wrong and is wrong; advisory gates do not count.
    assert (pooled.n, pooled.lost, pooled.won) == (3, 2, 0)
    assert pair_checks([])[1] is None


def test_one_empty_answer_is_one_loss_in_the_pooled_test():
    """Four gates fail together on one answer: the permutation flips them together, so four losses are not four answers."""
    change = dict.fromkeys(("non_empty", "factual", "stop", "repetition"), -1)
    assert sign_flips([(-1, change)] * 3) == pytest.approx((1 / 8, 1 / 8, 1 / 8), abs=0.02)


def test_fishers_combination_sees_small_losses_in_many_gates():
    gates = ("factual", "reasoning", "tool_call", "abstention", "no_markdown")
    changes = [(-1, {gate: -1}) for gate in gates for _ in range(3)]
    largest, fisher, _ = sign_flips(changes)
    assert fisher < 0.001 < largest
    # Independent gates: Fisher's statistic has 2 k degrees of freedom; discrete p-values make it conservative.
    statistic = -2 * len(gates) * math.log(1 / 8)
    assert fisher <= chi2.sf(statistic, 2 * len(gates)) * 1.5


def test_without_a_difference_the_permutation_p_is_valid():
    rng = np.random.default_rng(3)
    small = 0
    for run in range(300):
        changes = [
            (
                sign,
                dict.fromkeys(("factual", "stop") if rng.random() < 0.5 else ("tool_call",), sign),
            )
            for sign in rng.choice((-1, 1), 20).tolist()
        ]
        small += sign_flips(changes, flips=499, seed=run)[2] < 0.05
    assert small / 300 <= 0.09  # 5 % expected


def test_the_pooled_p_by_enumeration():
    """All 2^9 sign changes of nine answers, by the definitions: no random flips, no ranks."""
    rng = np.random.default_rng(5)
    for _ in range(4):
        signs = rng.choice((-1, 1), 9, p=(0.8, 0.2)).tolist()
        gates = [
            rng.choice(("factual", "stop", "tool_call"), rng.integers(1, 4), replace=False)
            for _ in signs
        ]
        changes = [
            (s * int(rng.integers(0, 2)), dict.fromkeys(g.tolist(), s))
            for s, g in zip(signs, gates, strict=True)
        ]
        every = [three_statistics(changes, flips) for flips in itertools.product((1, -1), repeat=9)]
        p = [
            [np.mean([other[i] >= row[i] - 1e-9 for other in every]) for i in range(3)]
            for row in every
        ]
        joint = np.mean([min(row) <= min(p[0]) + 1e-12 for row in p])
        largest, fisher, both = sign_flips(changes)
        assert (largest, fisher, both) == pytest.approx((p[0][1], p[0][2], joint), abs=0.03)


def three_statistics(changes, flips):
    """Lost less won answers, the largest such difference of a gate by the root of its changes, and Fisher's -2 sum of log p."""
    by_gate = {}
    for (_, change), flip in zip(changes, flips, strict=True):
        for gate, sign in change.items():
            by_gate.setdefault(gate, []).append(sign * flip)
    p = [
        sum(math.comb(len(row), k) for k in range(row.count(-1), len(row) + 1)) / 2 ** len(row)
        for row in by_gate.values()
    ]
    return (
        -sum(whole * flip for (whole, _), flip in zip(changes, flips, strict=True)),
        max(-sum(row) / math.sqrt(len(row)) for row in by_gate.values()),
        -2 * sum(map(math.log, p)),
    )
