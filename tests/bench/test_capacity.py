"""Capacity: queues whose capacity is known, the sequential test, and a search against a server with one worker."""

from __future__ import annotations

import asyncio
import json
import math
import random

import pytest
from bench_cases import FACTS, TALK, annie, row
from click.testing import CliRunner
from fake_server import FakeServer, words

from annie_quant import bench, judge
from annie_quant.bench import capacity
from annie_quant.bench.capacity import Limits, lead_in, run, search
from annie_quant.cli import cli
from annie_quant.errors import UsageError


def queue(seed, limit_s, service=lambda rng: rng.expovariate(1.0)):
    """A send function: Poisson arrivals at one server, first come first served."""
    rng = random.Random(seed)

    def send(rate, run, count):
        clock = free = 0.0
        good = []
        for _ in range(count):
            clock += rng.expovariate(rate)
            free = max(free, clock) + service(rng)
            good.append(free - clock <= limit_s)
        return good

    return send


def test_the_interval_holds_the_capacity_of_a_queue():
    """M/M/1 with service rate 1: P(time > L) = exp(-(1 - rate) L), so 95 % are within L up to the rate 1 - ln 20 / L."""
    limit = 6.0
    known = 1 - math.log(20) / limit
    covered, errors = 0, []
    for seed in range(12):
        result = search(queue(seed, limit), Limits(ttft_ms=1e3 * limit), alone_s=1.0)
        covered += result.low <= known <= (result.high or math.inf)
        errors.append(result.estimate / known - 1 if result.estimate else 1.0)
    assert covered >= 11 and abs(sorted(errors)[6]) < 0.2


def test_a_server_of_twice_the_speed_has_twice_the_capacity():
    one, two = (
        search(queue(5, 6.0 / f, lambda rng, f=f: rng.expovariate(f)), Limits(ttft_ms=6e3 / f), alone_s=1 / f)
        for f in (1.0, 2.0)
    )
    assert two.estimate / one.estimate == pytest.approx(2, rel=0.25) and "requests/s, 95 % interval" in one.sentence


def test_clumps_count_as_few_requests():
    """The same number of failures is decided when they are spread, and open when they are in two clumps."""
    limits = Limits(ttft_ms=100)
    rng = random.Random(1)
    spread = [[rng.random() > 0.12 for _ in range(96)] for _ in range(8)]
    clumps = [[True] * 96] * 7 + [[False] * 92 + [True] * 4]
    assert capacity.judge(1.0, spread, limits).meets is False
    assert capacity.judge(1.0, clumps, limits).meets is None
    assert capacity.judge(1.0, [[True] * 96] * 8, limits).meets is True
    assert capacity.judge(1.0, [[False] * 48] * 4, limits).meets is False


def test_limits_judge_a_record():
    limits = Limits(ttft_ms=100, itl_ms=20)
    assert limits.met(row("a", 99.0, tpot_ms=19.0))
    assert not limits.met(row("a", 101.0, tpot_ms=19.0)) and not limits.met(row("a", 99.0, tpot_ms=21.0))
    assert not limits.met(row("a", 99.0, tpot_ms=19.0, error="reset"))
    assert not limits.met(row("a", 50.0, scheduled_first_content_ms=150.0)), (
        "the wait for a connection is the user's, too"
    )
    for wrong in ({}, {"ttft_ms": 1.0, "share": 1.0}, {"ttft_ms": 1.0, "share": 0.2}):
        with pytest.raises(UsageError):
            Limits(**wrong)


def test_the_lead_in_grows_with_what_the_queue_may_hold():
    assert lead_in(1.0, Limits(itl_ms=50), 0.5) == capacity.LEAST_LEAD_IN
    assert (
        lead_in(10.0, Limits(ttft_ms=1000), 0.5) == 100
        and lead_in(1000, Limits(ttft_ms=1000), 1) == capacity.MOST_LEAD_IN
    )


def test_a_budget_ends_the_search_with_what_is_known():
    inner, sent = queue(1, 6.0), []

    def send(rate, run, count):
        sent.append(rate)
        if len(sent) > 3:
            raise capacity.BudgetSpent
        return inner(rate, run, count)

    result = search(send, Limits(ttft_ms=6e3), alone_s=1.0)
    assert not result.complete and len(result.rates) <= 3
    never = search(lambda *a: [False] * a[2], Limits(ttft_ms=1), alone_s=1.0)
    assert never.low == 0 and never.sentence.startswith("below")
    always = search(lambda *a: [True] * a[2], Limits(ttft_ms=1, share=0.9), alone_s=1.0)
    assert always.high is None and always.sentence.startswith("at least")


def test_a_search_against_a_server_is_recorded_and_resumed(tmp_path):
    with FakeServer(annie) as server:
        words = ["capacity", "--backend-a", "a", server.url, "--ttft-ms", "1e-6", "--workload", "factual", "--output",
                 str(tmp_path / "run"), "--budget-s", "4", "--json"]  # fmt: skip
        first = CliRunner().invoke(cli, words)
        assert first.exit_code == 0, first.output
        result = json.loads(first.stdout)["capacities"]["a"]
        sent = len(server.bodies)
        assert result["low"] == 0 and sent > 50
        rows = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
        assert {r["rate_per_s"] for r in rows if not r["warmup"]} > {None}
        CliRunner().invoke(cli, words)
        again = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
        measured = [r["id"] for r in again if not r["warmup"]]
        assert len(measured) == len(set(measured)) >= len([r for r in rows if not r["warmup"]])
        with pytest.raises(UsageError, match="conversations only"):
            run([bench.Backend("a", server.url)], TALK, tmp_path / "talk", Limits(ttft_ms=1))


def test_a_resumed_search_sends_texts_of_the_same_size(tmp_path):
    sizes: list[int] = []

    def counting(body):
        sizes.append(len(body["messages"][0]["content"].split()))
        return words("It is Tokyo of course.", prompt_tokens=2 * sizes[-1])

    with FakeServer(counting) as server:
        for _ in range(2):
            workload = judge.load_workloads(["depth_4k"])[0]
            run([bench.Backend("a", server.url)], workload, tmp_path, Limits(ttft_ms=1e-6), budget_s=1)
    assert {round(n / 2048, 1) for n in sizes if n > 1000} == {1.0}, "two tokens per word, in both sessions"


def test_one_worker_of_twenty_milliseconds_has_a_capacity_below_fifty(tmp_path):
    """A server with one worker: requests wait for it. The search is cut by its budget, and its bounds are on the right side."""
    lock = asyncio.Lock()

    class OneWorker(FakeServer):
        async def _stream(self, request, body, script):
            async with lock:
                await asyncio.sleep(0.02)
                return await super()._stream(request, body, script)

    with OneWorker(annie) as server:
        result = run([bench.Backend("a", server.url)], FACTS, tmp_path / "run", Limits(ttft_ms=200), budget_s=6)
    result = result.capacities["a"]
    assert result.low < 52 and (result.high is None or result.high > 4)
