"""Distillation learns block scales or codes; the KL on the compared answers never ends above its start, which is the plan's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runtime_models

from annie_quant import nvfp4
from annie_quant.checkpoint.quantized_tensors import LARGEST_NVFP4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations
from annie_quant.errors import UsageError
from annie_quant.quantize import calibration_samples
from annie_quant.quantize.calibration_samples import RESPONSE, Sample
from annie_quant.quantize.plan import Plan
from annie_quant.quantize.select import choose

torch = pytest.importorskip("torch", reason="distillation runs on torch: pip install annie-quant[quantize]")
pytest.importorskip("transformers", reason="models are loaded with transformers: pip install annie-quant[quantize]")
from annie_quant.quantize import column_sweep, distillation, kl_trial  # noqa: E402
from annie_quant.quantize.layerwise import DecoderLayers  # noqa: E402
from annie_quant.quantize.strategies import awq_lite  # noqa: E402

TOP = 6.0  # the inputs' largest magnitude, for all linears


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtime_models.save_with_conversations(tmp_path_factory.mktemp("distil")) / "model"


@pytest.fixture(autouse=True)
def nothing_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are compared on the four answers that they learn from: three answers teach nothing about a fourth."""
    monkeypatch.setattr(distillation, "HELD_OUT", 100)


@pytest.fixture(scope="module")
def samples(model: Path) -> list[Sample]:
    """Four answers, each after the last 32 tokens of its prompt: weights are random, and most of a prompt is the system's."""
    rows = calibration_samples.samples_of_rows(model, read_conversations(model.parent / "calib.jsonl", 4))[:4]
    starts = [max(0, len(s.prompt) - 32) for s in rows]
    return [replace(s, ids=s.ids[k:], kinds=s.kinds[k:]) for s, k in zip(rows, starts, strict=True)]


def plain_plan(model: Path) -> Plan:
    """Every linear by plain rounding, one tensor scale for all."""
    folder = ModelFolder(model)
    plan = Plan(dict.fromkeys(choose(folder, ()), "nvfp4"))
    for name in plan.formats:
        plan.packed[name] = nvfp4.pack(folder.tensor(f"{name}.weight"), tensor_scale=1.0 / LARGEST_NVFP4)
        plan.amax[name] = TOP
    return plan


def folded_plan(model: Path, samples: list[Sample]) -> Plan:
    """Scales folded into every layer, then plain rounding."""
    plan, weights = plain_plan(model), {}
    for layer in DecoderLayers(ModelFolder(model), calibration_samples.make_batches(samples)):
        weights |= awq_lite.fold_layer(layer, set(plan.formats), plan.amax)
    for name in plan.formats:
        weight = weights.pop(f"{name}.weight", None)
        if weight is not None:
            plan.packed[name] = nvfp4.pack(weight, tensor_scale=1.0 / LARGEST_NVFP4)
    plan.amax, plan.weights = dict.fromkeys(plan.formats, TOP), weights
    return plan


@pytest.mark.parametrize(("folded", "rounding"), [(False, False), (True, False), (False, True)])
def test_the_start_is_the_divergence_of_the_plan(
    model: Path, samples: list[Sample], folded: bool, rounding: bool
) -> None:
    """Against kl_trial, which rounds the model's own weights and inputs; the reference is the source, folded or not."""
    plan = folded_plan(model, samples) if folded else plain_plan(model)
    assert bool(plan.weights) == folded
    learned = distillation.distil(ModelFolder(model), plan, samples, RESPONSE, steps=0, rounding=rounding)
    trial = kl_trial.Trial(ModelFolder(model), samples, RESPONSE, 10**9)
    trial.decides = [torch.zeros_like(tokens) for tokens in trial.decides]  # distillation learns from the mean alone
    for name, array in plan.weights.items():
        trial.model.get_parameter(name).data = torch.from_numpy(array)
    for name, packed in plan.packed.items():
        linear = trial.model.get_submodule(name)
        linear.weight.data = torch.from_numpy(nvfp4.unpack(packed, "float32"))
        linear.register_forward_pre_hook(kl_trial.input_hook(distillation.fake_quant.nvfp4_input, TOP))
    with torch.inference_mode():
        assert learned.losses == [pytest.approx(trial.divergence(), rel=0.02)]  # that reference is float16


def test_scales_move_codes_stay_and_the_best_is_what_was_measured(model: Path, samples: list[Sample]) -> None:
    before, plan = plain_plan(model), plain_plan(model)
    learned = distillation.distil(ModelFolder(model), plan, samples, RESPONSE, steps=10, seed=1)
    assert learned.best > 0 and learned.losses[learned.best] == min(learned.losses) < learned.losses[0]
    moved = 0
    for name, packed in plan.packed.items():
        start = before.packed[name]
        same = nvfp4.Tensor(packed.codes, start.block_scale, start.tensor_scale, start.shape)
        np.testing.assert_array_equal(nvfp4.unpack(same, "float32"), nvfp4.unpack(start, "float32"))
        assert packed.tensor_scale == before.packed[name].tensor_scale
        moved += int((packed.block_scale.view(np.uint8) != before.packed[name].block_scale.view(np.uint8)).sum())
    assert moved
    again = distillation.distil(ModelFolder(model), plan, samples, RESPONSE, steps=0)
    assert again.losses[0] == pytest.approx(learned.losses[learned.best], rel=1e-3)


