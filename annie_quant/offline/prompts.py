"""Prompts and scored answers as tokens, from workload cases and conversations.

Prompts are rendered by the reference's own chat template, always with `enable_thinking`, as the benchmark sends them.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from annie_quant.checkpoint.chat_template import (
    ChatTemplate,
    ConversationRefused,
    loading_tokenizer,
)
from annie_quant.core.errors import UsageError
from annie_quant.core.files import read_whole_json
from annie_quant.core.untrusted import JsonObject, integer
from annie_quant.data.logs import Problems
from annie_quant.data.rows import place_of
from annie_quant.documents import ChatMessage
from annie_quant.judge import Answer, Case, Workload, parse_raw
from annie_quant.judge.answers import assistant_message
from annie_quant.models.call_forms import PYTHON_TAG, CallForm
from annie_quant.models.server_parsers import form_of, thinks
from annie_quant.offline.caches import common_prefix

if TYPE_CHECKING:
    from annie_quant.offline.decoding import Completion

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_XML = re.compile(
    r"<function=(?P<name>[^>\n]+)|<parameter=(?P<key>.)[^>\n]*>\n?(?P<value>.)|</function>",
    re.DOTALL,
)
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)', re.DOTALL)  # its end may be missing: the answer was cut
_SPACE = re.compile(r"\s*")
_THOUGHTS = re.compile(r".*</think>\s*", re.DOTALL)
_DECODER = json.JSONDecoder()
_ARGUMENTS = ("arguments", "parameters")
MAX_REFUSED_SHARE = 0.5  # of gate prompts, by the chat template


def deciding_characters(text: str, form: CallForm) -> set[int]:
    """Return the positions of an answer's characters that decide: where another token makes another call, or none.

    These are the first character of the answer (a call or not), the opening of every tool call, the whole name of its function, the
    first character of each argument's name and value (for a string also the first one inside its quotes), and the ends of arguments
    and of a call. A call that is cut or malformed has the points before its fault.

    form: of the tool calls.
    """
    answer = match.end() if (match := _THOUGHTS.match(text)) else 0
    points = {0, answer}
    if form == "llama_json":
        points.update(_llama_calls(text, answer))
        return points
    for call in _CALL.finditer(text, answer):
        body, end = call.span(1)
        points.update((call.start(), end))
        points.update(_xml_call(text, body, end) if form == "qwen_xml" else _json_call(text, body))
    return points


def covers(points: Iterable[int], pieces: Sequence[str], start: int = 0) -> list[bool]:
    """Return for each piece of a text whether it has one of the points. start: the position of the first piece."""
    inside = set(points)
    result = []
    for piece in pieces:
        result.append(any(at in inside for at in range(start, start + len(piece))))
        start += len(piece)
    return result


def _xml_call(text: str, start: int, end: int) -> Iterator[int]:
    for match in _XML.finditer(text, start, end):
        if match["name"]:
            yield from range(*match.span("name"))
        elif match["key"]:
            yield from (match.start("key"), match.start("value"))
        else:
            yield match.start()


def _llama_calls(text: str, start: int) -> Iterator[int]:
    """Yield the points of calls that are the whole answer, several separated by ";"."""
    at = _space(text, start)
    if text.startswith(PYTHON_TAG, at):
        at = _space(text, at + len(PYTHON_TAG))
    while text.startswith("{", at):
        points = list(_json_call(text, at))
        yield from (at, *points)
        try:
            at = _space(text, _DECODER.raw_decode(text, at)[1])
        except (ValueError, RecursionError):
            return
        if text.startswith(";", at):
            at = _space(text, at + 1)


def _json_call(text: str, start: int) -> Iterator[int]:
    """Yield the points of {"name": NAME, "arguments": {...}}, whose brace follows at `start` or after white space."""
    for key, _, value in _members(text, _space(text, start)):
        if key == "name":
            function = _STRING.match(text, value)
            yield from range(*function.span(1)) if function else ()
        elif key in _ARGUMENTS:
            for name, at, argument in _members(text, value):
                if name is None:
                    yield at
                    break
                yield from (at + 1, argument)
                if text.startswith('"', argument):
                    yield argument + 1


def _members(text: str, at: int) -> Iterator[tuple[str | None, int, int]]:
    """Yield each member of a JSON object: its key, where that begins, and where its value begins.

    At last None and the closing brace's place twice. Malformed JSON ends it before.
    """
    if not text.startswith("{", at):
        return
    at = _space(text, at + 1)
    try:
        while text.startswith('"', at):
            key, end = _DECODER.raw_decode(text, at)
            value = _space(text, end)
            if not text.startswith(":", value):
                return
            value = _space(text, value + 1)
            if value >= len(text):
                return
            yield key, at, value
            at = _space(text, _DECODER.raw_decode(text, value)[1])
            if text.startswith(",", at):
                at = _space(text, at + 1)
    except (ValueError, RecursionError):
        return
    if text.startswith("}", at):
        yield None, at, at


def _space(text: str, at: int) -> int:
    """Return the position of the first character from `at` on that is not white space."""
    match = _SPACE.match(text, at)
    return match.end() if match else at


CLASSES = ("content", "tool_markup", "thinking", "end_of_turn")
_SPANS = re.compile(
    r"(?P<tool_markup><tool_call>.*?(?:</tool_call>|$))|(?P<thinking><think>.*?(?:</think>|$))",
    re.DOTALL,
)


@dataclass(frozen=True)
class OfflineRequest:
    """One turn of one case. prompt: its tokens, earlier turns included."""

    workload: Workload
    case: Case
    turn: int
    prompt: tuple[int, ...]

    @property
    def conversation(self) -> tuple[str, str]:
        """Identifies the conversation: equal for all turns of one case."""
        return (self.workload.name, self.case.id)

    @property
    def max_tokens(self) -> int:
        return self.workload.max_tokens_for(self.case)

    @property
    def name(self) -> str:
        return f"{self.workload.name}/{self.case.id}" + (
            f"/{self.turn + 1}" if self.case.turns else ""
        )


class Answered(NamedTuple):
    """A request and a model's greedy answer to it."""

    request: OfflineRequest
    completion: Completion


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer whose tokens (target) are scored after a prompt.

    category: workload, or conversation category.
    target: empty for a prompt that has no answer yet.
    after_result: it follows what a tool returned.
    offered: tools are on offer.
    """

    category: str
    prompt: tuple[int, ...]
    target: tuple[int, ...]
    thinking: bool = False
    after_result: bool = False
    offered: bool = False


def end_tokens(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end an answer: the tokenizer's own, then generation_config.json's, without one config.json's.

    Servers do the same: without a generation config they take the model's. Raises UsageError for none.
    """
    documents = (
        read_whole_json(folder / f"{name}.json") for name in ("generation_config", "config")
    )
    eos = next(
        (
            d["eos_token_id"]
            for d in documents
            if isinstance(d, dict) and d.get("eos_token_id") is not None
        ),
        None,
    )
    named = [tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])]
    tokens = list(dict.fromkeys(e for e in map(integer, named) if e is not None))
    if not tokens:
        raise UsageError(
            f"{folder}: neither the tokenizer nor generation_config.json names an end token"
        )
    return tokens


