"""Drawn arguments, labels and rows fit their own schema, with the library jsonschema as judge, over random schemas."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from annie_quant.data.schema_values import NoValue, draw_arguments
from annie_quant.data.teachers.offline import Offline
from annie_quant.data.workloads import gate_documents
from annie_quant.documents.persona import Category, Persona

KEYS = [
    "date", "start_date", "end_date", "time", "in_unit_laundry", "min_price", "max_price", "unit", "value", "phone", "note",
    "from", "to", "email", "guests", "tags", "address", "id", "available", "temperature", "range", "name",
]  # fmt: skip
ENUMS = [
    ["True", "False"],
    ["yes", "no", None],
    [1, 2, 3],
    ["celsius", "fahrenheit"],
    [True],
    ["a b", "c"],
    [0.5, "x"],
]
STRINGS = [
    {}, {"format": "date"}, {"format": "date-time"}, {"format": "time"}, {"format": "email"}, {"format": "uuid"},
    {"minLength": 20}, {"maxLength": 4}, {"pattern": "^[A-Z]{2}-[0-9]{3}$"}, {"description": "e.g. K-17"},
    {"description": "DD.MM.YYYY"}, {"pattern": r"^\d{2}\.\d{2}\.\d{4}$"}, {"minLength": 3, "maxLength": 9}, {"examples": ["q"]},
]  # fmt: skip
NUMBERS = [
    {}, {"minimum": 5}, {"maximum": -3}, {"minimum": 0, "maximum": 1}, {"exclusiveMinimum": 4, "exclusiveMaximum": 9},
    {"minimum": 100, "maximum": 900, "multipleOf": 25},
]  # fmt: skip


def schema_of(rng, depth=0):
    """Return a random schema that some value fits."""
    kind = rng.choice(
        ["string"] * 3
        + ["integer", "number", "boolean", "enum", "const", "array", "object", "any", "null or"]
    )
    if depth > 2 and kind in ("array", "object"):
        kind = "string"
    if kind == "enum":
        return {"enum": rng.choice(ENUMS), **rng.choice([{}, {"description": "true or false"}])}
    if kind == "const":
        return {"const": rng.choice(["x", 7, True])}
    if kind == "string":
        return {"type": "string", **rng.choice(STRINGS)}
    if kind == "integer":
        return {"type": "integer", **rng.choice(NUMBERS)}
    if kind == "number":
        return {
            "type": "number",
            **rng.choice([*NUMBERS, {"multipleOf": 0.1}, {"minimum": 0, "multipleOf": 0.01}]),
        }
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "array":
        items = {"type": "array", "items": schema_of(rng, depth + 1)}
        return {**items, **rng.choice([{}, {"minItems": 2}, {"minItems": 1, "maxItems": 1}])}
    if kind == "object":
        return object_schema(rng, depth + 1)
    if kind == "any":
        return {
            rng.choice(["anyOf", "oneOf"]): [{"type": "string"}, {"type": "integer", "minimum": 1}]
        }
    return {"type": [rng.choice(["string", "number"]), "null"]}


def object_schema(rng, depth=0):
    keys = rng.sample(KEYS, rng.randint(1, 5))
    properties = {key: schema_of(rng, depth) for key in keys}
    required = [key for key in keys if rng.random() < 0.6]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def judge_of(schema):
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("block", range(8))
def test_arguments_fit_any_schema(block):
    n_drawn = 0
    for seed in range(60):
        rng = random.Random(f"{block}/{seed}")
        schema = object_schema(rng)
        try:
            arguments = draw_arguments(schema, rng, "gate")
        except NoValue:
            continue
        n_drawn += 1
        decoded = json.loads(json.dumps(arguments))
        assert not list(judge_of(schema).iter_errors(decoded)), (schema, arguments)
    assert n_drawn >= 57


def tool_of(schema):
    return {
        "type": "function",
        "function": {"name": "find", "description": "Find a flat.", "parameters": schema},
    }


def plain(value):
    """Return the arguments that a label names; its lists are alternatives."""
    return {key: item[0] if isinstance(item, list) else item for key, item in value.items()}


@pytest.mark.parametrize("block", range(4))
def test_labels_and_rows_fit_their_schema(block):
    n_labels = 0
    for seed in range(12):
        schema = object_schema(random.Random(f"labels/{block}/{seed}"))
        persona = Persona(name="P", system_prompt="You help.", tools=(tool_of(schema),))
        judge = judge_of(schema)
        try:
            document = next(gate_documents(persona, 6))
            rows = list(Offline().conversations(persona, Category("find", tool="find"), 6, "0"))
        except Exception as error:
            assert "draws no arguments" in str(error)
            continue
        for case in document.cases:
            n_labels += 1
            assert not list(judge.iter_errors(plain(case.expect["arguments"]))), (
                schema,
                case.expect,
            )
        for row in rows:
            for message in row["messages"]:
                for call in message.get("tool_calls", ()):
                    arguments = json.loads(call["function"]["arguments"])
                    assert not list(judge.iter_errors(arguments)), (schema, arguments)
    assert n_labels >= 30


def test_a_flag_that_the_schema_lists_as_text_is_text():
    """Its label was True, and the schema has the strings "True" and "False"."""
    schema = {
        "type": "object",
        "properties": {"in_unit_laundry": {"enum": ["True", "False"], "description": "boolean"}},
        "required": ["in_unit_laundry"],
    }
    drawn = {draw_arguments(schema, random.Random(i), "gate")["in_unit_laundry"] for i in range(20)}
    assert drawn == {"True", "False"}
    schema["properties"]["in_unit_laundry"]["type"] = "boolean"  # fits nothing: no label at all
    with pytest.raises(NoValue):
        draw_arguments(schema, random.Random(0), "gate")


@pytest.mark.parametrize(
    "limits", [{"minimum": "5"}, {"multipleOf": "x"}, {"minimum": 1e400}, {"maximum": [1]}]
)
def test_limits_that_are_not_numbers_give_no_value(limits):
    schema = {
        "type": "object",
        "properties": {"price": {"type": "number", **limits}},
        "required": ["price"],
    }
    with pytest.raises(NoValue):
        draw_arguments(schema, random.Random(0), "gate")
