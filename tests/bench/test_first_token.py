"""The first token over computed prompt tokens: planted lines, caches as servers report them, cold lengths, a real server."""

from __future__ import annotations

import itertools
import json
import random
import statistics

import pytest
from bench_cases import check, config_of, known, row, rows_of
from fake_server import FakeServer, words

from annie_quant import bench, judge
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.bench.prefill import cold_lengths, prefill_lines
from annie_quant.judge.library import build_workload

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)


def ladder(lengths=(128, 512, 2048), follow=128):
    cases = [
        {"id": f"{n}-{i}", "prompt_tokens": n, "follow_up_tokens": follow}
        for n in lengths
        for i in range(2)
    ]
    return build_workload(
        {"name": "ladder", "max_tokens": 4, "gates": [], "cases": cases, "extra": {}}
    )


def rows_on_a_line(backend, start, slope, cached=None, noise=0.0, lengths=LENGTHS, turn=0):
    """Records whose first token takes `start` ms and `slope` ms per computed token."""
    rng = random.Random(f"{backend} {start}")
    rows = []
    for n, i in itertools.product(lengths, range(3)):
        tokens = n + rng.randint(0, 20)
        ms = (start + slope * tokens) * rng.gauss(1, noise)
        whole = tokens + (cached or 0)
        more = {"usage": {"prompt_tokens": whole}, "cached_tokens": cached}
        rows.append(row(backend, ms, case=f"{n}-{i}", turn=turn, **more))
    return rows


def test_a_planted_line_is_found_within_its_interval():
    rows = rows_on_a_line("a", 40.0, 0.25, cached=0, noise=0.03)
    (line,) = prefill_lines(rows)
    points = [(r.tokens.prompt_tokens, r.timings.first_content_ms) for r in rows]
    slopes = [
        (y2 - y1) / (x2 - x1)
        for (x1, y1), (x2, y2) in itertools.combinations(points, 2)
        if x1 != x2
    ]
    assert line.ms_per_1000 == pytest.approx(1000 * statistics.median(slopes))
    assert line.low < 250 < line.high and line.high < 1.2 * line.low
    assert (line.cache, line.n, line.n_prompts) == ("cold", 21, 21)
    assert [p.n_prompts for p in line.points] == [3] * 7


def test_cold_and_cached_prompts_have_lines_of_their_own():
    cold = rows_on_a_line("a", 40.0, 0.25, cached=0)
    after = rows_on_a_line("a", 60.0, 0.3, cached=5000, turn=1)
    lines = {line.cache: line for line in prefill_lines([*cold, *after])}
    assert lines["cold"].ms_per_1000 == pytest.approx(250)
    assert lines["cached"].ms_per_1000 == pytest.approx(300)
    assert lines["cached"].start_ms == pytest.approx(60)
    assert lines["cached"].most_tokens < 8300, "tokens that were computed"


def test_no_slope_of_prompts_that_are_too_alike_or_too_few():
    (alike,) = prefill_lines(rows_on_a_line("a", 40.0, 0.25, cached=0, lengths=(128, 200)))
    (few,) = prefill_lines(rows_on_a_line("a", 40.0, 0.25, cached=0)[::6])
    assert alike.ms_per_1000 is None and few.ms_per_1000 is None
    assert alike.points and few.n_prompts == 4


def test_what_a_server_does_not_report_is_not_known_and_never_zero():
    rows = [
        *rows_on_a_line("a", 40.0, 0.25),
        *rows_on_a_line("a", 10.0, 0.01, turn=1),
    ]
    identities = {"a": known("a", runtime="vllm")}
    result = aggregate_records(rows, config_of(), identities)
    (line,) = result.prefill["a"]
    assert line.cache == "unknown" and line.ms_per_1000 == pytest.approx(250), "first turns only"
    assert [f.code for f in result.confounds if f.code == "cache_unknown"] == ["cache_unknown"]
    assert all(t.cached_tokens is None for t in result.turns["a"])


@pytest.mark.parametrize(("runtime", "state"), [("vllm", "cold"), ("other", "unknown")])
def test_zero_is_known_where_a_server_that_leaves_it_out_reports_others(runtime, state):
    """vLLM and SGLang send prompt_tokens_details only where cached tokens are more than 0."""
    rows = rows_on_a_line("a", 40.0, 0.25)
    usage = {"prompt_tokens": 4000, "prompt_tokens_details": {"cached_tokens": 3600}}
    hit = row("a", 50.0, case="hit", turn=1, usage=usage, cached_tokens=3600)
    result = aggregate_records([*rows, hit], config_of(), {"a": known("a", runtime=runtime)})
    assert {line.cache for line in result.prefill["a"]} == {state, "cached"}


