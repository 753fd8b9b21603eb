"""The conversations with tools that the lint of a chat template renders (template_lint.py)."""

from __future__ import annotations

import json

from annie_quant.core.untrusted import JsonObject

PROPERTIES: JsonObject = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "ratio": {"type": "number"},
    "metric": {"type": "boolean"},
    "limit": {"type": ["integer", "null"]},
    "where": {"type": "object"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "unit": {"type": "string"},
}
TOOL_NAME = "find_weather_records"
TOOLS: list[JsonObject] = [
    {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "Finds records.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
]
_SYSTEM: JsonObject = {"role": "system", "content": "You are brief."}
QUESTION: JsonObject = {"role": "user", "content": "Is it raining in Oslo?"}
NEXT_QUESTION: JsonObject = {"role": "user", "content": "And tomorrow?"}
ANSWER: JsonObject = {"role": "assistant", "content": "It rains in Oslo."}
START = [_SYSTEM, QUESTION]
# Nine characters: Mistral's templates refuse other ids, which is one of the checks.
IDS = ("abcdefg01", "abcdefg02")
OPENAI_ID = "call_0123456789abcdef01234567"
TEXT_WITH_CALL = "I look that up."
_THOUGHT = "The user asks about Oslo."
RESULTS = ("RESULT-ONE", "RESULT-TWO")
LATER_SYSTEM = "LATER-SYSTEM-MESSAGE"
DEVELOPER = "DEVELOPER-MESSAGE"
PLAIN_ARGUMENTS: JsonObject = {"city": "Oslo", "days": 3}
# Arguments of one call per question; each is read back and compared.
ARGUMENTS: dict[str, JsonObject] = {
    "call": PLAIN_ARGUMENTS,
    "call_with_null": {"city": "Oslo", "limit": None},
    "call_with_boolean": {"city": "Oslo", "metric": True},
    "call_with_nested_values": {
        "city": "Oslo",
        "where": {"zone": 2, "area": {"size": 1.5, "open": False}},
        "tags": ["a", "b"],
        "ratio": 0.5,
    },
    "call_with_text": {"city": '  two lines:\n  <b> & "quoted" é \\ end'},
    "call_with_number_as_text": {"city": "42"},
    "call_in_order": {"unit": "C", "days": 3, "city": "Oslo"},
}
END_TAG = "a</parameter>b"
# Control tokens of the usual templates, as a tool's result could have them.
CONTROL_TOKENS = (
    "x<|im_end|><|eot_id|><|eom_id|><end_of_turn><turn|><|end|><|return|></s><|end_of_text|>y"
)


def _call(arguments: object, call_id: str = IDS[0]) -> JsonObject:
    function = {"name": TOOL_NAME, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _calling(*calls: JsonObject, content: object = "", **fields: object) -> JsonObject:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}


def _result(content: object, call_id: str = IDS[0]) -> JsonObject:
    return {"role": "tool", "name": TOOL_NAME, "tool_call_id": call_id, "content": content}


def conversations() -> dict[str, JsonObject]:
    """Return the variables of each conversation by its name."""
    call = _call(PLAIN_ARGUMENTS)
    second = _call({"city": "Rome", "days": 1}, IDS[1])
    one_result = [*START, _calling(call), _result(RESULTS[0])]
    thinking_call = _calling(call, reasoning_content=_THOUGHT)
    thinking_answer = {**ANSWER, "reasoning_content": _THOUGHT}
    messages: dict[str, list[JsonObject]] = {
        "start": START,
        "answer": [*START, ANSWER],
        **{name: [*START, _calling(_call(values))] for name, values in ARGUMENTS.items()},
        "end_tag": [*START, _calling(_call({"city": END_TAG, "unit": "C"}))],
        "arguments_as_text": [*START, _calling(_call(json.dumps(PLAIN_ARGUMENTS)))],
        "null_content": [*START, _calling(call, content=None)],
        "text_with_call": [*START, _calling(call, content=TEXT_WITH_CALL)],
        "two_calls": [*START, _calling(call, second)],
        "openai_id": [*START, _calling(_call(PLAIN_ARGUMENTS, OPENAI_ID)), _result("x", OPENAI_ID)],
    }
    prompts: dict[str, list[JsonObject]] = {
        "prompt": START,
        "result": one_result,
        "two_results": [
            *START,
            _calling(call, second),
            _result(RESULTS[0]),
            _result(RESULTS[1], IDS[1]),
        ],
        "result_parts": [*one_result[:-1], _result([{"type": "text", "text": RESULTS[0]}])],
        "result_with_control_tokens": [*one_result[:-1], _result(CONTROL_TOKENS)],
        "two questions": [*START, NEXT_QUESTION],
        "later system": [
            *START,
            ANSWER,
            {"role": "system", "content": LATER_SYSTEM},
            NEXT_QUESTION,
        ],
        "developer": [{"role": "developer", "content": DEVELOPER}, QUESTION],
        "no question": [_SYSTEM],
        "after_answer": [*START, thinking_answer, NEXT_QUESTION],
        "after_call": [*START, thinking_call, _result(RESULTS[0])],
        "after_result": [
            *START,
            thinking_call,
            _result(RESULTS[0]),
            thinking_answer,
            NEXT_QUESTION,
        ],
    }
    result: dict[str, JsonObject] = {}
    for name, rows in messages.items():
        result[name] = {"messages": rows, "tools": TOOLS, "add_generation_prompt": False}
    for name, rows in prompts.items():
        result[name] = {"messages": rows, "tools": TOOLS, "add_generation_prompt": True}
    result["thinking_on"] = {**result["prompt"], "enable_thinking": True}
    result["thinking_off"] = {**result["prompt"], "enable_thinking": False}
    return result
