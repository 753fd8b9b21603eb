"""Logs as other programs write them, from public reports: each is the right conversation, or is named in one line.

The expected conversations are the reports', not what the reader gives.
"""

from __future__ import annotations

import json

import pytest
from otlp import export, span

from annie_quant.core.errors import UsageError
from annie_quant.data.init_folder import Sources, initialize
from annie_quant.data.logs import Problems, read_logs
from annie_quant.data.rows import place_of, read_rows
from annie_quant.documents.persona import load_persona


def write(path, *rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def read(path, *rows):
    """Return the conversations of a log with these rows, each as (role, text, [name(arguments)]), and what was left out."""
    problems = Problems()
    conversations = list(read_logs([write(path, *rows)], problems))
    return [shape(c) for c in conversations], list(problems.lines()), conversations


def shape(conversation):
    return [
        (
            m["role"],
            m["content"],
            *[
                f"{c['function']['name']}({list(c['function']['arguments'].values())})"
                for c in m.get("tool_calls", ())
            ],
        )
        for m in conversation.messages
    ]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, *calls):
    message = {"role": "assistant", "content": text}
    return {**message, "tool_calls": list(calls)} if calls else message


def call(name, arguments, identity=None):
    function = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"id": identity, **function} if identity else function


# ---- Claude Code's sessions


def event(uuid, parent, kind, content, identity=None, **more):
    message = {"role": kind, "content": content}
    if identity:
        message |= {"id": identity, "type": "message", "model": "x", "stop_reason": None}
    return {
        "type": kind,
        "uuid": uuid,
        "parentUuid": parent,
        "sessionId": "s",
        "message": message,
        **more,
    }


def says(text):
    return [{"type": "text", "text": text}]


def use(identity, name, **arguments):
    return [{"type": "tool_use", "id": identity, "name": name, "input": arguments}]


def result(identity, text):
    return [{"type": "tool_result", "tool_use_id": identity, "content": text}]


SPLIT = [
    event("1", None, "user", "Compare shelf 3 with shelf 4."),
    event("2", "1", "assistant", [{"type": "thinking", "thinking": "Two look-ups."}], "m1"),
    event("3", "2", "assistant", says("I look at both."), "m1"),
    event("4", "3", "assistant", use("a", "list_shelf", shelf=3), "m1"),
    event("5", "4", "assistant", use("b", "list_shelf", shelf=4), "m1"),
    event("6", "4", "user", result("a", "tea")),
    event("7", "5", "user", result("b", "salt")),
    event("8", "7", "assistant", says("Tea, salt."), "m2"),
]
COMPARED = [
    ("user", "Compare shelf 3 with shelf 4."),
    ("assistant", "I look at both.", "list_shelf([3])", "list_shelf([4])"),
    ("tool", "tea"),
    ("tool", "salt"),
    ("assistant", "Tea, salt."),
]


def test_rows_of_one_message_are_one_message(tmp_path):
    summary = {"type": "summary", "summary": "Stock", "leafUuid": "8"}
    shapes, left_out, (conversation,) = read(tmp_path / "s.jsonl", summary, *SPLIT)
    assert shapes == [COMPARED]
    assert left_out == ["1 row (unknown type 'summary', first in s.jsonl, line 1)"]
    assert conversation.messages[1]["reasoning_content"] == "Two look-ups."
    calls = conversation.messages[1]["tool_calls"]
    assert [m["tool_call_id"] for m in conversation.messages[2:4]] == [c["id"] for c in calls]


def test_rows_without_ids_of_messages_are_merged_where_nothing_is_between(tmp_path):
    rows = json.loads(json.dumps(SPLIT))
    for row in rows:
        row["message"].pop("id", None)
    assert read(tmp_path / "s.jsonl", *rows)[0] == [COMPARED]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["l.json", "l.jsonl"])
def test_a_list_of_rows_as_one_json_document(tmp_path, name, indent):
    chat = {"messages": [user("Oslo?"), assistant("3")]}
    (tmp_path / name).write_text(json.dumps([chat, chat], indent=indent))
    expected = [("user", "Oslo?"), ("assistant", "3")]
    assert [shape(c) for c in read_logs([tmp_path / name])] == [expected] * 2


