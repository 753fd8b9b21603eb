"""One decision, made once: the same answers give the same verdict through eval, search, report, demo, publish, bench and pytest."""

from __future__ import annotations

import json
from types import SimpleNamespace

import evaluations
import pytest
from flat_records import record_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from randomised import examples

from annie_quant import documents, judge
from annie_quant.bench.aggregates import aggregate_records
from annie_quant.cli import app as cli
from annie_quant.cli.pipeline import demo
from annie_quant.documents import BenchConfig, Identity, ModelFiles
from annie_quant.judge import decision
from annie_quant.judge.gates import tabulate
from annie_quant.judge.pairing import pair_checks
from annie_quant.pytest_plugin import AssertedRun
from annie_quant.report import card
from annie_quant.report.publishing import objections
from annie_quant.report.recheck import write_judgement
from annie_quant.report.run import load

GATES = ("tool_call", "factual", "non_empty")
KEPT = {"tool_call": (240, 0, 0), "factual": (100, 0, 0), "non_empty": (60, 0, 0)}
# name → (counts (n, lost, won) by member, the verdict)
CASES = {
    "keeps": ({"w4a4": {}, "w4a4+bf16": {}}, "keeps"),
    "loses everywhere": (
        {"w4a4": {"tool_call": (240, 58, 0)}, "w4a4+bf16": {"tool_call": (240, 70, 2)}},
        "loses",
    ),
    "loses in a further arithmetic": (
        {"w4a4": {}, "w4a4+bf16": {"tool_call": (240, 58, 0)}},
        "fragile",
    ),
    "leaks in a further arithmetic": (
        {"w4a4": {}, "w4a4+bf16": {"non_empty": (60, 9, 0)}},
        "fragile",
    ),
    "one leak in a further arithmetic": (
        {"w4a4": {}, "w4a4+bf16": {"non_empty": (60, 1, 0)}},
        "undecided",
    ),
    "undecided in a further arithmetic": (
        {"w4a4": {}, "w4a4+bf16": {"factual": (100, 3, 0)}},
        "undecided",
    ),
    "all gates together, in one arithmetic only": (
        {"w4a4": {}, "w4a4+bf16": {"tool_call": (240, 13, 5), "factual": (100, 6, 1)}},
        "loses",
    ),
    "only all gates together": (
        {
            name: {"tool_call": (240, 17, 5), "factual": (100, 7, 1)}
            for name in ("w4a4", "w4a4+bf16")
        },
        "loses",
    ),
}


def rows(counts):
    """(reference's checks, checkpoint's checks) per prompt, each prompt with one gate."""
    return [
        ({gate: not lost <= i < lost + won}, {gate: i >= lost})
        for gate, (n, lost, won) in (KEPT | counts).items()
        for i in range(n)
    ]


def side(kind, counts, **fields):
    pairs = rows(counts)
    paired, pooled = pair_checks(pairs)
    return kind(gates=tabulate(new for _, new in pairs), paired=paired, pooled=pooled, **fields)


def evaluation(members):
    return evaluations.from_counts(
        {name: KEPT | counts for name, counts in members.items()}, checkpoint_files=ModelFiles("x")
    )


def doors(members, folder):
    """Return door → the verdict that it shows: a standing, or whether the checkpoint is accepted."""
    document = judge.judge_evaluation(evaluation(members))
    (folder / "eval").mkdir(parents=True)
    (folder / "eval" / "nv.json").write_text(json.dumps(document.to_dict()))
    only_evaluated = load(folder)
    aggregates = documents.Aggregates(models=[documents.ModelRow(name="nv", format="NVFP4")])
    demo.add_evaluation(aggregates, "nv", folder / "eval" / "nv.json")
    verdict = judge.verdict(aggregates)
    documents.write(folder / "bench.json", documents.Bench(aggregates=aggregates, verdict=verdict))
    documents.write_run(folder, documents.Run(aggregates=aggregates, verdict=verdict))
    run = load(folder)
    shown = {
        "eval": document.verdict.verdict,
        "demo": verdict.outcome,
        "report of run.json": run.verdict.outcome,
        "report of eval/*.json": only_evaluated.verdict.outcome,
        "publish": card.gate_figures(run, "nv")["standing"],
    }
    accepted = {
        "search": not decision.final_reasons(document.verdict, document.numerics, ["w4a4"]),
        "badge": run.verdict.badge == "keeps",
        "pytest": passes(lambda: plugin(run).assert_gates("nv")),
    }
    failed = {
        "eval exit code": exit_code(document),
        "bench exit code": not verdict.passed,
        "publish": bool(objections(only_evaluated, "nv")),
        "publish of run.json": bool(objections(run, "nv")),
    }
    return shown, accepted, failed


def plugin(run):
    """A run whose backend "nv" is the evaluated model: its server answered nothing that is judged."""
    run.aggregates.served["nv"] = documents.ServedSide(model="nv")
    loaded = AssertedRun.__new__(AssertedRun)
    loaded.folder, loaded.aggregates, loaded.served = (
        run.folder,
        run.aggregates,
        run.aggregates.served,
    )
    return loaded


