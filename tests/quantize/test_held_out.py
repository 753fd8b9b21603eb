"""What is held out, the comparison of GPTQ with plain rounding there, its document, and a run that dies meanwhile."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import runtime_models

from annie_quant import quantize
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations
from annie_quant.documents import HeldOut
from annie_quant.models.formats import NVFP4
from annie_quant.quantize.strategy import Job

torch = pytest.importorskip(
    "torch", reason="trials run on torch: pip install annie-quant[quantize]"
)
from annie_quant.quantize import calibration_text  # noqa: E402
from annie_quant.quantize.calibration_samples import CONTENT, PROMPT, CalibrationSample  # noqa: E402

pytest.importorskip(
    "transformers", reason="models are loaded with transformers: pip install annie-quant[quantize]"
)
from annie_quant.core.progress import Lines  # noqa: E402
from annie_quant.models.formats import W4A16  # noqa: E402
from annie_quant.offline.loading import load  # noqa: E402
from annie_quant.quantize import held_out, kl_trial, rounding  # noqa: E402
from annie_quant.quantize.held_out import (  # noqa: E402
    FormatTrials,
    HeldOutLook,
    compare_with_plain,
    hold_out,
    sum_and_standard_error,
)
from annie_quant.quantize.plan import Export, QuantizationPlan, export  # noqa: E402
from annie_quant.quantize.rounding import round_model  # noqa: E402
from annie_quant.quantize.strategy import Method  # noqa: E402


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtime_models.save_with_conversations(tmp_path_factory.mktemp("recipes"))


def sample(row: int, category: str = "a", decides: int = 1, length: int = 10) -> CalibrationSample:
    kinds = (PROMPT,) * (length - 4) + (CONTENT,) * 4
    return CalibrationSample(
        category,
        tuple(range(row * length, (row + 1) * length)),
        kinds,
        (1, 2, 3, 4),
        (True,) * decides + (False,) * (4 - decides),
        row,
    )


@pytest.mark.parametrize("rows", [8, 9, 40, 200])
def test_whole_conversations_of_all_categories_are_held_out(rows: int) -> None:
    samples = [sample(i // 2, "abc"[i // 2 % 3]) for i in range(2 * rows)]
    random.Random(0).shuffle(samples)
    learned, held = hold_out(samples, 10**6)
    assert (
        not {s.row for s in learned} & {s.row for s in held}
        and len(learned) + len(held) == 2 * rows
    )
    assert 2 <= len({s.row for s in held}) <= rows / 4
    if rows >= 40:
        assert {s.category for s in held} == set("abc")


def test_no_more_is_held_out_than_decides_or_fits() -> None:
    samples = [sample(i, decides=4) for i in range(4000)]
    assert sum(sum(s.decides) for s in hold_out(samples, 10**6)[1]) == held_out.ENOUGH_DECISIONS
    # Ten tokens per conversation; those of the first one do not count.
    assert len(hold_out(samples, 500)[1]) == 1 + 500 // 10
    assert hold_out(samples[:7], 10**6) == (samples[:7], [])


def compared(plain_minus_gptq: list[float]) -> tuple[HeldOutLook, list[str]]:
    """Return the comparison where plain rounding adds so much to each conversation's divergence, and what was reported."""
    gptq = np.array([[1.0 + i / 10, 0.0, 0.0, 0.0] for i in range(len(plain_minus_gptq))])
    plain = gptq + np.array(plain_minus_gptq)[:, None] * [1.0, 0.0, 0.0, 0.0]

    class Trials:
        def plan_of(self, formats):
            return gptq

        def plain_plan_of(self, formats):
            return plain

        def served_and_unrounded(self, name, plan):
            return plan

    lines: list[str] = []
    samples = [sample(i) for i in range(len(plain_minus_gptq))]
    look = compare_with_plain(Trials(), {}, samples, Lines(lines.append))  # type: ignore[arg-type]
    return look, lines