def test_a_result_between_the_rows_of_a_message(tmp_path):
    order = [0, 1, 2, 3, 5, 4, 6, 7]
    assert read(tmp_path / "s.jsonl", *[SPLIT[i] for i in order])[0] == [COMPARED]


def test_the_gate_prompt_of_split_rows_has_both_calls(tmp_path):
    for name in ("cellar", "attic", "garage", "pantry", "barn", "kitchen"):
        rows = json.dumps(SPLIT).replace(
            "Compare shelf 3 with", f"In the {name}, compare the {name}'s shelf 3 and"
        )
        write(tmp_path / f"{name}.jsonl", *json.loads(rows))
    initialize(Sources("You keep a store room.", logs=[tmp_path]), tmp_path.parent / "out")
    calls = json.loads((tmp_path.parent / "out/workloads/calls_thinking.json").read_text())
    labels = [case["expect"]["logged"]["calls"] for case in calls["cases"]]
    assert labels and all(label == ["list_shelf", "list_shelf"] for label in labels)


@pytest.mark.parametrize(
    ("rows", "expected", "reason"),
    [
        (
            [
                event("x", "8", "user", "You are a search agent.", isSidechain=True),
                event("y", "x", "assistant", says("Found."), "m9", isSidechain=True),
            ],
            COMPARED,
            "2 rows (a side chain",
        ),
        (
            [event("x", "8", "user", "Caveat: local commands", isMeta=True)],
            COMPARED,
            "Claude Code's own message",
        ),
        (
            [event("x", "8", "assistant", says("API Error: 529"), "m9", isApiErrorMessage=True)],
            COMPARED,
            "an error in place of an answer",
        ),
        (
            [
                event("x", "8", "user", [{"type": "image", "source": {}}]),
                event("y", "x", "assistant", "A cat.", "m9"),
            ],
            COMPARED,
            "1 row (an image",
        ),
        (
            [
                {"type": "system", "uuid": "x", "parentUuid": "8", "subtype": "turn_duration"},
                event("y", "x", "user", "Thanks."),
                event("z", "y", "assistant", "Welcome.", "m3"),
            ],
            [*COMPARED, ("user", "Thanks."), ("assistant", "Welcome.")],
            "unknown type 'system'",
        ),
        (
            [
                event("9", "8", "user", "No."),
                event("10", "9", "assistant", "Sorry.", "m3"),
                event("11", "8", "user", "Thanks."),
                event("12", "11", "assistant", "Welcome.", "m4"),
            ],
            [*COMPARED, ("user", "Thanks."), ("assistant", "Welcome.")],
            "2 messages (on a branch that the user left",
        ),
    ],
)
def test_other_rows_of_a_session(tmp_path, rows, expected, reason):
    shapes, left_out, _ = read(tmp_path / "s.jsonl", *SPLIT, *rows)
    assert shapes == [expected] and any(reason in line for line in left_out)


def test_a_compacted_session_is_two_conversations(tmp_path):
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "b", "parentUuid": None}
    rows = [
        *SPLIT,
        boundary,
        event("c", "b", "user", "The story so far", isCompactSummary=True),
        event("d", "c", "assistant", "Go on.", "m7"),
    ]
    expected = [("user", "The story so far"), ("assistant", "Go on.")]
    assert read(tmp_path / "s.jsonl", *rows)[0] == [COMPARED, expected]


# ---- Codex' rollouts and the Responses API


def item(kind, **payload):
    return {"timestamp": "t", "type": "response_item", "payload": {"type": kind, **payload}}


