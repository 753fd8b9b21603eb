"""Logs of every supported form as conversations, what is left out with its reason, masking, and bounded memory."""

from __future__ import annotations

import gzip
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from randomised import examples

from annie_quant.core.errors import UsageError
from annie_quant.data import read_rows
from annie_quant.data.conversations import Conversation, Unusable
from annie_quant.data.log_sample import NO_TOOL, Pool, without_prefixes
from annie_quant.data.logs import Problems, TextLog, read_logs
from annie_quant.data.masking import MASK, Scanner
from annie_quant.data.sources import conversation_of
from annie_quant.data.tool_forms import tools_of

TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}},
            "required": ["q"],
        },
    },
}
USER = {"role": "user", "content": "hi"}
CALL = {"id": "x", "type": "function", "function": {"name": "find", "arguments": '{"q": "a"}'}}
OPENAI = {
    "messages": [
        {"role": "system", "content": "Be S."},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "x", "content": "r"},
        {"role": "assistant", "content": "done"},
    ],
    "tools": [TOOL],
}
SHAREGPT = {
    "conversations": [
        {"from": "system", "value": f"Be S. <tools>{json.dumps(TOOL)}</tools>"},
        {"from": "human", "value": "hi"},
        {
            "from": "gpt",
            "value": "<tool_call>\n{'name': 'find', 'arguments': {'q': 'a'}}\n</tool_call>",
        },
        {"from": "tool", "value": "<tool_response>\nr\n</tool_response>"},
        {"from": "gpt", "value": "done"},
    ]
}
ANTHROPIC = {
    "system": "Be S.",
    "tools": [
        {"name": "find", "description": "Find.", "input_schema": TOOL["function"]["parameters"]}
    ],
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "u", "name": "find", "input": {"q": "a"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": "r"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
    ],
}
CHUNKS = [{"choices": [{"index": 0, "delta": {"content": t}}]} for t in ("do", "ne")]
CHUNKS += [{"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}]
SSE = "".join(f"data: {json.dumps(c)}\n\n" for c in CHUNKS) + "data: [DONE]\n\n"
EVENTS = [
    {"type": "summary", "summary": "A search", "leafUuid": "4"},
    {"type": "user", "uuid": "1", "parentUuid": None, "message": USER},
    {
        "type": "assistant",
        "uuid": "2",
        "parentUuid": "1",
        "message": {
            "role": "assistant",
            "id": "m",
            "content": [
                {"type": "thinking", "thinking": "hm"},
                {"type": "tool_use", "id": "c", "name": "find", "input": {"q": "a"}},
            ],
        },
    },
    {
        "type": "user",
        "uuid": "3",
        "parentUuid": "2",
        "message": {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [{"type": "text", "text": "r"}],
                }
            ],
        },
    },
    {
        "type": "assistant",
        "uuid": "4",
        "parentUuid": "3",
        "message": {"role": "assistant", "id": "n", "content": [{"type": "text", "text": "done"}]},
    },
]


def shape(conversation):
    return [
        (
            m["role"],
            m["content"],
            [(c["function"]["name"], c["function"]["arguments"]) for c in m.get("tool_calls", ())],
        )
        for m in conversation.messages
    ]


EXPECTED = [
    ("user", "hi", []),
    ("assistant", "", [("find", {"q": "a"})]),
    ("tool", "r", []),
    ("assistant", "done", []),
]


def read(path, problems=None):
    return list(read_logs([path], problems))


