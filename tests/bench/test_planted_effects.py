"""Effects that are planted in one side of an A/B: each is in the records, and named by a finding; without it there is none.

Servers are scripted: times and counts are given by the test, so each expected value is known before.
"""

from __future__ import annotations

import hashlib
import random

import pytest
from bench_cases import ask, row, rows_of
from bench_cases import workload as build
from fake_server import FakeServer, Script, words

pytest.importorskip("annie_quant._stream", reason="the streaming client is not built here")

from annie_quant import bench, judge
from annie_quant.bench import confounds, counters
from annie_quant.bench.run_folder import read_records

TOPICS = ("code", "prose", "math")
CODE = {"code": 0.3, "prose": 0.7, "math": 0.7}
EVEN = dict.fromkeys(TOPICS, 0.7)


def topics(n=14):
    cases = {t: [{"id": f"{t}{i}", "messages": ask(f"{t} {i}")} for i in range(n)] for t in TOPICS}
    return [build(f"text_{t}", cases[t], gates=["non_empty"]) for t in TOPICS]


def spread(text: str) -> float:
    """A fixed number from -0.05 to 0.05, different for each prompt."""
    return hashlib.sha256(text.encode()).digest()[0] / 2550 - 0.05


def drafting(rates):
    """llama.cpp with a draft model: 100 drafted tokens per answer, accepted at the rate of the prompt's topic."""

    def answer(body):
        text = body["messages"][-1]["content"]
        rate = rates.get(text.split()[0], 0.7) + spread(text)
        return words(
            "It is Tokyo of course.",
            timings={"draft_n": 100, "draft_n_accepted": round(100 * rate)},
        )

    return answer


def run(tmp_path, a, b, workloads, **options):
    with FakeServer(a) as first, FakeServer(b) as second:
        sides = [bench.Backend("a", first.url), bench.Backend("b", second.url)]
        done = bench.run(
            sides,
            workloads,
            tmp_path / "run",
            **{"warmup": 1, "runs": 1, "with_memory": False} | options,
        )
    return done, {(f.code, *f.backends): f.message for f in done.aggregates.confounds}


def test_acceptance_that_falls_on_code_is_named(tmp_path):
    done, findings = run(tmp_path, drafting(EVEN), drafting(CODE), topics())
    even, code = (
        sum(round(100 * (rate + spread(f"code {i}"))) for i in range(14)) for rate in (0.7, 0.3)
    )
    differ = findings["different_acceptance", "a", "b"]
    assert f"in text_code: {even / 1400:.0%} of 1400 and {code / 1400:.0%} of 1400" in differ
    rows = [r for r in rows_of(tmp_path / "run") if not r["warmup"] and r["workload"] != "smoke"]
    assert all(r["drafted_tokens"] == 100 and r["acceptance_source"] == "timings" for r in rows)
    served = done.aggregates.served["b"].workloads
    assert served["text_code"].acceptance.p50 == pytest.approx(0.3, abs=0.05)
    assert served["text_prose"].acceptance.p50 == pytest.approx(0.7, abs=0.05)
    changed = {
        c.workload
        for c in done.aggregates.comparisons
        if c.metric == "acceptance" and c.significant
    }
    assert "text_code" in changed and not changed & {"text_prose", "text_math"}


def test_equal_acceptance_is_not_named(tmp_path):
    _, findings = run(tmp_path, drafting(EVEN), drafting(EVEN), topics())
    assert "different_acceptance" not in {code for code, *_ in findings}


def test_a_dropped_prefix_cache_is_named(tmp_path):
    workload = judge.load_workloads(["prefix_hit"])[0]

    def caching(body):
        prompt = sum(len(m["content"].split()) for m in body["messages"])
        return words(
            "It is Tokyo of course.",
            prompt_tokens=prompt,
            cached_tokens=prompt - 20 if prompt > 20 else 0,
        )

    def dropping(body):
        return words("It is Tokyo of course.", cached_tokens=0)

    _, findings = run(tmp_path, caching, dropping, [workload])
    assert (
        "prefix_hit" in findings["prefix_cache_dropped", "b"]
        and ("prefix_cache_dropped", "a") not in findings
    )
    measured = [r for r in read_records(tmp_path / "run" / "records.jsonl") if not r.warmup]
    assert {r.load.prefix for r in measured} == {"hit"} and {r.load.depth for r in measured} == {
        4096
    }
    assert all((r.tokens.cached_tokens or 0) > 3000 for r in measured if r.backend == "a")
    assert all(r.tokens.cached_tokens == 0 for r in measured if r.backend == "b")
    assert all(0.9 * 4096 < r.tokens.prompt_tokens < 1.1 * 4096 for r in measured), (
        "one word is one token here: measured first"
    )


