"""Compare the files that make prompts and end answers with the source's, for an audit.

These are tokenizer.json, the chat template and generation_config.json. Weights show no fault in them: with exchanged ids in the
vocabulary, a template without tools or another end token, a server answers other prompts than the source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from annie_quant.checkpoint.chat_template import ChatTemplate
from annie_quant.checkpoint.checks import fault
from annie_quant.checkpoint.shards import (
    GENERATION,
    PROMPT_FILES,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_SETTINGS,
    ShardError,
    inside,
    read_object,
    text_settings,
)
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import sha256_file, sha256_text
from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import Finding, ModelFiles

MAX_TEMPLATE_BYTES = 4_000_000
# Settings of generation_config.json by which servers sample, with transformers' value where the file has none.
SAMPLING: JsonObject = {
    "do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "min_p": 0.0, "typical_p": 1.0,
    "repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1,
}  # fmt: skip
FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")  # of an added token
STEPS = ("normalizer", "pre_tokenizer", "decoder")  # from text to pieces, and back
TOOL: JsonObject = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
SYSTEM: JsonObject = {"role": "system", "content": "You are brief."}
USER: JsonObject = {"role": "user", "content": "Is it raining in Rome?"}
CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Rome"}}}
ANSWERS: list[JsonObject] = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "get_weather", "content": "Rain."},
    {"role": "assistant", "content": "It is."},
    {"role": "user", "content": "And tomorrow?"},
]
# What a template must render like the source's: messages, tools, other variables.
CONVERSATIONS: dict[str, tuple[list[JsonObject], list[JsonObject] | None, JsonObject]] = {
    "a question": ([USER], None, {}),
    "a system prompt": ([SYSTEM, USER], None, {}),
    "an earlier answer": ([USER, ANSWERS[2], ANSWERS[3]], None, {}),
    "tools": ([USER], [TOOL], {}),
    "a call and its result": ([USER, *ANSWERS], [TOOL], {}),
    "thinking off": ([USER], None, {"enable_thinking": False}),
    "thinking on": ([USER], None, {"enable_thinking": True}),
}


def differences(folder: Path, source: Path) -> list[Finding]:
    """Return how the files that make prompts differ in content from the source's; nothing where the folder has no tokenizer.

    A folder without a tokenizer is served with another folder's files; a server refuses it alone.
    """
    if not has_tokenizer(folder):
        return []
    findings: list[Finding] = []
    for file, compare in ((TOKENIZER, _tokenizer), (TEMPLATE, _template), (GENERATION, _generation)):
        try:
            findings += compare(folder, source)
        except (CheckpointError, AttributeError, TypeError, ValueError, RecursionError) as error:
            other_type = f"fields of another type ({type(error).__name__})"
            reason = error.message if isinstance(error, CheckpointError) else other_type
            findings.append(fault("config_unreadable", file, printable(reason, 200)))
    return findings


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has its own tokenizer."""
    return any((folder / name).is_file() for name in (TOKENIZER, TOKENIZER_SETTINGS))


def same_bytes(folder: Path, source: Path) -> bool:
    """Return whether tokenizer, template and generation settings are the source's byte for byte."""
    return all(_digest(folder / name) == _digest(source / name) for name in PROMPT_FILES)


def model_files(folder: Path, sha256: str) -> ModelFiles:
    """Return the hashes of a folder's files. sha256: of the whole model."""
    template = templates(folder)
    return ModelFiles(
        sha256=sha256,
        tokenizer=_digest(folder / TOKENIZER),
        chat_template=sha256_text("\0".join(f"{k}\0{template[k]}" for k in sorted(template))) if template else "",
        generation_config=_digest(folder / GENERATION),
    )


def _digest(path: Path) -> str:
    return sha256_file(path) if path.is_file() else ""


# ---- the tokenizer


def _tokenizer(folder: Path, source: Path) -> Iterator[Finding]:
    own, expected = read_object(folder / TOKENIZER), read_object(source / TOKENIZER)
    if own is None or expected is None:
        return
    problems = [
        _other_ids(vocabulary(own), vocabulary(expected)),
        _other_merges(merges(own), merges(expected)),
        _other_flags(added_tokens(own), added_tokens(expected)),
    ]
    problems += [
        f"its {step} is not the source's" for step in STEPS if _stated(own.get(step)) != _stated(expected.get(step))
    ]
    yield from (fault("tokenizer_differs", TOKENIZER, problem) for problem in problems if problem)


def vocabulary(tokenizer: JsonObject) -> dict[str, int]:
    """Return token → id of a tokenizer.json, added tokens included."""
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    pairs = vocab.items() if isinstance(vocab, dict) else ((row[0], i) for i, row in enumerate(vocab))
    return {**dict(pairs), **{token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}}


def merges(tokenizer: JsonObject) -> list[tuple[str, ...]]:
    """Return the merges in order; older files have "a b" instead of a pair."""
    rows = (tokenizer.get("model") or {}).get("merges") or ()
    return [tuple(row.split(" ")) if isinstance(row, str) else tuple(row) for row in rows]


