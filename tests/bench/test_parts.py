"""Plan, records, confounds, aggregates, memory and regression."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from bench_cases import FACTS, MEMORY, TALK, check, config_of, folder_of, known, row

from annie_quant import documents
from annie_quant.bench import memory
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.bench.backend import Backend
from annie_quant.bench.plan import Visit, choose_cases, planned_visits
from annie_quant.bench.regressions import losses, regression
from annie_quant.bench.run_folder import RecordLog, read_records
from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.documents import BenchConfig


def test_the_plan_is_balanced_seeded_and_interleaved():
    visits = planned_visits(["a", "b", "c"], [FACTS, MEMORY, TALK], BenchConfig(runs=3, seed=5))
    assert len(visits) == 3 * 3 * 8
    requests = {
        name: [
            (v.workload.name, v.cases[0][0].id, v.cases[0][1]) for v in visits if v.backend == name
        ]
        for name in "abc"
    }
    assert requests["a"] == requests["b"] == requests["c"] and len(set(requests["a"])) == 24
    order = [v.backend for v in visits]
    for block in range(0, len(order) - 5, 6):
        assert order[block : block + 3] == order[block + 3 : block + 6][::-1]
    again = planned_visits(["a", "b", "c"], [FACTS, MEMORY, TALK], BenchConfig(runs=3, seed=5))
    assert (
        visits
        == again
        != planned_visits(["a", "b", "c"], [FACTS, MEMORY, TALK], BenchConfig(runs=3, seed=6))
    )
    first = [order[i] for i in range(0, len(order), 6)]
    assert len(set(first)) == 3, "every backend is first in some block"


def test_n_chooses_the_same_cases_for_the_same_seed():
    assert [c.id for c in choose_cases(FACTS, 3, 1)] == [c.id for c in choose_cases(FACTS, 3, 1)]
    assert len(choose_cases(FACTS, 3, 1)) == 3 and len(choose_cases(FACTS, 99, 1)) == 6


def test_an_incomplete_line_is_removed_and_an_invalid_one_is_named(tmp_path):
    path = tmp_path / "records.jsonl"
    line = b'{"id": "%d", "backend": "a", "workload": "w", "case": "c"}\n'
    path.write_bytes(line % 1 + line % 2 + b'{"id": "to')
    assert [r.id for r in read_records(path)] == ["1", "2"]
    records = RecordLog(path)
    records.append(row("a", tpot_ms=float("nan")))
    records.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["id"] for r in rows] == ["1", "2", "a/w/c/0"] and rows[2]["tpot_ms"] is None
    for broken, fault in (
        (b"not json", "not JSON"),
        (b"[1]", "expected object, got array"),
        (b"{}", "missing required field 'id'"),
        (line[:-2] % 2 + b', "turn": "x"}', "turn: expected int, got str"),
        (b"[" * 100_000, "expected object"),
        (b'{"x":' * 100_000, "nested too deeply"),
    ):
        path.write_bytes(line % 1 + broken + b"\n")
        for read in (RecordLog, read_records):
            with pytest.raises(EnvironmentFault, match="line 2") as caught:
                read(path)
            assert fault in caught.value.message and "\n" not in caught.value.message


def test_a_full_disk_is_a_one_line_error(tmp_path):
    records = RecordLog(tmp_path / "records.jsonl")
    os.close(records._log._file)
    records._log._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(EnvironmentFault, match="the disk is full"):
        records.append(row("a"))
    records.close()


def test_the_ids_of_requests_have_the_names_of_backend_and_workload():
    """Only the slash of a rate ("@2/s") is replaced; it also took "/s" from names that begin with an s."""
    names = {"support": "b/support@2ps/a/0/0", "web/search": "b/web/search@2ps/a/0/0"}
    for name, expected in names.items():
        workload = dataclasses.replace(FACTS, name=name)
        case = dataclasses.replace(FACTS.cases[0], id="a")
        visit = Visit(0, "b", workload, ((case, 0),), documents.Load(0, 2.0))
        assert visit.ids(case, 0) == [expected]


def test_backends_are_checked():
    for name, url in (
        ("a", "localhost:8000"),
        ("a", "ftp://x"),
        ("", "http://x"),
        ("a/b", "http://x"),
    ):
        with pytest.raises(UsageError):
            Backend(name, url)
    assert Backend("a", "http://h:1/v1/").completions_url == "http://h:1/v1/chat/completions"


@pytest.mark.parametrize(
    ("a", "b", "code"),
    [
        ({"meta": {"source": "x"}}, {"meta": {"source": "y"}}, "different_weights"),
        (
            {"model_meta": {"n_params": 9_000_000_000}},
            {"model_meta": {"n_params": 27_000_000_000}},
            "different_models",
        ),
        ({"model_meta": {"n_vocab": 1300}}, {"model_meta": {"n_vocab": 1400}}, "different_models"),
        ({"chat_template_sha256": "x"}, {"chat_template_sha256": "y"}, "different_templates"),
        (
            {"sampling_defaults": {"top_k": 40}},
            {"sampling_defaults": {"top_k": 20}},
            "different_sampling",
        ),
        ({"runtime": "vllm"}, {"runtime": "llama.cpp"}, "different_engines"),
        ({}, {}, "weights_unknown"),
    ],
)
def test_identities_of_servers_are_compared(a, b, code):
    findings = check({"a": known("a", **a), "b": known("b", **b)})
    assert [f.code for f in findings] == [code]


def test_a_small_difference_in_parameter_counts_is_accepted():
    same = {"meta": {"source": "x"}}
    sides = {
        "a": known("a", model_meta={"n_params": 1000}, **same),
        "b": known("b", model_meta={"n_params": 1005}, **same),
    }
    assert check(sides) == []


def test_timings_exclude_cold_starts_errors_warmups_and_stalls():
    rows = [row("a", 10 + i / 10, case=f"c{i}") for i in range(9)]
    rows += [
        row("a", 9300, case="stall"),
        row("a", 5000, case="cold", cold=True),
        row("a", 1, case="warm", warmup=True),
        row("a", 0.0003, case="early", first_event_ms=0.0003, sent_ms=15.6),
        row("a", 2, case="failed", error="HTTP 500", checks={"non_empty": False}),
    ]
    served = aggregate_records(rows, config_of(w={"temperature": 0}), {"a": known("a")}).served["a"]
    assert served.workloads["w"].n == 9 and served.workloads["w"].ttft_content_ms.p99 < 11
    assert served.left_out_of_timings == 4 and served.errors == 1
    assert (served.gates["non_empty"].passes, served.gates["non_empty"].n) == (12, 13)


def test_percentiles_by_hand():
    rows = [row("a", float(v), case=str(v)) for v in range(1, 102)]
    workload = (
        aggregate_records(rows, config_of(w={}), {"a": known("a")}).served["a"].workloads["w"]
    )
    times = workload.ttft_content_ms
    assert (times.p50, times.p90, times.p99, times.mean) == (51, 91, 100, 51)
    assert times.low < 51 < times.high
    assert workload.itl_ms.n == 202 and workload.itl_ms.mean == 1.5


def test_greedy_repeats_of_one_prompt_are_one_answer():
    rows = [row("a", repeat=i, checks={"non_empty": i != 2}) for i in range(5)]
    identity = {"a": known("a")}
    greedy = (
        aggregate_records(rows, config_of(w={"temperature": 0}), identity)
        .served["a"]
        .gates["non_empty"]
    )
    assert (greedy.passes, greedy.n) == (0, 1)
    sampled = (
        aggregate_records(rows, config_of(w={"temperature": 0.7}), identity)
        .served["a"]
        .gates["non_empty"]
    )
    assert (sampled.passes, sampled.n) == (4, 5)


def test_turns_and_crossover():
    rows = []
    for case in range(8):
        for turn in range(5):
            rows.append(
                row(
                    "a",
                    90 + turn * 10,
                    case=str(case),
                    turn=turn,
                    tpot_ms=30.0,
                    completion_tokens=40,
                )
            )
            rows.append(
                row(
                    "b",
                    300 + turn * 300,
                    case=str(case),
                    turn=turn,
                    tpot_ms=25.0,
                    completion_tokens=20,
                )
            )
    aggregates = aggregate_records(rows, config_of(w={}), {"a": known("a"), "b": known("b")})
    assert [p.ttft_content_ms for p in aggregates.turns["b"]] == [300, 600, 900, 1200, 1500]
    # 110 + 30 n = 900 + 25 n  →  n = 158
    assert (
        aggregates.crossover[0].tokens == pytest.approx(158)
        and aggregates.crossover[0].faster_when_short == "a"
    )
    compared = {c.metric: c for c in aggregates.comparisons}
    assert compared["ttft_content_ms"].significant and compared["ttft_content_ms"].n_prompts == 40


def test_speed_gates_use_the_limits_of_the_original_plan():
    slow = [row("a", 300 + i, case=str(i), decode_tok_s=20.0) for i in range(20)]
    fast = [row("b", 90 + i / 10, case=str(i), decode_tok_s=33.0) for i in range(20)]
    served = aggregate_records(
        slow + fast, config_of(w={}), {"a": known("a"), "b": known("b")}
    ).served
    assert {g: r.verdict for g, r in served["a"].speed_gates.items()} == {
        "ttft": "fail",
        "decode": "fail",
    }
    assert {g: r.verdict for g, r in served["b"].speed_gates.items()} == {
        "ttft": "pass",
        "decode": "pass",
    }


def test_memory_of_a_process_and_its_children():
    code = "import sys; held = bytearray(60_000_000); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        counts = []
        levels = memory.measure(child.pid, counts.append)
        child.stdin.close()
    assert counts == [1, 5]
    assert 60e6 < levels.idle.process_rss_bytes < 200e6
    assert levels.five.process_rss_bytes >= levels.idle.process_rss_bytes * 0.9
    assert memory.sample(2**22 + 1).process_rss_bytes is None


def test_bench_never_imports_torch():
    code = "import sys, annie_quant.bench; assert not {'torch', 'scipy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_regression_is_detected_and_noise_is_not(tmp_path):
    before = folder_of(tmp_path / "before", 1.0)
    slower = regression(before, folder_of(tmp_path / "slower", 1.05, leaks=6))
    assert {r.metric for r in slower.worse} == {"ttft_content_ms", "e2e_ms"} and not slower.better
    assert slower.worse[0].change == pytest.approx(0.05, abs=0.01)
    assert [(g.backend, g.gate) for g in slower.gates_lost] == [("a", "non_empty")]
    same = regression(before, folder_of(tmp_path / "same", 1.0001))
    assert not same.worse and not same.better and not same.gates_lost
    faster = regression(before, folder_of(tmp_path / "faster", 0.9))
    assert not faster.worse and faster.better


def stored_answers(folder, lost=(), won=(), n=100, gate="tool_call"):
    """A stored run of backend "a": prompts in `lost` fail; those in `won` pass where the others of 80 to 99 fail."""
    rows = [
        row(
            "a",
            100.0 + i % 7,
            case=str(i),
            prompt_sha256=str(i),
            checks={gate: i not in lost and (i < 80 or i in won)},
        )
        for i in range(n)
    ]
    folder.mkdir()
    (folder / "records.jsonl").write_bytes(
        b"".join(documents.encode_record(r) + b"\n" for r in rows)
    )
    config, identities = config_of(w={"temperature": 0}), {"a": known("a")}
    aggregates = aggregate_records(rows, config, identities)
    documents.write(
        folder / "bench.json",
        documents.Bench(config=config, backends=identities, aggregates=aggregates),
    )
    return folder


def test_watch_compares_the_same_prompts(tmp_path):
    """It compared two verdicts: a gate that fails by itself (80 of 100 before) could lose any number of answers unnoticed."""
    before = stored_answers(tmp_path / "before")
    lost = regression(before, stored_answers(tmp_path / "lost", lost=range(12))).gates_lost
    assert [(g.gate, g.pair.lost, g.pair.won) for g in lost] == [("tool_call", 12, 0)]
    assert (
        "gate lost: a tool_call, 12 lost and 0 won of 100 answers"
        in losses(regression(before, tmp_path / "lost"))[0]
    )
    exchanged = stored_answers(tmp_path / "exchanged", lost=range(6), won=range(80, 86))
    assert not regression(before, exchanged).gates_lost, "as many won as lost"


def test_a_server_against_itself_is_reported():
    twice = {"a": known("a", url="http://x"), "b": known("b", url="http://x")}
    assert [f.code for f in check(twice)] == ["same_server"]


@pytest.mark.parametrize(
    ("ours", "theirs", "noted"), [(1.5, 1.4, False), (39.0, 23.0, True), (0.2, 0.1, False)]
)
def test_the_clients_clock_is_checked_against_the_servers(ours, theirs, noted):
    rows = [row("a", tpot_ms=ours, server_timings={"predicted_per_token_ms": theirs})]
    findings = check({"a": known("a")}, rows)
    assert [f.code for f in findings] == (["client_overhead"] if noted else [])


@pytest.mark.parametrize(("load", "noted"), [(0.9, False), (5.4, True)])
def test_a_busy_machine_is_reported(load, noted):
    findings = check({"a": known("a")}, [row("a", load_per_core=load)])
    assert [f.code for f in findings] == (["busy_machine"] if noted else [])


@pytest.mark.parametrize(
    ("realtime", "expected"),
    [((True, True), None), ((None, None), None), ((True, False), "1 of 2")],
)
def test_a_client_without_realtime_priority_is_reported(realtime, expected):
    rows = [row("a", realtime=r) for r in realtime if r is not None] or [row("a")]
    findings = check({"a": known("a")}, rows)
    assert [f.code for f in findings] == ([] if expected is None else ["normal_priority"])
    assert expected is None or expected in findings[0].message
