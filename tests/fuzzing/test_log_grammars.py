"""Logs with fields moved, renamed, doubled, removed or of another type: nothing unknown becomes content, no neighbour changes.

MARK stands only where no grammar has content. It must not reach a calibration row, a gate prompt, a system prompt or a tool.
"""

from __future__ import annotations

import copy
import json
import os
import random

import pytest
from otlp import export, span

from annie_quant.core.errors import UsageError
from annie_quant.data.init_folder import Sources, initialize
from annie_quant.data.logs import Problems, read_logs

MARK = "PLANTEDMARK"
CASES = max(10, int(os.environ.get("ANNIE_QUANT_FUZZ_CASES", "500")) // 20)  # per source and kind
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"q": "tea"}'}}
MESSAGES = [
    {"role": "system", "content": "Be S."},
    {"role": "user", "content": [{"type": "text", "text": "Where is tea?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "tool_call_id": "c", "content": "shelf 3"},
]
ANSWER = {"role": "assistant", "content": "On shelf 3."}
COMPLETION = {
    "id": "r",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}],
}
CHUNKS = [{"choices": [{"index": 0, "delta": {"content": t}}]} for t in ("On ", "shelf 3.")]
CHUNKS.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
REQUEST = {"model": "m", "messages": MESSAGES, "tools": [TOOL], "temperature": 0.5}
BLOCKS = [
    {"role": "user", "content": "Where is tea?"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm"},
            {"type": "tool_use", "id": "c", "name": "find", "input": {"q": "tea"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "c",
                "content": [{"type": "text", "text": "shelf 3"}],
            }
        ],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "On shelf 3."}]},
]
ITEMS = [
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "Where is tea?"}],
    },
    {"type": "function_call", "name": "find", "arguments": '{"q": "tea"}', "call_id": "c"},
    {"type": "function_call_output", "call_id": "c", "output": "shelf 3"},
]
SAID = {
    "type": "message",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "On shelf 3."}],
}
PARTS = [
    {"role": "user", "parts": [{"type": "text", "content": "Where is tea?"}]},
    {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "c", "name": "find", "arguments": {"q": "tea"}}],
    },
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "shelf 3"}]},
]
OUTPUT = [
    {
        "role": "assistant",
        "parts": [{"type": "text", "content": "On shelf 3."}],
        "finish_reason": "stop",
    }
]
ROWS = {
    "chat": {"time": "2026-09-01T10:00:00Z", "request": REQUEST, "response": COMPLETION},
    "chunks": {"request": REQUEST, "response": CHUNKS},
    "recorded": {
        "time": "2026-09-01T10:00:00",
        "model": "m",
        "messages": [*MESSAGES, ANSWER],
        "tools": [TOOL],
        "finish_reason": "stop",
    },
    "messages": {
        "system": "Be S.",
        "messages": BLOCKS,
        "tools": [{"name": "find", "input_schema": TOOL["function"]["parameters"]}],
    },
    "responses": {
        "request": {
            "instructions": "Be S.",
            "input": ITEMS,
            "tools": [{"type": "function", **TOOL["function"]}],
        },
        "response": {"object": "response", "status": "completed", "output": [SAID]},
    },
    "litellm": {
        "id": "1",
        "call_type": "acompletion",
        "status": "success",
        "messages": MESSAGES,
        "response": COMPLETION,
        "model_parameters": {"tools": [TOOL]},
    },
    "langfuse": {
        "id": "o",
        "traceId": "t",
        "type": "GENERATION",
        "input": {"messages": MESSAGES, "tools": [TOOL]},
        "output": ANSWER,
    },
    "sharegpt": {
        "conversations": [
            {"from": "system", "value": f"Be S. <tools>{json.dumps(TOOL)}</tools>"},
            {"from": "human", "value": "Where is tea?"},
            {
                "from": "gpt",
                "value": '<tool_call>{"name": "find", "arguments": {"q": "tea"}}</tool_call>',
            },
            {"from": "tool", "value": "<tool_response>shelf 3</tool_response>"},
            {"from": "gpt", "value": "On shelf 3."},
        ]
    },
    "otel": {
        "operation__name": "chat",
        "input__messages": PARTS,
        "output__messages": OUTPUT,
        "system_instructions": [{"type": "text", "content": "Be S."}],
        "tool__definitions": [TOOL],
    },
}
TRANSCRIPTS = {
    "claude": [
        {
            "type": m["role"],
            "uuid": str(i),
            "parentUuid": str(i - 1) if i else None,
            "sessionId": "s",
            "message": {"id": f"m{i}", **m},
        }
        for i, m in enumerate(BLOCKS)
    ],
    "codex": [
        {
            "timestamp": "t",
            "type": "session_meta",
            "payload": {"id": "0", "base_instructions": {"text": "Be S."}},
        },
        *({"timestamp": "t", "type": "response_item", "payload": item} for item in (*ITEMS, SAID)),
    ],
}
# Fields with text of the conversation, which MARK may not replace in place.
ANY_OBJECT = ("arguments", "input", "parameters", "input_schema")
CONTENT = frozenset(
    [
        "content",
        "text",
        "value",
        "arguments",
        "reasoning_content",
        "input",
        "thinking",
        "output",
        "response",
        "name",
        "description",
        "instructions",
        "system",
        "q",
    ]
)
UNKNOWN = ("zz", "contents", "body_text", "Content", "extra", "payload_x", "annotation")


