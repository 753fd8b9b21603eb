"""`annie-quant draft` on tiny-annie: it tunes, resumes to the same bytes, and refuses too few answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="tuning needs torch: pip install annie-quant[quantize]")
pytest.importorskip("transformers", reason="tuning needs transformers")

from paths import TINY_ANNIE  # noqa: E402
from tiny_variants import save_with_head  # noqa: E402

from annie_quant import offline, quantize  # noqa: E402
from annie_quant.checkpoint import ModelFolder  # noqa: E402
from annie_quant.checkpoint.draft_speed import describe_folder  # noqa: E402
from annie_quant.core.errors import UsageError  # noqa: E402
from annie_quant.offline.draft_head import DraftHead  # noqa: E402
from annie_quant.offline.draft_prediction import Step, steps_of  # noqa: E402
from annie_quant.offline.engine import Engine  # noqa: E402
from annie_quant.offline.hidden_states import DraftedAnswer, answer_states  # noqa: E402
from annie_quant.quantize import draft, draft_estimate, draft_tuning, own_answers  # noqa: E402

ROWS = Path(__file__).resolve().parents[1] / "data" / "calibration.jsonl"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_head(tmp_path_factory.mktemp("base") / "bf16")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "MIN_ANSWERS", 6)
    monkeypatch.setattr(draft, "GENERAL_PROMPTS", 2)
    monkeypatch.setattr(draft, "GENERAL_WORKLOADS", ("text_prose",))
    monkeypatch.setattr(own_answers, "_MAX_ANSWER_TOKENS", 40)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Five conversations, with ten answers or so."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(ROWS.read_text().splitlines(keepends=True)[::4]))
    return path


def test_too_few_answers_are_refused_and_nothing_is_written(
    base: Path, rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="answers to tune on, expected at least 40"):
        draft.run(base, tmp_path / "out", rows)
    assert list(tmp_path.iterdir()) == [rows]


def test_gradients_are_those_of_the_whole_logits(base: Path) -> None:
    """The loss in parts against one autograd pass over all logits, written out."""
    model = offline.load(base, dtype=torch.float32)
    engine = Engine(model)
    head = DraftHead(ModelFolder(base), model, torch.float32).requires_grad_(True)
    answers = [
        DraftedAnswer("", [5, 6, 7, 8], [9, 10, 11, 12, 13]),
        DraftedAnswer("", [5, 6], [7, 8, 9]),
    ]
    (states,) = (batch.copy() for batch in answer_states(engine, answers))
    loss = draft_tuning.accumulate_gradients(engine, head, model.lm_head.weight, states)
    ours = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    total = torch.zeros(())
    count = 0.0
    for answer in answers:
        (alone,) = (batch.copy() for batch in answer_states(engine, [answer]))
        outputs = head(alone.inputs(3), 3)
        first = len(answer.prompt) - 1
        for step, state in enumerate(outputs):
            for i in range(len(answer.answer) - step - 1):
                target = model.lm_head(alone.hidden[0, first + i + step + 1]).detach().softmax(-1)
                weight = 0.6**step
                total = total - weight * (target * model.lm_head(state[0, i]).log_softmax(-1)).sum()
                count += weight
    (total / count).backward()
    assert loss == pytest.approx(float(total.detach()) / count, rel=1e-4)
    for name, parameter in head.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, atol=1e-5, rtol=1e-3), name


def test_a_grafted_head_is_tuned_and_a_killed_run_goes_on(
    few: None, base: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "nvfp4"
    quantize.run("direct", TINY_ANNIE, model)
    options: dict[str, Any] = {"base": base, "epochs": 2, "seed": 3}
    whole = draft.run(model, tmp_path / "whole", rows, **options)
    assert whole.head.numerics == "w4a16" and whole.head.base == base.name
    assert "15 of them differ" in whole.notes[0] or whole.head.best_epoch == 0

    measure = draft_tuning._measure
    calls = []

    def killed(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        measure(*arguments)

    monkeypatch.setattr(draft_tuning, "_measure", killed)
    with pytest.raises(KeyboardInterrupt):
        draft.run(model, tmp_path / "resumed", rows, **options)
    assert not (tmp_path / "resumed").exists()
    monkeypatch.setattr(draft_tuning, "_measure", measure)
    trained = []
    accumulate = draft_tuning.accumulate_gradients
    monkeypatch.setattr(
        draft_tuning, "accumulate_gradients", lambda *a: trained.append(accumulate(*a))
    )
    draft.run(model, tmp_path / "resumed", rows, **options)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    for name in names:
        assert (tmp_path / "resumed" / name).read_bytes() == (
            tmp_path / "whole" / name
        ).read_bytes()
    stored = json.loads((tmp_path / "whole" / "annie_quant_drafts.json").read_text())
    assert stored["after"]["all"]["by_drafts"][2]["steps"] > 3
    lines = describe_folder(ModelFolder(tmp_path / "whole"))
    assert lines[0].startswith("drafts, all: ") and "tokens per step" in lines[0]
    assert {".whole.work", ".resumed.work"}.isdisjoint(p.name for p in tmp_path.iterdir())


def test_only_a_head_that_keeps_general_prompts_replaces_the_best() -> None:
    def steps(accepted: int) -> Any:
        rows = [Step(1, int(i < accepted), 1 + int(i < accepted)) for i in range(100)]
        return steps_of([rows], 1)

    assert draft_tuning.keeps(steps(80), steps(79))
    assert not draft_tuning.keeps(steps(80), steps(78))


def test_a_dry_run_estimates_a_published_model_on_a_spark() -> None:
    nine = draft_estimate.estimate(Path("9b"), None, ROWS, 5000, 3)
    text = "\n".join(nine.lines())
    assert 5e9 < nine.peak_bytes < 119e9 and "fits" in text
    assert 60 < sum(nine.seconds.values()) < 6 * 3600
