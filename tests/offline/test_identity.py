"""What an evaluation states about the files that it judged: hashes, prompts by content, and faults that forbid "keeps"."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from command_line import CliRunner

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

from paths import TINY_ANNIE  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from annie_quant import documents, quantize  # noqa: E402
from annie_quant.checkpoint.shards import model_sha256  # noqa: E402
from annie_quant.cli import app as cli  # noqa: E402
from annie_quant.judge import (  # noqa: E402
    Case,
    Workload,
    distinct_prompts,
    evidence,
    judge_evaluation,
    prompt_sha256,
)
from annie_quant.offline.evaluation import evaluate_pair  # noqa: E402
from annie_quant.offline.pair import EvaluationJob, open_pair  # noqa: E402

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
ORIGINAL = (TINY_ANNIE / "chat_template.jinja").read_text()
TOOL = {"type": "function", "function": {"name": "web_search", "parameters": {
    "type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}}}  # fmt: skip
GATES = ("non_empty", "no_markdown")


def case(index: int, text: str = "") -> Case:
    return Case(
        f"c{index}", ({"role": "user", "content": text or f"What is {index} and {index + 3}?"},)
    )


def workloads(cases: int = 3, limit: int = 60) -> list[Workload]:
    """Some prompts. Their answers end before 60 tokens: one that is cut does not count.

    limit: fewer tokens where only the prompts matter.
    """
    talk = (Case("t", (), ("Hello there!", "What did I say?")),)
    return [
        Workload(
            "plain",
            "",
            None,
            "Be brief.",
            None,
            False,
            limit,
            0,
            GATES,
            tuple(case(i) for i in range(cases)),
        ),
        Workload("talk", "", None, None, (TOOL,), False, limit, 0, GATES, talk),
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identity") / "direct"
    quantize.run("direct", TINY_ANNIE, folder)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def evaluated(folder, cache, chosen=None, **more) -> documents.Evaluation:
    job = EvaluationJob(
        checkpoint=folder,
        reference=TINY_ANNIE,
        numerics=["w4a16"],
        ensemble=False,
        cache=cache,
        device="cpu",
        **more,
    )
    with open_pair(job) as pair:
        return evaluate_pair(pair, chosen or workloads())


@pytest.fixture(scope="module")
def sound(checkpoint, cache):
    return evaluated(checkpoint, cache)


@pytest.fixture(scope="module")
def cut(checkpoint, cache):
    """The same with answers of four tokens."""
    return evaluated(checkpoint, cache, workloads(limit=4))


def test_it_carries_the_hashes_of_models_files_and_prompts(sound, checkpoint):
    assert sound.checkpoint_files.sha256 == model_sha256(checkpoint) != sound.reference_files.sha256
    assert sound.reference_files.sha256 == sound.reference_sha256 == model_sha256(TINY_ANNIE)
    own, reference = sound.checkpoint_files, sound.reference_files
    digest = hashlib.sha256((TINY_ANNIE / "tokenizer.json").read_bytes()).hexdigest()
    assert (
        own.tokenizer == reference.tokenizer == digest
        and own.chat_template == reference.chat_template != ""
    )
    assert (
        own.generation_config
        == hashlib.sha256((TINY_ANNIE / "generation_config.json").read_bytes()).hexdigest()
    )
    digests = "\n".join(prompt_sha256(c, workloads()[0]) for c in workloads()[0].cases)
    assert sound.workloads["plain"].prompts_sha256 == hashlib.sha256(digests.encode()).hexdigest()
    assert sound.blocking == [] and not any("tokenizer" in note for note in sound.notes)


def test_the_stored_outcomes_give_its_counts_and_its_verdict(sound, tmp_path):
    documents.write(tmp_path / "x.json", sound)
    stored = documents.Evaluation.load(tmp_path / "x.json")
    assert evidence.differences(stored) == [] and stored.prompts["non_empty"][-1] == "talk/t/2"
    stored.numerics["w4a16"].outcomes["non_empty"] = "0" * 5
    lines = evidence.differences(stored)
    assert "were changed" in lines[0] and any(
        "non_empty: lost 0 in the file, 5" in line for line in lines
    )


def test_gates_with_fewer_prompts_than_requested_are_named(checkpoint, cache, sound):
    """Nothing did: of "400 prompts per gate" 29 had a tool to call."""
    assert (
        "fewer than 4 prompts in plain, talk: call_rate 2"
        in evaluated(checkpoint, cache, n_per_gate=4).notes
    )
    assert not any("fewer than" in note for note in sound.notes)


def test_one_answer_to_all_prompts_forbids_keeps(tmp_path, cache):
    """Without labels and with few prompts, no gate of single answers notices it."""
    folder = Path(shutil.copytree(TINY_ANNIE, tmp_path / "constant"))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"].zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    chosen = [replace(w, max_tokens=8) for w in workloads(8)]
    assert any(
        "one answer to 10 of 10 prompts" in line
        for line in evaluated(folder, cache, chosen).blocking
    )
    assert not evaluated(TINY_ANNIE, cache, chosen).blocking


def edited(checkpoint, folder, edit) -> Path:
    copy = Path(shutil.copytree(checkpoint, folder))
    edit(copy)
    return copy


def change(name, edit):
    def apply(folder):
        document = json.loads((folder / name).read_text())
        edit(document)
        (folder / name).write_text(json.dumps(document))

    return apply


def exchange(document) -> None:
    vocab = document["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)[300:1100]
    for a, b in zip(tokens[:400], tokens[400:], strict=True):
        vocab[a], vocab[b] = vocab[b], vocab[a]


def template(text):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
FAULTS = {
    "ids exchanged": (
        change("tokenizer.json", exchange),
        ["800 ids of tokens differ", "other tokens for 5 of 5 prompts"],
    ),
    "no roles": (template(PLAIN), ["chat_template.jinja", "other tokens for 5 of 5 prompts"]),
    "no tools": (
        template("{% set tools = none %}" + ORIGINAL),
        ["it leaves out the tools", "other tokens for 2 of 5 prompts (talk/t/1, talk/t/2)"],
    ),
    "no template": (
        lambda folder: (folder / "chat_template.jinja").unlink(),
        ["there is no chat template", "no server can use"],
    ),
    "another end token": (
        change("generation_config.json", lambda d: d.update(eos_token_id=5)),
        ["eos_token_id is 5", "end with tokens [1529, 5]"],
    ),
    "temperature 5": (
        change("generation_config.json", lambda d: d.update(temperature=5.0)),
        ["temperature is 5.0"],
    ),
    "not a tokenizer": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        ["no server can use the checkpoint's tokenizer"],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_files_that_give_other_prompts_or_answers_forbid_keeps(checkpoint, cache, tmp_path, name):
    """Eval used the reference's tokenizer, and the verdict did not mention it."""
    edit, words = FAULTS[name]
    result = evaluated(edited(checkpoint, tmp_path / "x", edit), cache, workloads(limit=4))
    assert result.verdict.verdict != "keeps" and all(
        any(w in line for line in result.blocking) for w in words
    ), result.blocking
    assert result.verdict.reasons[: len(result.blocking)] == result.blocking
    assert all("\n" not in line and line in result.notes for line in result.blocking)