ROLLOUT = [
    {
        "timestamp": "t",
        "type": "session_meta",
        "payload": {"id": "0", "base_instructions": {"text": "You keep a store room."}},
    },
    item("message", role="user", content=[{"type": "input_text", "text": "What is on shelf 3?"}]),
    {
        "timestamp": "t",
        "type": "event_msg",
        "payload": {"type": "user_message", "message": "What is on shelf 3?"},
    },
    item(
        "reasoning",
        summary=[{"type": "summary_text", "text": "Look it up."}],
        content=None,
        encrypted_content="gAAA",
    ),
    item("function_call", name="list_shelf", arguments='{"shelf":3}', call_id="c"),
    item("function_call_output", call_id="c", output="tea"),
    item("message", role="assistant", content=[{"type": "output_text", "text": "Tea."}]),
]
ON_SHELF = [
    ("user", "What is on shelf 3?"),
    ("assistant", "", "list_shelf([3])"),
    ("tool", "tea"),
    ("assistant", "Tea."),
]


def test_a_codex_rollout(tmp_path):
    shapes, left_out, (conversation,) = read(tmp_path / "r.jsonl", *ROLLOUT)
    assert shapes == [ON_SHELF] and conversation.system == "You keep a store room."
    assert left_out == ["1 row (unknown type 'event_msg', first in r.jsonl, line 3)"]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([item("web_search_call", action={"query": "tea"})], "unknown item 'web_search_call'"),
        (
            [item("custom_tool_call", name="apply_patch", input="*** Begin", call_id="d")],
            "unknown item 'custom_tool_call'",
        ),
        ([{"type": "compacted", "payload": {"message": "MARK"}}], "unknown type 'compacted'"),
    ],
)
def test_a_rollout_ends_before_what_cannot_be_read(tmp_path, rows, reason):
    after = item("message", role="user", content=[{"type": "input_text", "text": "And now?"}])
    shapes, left_out, _ = read(tmp_path / "r.jsonl", *ROLLOUT, *rows, after)
    assert shapes == [ON_SHELF] and any(reason in line for line in left_out)
    assert any("after a row that cannot be read" in line for line in left_out)


def test_a_result_that_quotes_the_tags_of_results_is_read_as_it_is(tmp_path):
    text = "a <tool_response>b</tool_response> c <tool_response>d</tool_response>"
    rows = [*ROLLOUT[:-2], item("function_call_output", call_id="c", output=text), ROLLOUT[-1]]
    expected = [*ON_SHELF[:2], ("tool", text), ON_SHELF[3]]
    assert read(tmp_path / "r.jsonl", *rows)[0] == [expected]
    chat = [
        user("What is on shelf 3?"),
        assistant("", call("list_shelf", {"shelf": 3}, "c")),
        {"role": "tool", "tool_call_id": "c", "content": text},
        assistant("Tea."),
    ]
    assert read(tmp_path / "c.jsonl", {"messages": chat})[0] == [expected]


def test_parallel_calls_of_codex_are_one_message(tmp_path):
    calls = [
        item("function_call", name="list_shelf", arguments=f'{{"shelf":{n}}}', call_id=f"c{n}")
        for n in (3, 4)
    ]
    results = [item("function_call_output", call_id=f"c{n}", output=f"r{n}") for n in (4, 3)]
    ((_, answer, *_),), _, (conversation,) = read(
        tmp_path / "r.jsonl", *ROLLOUT[:2], *calls, *results
    )
    assert answer == ("assistant", "", "list_shelf([3])", "list_shelf([4])")
    by_id = {m["tool_call_id"]: m["content"] for m in conversation.messages[2:]}
    assert by_id == {"call_1": "r3", "call_2": "r4"}


RESPONSE = {
    "request": {
        "model": "x",
        "instructions": "You keep a store room.",
        "input": "What is on shelf 3?",
        "tools": [
            {
                "type": "function",
                "name": "list_shelf",
                "parameters": {"type": "object", "properties": {"shelf": {"type": "integer"}}},
            }
        ],
    },
    "response": {
        "object": "response",
        "status": "completed",
        "output": [
            {
                "type": "function_call",
                "id": "f",
                "call_id": "c",
                "name": "list_shelf",
                "arguments": '{"shelf": 3}',
            }
        ],
    },
}