def test_plain_rounding_is_taken_where_it_is_better_by_more_than_the_noise() -> None:
    look, lines = compared([-0.1 - 0.01 * (i % 2) for i in range(10)])
    assert look.plain_is_better and lines[0].endswith("plain rounding is used")
    gptq, plain = look.methods
    assert gptq.kl == pytest.approx(14.5) and plain.kl == pytest.approx(14.5 - 1.05)
    assert plain.change == pytest.approx(-1.05) and 0 < plain.noise < 0.05
    assert look.held_out == HeldOut(10, 40, 10)
    noisy = [-0.2 + (1.5 if i % 2 else -1.5) for i in range(10)]
    for differences in (noisy, [0.1] * 10, [0.0] * 10):
        look, lines = compared(differences)
        assert not look.plain_is_better and lines[0].endswith("GPTQ is used")
    assert not HeldOutLook().plain_is_better


def test_the_noise_is_that_of_a_sum_of_differences() -> None:
    rng = random.Random(1)
    differences = [rng.gauss(0, 0.01) for _ in range(50)]
    change, noise = sum_and_standard_error(differences)
    resampled = [sum(rng.choices(differences, k=50)) for _ in range(4000)]
    mean = sum(resampled) / 4000
    assert change == pytest.approx(sum(differences))
    assert noise == pytest.approx((sum((r - mean) ** 2 for r in resampled) / 4000) ** 0.5, rel=0.1)


RECIPES = {
    "prompt": (Method(), "cpu"),
    "in torch, as on a GPU": (Method(), "cuda"),
}


