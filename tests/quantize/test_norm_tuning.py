"""Norms that are tuned after rounding: what the loss is, what changes, and when the result is used."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import runtime_models

from annie_quant import quantize
from annie_quant.checkpoint import audit
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations
from annie_quant.models.formats import NVFP4, W4A16
from annie_quant.quantize.formats import choose
from annie_quant.quantize.plan import Export, QuantizationPlan, export
from annie_quant.quantize.runner import copy_companions
from annie_quant.quantize.strategy import Job, StrategyOptions

torch = pytest.importorskip(
    "torch", reason="trials run on torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="models are loaded with transformers: pip install annie-quant[quantize]"
)
from annie_quant import nvfp4  # noqa: E402
from annie_quant.checkpoint.linears import weight_name  # noqa: E402
from annie_quant.core.progress import SILENT, Lines  # noqa: E402
from annie_quant.offline.loading import load  # noqa: E402
from annie_quant.quantize import kl_trial, norm_tuning  # noqa: E402
from annie_quant.quantize.calibration_samples import PROMPT, CalibrationSample  # noqa: E402
from annie_quant.quantize.calibration_text import samples_of_rows  # noqa: E402
from annie_quant.quantize.norm_tuning import NormTuning  # noqa: E402

Samples = list[CalibrationSample]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtime_models.save_with_conversations(tmp_path_factory.mktemp("norms"))


@pytest.fixture(scope="module")
def samples(home: Path) -> Samples:
    return samples_of_rows(home / "model", read_conversations(home / "calib.jsonl"))


@pytest.fixture
def job(home: Path, tmp_path: Path) -> Job[StrategyOptions]:
    return Job(home / "model", tmp_path / "out", work=tmp_path / "work")


@pytest.fixture
def plan(job: Job[StrategyOptions]) -> QuantizationPlan:
    """All linears rounded to nearest, with inputs of at most 8."""
    folder = ModelFolder(job.model)
    names = choose(folder, ())
    planned = QuantizationPlan.of(dict.fromkeys(names, NVFP4), dict.fromkeys(names, 8.0))
    exported = Export(folder, planned)
    for name, linear in planned.linears.items():
        weight = exported.weight(weight_name(folder, name))
        linear.packed = nvfp4.pack(weight, tensor_scale=float(exported.scale(name)))
    return planned


def divergence(plan: QuantizationPlan, model: Path, samples: Samples) -> float:
    """Return mean KL and that of decisions, as served and with no input rounded, summed."""
    trial = kl_trial.Trial(ModelFolder(model), kl_trial.answers_to_score(samples, 10**6, cut=False))
    return sum(float(trial.shares(plan, inputs)[:, :2].sum()) for inputs in (True, False))


def assert_tuning_lowers_the_divergence(
    job: Job[StrategyOptions],
    plan: QuantizationPlan,
    samples: Samples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = divergence(plan, job.model, samples)
    monkeypatch.setattr(norm_tuning, "NORM_LEARNING_RATE", 2e-3)
    norm_tuning.tune_norms(job, plan, samples, SILENT)
    assert divergence(plan, job.model, samples) < 0.97 * before


def written(plan: QuantizationPlan, model: Path, output: Path) -> ModelFolder:
    output.mkdir()
    export(ModelFolder(model), output, plan)
    copy_companions(model, output)
    return ModelFolder(output)


def test_tuned_norms_lower_the_held_out_divergence_and_pass_the_audit(
    job: Job[StrategyOptions],
    plan: QuantizationPlan,
    samples: Samples,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_tuning_lowers_the_divergence(job, plan, samples, monkeypatch)
    gptq, tuned = plan.ingredients
    assert (gptq.name, tuned.name, tuned.used) == ("GPTQ", "tuned norms", True)
    assert tuned.change < 0 and tuned.kl < gptq.kl

    source = ModelFolder(job.model)
    folder = written(plan, job.model, tmp_path / "tuned")
    changed = [n for n in source if n in folder and not same(source, folder, n)]
    assert set(changed) <= set(plan.tensors) | {weight_name(source, n) for n in plan.linears}
    norms = [n for n in changed if "norm" in n]
    assert len(norms) > len(plan.tensors) / 2
    assert not audit(folder.path, source=job.model).findings

    # The audit still judges norms: one that is changed by a factor of two is a fault.
    name = next(n for n in norms if "input_layernorm" in n)
    factor = np.linspace(0.5, 2, len(plan.tensors[name]), dtype=np.float32)
    plan.tensors = plan.tensors | {name: plan.tensors[name] * factor}
    broken = written(plan, job.model, tmp_path / "broken")
    codes = {f.code for f in audit(broken.path, source=job.model).findings}
    assert codes & {"fold_mismatch", "fold_plus_one"}


def same(source: ModelFolder, folder: ModelFolder, name: str) -> bool:
    ours = folder.tensor(name)
    theirs = source.tensor(name)
    return ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()


def test_norms_that_do_not_help_held_out_answers_are_not_used(
    job: Job[StrategyOptions],
    plan: QuantizationPlan,
    samples: Samples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(norm_tuning, "NORM_LEARNING_RATE", 1.0)
    monkeypatch.setattr(norm_tuning, "MAX_CHANGE", 1.0)
    monkeypatch.setattr(norm_tuning, "MAX_CHANGE_IN_FOUR_BITS", 1.0)
    monkeypatch.setitem(norm_tuning.TUNING_STEPS, "cpu", 2)
    lines: list[str] = []
    progress = Lines(lines.append)
    norm_tuning.tune_norms(job, plan, samples, progress)
    assert plan.tensors == {}
    assert not plan.ingredients[-1].used and plan.ingredients[-1].change > 0
    assert any("they are not used" in line for line in lines)


def test_the_loss_is_the_divergence_of_the_answers(
    job: Job[StrategyOptions], plan: QuantizationPlan, samples: Samples, tmp_path: Path
) -> None:
    few = samples[:3]
    folder = written(plan, job.model, tmp_path / "rounded")
    logits = {}
    for name, path, numerics in (
        ("source", job.model, None),
        ("served", folder.path, "w4a4"),
        ("weights", folder.path, "w4a16"),
    ):
        model = load(path, numerics, cache="float32", dtype=torch.float32, device="cpu")
        with torch.inference_mode():
            logits[name] = [
                model(torch.tensor([s.ids])).logits[0, len(s.prompt) - 1 :].double() for s in few
            ]
    for inputs, name in ((True, "served"), (False, "weights")):
        pairs = zip(logits["source"], logits[name], strict=True)
        kl = torch.cat(
            [(p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1) for p, q in pairs]
        )
        tuning = NormTuning(kl_trial.Trial(ModelFolder(job.model), ()), plan, few, 0)
        with tuning.trial.rounded(plan, inputs), tuning.tuned():
            losses = [float(tuning.loss(batch).detach()) for batch in tuning.batches]
        tokens = [int(batch.answered.sum()) for batch in tuning.batches]
        assert sum(tokens) == sum(kind != PROMPT for s in few for kind in s.kinds)
        mean = sum(x * n for x, n in zip(losses, tokens, strict=True)) / sum(tokens)
        assert mean == pytest.approx(float(kl.mean()), rel=1e-3)


def test_the_gradient_is_that_of_the_loss(
    job: Job[StrategyOptions], plan: QuantizationPlan, samples: Samples
) -> None:
    for linear in plan.linears.values():
        linear.format = W4A16
    tuning = NormTuning(kl_trial.Trial(ModelFolder(job.model), ()), plan, samples[:2], 0)
    norm = tuning.norms[next(n for n in tuning.norms if "layers.0.input_layernorm" in n)]
    norm.dtype = torch.float32  # rounding of the stored weight has no derivative
    batch = tuning.batches[0]
    with tuning.trial.rounded(plan, inputs=False), tuning.tuned():
        tuning.loss(batch).backward()
        assert norm.change.grad is not None
        slope = float(norm.change.grad @ norm.change.grad)
        direction = norm.change.grad / norm.change.grad.norm()
        values = []
        step = 1e-2
        for sign in (1, -1):
            with torch.no_grad():
                norm.change.copy_(sign * step * direction)
                values.append(float(tuning.loss(batch)))
    numeric = (values[0] - values[1]) / (2 * step)
    assert numeric == pytest.approx(slope**0.5, rel=0.05)


def test_a_finished_tuning_is_read_and_not_made_again(
    job: Job[StrategyOptions],
    plan: QuantizationPlan,
    samples: Samples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(norm_tuning.TUNING_STEPS, "cpu", 2)
    norm_tuning.tune_norms(job, plan, samples, SILENT)
    first = plan.tensors
    plan.tensors = {}
    with monkeypatch.context() as patch:
        patch.setattr(norm_tuning, "NormTuning", None)
        norm_tuning.tune_norms(job, plan, samples, SILENT)
        assert plan.tensors.keys() == first.keys()
        assert all(np.array_equal(plan.tensors[n], first[n]) for n in first)

    # Other formats, as other limits choose them in the same folder, have norms of their own.
    for linear in plan.linears.values():
        linear.format = W4A16
    plan.tensors = {}
    tuned: list[QuantizationPlan] = []
    original = norm_tuning._tuned
    monkeypatch.setattr(
        norm_tuning, "_tuned", lambda *args: (tuned.append(args[1]), original(*args))[1]
    )
    norm_tuning.tune_norms(job, plan, samples, SILENT)
    assert tuned == [plan]


def test_only_a_setting_tunes_norms_on_a_cpu(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(norm_tuning.TUNING_STEPS, "cpu", 2)
    for settings in ({}, {"norms": "1"}):
        output = tmp_path / f"gptq-{len(settings)}"
        quantize.run(
            "gptq",
            home / "model",
            output,
            calib_data=home / "calib.jsonl",
            answers="given",
            allow_prompt_mismatch=True,
            **settings,
        )
        record = json.loads((output / "annie_quant.json").read_text())
        names = [ingredient["name"] for ingredient in record.get("ingredients", [])]
        assert ("tuned norms" in names) == bool(settings)


@pytest.mark.gpu
def test_norms_are_tuned_on_a_gpu(
    job: Job[StrategyOptions],
    plan: QuantizationPlan,
    samples: Samples,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_tuning_lowers_the_divergence(job, plan, samples, monkeypatch)
