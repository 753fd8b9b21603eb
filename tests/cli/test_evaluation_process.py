"""Evaluations in processes: a failed one is reported with its cause, a finished stage starts none, all end with the context."""

from __future__ import annotations

import pytest
from paths import TINY_ANNIE

from annie_quant.cli.pipeline import stages as pipeline
from annie_quant.cli.pipeline.run_directory import RunDirectory
from annie_quant.cli.pipeline.stages import EvaluationProcesses, ProcessJob, StageResult, Stages
from annie_quant.core.errors import ServerError
from annie_quant.core.progress import SilentConsole

pytest.importorskip("torch", reason="an evaluation needs torch: pip install annie-quant[quantize]")


@pytest.fixture
def stages(tmp_path):
    return Stages(
        RunDirectory(tmp_path / "run"), TINY_ANNIE, tmp_path / "rows.jsonl", 4, SilentConsole()
    )


def job(stages, **fields):
    return ProcessJob(
        **{"reference": str(TINY_ANNIE), "cache": str(stages.dir / "eval"), "n_per_gate": 1}
        | fields
    )


def test_a_failed_process_is_reported_with_its_cause_and_log(stages, tmp_path):
    with EvaluationProcesses(stages) as processes:
        processes.start("bf16-answers", {}, [], job(stages, workloads="no_such_workload"))
        with pytest.raises(ServerError, match="no_such_workload") as error:
            processes.finish()
    assert "logs/bf16-answers.log" in error.value.hint
    assert not stages.is_finished("bf16-answers", {}) and not stages.rows


def test_a_finished_stage_starts_no_process(stages, monkeypatch):
    stages.stage("eval-naive", {"n": 1}, [], lambda progress: StageResult("before"), StageResult)
    stages.rows.clear()
    monkeypatch.setattr(pipeline.server, "spawn", lambda *_: pytest.fail("a process was started"))
    with EvaluationProcesses(stages) as processes:
        processes.start("eval-naive", {"n": 1}, [], job(stages))
        processes.finish()
    assert [(row.name, row.summary) for row in stages.rows] == [("eval-naive", "before")]


def test_processes_end_with_the_context(stages, monkeypatch):
    started = []
    spawn = pipeline.server.spawn
    monkeypatch.setattr(
        pipeline.server, "spawn", lambda *a: started.append(spawn(*a)) or started[-1]
    )
    with pytest.raises(KeyboardInterrupt), EvaluationProcesses(stages) as processes:
        processes.start("eval-naive", {}, [], job(stages))
        processes.start("eval-best", {}, [], job(stages))
        raise KeyboardInterrupt
    assert len(started) == 2 and not any(process.alive for process in started)