@pytest.mark.parametrize(
    ("record", "tools"),
    [
        (OPENAI, True),
        (ANTHROPIC, True),
        ({"body": OPENAI}, True),
        ({"request": {**OPENAI, "messages": OPENAI["messages"][:-1]},
          "response": {"choices": [{"message": OPENAI["messages"][-1]}]}}, True),
        ({"request": json.dumps({"messages": OPENAI["messages"][:-1]}), "response": "done"}, False),
        ({**ANTHROPIC, "system": [{"type": "text", "text": "Be S.", "cache_control": {"type": "ephemeral"}}]}, True),
        ({"messages": OPENAI["messages"][:-1], "response": CHUNKS}, False),
        ({"messages": OPENAI["messages"][:-1], "response": SSE}, False),
    ],
)  # fmt: skip
def test_each_form_is_the_same_conversation(record, tools):
    conversation = conversation_of(record)
    assert shape(conversation) == EXPECTED and conversation.system == "Be S."
    assert (conversation.tools == [TOOL]) is tools
    assert (
        conversation.messages[2]["tool_call_id"] == conversation.messages[1]["tool_calls"][0]["id"]
    )


def test_files_of_each_kind(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(SHAREGPT) + "\n\n" + json.dumps(SHAREGPT))
    (tmp_path / "b.json").write_text(json.dumps([OPENAI, ANTHROPIC]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json.dumps(OPENAI).encode()))
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, EVENTS * 2)))
    problems = Problems()
    conversations = read(tmp_path, problems)
    assert [c.source for c in conversations] == [
        "a.jsonl", "a.jsonl", "b.json", "b.json", "c.jsonl.gz", "d.jsonl", "d.jsonl",
    ]  # fmt: skip
    assert all(shape(c) == EXPECTED for c in conversations)
    assert [*problems.lines()] == ["2 rows (unknown type 'summary', first in d.jsonl, line 1)"]
    assert all(c.system == "Be S." and c.tools == [TOOL] for c in conversations[:5])
    assert [c.thinking for c in conversations] == [False] * 5 + [True] * 2


def test_parquet_and_arrow(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="Parquet and Arrow files need pyarrow")
    import pyarrow.parquet

    table = pa.Table.from_pylist(
        [{"messages": [USER, {"role": "assistant", "content": "yes"}], "other": None}]
    )
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with (
        pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file,
        pa.ipc.new_stream(file, table.schema) as writer,
    ):
        writer.write_table(table)
    assert [shape(c) for c in read(tmp_path)] == [
        [("user", "hi", []), ("assistant", "yes", [])]
    ] * 2
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(UsageError, match=r"a\.parquet cannot be read"):
        read(tmp_path)
    assert read_rows(tmp_path / "b.arrow")[0]["messages"][1]["content"] == "yes"


def test_a_llama_cpp_log(tmp_path):
    request = {"messages": OPENAI["messages"][:-1], "tools": [TOOL]}
    answer = {"choices": [{"message": OPENAI["messages"][-1]}]}
    log = [
        "main: server is listening on 127.0.0.1:8080",
        "srv  log_server_r: request: POST /v1/chat/completions 127.0.0.1 200",
        f"srv  log_server_r: request:  {json.dumps(request)}",
        f"srv  log_server_r: response: {json.dumps(answer)}",
        f"srv  log_server_r: request:  {json.dumps({'messages': [USER]})}",
    ]
    (tmp_path / "l.log").write_text("\n".join(log))
    one, two = read(tmp_path / "l.log")
    assert shape(one) == EXPECTED and one.tools == [TOOL] and shape(two) == [("user", "hi", [])]


def test_another_text_log_has_no_conversation():
    assert list(TextLog().add("nothing here", "")) == []