def test_a_miss_is_a_miss_and_both_sides_get_the_same_prompts(tmp_path):
    workload = judge.load_workloads(["prefix_miss"])[0]
    prompts: dict[str, list[str]] = {"a": [], "b": []}

    def side(name):
        def answer(body):
            system = body["messages"][0]["content"]
            if len(system) > 9000:
                prompts[name].append(system)
            return words("It is Tokyo of course.", cached_tokens=3000 if name == "b" else 0)

        return answer

    _, findings = run(tmp_path, side("a"), side("b"), [workload], warmup=0, runs=2)
    assert sorted(prompts["a"]) == sorted(prompts["b"]) and len(prompts["a"]) == 24
    assert len({text[:60] for text in prompts["a"]}) == 24, "each prompt begins differently"
    assert len({text[80:] for text in prompts["a"]}) < 24 / 2, "and goes on alike"
    assert ("prefix_cache_hit", "b") in findings and ("prefix_cache_hit", "a") not in findings


def test_a_side_that_is_slower_only_at_depth_is_in_the_records(tmp_path):
    """5 % of the time per token, at depth alone. The clock is the test's: records with known gaps, not a server's."""
    from bench_cases import config_of, known

    from annie_quant.bench.aggregates import aggregate_records

    rows = []
    for depth in (0, 4096, 16384):
        for i in range(12):
            for name in "ab":
                slow = 1.05 if name == "b" and depth == 16384 else 1.0
                tpot = (10 + depth / 4096) * slow * (1 + spread(f"{depth} {i} {name}") / 10)
                more = {
                    "itl_ms": [tpot] * 19,
                    "tpot_ms": tpot,
                    "decode_tok_s": 1e3 / tpot,
                    "depth": depth,
                    "prefix": "miss",
                }
                rows.append(
                    row(name, workload=f"depth_{depth}", case=str(i), token_events=20, **more)
                )
    result = aggregate_records(rows, config_of(), {n: known(n) for n in "ab"})
    slower = {
        c.workload for c in result.comparisons if c.metric == "itl_token_ms" and c.significant
    }
    assert "depth_16384" in slower and not slower & {"depth_0", "depth_4096"}


# ---- chunks are not tokens


def pieces(text_events, tokens, **more):
    return Script(content=[f"{i} " for i in range(text_events)], completion_tokens=tokens, **more)


def story(n=8):
    return [
        build(
            "story",
            [{"id": str(i), "messages": ask(f"Story {i}")} for i in range(n)],
            gates=["non_empty"],
        )
    ]


def test_streams_that_merge_words_are_named(tmp_path):
    merged = {"gap_s": 0.002}
    done, findings = run(
        tmp_path, lambda b: pieces(30, 31, **merged), lambda b: pieces(10, 31, **merged), story()
    )
    message = findings["merged_tokens", "b"]
    assert (
        "3.00 tokens each" in message
        and "0.33 events per token" in message
        and ("merged_tokens", "a") not in findings
    )
    rows = [r for r in read_records(tmp_path / "run" / "records.jsonl") if not r.warmup]
    merged_row = next(r for r in rows if r.backend == "b")
    assert (
        merged_row.tokens.token_events == 10
        and merged_row.tokens.tokens_per_event == pytest.approx(3.1)
    )
    assert sum(merged_row.itl_token_ms) / 9 == pytest.approx(merged_row.timings.tpot_ms)
    served = done.aggregates.served
    # Per event b looks three times as slow as per token; per token the two are compared as they are.
    assert (
        served["b"].workloads["story"].itl_ms.p50
        > 2.5 * served["b"].workloads["story"].itl_token_ms.p50
    )
    assert served["a"].workloads["story"].itl_token_ms.mean == pytest.approx(
        served["a"].workloads["story"].itl_ms.mean, rel=0.05
    )


def test_more_events_than_tokens_are_named(tmp_path):
    _, findings = run(tmp_path, lambda b: pieces(30, 31), lambda b: pieces(30, 16), story())
    assert (
        "0.50 tokens per event" in findings["split_tokens", "b"]
        and ("split_tokens", "a") not in findings
    )