def metrics(prompt, cached, generated):
    return (
        f'vllm:prompt_tokens_total{{engine="0"}} {prompt}\n'
        f'vllm:prefix_cache_queries_total{{engine="0"}} {prompt}\n'
        f'vllm:prefix_cache_hits_total{{engine="0"}} {cached}\n'
        f'vllm:generation_tokens_total{{engine="0"}} {generated}\n'
    )


@pytest.mark.parametrize("others", [0, 400])
def test_cached_tokens_from_metrics_unless_somebody_else_used_the_server(tmp_path, others):
    """usage has no prompt_tokens_details, as vLLM's without --enable-prompt-tokens-details."""
    sent = {"prompt": 0, "cached": 0, "reads": 0}

    def answer(body):
        prompt = sum(len(m["content"].split()) for m in body["messages"])
        sent["prompt"] += prompt
        sent["cached"] += prompt // 2 if len(body["messages"]) > 1 else 0
        return words("It is Tokyo of course.", prompt_tokens=prompt)

    def page():
        sent["reads"] += 1
        return metrics(sent["prompt"] + others * sent["reads"], sent["cached"], server.generated)

    with FakeServer(answer, style="vllm") as server:
        server.metrics = page
        sides = [bench.Backend("a", server.url)]
        bench.run(sides, [ladder()], tmp_path / "run", warmup=0, runs=1, with_memory=False)
    rows = [r for r in rows_of(tmp_path / "run") if r["workload"] == "ladder"]
    assert len(rows) == 12
    for r in rows:
        prompt = r["usage"]["prompt_tokens"]
        expected = prompt // 2 if r["turn"] else 0
        assert r["cached_tokens"] == (None if others else expected)


def test_different_caches_are_a_confound_and_blocks_of_a_cache_are_not():
    def side(name, share, spare=0):
        rows = []
        for i, turn in itertools.product(range(4), range(5)):
            prompt = 100 + 300 * turn
            cached = int(share * 300 * turn) - (spare if turn else 0)
            usage = {"prompt_tokens": prompt}
            more = {"usage": usage, "cached_tokens": cached}
            rows.append(row(name, case=str(i), turn=turn, **more))
        return rows

    identities = {name: known(name, url=f"http://{name}") for name in "ab"}
    again = check(identities, [*side("a", 1.0), *side("b", 0.0)])
    (found,) = [f for f in again if f.code == "different_cached"]
    assert found.severity == "confound" and "16 of 20" in found.message
    assert "1200 of 1300" in found.message
    for b in (side("b", 1.0), side("b", 1.0, spare=15)):
        codes = {f.code for f in check(identities, [*side("a", 1.0), *b])}
        assert "different_cached" not in codes
    shared = {name: known(name, url="http://one") for name in "ab"}
    codes = {f.code for f in check(shared, [*side("a", 1.0), *side("b", 0.0)])}
    assert "different_cached" not in codes, "one server finds what the other side has sent"


def echo(body):
    prompt = sum(len(m["content"].split()) for m in body["messages"])
    earlier = sum(len(m["content"].split()) for m in body["messages"][:-1])
    return words("It is Tokyo of course.", prompt_tokens=prompt, cached_tokens=earlier)


def test_each_length_is_warmed_up_and_ends_where_the_context_does(tmp_path):
    workload = ladder((128, 512, 2048, 8192))
    with FakeServer(echo) as server:  # its context is 4,096
        sides = [bench.Backend("a", server.url)]
        result = bench.run(sides, [workload], tmp_path / "run", runs=2, with_memory=False)
    rows = [r for r in rows_of(tmp_path / "run") if r["workload"] == "ladder"]
    cases = {r["case"].partition("-")[0] for r in rows}
    assert cases == {"128", "512", "2048"} and not any(r["error"] for r in rows)
    warm = [r for r in rows if r["warmup"] and r["turn"] == 0]
    assert sorted(r["case"] for r in warm) == sorted(c for c in {r["case"] for r in rows})
    measured = [r for r in rows if not r["warmup"]]
    assert len(measured) == 2 * 6 * 2 and not any(r["first_of_length"] for r in measured)
    for r in measured:
        tokens = r["usage"]["prompt_tokens"] - r["cached_tokens"]
        expected = int(r["case"].partition("-")[0]) if r["turn"] == 0 else 128
        assert abs(tokens - expected) <= 0.1 * expected
    bodies = [json.dumps(b["messages"])[:80] for b in server.bodies if "Note" in str(b)]
    assert len(set(bodies)) == len(bodies) / 2, "no prompt begins as an earlier one, but its own"
    codes = {f.code for f in result.aggregates.confounds}
    assert not codes & {"cold_length", "cache_unknown", "different_answers"}
    states = {line.cache: line.n for line in result.aggregates.prefill["a"]}
    assert states == {"cold": 12, "cached": 12}
    assert result.aggregates.turns["a"] == [], "they are no conversation"