def test_the_responses_api(tmp_path):
    shapes, left_out, (conversation,) = read(tmp_path / "l.jsonl", RESPONSE)
    assert shapes == [ON_SHELF[:2]] and not left_out
    assert conversation.system == "You keep a store room."
    assert conversation.tools[0]["function"]["name"] == "list_shelf"


@pytest.mark.parametrize(
    ("request_fields", "response_fields", "reason"),
    [
        ({"previous_response_id": "resp_0"}, {}, "continues a conversation"),
        ({}, {"status": "incomplete"}, "an answer that was cut"),
        ({}, {"output": [{"type": "computer_call"}]}, "unknown item 'computer_call'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": ""}]}]},
            {},
            "an image",
        ),
    ],
)
def test_a_response_that_is_not_whole_is_named(tmp_path, request_fields, response_fields, reason):
    row = {
        "request": {**RESPONSE["request"], **request_fields},
        "response": {**RESPONSE["response"], **response_fields},
    }
    shapes, left_out, _ = read(tmp_path / "l.jsonl", row, RESPONSE)
    assert shapes == [ON_SHELF[:2]] and len(left_out) == 1 and reason in left_out[0]


# ---- results and calls


def cities(*results, ids=(None, None)):
    calls = [call("weather", {"city": c}, i) for c, i in zip(("Oslo", "Rome"), ids, strict=True)]
    messages = [user("Oslo and Rome?"), assistant("", *calls), *results, assistant("3 and 21.")]
    return {"messages": messages}


def tool(text, **fields):
    return {"role": "tool", "content": text, **fields}


@pytest.mark.parametrize(
    "row",
    [
        cities(tool("3", tool_name="weather"), tool("21", tool_name="weather")),
        cities(tool("3"), tool("21")),
        cities(tool("3", tool_call_id="c"), tool("21", tool_call_id="c"), ids=("c", "c")),
        cities(tool("21", tool_call_id="b"), tool("3", tool_call_id="a"), ids=("a", "b")),
        cities(tool("3", name="weather"), tool("21", name="weather"), ids=("a", "b")),
        cities(tool("3"), tool("21"), ids=("a", "b")),
    ],
)
def test_each_result_belongs_to_its_call(tmp_path, row):
    _, left_out, (conversation,) = read(tmp_path / "l.jsonl", row)
    by_id = {m["tool_call_id"]: m["content"] for m in conversation.messages if m["role"] == "tool"}
    calls = conversation.messages[1]["tool_calls"]
    assert [by_id[c["id"]] for c in calls] == ["3", "21"] and not left_out


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (cities(tool("3")), "another number of calls"),
        (
            cities(tool("3", tool_name="time"), tool("21", tool_name="weather")),
            "a function that was not called",
        ),
        (
            cities(tool("3", tool_call_id="z"), tool("21", tool_call_id="b"), ids=("a", "b")),
            "an id that no call has",
        ),
        ({"messages": [user("?"), tool("3"), assistant("3")]}, "a tool result without a call"),
    ],
)
def test_a_result_of_no_call_is_left_out_and_its_neighbours_are_not(tmp_path, row, reason):
    sound = cities(tool("3"), tool("21"))
    shapes, left_out, _ = read(tmp_path / "l.jsonl", sound, row, sound)
    assert len(shapes) == 2 and len(left_out) == 1
    assert reason in left_out[0] and "first in l.jsonl, line 2" in left_out[0]


def test_a_later_system_message_is_not_moved_to_the_front(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "system", "content": "You keep a store room."},
                user(f"What is on shelf {n}?"),
                assistant("Tea."),
                {"role": "system", "content": f"Reminder: it is {n} o'clock."},
                user("And below?"),
                assistant("Salt."),
            ]
        }
        for n in range(8)
    ]
    shapes, left_out, conversations = read(tmp_path / "l.jsonl", *rows)
    assert {c.system for c in conversations} == {"You keep a store room."}
    assert "Reminder" not in json.dumps(shapes)
    assert left_out == [
        "8 messages (a system message in the middle of a conversation, first in l.jsonl, line 1)"
    ]
    result = initialize(Sources(logs=[tmp_path / "l.jsonl"]), tmp_path / "out")
    assert load_persona(tmp_path / "out").system_prompt == "You keep a store room."
    assert f"left out: {left_out[0]}" in result.lines
    written = "".join(p.read_text() for p in (tmp_path / "out").rglob("*.json*"))
    assert "Reminder" not in written


