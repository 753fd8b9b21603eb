"""Planted faults in tokenizer, chat template and generation settings: `audit --source` names each, and no harmless change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import checkpoint_zoo as zoo
import pytest
from paths import TINY_ANNIE

from annie_quant.checkpoint import audit, prompt_files

FILES = (*zoo.TOKENIZER, "generation_config.json")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    root = tmp_path_factory.mktemp("prompts")
    source = zoo.bf16(root / "bf16")
    checkpoint = zoo.nvfp4(root / "nvfp4", source)
    for folder in (source, checkpoint):
        for name in FILES:
            shutil.copyfile(TINY_ANNIE / name, folder / name)
    return checkpoint, source


def change(path: Path, edit) -> None:
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def exchange(document: dict) -> None:
    """Exchange the ids of 400 pairs of tokens."""
    vocab = document["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)[300:1100]
    for a, b in zip(tokens[:400], tokens[400:], strict=True):
        vocab[a], vocab[b] = vocab[b], vocab[a]


def template(text: str):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def tokenizer(edit):
    return lambda folder: change(folder / "tokenizer.json", edit)


def settings(**values):
    return lambda folder: change(folder / "generation_config.json", lambda d: d.update(values))


ORIGINAL = (TINY_ANNIE / "chat_template.jinja").read_text()
PLAIN = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
NO_TOOLS = "{% set tools = none %}" + ORIGINAL
ROLES_SWAPPED = ORIGINAL.replace("'user'", "'USER'").replace('"user"', '"USER"')
FAULTS = {
    "800 ids exchanged": (tokenizer(exchange), "tokenizer_differs", "800 ids of tokens differ"),
    "two merges exchanged": (
        tokenizer(lambda d: d["model"]["merges"].insert(0, d["model"]["merges"].pop(700))),
        "tokenizer_differs",
        "701 merges differ ('1': ",
    ),
    "a token is missing": (
        tokenizer(lambda d: d["added_tokens"].pop(4)), "tokenizer_differs", "1 ids of tokens differ ('</tool_call>': none",
    ),
    "a token is added": (
        tokenizer(lambda d: d["added_tokens"].append(d["added_tokens"][0] | {"id": 1536, "content": "the cat"})),
        "tokenizer_differs", "1 ids of tokens differ ('the cat': 1536, in the source none)",
    ),
    "tool calls become special": (
        tokenizer(lambda d: d["added_tokens"][3].update(special=True)), "tokenizer_differs", "1 flags of added tokens differ ('",
    ),
    "text is split elsewhere": (
        tokenizer(lambda d: d["pre_tokenizer"]["pretokenizers"].pop(0)), "tokenizer_differs", "pre_tokenizer",
    ),
    "no roles": (template(PLAIN), "template_differs", "a question"),
    "no tools": (template(NO_TOOLS), "template_differs", "leaves out the tools"),
    "another role": (template(ROLES_SWAPPED), "template_differs", "a question"),
    "no template": (lambda folder: (folder / "chat_template.jinja").unlink(), "template_differs", "no chat template"),
    "a broken template": (template("{% for"), "template_differs", "a question"),
    "another end token": (settings(eos_token_id=[5]), "end_tokens_differ", "eos_token_id is 5, in the source 1527, 1529"),
    "one end token less": (settings(eos_token_id=1529), "end_tokens_differ", "eos_token_id is 1529"),
    "another end of a turn": (
        lambda folder: change(folder / "tokenizer_config.json", lambda d: d.update(eos_token="<|endoftext|>")),
        "end_tokens_differ", "eos_token is <|endoftext|>",
    ),
    "temperature 5": (settings(temperature=5.0), "sampling_differs", "temperature is 5.0, in the source 1.0"),
    "a penalty": (settings(repetition_penalty=1.8), "sampling_differs", "repetition_penalty"),
    "sampling": (settings(do_sample=True), "sampling_differs", "do_sample is True"),
    "a list for an object": (lambda folder: (folder / "tokenizer.json").write_text("[]"), "config_unreadable", "tokenizer.json"),
    "fields of another type": (tokenizer(lambda d: d.update(added_tokens=[3])), "config_unreadable", "another type"),
}  # fmt: skip
HARMLESS = {
    "the same bytes": lambda folder: None,
    "other white space": tokenizer(lambda d: None),
    "merges as text": tokenizer(
        lambda d: d["model"].update(merges=[" ".join(m) for m in d["model"]["merges"]])
    ),
    "fields that state nothing": tokenizer(
        lambda d: d["pre_tokenizer"].update(extra=None, more=False)
    ),
    "a comment in the template": template("{# written again #}" + ORIGINAL),
    "the template in tokenizer_config.json": lambda folder: (
        change(folder / "tokenizer_config.json", lambda d: d.update(chat_template=ORIGINAL)),
        (folder / "chat_template.jinja").unlink(),
    ),
    "defaults that are written out": settings(
        temperature=1.0, top_p=1, top_k=50, repetition_penalty=1.0
    ),
    "end tokens in another order": settings(eos_token_id=[1527, 1529]),
    "another version": settings(transformers_version="4.0"),
    "no tokenizer at all": lambda folder: [(folder / name).unlink() for name in zoo.TOKENIZER],
}


def changed(sound, folder, edit) -> Path:
    copy = Path(shutil.copytree(sound[0], folder))
    edit(copy)
    return copy


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(sound, tmp_path, name):
    edit, code, words = FAULTS[name]
    findings = audit(changed(sound, tmp_path / "x", edit), source=sound[1]).findings
    codes = {f.code for f in findings} - {"vocab_size"}  # an added token has no row
    assert codes == {code} and any(words in f.message for f in findings), findings
    assert all(f.message.isprintable() and len(f.message) < 300 for f in findings)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_change_without_an_effect_is_not_a_fault(sound, tmp_path, name):
    assert audit(changed(sound, tmp_path / "x", HARMLESS[name]), source=sound[1]).findings == []


def test_an_audit_parses_each_tokenizer_once(sound, monkeypatch):
    parsed = []
    loads = json.loads

    def counting_loads(text, *arguments, **options):
        parsed.append(len(text))
        return loads(text, *arguments, **options)

    monkeypatch.setattr(json, "loads", counting_loads)
    assert audit(sound[0], source=sound[1]).ok
    sizes = [(folder / "tokenizer.json").stat().st_size for folder in sound]
    assert [size for size in parsed if size in sizes] == sizes


def test_without_a_source_nothing_is_compared(sound, tmp_path):
    assert audit(changed(sound, tmp_path / "x", FAULTS["temperature 5"][0])).ok


def test_the_hashes_are_of_the_content(sound, tmp_path):
    before = prompt_files.model_files(sound[0])
    assert all((before.sha256, before.tokenizer, before.chat_template, before.generation_config))
    for name, field in (
        ("800 ids exchanged", "tokenizer"),
        ("no tools", "chat_template"),
        ("temperature 5", "generation_config"),
    ):
        after = prompt_files.model_files(changed(sound, tmp_path / field, FAULTS[name][0]))
        assert [f for f in before.__struct_fields__ if getattr(before, f) != getattr(after, f)] == [
            "sha256",
            field,
        ]
    moved = changed(sound, tmp_path / "moved", HARMLESS["the template in tokenizer_config.json"])
    assert prompt_files.model_files(moved).chat_template == before.chat_template