def test_without_warmups_first_lengths_are_named_and_left_out(tmp_path):
    with FakeServer(echo) as server:
        sides = [bench.Backend("a", server.url)]
        result = bench.run(sides, [ladder()], tmp_path / "run", warmup=0, runs=1, with_memory=False)
    rows = [r for r in rows_of(tmp_path / "run") if r["workload"] == "ladder"]
    first = [r for r in rows if r["first_of_length"]]
    assert {r["case"].partition("-")[0] for r in first if r["turn"] == 0} >= {"512", "2048"}
    assert sum(line.n for line in result.aggregates.prefill["a"]) == len(rows) - len(first)


def test_a_first_length_is_named_if_it_is_slower_than_later_ones():
    def rows(first_ms, later):
        usage = {"prompt_tokens": 2048}
        each = [row("a", 100.0, case=str(i), usage=usage, cached_tokens=0) for i in range(later)]
        slow = row("a", first_ms, case="s", usage=usage, cached_tokens=0, first_of_length=True)
        slow.first_of_length = True
        return [slow, *each]

    assert cold_lengths(rows(300.0, 5)) == {2048: pytest.approx(3.0)}
    assert cold_lengths(rows(110.0, 5)) == {}
    assert cold_lengths(rows(110.0, 0)) == {2048: None}
    (found,) = [f for f in check({"a": known("a")}, rows(300.0, 5)) if f.code == "cold_length"]
    assert "2,048" in found.message and "3.0 times" in found.message


def test_bad_lengths_are_one_line(tmp_path):
    from annie_quant.core.errors import UsageError

    base = {"name": "w", "max_tokens": 9, "gates": []}
    for case, text in (
        ({"id": "a", "prompt_tokens": -1}, "prompt_tokens"),
        ({"id": "a", "prompt_tokens": 5, "turns": ["x"]}, "needs one of"),
        (
            {"id": "a", "turns": ["x"], "follow_up_tokens": 5},
            "'follow_up_tokens' without 'prompt_tokens'",
        ),
    ):
        with pytest.raises(UsageError, match=text):
            build_workload({**base, "cases": [case]})


def test_the_shipped_ladder_is_one_measurement():
    (workload,) = judge.load_workloads(["first_token"])
    assert {case.prompt_tokens for case in workload.cases} == set(LENGTHS)
    assert len({case.follow_up_tokens for case in workload.cases}) > 1
    assert not workload.default and workload.has_lengths
    from annie_quant.bench import plan

    assert len(plan.choose_cases(workload, 5, 0)) == len(workload.cases)


def test_llama_cpp_reports_what_it_takes_from_its_cache(tmp_path):
    pytest.importorskip("xllamacpp", reason="the serve extra is not installed")
    from annie_quant import checkpoint
    from annie_quant.core.files import ASSETS
    from annie_quant.ops import serving

    model = tmp_path / "tiny.gguf"
    checkpoint.convert(ASSETS / "tiny-annie", to="gguf", output=model, type="Q8_0")
    with serving.start(model, runtime="llama.cpp", log=tmp_path / "log") as server:
        sides = [bench.Backend("a", server.url)]
        workload = ladder((128, 1024), follow=256)
        result = bench.run(sides, [workload], tmp_path / "run", warmup=1, runs=1, with_memory=False)
    rows = [r for r in rows_of(tmp_path / "run") if r["workload"] == "ladder" and not r["warmup"]]
    assert len(rows) == 8
    for r in rows:
        timings = r["server_timings"]
        assert r["cached_tokens"] == timings["cache_n"]
        assert r["usage"]["prompt_tokens"] - r["cached_tokens"] == timings["prompt_n"]
        if r["turn"] == 0:
            assert r["cached_tokens"] <= 16
    assert {line.cache for line in result.aggregates.prefill["a"]} <= {"cold", "cached"}


def test_another_cache_than_in_the_stored_run_is_named(tmp_path):
    from annie_quant import documents

    def stored(folder, cached):
        rows = rows_on_a_line("a", 40.0, 0.25, cached=cached)
        for record in rows:
            record.tokens.usage = {"prompt_tokens": 9000}
            record.prompt_sha256 = record.case
        folder.mkdir()
        lines = [documents.encode_record(r) + b"\n" for r in rows]
        (folder / "records.jsonl").write_bytes(b"".join(lines))
        config = config_of(w={"temperature": 0})
        aggregates = aggregate_records(rows, config, {"a": known("a")})
        result = documents.Bench(config=config, backends={"a": known("a")}, aggregates=aggregates)
        documents.write(folder / "bench.json", result)
        return folder

    cold = stored(tmp_path / "cold", 0)
    warm = stored(tmp_path / "warm", 5000)
    (line,) = bench.regression(cold, warm).caches
    assert "21 of 21 prompts" in line and "0 of 9000 tokens were cached" in line
    assert bench.regression(cold, stored(tmp_path / "same", 10)).caches == []
