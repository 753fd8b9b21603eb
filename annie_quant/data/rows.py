"""Rows of conversations: read them from JSON lines or datasets, find near-duplicates, and check a set.

check_apart          no user text of one set is in another: train, calibration and gate prompts never overlap
check_prompt_hash    the rows have the system prompt that is served now
faults, validate     the rules for a row and for a set (requirements R1 and R2)

A row is a JSON object. `annie-quant data`, `data --check`, `init`, `quantize` and `search` use the
same rules:

    messages    list of {"role": "system" | "user" | "assistant" | "tool", "content": text}; required; the last is the
                assistant's. An assistant message may have tool_calls: [{"function": {"name",
                "arguments"}}] and then no content. Arguments are an object, or the same as a JSON
                string, and fit the tool's JSON schema.
    tools       the OpenAI function tools that are offered in this row; without it, the persona's.
    category    optional; one of the persona's categories, which fixes the number of user turns and the tool to be called.
    thinking    optional: whether the answer was written with thinking on. default: false
    id          optional. Other fields are ignored.

At least four fifths of a teacher's set are valid, and enough of them call a tool. No two rows of a
category have nearly the same user text.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import logging
import math
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from annie_quant import judge
from annie_quant.core.errors import UsageError
from annie_quant.core.files import exists, is_folder, sha256_text
from annie_quant.core.json_schema import mismatch
from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.data.prompt_rules import rules_of
from annie_quant.documents.persona import Persona, Tool, built_in, load_persona
from annie_quant.judge.checks.text import leaked, markdown_in

_log = logging.getLogger(__name__)

THRESHOLD = 0.85
CONTRACTIONS = {
    "'s": " is",
    "'m": " am",
    "'re": " are",
    "n't": " not",
    "'ll": " will",
    "'ve": " have",
    "'d": " would",
}
_CONTRACTION = re.compile(r"(?:'s|'m|'re|n't|'ll|'ve|'d)\b")
TextFeature = str | tuple[str, str]
Row = Mapping[str, Any]  # a conversation as its file has it; `faults` checks it
Rows = str | os.PathLike[str] | Sequence[Row]  # a file, or rows in memory


def words(text: str) -> list[str]:
    text = text.lower().replace("’", "'")
    return re.findall(r"\w+", _CONTRACTION.sub(lambda m: CONTRACTIONS[m[0]], text))


def features(text: str) -> frozenset[TextFeature]:
    """Return the set of words and of pairs of neighbouring words."""
    sequence = words(text)
    return frozenset(sequence) | frozenset(itertools.pairwise(sequence))


def user_text(row: Row) -> str:
    """Return all user messages of a conversation as one text."""
    return "\n".join(text_of(m.get("content")) for m in row["messages"] if m["role"] == "user")


def text_of(content: object) -> str:
    """Return the text of a message's content: a string, or OpenAI's list of parts."""
    if isinstance(content, list):
        return "\n".join(str(p.get("text") or "") for p in content if isinstance(p, Mapping))
    return str(content or "")


class DuplicateFinder:
    """Named texts; `find` returns the name of the first one that a new text nearly repeats.

    Two texts are duplicates if the Jaccard index of their features (words and pairs of neighbouring
    words, without case, punctuation and contractions) is at least THRESHOLD. With 0.85, "the
    capital of India" and "the capital of Peru" are two questions, and a long text with one
    additional word is the same text.

    The search is exact and indexed (prefix filtering, Chaudhuri, Ganti and Kaushik, ICDE 2006): two
    sets of sizes a <= b with a Jaccard index of at least t share at least t * b features, so the
    first b - ceil(t * b) + 1 features of both sets, in one fixed order, have one in common.
    """

    def __init__(self, texts: Iterable[tuple[str, str]] = ()) -> None:
        self._texts: list[tuple[str, frozenset[TextFeature]]] = []
        self._exact: dict[frozenset[TextFeature], str] = {}
        self._index: defaultdict[TextFeature, list[int]] = defaultdict(
            list
        )  # feature of a prefix → indices in _texts
        for name, text in texts:
            self.add(name, text)

    def add(self, name: str, text: str) -> None:
        new = features(text)
        if new not in self._exact:
            self._exact[new] = name
            for feature in _prefix(new):
                self._index[feature].append(len(self._texts))
            self._texts.append((name, new))

    def find(self, text: str) -> str | None:
        new = features(text)
        if new in self._exact:
            return self._exact[new]
        least = THRESHOLD * len(new)
        most = len(new) / THRESHOLD
        candidates = {index for feature in _prefix(new) for index in self._index.get(feature, ())}
        for name, other in map(self._texts.__getitem__, sorted(candidates)):
            if least <= len(other) <= most:
                shared = len(new & other)
                if shared >= THRESHOLD * (len(new) + len(other) - shared):
                    return name
        return None


def _prefix(text_features: frozenset[TextFeature]) -> list[TextFeature]:
    """Return the features of which every duplicate of the set has at least one: pairs before words, because they are rarer."""
    # A larger duplicate's own prefix is longer, and shares its first common feature with this set's
    # prefix as well.
    n = len(text_features) - math.ceil(THRESHOLD * len(text_features)) + 1
    return sorted(text_features, key=_order)[:n]


def _order(feature: TextFeature) -> tuple[bool, int, str]:
    """Return the sort key of a feature, the same in every process."""
    joined = feature if isinstance(feature, str) else " ".join(feature)
    return isinstance(feature, str), zlib.crc32(joined.encode()), joined


DATASET_SUFFIXES = (".parquet", ".arrow", ".gz")
LOG_KEYS = {"conversations", "conversation", "prompt", "chosen", "request", "body"}


class _RowFunction(msgspec.Struct):
    """The function of a tool or of a call; `arguments` is JSON text, or its value."""

    name: str | None = None
    arguments: str | JsonObject | None = None
    parameters: JsonObject | None = None


class _RowTool(msgspec.Struct):
    function: _RowFunction


class _RowCall(_RowFunction):
    """A call of a tool, with its fields in `function` or directly."""

    function: _RowFunction | None = None


class _RowMessage(msgspec.Struct):
    role: str
    content: str | list[JsonObject] | None = None
    tool_calls: list[_RowCall] | None = None


class _RowSource(msgspec.Struct):
    persona: str | None = None
    prompt_sha256: str | None = None


class _Row(msgspec.Struct):
    """What is required of a row so that it can be read; `validate` checks the rest."""

    messages: Annotated[list[_RowMessage], msgspec.Meta(min_length=1)]
    tools: list[_RowTool] | None = None
    provenance: _RowSource | None = None
    thinking: bool | None = None
    category: str | int | None = None


def read_rows(rows: Rows) -> list[JsonObject]:
    """Return copies of the rows, or the rows of a file.

    Raises UsageError that names the file and the line.

    A file that has not changed is read once; its rows are shared by all callers, and none of them
    changes a row.
    """
    if not isinstance(rows, (str, os.PathLike)):
        return [dict(row) for row in rows]
    path = Path(rows)
    if is_folder(path):
        return dataset_rows(path)
    hint = f"annie-quant data --persona annie --output {path}"
    try:
        status = path.stat()
        return list(_rows_of_file(path, status.st_mtime_ns, status.st_size))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist", hint) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint) from error


@functools.lru_cache(maxsize=2)
def _rows_of_file(path: Path, modified_ns: int, size_bytes: int) -> Sequence[JsonObject]:
    if path.suffix in DATASET_SUFFIXES:
        return dataset_rows(path)
    content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    if content.lstrip()[:1] == b"[":
        return dataset_rows(path)
    result: list[JsonObject] = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = decode_json(line)
            if not result and _is_of_log(row):
                return dataset_rows(path)
            msgspec.convert(row, _Row)
        except (ValueError, msgspec.ValidationError, RecursionError) as error:
            raise UsageError(
                f"{path}, line {number}: not a conversation: {str(error)[:200]}",
                "each line is a JSON object with messages: [{role, content}, ...]",
            ) from None
        result.append(row)
    return result


def _is_of_log(row: object) -> bool:
    """Return whether a line has a conversation in the form of a log (data/logs.py)."""
    return isinstance(row, dict) and "messages" not in row and bool(LOG_KEYS & row.keys())


def dataset_rows(path: Path) -> list[JsonObject]:
    """Return the rows of a chat dataset in another form: Parquet, Arrow, ShareGPT, a folder (see data/logs.py).

    Raises UsageError where it has no conversation with an answer.
    """
    from annie_quant.data.log_records import row_of
    from annie_quant.data.logs import Problems, read_logs

    problems = Problems()
    rows: list[JsonObject] = [
        {**row_of(c, i)} for i, c in enumerate(read_logs([path], problems)) if c.has_answer
    ]
    if not rows:
        reasons = "; ".join(problems.lines()) or "it is empty"
        raise UsageError(
            f"{path} has no conversation with an answer: {reasons}",
            "annie-quant data --persona annie",
        )
    if problems.counts:
        _log.warning("annie-quant: %s: not used: %s", path, "; ".join(problems.lines()))
    return rows


def read_conversations(conversations: Rows, limit: int | None = None) -> list[JsonObject]:
    """Return the rows of a file, or rows, at most `limit` of them.

    Raises UsageError for a file without rows.

    They are taken evenly over the file, which is sorted by category: the first 100 rows would all
    be greetings.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"{limit} conversations are too few", "choose 1 or more")
    rows = read_rows(conversations)
    if not rows and isinstance(conversations, (str, os.PathLike)):
        raise UsageError(
            f"{conversations} has no conversations",
            f"annie-quant data --persona annie --output {conversations}",
        )
    if limit is None or limit >= len(rows):
        return rows
    return [rows[i * len(rows) // limit] for i in range(limit)]


def gate_texts(persona: Persona | None = None) -> Iterator[tuple[str, str]]:
    """Yield (name, user text) of every prompt that gates are judged with: those of Annie, or of another persona."""
    from annie_quant.data.workloads import stored_workloads

    for workload in stored_workloads(persona) if persona is not None else judge.load_workloads():
        for case in workload.cases:
            users = [text_of(m.get("content")) for m in case.messages if m["role"] == "user"]
            turns = [turn for turn in case.turns if isinstance(turn, str)]
            yield f"{workload.name}/{case.id}", "\n".join(users or turns)


def prompts_of_others(
    others: Iterable[Rows], gates: bool, persona: Persona | None
) -> DuplicateFinder:
    """Return a finder for the prompts of other sets and, if `gates`, of the persona's gates."""
    texts = [
        (f"row {row.get('id')}", user_text(row)) for other in others for row in read_rows(other)
    ]
    return DuplicateFinder([*texts, *(gate_texts(persona) if gates else ())])


def check_apart(
    rows: Rows, *others: Rows, gates: bool = True, persona: Persona | None = None
) -> None:
    """Raise UsageError if `rows` shares a prompt with another set or, if `gates`, with a gate's prompts of the persona."""
    finder = prompts_of_others(others, gates, persona)
    matches = [(row.get("id"), finder.find(user_text(row))) for row in read_rows(rows)]
    duplicates = [(name, match) for name, match in matches if match is not None]
    if duplicates:
        raise UsageError(
            f"{len(duplicates)} conversations overlap with another set: {duplicates[0][0]} is {duplicates[0][1]}",
            "train, calibration and gate prompts must not be shared: remove these rows",
        )


def check_prompt_hash(
    rows: Rows, persona: str | Path | Persona | None = None, allow: bool = False
) -> str | None:
    """Check, before quantizing or evaluating, that conversations have the system prompt that is served now.

    That prompt is that of `persona`, else that of the persona named in the rows' provenance. Rows
    without provenance are compared only with a given persona.

    Returns None where all agree, else a description of the mismatch if `allow` is set. Raises
    UsageError otherwise.
    """
    stale: list[str] = []
    checked = 0
    current = ""
    load = functools.cache(load_persona)
    for row in read_rows(rows):
        provenance = row.get("provenance") or {}
        source: Any = persona if persona is not None else provenance.get("persona")
        if source is None or (
            persona is None and str(source) not in built_in() and not exists(Path(source))
        ):
            continue  # nothing to compare with: no provenance, or that of another folder or machine
        current = (source if isinstance(source, Persona) else load(source)).system_prompt
        first = row["messages"][0]
        prompt = text_of(first.get("content")) if first["role"] == "system" else ""
        checked += 1
        if (
            provenance.get("teacher") == "log"
        ):  # each log has its own prompt; the persona's is in the provenance
            prompt = current if provenance.get("prompt_sha256") == sha256_text(current) else prompt
        if prompt != current or (
            provenance.get("prompt_sha256") or sha256_text(prompt)
        ) != sha256_text(current):
            stale.append(sha256_text(prompt)[:12])
    if not stale:
        return None
    difference = (
        f"the data's system prompt ({stale[0]}, {len(stale)} of {checked} conversations) differs from production's "
        f"({sha256_text(current)[:12]}): a stale prompt in the data spoils calibration and training"
    )
    if not allow:
        raise UsageError(
            difference, "make the data again (annie-quant data), or add --allow-prompt-mismatch"
        )
    return difference


# ---- the rules: the form of a row, and a persona's own

MIN_VALID = 400 / 500
MIN_TOOLS = 80 / 200  # of the conversations that should call one
# In characters. A spoken answer is short; a whole conversation stays below 2,048 tokens at 4
# characters per token.
MAX_USER = 1000
MAX_ANSWER = 800
MAX_TOTAL = 8000
ROW_ROLES = {"system", "user", "assistant", "tool"}


class ValidatedRows(msgspec.Struct):
    """The check of a set.

    with_tools: number of valid rows that call a tool.
    faults: number of rows per fault.
    ok: whether enough rows are valid and enough of them call a tool.
    """

    total: int
    valid: int
    with_tools: int
    by_category: dict[str, int]
    faults: dict[str, int]
    ok: bool


def faults(row: Row, persona: Persona | None = None) -> list[str]:
    """Return a description of each rule that a conversation breaks. persona: default: annie."""
    persona = persona or load_persona("annie")
    result = form_faults(row, persona.tools)
    if result and (
        not isinstance(row.get("messages"), list)
        or "unknown role" in result[0]
        or not row["messages"]
    ):
        return result
    messages = row["messages"]
    teacher = teacher_of(row)
    # the limits of length are for what a teacher wrote
    limited = teacher not in (None, "log", "model")
    other_prompt = (
        messages[0]["role"] == "system" and messages[0].get("content") != persona.system_prompt
    )
    if teacher != "log" and other_prompt:
        result.append("the system prompt is not the persona's")
    for message in messages:
        if message["role"] == "assistant":
            result += _style_faults(text_of(message.get("content")), persona, limited)
    if limited and any(
        m["role"] == "user" and len(text_of(m.get("content"))) > MAX_USER for m in messages
    ):
        result.append(f"a user message is longer than {MAX_USER} characters")
    if limited and sum(len(text_of(m.get("content"))) for m in messages) > MAX_TOTAL:
        result.append(f"longer than {MAX_TOTAL} characters")
    return result + (
        [] if row.get("category") is None or teacher == "log" else _category_faults(row, persona)
    )


def teacher_of(row: Row) -> str | None:
    """Return who wrote a row: a teacher's name, "log" for production (annie-quant init), None where it is not known."""
    provenance = row.get("provenance")
    return (
        str(provenance["teacher"])
        if isinstance(provenance, Mapping) and provenance.get("teacher")
        else None
    )


def form_faults(row: Row, tools: Sequence[Tool] | None = ()) -> list[str]:
    """Return a description of each rule of the form that a row breaks; a row without faults can be rendered and scored.

    tools: on offer where the row names none. None: not known; calls of rows without tools are then
        not checked.
    """
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        return ["no messages"]
    offered: Any = tools if row.get("tools") is None else row["tools"]
    result = [] if offered is None else _tools_faults(offered)
    schemas = (
        None
        if offered is None or result
        else {t["function"]["name"]: t["function"] for t in offered}
    )
    for index, message in enumerate(messages):
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ROW_ROLES:
            return [f"message {index}: unknown role {role!r}"]
        if role == "assistant":
            if not text_of(message.get("content")).strip() and not message.get("tool_calls"):
                result.append("an answer is empty")
            for call in message.get("tool_calls") or ():
                result += _call_faults(call, schemas)
        elif role != "tool" and not text_of(message.get("content")).strip():
            result.append(f"a {role} message is empty")
    if messages[-1]["role"] != "assistant":
        result.append("the last message is not the assistant's")
    return result


def _tools_faults(tools: object) -> list[str]:
    try:
        valid = all(tool.function.name for tool in msgspec.convert(tools, list[_RowTool]))
    except msgspec.ValidationError:
        valid = False
    return (
        [] if valid else ['tools are not a list of {"type": "function", "function": {"name": ...}}']
    )


def _category_faults(row: Row, persona: Persona) -> list[str]:
    category = persona.category(str(row.get("category")))
    if category is None:
        return [f"{persona.name} has no category {row.get('category')!r}"]
    result = []
    turns = sum(m["role"] == "user" for m in row["messages"])
    confirmed = category.tool in rules_of(persona).confirmed
    if turns not in (category.turns, category.turns + confirmed):
        result.append(f"{turns} user turns, expected {category.turns}")
    calls = [call for m in row["messages"] for call in m.get("tool_calls") or ()]
    called = [call["function"].get("name") for call in calls if call.get("function")]
    if category.tool and category.tool not in called:
        result.append(f"{category.tool} is not called")
    other = next((name for name in called if name != category.tool), None)
    if other and category.tool is None:
        result.append(f"{other!r} is called, expected no tool call")
    elif other and category.tool in called:
        result.append(f"{other!r} is called in addition to {category.tool}")
    return result


def _style_faults(text: str, persona: Persona, limited: bool) -> list[str]:
    faults = (
        [f"an answer is longer than {MAX_ANSWER} characters"]
        if limited and len(text) > MAX_ANSWER
        else []
    )
    if persona.forbids_markdown and (kind := markdown_in(text)):
        faults.append(f"markdown in an answer: {kind}")
    return [*faults, "thinking in an answer"] if leaked(text) else faults


def _call_faults(call: object, schemas: Mapping[str, Tool] | None) -> list[str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if (
        not isinstance(function, Mapping)
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        return ['a tool call is not {"function": {"name": ..., "arguments": ...}}']
    arguments = function.get("arguments")
    try:
        decoded = decode_json(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        decoded = None
    if not isinstance(decoded, Mapping):
        return ["tool arguments are not a JSON object, or one in a string"]
    if schemas is None:
        return []
    name = function["name"]
    if name not in schemas:
        return [f"{name!r} is called and not offered"]
    misfit = mismatch(dict(decoded), schemas[name].get("parameters") or {})
    return [f"arguments of {name} do not match its schema: {misfit}"] if misfit else []


def validate(
    rows: Iterable[Row], persona: Persona | None = None, requested: int | None = None
) -> ValidatedRows:
    """Check all rows and the set as a whole. Rows without a category are counted under "none".

    requested: number of conversations that were requested, if that is more than there are.
    """
    persona = persona or load_persona("annie")
    total = tools = 0
    by_category = Counter[str]()
    counts = Counter[str]()
    finders: dict[str, DuplicateFinder] = {}
    categorized = False
    for row in rows:
        total += 1
        category = str(row.get("category") or "none")
        categorized |= row.get("category") is not None and teacher_of(row) != "log"
        row_faults = faults(row, persona)
        if not row_faults:
            finder = finders.setdefault(category, DuplicateFinder())
            text = user_text(row)
            if finder.find(text) is not None:
                row_faults = ["nearly the same user text as in another conversation"]
            finder.add(str(row.get("id", total)), text)
        counts.update(row_faults)
        if not row_faults:
            tools += any(m.get("tool_calls") for m in row["messages"])
            by_category[category] += 1
    expected = max(total, requested or 0)
    valid = by_category.total()
    share = (
        sum(c.tool is not None for c in persona.categories) / len(persona.categories)
        if categorized
        else 0.0
    )
    enough = total > 0 and valid >= MIN_VALID * expected and tools >= MIN_TOOLS * expected * share
    return ValidatedRows(total, valid, tools, dict(by_category), dict(counts), bool(enough))


def form_report(rows: Iterable[Row], persona: Persona | None = None) -> str | None:
    """Return one line about the rows whose form is invalid; None where all are valid."""
    found = [form_faults(row, persona.tools if persona else None) for row in rows]
    counts = Counter(row_faults[0] for row_faults in found if row_faults)
    if not counts:
        return None
    most, n = counts.most_common(1)[0]
    return f"{counts.total()} of {len(found)} conversations break a rule of the row form, {n} of them: {most}"


def check_calibration(
    conversations: Path | None, persona: str | None = None, allow: bool = False
) -> list[str]:
    """Return notes about a file of conversations: rows whose form is invalid, and with `allow` a stale system prompt.

    Raises UsageError for a system prompt other than the served one, unless `allow`.
    """
    if conversations is None:
        return []
    rows = read_rows(conversations)
    notes = [check_prompt_hash(rows, persona, allow=allow)]
    invalid = form_report(rows, load_persona(persona) if persona else None)
    if invalid:
        command = f"annie-quant data --check --persona {persona or 'FILE'} --output {conversations}"
        notes.append(f"{invalid} ({command})")
    return [note for note in notes if note]
