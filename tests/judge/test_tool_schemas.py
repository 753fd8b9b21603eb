"""Calls are valid where the library jsonschema says so, by the schema's own draft; NaN is not JSON, true is not 1."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from annie_quant.core.json_schema import mismatch, schema_fault
from annie_quant.data.row_rules import form_faults
from annie_quant.documents import Answer
from annie_quant.judge.answers import parse_raw
from annie_quant.judge.gates import GATES
from annie_quant.judge.library import build_workload

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
PROPERTIES = {"room": {"type": "string"}, "level": {"type": "integer", "maximum": 9}}


def workload_of(schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return build_workload(
        {
            "name": "w",
            "max_tokens": 50,
            "tools": [tool],
            "gates": ["tool_schema", "tool_call", "same_validity"],
            "cases": [
                {
                    "id": "a",
                    "messages": [{"role": "user", "content": "go"}],
                    "expect": {"tool": "f", "calls": [{"f": {}}]},
                }
            ],
        }
    )


def call(arguments, text=None):
    given = json.dumps(arguments) if text is None else text
    return Answer(tool_calls=[{"id": "x", "name": "f", "arguments": given}], finish_reason="stop")


def valid_by_gate(arguments, schema):
    """Whether a call passes, by gate, and as a row of calibration data."""
    workload = workload_of(schema)
    answer = call(arguments)
    results = {}
    for gate in ("tool_schema", "tool_call"):
        results[gate] = GATES[gate].check(answer, workload.cases[0], workload, None) == ""
    # Where bf16's own call is valid, same_validity judges the other's.
    results["same_validity"] = (
        GATES["same_validity"].check(answer, workload.cases[0], workload, answer) == ""
    )
    function = {"name": "f", "arguments": json.dumps(arguments)}
    row = {
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        ],
        "tools": workload.tools,
    }
    results["row"] = not [f for f in form_faults(row) if "schema" in f]
    return results


SCHEMAS = st.fixed_dictionaries(
    {
        "type": st.just("object"),
        "additionalProperties": st.sampled_from([True, False, {}, {"type": "integer"}]),
    },
    optional={
        "properties": st.just(PROPERTIES),
        "patternProperties": st.just({"^x-": {"type": "string"}}),
        "required": st.sampled_from([[], ["room"]]),
        "minProperties": st.integers(0, 2),
        "$schema": st.sampled_from([DRAFT_7, "https://json-schema.org/draft/2020-12/schema"]),
    },
)
VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 12), st.sampled_from(["", "hall"]))
ARGUMENTS = st.dictionaries(st.sampled_from(["room", "level", "x-a", "other"]), VALUES, max_size=4)


@given(SCHEMAS, ARGUMENTS)
def test_a_call_is_valid_where_jsonschema_says_so(schema, arguments):
    library = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    expected = library(schema).is_valid(arguments)
    assert set(valid_by_gate(arguments, schema).values()) == {expected}


@pytest.mark.parametrize(
    ("schema", "arguments", "valid"),
    [
        ({"properties": PROPERTIES}, {"colour": "red"}, False),
        ({"properties": PROPERTIES, "additionalProperties": {}}, {"colour": "red"}, True),
        ({"properties": PROPERTIES, "patternProperties": {"^c": {}}}, {"colour": "red"}, True),
        ({"properties": PROPERTIES, "patternProperties": {"^c": {}}}, {"other": "red"}, False),
        ({"properties": {}}, {"colour": "red"}, False),
        ({}, {"colour": "red"}, True),
        ({"properties": {}, "allOf": [{"properties": PROPERTIES}]}, {"room": "hall"}, True),
        ({"properties": {"n": {"enum": [1]}}}, {"n": True}, False),
        ({"properties": {"n": {"const": 1}}}, {"n": 1.0}, True),
    ],
)
def test_unknown_arguments_are_valid_only_where_the_schema_speaks_of_them(schema, arguments, valid):
    assert set(valid_by_gate(arguments, {"type": "object", **schema}).values()) == {valid}


@pytest.mark.parametrize("stated", [{}, {"$schema": DRAFT_7}])
def test_tuples_of_draft_7(stated):
    pair = {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}
    schema = {"type": "object", "properties": {"p": pair}, **stated}
    assert not schema_fault(schema)
    assert set(valid_by_gate({"p": [1, "a"]}, schema).values()) == {True}
    assert set(valid_by_gate({"p": ["a", 1]}, schema).values()) == {False}
    assert mismatch({"p": ["a", 1]}, schema).startswith("at p.0: ")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_nan_is_not_json(number):
    schema = {"type": "object", "properties": {"level": {"type": "number"}}}
    workload = workload_of(schema)
    answer = call({}, f'{{"level": {number}}}')
    fault = GATES["tool_schema"].check(answer, workload.cases[0], workload, None)
    assert "not JSON" in fault
    hermes = f'<tool_call>{{"name": "f", "arguments": {{"level": {number}}}}}</tool_call>'
    assert parse_raw(hermes, False, workload.tools, form="hermes").tool_calls == []
    llama = f'{{"name": "f", "parameters": {{"level": {number}}}}}'
    assert parse_raw(llama, False, workload.tools, form="llama_json").tool_calls == []
    xml = f"<tool_call><function=f><parameter=level>{number}</parameter></function></tool_call>"
    [parsed] = parse_raw(xml, False, workload.tools).tool_calls
    assert json.loads(parsed["arguments"]) == {"level": number}


def test_true_is_not_the_argument_1():
    workload = workload_of({"type": "object", "properties": {"level": {}}})
    for expected, value, passes in (
        (1, 1, True),
        (1, True, False),
        (True, 1, False),
        (1, 1.0, True),
    ):
        case = replace(workload.cases[0], expect={"tool": "f", "arguments": {"level": expected}})
        fault = GATES["tool_arguments"].check(call({"level": value}), case, workload, None)
        assert (fault == "") is passes
    both = structs.replace(
        call({}), tool_calls=[*call({"level": 1}).tool_calls, *call({"level": True}).tool_calls]
    )
    assert GATES["tool_call"].check(both, workload.cases[0], workload, None) == ""
    twice = structs.replace(
        both, tool_calls=[*call({"level": 1}).tool_calls, *call({"level": 1.0}).tool_calls]
    )
    assert "twice" in GATES["tool_call"].check(twice, workload.cases[0], workload, None)