def test_counts_in_every_event_are_used():
    record = row("a", itl_ms=[10.0, 30.0], event_tokens=[1, 3], completion_tokens=5)
    assert record.itl_token_ms == [10.0, 10.0, 10.0, 10.0]
    assert row("a", itl_ms=[10.0], tokens_estimated=True).itl_token_ms == []


# ---- vLLM's counters


def page(drafted, accepted, generated):
    return (
        "# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.\n"
        f'vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted / 2}\n'
        f'vllm:spec_decode_num_draft_tokens_total{{engine="1",model_name="m"}} {drafted / 2}\n'
        f'vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}\n'
        f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 7.0\n'
    )


def test_the_counters_of_a_page():
    read = counters.draft_counters(page(200, 90, 1e3))
    assert read == counters.Counters(200.0, 90.0, 1000.0)
    for other in ("vllm:generation_tokens_total 5.0\n", "<html>"):
        assert counters.draft_counters(other) is None


METRICS_PAGE = """# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b, {x}\\"y"} 3.0
vllm:generation_tokens_total{engine="0"} %s
vllm:ttft_seconds_bucket{le="0.1"} 5
http_requests_total 7 1795360217883
broken{ 5
nan_value NaN
"""


def test_broken_pages_of_metrics_are_no_error():
    rng = random.Random(1)
    page = (
        METRICS_PAGE % "12"
        + "vllm:spec_decode_num_draft_tokens_total 5\nvllm:spec_decode_num_accepted_tokens_total NaN\n"
    )
    assert counters.draft_counters(page) is None, "a counter without a finite value is none"
    assert counters.draft_counters(page.replace("NaN", "4")) == counters.Counters(5, 4, 12)
    for _ in range(300):
        assert (
            counters.draft_counters("".join(rng.choice('abc{}"\\=,:# 1.e+\n') for _ in range(60)))
            is None
        )


@pytest.mark.parametrize("others", [0, 500])
def test_acceptance_from_metrics_unless_somebody_else_used_the_server(tmp_path, others):
    with FakeServer(lambda body: words("It is Tokyo of course."), style="vllm") as server:
        used = iter(range(10**6))
        server.metrics = lambda: page(
            10 * server.generated, 4 * server.generated, server.generated + others * next(used)
        )
        bench.run([bench.Backend("a", server.url)], topics(3), tmp_path / "run", warmup=0, runs=1, with_memory=False,
                  concurrency=3)  # fmt: skip
    rows = [r for r in rows_of(tmp_path / "run") if r["workload"] != "smoke"]
    if others:
        assert all(r.get("drafted_tokens") is None for r in rows)
    else:
        assert all(r["acceptance_source"] == "metrics" for r in rows)
        assert sum(r["drafted_tokens"] for r in rows) == pytest.approx(
            10 * sum(r["completion_tokens"] for r in rows)
        )
        assert confounds.acceptance(read_records(tmp_path / "run" / "records.jsonl"))[
            0
        ] == pytest.approx(0.4)


def test_a_cache_that_cannot_be_is_not_believed(tmp_path):
    def lying(body):
        return words("It is Tokyo of course.", prompt_tokens=50, cached_tokens=60)

    with FakeServer(lying) as server:
        bench.run(
            [bench.Backend("a", server.url)],
            topics(1)[:1],
            tmp_path / "run",
            warmup=0,
            runs=1,
            with_memory=False,
        )
    rows = rows_of(tmp_path / "run")
    assert all(r.get("cached_tokens") is None for r in rows) and any(
        "not believed" in w for r in rows for w in r["warnings"]
    )


def test_a_resumed_run_sends_texts_of_the_same_size(tmp_path):
    workload = judge.load_workloads(["depth_4k"])[0]
    sizes: list[int] = []

    def counting(factor):
        def answer(body):
            words_sent = len(body["messages"][0]["content"].split())
            sizes.append(words_sent)
            return words("It is Tokyo of course.", prompt_tokens=factor * words_sent)

        return answer

    def once(answer):
        sizes.clear()
        with FakeServer(answer) as server:
            side = bench.Backend("a", server.url)
            bench.run([side], [workload], tmp_path, warmup=0, runs=1, with_memory=False)
        return {n for n in sizes if n > 1000}

    first = once(counting(2))
    assert {round(n / 2048, 1) for n in first} == {1.0}, "two tokens per word"
    records = tmp_path / "records.jsonl"
    records.write_text("".join(records.read_text().splitlines(keepends=True)[:6]))
    assert once(counting(4)) <= first, "the size is not measured again"
