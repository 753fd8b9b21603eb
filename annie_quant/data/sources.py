"""The forms of logs, one Source per form: how its rows are recognised, and the conversation of a row.

A file has one form, that of its first row that any source recognises (logs.py). A row of the file outside the form is
Unusable: it is counted and named, and the others are read.
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from annie_quant.core.untrusted import JsonObject, decode_json, integer
from annie_quant.data.conversations import (
    Conversation,
    Fields,
    Note,
    Unusable,
    conversation_from,
    names,
    unknown_fields,
)
from annie_quant.data.logged_answers import LoggedAnswer, finish_reason_of, read_answer
from annie_quant.data.message_forms import (
    OPENAI,
    OTEL,
    SHAREGPT,
    MessageForm,
    read_message,
    read_messages,
)
from annie_quant.data.response_items import OWN_FIELDS, is_response_request, read_items
from annie_quant.data.tool_forms import tools_of

Path = tuple[str, ...]  # names of fields, one inside the other

_HTTP_SUCCESS = (200, 299)
_TIME_FIELDS = ("time", "timestamp", "start_time", "startTime", "created_at", "created")
LLAMA_CPP = "log_server_r"  # the field of a row that logs.py makes of llama.cpp's text log
# Fields of a record that are known and not read: a request's settings, and who, when, and how long.
RECORD_METADATA = names(
    "model temperature top_p top_k min_p n stream stream_options stop seed max_tokens "
    "max_completion_tokens user metadata presence_penalty frequency_penalty repetition_penalty "
    "logit_bias logprobs top_logprobs response_format tool_choice parallel_tool_calls "
    "service_tier store reasoning_effort chat_template_kwargs extra_body modalities prediction id "
    "custom_id request_id session_id trace_id conversation_id user_id method url path object "
    "usage status status_code error latency latency_ms duration duration_ms cost category "
    "thinking split provenance source finish_reason think options keep_alive format end_time "
    "endTime stop_sequences thinking_budget version provider"
)
_TOOLS = re.compile(r"<tools>\s*(.*?)\s*</tools>", re.DOTALL)


@dataclass(frozen=True)
class _Envelope:
    """Where a source's record has its request and its answer.

    requests: places of the object with `messages`, the first one that has them counts.
    tools, answers: further places of tools, and of the answer.
    """

    requests: Sequence[Path] = ((), ("request",), ("request", "body"), ("request_body",), ("body",))
    tools: Sequence[Path] = (("tools",), ("functions",))
    answers: Sequence[Path] = (("response",), ("response_body",), ("output",), ("completion",))


CHAT = _Envelope()
LITELLM = _Envelope(
    requests=(("proxy_server_request", "body"), ("proxy_server_request",), ()),
    tools=(("model_parameters", "tools"), ("optional_params", "tools")),
    answers=(("response",),),
)
LANGFUSE = _Envelope(
    requests=(("input",),), tools=(("modelParameters", "tools"),), answers=(("output",),)
)
LITELLM_CALLS = ("completion", "acompletion")
LANGFUSE_TYPES = names(
    "GENERATION SPAN EVENT TRACE AGENT TOOL CHAIN RETRIEVER EVALUATOR EMBEDDING GUARDRAIL"
)


@dataclass(frozen=True)
class Source:
    """One form of a log. matches: whether a row has it. read: the conversation of a row; Unusable where there is none."""

    name: str
    matches: Callable[[JsonObject], bool]
    read: Callable[[JsonObject], Conversation]


def conversation_of(record: object) -> Conversation:
    """Return the conversation of a chat request, with its answer where the record has one. Raises Unusable with the reason."""
    if not isinstance(record, dict):
        raise Unusable("not a JSON object")
    return _read_envelope(record, CHAT)


def _read_envelope(record: JsonObject, envelope: _Envelope) -> Conversation:
    request = _request(record, envelope)
    _check_success(record)
    notes: list[Note] = []
    messages = read_messages(_decoded(request["messages"]), OPENAI, notes)
    places = (_at(record, path) for path in envelope.answers)
    logged = next((value for value in places if value not in (None, "", {})), None)
    if logged is None and "choices" in record:
        logged = record
    _add_answer(messages, read_answer(logged), notes)
    tools = [request.get(name) for name in ("tools", "functions")]
    tools += [_at(record, path) for path in envelope.tools]
    offered = next((value for value in tools if value not in (None, [], "", {})), None)
    if request.get("tool_choice") == "none":
        offered = None
    system = request.get("system") or record.get("system") or record.get("system_prompt")
    if messages and messages[-1]["role"] == "assistant":
        finish_reason_of(record.get("finish_reason"))
    _note_unknown(record, request, envelope, notes)
    return _finished(record, request, messages, offered, system, notes)


def _check_success(record: Fields) -> None:
    """Raise Unusable for a record of a request that failed: what it has for an answer is another text."""
    for name in ("status", "status_code"):
        status = integer(record.get(name))
        if status is not None and not _HTTP_SUCCESS[0] <= status <= _HTTP_SUCCESS[1]:
            raise Unusable(f"a request with status {status}")
    if record.get("error"):
        raise Unusable("an error in place of an answer")


def _finished(
    record: Fields,
    request: Fields,
    messages: Sequence[Any],
    offered: object,
    system: object,
    notes: list[Note],
) -> Conversation:
    """Return the conversation of a record's messages. Tools in a system prompt's tags count where there are no others."""
    tools, faults = tools_of(offered)
    prompt = _system_text(system, OPENAI, []) if system else ""
    conversation = conversation_from(messages, prompt, tools or None, notes)
    tagged = _TOOLS.search(conversation.system or "")
    if tagged and not tools:
        tools, more = tools_of(tagged[1])
        faults += more
        if tools:  # the chat template adds them again
            conversation.tools = tools
            conversation.system = _TOOLS.sub("", conversation.system or "").strip() or None
    conversation.notes += [("tools", fault) for fault in faults]
    conversation.time_s = _time(record)
    limit = request.get("max_tokens", request.get("max_completion_tokens"))
    conversation.max_tokens = integer(limit) or None
    return conversation


def _system_text(system: object, form: MessageForm, notes: list[Note]) -> str:
    """Return a system prompt that is next to the messages: text, Anthropic's blocks, or OpenTelemetry's parts."""
    (message,) = read_message({form.role: "system", form.content: system}, form, notes)
    return message["content"]


def _add_answer(messages: list[Any], answer: LoggedAnswer | None, notes: list[Note]) -> None:
    if answer is None:
        return
    (message,) = read_message(answer[0], OPENAI, notes)
    if not messages or messages[-1]["role"] != "assistant":
        messages.append(message)
    elif any(messages[-1].get(name) != message.get(name) for name in ("content", "tool_calls")):
        raise Unusable("messages that end with the beginning of the answer")


def _request(record: JsonObject, envelope: _Envelope) -> JsonObject:
    """Return the object with the messages."""
    for path in envelope.requests:
        value = _at(record, path)
        if isinstance(value, list) and path:  # Langfuse's input may be the messages alone
            return {"messages": value}
        if isinstance(value, dict) and value.get("messages") not in (None, "", {}):
            return value
    raise Unusable("no messages in the record")


def _note_unknown(
    record: JsonObject, request: JsonObject, envelope: _Envelope, notes: list[Note]
) -> None:
    places = (*envelope.requests, *envelope.answers, *envelope.tools)
    read = {path[0] for path in places if path} | {"messages", "system", "system_prompt", "choices"}
    known = RECORD_METADATA | {*read, *_TIME_FIELDS, "functions", "tools"}
    parts = (record, request) if envelope is CHAT else (request,) * (request is not record)
    notes += unknown_fields({name for part in parts for name in part.keys() - known}, "a record")


def _at(record: JsonObject, path: Path) -> Any:
    """Return the value at a place, None where there is none. Objects on the way may be JSON text."""
    value: Any = record
    for name in path:
        value = _decoded(value)
        value = value.get(name) if isinstance(value, dict) else None
    return _decoded(value)


def _decoded(value: object) -> Any:
    """Return a value, or that of the JSON text of an object or a list."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            return decode_json(value)
    return value