LONG_PART = 2000  # characters of a text that is tokenized in parts
MAX_PARTS = 4096  # whose tokens stay in memory


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern of the tokens that divide a text before it is tokenized; None where there is none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    dividing = [t.content for t in added if t.special and not (t.lstrip or t.rstrip)]
    by_length = sorted(dividing, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, by_length))})") if by_length else None


class Template:
    """A model folder's tokenizer with its chat template.

    end_tokens: those that end an answer; the first one, the tokenizer's own, ends a turn.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        with loading_tokenizer(Path(folder)):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not self.tokenizer.chat_template:
            raise UsageError(
                f"{folder} has no chat template", f"copy chat_template.jinja into {folder}"
            )
        self.chat_template = ChatTemplate(self.tokenizer, str(folder))
        source = self.chat_template.with_tools()
        self.tool_form = form_of(source)
        self.thinks = thinks(source) or not source
        self.end_tokens = end_tokens(Path(folder), self.tokenizer)
        self.special = special_tokens(self.tokenizer)
        self.splits_are_exact = False  # until a text has the same tokens in parts and whole
        self.tokens_of_part = functools.lru_cache(MAX_PARTS)(self.tokenize)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        thinking: bool,
        generation_prompt: bool = True,
    ) -> str:
        return self.chat_template.render(
            messages, tools, generation_prompt, enable_thinking=thinking
        )

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text. Those of a long part between two special tokens are computed once."""
        if len(text) < LONG_PART:
            return self.tokenize(text)
        parts = self.special.split(text) if self.special else [text]
        if len(parts) == 1:
            return self.tokenize(text)
        tokens = [t for part in parts if part for t in self.tokens_of_part(part)]
        if not self.splits_are_exact:
            whole = self.tokenize(text)
            if tokens != whole:
                self.special = None
            self.splits_are_exact = tokens == whole
            return whole
        return tokens

    def tokenize(self, text: str) -> list[int]:
        # Without `verbose` transformers warns once where a text is longer than model_max_length.
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def why_no_end(self, target: Sequence[int]) -> str:
        """Return why an answer without an end token cannot be located. target: its tokens, as the chat template renders them."""
        if not target:
            return "the chat template renders no text for an assistant's message"
        special = set(self.tokenizer.all_special_ids)
        others = [t for t in target if t in special]
        ends = ", ".join(map(repr, self.tokenizer.convert_ids_to_tokens(self.end_tokens)))
        if others:
            end = self.tokenizer.convert_ids_to_tokens(others[-1])
            return (
                f"the chat template ends an answer with {end!r}, and the end tokens are {ends}: "
                "eos_token_id in generation_config.json lacks it"
            )
        tail = self.tokenizer.decode(target[-8:])
        return (
            f"the chat template writes no end token ({ends}) after an answer: its text ends with {tail!r}; "
            "chat_template.jinja belongs to another tokenizer"
        )

    def request(
        self,
        workload: Workload,
        case: Case,
        turn: int = 0,
        answers: Sequence[Mapping[str, Any]] = (),
    ) -> OfflineRequest:
        """Return the request of a turn. answers: assistant messages of the turns before."""
        text = self.render(
            workload.messages(case, turn, answers), workload.tools_for(case), workload.thinking
        )
        return OfflineRequest(workload, case, turn, tuple(self.ids(text)))

    def text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.tokens, skip_special_tokens=False)

    def answer(self, request: OfflineRequest, completion: Completion) -> Answer:
        """Return the parsed answer, as a server with correct parsers returns it for these tokens."""
        raw = self.text(completion)
        n_tokens = len(completion.tokens) + completion.finished
        tools = request.workload.tools_for(request.case)
        thinking = request.workload.thinking and self.thinks
        parsed = parse_raw(raw, thinking, tools, completion_tokens=n_tokens, form=self.tool_form)
        reason = "tool_calls" if parsed.tool_calls else "stop"
        if not completion.finished:
            reason = "length"
        return msgspec.structs.replace(parsed, finish_reason=reason)

    def calls(self, answer: ScoredAnswer) -> list[str]:
        """Return the names of the functions that an answer calls."""
        raw = self.tokenizer.decode(answer.target, skip_special_tokens=False)
        parsed = parse_raw(raw, answer.thinking, form=self.tool_form)
        return [str(call["name"]) for call in parsed.tool_calls]

    def message(self, request: OfflineRequest, completion: Completion) -> ChatMessage:
        """Return the answer as a message of the conversation."""
        answer = self.answer(request, completion)
        return assistant_message(answer.text, answer.tool_calls)

    def target(self, completion: Completion) -> list[int]:
        """Return the answer's tokens and, if the model ended the turn itself, the end token of a turn."""
        end = self.end_tokens[:1] if completion.finished else []
        return [*completion.tokens, *end]

    def pieces(self, target: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        if not target:  # the tokenizer would take no tokens for one text
            return []
        return self.tokenizer.batch_decode([[t] for t in target], skip_special_tokens=False)

    def classes(self, target: Sequence[int], thinking: bool) -> list[int]:
        """Return the index in CLASSES of each target token."""
        pieces = self.pieces(target)
        opened = "<think>" if thinking else ""
        text = opened + "".join(pieces)
        kinds = [CLASSES.index("content")] * (len(text) + 1)  # the last one: of an empty piece
        for match in _SPANS.finditer(text):
            kind = CLASSES.index(str(match.lastgroup))
            kinds[match.start() : match.end()] = [kind] * len(match[0])
        if text:
            kinds[-1] = kinds[-2]
        classes: list[int] = []
        at = len(opened)
        for token, piece in zip(target, pieces, strict=True):
            ends_turn = token in self.end_tokens
            classes.append(CLASSES.index("end_of_turn") if ends_turn else kinds[at])
            at += len(piece)
        return classes

    def decisions(self, target: Sequence[int], thinking: bool) -> list[bool]:
        """Return for each target token whether it decides; the first and those that end a turn do."""
        pieces = self.pieces(target)
        opened = "<think>" if thinking else ""
        points = deciding_characters(opened + "".join(pieces), self.tool_form) | {len(opened)}
        covered = covers(points, pieces, len(opened))
        return [c or t in self.end_tokens for c, t in zip(covered, target, strict=True)]


NO_ASSISTANT_MESSAGE = "it has no assistant message"


class AnswerNotLocated(ValueError):
    """A conversation of which no answer can be located in the chat template's text. The message is the reason."""


def conversation_answers(
    template: Template, rows: Iterable[JsonObject], left_out: Problems | None = None
) -> list[ScoredAnswer]:
    """Return every assistant message of every conversation with its prompt.

    left_out: counts the rows without one that is located.
    """
    answers = []
    for row in rows:
        try:
            answers += answers_of_row(template, row)
        except AnswerNotLocated as error:
            if left_out is not None:
                left_out.add(str(error), place_of(row))
    return answers


def rendered_workloads(
    template: Template, workloads: Iterable[Workload]
) -> tuple[list[Workload], list[str]]:
    """Return the workloads without the prompts that the chat template refuses, and one line per reason.

    Raises UsageError where it refuses more than MAX_REFUSED_SHARE of them.
    """
    left_out = Problems()
    kept = []
    total = 0
    for workload in workloads:
        cases = []
        for case in workload.cases:
            total += 1
            try:
                messages = workload.messages(case, 0, ())
                template.render(messages, workload.tools_for(case), workload.thinking)
            except ConversationRefused as error:
                reason = f"the chat template refuses it: {error.reason}"
                left_out.add(reason, f"{workload.name}, {case.id}", unit="prompts")
            else:
                cases.append(case)
        if cases:
            is_whole = len(cases) == len(workload.cases)
            kept.append(workload if is_whole else replace(workload, cases=tuple(cases)))
    lines = list(left_out.lines())
    if sum(left_out.counts.values()) > MAX_REFUSED_SHARE * total:
        raise UsageError(
            f"only {total - sum(left_out.counts.values())} of {total} prompts can be rendered: {'; '.join(lines)}",
            "choose workloads for this model's chat template",
        )
    return kept, lines


def answers_of_row(
    template: Template, row: JsonObject, with_open: bool = False
) -> list[ScoredAnswer]:
    """Return every assistant message of a conversation with its prompt.

    with_open: also a last message that has no answer yet.
    Raises AnswerNotLocated where there is none, and where the chat template refuses the conversation.
    """
    try:
        return _answers_of_row(template, row, with_open)
    except ConversationRefused as error:
        raise AnswerNotLocated(f"the chat template refuses it: {error.reason}") from None


def _answers_of_row(template: Template, row: JsonObject, with_open: bool) -> list[ScoredAnswer]:
    messages = row["messages"]
    tools = row.get("tools")
    thinking = bool(row.get("thinking")) and template.thinks
    answers = []
    reason = NO_ASSISTANT_MESSAGE

    def add(n: int, prompt: str, target: tuple[int, ...]) -> None:
        answers.append(
            ScoredAnswer(
                category=row.get("category", ""),
                prompt=tuple(template.ids(prompt)),
                target=target,
                thinking=thinking,
                after_result=n > 0 and messages[n - 1]["role"] == "tool",
                offered=bool(tools),
            )
        )

    for n, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = template.render(messages[:n], tools, thinking)
        whole = template.render(messages[: n + 1], tools, thinking, generation_prompt=False)
        if not whole.startswith(prompt):
            whole = prompt + whole[common_prefix(prompt, whole) :]
        target = template.ids(whole[len(prompt) :])
        ends = [i for i, t in enumerate(target) if t in template.end_tokens]
        if not ends:
            reason = template.why_no_end(target)
            continue
        # The template's newline after the end token is not part of the answer.
        add(n, prompt, tuple(target[: ends[0] + 1]))
    if with_open and messages[-1]["role"] != "assistant":
        add(len(messages), template.render(messages, tools, thinking), ())
    if not answers:
        raise AnswerNotLocated(reason)
    return answers
