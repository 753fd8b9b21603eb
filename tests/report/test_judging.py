"""A report shows the stored verdict and judges nothing; `annie-quant report DIR --judge` makes a new one."""

from __future__ import annotations

import json
import shutil

import pytest
import report_fixture
from bench_cases import FACTS, ask, workload
from command_line import CliRunner
from fake_server import FakeServer, Script, words
from paths import DATA

from annie_quant import bench, documents, report
from annie_quant.cli import app as cli
from annie_quant.judge import decision
from annie_quant.pytest_plugin import AssertedRun
from annie_quant.report import publishing, recheck
from annie_quant.report.run import load


@pytest.mark.parametrize("version", ["schema_1", "schema_2"])
def test_a_run_of_an_older_version_shows_its_verdict_with_a_note(version, tmp_path):
    folder = shutil.copytree(DATA / "runs" / version, tmp_path / "run")
    stored = json.loads((folder / "run.json").read_text())["verdict"]
    shown = load(folder).verdict
    assert (shown.sentence, shown.candidate, shown.passed) == (
        stored["sentence"],
        stored["candidate"],
        True,
    )
    assert shown.caveats == [
        *stored["caveats"],
        "the verdict was made by an older rule; today's rule: annie-quant report DIR --judge",
    ]
    assert "made by an older rule" in report.compose(folder)["report.md"]
    # the roles that it had are kept
    done = CliRunner().invoke(cli, ["report", str(folder), "--judge"])
    assert done.exit_code == 0, done.output
    run = documents.decode(documents.Run, folder / "run.json")
    assert run.verdict.rule == decision.RULE and (run.verdict.candidate, run.verdict.incumbent) == (
        "a",
        "b",
    )
    assert run.aggregates.roles == documents.Roles(candidate="a", incumbent="b")
    assert not any("older rule" in caveat for caveat in load(folder).verdict.caveats)


