"""Compare the files that make prompts and end answers with the source's, for an audit.

These are tokenizer.json, the chat template and generation_config.json. Weights show no fault in
them: with exchanged ids in the vocabulary, a template without tools or another end token, a server
answers other prompts than the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from annie_quant.checkpoint import shards
from annie_quant.checkpoint.chat_template import ChatTemplate
from annie_quant.checkpoint.checks import fault
from annie_quant.checkpoint.header import ShardError
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import sha256_file, sha256_text
from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import Finding, ModelFiles

MAX_TEMPLATE_BYTES = 4_000_000
# Settings of generation_config.json by which servers sample, with transformers' value where the
# file has none.
SAMPLING: JsonObject = {
    "do_sample": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "min_p": 0.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
}
FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")  # of an added token
TOKENIZER_STEPS = ("normalizer", "pre_tokenizer", "decoder")  # from text to pieces, and back
TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}},
            "required": ["place"],
        },
    },
}
SYSTEM: JsonObject = {"role": "system", "content": "You are brief."}
USER: JsonObject = {"role": "user", "content": "Is it raining in Rome?"}
_CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Rome"}}}
LATER_MESSAGES: list[JsonObject] = [
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "get_weather", "content": "Rain."},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "And tomorrow?"},
]
# What a template must render like the source's: messages, tools, other variables.
CONVERSATIONS: dict[str, tuple[list[JsonObject], list[JsonObject] | None, JsonObject]] = {
    "a question": ([USER], None, {}),
    "a system prompt": ([SYSTEM, USER], None, {}),
    "an earlier answer": ([USER, LATER_MESSAGES[2], LATER_MESSAGES[3]], None, {}),
    "tools": ([USER], [TOOL], {}),
    "a call and its result": ([USER, *LATER_MESSAGES], [TOOL], {}),
    "thinking off": ([USER], None, {"enable_thinking": False}),
    "thinking on": ([USER], None, {"enable_thinking": True}),
}


def differences(
    folder: Path, source: Path, read_json: shards.JsonReader = shards.read_object
) -> list[Finding]:
    """Return how the files that make prompts differ in content from the source's.

    Nothing where the folder has no tokenizer.

    A folder without a tokenizer is served with another folder's files; a server refuses it alone.

    read_json: reads tokenizer.json.
    """
    if not has_tokenizer(folder):
        return []
    findings: list[Finding] = []
    for file, compare in (
        (shards.TOKENIZER, partial(_tokenizer, read_json)),
        (shards.TEMPLATE, _template),
        (shards.GENERATION, _generation),
    ):
        try:
            findings += compare(folder, source)
        except (CheckpointError, AttributeError, TypeError, ValueError, RecursionError) as error:
            other_type = f"fields of another type ({type(error).__name__})"
            reason = error.message if isinstance(error, CheckpointError) else other_type
            findings.append(fault("config_unreadable", file, printable(reason, 200)))
    return findings


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has its own tokenizer."""
    return any((folder / name).is_file() for name in (shards.TOKENIZER, shards.TOKENIZER_SETTINGS))


def same_bytes(folder: Path, source: Path) -> bool:
    """Return whether tokenizer, template and generation settings are the source's byte for byte."""
    return all(_digest(folder / name) == _digest(source / name) for name in shards.PROMPT_FILES)


def model_files(folder: Path) -> ModelFiles:
    """Return the hashes of a folder's files, and that of the whole model."""
    template = templates(folder)
    return ModelFiles(
        sha256=shards.model_sha256(folder),
        tokenizer=_digest(folder / shards.TOKENIZER),
        chat_template=sha256_text("\0".join(f"{k}\0{template[k]}" for k in sorted(template)))
        if template
        else "",
        generation_config=_digest(folder / shards.GENERATION),
    )


def _digest(path: Path) -> str:
    return sha256_file(path) if path.is_file() else ""


# ---- the tokenizer


def _tokenizer(read_json: shards.JsonReader, folder: Path, source: Path) -> Iterator[Finding]:
    own = read_json(folder / shards.TOKENIZER)
    expected = read_json(source / shards.TOKENIZER)
    if own is None or expected is None:
        return
    flags = added_tokens(own)
    known = added_tokens(expected)
    problems = [
        _difference("ids of tokens", vocabulary(own), vocabulary(expected)),
        _difference("merges", merges(own), merges(expected)),
        _difference(
            "flags of added tokens",
            flags,
            {token: known.get(token, flags[token]) for token in flags},
        ),
    ]
    problems += [
        f"its {step} is not the source's"
        for step in TOKENIZER_STEPS
        if _stated(own.get(step)) != _stated(expected.get(step))
    ]
    yield from (
        fault("tokenizer_differs", shards.TOKENIZER, problem) for problem in problems if problem
    )


def vocabulary(tokenizer: JsonObject) -> dict[str, int]:
    """Return token → id of a tokenizer.json, added tokens included."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    pairs = (
        vocab.items() if isinstance(vocab, dict) else ((row[0], i) for i, row in enumerate(vocab))
    )
    return {
        **dict(pairs),
        **{token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()},
    }


def merges(tokenizer: JsonObject) -> dict[str, tuple[str, ...]]:
    """Return the merges by their number; older files have "a b" instead of a pair."""
    rows = (tokenizer.get("model") or {}).get("merges") or ()
    pairs = [row.split(" ") if isinstance(row, str) else row for row in rows]
    return {str(number): tuple(pair) for number, pair in enumerate(pairs, 1)}


def added_tokens(tokenizer: JsonObject) -> dict[str, set[str]]:
    """Return added token → the flags that it has."""
    flags = {}
    for token in tokenizer.get("added_tokens") or ():
        flags[token["content"]] = {flag for flag in FLAGS if token.get(flag)}
    return flags


def _difference(what: str, own: Mapping[str, object], expected: Mapping[str, object]) -> str:
    """Return how many entries are not the source's, and the first of them; "" where all are."""
    other = [key for key in {**expected, **own} if own.get(key) != expected.get(key)]
    if not other:
        return ""
    values = [_text(mapping.get(other[0], "none")) for mapping in (own, expected)]
    return f"{len(other)} {what} differ ({printable(repr(other[0]), 40)}: {values[0]}, in the source {values[1]})"


