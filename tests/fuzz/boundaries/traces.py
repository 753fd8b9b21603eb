"""Traces and logs as workloads of a benchmark: OpenTelemetry's and logs with times."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fuzz.boundaries.grammar import Hostile, encode
from fuzz.boundaries.harness import Sandbox, limited_time, one_line_errors

MESSAGES = [
    {"role": "user", "parts": [{"type": "text", "content": "Weather?"}]},
    {
        "role": "assistant",
        "parts": [{"type": "tool_call", "id": "c", "name": "w", "arguments": {"x": 1}}],
    },
    {
        "role": "tool",
        "parts": [{"type": "tool_call_response", "id": "c", "response": {"sky": "grey"}}],
    },
]


def any_value(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            "kvlistValue": {"values": [{"key": k, "value": any_value(v)} for k, v in value.items()]}
        }
    if isinstance(value, list):
        return {"arrayValue": {"values": [any_value(v) for v in value]}}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


def export(**attributes: Any) -> dict[str, Any]:
    pairs = [
        {"key": f"gen_ai.{k.replace('__', '.')}", "value": any_value(v)}
        for k, v in attributes.items()
    ]
    span = {
        "name": "chat",
        "startTimeUnixNano": "1780000000000000000",
        "attributes": pairs,
        "events": [{"attributes": pairs[:1]}],
    }
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


SAMPLES = (
    export(
        operation__name="chat",
        input__messages=MESSAGES,
        output__messages=MESSAGES[1:2],
        usage__input_tokens=5,
    ),
    export(usage__prompt_tokens=700, usage__completion_tokens=9),
    {
        "time": "2026-11-22T10:00:04Z",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 9,
    },
)


@contextlib.contextmanager
def opened(sandbox: Sandbox) -> Iterator[Any]:
    from annie_quant.bench import traces

    def case(seed: str, left: int) -> int:
        hostile = Hostile(seed)
        sample = hostile.random.choice(SAMPLES)
        lines = [encode(hostile.changed(sample)).replace(b"\n", b" "), encode(sample)]
        hostile.random.shuffle(lines)
        file = sandbox.inputs / hostile.random.choice(("trace.jsonl", "trace.json"))
        file.write_bytes(hostile.damaged(b"\n".join(lines) + b"\n"))
        with limited_time("traces"):
            for read in (lambda: traces.trace(file, 5), lambda: traces.replay([file], 5)):
                with one_line_errors():
                    workload = read()
                    for one in workload.cases:
                        for turn in range(one.n_turns):
                            workload.request(
                                one, turn, [{"role": "assistant", "content": ""}] * turn
                            )
        return 1

    yield case
