"""The model's own answers: those of transformers' generate, stored, with given ones that stay and long ones that are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from paths import CALIBRATION, TINY_ANNIE

from annie_quant import quantize
from annie_quant.core.progress import SILENT
from annie_quant.data.rows import read_conversations

torch = pytest.importorskip("torch", reason="the model answers in torch")
transformers = pytest.importorskip("transformers", reason="the model answers in transformers")
from annie_quant.offline import answers  # noqa: E402
from annie_quant.offline.prompts import ScoredAnswer, Template, answers_of_row  # noqa: E402
from annie_quant.quantize import calibration_text, own_answers  # noqa: E402
from annie_quant.quantize.work_estimate import DECODED_COLUMNS  # noqa: E402


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(TINY_ANNIE)


@pytest.fixture(scope="module")
def given(template: Template) -> list[ScoredAnswer]:
    rows = read_conversations(CALIBRATION)[:8]
    return [answer for row in rows for answer in answers_of_row(template, row)]


def expected(prompt: tuple[int, ...], length: int = 64) -> list[int]:
    """Return the answer of transformers' greedy generate."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_ANNIE, dtype=torch.float32)
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=length, do_sample=False)
    return tokens[0, len(prompt) :].tolist()


def test_other_answers_are_those_of_transformers(
    template: Template, given: list[ScoredAnswer], tmp_path: Path
) -> None:
    answered = own_answers.own_answers(TINY_ANNIE, template, given, SILENT, tmp_path)
    pairs = list(zip(given, answered.answers, strict=True))
    stayed = [own for before, own in pairs if own == before]
    changed = [own for before, own in pairs if own != before]
    assert len(stayed) == answered.n_kept + answered.n_endless
    assert answered.n_kept > 0
    assert len(changed) >= 2
    for own in changed[:3]:
        assert list(own.target) == expected(own.prompt)


def test_an_answer_that_the_model_never_gives_is_replaced(
    template: Template, given: list[ScoredAnswer], tmp_path: Path
) -> None:
    first = given[0]
    strange = tuple(template.ids("jars jars jars")) + first.target[-1:]
    foreign = ScoredAnswer(first.category, first.prompt, strange)
    answered = own_answers.own_answers(TINY_ANNIE, template, [foreign], SILENT, tmp_path)
    (own,) = answered.answers
    assert list(own.target) == expected(first.prompt)
    assert answered.n_kept == 0


def test_stored_answers_need_no_model(
    template: Template,
    given: list[ScoredAnswer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those of a run that was killed after its first part."""
    monkeypatch.setattr(answers, "ANSWERS_PER_WRITE", 4)
    generate = own_answers.generate
    calls = []

    def killed(*arguments: Any) -> Any:
        if calls:
            raise KeyboardInterrupt
        calls.append(arguments)
        return generate(*arguments)

    monkeypatch.setattr(own_answers, "generate", killed)
    with pytest.raises(KeyboardInterrupt):
        own_answers.own_answers(TINY_ANNIE, template, given, SILENT, tmp_path)

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded, although its answers are stored")

    monkeypatch.setattr(own_answers, "load", load)
    stored = own_answers.own_answers(TINY_ANNIE, template, given[:4], SILENT, tmp_path)
    assert len(stored.answers) == 4
    with pytest.raises(AssertionError, match="is loaded"):
        own_answers.own_answers(TINY_ANNIE, template, given, SILENT, tmp_path)


def test_where_the_own_answer_does_not_end_the_given_one_stays(
    given: list[ScoredAnswer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    template = Template(TINY_ANNIE)
    strange = tuple(template.ids("jars jars")) + given[0].target[-1:]
    foreign = ScoredAnswer("", given[0].prompt, strange)
    monkeypatch.setattr(own_answers, "_MAX_ANSWER_TOKENS", 2)
    longest = max(len(strange), 2)
    assert len(expected(given[0].prompt)) > longest
    answered = own_answers.own_answers(TINY_ANNIE, template, [foreign], SILENT, tmp_path)
    assert answered.answers == [foreign]
    assert answered.n_endless == 1
    assert answered.limit == longest


def test_the_calibration_line_says_whose_answers_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    uses = {}
    for source in ("own", "given"):
        job = quantize.Job(
            TINY_ANNIE,
            tmp_path / "out",
            CALIBRATION,
            calib_samples=6,
            answers=source,
            work=tmp_path / source,
        )
        uses[source] = calibration_text.read_answers(job, SILENT).use
    own = uses["own"]
    assert own.own_answers > 0 < own.given_answers
    assert f"{own.own_answers} answers are the model's own" in own.line()
    assert "own" not in uses["given"].line()


def test_the_estimate_knows_how_much_is_decoded_at_once() -> None:
    from annie_quant.offline import engine

    assert DECODED_COLUMNS == engine.MAX_DECODED_COLUMNS


def test_long_prompts_are_decoded_in_smaller_batches(template: Template) -> None:
    """The keys and values of every row have a copy of the prompt."""
    from annie_quant.offline import decoding
    from annie_quant.offline.engine import MAX_DECODED_COLUMNS, Engine
    from annie_quant.offline.loading import load

    engine = Engine(load(TINY_ANNIE, dtype=torch.float32, device="cpu"), rows=100)
    prompts = [[1] * length for length in (8000, 9000, 300, 200) for _ in range(70)]
    limits = [50] * 280
    limits[3] = 0
    batches = list(decoding._decoded_batches(engine, prompts, limits))
    assert sorted(i for batch in batches for i in batch) == [i for i in range(280) if i != 3]
    for batch in batches:
        columns = len(batch) * (max(len(prompts[i]) for i in batch) + 50)
        assert len(batch) <= 100
        assert columns <= min(100 * 2048, MAX_DECODED_COLUMNS)
