"""Answers by verification equal those of plain decoding, turn by turn, and so do the gates' verdicts."""

from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

from runtime_models import TOKENIZER_FILES, dequantized, export_nvfp4, first_edge, save_reference  # noqa: E402

from annie_quant import judge, runtime  # noqa: E402
from annie_quant.judge import Case, Workload  # noqa: E402
from annie_quant.offline.answers import (  # noqa: E402
    FirstDifference,
    answer_from_differences,
    answer_workloads,
    first_difference,
)
from annie_quant.offline.decoding import Completion, generate  # noqa: E402
from annie_quant.offline.engine import Engine, Row  # noqa: E402
from annie_quant.offline.prompts import Template  # noqa: E402

LIMIT = 14


def workload(
    name: str, cases: tuple[Case, ...], gates: tuple[str, ...], thinking: bool = False
) -> Workload:
    system = "You are Annie. Be brief."
    return Workload(name, "", None, system, None, thinking, LIMIT, 0, gates, cases)


def workloads() -> list[Workload]:
    questions = (
        "What is the capital of Japan?",
        "Who wrote Faust?",
        "Hi!",
        "Where do cats sleep at night?",
    )
    plain = tuple(
        Case(f"q{i}", ({"role": "user", "content": q},), (), {"contains": ["Tokyo"]})
        for i, q in enumerate(questions)
    )
    talks = tuple(
        Case(f"t{i}", (), (q, "And then?", "Why is that so?")) for i, q in enumerate(questions[:2])
    )
    gates = ("non_empty", "no_markdown", "thinking_leak", "factual", "repetition", "stop")
    return [
        workload("plain", plain, gates),
        workload("talk", talks, gates[:3]),
        workload("thinking", plain[:2], gates[:2], thinking=True),
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A reference; its naive export; and references that the export equals exactly, or nearly."""
    from safetensors.torch import load_file, save_file

    reference = save_reference(tmp_path_factory.mktemp("reference"), layers=2)
    naive = export_nvfp4(reference, tmp_path_factory.mktemp("naive"))
    result = {"other": reference, "naive": naive}
    for name, noise in (("equal", 0.0), ("near", 0.003)):
        folder = tmp_path_factory.mktemp(name)
        for file in (*TOKENIZER_FILES, "config.json", "generation_config.json"):
            (folder / file).write_bytes((reference / file).read_bytes())
        generator = torch.Generator().manual_seed(0)
        tensors = dequantized(naive)
        assert tensors.keys() == load_file(reference / "model.safetensors").keys()
        for key, value in tensors.items():
            if value.dim() == 2:
                tensors[key] = (
                    value * (1 + noise * torch.randn(value.shape, generator=generator))
                ).bfloat16()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        result[name] = folder
    return result


def by_verification(folder: Path, reference: Path, numerics: str):
    template = Template(reference)
    engine = Engine(runtime.load(reference, dtype=torch.float32), rows=5)
    answered = answer_workloads(
        template,
        workloads(),
        lambda requests: generate(
            engine, [r.prompt for r in requests], [LIMIT] * len(requests), template.end_tokens
        ),
    )
    model = runtime.load(folder, numerics, cache="bf16", dtype=torch.float32)
    own = Engine(model, rows=5)
    rows = [Row(r.prompt, template.target(c)) for r, c in answered]
    differences = {
        i: first_difference(x.argmax(-1), rows[i].target, template.end_tokens)
        for i, x in own.scores(rows)
    }
    return template, model, answered, answer_from_differences(own, template, answered, differences)


def by_plain_decoding(template: Template, model) -> dict[str, tuple[list[int], bool]]:
    """transformers' generate, one request at a time, each turn with the model's own earlier answers."""

    def one_by_one(requests):
        completions = []
        for request in requests:
            ids = torch.tensor([request.prompt])
            new = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False, pad_token_id=0,
                eos_token_id=template.end_tokens,
            )[0, len(request.prompt) :].tolist()  # fmt: skip
            stop = next((i for i, t in enumerate(new) if t in template.end_tokens), None)
            completions.append(Completion(new[:stop], stop is not None))
        return completions

    return {
        r.name: (c.tokens, c.finished)
        for r, c in answer_workloads(template, workloads(), one_by_one)
    }


def assert_on_an_edge(model, prompt, own: list[int], plain: list[int]) -> None:
    """Check that the two answers differ only because an activation is at the midpoint between two codes.

    A batch sums the same float32 products in another order than a step, so activations differ in their last bits. W4A16
    passes this on unchanged. W4A4 rounds: an activation within those bits of the midpoint between two codes gets one code
    in the batch and the other in the step, which can change a token with these random weights without margins. So in the
    first linear whose rounded inputs differ, the inputs agree to 2e-6 of the largest, and each input that was rounded
    differently is within 1e-5 of a midpoint (of E2M1, or of E4M3 for the block's scale).
    """
    at = next(
        (i for i, (a, b) in enumerate(zip(own, plain, strict=False)) if a != b),
        min(len(own), len(plain)),
    )
    edge = first_edge(model, prompt, own[:at])
    assert edge is not None, "the answers differ although no activation was rounded differently"
    assert edge.apart <= 2e-6 and edge.from_middle < 1e-5, edge


@pytest.mark.parametrize("reference", ["other", "near"])
@pytest.mark.parametrize("numerics", ["w4a4", "w4a16"])
def test_answers_and_verdicts_are_those_of_plain_decoding(
    folders, reference: str, numerics: str
) -> None:
    template, model, answered, outcomes = by_verification(
        folders["naive"], folders[reference], numerics
    )
    plain = by_plain_decoding(template, model)
    differing = [
        o for o in outcomes if (o.completion.tokens, o.completion.finished) != plain[o.request.name]
    ]
    if numerics == "w4a16":
        assert not differing
    for outcome in differing:
        assert_on_an_edge(
            model, outcome.request.prompt, outcome.completion.tokens, plain[outcome.request.name][0]
        )
    agreeing = [o for o in outcomes if o not in differing]
    assert len(agreeing) >= len(outcomes) - 2
    table = judge.gate_table(
        [
            judge.Judged(
                o.request.workload, o.request.case, template.answer(o.request, o.completion)
            )
            for o in agreeing
        ]
    )
    own = [
        judge.Judged(
            o.request.workload,
            o.request.case,
            template.answer(o.request, Completion(*plain[o.request.name])),
        )
        for o in agreeing
    ]
    assert table == judge.gate_table(own)
    for outcome, (request, completion) in zip(outcomes, answered, strict=True):
        if outcome.request.prompt == request.prompt:
            assert outcome.same == (outcome.completion == completion)
            assert (
                outcome.completion.tokens[: outcome.agreed] == completion.tokens[: outcome.agreed]
            )


def test_nearly_equal_weights_give_both_outcomes(folders) -> None:
    """Without both outcomes the test above would compare nothing."""
    _, _, _, outcomes = by_verification(folders["naive"], folders["near"], "w4a16")
    assert 0 < sum(o.same for o in outcomes) < len(outcomes)
    assert any(0 < o.agreed < LIMIT for o in outcomes if not o.same)


def test_equal_weights_give_equal_answers_without_decoding(
    folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    from annie_quant.offline import answers

    decoded_prompts: list[int] = []

    def counted(engine, prompts, *more):
        decoded_prompts.append(len(prompts))
        return generate(engine, prompts, *more)

    monkeypatch.setattr(answers, "generate", counted)
    _, _, answered, outcomes = by_verification(folders["naive"], folders["equal"], "w4a16")
    assert all(o.same for o in outcomes) and sum(decoded_prompts) == 0
    assert [o.completion for o in outcomes] == [c for _, c in answered]


def test_a_turn_is_decoded_again_only_after_a_changed_answer(
    folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first turns are decoded from the prompt and turn out as before, so the later turns have the same prompts."""
    from annie_quant.offline import answers

    template, model, answered, _ = by_verification(folders["naive"], folders["equal"], "w4a16")
    counts: list[int] = []

    def counted(engine, prompts, *more):
        counts.append(len(prompts))
        return generate(engine, prompts, *more)

    monkeypatch.setattr(answers, "generate", counted)
    first = {
        i: FirstDifference(0, None)
        for i, (r, _) in enumerate(answered)
        if r.case.turns and r.turn == 0
    }
    outcomes = answer_from_differences(Engine(model, rows=5), template, answered, first)
    assert counts == [2, 0, 0] and [o.completion for o in outcomes] == [c for _, c in answered]
    token = next(
        t
        for t in range(5, 50)
        if t not in template.end_tokens and t != answered[min(first)][1].tokens[0]
    )
    changed = answer_from_differences(
        Engine(model, rows=5), template, answered, {min(first): FirstDifference(0, token)}
    )
    names = {o.request.conversation for o in changed if not o.same}
    assert counts[3:] == [1, 1, 1] and names == {answered[min(first)].request.conversation}


def test_first_difference() -> None:
    choices = torch.tensor([5, 6, 9, 2])
    assert first_difference(choices, [5, 6, 9, 2], [2, 3]) is None
    assert first_difference(choices, [5, 6, 9, 3], [2, 3]) is None, "all end tokens count as equal"
    assert first_difference(choices, [5, 7, 9, 3], [2, 3]) == FirstDifference(1, 6)
    assert first_difference(choices, [5, 6, 9, 8], [2, 3]) == FirstDifference(3, 2)
    assert first_difference(choices[:0], [], [2]) is None
