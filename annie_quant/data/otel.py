"""Calls of generative models in OTLP JSON as records of a log (OpenTelemetry's semantic conventions, attributes gen_ai.*).

Form: open-telemetry/semantic-conventions-genai, commit 024a4f94 (docs/gen-ai/client-inference.md
    and the JSON schemas of messages),
read on 2026-11-28. Messages, system instructions and tool definitions are opt-in, structured or
JSON text, on a span, one of its events or a log record. vLLM's own spans have no content, and token
counts under older names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from annie_quant.core.untrusted import JsonObject, decode_json, integer

# None: vLLM's spans. An agent's span is not read: it has its calls' messages.
OPERATIONS = (None, "chat", "text_completion", "generate_content")
INPUT = "gen_ai.input.messages"
OUTPUT = "gen_ai.output.messages"
PROMPT_TOKEN_FIELDS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
ANSWER_TOKEN_FIELDS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
# Attributes with content before gen_ai.input.messages: OpenLLMetry's, the conventions' until 1.27, OpenInference's.
OLDER = ("gen_ai.prompt", "gen_ai.completion", "llm.input_messages", "llm.prompts")
EXPORT_LEVELS = (
    ("resourceSpans", "scopeSpans", "spans"),
    ("resourceLogs", "scopeLogs", "logRecords"),
)
_TIME_FIELDS = ("startTimeUnixNano", "timeUnixNano", "observedTimeUnixNano")
MAX_VALUE_DEPTH = 32


def is_export(document: object) -> bool:
    """Return whether a JSON value is an export of traces or logs."""
    return isinstance(document, dict) and any(level[0] in document for level in EXPORT_LEVELS)


def records(document: object) -> Iterator[JsonObject]:
    """Yield each call of a model as a row for sources.py, or with "unusable": why it is none."""
    for time_s, attributes in _calls(document):
        operation = attributes.get("gen_ai.operation.name")
        if operation not in OPERATIONS:
            yield {"span": True, "unusable": f"a span of operation {str(operation)[:40]!r}"}
            continue
        messages = _content(attributes.get(INPUT))
        answers = _content(attributes.get(OUTPUT))
        if not isinstance(messages, list):
            yield {"span": True, "unusable": _why_unusable(attributes)}
            continue
        yield {
            "span": True,
            "time": time_s,
            "messages": messages,
            "system": _content(attributes.get("gen_ai.system_instructions")),
            "tools": _content(attributes.get("gen_ai.tool.definitions")),
            "answers": answers,
            "max_tokens": attributes.get("gen_ai.request.max_tokens"),
        }


def _why_unusable(attributes: JsonObject) -> str:
    if any(name.startswith(OLDER) for name in attributes):
        return (
            f"a span of an older convention, without {INPUT}: set "
            "OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental in the instrumented program"
        )
    return f"a span without {INPUT}, or one that was cut"


def lengths(document: object) -> Iterator[tuple[float, int, int]]:
    """Yield (seconds since 1970, prompt tokens, answer tokens) of each call that has counts."""
    for time_s, attributes in _calls(document):
        prompt = integer(_first(attributes, PROMPT_TOKEN_FIELDS))
        answer = integer(_first(attributes, ANSWER_TOKEN_FIELDS))
        is_call = attributes.get("gen_ai.operation.name") in OPERATIONS
        if is_call and prompt and answer is not None:
            yield time_s, prompt, answer


def _calls(document: object) -> Iterator[tuple[float, JsonObject]]:
    """Yield (start in seconds since 1970, attributes) of each call of a model, a tool or an agent that has messages or counts."""
    for level in EXPORT_LEVELS:
        items = _objects(document, level[0])
        for name in level[1:]:
            items = [inner for item in items for inner in _objects(item, name)]
        for call in items:
            attributes: JsonObject = {}
            for part in (call, *_objects(call, "events")):
                attributes |= _attributes(part, "attributes", MAX_VALUE_DEPTH)
            names = (INPUT, OUTPUT, *PROMPT_TOKEN_FIELDS)
            known = any(name in names or name.startswith(OLDER) for name in attributes)
            if known:
                time_ns = _integer(_first(call, _TIME_FIELDS)) or 0
                yield time_ns / 1e9, attributes


def _first(fields: JsonObject, names: Sequence[str]) -> Any:
    """Return the first of several fields that has a value; 0 where none has."""
    return next((fields[name] for name in names if fields.get(name)), 0)


def _objects(parent: object, name: str) -> list[JsonObject]:
    items = parent.get(name) if isinstance(parent, Mapping) else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []


def _integer(value: object) -> int | None:
    """Return a 64-bit integer of protobuf's JSON form: a number, or its digits as text."""
    text = str(value) if isinstance(value, (str, int)) else ""
    return int(text) if text.isdecimal() and len(text) < 20 else None


def _attributes(parent: object, name: str, depth: int) -> JsonObject:
    return {
        str(pair.get("key")): _value(pair.get("value"), depth) for pair in _objects(parent, name)
    }


def _value(value: object, depth: int) -> Any:
    """Return the value of an AnyValue; None for an unknown one, and below `depth` levels."""
    for kind, content in value.items() if isinstance(value, Mapping) and depth else ():
        if kind == "arrayValue":
            return [_value(item, depth - 1) for item in _objects(content, "values")]
        if kind == "kvlistValue":
            return _attributes(content, "values", depth - 1)
        return _integer(content) if kind == "intValue" else content
    return None


def _content(value: object) -> object:
    """Return an attribute that may be JSON text; None where the text is not JSON, because it was cut."""
    try:
        return decode_json(value) if isinstance(value, str) else value
    except ValueError:
        return None
