"""Evaluation by two processes: counts and figures equal those of one process. With GPUs, each process uses its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch: pip install annie-quant[quantize]")
pytest.importorskip("transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]")
pytest.importorskip("modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]")
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

from runtime_models import export_nvfp4, save_reference  # noqa: E402

from annie_quant.judge import Case, Workload  # noqa: E402
from annie_quant.offline import job  # noqa: E402
from annie_quant.offline.pair import EvaluationJob  # noqa: E402

GATES = ("non_empty", "no_markdown", "thinking_leak")


def workloads() -> list[Workload]:
    cases = tuple(Case(f"c{i}", ({"role": "user", "content": f"What is {i} and {i + 3}?"},)) for i in range(5))
    talk = tuple(Case(f"t{i}", (), ("Hello there!", "What did I say?")) for i in range(2))
    return [
        Workload("plain", "", None, "Be brief.", None, False, 8, 0, GATES, cases),
        Workload("talk", "", None, None, None, False, 8, 0, GATES, talk),
    ]


def test_two_processes_count_as_one_does(tmp_path: Path) -> None:
    reference = save_reference(tmp_path / "reference", layers=2)
    checkpoint = export_nvfp4(reference, tmp_path / "naive")
    settings = EvaluationJob(
        checkpoint=checkpoint, reference=reference, workloads=workloads(), rows=4, text=__file__, layers_n=4
    )
    results = []
    for processes in (1, 2):
        own = replace(settings, cache=tmp_path / f"cache{processes}")
        results.append(job.run(own, processes=processes).to_dict())
        forget_time(results[-1])
    alone, shared = results
    assert shared == alone
    assert shared["device"] == ("cuda" if torch.cuda.is_available() else "cpu")
    side = shared["numerics"]["w4a4"]
    assert side["gates"]["non_empty"]["n"] == 7 and side["kl_text"]["n_tokens"] > 300 and side["kl"]["by_layer"]
    assert 0 < side["same_answers"]["same"] < 7 or side["cases"]
    answers = [
        sorted(next((tmp_path / f"cache{n}").glob("answers-*32.jsonl")).read_text().splitlines()) for n in (1, 2)
    ]
    assert answers[0] == answers[1], "one process writes"


def forget_time(value: object) -> None:
    if isinstance(value, dict):
        value.pop("seconds", None)
        for v in value.values():
            forget_time(v)
    elif isinstance(value, list):
        for v in value:
            forget_time(v)