def test_a_conversation_over_the_limit_is_counted_with_its_place(tmp_path):
    rows = [
        {"messages": [USER]},
        {"messages": [USER, {"role": "user", "content": "x" * 2_000_000}]},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = Problems()
    assert len(list(read_logs([tmp_path / "log.jsonl"], problems))) == 1
    assert list(problems.lines()) == [
        "1 row (longer than 2,000,000 characters, first in log.jsonl, line 2)"
    ]


def test_an_agents_long_conversation_is_read_whole(tmp_path):
    """A prompt of 30,000 tokens and its tools have over 120,000 characters."""
    system = {"role": "system", "content": "a rule " * 20_000}
    (tmp_path / "log.jsonl").write_text(json.dumps({"messages": [system, USER]}) + "\n")
    problems = Problems()
    (conversation,) = read_logs([tmp_path / "log.jsonl"], problems)
    assert conversation.system == system["content"]
    assert not list(problems.lines())


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "an image"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "unknown role 'alien'"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "no user message"),
        ({"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "x"}]}, "no user message"),
        ({"messages": [USER], "response": CHUNKS[:2]}, "a stream that does not end"),
        ({"text": "plain"}, "no messages"),
        ({"messages": [USER, {"role": "tool", "content": "r"}]}, "a tool result without a call"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}]},
         "arguments that are not JSON"),
        ({"messages": [USER, "hi"]}, "not an object"),
        ("text", "not a JSON object"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_has_a_reason(record, reason):
    with pytest.raises(Unusable, match=reason):
        conversation_of(record)


def test_broken_lines_are_counted_with_the_first_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'{"messages": [\n' + json.dumps(OPENAI).encode() + b"\nplain text\n\xff\xfe{\n"
    )
    problems = Problems()
    assert len(read(path, problems)) == 1
    assert sum(problems.counts.values()) == 3
    assert "first in a.jsonl, line 1" in next(problems.lines())
    with pytest.raises(UsageError, match="does not exist"):
        read(tmp_path / "none")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(
        ["user", "assistant", "tool", "messages", "content", "role", "<tool_call>{", "{", "[", "tool_calls"]),
    lambda c: st.lists(c, max_size=4) | st.dictionaries(
        st.sampled_from(["messages", "role", "content", "tool_calls", "function", "name", "arguments", "tools", "from",
                         "value", "conversations", "request", "response", "choices", "message", "type", "text", "body",
                         "prompt", "completion", "system", "id", "reasoning_content", "input"]), c, max_size=5),
    max_leaves=25,
)  # fmt: skip


@settings(max_examples=examples(400), deadline=None)
@given(JSON)
def test_any_record_is_a_conversation_or_has_a_reason(record):
    try:
        conversation = conversation_of(record)
    except Unusable:
        return
    assert any(m["role"] == "user" for m in conversation.messages)
    assert all(isinstance(m["content"], str) for m in conversation.messages)
    json.dumps(conversation.messages)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()), max_size=8))
def test_any_file_is_read_to_its_end(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("f") / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    read(path, Problems())


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (True, "not a list"),
        ("[]", "not a list"),
        (3, "not a list"),
        ([True], "not an object"),
        ([{}], "without function"),
        ([{"function": {"arguments": "{}"}}], "without a name"),
        ([{"function": {"name": "f", "parameters": {}}}], "without arguments"),
        (CALL, "not a list"),
    ],
)
def test_calls_that_are_none_are_named(calls, reason):
    with pytest.raises(Unusable, match=reason):
        conversation_of({"messages": [USER, {"role": "assistant", "tool_calls": calls}]})


def test_tools_in_all_their_spellings():
    function = TOOL["function"]
    for raw in ([TOOL], [function], json.dumps([TOOL]), json.dumps(TOOL), [json.dumps(TOOL)], TOOL):
        assert tools_of(raw) == ([TOOL], [])
    assert tools_of([]) == ([], []) == tools_of(None)
    assert [len(tools_of(raw)[1]) for raw in ("no JSON", 3, {})] == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("key sk-proj-abcdEFGH1234567890abcd ok", "abcdEFGH1234567890abcd"),
        ("AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("use hf_abcdefghijklmnopqrstuvwx now", "hf_abcdefghijklmnopqrstuvwx"),
        ("Authorization: Bearer abc.def-ghi_jkl123", "abc.def-ghi_jkl123"),
        ("my password is: hunter2hunter2", "hunter2hunter2"),
        ('{"api_key": "zxcvbnmasdf"}', "zxcvbnmasdf"),
        ("postgres://joe:s3cretpw@db/x", "s3cretpw"),
        ("eyJhbGciOiJI.eyJzdWIiOiIx.abcdefgh", "eyJzdWIiOiIx"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEabc\n-----END RSA PRIVATE KEY-----", "MIIEabc"),
    ],
)
def test_secrets_are_masked(text, secret):
    scanner = Scanner()
    masked = scanner.masked({"a": [text]})["a"][0]
    assert secret not in masked and MASK in masked and sum(scanner.counts.values()) == 1