def test_codes_move_scales_stay_and_the_best_is_what_was_measured(model: Path, samples: list[Sample]) -> None:
    before, plan = plain_plan(model), plain_plan(model)
    learned = distillation.distil(
        ModelFolder(model), plan, samples, RESPONSE, steps=10, rounding=True, rate=0.01, seed=1
    )
    assert learned.best > 0 and learned.losses[learned.best] == min(learned.losses) < learned.losses[0]
    moved = total = 0
    for name, packed in plan.packed.items():
        start = before.packed[name]
        assert packed.block_scale.tobytes() == start.block_scale.tobytes()
        assert packed.tensor_scale == start.tensor_scale
        moved += int((nvfp4.unpack(packed, "float32") != nvfp4.unpack(start, "float32")).sum())
        total += int(np.prod(packed.shape))
    assert 0 < moved < 0.5 * total
    again = distillation.distil(ModelFolder(model), plan, samples, RESPONSE, steps=0)
    assert again.losses[0] == pytest.approx(learned.losses[learned.best], rel=1e-3)


def test_starts_are_the_nearest_numbers_of_the_codes_cells() -> None:
    """In [-6, 6], against a search over a fine grid; codes that are not the nearest ones included."""
    generator = np.random.default_rng(3)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = generator.choice(np.concatenate([-levels, levels]), 400)
    values = (codes + generator.normal(size=400)).astype(np.float32)
    got = distillation.into_cells(torch.from_numpy(values), torch.from_numpy(codes.astype(np.float32))).numpy()
    grid = np.linspace(-6, 6, 24001)
    owner = np.sign(grid) * levels[np.abs(np.abs(grid)[:, None] - levels).argmin(-1)]
    for value, code, start in zip(values, codes, got, strict=True):
        cell = grid[owner == code]
        nearest = cell[np.abs(cell - value).argmin()]
        assert abs(start - nearest) <= 0.01 * (cell[-1] - cell[0]) + 1e-3
    np.testing.assert_array_equal(column_sweep.e2m1(torch.from_numpy(got)).numpy(), codes)


def test_a_share_of_the_steps_of_rounding_leaves_activations_as_they_are(
    model: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    learning: list[bool] = []
    judging: list[bool] = []
    kl = distillation.DistilledModel.kl

    def recorded(self: distillation.DistilledModel, batch: calibration_samples.Batch) -> tuple:
        (learning if torch.is_grad_enabled() else judging).extend({x.rounds_input for x in self.linears.values()})
        return kl(self, batch)

    monkeypatch.setattr(distillation.DistilledModel, "kl", recorded)
    distillation.distil(ModelFolder(model), plain_plan(model), samples, RESPONSE, steps=20, rounding=True)
    assert 2 <= learning.count(False) <= 12 and len(learning) == 20
    assert all(judging)


def test_steps_that_only_harm_keep_the_start(model: Path, samples: list[Sample]) -> None:
    before, plan = plain_plan(model), plain_plan(model)
    learned = distillation.distil(ModelFolder(model), plan, samples, RESPONSE, steps=5, travel=-0.3)  # uphill
    assert learned.best == 0 and min(learned.losses) == learned.losses[0]
    assert all(p.codes.tobytes() == before.packed[n].codes.tobytes() for n, p in plan.packed.items())
    assert all(p.block_scale.tobytes() == before.packed[n].block_scale.tobytes() for n, p in plan.packed.items())


def test_the_same_seed_gives_the_same_bytes(model: Path, samples: list[Sample]) -> None:
    plans = [plain_plan(model) for _ in range(2)]
    for plan in plans:
        distillation.distil(ModelFolder(model), plan, samples, RESPONSE, steps=3, rounding=True, rate=0.01, seed=7)
    assert all(p.codes.tobytes() == plans[1].packed[n].codes.tobytes() for n, p in plans[0].packed.items())


def test_a_folded_plan_learns_scales_and_no_codes(model: Path, samples: list[Sample]) -> None:
    plan = folded_plan(model, samples)
    learned = distillation.distil(ModelFolder(model), plan, samples, RESPONSE, steps=10, seed=1)
    assert learned.best > 0 and learned.losses[learned.best] < learned.losses[0]
    with pytest.raises(UsageError, match="fold"):
        distillation.distil(ModelFolder(model), plan, samples, RESPONSE, steps=1, rounding=True)


def test_steps_are_compared_on_answers_that_they_do_not_learn_from(
    model: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distillation, "HELD_OUT", 4)
    calls: list[tuple[bool, list[bytes]]] = []
    kl = distillation.DistilledModel.kl

    def recorded(self: distillation.DistilledModel, batch: calibration_samples.Batch) -> tuple:
        rows = [ids[kinds >= 0].tobytes() for ids, kinds in zip(batch.ids, batch.kinds, strict=True)]
        calls.append((torch.is_grad_enabled(), rows))
        return kl(self, batch)

    monkeypatch.setattr(distillation.DistilledModel, "kl", recorded)
    distillation.distil(ModelFolder(model), plain_plan(model), samples, RESPONSE, steps=2)
    learned, judged = ({row for grad, rows in calls if grad == used for row in rows} for used in (True, False))
    assert len(learned) == 3 and len(judged) == 1 and not learned & judged
