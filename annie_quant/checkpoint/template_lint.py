"""Lint of a chat template: render conversations with tools, and read the calls back as a server's parser does.

A fault makes an ordinary conversation with tools wrong without an error, or refuses it: a value, a call, a result
or a message is lost or changed, the tools are not shown, or calls have another form than the parser reads. A limit
is a property of the call form, a message that is refused with an error, or a cost: what a client must know.

Conversations are rendered in one call of the template's process (chat_template.py), with a line of the template
for each piece of their text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from annie_quant.checkpoint import prompt_files, shards
from annie_quant.checkpoint.chat_template import ChatTemplate, Rendered
from annie_quant.checkpoint.template_conversations import (
    ANSWER,
    ARGUMENTS,
    CONTROL_TOKENS,
    DEVELOPER,
    END_TAG,
    LATER_SYSTEM,
    OPENAI_ID,
    QUESTION,
    RESULTS,
    TEXT_WITH_CALL,
    TOOL_NAME,
    TOOLS,
    conversations,
)
from annie_quant.core.errors import AnnieError, CheckpointError
from annie_quant.core.text import printable
from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.documents import TemplateFault, TemplateLint
from annie_quant.models.call_forms import CallForm, CallSpan, read_calls
from annie_quant.models.server_parsers import THINK, ParserRow, row_of

# ---- the lint of a folder


def start_lint(folder: Path) -> Future[TemplateLint | None]:
    """Lint a folder's chat template while the caller does other work; None where it has none."""
    # An own thread per folder: a process that is forked later does not wait for a thread that it lacks.
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="template-lint")
    result = executor.submit(lint_folder, folder)
    executor.shutdown(wait=False)
    return result


def lint_folder(folder: Path) -> TemplateLint | None:
    """Return the lint of a folder's chat template; None where it has none that can be read."""
    try:
        tokenizer = prompt_files.FolderTokenizer(folder)
        source = tokenizer.get_chat_template(None, TOOLS)
    except (AnnieError, ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return None
    if not isinstance(source, str):
        return None
    # The folder may state them in a file that is not read here.
    for name in ("bos_token", "eos_token"):
        tokenizer.special_tokens_map.setdefault(name, "")
    row = row_of(source)
    lint = TemplateLint(row.family, row.form) if row is not None else TemplateLint()
    named = conversations()
    template = ChatTemplate(tokenizer, shards.TEMPLATE)
    try:
        replies = template.render_all(list(named.values()))
        if str(QUESTION["content"]) not in replies[0].text:
            # Templates of vision models want content in parts, and servers send it so.
            replies = template.render_all([_in_parts(fields) for fields in named.values()])
    except CheckpointError as error:
        lint.faults.append(TemplateFault("template_unusable", error.message))
        return lint
    rendered = dict(zip(named, replies, strict=True))
    for level, found in Checker(source, row, rendered, _vocabulary(folder)).run():
        (lint.faults if level == FAULT else lint.limits).append(found)
    return lint


def _in_parts(fields: JsonObject) -> JsonObject:
    """Return the variables of a conversation with each text as a content part."""
    messages = []
    for message in fields["messages"]:
        content = message["content"]
        if isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        messages.append(message)
    return {**fields, "messages": messages}


def _vocabulary(folder: Path) -> bytes:
    """Return the text of tokenizer.json; empty where there is none."""
    path = folder / shards.TOKENIZER
    return path.read_bytes() if path.is_file() else b""


# ---- checks

FAULT = "fault"
LIMIT = "limit"
Found = tuple[str, TemplateFault]
_MARK = re.compile(r"<\|[^<>|\s]{1,40}\|>|<(?:start|end)_of_turn>")
# How a form looks in a system text that shows it.
_SHOWN_FORMS: dict[CallForm, re.Pattern[str]] = {
    "qwen_xml": re.compile(r"<function="),
    "hermes": re.compile(r"<tool_call>\s*\{"),
    "glm_xml": re.compile(r"<arg_key>"),
    "llama_json": re.compile(r'\{"name": [^}]*"parameters": [^"}]'),
}
_TEXT_FORMS = ("qwen_xml", "glm_xml")  # whose values have no quotes
RESULT_PARTS = "a tool's result in content parts"
MAX_REASON = 160  # characters
_MAX_MESSAGE = 400


def _same(value: object, expected: object) -> bool:
    """Compare JSON values with their types: true is not 1, and 2 is not 2.5."""
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            _same(value[key], expected[key]) for key in value
        )
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    return value == expected


def _shortened(value: object) -> str:
    return printable(json.dumps(value, ensure_ascii=False), 60)