HARMLESS = {
    "other white space": change("tokenizer.json", lambda d: None),
    "a comment in the template": template("{# written again #}" + ORIGINAL),
    "no tokenizer": lambda folder: [(folder / name).unlink() for name in FILES[:3]],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_files_that_give_the_same_are_a_note(checkpoint, cache, cut, tmp_path, name):
    result = evaluated(
        edited(checkpoint, tmp_path / "x", HARMLESS[name]), cache, workloads(limit=4)
    )
    assert result.blocking == [] and result.verdict == cut.verdict
    words = "no tokenizer; both models were" if name == "no tokenizer" else "give the same tokens"
    assert [words in note for note in result.notes].count(True) == 1


# ---- prompts by content


def test_a_prompt_under_other_ids_counts_once(checkpoint, cache):
    """One prompt 60 times counted as n = 60."""
    [plain, talk] = workloads(1)
    many = replace(plain, cases=tuple(case(i, "What is 0 and 3?") for i in range(60)))
    other = replace(many, name="other", cases=many.cases[:30])
    one, result = (
        evaluated(checkpoint, cache, [plain, talk]),
        evaluated(checkpoint, cache, [many, other, talk]),
    )
    assert result.n_answers == one.n_answers == 3
    rows = [e.numerics["w4a16"].paired["non_empty"] for e in (one, result)]
    assert rows[0] == rows[1] and rows[0].n == 3
    assert "89 prompts are repeated under other ids and count once" in result.notes
    assert not any("repeated" in note for note in one.notes)


def test_a_prompt_counts_once_per_gate(checkpoint, cache):
    """Another workload may judge another gate of the same prompt."""
    [plain, _] = workloads(2)
    result = evaluated(checkpoint, cache, [plain, replace(plain, name="other", gates=("stop",))])
    rows = result.numerics["w4a16"].paired
    assert {g: rows[g].n for g in (*GATES, "stop")} == {"no_markdown": 2, "non_empty": 2, "stop": 2}
    assert max(row.n for row in rows.values()) == 2 == result.n_answers, (
        "nor in the gates that every workload has"
    )
    counts = {name: workload.n_cases for name, workload in result.workloads.items()}
    assert counts["plain+2"] == sum(counts.values()) == 2


def test_what_two_workloads_expect_of_one_prompt_is_expected_of_its_one_case():
    [plain, _] = workloads(2)
    cases = tuple(replace(c, expect={"contains": ["3"]}) for c in plain.cases)
    factual = replace(
        plain,
        name="f",
        gates=("factual",),
        cases=(*cases, case(9)),
        max_tokens=90,
        informative=("factual",),
    )
    others = replace(
        factual,
        name="o",
        gates=("factual", "stop"),
        cases=(replace(cases[0], expect={"contains": ["7"]}),),
    )
    [base, merged, rest, empty], n_repeated = distinct_prompts([plain, factual, others])
    assert (n_repeated, base.cases, empty.cases, rest.cases) == (3, (), (), (case(9),))
    assert (
        merged.name == "plain+2"
        and merged.gates == (*GATES, "factual")
        and merged.informative == ("factual",)
    )
    assert [c.expect for c in merged.cases] == [{"contains": ["3"]}] * 2, (
        "one that expects something else is left out"
    )
    assert {merged.max_tokens_for(c) for c in merged.cases} == {90}
    again, still = distinct_prompts([base, merged, rest, empty])
    assert (again, still) == ([base, merged, rest, empty], 3)


def test_repeats_are_removed_before_prompts_are_chosen():
    """A sample of 10 has 10 prompts, not copies of one."""
    [plain, _] = workloads(40)
    copies = tuple(case(100 + i, "What is 0 and 3?") for i in range(400))
    everything = [replace(plain, cases=(*plain.cases, *copies))]
    [chosen] = EvaluationJob(
        checkpoint=TINY_ANNIE, reference=TINY_ANNIE, workloads=everything
    ).prompts(10)
    assert len({prompt_sha256(c, chosen) for c in chosen.cases}) == len(chosen.cases) == 10
    assert chosen.n_repeated == 400


# ---- a broken export


def shuffle(folder: Path, share: int = 1) -> None:
    """Shuffle the rows of the codes of every linear, or of one of `share`."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(0)
    for name, value in [(n, v) for n, v in tensors.items() if v.dtype == torch.uint8][::share]:
        tensors[name] = value[torch.randperm(len(value), generator=generator)].contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("gates", "share", "words"),
    [
        (["tool_call"], 4, "BROKEN EXPORT"),
        (["non_empty"], 4, "BROKEN EXPORT"),
        (
            ["non_empty"],
            1,
            "THE REFERENCE IS NOT ITS SOURCE",
        ),  # what a checkpoint of which all codes are shuffled looks like
    ],
)
def test_a_broken_export_exits_with_1_and_its_evaluation_carries_it(
    checkpoint, cache, tmp_path, gates, share, words, monkeypatch
):
    """Also on a workload that bf16 fails entirely."""
    broken = edited(checkpoint, tmp_path / "x", lambda folder: shuffle(folder, share))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    messages = [
        {"messages": [{"role": "user", "content": f"Good morning number {i}!"}], "id": str(i)}
        for i in range(3)
    ]
    if gates == ["tool_call"]:
        for row in messages:
            row["expect"] = {"tool": "web_search"}
    content = {"name": "w", "max_tokens": 8, "gates": gates, "cases": messages, "tools": [TOOL]}
    (tmp_path / "w.json").write_text(json.dumps(content))
    output = tmp_path / "eval" / "nv.json"
    outcome = CliRunner().invoke(cli, [
        "eval", str(broken), "--reference", str(TINY_ANNIE), "--workloads", str(tmp_path / "w.json"), "--numerics", "w4a16",
        "--n", "3", "--output", str(output), "--json",
    ])  # fmt: skip
    assert outcome.exit_code == 1, outcome.output
    stored = documents.Evaluation.load(output)
    assert stored.blocking and all(line.startswith(words) for line in stored.blocking)
    assert stored.verdict.verdict != "keeps" and stored.verdict.reasons[0] == stored.blocking[0]
    assert json.loads(outcome.stdout)["blocking"] == stored.blocking
    assert evidence.differences(stored) == []


def test_a_verdict_that_keeps_becomes_undecided(sound):
    """The same evaluation with and without a fault: the reason comes first."""
    row = documents.PairedGate(240, 0, 0, passed=240)
    side = msgspec.structs.replace(sound.numerics["w4a16"], paired={"tool_call": row}, pooled=None)
    for blocking, verdict in (([], "keeps"), (["BROKEN EXPORT: codes"], "undecided")):
        result = judge_evaluation(
            msgspec.structs.replace(sound, numerics={"w4a16": side}, blocking=blocking)
        )
        assert result.verdict.verdict == verdict
    assert result.verdict.sentence.startswith("BROKEN EXPORT: codes")
