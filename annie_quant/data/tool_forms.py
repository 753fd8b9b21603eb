"""The closed grammar of tools: OpenAI's, Anthropic's, MCP's and Gemini's definitions, as OpenAI's function tools.

OpenAI     {"type": "function", "function": {"name", "description", "parameters"}}, or the function alone
Anthropic  {"name", "description", "input_schema"}
MCP        {"name", "description", "inputSchema"}; a list of them, or the answer of tools/list
Gemini     {"functionDeclarations": [{"name", "description", "parameters"}]}, types in upper case
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from annie_quant.core.json_schema import schema_fault
from annie_quant.core.untrusted import JsonObject, decode_json
from annie_quant.data.conversations import LoggedTool, Unusable, names

LISTS = ("tools", "functions", "functionDeclarations", "function_declarations")
SCHEMA_FIELDS = ("parameters", "input_schema", "inputSchema", "parametersJsonSchema")
METADATA = names(
    "type strict title annotations outputSchema output_schema icons execution _meta cache_control "
    "defer_loading allowed_callers input_examples eager_input_streaming response "
    "responseJsonSchema behavior"
)
GEMINI_TYPES = {
    name.upper(): name
    for name in ("object", "string", "integer", "number", "boolean", "array", "null")
}


def tools_of(raw: object) -> tuple[list[LoggedTool], list[str]]:
    """Return the tools of a value in OpenAI's form, and why others cannot be read, one reason each."""
    tools: list[LoggedTool] = []
    faults = []
    for item in _definitions(raw):
        try:
            tool = _tool(item)
        except Unusable as reason:
            faults.append(str(reason))
            continue
        name = tool["function"]["name"]
        same = [other for other in tools if other["function"]["name"] == name]
        if same == [tool]:
            continue
        if same:
            faults.append(f"it defines the tool {name} twice, in two ways")
        else:
            tools.append(tool)
    return tools, faults


def _definitions(raw: object, depth: int = 0) -> Iterator[object]:
    """Yield the definitions in a list, in an object that has such a list, or in the JSON text of one."""
    if isinstance(raw, str):
        raw = _decoded(raw)
    if raw is None:
        return
    if isinstance(raw, list) and depth < 4:
        for item in raw:
            yield from _definitions(item, depth + 1)
        return
    if isinstance(raw, Mapping) and "name" not in raw and depth < 4:
        result = raw.get("result")
        holder = result if isinstance(result, Mapping) and "jsonrpc" in raw else raw
        lists = [holder[name] for name in LISTS if isinstance(holder.get(name), list)]
        if lists:
            yield from _definitions(lists, depth + 1)
            return
    yield raw


def _decoded(text: str) -> object:
    """Return the value of JSON text, or the list of its lines, as Hermes' system prompts have them."""
    try:
        return decode_json(text)
    except ValueError:
        lines = [line for line in text.splitlines() if line.strip()]
    try:
        return [decode_json(line) for line in lines]
    except ValueError:
        return [text]


def _tool(item: object) -> LoggedTool:
    if not isinstance(item, Mapping):
        raise Unusable("a tool that is not an object")
    nested = item.get("function")
    function: Mapping[str, Any] = nested if isinstance(nested, Mapping) else item
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise Unusable(f"a tool of type {str(item.get('type'))[:40]!r} without a name")
    kinds = {str(item.get("type", "function")), str(function.get("type", "function"))}
    if kinds - {"function", "custom"}:
        raise Unusable(
            f"tool {name[:40]}: unknown type {max(kinds - {'function', 'custom'})[:40]!r}"
        )
    known = METADATA | {"name", "description", *SCHEMA_FIELDS}
    fields = function.keys() | (item.keys() - {"function"})
    unknown = sorted(map(str, fields - known))
    if unknown:
        raise Unusable(f"tool {name}: unknown field {unknown[0][:40]!r}")
    definition: JsonObject = {"name": name}
    description = function.get("description")
    if description is not None:
        if not isinstance(description, str):
            raise Unusable(f"tool {name}: its description is not text")
        definition["description"] = description
    schemas = [field for field in SCHEMA_FIELDS if item.get(field) is not None and nested]
    schemas += [field for field in SCHEMA_FIELDS if function.get(field) is not None]
    if len(schemas) > 1:
        raise Unusable(f"tool {name}: {schemas[0]} and {schemas[1]}")
    if schemas:
        definition["parameters"] = _parameters(name, function[schemas[0]])
    return {"type": "function", "function": definition}


def _parameters(name: str, schema: object) -> JsonObject:
    if not isinstance(schema, dict):
        raise Unusable(f"tool {name}: its parameters are not an object")
    if str(schema.get("type")) in GEMINI_TYPES:
        schema = _json_schema(schema)
    fault = _fault(json.dumps(schema))
    if fault:
        raise Unusable(f"tool {name}: its parameters are not a JSON schema: {fault}")
    return schema


@lru_cache(maxsize=1024)
def _fault(schema: str) -> str:
    return schema_fault(json.loads(schema))


def _json_schema(schema: JsonObject) -> JsonObject:
    """Return a schema of Gemini's form as JSON schema: types in lower case, `nullable` as a type."""
    result = {key: value for key, value in schema.items() if key != "nullable"}
    if isinstance(schema.get("properties"), dict):
        properties = schema["properties"].items()
        result["properties"] = {key: _nested_schema(value) for key, value in properties}
    if "items" in schema:
        result["items"] = _nested_schema(schema["items"])
    if isinstance(schema.get("anyOf"), list):
        result["anyOf"] = [_nested_schema(item) for item in schema["anyOf"]]
    kind = GEMINI_TYPES.get(str(schema.get("type")))
    if kind is not None:
        result["type"] = [kind, "null"] if schema.get("nullable") is True else kind
    return result


def _nested_schema(schema: object) -> object:
    return _json_schema(schema) if isinstance(schema, dict) else schema