def _time(record: Fields) -> float | None:
    """Return when a record was logged, in seconds since 1970.

    Records have ISO 8601, or a number of seconds or milliseconds.
    """
    logged = next((record[key] for key in _TIME_FIELDS if record.get(key) is not None), None)
    if isinstance(logged, str):
        try:
            return datetime.datetime.fromisoformat(logged.replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError):
            return None
    if not isinstance(logged, (int, float)) or isinstance(logged, bool):
        return None
    return logged / 1000 if logged > 1e11 else float(logged)


# ---- the sources


def _has_messages(record: JsonObject, envelope: _Envelope) -> bool:
    try:
        _request(record, envelope)
    except Unusable:
        return False
    return True


def _is_sharegpt(row: JsonObject) -> bool:
    return any(isinstance(_decoded(row.get(name)), list) for name in SHAREGPT_LISTS)


SHAREGPT_LISTS = ("conversations", "conversation")


def _read_sharegpt(row: JsonObject) -> Conversation:
    lists = [_decoded(row[name]) for name in SHAREGPT_LISTS if row.get(name)]
    if len(lists) != 1:
        raise Unusable("no conversation in the record")
    turns = lists[0]
    notes: list[Note] = []
    first = turns[0] if isinstance(turns, list) and turns else None
    form = SHAREGPT if isinstance(first, Mapping) and "from" in first else OPENAI
    messages = read_messages(turns, form, notes)
    known = RECORD_METADATA | {*SHAREGPT_LISTS, *_TIME_FIELDS, "tools", "system", "system_prompt"}
    notes += unknown_fields(row.keys() - known, "a record")
    system = row.get("system") or row.get("system_prompt")
    return _finished(row, row, messages, row.get("tools"), system, notes)