@pytest.mark.parametrize(("recipe", "device"), RECIPES.values(), ids=RECIPES)
def test_the_divergence_of_a_plan_is_that_of_the_checkpoint(
    home: Path, tmp_path: Path, recipe: Method, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from annie_quant.quantize.runner import copy_companions

    monkeypatch.setattr(rounding, "device_kind", lambda: device)
    folder = ModelFolder(home / "model")
    samples = calibration_text.samples_of_rows(
        home / "model", read_conversations(home / "calib.jsonl", 3)
    )
    names = [
        n.removesuffix(".weight")
        for n in folder
        if "_proj.weight" in n and "layers" in n and folder.info(n).shape[0] > 8
    ]
    formats = {n: NVFP4 if "mlp" in n else W4A16 for n in names}
    job = Job(home / "model", tmp_path / "out", work=tmp_path / "work", scale="sweep")
    plan = round_model(job, formats, samples, recipe, Lines(lambda line: None))
    trial = kl_trial.Trial(folder, kl_trial.answers_to_score(samples, 10**6, cut=False))
    source = {n: p.clone() for n, p in trial.model.named_parameters()}
    figures = {inputs: trial.shares(plan, inputs)[:, :2] for inputs in (True, False)}
    assert all(torch.equal(p, source[n]) for n, p in trial.model.named_parameters()), (
        "the model is as it was"
    )
    assert figures[True][:, 0].sum() > figures[False][:, 0].sum() > 0
    (tmp_path / "out").mkdir()
    export(folder, job.output, plan)
    copy_companions(home / "model", tmp_path / "out")
    for inputs, numerics in ((True, "w4a4"), (False, "w4a16")):
        trial.model = load(
            tmp_path / "out", numerics, cache="float32", dtype=torch.float32, device="cpu"
        )
        trial.engine = kl_trial.Engine(trial.model)
        with torch.inference_mode():
            scores = {
                i: (trial.reference[i].float(), torch.log_softmax(q, -1))
                for i, q in trial.engine.scores(trial.rows)
            }
        rows = {i: (p.exp() * (p - q)).sum(-1).clamp_min(0) for i, (p, q) in scores.items()}
        expected = {a.conversation: [0.0, 0.0] for a in trial.answers}
        for i, kl in rows.items():
            answer = trial.answers[i]
            expected[answer.conversation][0] += float(kl.sum()) / sum(map(len, rows.values()))
            deciding = sum(int(a.decides.sum()) for a in trial.answers)
            expected[answer.conversation][1] += float(kl[answer.decides].sum()) / deciding
        for row, part in zip(sorted(expected), figures[inputs], strict=True):
            assert part == pytest.approx(expected[row], rel=0.02, abs=1e-6)


def run(home: Path, name: str, **options) -> Path:
    settings = {"calib_data": home / "calib.jsonl", "activations": 4, **options}
    quantize.run("best", home / "model", home / name, **settings)
    return home / name


def test_the_plain_weights_of_a_trial_are_those_of_naive(home: Path, tmp_path: Path) -> None:
    folder = ModelFolder(home / "model")
    samples = calibration_text.samples_of_rows(
        home / "model", read_conversations(home / "calib.jsonl", 3)
    )
    name = "model.layers.1.mlp.down_proj"
    job = Job(home / "model", tmp_path / "out", work=tmp_path / "work", scale="sweep")
    rounded = round_model(job, {name: W4A16}, samples, Method(), Lines(lambda line: None))
    plan = FormatTrials(job, samples, rounded).plain_plan_of({name: W4A16})
    (expected,) = Export(folder, QuantizationPlan.of({name: W4A16})).pack_rows(name)
    assert plan.linears[name].packed.codes.tobytes() == expected.codes.tobytes()
    assert plan.linears[name].packed.tensor_scale == expected.tensor_scale
    assert rounded.linears[name].packed.codes.tobytes() != expected.codes.tobytes()


def test_where_plain_rounding_is_better_the_weights_are_those_of_naive(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeldOutLook, "plain_is_better", True)
    best = run(home, "plain")
    quantize.run("naive", home / "model", home / "naive", calib_data=home / "calib.jsonl")
    files = [ModelFolder(folder) for folder in (best, home / "naive")]
    assert list(files[0]) == list(files[1])
    for name in files[0]:
        assert files[0].tensor(name).tobytes() == files[1].tensor(name).tobytes(), name


def test_a_killed_run_keeps_its_scores_and_the_document_lists_what_was_compared(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(home, "whole")
    document = json.loads((whole / "annie_quant.json").read_text())
    assert document["held_out"]["conversations"] == 2
    names = [(i["name"], i["used"]) for i in document["ingredients"]]
    assert names == [("GPTQ", True), ("plain rounding", False)]
    shares, calls = kl_trial.Trial.shares, 0

    def dies(self, plan, inputs=True):
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return shares(self, plan, inputs)

    with monkeypatch.context() as patch:
        patch.setattr(kl_trial.Trial, "shares", dies)
        with pytest.raises(KeyboardInterrupt):
            run(home, "killed")
        again = run(home, "killed")
    assert calls == 5, "gptq both ways and plain rounding as served, then what is left"
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }


def test_too_few_conversations_are_one_clear_line(home: Path) -> None:
    lines: list[str] = []
    out = run(home, "few", calib_samples=4, report=lines.append)
    (line,) = [line for line in lines if line.startswith("GPTQ is not compared")]
    assert "8 conversations or more are needed" in line and "annie-quant data" in line
    document = json.loads((out / "annie_quant.json").read_text())
    assert document["held_out"] is None and document["ingredients"] == []


def test_long_prompts_leave_as_many_answers_as_short_ones() -> None:
    def samples(prompt: int) -> list[CalibrationSample]:
        rows = []
        for row in range(40):
            ids = (*range(prompt), 5000 + row, 1, 2, 3)
            kinds = (PROMPT,) * prompt + (CONTENT,) * 4
            rows.append(CalibrationSample("chat", ids, kinds, (1, 2, 3, 4), (True,) * 4, row))
        return rows

    for prompt in (30, 3000):
        assert len(kl_trial.answers_to_score(samples(prompt), 1024, 100)) == 20
        assert len(hold_out(samples(prompt), 200)[1]) == 10
