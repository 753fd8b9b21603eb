"""Several runs: their order, significant changes, what cannot be compared, in one offline page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import report_fixture
import report_page
from command_line import CliRunner

from annie_quant.cli import app as cli
from annie_quant.core.errors import UsageError
from annie_quant.report import trends
from annie_quant.report.run import load


def change(folder, edit):
    document = json.loads((folder / "run.json").read_text())
    edit(document)
    (folder / "run.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    home = tmp_path_factory.mktemp("trends")
    return [
        report_fixture.make_run(home / f"run-{i}", n=12, seed=i, hostile=False) for i in range(3)
    ]


@pytest.fixture
def runs(originals, tmp_path):
    """Three runs of one machine, not in their order; the newest fixes naive's tool calls and slows mlp_only down."""
    folders = [Path(shutil.copytree(original, tmp_path / original.name)) for original in originals]
    for index, folder in enumerate(folders):
        change(
            folder, lambda d, i=index: d["environment"].update(time=f"2026-11-{20 + i}T05:00:00Z")
        )

    def newest(document):
        sides = document["aggregates"]
        sides["offline"]["naive"]["w4a4"]["gates"]["tool_call"] |= {
            "passes": 118,
            "low": 0.94,
            "high": 0.995,
            "verdict": "pass",
        }
        sides["served"]["mlp_only"]["speed_gates"]["ttft"] |= {
            "value": 80.0,
            "low": 75.0,
            "high": 88.0,
        }

    change(folders[2], newest)
    return [folders[2], folders[0], folders[1]]


def test_runs_are_in_the_order_of_their_time_and_significant_changes_are_named(runs):
    files = trends.compose(runs)
    text = files["trends.md"].replace("\\", "")
    assert text.index("| run-0") < text.index("| run-1") < text.index("| run-2")
    worse, better = text.split("## Significantly worse")[1].split("## Significantly better")
    assert re.search(
        r"content TTFT, ms, NVFP4 mlp_only, llama.cpp served: [\d.]+ → 80.0 in run-2", worse
    )
    assert (
        "tool calls, NVFP4 naive, W4A4 offline: 41.7\u00a0% ✗ → 98.3\u00a0% ✓ in run-2"
        in better.replace(" %", "\u00a0%")
    )


def test_every_shown_figure_is_that_of_its_run(runs):
    ordered = trends.in_order([load(r) for r in runs])
    documents = [json.loads((r.folder / "run.json").read_text())["aggregates"] for r in ordered]
    checked = 0
    for key, first, _ in report_page.Read(trends.compose(runs)["trends.html"]).shown:
        group, side, metric, index = key.split("|")
        sides, where = documents[int(index)], side.split("/")
        if group == "size":
            continue
        data = (
            sides["offline"][where[1]][where[2]]
            if where[0] == "offline"
            else sides["served"][where[1]]
        )
        value, slack = report_page.first_number(first)
        if group == "gate":
            expected = 100 * data["gates"][metric]["passes"] / data["gates"][metric]["n"]
        else:
            expected = (
                data["speed_gates"][metric]["value"] if group == "speed" else data["kl"]["mean"]
            )
        assert value == pytest.approx(expected, abs=slack), key
        checked += 1
    assert checked > 150


def test_speeds_of_another_machine_are_not_compared(runs):
    change(runs[0], lambda d: d["environment"].update(cpu="Another CPU"))
    text = trends.compose(runs)["trends.md"]
    assert "the machines differ, so their speeds cannot be compared: run-0, run-1 / run-2" in text
    assert (
        "→ 80.0" not in text and "98.3" in text.split("## Significantly better")[1].split("##")[0]
    )


def test_other_prompts_are_named(runs):
    inputs = json.loads((runs[1] / "inputs.json").read_text())
    inputs["workloads"][0]["cases"][0]["messages"][0]["content"] = "Something else?"
    (runs[1] / "inputs.json").write_text(json.dumps(inputs))
    assert (
        "the prompts differ, so their gates judge different answers: run-0 / run-1, run-2"
        in trends.compose(runs)["trends.md"]
    )


def test_overlapping_intervals_are_no_change(originals, tmp_path):
    pair = [Path(shutil.copytree(originals[0], tmp_path / name)) for name in "ab"]
    change(
        pair[1],
        lambda d: d["aggregates"]["offline"]["naive"]["w4a4"]["gates"]["tool_call"].update(
            passes=55
        ),
    )
    assert trends.compose(pair)["trends.md"].startswith("# 2 runs: no significant change")


def test_a_figure_that_only_some_runs_have_keeps_its_place(runs):
    change(runs[1], lambda d: d["aggregates"]["offline"].pop("naive"))
    (runs[1] / "eval/naive.json").unlink()
    files = trends.compose(runs)
    row = next(
        x
        for x in files["trends.md"].splitlines()
        if x.startswith("| tool calls") and "naive, W4A4" in x.replace("\\", "")
    )
    assert [c.strip()[:4] for c in row.strip("|").split("|")[2:]] == ["—", "41.7", "98.3"]


def test_folders_of_one_name_get_different_labels(tmp_path):
    pair = [report_fixture.make_run(tmp_path / n / "demo", n=4, hostile=False) for n in "ab"]
    assert trends.labels([load(p) for p in pair]) == ["a/demo", "b/demo"]


def test_hostile_names_are_inert(runs):
    evil = "<script>alert(1)</script>\u202e"
    change(runs[0], lambda d: d["verdict"].update(sentence=evil))
    change(runs[0], lambda d: d["aggregates"]["models"][0].update(label=evil))
    page = trends.compose(runs)["trends.html"]
    assert report_page.Read(page).tags.count("script") == 1 and "\u202e" not in page


def test_the_command(runs, tmp_path):
    ended = CliRunner().invoke(cli, ["report", *map(str, runs), "--output", str(tmp_path / "out")])
    assert ended.exit_code == 0, ended.output
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"trends.html", "trends.md"}
    alone = CliRunner().invoke(cli, ["report", str(runs[0]), "--output", str(tmp_path / "out")])
    assert isinstance(alone.exception, UsageError) and "several runs" in alone.exception.message


def test_one_run_is_refused(runs):
    with pytest.raises(UsageError, match="two runs"):
        trends.compose(runs[:1])
