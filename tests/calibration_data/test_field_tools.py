"""Tools as MCP servers, Gemini and schema generators write them: the right parameters, or one line that names the tool."""

from __future__ import annotations

import json

import pytest

from annie_quant.cli.data import read_tools
from annie_quant.core.errors import UsageError
from annie_quant.core.json_schema import mismatch
from annie_quant.data.init_folder import Sources, initialize
from annie_quant.data.tool_forms import tools_of
from annie_quant.documents.persona import load_persona

PARCEL = {
    "type": "object",
    "properties": {"parcel": {"type": "string"}, "express": {"type": "boolean"}},
    "required": ["parcel"],
}
MCP = {
    "name": "ship",
    "title": "Ship",
    "description": "Ships.",
    "inputSchema": PARCEL,
    "annotations": {"readOnlyHint": False},
}
OPENAI = {
    "type": "function",
    "function": {"name": "ship", "description": "Ships.", "parameters": PARCEL},
}
GEMINI = {
    "functionDeclarations": [
        {
            "name": "ship",
            "description": "Ships.",
            "parameters": {
                "type": "OBJECT",
                "required": ["parcel"],
                "properties": {
                    "parcel": {"type": "STRING"},
                    "count": {"type": "INTEGER", "nullable": True},
                    "tags": {"type": "ARRAY", "items": {"type": "STRING"}},
                },
            },
        }
    ]
}
DRAFT_7 = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "additionalProperties": False,
    "required": ["point"],
    "properties": {
        "point": {
            "type": "array",
            "items": [{"type": "number"}, {"type": "number"}],
            "minItems": 2,
            "maxItems": 2,
        }
    },
}


@pytest.mark.parametrize(
    "raw",
    [
        {"tools": [MCP]},
        [MCP],
        {"jsonrpc": "2.0", "id": 2, "result": {"tools": [MCP]}},
        [{"name": "ship", "description": "Ships.", "input_schema": PARCEL}],
        [
            {
                "type": "function",
                "name": "ship",
                "description": "Ships.",
                "parameters": PARCEL,
                "strict": True,
            }
        ],
        {"functions": [OPENAI["function"]]},
        {
            "functionDeclarations": [
                {"name": "ship", "description": "Ships.", "parametersJsonSchema": PARCEL}
            ]
        },
    ],
)
def test_each_form_has_the_same_parameters(raw):
    assert tools_of(raw) == ([OPENAI], [])


def test_types_of_gemini_are_json_schemas(tmp_path):
    (tool,), faults = tools_of([GEMINI])
    parameters = tool["function"]["parameters"]
    assert not faults and parameters["properties"]["count"] == {"type": ["integer", "null"]}
    assert mismatch({"parcel": "7", "count": None, "tags": ["a"]}, parameters) is None
    assert mismatch({"parcel": 7}, parameters) and mismatch(
        {"parcel": "7", "tags": [1]}, parameters
    )


@pytest.mark.parametrize(
    ("tool", "fault"),
    [
        ({"name": "ship", "argumentsSchema": PARCEL}, "tool ship: unknown field 'argumentsSchema'"),
        (
            {"name": "ship", "parameters": PARCEL, "inputSchema": {}},
            "tool ship: parameters and inputSchema",
        ),
        ({"name": "ship", "parameters": [PARCEL]}, "tool ship: its parameters are not an object"),
        (
            {"name": "ship", "parameters": {"type": "any"}},
            "tool ship: its parameters are not a JSON schema",
        ),
        ({"type": "web_search"}, "a tool of type 'web_search' without a name"),
    ],
)
def test_a_tool_outside_the_grammar_is_named_and_the_others_are_read(tmp_path, tool, fault):
    tools, faults = tools_of([OPENAI, tool])
    assert tools == [OPENAI] and len(faults) == 1 and faults[0].startswith(fault)
    (tmp_path / "t.json").write_text(json.dumps([OPENAI, tool]))
    with pytest.raises(UsageError) as error:
        read_tools(tmp_path / "t.json")
    assert fault in error.value.message and "\n" not in error.value.message


def log_of(path, tool, arguments, n=8):
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": tool["function"]["name"], "arguments": json.dumps(arguments)},
    }
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"Move the arm to {i}, 7."},
                {"role": "assistant", "content": None, "tool_calls": [call]},
            ],
            "tools": [tool, OPENAI],
        }
        for i in range(n)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_draft_7_tool_in_logs(tmp_path):
    tool = {"type": "function", "function": {"name": "move_to", "parameters": DRAFT_7}}
    log = log_of(tmp_path / "l.jsonl", tool, {"point": [3, 7]})
    result = initialize(Sources("You move.", logs=[log]), tmp_path / "out")
    assert [t["function"]["name"] for t in load_persona(tmp_path / "out").tools] == [
        "move_to",
        "ship",
    ]
    assert result.calibration_rows > 0 and result.cases["calls"] > 0
    assert mismatch({"point": [3, 7]}, DRAFT_7) is None and mismatch({"point": ["a", 7]}, DRAFT_7)


def test_a_tool_with_an_invalid_schema_does_not_stop_the_log(tmp_path):
    tool = {"type": "function", "function": {"name": "move_to", "parameters": {"type": "any"}}}
    log = log_of(tmp_path / "l.jsonl", tool, {"point": [3, 7]})
    other = {
        "messages": [
            {"role": "user", "content": "Hello."},
            {"role": "assistant", "content": "Hi."},
        ],
        "tools": [OPENAI],
    }
    log.write_text(log.read_text() + json.dumps(other) + "\n")
    result = initialize(Sources("You move.", logs=[log]), tmp_path / "out")
    assert [t["function"]["name"] for t in load_persona(tmp_path / "out").tools] == ["ship"]
    assert any(
        line.startswith("left out: 8 tools (tool move_to: its parameters are not")
        for line in result.lines
    )
    assert any("calls move_to" in line or "call move_to" in line for line in result.lines)