def test_secrets_in_property_names_are_masked():
    key, other = "sk-proj-abcdefghijklmnop1234", "sk-proj-qrstuvwxyzabcdef5678"
    scanner = Scanner()
    value = {
        "arguments": {key: 1, other: {f"x {key}": "y"}},
        "tools": [{"properties": {key: {"type": "string"}}}],
    }
    masked = scanner.masked(value)
    assert key not in json.dumps(masked) and other not in json.dumps(masked)
    assert len(masked["arguments"]) == 2 and scanner.counts["API key"] == 4, "no property is lost"
    assert scanner.masked({"room": "hall"}) == {"room": "hall"}


def test_plain_words_are_not_masked():
    text = "The secret of good bread is time. The token ring. A password manager helps. Order 12345678, order-12345678."
    assert Scanner(personal=False).masked(text) == text


def test_personal_data_is_masked_on_request(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "planted-environment-value")
    scanner = Scanner(personal=True, words=["Zebra"])
    messages = [
        {
            "role": "user",
            "content": "My name is Maria Lopez, maria@example.org, +43 660 1234567, 4111 1111 1111 1111.",
        },
        {"role": "assistant", "content": "Hello Maria. zebra planted-environment-value"},
    ]
    text = json.dumps(scanner.conversation(messages))
    for secret in (
        "Maria",
        "Lopez",
        "example.org",
        "1234567",
        "4111",
        "zebra",
        "planted-environment",
    ):
        assert secret not in text
    assert (
        scanner.conversation([{"role": "user", "content": "Hello, I am fine."}])[0]["content"]
        == "Hello, I am fine."
    )


def conversation(text, *calls):
    tool_calls = [{"function": {"name": name, "arguments": {}}} for name in calls]
    return Conversation(
        [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "", "tool_calls": tool_calls},
        ]
    )


def test_the_pool_is_bounded_keeps_rare_tools_and_does_not_depend_on_the_order():
    conversations = [conversation(f"talk {i}") for i in range(500)] + [
        conversation(f"c {i}", "rare") for i in range(5)
    ]
    contents = []
    for seed in (1, 2):
        random.Random(seed).shuffle(conversations)
        pool = Pool(size=20)
        for item in [*conversations, *conversations[:50]]:
            pool.add(item)
        contents.append([(b, c.messages[0]["content"]) for b, c in pool.conversations()])
    assert contents[0] == contents[1] and len(contents[0]) == 25
    assert [b for b, _ in contents[0][:5]] == ["rare"] * 5 and contents[0][5][0] == NO_TOOL


def test_the_beginning_of_another_conversation_is_left_out():
    long = Conversation(
        [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    )
    short, other = Conversation(long.messages[:2]), conversation("else")
    assert [c for _, c in without_prefixes([("", short), ("", long), ("", other)])] == [long, other]


def test_json_that_is_nested_too_deeply_is_left_out(tmp_path):
    deep = "[" * 100_000
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    answers = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "assistant", "content": f"<tool_call>{deep}</tool_call>"},
        {"role": "assistant", "content": "yes"},
    ]
    lines = [
        json.dumps({"messages": [{"role": "user", "content": "?"}, answer]}) for answer in answers
    ]
    lines += [
        json.dumps({"messages": deep}),
        json.dumps({"conversations": deep}),
        f'{{"messages": {deep}',
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.json").write_text(deep)
    problems = Problems()
    texts = [
        c.messages[-1]["content"]
        for c in read_logs([tmp_path / "a.jsonl", tmp_path / "b.json"], problems)
    ]
    assert "yes" in texts and problems.lines()