def test_loading_a_report_changes_no_verdict(tmp_path):
    """A verdict in run.json that is not today's is shown as it is stored."""
    folder = shutil.copytree(DATA / "runs/schema_2", tmp_path / "run")
    document = json.loads((folder / "run.json").read_text())
    document["verdict"] |= {"outcome": "loses", "passed": False, "sentence": "a loses everything."}
    (folder / "run.json").write_text(json.dumps(document))
    before = {path: path.read_bytes() for path in folder.rglob("*.json*")}
    assert load(folder).verdict.sentence == "a loses everything."
    assert {path: path.read_bytes() for path in folder.rglob("*.json*")} == before


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Three sides: bf16 and q4 answer rightly, the candidate loses half of the facts."""
    folder = tmp_path_factory.mktemp("roles") / "run"
    cases = [
        {"id": f"f{i}", "messages": ask(f"Capital {i}?"), "expect": {"contains": ["Tokyo"]}}
        for i in range(60)
    ]
    facts = workload("factual", cases, gates=list(FACTS.gates))

    def half(body):
        number = (
            int(body["messages"][-1]["content"].split()[-1].rstrip("?"))
            if "Capital" in str(body)
            else 1
        )
        return words("It is Tokyo." if number % 2 else "It is Rome.")

    def right(body):
        return words("It is Tokyo.")

    with FakeServer(half) as a, FakeServer(right) as b, FakeServer(right) as c:
        sides = [bench.Backend(name, server.url) for name, server in (("x", a), ("y", b), ("z", c))]
        bench.run(
            sides,
            [facts],
            folder,
            warmup=0,
            runs=1,
            with_memory=False,
            reference="y",
            candidate="x",
        )
    return folder


def test_the_same_answers_with_other_roles(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    bench_verdict = documents.read_bench(folder).verdict
    assert (bench_verdict.candidate, bench_verdict.incumbent, bench_verdict.outcome) == (
        "x",
        "z",
        "loses",
    )
    judged = recheck.judge_again(folder, documents.Roles(candidate="z", reference="y"))
    assert (judged.verdict.candidate, judged.verdict.incumbent, judged.verdict.outcome) == (
        "z",
        "x",
        "keeps",
    )
    assert documents.read_bench(folder).verdict == bench_verdict, "nothing is written"
    against = recheck.judge_again(folder, documents.Roles(candidate="y", incumbent="x"))
    assert against.aggregates.served["y"].paired["factual"].won == 30


def test_absolute_requirements_stay_where_nothing_was_paired(tmp_path):
    """Evaluations of version 0.1.0 have no reference: judged again, a missed requirement became undecided."""
    folder = report_fixture.make_run(tmp_path / "run", n=3)
    document = json.loads((folder / "run.json").read_text())
    sides = document["aggregates"]["offline"]["naive"].values()
    for side in sides:
        side["paired"] = {}
        for gate in side["gates"].values():
            gate["meets"] = None
    (folder / "run.json").write_text(json.dumps(document))
    stored, judged = load(folder).aggregates, recheck.judge_again(folder).aggregates
    verdicts = [
        sorted(
            (gate.place, gate.gate, gate.verdict) for gate in decision.deciding_gates(run, "naive")
        )
        for run in (stored, judged)
    ]
    assert verdicts[0] == verdicts[1]
    assert any(verdict == "loses" for _, _, verdict in verdicts[1])


def test_an_edited_verdict_is_an_objection(run, tmp_path):
    """Verdicts in the file that its counts do not give, with passes and n as they were."""
    folder = shutil.copytree(run, tmp_path / "run")
    before = publishing.objections(load(folder), "x")
    assert [line.split(" (")[0] for line in before] == [
        "served: factual loses: 30 lost and 0 won of 60, -50.0 points"
    ]
    document = json.loads((folder / "bench.json").read_text())
    document["verdict"] |= {"outcome": "keeps", "passed": True, "sentence": "x keeps every gate."}
    side = document["aggregates"]["served"]["x"]
    for row in (*side["gates"].values(), *side["paired"].values(), side["pooled"]):
        row["verdict"] = "keeps" if "lost" in row else "pass"
    (folder / "bench.json").write_text(json.dumps(document))
    after = publishing.objections(load(folder), "x")
    assert after[0] == before[0], "counted again"
    assert after[1].startswith(
        "the run's verdict does not hold: keeps (x keeps every gate.) is stored, loses (x loses"
    )


def test_a_confounded_run_is_not_published(tmp_path):
    cases = [{"id": f"c{i}", "messages": ask(f"Who is {i}?")} for i in range(60)]
    talk = workload("talk", cases, gates=["stop"])

    def other(body):
        return words(f"{body['messages'][-1]['content']} I do not know that at all.")

    with FakeServer(lambda body: words("Blorp.")) as a, FakeServer(other) as b:
        sides = [bench.Backend("a", a.url), bench.Backend("b", b.url)]
        bench.run(
            sides,
            [talk],
            tmp_path,
            warmup=0,
            runs=1,
            with_memory=False,
            reference="b",
            candidate="a",
        )
    lines = publishing.objections(load(tmp_path), "a")
    assert lines == ["CONFOUNDED: constant answers, different answers"]


def test_roles_of_the_plug_in(run):
    AssertedRun(run, candidate="z", reference="y").assert_gates()
    with pytest.raises(AssertionError, match="factual loses"):
        AssertedRun(run).assert_gates()


def test_a_role_of_a_report_that_names_no_side(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    done = CliRunner().invoke(cli, ["report", str(folder), "--candidate", "nvfp4"])
    assert "--candidate nvfp4: no side has this name" in str(done.exception)
    done = CliRunner().invoke(cli, ["report", str(folder), "--candidate", "x", "--incumbent", "x"])
    assert "it is the candidate already" in str(done.exception)


def test_a_run_of_failed_requests_fails_the_plug_in(tmp_path):

    def smoke_only(body):
        if "Japan" in str(body):
            return words("Tokyo")
        return Script(status=500, error="no")

    with (
        FakeServer(smoke_only) as a,
        FakeServer(lambda body: words("Tokyo")) as b,
    ):
        sides = [bench.Backend("a", a.url), bench.Backend("b", b.url)]
        bench.run(sides, [FACTS], tmp_path, warmup=0, runs=1, with_memory=False, reference="b")
    with pytest.raises(AssertionError, match="requests failed"):
        AssertedRun(tmp_path).assert_gates()