def passes(check):
    try:
        check()
    except AssertionError:
        return False
    return True


def exit_code(document):
    """The exit code of `annie-quant eval` with this evaluation."""
    from command_line import CliRunner

    patch = pytest.MonkeyPatch()
    with patch.context() as m:
        m.setattr("annie_quant.offline.evaluation.run", lambda *a, **k: document)
        m.setattr("annie_quant.offline.pair.export_notes", lambda *a: [])
        m.setattr("annie_quant.data.workloads.check_checkpoint", lambda *a, **k: None)
        result = CliRunner().invoke(cli, ["eval", "nv", "--reference", "bf16"])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return bool(result.exit_code)


@pytest.mark.parametrize("name", CASES)
def test_every_door_shows_the_same_verdict(name, tmp_path):
    members, verdict = CASES[name]
    shown, accepted, failed = doors(members, tmp_path / "run")
    assert set(shown.values()) == {verdict}, shown
    assert set(accepted.values()) == {verdict == "keeps"}, accepted
    assert set(failed.values()) == {verdict in ("loses", "fragile")}, failed


COUNTS = st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda c: (120, *c))
MEMBER = st.fixed_dictionaries(
    {"tool_call": COUNTS, "factual": COUNTS, "non_empty": st.just((60, 0, 0))}
)


@settings(
    deadline=None,
    max_examples=examples(15),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.fixed_dictionaries({name: MEMBER for name in ("w4a4", "w4a4+bf16", "w4a16")}))
def test_every_door_agrees_on_random_answers(tmp_path_factory, members):
    shown, accepted, failed = doors(members, tmp_path_factory.mktemp("doors") / "run")
    (verdict,) = set(shown.values())
    assert set(accepted.values()) == {verdict == "keeps"}, accepted
    assert set(failed.values()) == {verdict in ("loses", "fragile")}, failed


@pytest.mark.parametrize(
    ("counts", "verdict"),
    [
        ({}, "keeps"),
        ({"tool_call": (240, 58, 0)}, "loses"),
        ({"factual": (100, 3, 0)}, "undecided"),
        ({"tool_call": (240, 17, 5), "factual": (100, 7, 1)}, "loses"),
    ],
)
def test_a_benchmark_decides_as_an_evaluation_does(counts, verdict, tmp_path):
    """The same checks as answers of two servers, and as an evaluation without a server."""
    records = [
        record_of(
            id=f"{backend}/{i}",
            backend=backend,
            workload="w",
            case=str(i),
            text="x",
            finish_reason="stop",
            checks=checks,
        )
        for i, pair in enumerate(rows(counts))
        for backend, checks in zip(("bf16", "nvfp4"), pair, strict=True)
    ]
    identities = {"bf16": Identity(name="bf16", format="BF16"), "nvfp4": Identity(name="nvfp4")}
    aggregates = aggregate_records(records, BenchConfig(), identities)
    assert judge.verdict(aggregates).outcome == verdict
    assert judge.judge_evaluation(evaluation({"w4a4": counts})).verdict.verdict == verdict
    run = SimpleNamespace(folder=tmp_path, aggregates=aggregates)
    loaded = AssertedRun.__new__(AssertedRun)
    loaded.folder, loaded.aggregates, loaded.served = run.folder, aggregates, aggregates.served
    assert passes(lambda: loaded.assert_gates("nvfp4")) == (verdict == "keeps")


def test_an_evaluation_that_is_added_to_a_benchmark_is_part_of_its_decision(tmp_path):
    """bench writes its verdict; `eval --output RUN/eval/nvfp4.json` adds an arithmetic that loses what the server keeps."""
    served = {
        name: documents.ServedSide(model=name, gates=tabulate(old for old, _ in rows({})))
        for name in ("bf16", "nvfp4")
    }
    own = side(documents.OfflineSide, {})
    own = decision.judge_sides({"served": own})[0]["served"]
    served["nvfp4"].judged_by, served["nvfp4"].paired = "bf16", own.paired
    aggregates = documents.Aggregates(
        served=served, roles=documents.Roles(candidate="nvfp4", reference="bf16")
    )
    documents.write_run(
        tmp_path, documents.Run(aggregates=aggregates, verdict=judge.verdict(aggregates))
    )
    assert load(tmp_path).verdict.outcome == "keeps"
    (tmp_path / "eval").mkdir()
    document = judge.judge_evaluation(evaluation({"w4a4": {"tool_call": (240, 58, 0)}}))
    (tmp_path / "eval" / "nvfp4.json").write_text(json.dumps(document.to_dict()))
    shown = load(tmp_path).verdict
    assert (
        shown.outcome == "undecided"
        and not shown.passed
        and "annie-quant report DIR --judge" in shown.sentence
    )
    write_judgement(tmp_path)
    assert load(tmp_path).verdict.outcome == "loses"
