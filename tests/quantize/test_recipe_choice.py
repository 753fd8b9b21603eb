"""How best chooses a recipe: what is held out, what stays, what its document states, and a run that dies meanwhile."""

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
from annie_quant.quantize.strategy import Job

torch = pytest.importorskip(
    "torch", reason="trials run on torch: pip install annie-quant[quantize]"
)
from annie_quant.quantize import calibration_samples  # noqa: E402
from annie_quant.quantize.calibration_samples import CONTENT, PROMPT, CalibrationSample  # noqa: E402

pytest.importorskip(
    "transformers", reason="models are loaded with transformers: pip install annie-quant[quantize]"
)
from annie_quant.core.progress import Lines  # noqa: E402
from annie_quant.offline.loading import load  # noqa: E402
from annie_quant.quantize import kl_trial, norm_tuning, recipe_choice, rounding  # noqa: E402
from annie_quant.quantize.recipe_choice import (  # noqa: E402
    RecipeChoice,
    ScoredMethod,
    Trials,
    choose_method,
    hold_out,
)
from annie_quant.quantize.rounding import Method, round_model  # noqa: E402


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runtime_models.save_with_conversations(tmp_path_factory.mktemp("recipes"))


def sample(row: int, category: str = "a", decides: int = 1, length: int = 10) -> CalibrationSample:
    kinds = (PROMPT,) * (length - 4) + (CONTENT,) * 4
    return CalibrationSample(
        category,
        tuple(range(length)),
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
    assert sum(sum(s.decides) for s in hold_out(samples, 10**6)[1]) == recipe_choice.DECISIONS
    assert len(hold_out(samples, 500)[1]) == 50
    assert hold_out(samples[:7], 10**6) == (samples[:7], [])


def chosen(
    monkeypatch: pytest.MonkeyPatch, scores: dict[str, list[float]]
) -> tuple[RecipeChoice, list[str]]:
    """Return what is chosen of methods whose held-out conversations have these divergences; others have gptq's."""
    tried: list[str] = []

    def score(self: Trials, method: Method, title: str) -> np.ndarray:
        name = title.partition(", ")[2]
        tried.append(name)
        return np.array([[d, 0.0, 0.0, 0.0] for d in scores.get(name, scores["GPTQ"])])

    monkeypatch.setattr(Trials, "__init__", lambda self, *args: None)
    monkeypatch.setattr(Trials, "score", score)
    monkeypatch.setattr(recipe_choice, "device_kind", lambda: "cpu")
    samples = [sample(i) for i in range(40)]
    ingredients = list(recipe_choice.ingredients("normal", []))
    lines: list[str] = []
    choice = choose_method(
        Job(Path("m"), Path("out")), {}, samples, Method(), ingredients, Lines(lines.append)
    )
    assert [i.name for i in choice.ingredients] == tried
    return choice, lines


def test_an_ingredient_stays_only_where_the_divergence_falls_by_more_than_the_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = [1.0 + i / 10 for i in range(10)]
    better, noisy = (
        [x - 0.1 - 0.01 * (i % 2) for i, x in enumerate(base)],
        [x - 0.2 + (1.5 if i % 2 else -1.5) for i, x in enumerate(base)],
    )
    choice, lines = chosen(
        monkeypatch,
        {
            "GPTQ": base,
            "prompt tokens at 0": better,
            "prompt tokens at 1": noisy,
            "plain rounding": noisy,
        },
    )
    used = {i.name: i.used for i in choice.ingredients}
    assert (
        used["GPTQ"]
        and used["prompt tokens at 0"]
        and not used["prompt tokens at 1"]
        and not used["plain rounding"]
    )
    assert choice.method == Method(prompt=0.0)
    entry = choice.ingredients[1]
    assert (
        entry.kl == pytest.approx(sum(better))
        and entry.change == pytest.approx(-1.05)
        and 0 < entry.noise < 0.05
    )
    assert choice.held_out == HeldOut(10, 40, 10)
    assert any("fewer than 2,000" in line for line in lines) and any(
        line.startswith("refuses prompt tokens at 1") for line in lines
    )


def test_plain_rounding_wins_where_everything_else_harms(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, _ = chosen(monkeypatch, {"GPTQ": [1.0] * 9 + [1.1], "plain rounding": [0.5] * 10})
    assert choice.method == Method(plain=True) and choice.ingredients[-1].used


def test_settings_of_the_user_are_not_tried() -> None:
    every = dict(recipe_choice.ingredients("max", []))
    assert len(every) == len(recipe_choice.INGREDIENTS)
    assert all(
        "prompt" not in changes for _, changes in recipe_choice.ingredients("max", ["prompt"])
    )
    assert (
        set(dict(recipe_choice.ingredients("fast", [])))
        < set(dict(recipe_choice.ingredients("normal", [])))
        < set(every)
    )


def test_the_noise_is_that_of_a_paired_difference() -> None:
    rng = random.Random(1)
    before = [[rng.random() for _ in range(4)] for _ in range(50)]
    after = [[x + rng.gauss(0, 0.01) for x in row] for row in before]
    scored = [
        ScoredMethod(name, Method(), np.array(rows)) for name, rows in (("a", before), ("b", after))
    ]
    change, noise = scored[1].change(scored[0])
    differences = [sum(a) - sum(b) for a, b in zip(after, before, strict=True)]
    resampled = [sum(rng.choices(differences, k=50)) for _ in range(4000)]
    mean = sum(resampled) / 4000
    assert change == pytest.approx(sum(differences))
    assert noise == pytest.approx((sum((r - mean) ** 2 for r in resampled) / 4000) ** 0.5, rel=0.1)


RECIPES = {
    "prompt": (Method(), "cpu"),
    "plain": (Method(plain=True), "cpu"),
    "in torch, as on a GPU": (Method(), "cuda"),
    "norms": (Method(norms=True), "cpu"),
}


@pytest.mark.parametrize(("recipe", "device"), RECIPES.values(), ids=RECIPES)
def test_the_divergence_of_a_plan_is_that_of_the_checkpoint(
    home: Path, tmp_path: Path, recipe: Method, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from annie_quant.quantize.plan import export
    from annie_quant.quantize.runner import copy_companions

    monkeypatch.setitem(norm_tuning.STEPS, "cpu", 4)
    monkeypatch.setattr(rounding, "device_kind", lambda: device)
    folder = ModelFolder(home / "model")
    samples = calibration_samples.samples_of_rows(
        home / "model", read_conversations(home / "calib.jsonl", 3)
    )
    names = [
        n.removesuffix(".weight")
        for n in folder
        if "_proj.weight" in n and "layers" in n and folder.info(n).shape[0] > 8
    ]
    formats = {n: "nvfp4" if "mlp" in n else "w4a16" for n in names}
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
    settings = {"calib_data": home / "calib.jsonl", "activations": 4, "effort": "fast", **options}
    quantize.run("best", home / "model", home / name, **settings)
    return home / name


def test_a_killed_run_keeps_its_scores_and_the_document_lists_what_was_tried(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(home, "whole")
    document = json.loads((whole / "annie_quant.json").read_text())
    assert document["held_out"]["conversations"] == 2
    names = [i["name"] for i in document["ingredients"]]
    assert names[0] == "GPTQ" and names[-1] == "plain rounding" and "prompt tokens at 0" in names
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
    rounded: list[str] = []
    monkeypatch.setattr(
        recipe_choice, "round_model", lambda *args: rounded.append(args[-1]) or round_model(*args)
    )
    again = run(home, "killed")
    assert len(rounded) == len(names) - 1, "all but gptq are measured"
    assert {p.name: p.read_bytes() for p in again.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }


def test_too_few_conversations_are_one_clear_line(home: Path) -> None:
    lines: list[str] = []
    out = run(home, "few", calib_samples=4, report=lines.append)
    (line,) = [line for line in lines if line.startswith("recipes are not compared")]
    assert "4 conversations, 8 or more are needed" in line and "annie-quant data" in line
    document = json.loads((out / "annie_quant.json").read_text())
    assert document["held_out"] is None and document["ingredients"] == []