# ---- streamed answers, and answers that are none


def stream(*texts, head=""):
    chunks = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return head + "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"


def answered(response):
    return {"request": {"messages": [user("Say good morning.")]}, "response": response}


HEADS = [
    ": OPENROUTER PROCESSING\n\n",
    ":\n\n",
    "id: 7\n",
    "retry: 3000\n\n",
    "\ufeff",
    "\ufeff: x\n\n",
    "event: message\nid: 1\n",
    "\n\n",
]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_text_of_a_stream(tmp_path, head, newline):
    text = stream("Good", " morning!", head=head).replace("\n", newline)
    shapes, left_out, _ = read(tmp_path / "l.jsonl", answered(text))
    assert shapes == [[("user", "Say good morning."), ("assistant", "Good morning!")]]
    assert not left_out


ERROR = {"error": {"message": "MARK", "code": 500}}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        (": OPENROUTER PROCESSING\n\n", "a stream that does not end"),
        (f"error: {json.dumps(ERROR['error'])}\n\n", "an error"),
        (f"data: {json.dumps(ERROR)}\n\ndata: [DONE]\n\n", "an error"),
        (stream("MARK").replace("delta", "message"), "without delta"),
        (stream("MARK").replace('"content"', '"text"'), "unknown field 'text' of a chunk"),
        (stream("MARK")[:-60], "a stream that"),
        (ERROR, "an error"),
        ({"status_code": 500, "body": {"choices": [{"message": {"content": "MARK"}}]}}, "an error"),
        ("<html><body>502 MARK</body></html>", "an error"),
        ('{"detail": "MARK"}', "not a chat completion"),
        ({"choices": [{"message": {"content": "MARK"}, "finish_reason": "length"}]}, "was cut"),
        ({"choices": [{"text": "MARK"}]}, "not a chat completion"),
        (
            {"choices": [{"message": {"content": "[tool_calls: f({})]"}}]},
            "a placeholder of vLLM's log",
        ),
        (
            {"choices": [{"message": {"content": "<streaming_complete: 21 tokens>"}}]},
            "a placeholder",
        ),
        (
            {"choices": [{"message": {"content": '<tool_call>{"name": "f"'}}]},
            "in tags that cannot be read",
        ),
        ({"choices": [{"message": {"content": "<think>MARK"}}]}, "thinking without an end"),
    ],
)
def test_what_is_not_a_whole_answer_never_becomes_one(tmp_path, response, reason):
    sound = answered(stream("Good morning!"))
    shapes, left_out, _ = read(tmp_path / "l.jsonl", sound, answered(response), sound)
    assert len(shapes) == 2 and len(left_out) == 1
    assert reason in left_out[0] and "first in l.jsonl, line 2" in left_out[0]


def test_thinking_whose_opening_tag_is_the_prompts(tmp_path):
    row = answered({"choices": [{"message": {"content": "hm\n</think>\n\nGood morning!"}}]})
    _, _, (conversation,) = read(tmp_path / "l.jsonl", row)
    answer = conversation.messages[-1]
    assert (answer["reasoning_content"], answer["content"]) == ("hm", "Good morning!")


