"""Ladders: a planted cliff is found within one level, per side, and nothing is found where there is none.

The servers answer every labelled request rightly up to their cliff and wrongly beyond it, so the level is known before.
"""

from __future__ import annotations

import json
import random

import pytest
from bench_cases import row, rows_of
from fake_server import FakeServer, Script, words

pytest.importorskip("annie_quant._stream", reason="the streaming client is not built here")

from annie_quant import bench
from annie_quant.bench.cliffs import cliff_findings, find_cliff, measured_ladders
from annie_quant.cli.bench import BenchOptions, workloads_of
from annie_quant.core.errors import UsageError
from annie_quant.data.workloads import CHAIN_STEPS, LADDER_LEVELS, ladder
from annie_quant.documents import LadderPoint
from annie_quant.documents.persona import load_persona
from annie_quant.judge.statistics import wilson

LONG = {"build_info": "b1", "default_generation_settings": {"params": {}, "n_ctx": 1 << 20}}


def labels(workloads):
    """What each request expects: the last user's text, and the number of calls before it, to (tool, arguments)."""
    expected = {}
    for workload in workloads:
        for case in workload.cases:
            for turn, expect in enumerate(case.expect.get("turns") or [case.expect]):
                text = case.turns[0] if case.turns else case.messages[-1]["content"]
                expected[text, turn if case.turns else 0] = (
                    expect["tool"],
                    json.dumps(expect["arguments"]),
                )
    return expected


def server(workloads, is_right):
    """A model that makes the expected call where `is_right(body)`, and else calls another tool."""
    expected = labels(workloads)

    def answer(body):
        last = max(i for i, m in enumerate(body["messages"]) if m["role"] == "user")
        step = sum(m["role"] == "tool" for m in body["messages"][last:])
        call = expected.get((body["messages"][last]["content"], step))
        if call is None:  # the smoke question, the context's measurement
            return words("It is Tokyo of course.")
        if is_right(body):
            return Script(tools=[call])
        other = next(
            t["function"]["name"] for t in body["tools"] if t["function"]["name"] != call[0]
        )
        return Script(tools=[(other, "{}")])

    return answer


def tokens(body):
    return sum(len(str(m.get("content")).split()) for m in body["messages"])


def run(tmp_path, workloads, *right, runs=1, props=LONG):
    servers = [FakeServer(server(workloads, one), props=props) for one in right]
    for started in servers:
        started.__enter__()
    try:
        sides = [bench.Backend(name, s.url) for name, s in zip("ab", servers, strict=False)]
        done = bench.run(sides, workloads, tmp_path / "run", warmup=0, runs=runs, with_memory=False)
    finally:
        for started in servers:
            started.stop()
    found = {
        (name, ladder.axis): ladder
        for name, own in done.aggregates.ladders.items()
        for ladder in own
    }
    return found, {(f.code, *f.backends): f.message for f in done.aggregates.confounds}, done


def test_cliffs_at_8k_tokens_and_at_40_tools_are_found_within_one_level(tmp_path):
    workloads = [*ladder("tokens", 8), *ladder("tools", 8)]
    found, messages, done = run(
        tmp_path, workloads, lambda b: tokens(b) <= 8192 + 100 and len(b["tools"]) <= 40
    )
    depth, tools = found["a", "tokens"].cliff, found["a", "tools"].cliff
    assert (depth.holds, depth.breaks, depth.earliest, depth.latest) == (8192, 16384, 16384, 16384)
    assert (tools.holds, tools.breaks) == (40, 46)
    sentences = [message for (code, *_), message in messages.items() if code == "cliff"]
    assert len(sentences) == 1, "one key per code and side"
    everything = [f.message for f in done.aggregates.confounds if f.code == "cliff"]
    assert any("a breaks at 16,384 tokens of context: 40 of 40 [91%, 100%] prompts are right up to 8,192, 0 of 32" in m
               for m in everything)  # fmt: skip
    assert any("a breaks at 46 tools: 64 of 64" in m and "0 of 16" in m for m in everything)
    assert done.verdict.outcome != "loses" and not done.aggregates.served["a"].gates, (
        "a ladder decides nothing"
    )


def test_a_chain_breaks_at_its_step_and_a_side_that_breaks_alone_is_named(tmp_path):
    def up_to_step_6(body):
        return sum(m["role"] == "tool" for m in body["messages"]) < 6

    found, messages, _ = run(tmp_path, ladder("steps", 8), lambda b: True, up_to_step_6)
    assert found["a", "steps"].cliff is None and found["b", "steps"].cliff.breaks == 7
    assert [p.level for p in found["a", "steps"].points] == list(range(1, CHAIN_STEPS + 1))
    assert "no cliff up to step 12 of a chain: 8 of 8" in messages["no_cliff", "a"]
    assert "from step 7 of a chain on 0 of 48" in messages["earlier_cliff", "b"]
    assert ("earlier_cliff", "a") not in messages


def test_a_malformed_call_before_the_request(tmp_path):
    workloads = ladder("poisoned", 8)
    malformed = [
        sum(m["role"] == "assistant" and "tool_calls" not in m for m in w.cases[0].messages)
        for w in workloads
    ]
    # A well-formed exchange ends in a reply without calls, a malformed one is such a message alone.
    calls = [sum("tool_calls" in m for m in w.cases[0].messages) for w in workloads]
    assert calls == [4, 3, 2, 0] and malformed == [4] * 4
    found, _, _ = run(
        tmp_path, workloads, lambda b: sum("tool_calls" in m for m in b["messages"]) == 4
    )
    cliff = found["a", "poisoned"].cliff
    assert (cliff.holds, cliff.breaks) == (0, 1)