def objects(value):
    """Yield every object in a JSON value, without schemas and arguments, which may have any field."""
    if isinstance(value, dict):
        yield value
        for name, item in value.items():
            if (
                name not in ("parameters", "input_schema", "arguments")
                and value.get("type") != "tool_use"
            ):
                yield from objects(item)
    elif isinstance(value, list):
        for item in value:
            yield from objects(item)


def marked(value):
    """Return a value with every text replaced."""
    if isinstance(value, dict):
        return {k: marked(v) if k not in ("role", "type", "from") else v for k, v in value.items()}
    return [marked(v) for v in value] if isinstance(value, list) else MARK


def mutate(rng, row, kind):
    """Change one place of a row, in place, so that what is marked is outside the grammar."""
    places = [o for o in objects(row) if o]
    target = rng.choice(places)
    name = rng.choice(sorted(target))
    if kind == "unknown":
        target[rng.choice(UNKNOWN)] = rng.choice(
            [MARK, [MARK], {"role": "assistant", "content": MARK, "text": MARK}]
        )
    elif kind == "renamed":
        target[rng.choice(UNKNOWN)] = marked(target.pop(name))
    elif kind == "removed":
        del target[name]
    elif kind == "moved":
        leaves = [
            o for o in places if {"content", "text", "value", "arguments"} & o.keys()
        ] or places
        source = rng.choice(leaves)
        name = rng.choice(
            sorted({"content", "text", "value", "arguments"} & source.keys()) or sorted(source)
        )
        value = marked(source.pop(name))
        rng.choice([o for o in places if o is not source and name not in o] or [{}])[f"{name}_"] = (
            value
        )
    elif kind == "retyped":
        wrong = [7, True, [7], {"zz": MARK}, [[MARK]]] + ([MARK] if name not in CONTENT else [])
        if name in ANY_OBJECT or target.get("type") == "tool_call_response":
            wrong = wrong[:3]
        target[name] = rng.choice(wrong)
    elif kind == "doubled":
        lists = [
            o[k]
            for o in places
            for k in o
            if isinstance(o[k], list) and o[k] and isinstance(o[k][0], dict)
        ]
        items = rng.choice(lists or [[{"zz": 1}]])
        clone = marked(copy.deepcopy(rng.choice(items)))
        for field in ("role", "type", "from"):
            if field in clone:
                clone[field] = "zz"
        items.insert(
            rng.randrange(len(items) + 1),
            clone | ({} if {"role", "type", "from"} & clone.keys() else {"zz": 1}),
        )


KINDS = ("unknown", "renamed", "removed", "moved", "retyped", "doubled")


def taken(conversations):
    """Return all that calibration and gates get of conversations."""
    return json.dumps([[c.messages, c.system, c.tools] for c in conversations], sort_keys=True)


def lines_of(rows):
    """Return rows as JSON lines; those of OpenTelemetry are a span's attributes."""
    spans = (
        export(span(1.0, **row)) if "operation__name" in row or "input__messages" in row else row
        for row in rows
    )
    return "".join(json.dumps(row) + "\n" for row in spans)


def read(path, rows):
    path.write_text(lines_of(rows))
    problems = Problems()
    return list(read_logs([path], problems)), list(problems.lines())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ROWS)
def test_a_changed_row_never_gives_content_and_its_neighbours_stay(tmp_path, source, kind):
    rng = random.Random(f"{source}/{kind}")
    row = ROWS[source]
    ((sound,), _) = read(tmp_path / "sound.jsonl", [row])
    for _ in range(CASES):
        changed = copy.deepcopy(row)
        mutate(rng, changed, kind)
        conversations, left_out = read(tmp_path / "l.jsonl", [row, changed, row])
        text = json.dumps(changed)
        assert MARK not in taken(conversations), text
        assert taken(conversations[:1]) == taken(conversations[-1:]) == taken([sound]), text
        assert len(conversations) in (2, 3) and (len(conversations) == 3 or left_out), text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", TRANSCRIPTS)
def test_a_changed_event_never_gives_content(tmp_path, source, kind):
    rng = random.Random(f"{source}/{kind}")
    ((sound,), _) = read(tmp_path / "sound.jsonl", TRANSCRIPTS[source])
    for _ in range(2 * CASES):
        events = copy.deepcopy(TRANSCRIPTS[source])
        mutate(rng, rng.choice(events), kind)
        conversations, left_out = read(tmp_path / "l.jsonl", events)
        text = json.dumps(events)
        assert MARK not in taken(conversations), text
        assert (
            left_out or taken(conversations) == taken([sound]) or kind in ("removed", "retyped")
        ), text


@pytest.mark.parametrize("source", [*ROWS, *TRANSCRIPTS])
def test_nothing_marked_is_in_the_folder_that_init_writes(tmp_path, source):
    rng = random.Random(source)
    rows = []
    for number in range(24):
        events = copy.deepcopy(TRANSCRIPTS.get(source) or [ROWS[source]])
        events = json.loads(
            json.dumps(events).replace(
                "Where is tea?", f"Where is {number} of {chr(97 + number) * 9}?"
            )
        )
        if number % 3:
            mutate(rng, rng.choice(events), rng.choice(KINDS))
        if source in TRANSCRIPTS:
            (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
        rows += events
    if source not in TRANSCRIPTS:
        (tmp_path / "l.jsonl").write_text(lines_of(rows))
    try:
        initialize(Sources("Be S.", logs=[tmp_path]), tmp_path.parent / f"{tmp_path.name}-out")
    except UsageError as error:
        pytest.fail(error.message)
    for file in (tmp_path.parent / f"{tmp_path.name}-out").rglob("*.json*"):
        assert MARK not in file.read_text()