# ---- gateways' payloads

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
COMPLETION = {
    "choices": [
        {
            "message": assistant("", call("weather", {"city": "Oslo"}, "a")),
            "finish_reason": "tool_calls",
        }
    ]
}
ASKED = [{"role": "system", "content": "Be S."}, user("Oslo?")]
LITELLM = {
    "id": "1",
    "call_type": "acompletion",
    "status": "success",
    "startTime": 1.0,
    "messages": ASKED,
    "response": COMPLETION,
    "model_parameters": {"tools": [WEATHER]},
    "response_cost": 0.1,
}
LANGFUSE = {
    "id": "o",
    "traceId": "t",
    "type": "GENERATION",
    "startTime": "2026-09-01T10:00:00.000Z",
    "input": {"messages": ASKED, "tools": [WEATHER]},
    "output": COMPLETION["choices"][0]["message"],
}


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (LITELLM, "LiteLLM"),
        ({**LITELLM, "messages": json.dumps(ASKED), "response": json.dumps(COMPLETION)}, "LiteLLM"),
        (
            {
                "request_id": "1",
                "call_type": "acompletion",
                "messages": "{}",
                "response": COMPLETION,
                "proxy_server_request": json.dumps({"messages": ASKED, "tools": [WEATHER]}),
            },
            "LiteLLM",
        ),
        (LANGFUSE, "Langfuse"),
        (
            {
                **LANGFUSE,
                "input": json.dumps(LANGFUSE["input"]),
                "output": json.dumps(LANGFUSE["output"]),
            },
            "Langfuse",
        ),
        (
            {
                "id": "t",
                "name": "trace",
                "observations": [{k: v for k, v in LANGFUSE.items() if k != "traceId"}],
            },
            "Langfuse",
        ),
    ],
)
def test_the_payloads_of_gateways(tmp_path, row, name):
    shapes, left_out, (conversation,) = read(tmp_path / "l.jsonl", row)
    assert shapes == [[("user", "Oslo?"), ("assistant", "", "weather(['Oslo'])")]]
    assert (conversation.system, conversation.tools, conversation.format) == (
        "Be S.",
        [WEATHER],
        name,
    )
    assert not left_out


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**LITELLM, "status": "failure", "response": {}}, "status 'failure'"),
        ({**LITELLM, "call_type": "aembedding"}, "unknown call_type 'aembedding'"),
        ({**LITELLM, "messages": "redacted-by-litellm"}, "not a list"),
        ({**LITELLM, "response": "redacted-by-litellm", "messages": None}, "no messages"),
    ],
)
def test_litellms_other_rows_are_named(tmp_path, row, reason):
    shapes, left_out, _ = read(tmp_path / "l.jsonl", LITELLM, row)
    assert len(shapes) == 1 and len(left_out) == 1 and reason in left_out[0]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**LANGFUSE, "type": "SPAN"}, "unknown type 'SPAN'"),
        ({**LANGFUSE, "level": "ERROR", "output": "MARK"}, "level 'ERROR'"),
        ({**LANGFUSE, "input": "MARK"}, "no messages"),
        ({**LANGFUSE, "output": {"completion": "MARK"}}, "not a chat completion"),
    ],
)
def test_langfuses_other_observations_are_named(tmp_path, row, reason):
    shapes, left_out, _ = read(tmp_path / "l.jsonl", LANGFUSE, row)
    assert len(shapes) == 1 and len(left_out) == 1 and reason in left_out[0]


SPANS = export(
    span(
        1.0,
        operation__name="chat",
        input__messages=[{"role": "user", "parts": [{"type": "text", "content": "Oslo?"}]}],
    )
)


# ---- text logs, and spans of older conventions

VLLM_LINE = "(APIServer pid=41) INFO 09-01 10:00:00 [logger.py:51]"
VLLM = [
    f"{VLLM_LINE} Received request chatcmpl-0: params: SamplingParams(n=1), lora_request: None.",
    rf"{VLLM_LINE} Request chatcmpl-0 details: prompt: '<|im_start|>user\nShelf?<|im_end|>\n'",
    f"{VLLM_LINE} Generated response chatcmpl-0 (streaming delta): output: 'Salt'",
    f"""{VLLM_LINE} Generated response chatcmpl-1: output: '[tool_calls: f({{"a": 1}})]'""",
]