def _fault(code: str, message: str, line: int) -> Found:
    return FAULT, TemplateFault(code, printable(message, _MAX_MESSAGE), line or None)


def _limit(code: str, message: str, line: int) -> Found:
    return LIMIT, TemplateFault(code, printable(message, _MAX_MESSAGE), line or None)


def _refused(code: str, what: str, reply: Rendered) -> tuple[str, str, int]:
    """Return code, message and line for a conversation that the template refuses."""
    return code, f"it refuses {what}: {printable(reply.error, MAX_REASON)}", reply.line


class Checker:
    """The checks of one template.

    source: of the template. row: the parsers of its family. rendered: the conversations by their names.
    vocabulary: the text of tokenizer.json.
    """

    def __init__(
        self,
        source: str,
        row: ParserRow | None,
        rendered: Mapping[str, Rendered],
        vocabulary: bytes,
    ) -> None:
        self.source = source
        self.row = row
        self.form: CallForm = row.form if row is not None else ""
        self.rendered = rendered
        self.vocabulary = vocabulary
        start = rendered["start"].text
        self.start = start
        answer = rendered["answer"].text.removeprefix(start)
        head, _, tail = answer.partition(str(ANSWER["content"]))
        self.head = head
        self.tail = tail

    def run(self) -> Iterator[Found]:
        for name in ("start", "answer", "prompt"):
            reply = self.rendered[name]
            if reply.error:
                message = f"it refuses every conversation: {reply.error}"
                yield _fault("template_unusable", message, reply.line)
                return
        yield from self.check_tokens()
        call = self.rendered["call"]
        result = self.rendered["result"]
        tools_shown = TOOL_NAME in self.rendered["prompt"].text
        if not tools_shown:
            text = "it does not show the tools to the model"
            yield _fault("template_tools_ignored", text, self.rendered["start"].line_at(0))
        yield from self.check_messages()
        yield from self.check_thinking()
        yield from self.check_prefixes()
        yield from self.check_control_tokens()
        if tools_shown and call.error:
            yield _fault(*_refused("template_call_refused", "an assistant's tool call", call))
            return
        if result.error:
            what = "a message of the role tool"
            yield _fault(*_refused("template_tool_role", what, result))
        elif tools_shown:
            yield from self.check_results(result)
        if not tools_shown:
            return
        if TOOL_NAME not in self.turn("call"):
            text = "it does not write the tool calls of an assistant's message"
            yield _fault("template_call_lost", text, call.line_at(len(self.start)))
            return
        yield from self.check_form()
        yield from self.check_content()
        if self._read("call"):
            yield from self.check_arguments()
            yield from self.check_several_calls()

    # ---- texts

    def turn(self, name: str) -> str:
        """Return what the assistant writes in a conversation that ends with its message, without the end of turn."""
        return self.rendered[name].text[self._turn_start(name) :].removesuffix(self.tail)

    def _turn_start(self, name: str) -> int:
        """Return where the assistant's text begins, after the head of its turn and empty thinking."""
        text = self.rendered[name].text
        whole_head = self.start + self.head
        if text.startswith(whole_head):
            return len(whole_head)
        at = 0
        for own, other in zip(text, whole_head, strict=False):
            if own != other:
                break
            at += 1
        # Not inside a mark that begins as the head's does.
        return max(text.rfind("\n", 0, at), text.rfind(">", 0, at)) + 1

    def _read(self, name: str, typed: bool = False) -> list[CallSpan]:
        """Return the calls that the family's parser reads. typed: by the tool's schema."""
        is_text = self.form in _TEXT_FORMS and not typed
        return read_calls(self.turn(name), self.form, None if is_text else TOOLS)[0]

    def _line_of(self, name: str, text: str) -> int:
        """Return the line that wrote a text of the assistant's last message."""
        reply = self.rendered[name]
        start = self._turn_start(name)
        return reply.line_at(max(start, reply.text.find(text, start)))

    # ---- what the model is shown

    def check_tokens(self) -> Iterator[Found]:
        """Check that the tokenizer has the marks of turns; others belong to another model's template."""
        answer = self.rendered["answer"]
        marks = dict.fromkeys(_MARK.findall(answer.text))
        missing = [
            mark for mark in marks if self.vocabulary and mark.encode() not in self.vocabulary
        ]
        if missing:
            message = f"it writes {', '.join(missing[:3])}, which the tokenizer does not have: it is another model's template"
            line = answer.line_at(answer.text.find(missing[0]))
            yield _fault("template_tokens_unknown", message, line)

    def check_form(self) -> Iterator[Found]:
        """Check that calls are written in the form that the parser reads and that the system text shows."""
        turn = self.turn("call")
        line = self._line_of("call", TOOL_NAME)
        if self.form and not self._read("call"):
            family = self.row.family if self.row is not None else ""
            message = f"it writes the call as {printable(turn.strip(), 80)!r}, which the parser of {family} does not read"
            yield _fault("template_form_differs", message, line)
        shown_text = self.rendered["prompt"].text
        shown = [form for form, pattern in _SHOWN_FORMS.items() if pattern.search(shown_text)]
        written = [form for form, pattern in _SHOWN_FORMS.items() if pattern.search(turn)]
        if self.form in _SHOWN_FORMS and written and shown and not set(shown) & set(written):
            message = f"it shows the model calls in the form {shown[0]} and writes them in the form {written[0]}"
            yield _fault("template_form_differs", message, line)

    def check_messages(self) -> Iterator[Found]:
        """Check that messages are neither refused nor left out."""
        cases: tuple[tuple[str, str, str, str], ...] = (
            (
                "later system",
                "template_later_system",
                LATER_SYSTEM,
                "a system message after the first one",
            ),
            ("developer", "template_developer", DEVELOPER, "a message of the role developer"),
            (
                "two questions",
                "template_two_users",
                str(QUESTION["content"]),
                "two user messages in a row",
            ),
            ("no question", "template_no_user", "", "a conversation without a user message"),
        )
        for name, code, text, what in cases:
            reply = self.rendered[name]
            if reply.error:
                yield _limit(*_refused(code, what, reply))
            elif text not in reply.text:
                line = reply.line_at(len(self.start) - 1)
                yield _fault(code, f"it does not show {what}", line)

    def check_thinking(self) -> Iterator[Found]:
        """Check that thinking is on by default where the servers' parsers assume it."""
        on = self.rendered["thinking_on"].text
        off = self.rendered["thinking_off"].text
        prompt = self.rendered["prompt"]
        assumes = self.row is not None and self.row.assumes_thinking and THINK in self.source
        if assumes and on != off and prompt.text == off:
            message = (
                "thinking is off unless a request sets enable_thinking, and the servers' reasoning parser assumes "
                "that it is on: unstreamed answers arrive as reasoning"
            )
            line = prompt.line_at(len(prompt.text) - 1)
            yield _fault("template_thinking_default", message, line)

    def check_prefixes(self) -> Iterator[Found]:
        """Check that the prompt of each turn begins with the prompt of the turn before."""
        for before, after in (("prompt", "after_answer"), ("after_call", "after_result")):
            first = self.rendered[before]
            second = self.rendered[after]
            if first.error or second.error or second.text.startswith(first.text):
                continue
            at = 0
            while at < len(second.text) and first.text[at] == second.text[at]:
                at += 1
            message = "the next prompt does not begin with the last one, so prefix caches miss"
            yield _limit("template_prefix_changes", message, second.line_at(at))
            return

    def check_control_tokens(self) -> Iterator[Found]:
        reply = self.rendered["result_with_control_tokens"]
        end = next(iter(_MARK.findall(self.tail)), self.tail.strip())
        if end and end in CONTROL_TOKENS and CONTROL_TOKENS in reply.text:
            message = f"a tool's result that contains {end} ends the turn: it is written as it is"
            line = reply.line_at(reply.text.find(CONTROL_TOKENS))
            yield _limit("template_control_tokens", message, line)

    # ---- results

    def check_results(self, one: Rendered) -> Iterator[Found]:
        """Check that results are shown once, in their order, also in content parts. one: with one result."""
        count = one.text.count(RESULTS[0])
        if count != 1:
            message = "it does not show a tool's result"
            if count:
                message = f"it shows a tool's result {count} times"
            # The turn of the result begins where the conversation without it ends.
            line = one.line_at(len(self.rendered["call"].text))
            yield _fault("template_result_lost", message, line)
            return
        line = one.line_at(one.text.find(RESULTS[0]))
        parts = self.rendered["result_parts"]
        if parts.error:
            yield _fault(*_refused("template_result_parts", RESULT_PARTS, parts))
        elif RESULTS[0] not in parts.text:
            yield _fault("template_result_parts", f"it does not show {RESULT_PARTS}", line)
        two = self.rendered["two_results"]
        places = [two.text.find(text) for text in RESULTS]
        are_once = all(two.text.count(text) == 1 for text in RESULTS)
        if not two.error and not (are_once and places == sorted(places)):
            message = "it does not show each of two results once and in their order"
            yield _fault("template_result_lost", message, line)
        openai = self.rendered["openai_id"]
        if openai.error:
            yield _limit(*_refused("template_call_id", f"the call id {OPENAI_ID}", openai))

    # ---- calls

    def check_content(self) -> Iterator[Found]:
        """Check the text next to a call."""
        null = self.rendered["null_content"]
        if null.error:
            yield _fault(*_refused("template_null_content", "a call with null content", null))
        elif "None" in self.turn("null_content"):
            line = self._line_of("null_content", "None")
            yield _fault("template_null_content", "it writes null content as None", line)
        reply = self.rendered["text_with_call"]
        turn = self.turn("text_with_call")
        line = self._line_of("text_with_call", TOOL_NAME)
        if reply.error:
            yield _fault(*_refused("template_call_text", "a call with a text", reply))
        elif TEXT_WITH_CALL not in turn:
            message = "it does not write the text of a message with calls"
            yield _fault("template_call_text", message, line)
        elif turn.find(TEXT_WITH_CALL) > turn.find(TOOL_NAME):
            message = "it writes the text of a message with calls after them, where parsers drop it"
            line = self._line_of("text_with_call", TEXT_WITH_CALL)
            yield _fault("template_call_text", message, line)

    def check_several_calls(self) -> Iterator[Found]:
        reply = self.rendered["two_calls"]
        if reply.error:
            yield _fault(*_refused("template_several_calls", "two calls in one message", reply))
            return
        cities = [call.arguments.get("city") for call in self._read("two_calls")]
        if cities != ["Oslo", "Rome"]:
            line = self._line_of("two_calls", TOOL_NAME)
            message = f"of two calls in one message the parser reads {len(cities)}"
            yield _fault("template_several_calls", message, line)

    def check_arguments(self) -> Iterator[Found]:
        """Check values, types and order of arguments, as the parser reads them back."""
        for name, sent in ARGUMENTS.items():
            reply = self.rendered[name]
            if reply.error:
                what = f"the arguments {_shortened(sent)}"
                yield _fault(*_refused("template_value_changed", what, reply))
                continue
            calls = self._read(name)
            received = calls[0].arguments if calls else {}
            yield from self._compare(name, sent, received)
        yield from self._check_end_tag()
        yield from self._check_arguments_as_text()

    def _compare(self, name: str, sent: JsonObject, received: JsonObject) -> Iterator[Found]:
        for key, value in sent.items():
            if key not in received or not self._is_kept(received[key], value):
                got = _shortened(received[key]) if key in received else "nothing"
                message = f"the argument {key} = {_shortened(value)} is read back as {got}"
                line = self._line_of(name, key)
                yield _fault("template_value_changed", message, self._value_line(name, key) or line)
                return
        if list(received) != list(sent):
            message = (
                f"it writes the arguments {', '.join(sent)} in the order {', '.join(received)}"
            )
            yield _fault(
                "template_argument_order", message, self._line_of(name, next(iter(received)))
            )

    def _value_line(self, name: str, key: str) -> int:
        """Return the line that wrote a value: that of the piece after the argument's name."""
        reply = self.rendered[name]
        at = reply.text.find(key, self._turn_start(name))
        line = reply.line_at(at)
        for offset in range(at, min(len(reply.text), at + len(key) + 8)):
            if reply.line_at(offset) != line:
                return reply.line_at(offset)
        return line

    def _is_kept(self, received: object, sent: object) -> bool:
        if self.form not in _TEXT_FORMS or isinstance(sent, str):
            return _same(received, sent)
        try:
            return _same(decode_json(str(received)), sent)
        except ValueError:
            return False

    def _check_end_tag(self) -> Iterator[Found]:
        """Check a value with an end tag: servers end a value at its first end tag."""
        if self.form != "qwen_xml" or self.rendered["end_tag"].error:
            return
        if END_TAG in self.turn("end_tag"):
            message = "a value that contains </parameter> ends there for the servers' parsers: the form does not escape tags"
            line = self._line_of("end_tag", END_TAG)
            yield _limit("template_end_tag", message, line)

    def _check_arguments_as_text(self) -> Iterator[Found]:
        name = "arguments_as_text"
        reply = self.rendered[name]
        if reply.error:
            what = "arguments as JSON text; vLLM and SGLang decode them first, training code often does not"
            yield _limit(*_refused("template_arguments_text", what, reply))
            return
        decoded = self._read("call")[0].arguments
        calls = self._read(name)
        if not calls or not _same(calls[0].arguments, decoded):
            message = "it encodes arguments that are JSON text a second time; vLLM and SGLang decode them first"
            line = self._line_of(name, "Oslo")
            yield _limit("template_arguments_text", message, line)
