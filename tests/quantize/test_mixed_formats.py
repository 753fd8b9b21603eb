"""Which linears round their inputs: the exact knapsack, what is measured and written, and a run that dies meanwhile."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import runtime_models

from annie_quant import checkpoint, nvfp4, quantize
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import UsageError
from annie_quant.data.rows import read_conversations
from annie_quant.models.formats import LARGEST_NVFP4, NVFP4

torch = pytest.importorskip(
    "torch", reason="trials run on torch: pip install annie-quant[quantize]"
)
from annie_quant.quantize import calibration_text  # noqa: E402
from annie_quant.quantize.calibration_samples import CalibrationSample  # noqa: E402

pytest.importorskip(
    "transformers", reason="models are loaded with transformers: pip install annie-quant[quantize]"
)
from annie_quant.quantize import frontier, kl_trial, mixed_formats, rounding  # noqa: E402
from annie_quant.quantize.plan import QuantizationPlan  # noqa: E402

TOKENS = 40  # of answers in each trial


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtime_models.save_with_conversations(tmp_path_factory.mktemp("choice"))


@pytest.fixture(scope="module")
def samples(home: Path) -> list[CalibrationSample]:
    return calibration_text.samples_of_rows(
        home / "model", read_conversations(home / "calib.jsonl", 4)
    )


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_formats, "TOKENS", TOKENS)


def run(home: Path, name: str, **options) -> Path:
    settings = {
        "calib_data": home / "calib.jsonl",
        "calib_samples": 4,
        **options,
    }
    quantize.run("best", home / "model", home / name, **settings)
    return home / name


@pytest.fixture(scope="module")
def mixed(home: Path) -> tuple[Path, list[str]]:
    """The checkpoint of an undisturbed run, and the lines that it reported."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixed_formats, "TOKENS", TOKENS)
        return run(home, "mixed", share=0.3, report=lines.append), lines


def tensors(folder: Path, end: str) -> dict[str, bytes]:
    """Return the bytes of all tensors whose names end in `end`."""
    model = ModelFolder(folder)
    return {n: model.tensor(n).tobytes() for n in model if n.endswith(end)}


def test_the_most_weights_of_all_choices_round_their_inputs() -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        harm = dict(zip("abcdef", rng.lognormal(-6, 2, 6), strict=True)) | {"g": -1e-9}
        weights = dict(zip("abcdefg", map(float, rng.integers(1, 40, 7)), strict=True))
        allowed = rng.random() * sum(harm.values())
        chosen = frontier.with_rounded_inputs(harm, weights, allowed)
        assert sum(harm[u] for u in chosen) <= allowed * (1 + 1e-8)
        every = itertools.chain.from_iterable(
            itertools.combinations(harm, k) for k in range(len(harm) + 1)
        )
        best = max(
            sum(weights[u] for u in some) for some in every if sum(harm[u] for u in some) <= allowed
        )
        assert sum(weights[u] for u in chosen) == best
    assert frontier.with_rounded_inputs({"a": 0.1, "b": 0.0}, {"a": 1.0, "b": 2.0}, 0.0) == ["b"]


def test_a_trial_of_inputs_is_the_divergence_of_the_source_with_them_rounded(
    home: Path, samples: list[CalibrationSample]
) -> None:
    """Against transformers' own forward pass, answer by answer, with the C codec in front of the linears."""
    from transformers import AutoModelForCausalLM

    trial = kl_trial.Trial(ModelFolder(home / "model"), kl_trial.answers_to_score(samples, 10**9))

    def divergence(plan: QuantizationPlan) -> float:
        return float(trial.shares(plan)[:, :2].sum())

    noise = divergence(QuantizationPlan())  # of the float16 reference
    names = [f"model.layers.{i}.mlp.{n}_proj" for i in (0, 3) for n in ("gate", "up", "down")]
    amax = trial.largest_inputs(names)
    assert set(amax) == set(names) and min(amax.values()) > 0
    amax["model.layers.0.mlp.gate_proj"] *= (
        2  # gate and up are served with one scale, the larger one
    )
    measured = divergence(QuantizationPlan.of(dict.fromkeys(amax, NVFP4), amax))
    assert divergence(QuantizationPlan()) == noise < 0.05 * measured, (
        "the trial leaves the model as it was"
    )

    model = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32).eval()
    fused = amax | {"model.layers.0.mlp.up_proj": amax["model.layers.0.mlp.gate_proj"]}

    def rounds(top: float):
        def hook(module, args):
            scale = np.float32(top / LARGEST_NVFP4)
            return (
                torch.from_numpy(nvfp4.fake_quant(args[0].numpy(), tensor_scale=scale)).view(
                    args[0].shape
                ),
            )

        return hook

    total = count = decisions = deciding = 0.0
    with torch.inference_mode():
        before = [torch.log_softmax(model(torch.tensor([s.ids])).logits[0], -1) for s in samples]
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(rounds(fused[name]))
        for sample, p in zip(samples, before, strict=True):
            q = torch.log_softmax(model(torch.tensor([sample.ids])).logits[0], -1)
            kl = (p.exp() * (p - q)).sum(-1)[-len(sample.answer) :]
            total, count = total + float(kl.sum()), count + len(kl)
            decides = torch.tensor(sample.decides)
            decisions, deciding = (
                decisions + float(kl[decides].sum()),
                deciding + int(decides.sum()),
            )
    assert 0 < deciding < count
    assert measured == pytest.approx(
        total / count + decisions / deciding, rel=0.02
    )  # the trial's reference is float16