def test_a_text_log_of_vllm_is_refused_in_one_line(tmp_path):
    log = write(tmp_path / "server.log", *VLLM)
    with pytest.raises(UsageError) as error:
        initialize(Sources("p", logs=[log]), tmp_path / "out")
    assert "vLLM's text log" in error.value.message and "annie-quant record" in error.value.message
    assert "\n" not in error.value.message and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["gen_ai.prompt.0.content", "llm.input_messages.0.message.content"]
)
def test_a_span_of_an_older_convention_is_named(tmp_path, name):
    attributes = [{"key": name, "value": {"stringValue": "MARK"}}]
    spans = {
        "resourceSpans": [{"scopeSpans": [{"spans": [{"name": "chat", "attributes": attributes}]}]}]
    }
    shapes, left_out, _ = read(tmp_path / "s.json", spans)
    assert not shapes and len(left_out) == 1 and "older convention" in left_out[0]


def test_a_file_of_another_form_is_named_with_its_fields(tmp_path):
    shapes, left_out, _ = read(tmp_path / "l.jsonl", {"text": "MARK", "label": 1})
    assert not shapes and left_out == [
        "1 row (a form of log that is not read, with the fields label, text, first in l.jsonl, line 1)"
    ]


def test_a_file_has_one_form(tmp_path):
    chat = {"messages": [user("Oslo?"), assistant("3")]}
    sharegpt = {
        "conversations": [{"from": "human", "value": "MARK"}, {"from": "gpt", "value": "MARK"}]
    }
    shapes, left_out, _ = read(tmp_path / "l.jsonl", chat, sharegpt)
    assert shapes == [[("user", "Oslo?"), ("assistant", "3")]]
    assert left_out == ["1 row (not a row of OpenAI chat, first in l.jsonl, line 2)"]


@pytest.mark.parametrize("first", [LITELLM, LANGFUSE, RESPONSE, SPANS])
def test_a_row_of_another_form_is_named_in_every_form(tmp_path, first):
    shapes, left_out, _ = read(tmp_path / "l.jsonl", first, {"text": "MARK", "role": 7}, first)
    assert len(shapes) == 2 and len(left_out) == 1
    assert "not a row of" in left_out[0] and "first in l.jsonl, line 2" in left_out[0]


def test_a_json_row_in_llama_cpps_log_is_named(tmp_path):
    body = {"choices": [{"message": assistant("3")}]}
    pair = [
        f"srv  log_server_r: request:  {json.dumps({'messages': [user('Oslo?')]})}",
        f"srv  log_server_r: response: {json.dumps(body)}",
    ]
    shapes, left_out, _ = read(tmp_path / "l.log", *pair, {"messages": [user("MARK")]}, *pair)
    assert shapes == [[("user", "Oslo?"), ("assistant", "3")]] * 2
    assert left_out == ["1 row (not a row of llama.cpp log, first in l.log, line 3)"]


# ---- the same logs as calibration data


def test_calibration_data_may_be_a_log(tmp_path):
    summary = {"type": "summary", "summary": "Stock", "leafUuid": "8"}
    for rows, place in (
        ([summary, *SPLIT], "line 9"),
        (ROLLOUT, "line 7"),
        ([LITELLM], "line 1"),
        ([answered(stream("Good morning!"))], "line 1"),
    ):
        (row,) = read_rows(write(tmp_path / f"{place}{len(rows)}.jsonl", *rows))
        assert row["messages"][-1]["role"] == "assistant" and place_of(row).endswith(place)


def test_a_broken_row_of_calibration_data_is_left_out_with_its_line(tmp_path, caplog):
    sound = {"messages": [user("Oslo?"), assistant("3")]}
    rows = [*[sound] * 12, {"messages": [{"content": "MARK"}]}, sound]
    read = read_rows(write(tmp_path / "few.jsonl", *rows))
    assert len(read) == 13 and [place_of(row) for row in read[-2:]] == [
        "few.jsonl, line 12",
        "few.jsonl, line 14",
    ]
    assert "1 row (not a conversation" in caplog.text
    assert "first in few.jsonl, line 13" in caplog.text
    with pytest.raises(
        UsageError, match=r"2 rows \(not a conversation.*first in many.jsonl, line 2"
    ):
        read_rows(write(tmp_path / "many.jsonl", sound, "{", "{", sound))
