"""Answers by verification are the answers of plain decoding, turn by turn, and so are the gates' verdicts."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch: pip install annie-quant[quantize]")
pytest.importorskip("transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]")
pytest.importorskip("modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]")
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

from runtime_models import TOKENIZER_FILES, dequantized, export_nvfp4, first_edge, save_reference  # noqa: E402

from annie_quant import judge, runtime  # noqa: E402
from annie_quant.evaluate.decoding import Decoded, generate  # noqa: E402
from annie_quant.evaluate.engine import Engine, Row  # noqa: E402
from annie_quant.evaluate.prompts import Template  # noqa: E402
from annie_quant.evaluate.verification import Difference, answers, converse, first_difference, target_of  # noqa: E402
from annie_quant.judge import Case, Workload  # noqa: E402

LIMIT = 14


def workload(name: str, cases: tuple[Case, ...], gates: tuple[str, ...], thinking: bool = False) -> Workload:
    system = "You are Annie. Be brief."
    return Workload(name, "", None, system, None, thinking, LIMIT, 0, gates, cases)


def workloads() -> list[Workload]:
    questions = ("What is the capital of Japan?", "Who wrote Faust?", "Hi!", "Where do cats sleep at night?")
    plain = tuple(
        Case(f"q{i}", ({"role": "user", "content": q},), (), {"contains": ["Tokyo"]}) for i, q in enumerate(questions)
    )
    talks = tuple(Case(f"t{i}", (), (q, "And then?", "Why is that so?")) for i, q in enumerate(questions[:2]))
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

    reference = save_reference(tmp_path_factory.mktemp("reference"))
    naive = export_nvfp4(reference, tmp_path_factory.mktemp("naive"))
    found = {"other": reference, "naive": naive}
    for name, noise in (("equal", 0.0), ("near", 0.003)):
        folder = tmp_path_factory.mktemp(name)
        for file in (*TOKENIZER_FILES, "config.json", "generation_config.json"):
            (folder / file).write_bytes((reference / file).read_bytes())
        generator = torch.Generator().manual_seed(0)
        tensors = dequantized(naive)
        assert tensors.keys() == load_file(reference / "model.safetensors").keys()
        for key, value in tensors.items():
            if value.dim() == 2:
                tensors[key] = (value * (1 + noise * torch.randn(value.shape, generator=generator))).bfloat16()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        found[name] = folder
    return found


def by_verification(folder: Path, reference: Path, numerics: str):
    template = Template(reference)
    engine = Engine(runtime.load(reference, dtype=torch.float32), rows=5)
    asked = converse(
        template,
        workloads(),
        lambda asks: generate(engine, [a.prompt for a in asks], [LIMIT] * len(asks), template.ends),
    )
    model = runtime.load(folder, numerics, cache="bf16", dtype=torch.float32)
    mine = Engine(model, rows=5)
    rows = [Row(a.prompt, target_of(d, template.ends)) for a, d in asked]
    differences = {i: first_difference(x.argmax(-1), rows[i].target, template.ends) for i, x in mine.scores(rows)}
    return template, model, asked, answers(mine, template, asked, differences)


def by_plain_decoding(template: Template, model) -> dict[str, tuple[list[int], bool]]:
    """transformers' generate, one request at a time, each turn with the model's own earlier answers."""

    def one(asks):
        made = []
        for ask in asks:
            ids = torch.tensor([ask.prompt])
            new = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=LIMIT, do_sample=False, pad_token_id=0,
                eos_token_id=template.ends,
            )[0, len(ask.prompt) :].tolist()  # fmt: skip
            stop = next((i for i, t in enumerate(new) if t in template.ends), None)
            made.append(Decoded(new[:stop], stop is not None))
        return made

    return {ask.name: (d.tokens, d.finished) for ask, d in converse(template, workloads(), one)}


def assert_on_an_edge(model, prompt, mine: list[int], plain: list[int]) -> None:
    """The two answers part because of rounding to four bits at an exact edge, and of nothing else.

    A batch sums the same float32 products in another order than a step does, so activations differ in their last bits.
    W4A16 passes that on as it is. W4A4 rounds: where an activation stands within those bits of the middle between two
    codes, it takes one code here and the other there, which these random weights without margins can turn into another
    token. So: in the first linear whose rounded inputs differ, the inputs themselves agree to 2e-6 of their largest, and
    each one that was rounded differently lies within 1e-5 of a midpoint (of E2M1, or of E4M3 for the block's scale).
    """
    at = next((i for i, (a, b) in enumerate(zip(mine, plain, strict=False)) if a != b), min(len(mine), len(plain)))
    edge = first_edge(model, prompt, mine[:at])
    assert edge is not None, "no activation was rounded differently, and yet the answers differ"
    assert edge.apart <= 2e-6 and edge.from_middle < 1e-5, edge


@pytest.mark.parametrize("reference", ["other", "near"])
@pytest.mark.parametrize("numerics", ["w4a4", "w4a16"])
def test_answers_and_verdicts_are_those_of_plain_decoding(folders, reference: str, numerics: str) -> None:
    template, model, asked, outcomes = by_verification(folders["naive"], folders[reference], numerics)
    plain = by_plain_decoding(template, model)
    differing = [o for o in outcomes if (o.decoded.tokens, o.decoded.finished) != plain[o.ask.name]]
    if numerics == "w4a16":
        assert not differing
    for outcome in differing:
        assert_on_an_edge(model, outcome.ask.prompt, outcome.decoded.tokens, plain[outcome.ask.name][0])
    agreeing = [o for o in outcomes if o not in differing]
    assert len(agreeing) >= len(outcomes) - 2
    table = judge.gate_table([(o.ask.workload, o.ask.case, template.answer(o.ask, o.decoded)) for o in agreeing])
    own = [(o.ask.workload, o.ask.case, template.answer(o.ask, Decoded(*plain[o.ask.name]))) for o in agreeing]
    assert table == judge.gate_table(own)
    for outcome, (ask, decoded) in zip(outcomes, asked, strict=True):
        if outcome.ask.prompt == ask.prompt:
            assert outcome.same == (outcome.decoded == decoded)
            assert outcome.decoded.tokens[: outcome.agreed] == decoded.tokens[: outcome.agreed]


def test_the_cases_between_are_really_between(folders) -> None:
    """Nearly equal weights must give both outcomes, or the test above compares less than it says."""
    _, _, _, outcomes = by_verification(folders["naive"], folders["near"], "w4a16")
    assert 0 < sum(o.same for o in outcomes) < len(outcomes)
    assert any(0 < o.agreed < LIMIT for o in outcomes if not o.same)


def test_equal_weights_give_equal_answers_without_decoding(folders, monkeypatch: pytest.MonkeyPatch) -> None:
    from annie_quant.evaluate import verification

    asked_of_decoder: list[int] = []

    def counted(engine, prompts, *more):
        asked_of_decoder.append(len(prompts))
        return generate(engine, prompts, *more)

    monkeypatch.setattr(verification, "generate_together", counted)
    _, _, asked, outcomes = by_verification(folders["naive"], folders["equal"], "w4a16")
    assert all(o.same for o in outcomes) and sum(asked_of_decoder) == 0
    assert [o.decoded for o in outcomes] == [d for _, d in asked]


def test_first_difference() -> None:
    choices = torch.tensor([5, 6, 9, 2])
    assert first_difference(choices, [5, 6, 9, 2], [2, 3]) is None
    assert first_difference(choices, [5, 6, 9, 3], [2, 3]) is None, "one end mark is as good as another"
    assert first_difference(choices, [5, 7, 9, 3], [2, 3]) == Difference(1, 6)
    assert first_difference(choices, [5, 6, 9, 8], [2, 3]) == Difference(3, 2)
    assert first_difference(choices[:0], [], [2]) is None