def test_pass_k_needs_every_repeat(tmp_path):
    count = {}

    def every_second_time(body):
        key = (body["messages"][-1]["content"], len(body["tools"]))
        count[key] = count.get(key, 0) + 1
        return len(body["tools"]) < 40 or count[key] % 2 == 1

    found, messages, _ = run(tmp_path, ladder("tools", 8), every_second_time, runs=2)
    at = {p.level: p for p in found["a", "tools"].points}
    assert (at[52].passes, at[52].rate, found["a", "tools"].repeats) == (0, 0.5, 2)
    assert found["a", "tools"].cliff.breaks == 40 and "(pass^2)" in messages["cliff", "a"]


def test_levels_beyond_the_servers_context_are_not_sent(tmp_path):
    props = {"build_info": "b1", "default_generation_settings": {"params": {}, "n_ctx": 20000}}
    found, messages, done = run(tmp_path, ladder("tokens", 3), lambda b: True, props=props)
    assert [p.level for p in found["a", "tokens"].points] == [0, 1024, 2048, 4096, 8192, 16384]
    assert "no cliff up to 16,384 tokens" in messages["no_cliff", "a"] and not done.ended.unasked
    sent = {r["workload"] for r in rows_of(tmp_path / "run")}
    assert "ladder_tokens_16384" in sent and "ladder_tokens_32768" not in sent
    props["default_generation_settings"]["n_ctx"] = 2500
    found, _, _ = run(tmp_path / "tools", ladder("tools", 2), lambda b: True, props=props)
    assert 5 <= found["a", "tools"].points[-1].level < 52, "tools fill a context too"


# ---- the levels


@pytest.mark.parametrize("persona", [None, "home"])
def test_every_level_asks_the_same_and_offers_the_right_tool(persona):
    workloads = ladder("tools", 6, load_persona(persona) if persona else None)
    asked = [[case.messages[-1]["content"] for case in w.cases] for w in workloads]
    assert all(texts == asked[0] for texts in asked) and len(set(asked[0])) > 1
    places = set()
    for level, workload in zip(LADDER_LEVELS["tools"], workloads, strict=True):
        for case in workload.cases:
            names = [t["function"]["name"] for t in workload.tools_for(case)]
            assert len(names) == len(set(names)) == level and case.expect["tool"] in names
            places.add(names.index(case.expect["tool"]) / level)
    assert max(places) > 0.6 and min(places) < 0.4, "the right tool is at any place"
    if persona:
        own = {t["function"]["name"] for t in load_persona(persona).tools}
        assert {case.expect["tool"] for case in workloads[0].cases} <= own


def test_the_command_measures_ladders_alone_or_next_to_named_workloads(tmp_path):
    def names(**more):
        options = BenchOptions(
            backend_a=("a", "http://127.0.0.1:1"),
            ladder=("tools", "steps"),
            output=tmp_path,
            **more,
        )
        return [(w.name, len(w.cases)) for w in workloads_of(options)]

    tools = [(f"ladder_tools_{level}", 4) for level in LADDER_LEVELS["tools"]]
    assert names(n=4) == [*tools, ("ladder_steps", 4)]
    assert names(n=4, workloads="factual") == [("factual", 4), *tools, ("ladder_steps", 4)]
    assert names(n=4, persona="home")[0] == tools[0]


def test_an_unknown_axis_is_refused():
    with pytest.raises(UsageError, match="no ladder 'depth'"):
        ladder("depth", 3)


# ---- the rule


def simulated(rng, rates, n=16):
    right = {
        level: {str(i): rng.random() < rate for i in range(n)} for level, rate in enumerate(rates)
    }
    points = []
    for level, cases in right.items():
        passes = sum(cases.values())
        low, high = wilson(passes, n)
        points.append(
            LadderPoint(level=level, passes=passes, n=n, low=low, high=high, rate=passes / n)
        )
    return points, right


def test_the_interval_holds_the_step_and_equal_levels_have_no_cliff():
    rng = random.Random(1)
    shown = held = 0
    for _ in range(150):
        at = rng.randint(1, 8)
        cliff = find_cliff(*simulated(rng, [0.9] * at + [0.35] * (9 - at)))
        shown += cliff is not None
        held += cliff is not None and cliff.earliest <= at <= cliff.latest
    assert shown > 110 and held >= 0.95 * shown
    assert sum(find_cliff(*simulated(rng, [0.8] * 9)) is not None for _ in range(150)) <= 13
    assert find_cliff(*simulated(rng, [0.2] * 4 + [0.9] * 5)) is None, (
        "answers that become better have no cliff"
    )


def test_repeats_of_one_prompt_are_not_more_evidence():
    """Negative control: four prompts cannot show a cliff, however often they are asked, and at however many levels."""
    rows = [
        row("a", workload=f"ladder_tools_{level}", case=str(i), checks={}, right=level < 20)
        for level in (5, 8, 12, 16, 20, 26) for i in range(4) for _ in range(20)
    ]  # fmt: skip
    assert measured_ladders(rows)[0].ladder.cliff is None
    assert [f.code for f in cliff_findings(measured_ladders(rows))] == ["no_cliff"]
