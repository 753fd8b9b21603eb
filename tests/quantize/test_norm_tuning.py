"""Norms that are tuned after rounding: what the loss is, what is changed, and that the rounded model comes nearer to its source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import runtime_models

from annie_quant import models
from annie_quant.checkpoint import audit
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations
from annie_quant.quantize.plan import QuantizationPlan, export
from annie_quant.quantize.runner import copy_companions
from annie_quant.quantize.strategy import Job, StrategyOptions

torch = pytest.importorskip(
    "torch", reason="trials run on torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="models are loaded with transformers: pip install annie-quant[quantize]"
)
from annie_quant.core.progress import SILENT  # noqa: E402
from annie_quant.offline.loading import load  # noqa: E402
from annie_quant.quantize import calibration_samples as text  # noqa: E402
from annie_quant.quantize import kl_trial, norm_tuning  # noqa: E402
from annie_quant.quantize.formats import choose  # noqa: E402
from annie_quant.quantize.norm_tuning import NormTuning  # noqa: E402
from annie_quant.quantize.rounding import Method, round_model  # noqa: E402

Samples = list[text.CalibrationSample]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtime_models.save_with_conversations(tmp_path_factory.mktemp("norms"))


@pytest.fixture(scope="module")
def rounded(home: Path) -> tuple[Job[StrategyOptions], QuantizationPlan, Samples]:
    """A model whose linears are all rounded to nearest, W4A4, by three conversations."""
    samples = text.samples_of_rows(home / "model", read_conversations(home / "calib.jsonl", 3))
    job = Job(home / "model", home / "out", work=home / "work")
    formats = dict.fromkeys(choose(ModelFolder(job.model), ()), "nvfp4")
    return job, round_model(job, formats, samples, Method(plain=True), SILENT), samples


def divergence(plan: QuantizationPlan, model: Path, samples: Samples) -> float:
    """Return mean KL and that of decisions, as served and with no input rounded, summed: what a choice of recipes compares."""
    trial = kl_trial.Trial(ModelFolder(model), kl_trial.answers_to_score(samples, 10**6, cut=False))
    return sum(float(trial.shares(plan, inputs)[:, :2].sum()) for inputs in (True, False))


def test_tuned_norms_lower_the_divergence_and_pass_the_audit(
    rounded: tuple[Job[StrategyOptions], QuantizationPlan, Samples],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, plan, samples = rounded
    before = divergence(plan, job.model, samples)
    monkeypatch.setattr(norm_tuning, "LEARNING_RATE", 1e-2)  # all changes reach their limit
    monkeypatch.setitem(norm_tuning.STEPS, "cpu", 16)
    plan.weights = norm_tuning.tuned_norms(
        job, plan, samples, 0.1, SILENT, tmp_path / "norms.safetensors"
    )
    assert divergence(plan, job.model, samples) < 0.97 * before

    source = ModelFolder(job.model)
    family = source.family
    assert {models.in_layer(n) for n in plan.weights} == {f"{n}.weight" for n in family.norms}
    out = tmp_path / "out"
    out.mkdir()
    export(source, out, plan)
    copy_companions(job.model, out)
    written = ModelFolder(out)
    for name in source:
        if "norm" in name and name not in plan.weights:
            assert np.array_equal(written.tensor(name), source.tensor(name)), f"{name} is not tuned"
    changed = [n for n in plan.weights if not np.array_equal(written.tensor(n), source.tensor(n))]
    assert len(changed) > len(plan.weights) / 2
    assert not audit(out, source=job.model).findings

    # A norm that was changed by a factor of two has a fault: the audit still looks at norms.
    name = changed[0]
    plan.weights = {
        **plan.weights,
        name: plan.weights[name] * np.linspace(0.5, 2, len(plan.weights[name]), dtype=np.float32),
    }
    broken = tmp_path / "broken"
    broken.mkdir()
    export(source, broken, plan)
    copy_companions(job.model, broken)
    assert {f.code for f in audit(broken, source=job.model).findings} & {
        "fold_mismatch",
        "fold_plus_one",
    }


@pytest.mark.gpu
def test_norms_are_tuned_on_a_gpu(
    rounded: tuple[Job[StrategyOptions], QuantizationPlan, Samples],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, plan, samples = rounded
    plan.weights = {}
    before = divergence(plan, job.model, samples)
    monkeypatch.setattr(norm_tuning, "LEARNING_RATE", 1e-2)
    plan.weights = norm_tuning.tuned_norms(
        job, plan, samples, 0.1, SILENT, tmp_path / "norms.safetensors"
    )
    assert divergence(plan, job.model, samples) < 0.97 * before


def test_the_loss_is_the_divergence_of_the_next_tokens(
    rounded: tuple[Job[StrategyOptions], QuantizationPlan, Samples], tmp_path: Path
) -> None:
    job, plan, samples = rounded
    plan.weights = {}
    out = tmp_path / "out"
    out.mkdir()
    export(ModelFolder(job.model), out, plan)
    copy_companions(job.model, out)
    logits = {}
    for name, folder, numerics in (
        ("source", job.model, None),
        ("served", out, "w4a4"),
        ("weights", out, "w4a16"),
    ):
        model = load(folder, numerics, cache="float32", dtype=torch.float32, device="cpu")
        with torch.inference_mode():
            logits[name] = [
                model(torch.tensor([s.ids])).logits[0, len(s.prompt) - 1 :].double()
                for s in samples
            ]
    for inputs, name in ((True, "served"), (False, "weights")):
        pairs = zip(logits["source"], logits[name], strict=True)
        kl = torch.cat(
            [(p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1) for p, q in pairs]
        )
        tuning = NormTuning(
            kl_trial.Trial(ModelFolder(job.model), ()), plan, samples, text.RESPONSE, 0
        )
        with tuning.trial.rounded(plan, inputs):
            losses = [float(tuning.loss(i).detach()) for i in range(len(tuning.batches))]
        tokens = [int((b.kinds > text.PROMPT).sum()) for b in tuning.batches]
        mean = sum(x * n for x, n in zip(losses, tokens, strict=True)) / sum(tokens)
        assert mean == pytest.approx(float(kl.mean()), rel=1e-3)


def test_a_finished_tuning_is_read_and_not_made_again(
    rounded: tuple[Job[StrategyOptions], QuantizationPlan, Samples],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, plan, samples = rounded
    monkeypatch.setitem(norm_tuning.STEPS, "cpu", 2)
    file = tmp_path / "norms.safetensors"
    first = norm_tuning.tuned_norms(job, plan, samples, 0.1, SILENT, file)
    again = norm_tuning.tuned_norms(job, plan, samples, 0.1, SILENT, tmp_path / "again.safetensors")
    assert all(np.array_equal(first[n], again[n]) for n in first), (
        "a run that is made again has the same bytes"
    )
    monkeypatch.setattr(norm_tuning, "NormTuning", None)
    stored = norm_tuning.tuned_norms(job, plan, samples, 0.1, SILENT, file)
    assert stored.keys() == first.keys() and all(np.array_equal(stored[n], first[n]) for n in first)
