"""The estimate before an evaluation, and an evaluation in one arithmetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)

from paths import TINY_ANNIE  # noqa: E402

import annie_quant  # noqa: E402
from annie_quant import judge  # noqa: E402
from annie_quant.offline import estimate, evaluation  # noqa: E402
from annie_quant.offline.measured import Measurement  # noqa: E402
from annie_quant.offline.pair import EvaluationJob, ModelPair, open_pair  # noqa: E402


class Messages:
    """A progress that stores its messages, and the texts of its stages."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.stages: list[str] = []

    def update(self, done: float, total: float | None = None, text: str = "") -> None:
        if text not in self.stages:
            self.stages.append(text)

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> EvaluationJob:
    folder = tmp_path_factory.mktemp("q") / "nvfp4"
    annie_quant.quantize.run("direct", TINY_ANNIE, folder)  # weights alone: it has no w4a4
    return EvaluationJob(
        checkpoint=folder,
        reference=TINY_ANNIE,
        workloads=judge.load_workloads(["factual"]),
        n_per_gate=2,
        quick=True,
        cache=tmp_path_factory.mktemp("cache"),
        device="cpu",
    )


def test_quick_computes_the_first_numerics_alone(job: EvaluationJob) -> None:
    progress = Messages()
    notes: list[str] = []
    result = evaluation.run(job, progress, notes.append)
    assert list(result.numerics) == ["w4a16"]
    assert not result.members
    assert "quick: w4a16 alone" in "\n".join(result.notes)
    (announced,) = notes  # not a state of the progress, which the next one replaces
    assert announced.startswith("2 prompts, 1 numerics: about ")
    assert " GB of memory" in announced
    assert any(s.startswith("w4a16: answering from the first difference") for s in progress.stages)


def test_a_shared_prefix_is_counted_once() -> None:
    shared = list(range(100))
    prompts = [[*shared, 200 + i, 300] for i in range(20)]
    assert estimate.computed_tokens(prompts, 512) == 100 + 20 * 2
    assert estimate.computed_tokens([[1, 2, 3]], 512) == 3


def test_more_prompts_and_more_arithmetics_take_longer(
    job: EvaluationJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "speeds", lambda *_: (0.001, 0.01))
    with open_pair(job) as pair:
        few, more = job.prompts(2), job.prompts(8)
        one = estimate.estimated_seconds(pair, few, 1).total
        assert estimate.estimated_seconds(pair, few, 2).total > one
        assert estimate.estimated_seconds(pair, more, 1).total > one


def test_a_killed_evaluation_continues_after_its_last_numerics(
    job: EvaluationJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = replace(
        job,
        quick=False,
        numerics=("w4a16", "float32"),
        workloads=judge.load_workloads(["tool_memory", "conversational"]),
    )
    expected = evaluation.run(whole).to_dict()
    measured = []
    measure = evaluation.measure_numerics

    def measure_one(pair: ModelPair, baseline: evaluation.Baseline, name: str) -> Measurement:
        if len(measured) == 1:
            measured.append("killed")
            raise KeyboardInterrupt
        measured.append(name)
        return measure(pair, baseline, name)

    monkeypatch.setattr(evaluation, "measure_numerics", measure_one)
    with pytest.raises(KeyboardInterrupt):
        evaluation.run(whole)
    result = evaluation.run(whole).to_dict()
    assert measured == ["w4a16", "killed", "float32"]
    for document in (expected, result):
        document.pop("seconds")
        for side in document["numerics"].values():
            side.pop("seconds")
    assert result == expected
    assert not list(job.cache.glob("measured-*"))
