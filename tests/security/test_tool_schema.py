"""A tool's schema, which a workload or a row brings, fetches nothing and raises nothing."""

from __future__ import annotations

import random
import re

import pytest
from stream_server import RawServer

from annie_quant.core.json_schema import mismatch
from annie_quant.data import validate
from annie_quant.data.schema_values import NoValue, draw_arguments


def test_a_reference_to_a_server_or_a_file_is_not_fetched(tmp_path):
    (tmp_path / "schema.json").write_text("{}")
    with RawServer(
        lambda connection, request: connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
        )
    ) as server:
        for target in (
            f"http://127.0.0.1:{server.port}/schema.json",
            (tmp_path / "schema.json").as_uri(),
        ):
            assert "cannot be used" in mismatch({"a": 1}, {"$ref": target})
            row = {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {
                        "role": "assistant",
                        "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}],
                    },
                ],
                "tools": [{"function": {"name": "f", "parameters": {"$ref": target}}}],
            }
            assert not validate([row]).ok
        assert server.connections == 0


def test_arguments_are_drawn_without_fetching_a_reference():
    with RawServer(
        lambda connection, request: connection.sendall(
            b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
        )
    ) as server:
        target = f"http://127.0.0.1:{server.port}/schema.json"
        for schema in (
            {"type": "object", "$ref": target},
            {"type": "object", "properties": {"a": {"$ref": target}}},
        ):
            with pytest.raises(NoValue, match="cannot be used"):
                draw_arguments({**schema, "required": ["a"]}, random.Random(0), "gate")
        assert server.connections == 0


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": 5},
        {"pattern": "("},
        {"properties": []},
        {"$ref": 7},
        {"items": "x"},
        [],
        "x",
        5,
        None,
    ],
)
def test_an_invalid_schema_is_one_line(schema):
    result = mismatch({"a": ["x"]}, schema)
    assert result is None or result.isprintable()


def test_valid_schemas_work():
    schema = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "integer"}},
    }
    assert mismatch({"n": 5}, schema) is None
    assert mismatch({"n": "5"}, schema).startswith("at n: ")


def test_a_schema_that_refers_to_itself_ends():
    node = {
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["next"],
    }
    schema = {"type": "object", "properties": {"n": {"$ref": "#/$defs/node"}}, "required": ["n"]}
    schema["$defs"] = {"node": {"type": "object", **node}}
    assert mismatch(draw_arguments(schema, random.Random(0), "gate"), schema) is None
    schema["$defs"]["node"]["properties"]["next"] = {"$ref": "#/$defs/node"}
    with pytest.raises(NoValue, match="refers to itself without end"):
        draw_arguments(schema, random.Random(0), "gate")


@pytest.mark.parametrize(
    "pattern",
    [r"^[A-Z]{3}-\d{4}$", r"^\+?[0-9 ]{6,14}$", "(a|b)+[.]txt", "^#[0-9a-fA-F]{6}$", "^(on|off)$"],
)
def test_text_fits_its_pattern(pattern):
    schema = {
        "type": "object",
        "properties": {"value": {"type": "string", "pattern": pattern}},
        "required": ["value"],
    }
    drawn = [draw_arguments(schema, random.Random(seed), "gate") for seed in range(40)]
    assert all(re.search(pattern, row["value"]) and mismatch(row, schema) is None for row in drawn)
    assert (
        drawn[0] == draw_arguments(schema, random.Random(0), "gate")
        and len({row["value"] for row in drawn}) > 1
    )


def test_examples_are_used_and_an_invalid_pattern_is_one_line():
    schema = {
        "type": "object",
        "properties": {"v": {"type": "string", "examples": ["x-1", "x-2"]}},
        "required": ["v"],
    }
    assert {draw_arguments(schema, random.Random(seed), "gate")["v"] for seed in range(20)} == {
        "x-1",
        "x-2",
    }
    schema["properties"]["v"] = {"type": "string", "pattern": "("}
    with pytest.raises(NoValue, match="not valid"):
        draw_arguments(schema, random.Random(0), "gate")