def test_long_answers_share_the_tokens_of_a_trial(samples: list[CalibrationSample]) -> None:
    """With answers longer than all the tokens a trial had no token, and every format was free."""
    assert all(len(s.answer) > 2 for s in samples)
    answers = kl_trial.answers_to_score(samples, 2 * kl_trial.MIN_ANSWERS)
    assert len(answers) == min(len(samples), kl_trial.MIN_ANSWERS)
    for answer, sample in zip(answers, kl_trial.in_turn_by_category(samples), strict=False):
        assert answer.row.prompt == sample.prompt and answer.row.target == sample.answer[:2]


def test_only_harmless_inputs_are_rounded_and_the_weights_are_all_nvfp4(
    home: Path, mixed: tuple[Path, list[str]]
) -> None:
    out, lines = mixed
    assert checkpoint.audit(out, source=home / "model").ok
    every, narrow = tensors(out, ".weight_scale_2"), tensors(out, ".input_scale")
    assert 0 < len(narrow) < len(every)
    line = next(line for line in lines if line.startswith("W4A4 for "))
    units, of = (int(word) for word in line.split()[2:5:2])
    folder = ModelFolder(out)
    groups = mixed_formats.served_units(
        folder.family, [n.removesuffix(".weight_scale_2") for n in every]
    )
    rounded = {n.removesuffix(".input_scale") for n in narrow}
    assert of == len(groups) and units == sum(members[0] in rounded for members in groups.values())
    for members in groups.values():
        assert len({n in rounded for n in members}) == 1, (
            "what is served as one matrix has one format"
        )


def test_all_or_none_of_the_harm_are_the_two_plain_formats(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the harm of each unit is."""
    monkeypatch.setattr(
        mixed_formats, "measure_inputs", lambda job, units, *_: dict.fromkeys(units, 0.1)
    )
    for share, activations in ((1.0, 4), (0.0, 16)):
        mixed, plain = (
            run(home, f"share{share:g}", share=share),
            run(home, f"all{activations}", activations=activations),
        )
        for end in (".weight", "_scale", "_scale_2"):
            assert tensors(mixed, end) == tensors(plain, end)


def test_many_layers_are_measured_in_bands_of_neighbours_with_the_same_linears() -> None:
    kinds = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
    units = {
        f"model.layers.{i}.{k}": [f"model.layers.{i}.{k}", f"{i}.{k}.fused"]
        for i in range(30)
        for k in kinds
    }
    bands = mixed_formats.bands_of(units, 32)
    assert len(bands) == 32
    assert sorted(n for members in bands.values() for n in members) == sorted(
        n for m in units.values() for n in m
    )
    for members in bands.values():
        layers = sorted({int(n.split(".")[2]) for n in members if n.startswith("model.")})
        assert layers == list(range(layers[0], layers[-1] + 1)) and len(layers) <= 4
        assert len({n.split(".", 3)[3] for n in members if n.startswith("model.")}) == 1
    assert mixed_formats.bands_of(units, 1000) == units


def test_a_share_is_from_0_to_1(home: Path) -> None:
    for share in (-0.1, 1.01, float("nan")):
        with pytest.raises(UsageError, match="expected a share of 0 to 1"):
            run(home, "refused", share=share)
    assert not (home / "refused").exists()


def test_a_run_that_dies_in_a_layer_does_not_measure_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = rounding.LayerResult.save

    def dies(self: rounding.LayerResult, path: Path) -> None:
        save(self, path)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(rounding.LayerResult, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            run(home, "layer")
    monkeypatch.setattr(kl_trial.Trial, "shares", lambda *args: pytest.fail("measured again"))
    assert checkpoint.audit(run(home, "layer"), source=home / "model").ok


def test_a_run_that_dies_while_it_measures_does_not_measure_again(
    home: Path, mixed: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, calls = kl_trial.Trial.shares, []

    def dies(self: kl_trial.Trial, plan: QuantizationPlan) -> np.ndarray:
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(tuple(plan.formats))
        return shares(self, plan)

    with monkeypatch.context() as patch:
        patch.setattr(kl_trial.Trial, "shares", dies)
        with pytest.raises(KeyboardInterrupt):
            run(home, "killed", share=0.3)
    assert not (home / "killed").exists()
    monkeypatch.setattr(
        kl_trial.Trial,
        "shares",
        lambda self, plan: (calls.append(tuple(plan.formats)), shares(self, plan))[1],
    )
    again = run(home, "killed", share=0.3)
    assert len(calls) == len(set(calls)) > 6, "measured again"
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {
        p.name: p.read_bytes() for p in mixed[0].iterdir()
    }
