"""Files of logs as programs store them, and rows that look like a conversation and are none.

The texts that must never become content have the word MARK in them.
"""

from __future__ import annotations

import codecs
import gzip
import json
from collections import Counter
from types import SimpleNamespace

import pytest
from paths import TINY_ANNIE

from annie_quant.checkpoint.chat_template import ConversationRefused
from annie_quant.core.progress import SILENT
from annie_quant.data.init_folder import Sources, initialize
from annie_quant.data.logs import Problems, read_logs
from annie_quant.data.model_rows import ModelAnswer, write_rows
from annie_quant.data.tool_forms import tools_of
from annie_quant.documents.persona import Persona

ASKED = [{"role": "user", "content": "Where is the lamp?"}]
ANSWERED = {"messages": [*ASKED, {"role": "assistant", "content": "On shelf 3: größer."}]}
LINES = (json.dumps(ANSWERED, ensure_ascii=False) + "\n") * 2


def read(path):
    problems = Problems()
    answers = [c.messages[1:] for c in read_logs([path], problems)]
    return [m["content"] for rest in answers for m in rest], list(problems.lines())


def written(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("bom.jsonl", codecs.BOM_UTF8 + LINES.encode()),
        ("joined.jsonl", (codecs.BOM_UTF8 + LINES[: len(LINES) // 2].encode()) * 2),
        ("powershell.jsonl", LINES.encode("utf-16")),
        ("big_endian.jsonl", codecs.BOM_UTF16_BE + LINES.encode("utf-16-be")),
        ("windows.jsonl", LINES.replace("\n", "\r\n").encode()),
        ("packed.jsonl.gz", gzip.compress(LINES.encode())),
        ("packed.jsonl", gzip.compress(LINES.encode())),
        ("plain.jsonl.gz", LINES.encode()),
        ("list.json", json.dumps([ANSWERED, ANSWERED]).encode("utf-16")),
    ],
)
def test_a_file_is_read_in_the_form_that_its_bytes_have(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    assert read(tmp_path / name) == (["On shelf 3: größer."] * 2, [])


def test_a_file_that_ends_early_keeps_its_rows_and_an_archive_is_named(tmp_path):
    rows = "".join(json.dumps({**ANSWERED, "id": i}) + "\n" for i in range(4000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode())[:-1000])
    answers, (line,) = read(tmp_path / "a.jsonl.gz")
    assert 1000 < len(answers) < 4000
    assert line == "1 row (compressed data that end early or are damaged, first in a.jsonl.gz)"
    (tmp_path / "b.log").write_bytes(b"\x28\xb5\x2f\xfd MARK")
    assert read(tmp_path / "b.log") == (
        [],
        ["1 file (a Zstandard file, which is not read: unpack it, first in b.log)"],
    )
    (tmp_path / "c.jsonl").write_bytes(LINES.encode("latin-1"))
    assert read(tmp_path / "c.jsonl") == (
        [],
        ["2 rows (a line that is not UTF-8, first in c.jsonl, line 1)"],
    )


def completion(text, **choice):
    message = {"role": "assistant", "content": text}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop", **choice}]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": ASKED, "status_code": 502, "response": "MARK"}, "a request with status 502"),
        ({"messages": ASKED, "status": 500, "response": "MARK"}, "a request with status 500"),
        ({"messages": ASKED, "error": "timeout", "response": "MARK"}, "an error in place of"),
        ({"model": "e", "input": "MARK"}, "not a row of OpenAI chat"),
        ({"url": "/v1/embeddings", "body": {"model": "e", "input": "MARK"}}, "not a row of"),
        ({"instruction": "Translate", "input": "MARK", "output": "MARK"}, "not a row of"),
        (
            {"custom_id": "1", "response": {"status_code": 200, "body": completion("MARK")}},
            "not a row of OpenAI chat",
        ),
        (
            {"messages": [*ASKED, {"role": "assistant", "content": "MARK", "weight": 0}]},
            "an answer with weight 0",
        ),
        (
            {
                "messages": [*ASKED, {"role": "assistant", "content": "MARK {"}],
                "response": completion('"a": 1}'),
            },
            "messages that end with the beginning of the answer",
        ),
    ],
)
def test_what_is_no_answer_is_left_out_and_named(tmp_path, row, reason):
    answers, (line,) = read(written(tmp_path / "l.jsonl", ANSWERED, row))
    assert answers == ["On shelf 3: größer."]
    assert line.startswith(f"1 row ({reason}") and line.endswith("first in l.jsonl, line 2)")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "Translate", "input": "MARK", "output": "x"}, "a form of log that is not"),
        (
            {"custom_id": "1", "response": {"status_code": 200, "body": completion("MARK")}},
            "join it with the batch's input file by custom_id",
        ),
    ],
)
def test_the_first_row_decides_no_other_form(tmp_path, row, reason):
    answers, (line,) = read(written(tmp_path / "l.jsonl", row))
    assert not answers and reason in line


