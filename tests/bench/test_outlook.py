"""The expected end of a run: predicted from its statistics, true in simulated runs, and readable in 80 columns."""

from __future__ import annotations

import io
import random

import pytest
from bench_cases import row
from rich.console import Console

from annie_quant.bench.outlook import Outlook, duration, growth_to_decide
from annie_quant.bench.progress_table import ProgressTable


def pairs(n, ratio, spread, seed=0):
    """Records of two sides over n prompts."""
    rng = random.Random(seed)
    rows = []
    for i in range(n):
        for backend, factor in (("a", 1.0), ("b", ratio)):
            time = 50 * factor * rng.lognormvariate(0, spread)
            rows.append(row(backend, time, case=str(i), tpot_ms=time / 10))
    return rows


def test_a_large_difference_is_decided_and_a_small_one_needs_more():
    assert growth_to_decide(pairs(60, 1.5, 0.05), "ab", {"w"}) == 1
    assert growth_to_decide(pairs(5, 1.5, 0.05), "ab", {"w"}) is None, "too few to predict"
    assert growth_to_decide(pairs(200, 1.0, 0.02), "ab", {"w"}) == 1, "equivalent"
    small = growth_to_decide(pairs(12, 1.03, 0.15, seed=4), "ab", {"w"})
    assert small is not None and small > 2


def test_the_prediction_is_right_in_order_of_magnitude():
    """At a difference of 8 % with 10 % noise, the prompts that decide are within a factor of four of the prediction."""
    good = 0
    for seed in range(6):
        growth = growth_to_decide(pairs(12, 1.08, 0.15, seed), "ab", {"w"})
        predicted = 12 * growth if growth and growth < 100 else 400
        needed = next(
            n for n in (12, 24, 48, 96, 192, 384, 768) if growth_to_decide(pairs(n, 1.08, 0.15, seed), "ab", {"w"}) == 1
        )
        good += needed / 4 <= predicted <= 4 * needed
    assert good >= 4


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "about 5 seconds"), (42, "about 40 seconds"), (100, "about 2 minutes"), (240, "about 4 minutes"),
     (5300, "about 88 minutes"), (5400, "about 1.5 hours"), (3600 * 2, "about 2 hours"), (60 * 59.6, "about 60 minutes")],
)  # fmt: skip
def test_a_time_is_in_round_numbers(seconds, text):
    assert duration(seconds) == text


def outlook_after(records, stop_early=False, seconds=60.0, done=30.0, total=300.0):
    now = [0.0]
    outlook = Outlook(["a", "b"], {"w"}, stop_early, clock=lambda: now[0])
    outlook.text(0, total)
    for record in records:
        outlook.add(record)
    now[0] = seconds
    return outlook.text(done, total)


def test_the_text_names_minutes_until_decided():
    records = pairs(15, 1.06, 0.12, seed=1)
    growth = growth_to_decide(records, "ab", {"w"})
    text = outlook_after(records, stop_early=True, seconds=600, done=30)
    assert text == f"about {round(10 * (growth - 1))} more minutes until decided" and growth > 1.3
    assert outlook_after(records, seconds=600, done=30) == f"{text}, 1.5 hours in all"
    assert outlook_after(pairs(60, 1.5, 0.05)) == "decided; about 9 minutes left"
    assert outlook_after([]) == "about 9 minutes left"
    assert outlook_after(pairs(10, 1.02, 0.4, seed=3)).endswith("then still undecided")
    assert Outlook(["a"]).text(3, 10) == "", "the first update has no speed"


def test_predictions_are_rare():
    calls = []
    now = [0.0]
    outlook = Outlook(["a", "b"], {"w"}, clock=lambda: now[0])
    for record in pairs(12, 1.06, 0.1):
        outlook.add(record)
    from annie_quant.bench import outlook as module

    original = module.growth_to_decide
    try:
        module.growth_to_decide = lambda *arguments: calls.append(1) or 2.0
        for second in range(1, 301):
            now[0] = float(second)
            outlook.text(second, 1000)
    finally:
        module.growth_to_decide = original
    assert 10 <= len(calls) <= 21


def test_the_table_fits_80_columns():
    table = ProgressTable(["nvfp4-of-a-long-name", "q4_k_m"])
    for record in pairs(12, 1.2, 0.1):
        record.backend = {"a": "nvfp4-of-a-long-name", "b": "q4_k_m"}[record.backend]
        record.faults = {"tool_call": "x", "no_markdown": "x", "thinking_leak": "x", "factual": "x"}
        table.add(record)
    table.update(120, 400, "nvfp4-of-a-long-name · conversational_with_a_long_name_of_its_own")
    out = io.StringIO()
    Console(file=out, width=80).print(table.table())
    lines = out.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines) and len(lines) <= 7
    assert "TTFT ms" in out.getvalue() and "120 of 400 visits" in lines[0]
