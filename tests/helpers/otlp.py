"""OpenTelemetry's spans of calls of a model, as OTLP JSON."""

from __future__ import annotations

import json


def value(x):
    """Return a Python value as OTLP's AnyValue."""
    if isinstance(x, dict):
        return {"kvlistValue": {"values": [{"key": k, "value": value(v)} for k, v in x.items()]}}
    if isinstance(x, list):
        return {"arrayValue": {"values": [value(v) for v in x]}}
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    return {kinds[type(x)]: str(x) if type(x) is int else x}


def span(time_s, **attributes):
    named = {f"gen_ai.{name.replace('__', '.')}": x for name, x in attributes.items()}
    pairs = [{"key": k, "value": value(x)} for k, x in named.items()]
    return {
        "name": "chat m",
        "kind": 3,
        "startTimeUnixNano": str(int(time_s * 10**9)),
        "attributes": pairs,
    }


def export(*spans):
    return {
        "resourceSpans": [
            {"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": [*spans]}]}
        ]
    }


def write_lengths(path, calls):
    """Write (seconds, prompt tokens, answer tokens) of calls as spans without content, one export per line."""
    spans = [
        span(time_s, usage__prompt_tokens=prompt, usage__completion_tokens=answer)
        for time_s, prompt, answer in calls
    ]
    path.write_text("".join(json.dumps(export(one)) + "\n" for one in spans))
    return path