def test_a_request_of_the_responses_api_that_is_text_alone_is_known_by_its_address(tmp_path):
    row = {"url": "/v1/responses", "body": {"model": "m", "input": "Where is the lamp?"}}
    ((conversation),) = read_logs([written(tmp_path / "l.jsonl", row)])
    assert conversation.messages == ASKED and conversation.format == "OpenAI responses"


def test_a_refusal_is_the_answer_and_choice_0_is_the_first(tmp_path):
    refused = {"role": "assistant", "content": None, "refusal": "I cannot."}
    rows = [
        {"messages": ASKED, "response": completion("", message=refused)},
        {
            "messages": ASKED,
            "response": {
                "choices": [*completion("MARK", index=1)["choices"], *completion("A")["choices"]]
            },
        },
    ]
    assert read(written(tmp_path / "l.jsonl", *rows)) == (["I cannot.", "A"], [])


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": f"Does {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def test_a_tool_that_is_defined_twice():
    first, other = tool("f", shelf={"type": "integer"}), tool("f")
    assert tools_of([first, first]) == ([first], [])
    assert tools_of([first, other]) == ([first], ["it defines the tool f twice, in two ways"])


# ---- tools and templates that are not for everything

FAR_SCHEMA = {"type": "array", "minItems": 1, "items": {"$ref": "https://example.org/x.json"}}
TUPLE = {
    "type": "array",
    "items": [{"type": "number"}, {"type": "boolean"}],
    "minItems": 2,
    "maxItems": 2,
}


def test_a_tool_without_arguments_that_can_be_drawn_is_named_and_the_others_go_on(tmp_path):
    tools = [tool("reach", target=FAR_SCHEMA), tool("grip", force={"type": "integer"})]
    made = initialize(Sources(prompt="You keep a store room.", tools=tools), tmp_path / "o")
    rows = (tmp_path / "o" / "calibration.jsonl").read_text().splitlines()
    calls = Counter(
        call["function"]["name"]
        for row in rows
        for message in json.loads(row)["messages"]
        for call in message.get("tool_calls", ())
    )
    assert set(calls) == {"grip"} and len(rows) > 100
    assert made.behaviours["calls grip"] >= 100 and "calls reach" not in made.behaviours
    named = [line for line in made.lines if line.startswith("left out: ")]
    assert len(named) == 1 and "no arguments for reach" in named[0]


def test_a_draft_7_tuple_is_drawn_by_its_places(tmp_path):
    tools = [tool("move_to", point=TUPLE)]
    tools[0]["function"]["parameters"]["$schema"] = "http://json-schema.org/draft-07/schema#"
    made = initialize(Sources(prompt="You keep a store room.", tools=tools), tmp_path / "o")
    assert made.behaviours["calls move_to"] >= 100
    for row in (tmp_path / "o" / "calibration.jsonl").read_text().splitlines():
        for message in json.loads(row)["messages"]:
            for call in message.get("tool_calls", ()):
                number, flag = json.loads(call["function"]["arguments"])["point"]
                assert isinstance(number, (int, float)) and isinstance(flag, bool)


class RefusingTemplate:
    """Refuses the conversations whose user says so."""

    def request(self, workload, case):
        if len(case.messages[-1]["content"]) % 2:
            raise ConversationRefused("m", "roles must alternate")
        return SimpleNamespace(case=case)


def test_a_conversation_that_the_template_refuses_is_left_out_and_counted():
    pytest.importorskip("torch", reason="torch is not installed")
    from annie_quant.offline.model_answers import ModelAnswers

    model = object.__new__(ModelAnswers)
    model.folder = str(TINY_ANNIE)
    model.template = RefusingTemplate()
    model._complete = lambda requests: [
        ModelAnswer({"role": "assistant", "content": "Yes."}, True, 3) for _ in requests
    ]
    persona = Persona(name="A", system_prompt="You keep a store room.")
    result = write_rows(persona, model, 40, 0, SILENT)
    refused = result.left_out["the chat template refuses it: roles must alternate"]
    assert result.rows and refused and len(result.rows) + refused == 40
    for row in result.rows:
        assert all(len(m["content"]) % 2 == 0 for m in row["messages"] if m["role"] == "user")