def _stated(value: object) -> object:
    """Return a value without null and false fields.

    Some versions of the tokenizers library leave them out.
    """
    if isinstance(value, dict):
        return {k: _stated(v) for k, v in value.items() if v not in (None, False)}
    return [_stated(v) for v in value] if isinstance(value, list) else value


# ---- the chat template


def templates(folder: Path) -> dict[str, str]:
    """Return name → source of a folder's chat templates, as transformers reads them: files first.

    "default" is the usual one.
    """
    path = folder / shards.TEMPLATE
    if path.is_file():
        if shards.inside(folder, path).stat().st_size > MAX_TEMPLATE_BYTES:
            raise ShardError(
                "config_unreadable", f"{shards.TEMPLATE}: more than {MAX_TEMPLATE_BYTES} bytes"
            )
        sources = {"default": path.read_text(encoding="utf-8", errors="replace")}
        for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[other.stem] = other.read_text(encoding="utf-8", errors="replace")
        return sources
    settings = shards.read_object(folder / shards.TOKENIZER_SETTINGS) or {}
    value = (shards.read_object(folder / "chat_template.json") or settings).get("chat_template")
    if isinstance(value, list):
        return {row["name"]: row["template"] for row in value}
    return {"default": value} if isinstance(value, str) else {}


class FolderTokenizer:
    """The part of a tokenizer that ChatTemplate needs.

    The sources of its templates, and the special tokens they may name.
    """

    def __init__(self, folder: Path) -> None:
        self.sources = templates(folder)
        settings = shards.read_object(folder / shards.TOKENIZER_SETTINGS) or {}
        self.special_tokens_map = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            text = token_text(settings, name)
            if isinstance(text, str):
                self.special_tokens_map[name] = text

    def get_chat_template(self, name: None, tools: object) -> str:
        source = self.sources.get("tool_use") if tools else None
        source = source or self.sources.get("default")
        if source is None:
            raise ValueError("no chat template")
        return source


def _template(folder: Path, source: Path) -> Iterator[Finding]:
    own = FolderTokenizer(folder)
    expected = FolderTokenizer(source)
    if not expected.sources or own.sources == expected.sources:
        return
    if not own.sources:
        yield fault(
            "template_differs", shards.TEMPLATE, "there is no chat template, and the source has one"
        )
        return
    pair = ChatTemplate(own, str(folder)), ChatTemplate(expected, str(source))
    other = []
    for name, (messages, tools, variables) in CONVERSATIONS.items():
        texts = [_rendered(template, messages, tools, variables) for template in pair]
        if texts[0] != texts[1]:
            other.append(name)
    if other:
        ignores = [_rendered(t, [USER], [TOOL], {}) == _rendered(t, [USER], None, {}) for t in pair]
        lost = "it leaves out the tools; " if ignores == [True, False] else ""
        problem = f"{lost}not rendered as by the source's template: {', '.join(other)}"
        yield fault("template_differs", shards.TEMPLATE, problem)


def _rendered(
    template: ChatTemplate,
    messages: list[JsonObject],
    tools: list[JsonObject] | None,
    variables: JsonObject,
) -> str | None:
    """Return the text, or None where the template refuses the conversation."""
    try:
        return template.render(messages, tools, True, **variables)
    except CheckpointError:
        return None


# ---- end tokens and sampling


def _generation(folder: Path, source: Path) -> Iterator[Finding]:
    own, expected = (_settings(path) for path in (folder, source))
    for name, value in expected.items():
        problem = f"{name} is {_text(own[name])}, in the source {_text(value)}"
        if name in SAMPLING and own[name] != value:
            yield fault("sampling_differs", shards.GENERATION, problem)
        elif name not in SAMPLING and value and own[name] and own[name] != value:
            file = shards.TOKENIZER_SETTINGS if name.endswith("_token") else shards.GENERATION
            yield fault("end_tokens_differ", file, problem)


def _settings(folder: Path) -> JsonObject:
    """Return what begins and ends answers, as ids and texts, and the sampling.

    The ids are those of generation_config.json, else of config.json.
    """
    inner = shards.text_settings(shards.read_object(folder / "config.json") or {})
    generation = shards.read_object(folder / shards.GENERATION) or {}
    tokenizer = shards.read_object(folder / shards.TOKENIZER_SETTINGS) or {}
    values: JsonObject = {}
    for name in ("eos_token_id", "bos_token_id"):
        ids = generation.get(name)
        if ids is None:
            ids = inner.get(name)
        if ids is None:
            ids = []
        values[name] = sorted(ids) if isinstance(ids, list) else [ids]
    for name in ("eos_token", "bos_token"):
        values[name] = token_text(tokenizer, name)
    for name, usual in SAMPLING.items():
        value = generation.get(name)
        values[name] = usual if value is None else value
    return values


def token_text(settings: JsonObject, name: str) -> object:
    """Return the text of a special token in tokenizer_config.json."""
    token = settings.get(name)
    return token.get("content") if isinstance(token, dict) else token


def _text(value: object) -> str:
    return printable(", ".join(map(str, value)) if isinstance(value, list) else str(value), 60)