def _read_litellm(row: JsonObject) -> Conversation:
    if row.get("call_type") not in LITELLM_CALLS:
        raise Unusable(f"unknown call_type {str(row.get('call_type'))[:40]!r}")
    if row.get("status") not in (None, "success"):
        raise Unusable(f"a request with status {str(row['status'])[:40]!r}")
    return _read_envelope(row, LITELLM)


def _is_langfuse(row: JsonObject) -> bool:
    is_observation = str(row.get("type")) in LANGFUSE_TYPES and (
        "traceId" in row or "trace_id" in row
    )
    return is_observation or isinstance(row.get("observations"), list)


def _read_langfuse(row: JsonObject) -> Conversation:
    if row.get("type") != "GENERATION":
        raise Unusable(f"unknown type {str(row.get('type'))[:40]!r}")
    if row.get("level") == "ERROR":
        raise Unusable("a request with level 'ERROR'")
    return _read_envelope(row, LANGFUSE)


def _read_otel(row: JsonObject) -> Conversation:
    if row.get("unusable"):
        raise Unusable(row["unusable"])
    notes: list[Note] = []
    messages = read_messages(row["messages"], OTEL, notes)
    answers = row["answers"] if isinstance(row["answers"], list) else []
    for answer in answers[:1]:
        messages += read_message(answer, OTEL, notes)
        finish_reason_of(answer.get("finish_reason"))
    notes += [("answers", "not the first choice")] * len(answers[1:])
    system = "" if row["system"] is None else _system_text(row["system"], OTEL, notes)
    return _finished(row, row, messages, row["tools"], system, notes)


def _is_responses(row: JsonObject) -> bool:
    return _response_request(row) is not None


def _response_request(row: JsonObject) -> JsonObject | None:
    """Return the row's request of the Responses API; None where it has none."""
    response = _response_of(row)
    url = str(row.get("url") or row.get("path") or "")
    has_output = isinstance(response, Mapping) and isinstance(response.get("output"), list)
    is_named = has_output or url.rstrip("/").endswith("/responses")
    requests = (_at(row, path) for path in CHAT.requests)
    return next((r for r in requests if is_response_request(r, is_named)), None)


def _response_of(row: JsonObject) -> Any:
    response = _at(row, ("response",)) or _at(row, ("response_body",))
    if isinstance(response, dict) and isinstance(response.get("body"), dict):
        response = response["body"]
    return response


def _read_responses(row: JsonObject) -> Conversation:
    request = _response_request(row)
    if request is None:
        raise Unusable("no input in the record")
    _check_success(row)
    notes: list[Note] = []
    messages = read_items(request, _response_of(row), notes)
    known = RECORD_METADATA | {path[0] for path in CHAT.requests if path} | {*_TIME_FIELDS}
    known |= {*OWN_FIELDS, "input", "response", "response_body"}
    notes += unknown_fields(row.keys() - known, "a record")
    system = request.get("instructions") or ""
    return _finished(row, request, messages, request.get("tools"), system, notes)


def _read_llama_cpp(row: JsonObject) -> Conversation:
    return _read_envelope(row[LLAMA_CPP], CHAT)


def _is_batch_output(row: JsonObject) -> bool:
    return "custom_id" in row and "response" in row and _at(row, ("response", "body")) is not None


def _read_batch_output(row: JsonObject) -> Conversation:
    raise Unusable(
        "an answer of a batch without its request: join it with the batch's input file by custom_id"
    )


SOURCES = (
    Source("OpenTelemetry", lambda row: row.get("span") is True, _read_otel),
    Source("llama.cpp log", lambda row: LLAMA_CPP in row, _read_llama_cpp),
    Source("LiteLLM", lambda row: "call_type" in row, _read_litellm),
    Source("Langfuse", _is_langfuse, _read_langfuse),
    Source("ShareGPT", _is_sharegpt, _read_sharegpt),
    Source("OpenAI chat", lambda row: _has_messages(row, CHAT), conversation_of),
    Source("OpenAI responses", _is_responses, _read_responses),
    Source("batch output", _is_batch_output, _read_batch_output),
)