def added_tokens(tokenizer: JsonObject) -> dict[str, list[bool]]:
    return {t["content"]: [bool(t.get(flag)) for flag in FLAGS] for t in tokenizer.get("added_tokens") or ()}


def _other_ids(own: Mapping[str, int], expected: Mapping[str, int]) -> str:
    groups = {
        "tokens with another id": [token for token in expected if own.get(token, expected[token]) != expected[token]],
        "tokens of the source that are missing": [token for token in expected if token not in own],
        "tokens that the source does not have": [token for token in own if token not in expected],
    }
    problems = []
    for kind, tokens in groups.items():
        if tokens:
            first = tokens[0]
            ids = f": {own[first]}, in the source {expected[first]}" if first in own and first in expected else ""
            problems.append(f"{kind}: {len(tokens)} ({_shown(first)}{ids})")
    return "; ".join(problems)


def _other_merges(own: list[tuple[str, ...]], expected: list[tuple[str, ...]]) -> str:
    if own == expected:
        return ""
    pairs = enumerate(zip(own, expected, strict=False))
    first = next((i for i, (a, b) in pairs if a != b), min(len(own), len(expected)))
    return f"{len(own)} merges, in the source {len(expected)}; number {first + 1} is the first that differs"


def _other_flags(own: Mapping[str, list[bool]], expected: Mapping[str, list[bool]]) -> str:
    other = [token for token in expected if token in own and own[token] != expected[token]]
    return f"added tokens with other flags, such as special: {len(other)} ({_shown(other[0])})" if other else ""


def _stated(value: object) -> object:
    """Return a value without null and false fields, which some versions of the tokenizers library leave out."""
    if isinstance(value, dict):
        return {k: _stated(v) for k, v in value.items() if v not in (None, False)}
    return [_stated(v) for v in value] if isinstance(value, list) else value


def _shown(token: str) -> str:
    return repr(printable(token, 40))


# ---- the chat template


def templates(folder: Path) -> dict[str, str]:
    """Return name → source of a folder's chat templates, as transformers reads them: files first; "default" is the usual one."""
    path = folder / TEMPLATE
    if path.is_file():
        if inside(folder, path).stat().st_size > MAX_TEMPLATE_BYTES:
            raise ShardError("config_unreadable", f"{TEMPLATE}: more than {MAX_TEMPLATE_BYTES} bytes")
        sources = {"default": path.read_text(encoding="utf-8", errors="replace")}
        for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            sources[other.stem] = other.read_text(encoding="utf-8", errors="replace")
        return sources
    value = (read_object(folder / "chat_template.json") or read_object(folder / TOKENIZER_SETTINGS) or {}).get(
        "chat_template"
    )
    if isinstance(value, list):
        return {row["name"]: row["template"] for row in value}
    return {"default": value} if isinstance(value, str) else {}


class _Tokenizer:
    """The part of a tokenizer that ChatTemplate needs: the sources of its templates, and the special tokens they may name."""

    def __init__(self, folder: Path) -> None:
        self.sources = templates(folder)
        settings = read_object(folder / TOKENIZER_SETTINGS) or {}
        tokens = {name: settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
        self.special_tokens_map = {name: text for name, text in texts.items() if isinstance(text, str)}

    def get_chat_template(self, name: None, tools: object) -> str:
        source = self.sources.get("tool_use") if tools else None
        source = source or self.sources.get("default")
        if source is None:
            raise ValueError("no chat template")
        return source


def _template(folder: Path, source: Path) -> Iterator[Finding]:
    own, expected = _Tokenizer(folder), _Tokenizer(source)
    if not expected.sources or own.sources == expected.sources:
        return
    if not own.sources:
        yield fault("template_differs", TEMPLATE, "there is no chat template, and the source has one")
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
        yield fault("template_differs", TEMPLATE, problem)


def _rendered(
    template: ChatTemplate, messages: list[JsonObject], tools: list[JsonObject] | None, variables: JsonObject
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
            yield fault("sampling_differs", GENERATION, problem)
        elif name not in SAMPLING and value and own[name] and own[name] != value:
            yield fault("end_tokens_differ", TOKENIZER_SETTINGS if name.endswith("_token") else GENERATION, problem)


def _settings(folder: Path) -> JsonObject:
    """Return the ids that begin and end answers (of generation_config.json, else config.json), their texts, and the sampling."""
    inner = text_settings(read_object(folder / "config.json") or {})
    generation = read_object(folder / GENERATION) or {}
    tokenizer = read_object(folder / TOKENIZER_SETTINGS) or {}
    values: JsonObject = {}
    for name in ("eos_token_id", "bos_token_id"):
        ids = generation.get(name) if generation.get(name) is not None else inner.get(name)
        values[name] = sorted(ids) if isinstance(ids, list) else [] if ids is None else [ids]
    for name in ("eos_token", "bos_token"):
        token = tokenizer.get(name)
        values[name] = token.get("content") if isinstance(token, dict) else token
    for name, usual in SAMPLING.items():
        value = generation.get(name)
        values[name] = usual if value is None else value
    return values


def _text(value: object) -> str:
    return printable(", ".join(map(str, value)) if isinstance(value, list) else str(value), 60)
