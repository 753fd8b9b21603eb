"""The start of a demo, and the remaining time: usual times first, this run's pace later, nothing for what had finished before."""

from __future__ import annotations

import importlib.util

import pytest

from annie_quant.cli.pipeline import demo
from annie_quant.cli.pipeline.run_directory import WEIGHT_S, RunDirectory, StagePlan
from annie_quant.core.errors import EnvironmentFault
from annie_quant.core.progress import SilentConsole

USUAL_S = {"a": 60.0, "b": 30.0, "c": 90.0}


def test_the_first_line_has_the_usual_time():
    assert StagePlan(USUAL_S).text() == "0 of 3 stages finished, about 3 minutes left"


def test_a_slow_machine_makes_the_rest_longer():
    now = [0.0]
    plan = StagePlan(USUAL_S, clock=lambda: now[0])
    now[0] = 120.0
    plan.finish("a")
    assert plan.left_s == pytest.approx(120 * (120 + WEIGHT_S) / (60 + WEIGHT_S))
    assert plan.text() == "1 of 3 stages finished, about 4 minutes left"
    now[0] = 180.0
    plan.finish("b")
    plan.finish("c")
    assert plan.left_s == 0 and plan.text() == "3 of 3 stages finished, less than a minute left"


def test_stages_of_an_earlier_run_do_not_count_as_fast():
    now = [0.0]
    plan = StagePlan(USUAL_S, clock=lambda: now[0])
    plan.finish("a", before=True)
    assert plan.left_s == 120.0


def test_the_demos_plan_names_its_stages(tmp_path, monkeypatch):
    """Each stage that runs is in the plan, and the plan has no other: the last stage leaves nothing."""
    notes, names = [], []

    class Console(SilentConsole):
        def note(self, line: str) -> None:
            notes.append(line)

    work = demo.Demo(RunDirectory(tmp_path / "run"), 60, 60, Console())
    assert notes == ["0 of 14 stages finished, about 4 minutes left"]
    monkeypatch.setattr(work.stages, "stage", lambda name, *a: names.append(name))
    monkeypatch.setattr(work.stages, "text_key", lambda: "")
    monkeypatch.setattr(work.stages, "data_inputs", dict)
    monkeypatch.setattr(work.stages, "quantize", lambda strategy: names.append(f"quantize-{strategy}"))
    monkeypatch.setattr(work.stages, "audit", lambda strategy: names.append(f"audit-{strategy}"))
    monkeypatch.setattr(demo.EvaluationProcesses, "start", lambda self, name, *a: names.append(name))
    monkeypatch.setattr(work, "finish", lambda: None)
    work.run()
    assert sorted(names) == sorted(demo.USUAL_S)


def test_all_missing_packages_are_named_before_anything_is_written(tmp_path, monkeypatch):
    """A wheel without extras: before, the demo named torch, and after its installation failed where the servers start."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("torch", "xllamacpp") else find(name)
    )
    with pytest.raises(EnvironmentFault, match="not installed: torch, xllamacpp") as refused:
        demo.run(tmp_path / "run")
    assert refused.value.hint == 'pip install "annie-quant[quantize,serve]"'
    assert not (tmp_path / "run").exists()
