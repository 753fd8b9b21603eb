"""Calls of generative models in OTLP JSON as records of a log (OpenTelemetry's semantic conventions, attributes gen_ai.*).

Form: open-telemetry/semantic-conventions-genai, commit 024a4f94 (docs/gen-ai/client-inference.md and the JSON schemas of messages),
read on 2026-11-28. Messages, system instructions and tool definitions are opt-in, structured or JSON text, on a span, one of its
events or a log record. vLLM's own spans have no content, and token counts under older names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from annie_quant.core.untrusted import JsonObject, decode_json, integer
from annie_quant.data.log_records import Unusable

OPERATIONS = (
    None,
    "chat",
    "text_completion",
    "generate_content",
)  # None: vLLM's spans; an agent's span has its calls' messages
CONTENT = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.definitions")
PROMPT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
ANSWER_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
MAX_DEPTH = 32


def is_export(document: object) -> bool:
    """Return whether a JSON value is an export of traces or logs."""
    return isinstance(document, Mapping) and ("resourceSpans" in document or "resourceLogs" in document)


def records(document: object) -> Iterator[JsonObject | Unusable]:
    """Yield each call of a model as a request with its response (data/log_records.py), or why it is none."""
    for time_s, attributes in _calls(document):
        messages, answer, system, tools = (_content(attributes.get(name)) for name in CONTENT)
        if not isinstance(messages, list):
            cut = attributes.get(CONTENT[0]) is not None
            yield Unusable(f"a span {'whose' if cut else 'without'} {CONTENT[0]}{' is not a list' if cut else ''}")
            continue
        record: JsonObject = {"span": True, "time": time_s, "tools": tools, "messages": [*map(_message, messages)]}
        if isinstance(system, list):
            record["system"] = [_part(part) for part in system]
        if isinstance(answer, list) and answer:
            record["response"] = _message(answer[0])
        limit = integer(attributes.get("gen_ai.request.max_tokens"))
        yield record | ({"max_tokens": limit} if limit else {})


def lengths(document: object) -> Iterator[tuple[float, int, int]]:
    """Yield (seconds since 1970, prompt tokens, answer tokens) of each call that has counts."""
    for time_s, attributes in _calls(document):
        prompt, answer = (_count(attributes, names) for names in (PROMPT_TOKENS, ANSWER_TOKENS))
        if prompt and answer is not None:
            yield time_s, prompt, answer


def _calls(document: object) -> Iterator[tuple[float, JsonObject]]:
    """Yield (start in seconds since 1970, attributes) of each inference call; embeddings, tools and agents are left out."""
    for resource, scope, item in (
        ("resourceSpans", "scopeSpans", "spans"),
        ("resourceLogs", "scopeLogs", "logRecords"),
    ):
        for outer in _objects(document, resource):
            for inner in _objects(outer, scope):
                for call in _objects(inner, item):
                    attributes = _attributes(call, MAX_DEPTH)
                    for event in _objects(call, "events"):
                        attributes |= _attributes(event, MAX_DEPTH)
                    known = any(name in attributes for name in (*CONTENT[:2], *PROMPT_TOKENS))
                    if known and attributes.get("gen_ai.operation.name") in OPERATIONS:
                        yield _nanoseconds(call) / 1e9, attributes


def _objects(parent: object, name: str) -> Iterator[JsonObject]:
    items = parent.get(name) if isinstance(parent, Mapping) else None
    yield from (item for item in items if isinstance(item, dict)) if isinstance(items, list) else ()


def _nanoseconds(call: JsonObject) -> int:
    value = call.get("startTimeUnixNano") or call.get("timeUnixNano") or call.get("observedTimeUnixNano")
    return _integer(value) or 0


def _integer(value: object) -> int | None:
    """Return a 64-bit integer of protobuf's JSON form: a number, or its digits as text."""
    return int(value) if isinstance(value, (str, int)) and str(value).isdecimal() and len(str(value)) < 20 else None


def _count(attributes: JsonObject, names: tuple[str, str]) -> int | None:
    return next((n for name in names if (n := integer(attributes.get(name))) is not None), None)


def _attributes(parent: object, depth: int, name: str = "attributes") -> JsonObject:
    return {str(pair.get("key")): _value(pair.get("value"), depth) for pair in _objects(parent, name)}


def _value(value: object, depth: int) -> Any:
    """Return the value of an AnyValue; None for an unknown one, and below `depth` levels."""
    if not isinstance(value, Mapping) or not depth:
        return None
    if "arrayValue" in value:
        return [_value(item, depth - 1) for item in _objects(value["arrayValue"], "values")]
    if "kvlistValue" in value:
        return _attributes(value["kvlistValue"], depth - 1, "values")
    if "intValue" in value:
        return _integer(value["intValue"])
    return next((value[kind] for kind in ("stringValue", "boolValue", "doubleValue") if kind in value), None)


def _content(value: object) -> object:
    """Return an attribute that may be JSON text; None where the text is not JSON, because it was cut."""
    try:
        return decode_json(value) if isinstance(value, str) else value
    except ValueError:
        return None


def _message(message: Any) -> Any:
    """Return a message of `parts` as one with content blocks; results of tools are blocks of a user's message."""
    if not isinstance(message, Mapping) or not isinstance(message.get("parts"), list):
        return message
    role = "user" if message.get("role") == "tool" else message.get("role")
    return {"role": role, "content": [_part(part) for part in message["parts"]]}


def _part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "reasoning", "compaction"):
        return {"type": "reasoning" if kind == "reasoning" else "text", "text": str(part.get("content") or "")}
    if kind == "tool_call_response":
        result = part.get("response")
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
        return {"type": "tool_result", "tool_use_id": part.get("id"), "content": text}
    return {"type": "image"} if kind in ("blob", "file", "uri") else part
