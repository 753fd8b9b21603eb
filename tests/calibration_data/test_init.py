"""annie-quant init: from a prompt, tools and logs to persona, gate prompts and calibration data, with nothing leaked."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
from command_line import CliRunner
from planted_secrets import HUB, KEY, PASSWORD, where

from annie_quant.cli import app as cli
from annie_quant.core.errors import UsageError
from annie_quant.core.text import inert
from annie_quant.data import (
    check_apart,
    check_prompt_hash,
    generate,
    load_persona,
    read_rows,
    validate,
)
from annie_quant.data.init_folder import Sources, initialize
from annie_quant.data.log_sample import prompt_text
from annie_quant.data.workloads import personas_of, resolve
from annie_quant.judge.gates import GATES

HOME = load_persona("home")


def logged(path, n=200, spoil=True):
    """Write a log of n conversations with the home controller; with `spoil`, the faults that real logs have."""
    folder = path.parent / "source"
    folder.mkdir(exist_ok=True)
    generate("home", n=n, output=folder / "rows.jsonl", split="train")
    lines = []
    for i, row in enumerate(map(json.loads, (folder / "rows.jsonl").read_text().splitlines())):
        if spoil and i == 3:
            row["messages"][1]["content"] += f" The key is {KEY}."
        if spoil and i == 4:
            row["messages"][-1]["content"] += f" password: {PASSWORD}, {HUB}"
        lines.append(json.dumps({"messages": row["messages"], "tools": row["tools"]}))
    if spoil:
        image = [{"type": "image_url", "image_url": {"url": "data:"}}]
        lines[9:9] = [
            '{"messages": [',
            json.dumps({"messages": [{"role": "user", "content": image}]}),
            json.dumps({"messages": [
                {"role": "user", "content": "erase it all"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "rm", "arguments": "{}"}}]},
            ]}),
            json.dumps({"messages": [
                {"role": "user", "content": "Wie warm ist es denn heute in der Küche?"},
                {"role": "assistant", "content": "In der Küche sind es heute zwanzig Grad."},
            ]}),
        ]  # fmt: skip
        lines += lines[20:30]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("init")
    sources = Sources(
        HOME.system_prompt, [dict(t) for t in HOME.tools], [logged(folder / "log.jsonl")], "Home"
    )
    return initialize(sources, folder / "mine"), folder / "mine"


def test_one_call_makes_a_persona_workloads_and_calibration_data(mine):
    result, folder = mine
    assert sorted(p.name for p in folder.iterdir()) == [
        "README.md",
        "calibration.jsonl",
        "persona.json",
        "workloads",
    ]
    persona = load_persona(folder)
    assert (
        persona.system_prompt == HOME.system_prompt
        and len(persona.tools) == 12
        and persona.name == "Home"
    )
    assert set(result.cases) == {"answers", "calls", "results"} and result.calibration_rows >= 60
    assert all(n > 0 for n in result.cases.values())


def test_what_is_left_out_and_what_is_short_is_one_line_each(mine):
    result, folder = mine
    text = "\n".join(result.lines)
    for words in (
        "an image",
        "not JSON",
        "call rm, which is not among the tools",
        "repeat another one",
        "short of 100",
    ):
        assert sum(words in line for line in result.lines) >= 1, words
    assert text.count("an image") == 1 and all("\n" not in line for line in result.lines)
    card = (folder / "README.md").read_text()
    assert all(inert(line) in card for line in result.lines) and "log.jsonl" in card


def test_a_tool_that_no_log_calls_is_named(tmp_path):
    never = {
        "type": "function",
        "function": {"name": "open_ticket", "parameters": {"type": "object", "properties": {}}},
    }
    tools = [*(dict(t) for t in HOME.tools), never]
    log = logged(tmp_path / "log.jsonl", 90, spoil=False)
    lines = initialize(Sources(HOME.system_prompt, tools, [log], "Home"), tmp_path / "mine").lines
    assert [
        line
        for line in lines
        if "open_ticket" in line and "nothing about" in line and "--fill" in line
    ]
    lines = initialize(
        Sources(HOME.system_prompt, tools, [log], "Home", fill=True), tmp_path / "filled"
    ).lines
    assert not any("nothing about" in line for line in lines)


HOSTILE = "look_up|x\n## Free tokens\n<script>alert(1)</script>[here](https://evil.example)"


def test_names_of_a_log_stay_text_in_the_card(tmp_path):
    tool = {
        "type": "function",
        "function": {"name": HOSTILE, "parameters": {"type": "object", "properties": {}}},
    }
    log = logged(tmp_path / "log.jsonl", 90, spoil=False)
    initialize(
        Sources(HOME.system_prompt, [*(dict(t) for t in HOME.tools), tool], [log], "Home|<b>\n# x"),
        tmp_path / "mine",
    )
    card = (tmp_path / "mine/README.md").read_text().split("---", 2)[2]
    assert "Free tokens" in card
    assert not re.search(r"(?<!\\)<(?!!--)|(?<!\\)\[here|^## Free|^# x", card, re.MULTILINE)
    for table in re.findall(r"(?:^\|.*\n)+", card, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}) == 1, table


def test_no_planted_secret_is_written_or_returned(mine):
    result, folder = mine
    assert where(folder, str(result)) == []
    assert sum(result.masked.values()) >= 3


def test_calibration_and_gates_never_overlap_and_gates_do_not_repeat(mine):
    _, folder = mine
    rows, workloads = read_rows(folder / "calibration.jsonl"), resolve(folder)
    check_apart(rows, gates=True, persona=load_persona(folder))
    calibration = {
        prompt_text(r["messages"][1:][:i]) for r in rows for i in range(1, len(r["messages"]))
    }
    prompts = [(w.name, prompt_text(c.messages)) for w in workloads for c in w.cases]
    assert len(set(prompts)) == len(prompts)
    assert not {p for _, p in prompts} & calibration


def test_the_calibration_rows_are_valid_by_the_one_validator(mine):
    _, folder = mine
    rows = read_rows(folder / "calibration.jsonl")
    assert validate(rows, load_persona(folder)).faults == {}


def test_cases_replay_the_logged_calls_and_results(mine):
    _, folder = mine
    workload = next(w for w in resolve(folder) if w.name == "results")
    messages = workload.messages(workload.cases[0])
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool"]
    assert messages[2]["tool_calls"][0]["id"] == messages[3]["tool_call_id"]
    assert len(workload.tools_for(workload.cases[0])) == 12
    assert {g for g in workload.gates if GATES[g].basis != "reference"} == {"logged_tool"}


def test_a_workload_of_the_folder_works_by_itself(mine):
    _, folder = mine
    (workload,) = resolve(workloads=str(folder / "workloads" / "calls.json"))
    assert (
        workload.system_prompt == HOME.system_prompt
        and len(workload.tools_for(workload.cases[0])) == 12
    )
    assert personas_of([workload]) == [str(folder)]


def test_the_same_logs_give_the_same_bytes(mine, tmp_path):
    _, folder = mine
    log = folder.parent / "log.jsonl"
    initialize(
        Sources(HOME.system_prompt, [dict(t) for t in HOME.tools], [log], "Home"),
        tmp_path / "again",
    )
    for name in ("workloads/calls.json", "workloads/answers.json", "persona.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_prompt_and_tools_come_from_the_logs_where_they_are_not_given(tmp_path):
    log = logged(tmp_path / "log.jsonl", 60, spoil=False)
    result = initialize(Sources(logs=[log]), tmp_path / "mine")
    persona = load_persona(tmp_path / "mine")
    assert persona.system_prompt == HOME.system_prompt and len(persona.tools) == 12
    assert any("most frequent" in line for line in result.lines)


def test_missing_tools_are_inferred_from_the_calls(tmp_path):
    rows = [
        {"messages": [
            {"role": "user", "content": f"number {i} please, for {i * 7}"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"function": {"name": "add", "arguments": {"n": i, "to": "x"} if i % 2 else {"n": i}}}]},
        ]}
        for i in range(20)
    ]  # fmt: skip
    (tmp_path / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    result = initialize(Sources("Be brief.", None, [tmp_path / "l.jsonl"]), tmp_path / "mine")
    schema = load_persona(tmp_path / "mine").tool("add")["parameters"]
    assert schema["required"] == ["n"] and schema["properties"] == {
        "n": {"type": "integer"},
        "to": {"type": "string"},
    }
    assert any("inferred" in line for line in result.lines)


def test_a_prompt_and_tools_alone_are_filled_up_by_the_offline_teacher(tmp_path):
    result = initialize(Sources("Be the house.", [dict(t) for t in HOME.tools]), tmp_path / "mine")
    assert result.calibration_rows >= 300 and result.cases["generated_tool_calls"] >= 100
    rows = read_rows(tmp_path / "mine" / "calibration.jsonl")
    assert validate(rows, load_persona(tmp_path / "mine")).valid >= 0.8 * len(rows)
    assert all(w.system_prompt == "Be the house." for w in resolve(tmp_path / "mine"))


def test_prompts_of_a_persona_without_tools_are_not_from_schemas(tmp_path):
    lines = initialize(Sources("Be brief.", []), tmp_path / "mine").lines
    assert any(
        line.endswith("gate prompts are made by the offline teacher, without tools (generated_*)")
        for line in lines
    )
    assert not any("schemas" in line for line in lines)


def test_requests_without_answers_are_prompts_of_gates_and_of_calibration(tmp_path):
    lines = [
        json.dumps({"messages": [{"role": "user", "content": f"question {i} of {i * 13}"}]})
        for i in range(30)
    ]
    (tmp_path / "l.jsonl").write_text("\n".join(lines))
    result = initialize(Sources("Be brief.", [], [tmp_path / "l.jsonl"]), tmp_path / "mine")
    rows = read_rows(tmp_path / "mine" / "calibration.jsonl")
    assert result.calibration_rows == len(rows) > 0
    assert result.cases == {"answers": 30 - len(rows)}
    assert all(row["messages"][-1]["role"] == "user" for row in rows)
    assert any("the model gives them before calibration" in line for line in result.lines)
    cases = [case for w in resolve(tmp_path / "mine") for case in w.cases]
    of_gates = {case.messages[-1]["content"] for case in cases}
    assert not of_gates & {row["messages"][-1]["content"] for row in rows}


def test_one_answered_conversation_is_a_gate_prompt_and_its_answer_is_counted(tmp_path):
    chat = {
        "messages": [
            {"role": "user", "content": "Are you open?"},
            {"role": "assistant", "content": "Until six."},
        ]
    }
    (tmp_path / "one.json").write_text(json.dumps(chat))
    result = initialize(Sources("Be brief.", [], [tmp_path / "one.json"]), tmp_path / "mine")
    assert result.calibration_rows == 0 and result.cases == {"answers": 1}
    assert "all conversations with answers are gate prompts" in result.next


def test_text_that_no_file_can_hold_is_replaced_and_numbers_that_json_has_not_are_left_out(
    tmp_path,
):
    """Half of a surrogate pair, as a log cut inside an emoji has; NaN, as Python's json writes it."""
    chats = [
        '{"messages": [{"role": "user", "content": "half an emoji \\ud83d here"}, {"role": "assistant", "content": "Yes."}]}',
        '{"messages": [{"role": "user", "content": "a number"}, {"role": "assistant", "content": "", "tool_calls": '
        '[{"function": {"name": "t", "arguments": {"n": NaN}}}]}]}',
    ]
    (tmp_path / "l.jsonl").write_text("\n".join(chats))
    result = initialize(Sources("Be brief.", [], [tmp_path / "l.jsonl"]), tmp_path / "mine")
    assert result.conversations == 1 and any(
        "1 row (NaN or infinity" in line for line in result.lines
    )
    assert (
        "half an emoji \N{REPLACEMENT CHARACTER} here"
        in (tmp_path / "mine/workloads/answers.json").read_text()
    )


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz"])
def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path, suffix):
    texts = ["What time is it in Lima?", "Who repairs pianos?", "Is the north gate open on Sunday?"]
    chats = [
        {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": "No."}]}
        for t in texts
    ]
    text = json.dumps(chats) if suffix == "json" else "\r\n".join(map(json.dumps, chats))
    data = b"\xef\xbb\xbf" + text.encode()
    (tmp_path / f"l.{suffix}").write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    result = initialize(Sources("Be brief.", [], [tmp_path / f"l.{suffix}"]), tmp_path / "mine")
    assert result.conversations == 3 and not any("left out" in line for line in result.lines)


def test_the_prompt_s_byte_order_mark_and_a_repeated_tool_are_dropped(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfBe brief.\r\nAlways.")
    tool = {
        "type": "function",
        "function": {"name": "t", "description": "half \ud83d", "parameters": {}},
    }
    (tmp_path / "t.json").write_text(json.dumps([tool, tool]))
    arguments = ["init", "--prompt", str(tmp_path / "p.txt"), "--tools", str(tmp_path / "t.json")]
    outcome = CliRunner().invoke(cli, [*arguments, "--output", str(tmp_path / "mine")])
    assert outcome.exit_code == 0, outcome.output
    persona = load_persona(tmp_path / "mine")
    assert persona.system_prompt == "Be brief.\nAlways." and [
        t["function"]["name"] for t in persona.tools
    ] == ["t"]
    other = {
        "type": "function",
        "function": {"name": "t", "description": "another", "parameters": {}},
    }
    (tmp_path / "t.json").write_text(json.dumps([tool, other]))
    outcome = CliRunner().invoke(cli, [*arguments, "--output", str(tmp_path / "other")])
    assert outcome.exit_code != 0 and "defines the tool t twice" in str(outcome.exception)
    assert not (tmp_path / "other").exists()


def test_the_data_of_a_folder_that_was_renamed_can_be_used(tmp_path, monkeypatch):
    """Its provenance names the folder that it was made in. The prompt is still compared where a persona is given."""
    monkeypatch.chdir(tmp_path)
    initialize(Sources("Be the house.", [dict(HOME.tools[0])]), Path("mine"))
    Path("mine").rename("renamed")
    assert check_prompt_hash("renamed/calibration.jsonl") is None
    assert check_prompt_hash("renamed/calibration.jsonl", "renamed") is None
    with pytest.raises(UsageError, match="differs from production's"):
        check_prompt_hash("renamed/calibration.jsonl", "home")


def test_calibration_data_with_a_byte_order_mark_are_read(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    )
    assert read_rows(tmp_path / "c.jsonl")[0]["messages"][0]["content"] == "x"


def test_an_empty_prompt_is_named(tmp_path):
    assert (
        "the system prompt is empty"
        in initialize(Sources(" \n", [dict(HOME.tools[0])]), tmp_path / "mine").lines
    )


def test_the_command(tmp_path, monkeypatch):
    log = logged(tmp_path / "log.jsonl", 60)
    (tmp_path / "tools.json").write_text(json.dumps(HOME.tools))
    arguments = [
        "init",
        "--prompt",
        "-",
        "--tools",
        str(tmp_path / "tools.json"),
        "--logs",
        str(log),
    ]
    arguments += ["--output", str(tmp_path / "mine"), "--json"]
    outcome = CliRunner().invoke(cli, arguments, input=HOME.system_prompt)
    assert outcome.exit_code == 0, outcome.output
    assert where(tmp_path / "mine", outcome.output) == []
    with pytest.raises(UsageError, match="made by annie-quant init before"):
        CliRunner().invoke(cli, arguments, input="x", catch_exceptions=False)
    outcome = CliRunner().invoke(cli, [*arguments, "--force"], input=HOME.system_prompt)
    assert outcome.exit_code == 0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "the files are empty"),
        ("hello\n", "not JSON"),
        ('{"text": "x"}\n', "a form of log that is not read, with the fields text"),
    ],
)
def test_a_log_without_conversations_is_an_error_in_one_line(tmp_path, content, words):
    (tmp_path / "l.jsonl").write_text(content)
    with pytest.raises(UsageError, match=words) as error:
        initialize(Sources(logs=[tmp_path / "l.jsonl"]), tmp_path / "mine")
    assert "\n" not in error.value.message and not (tmp_path / "mine").exists()


def test_other_files_are_not_overwritten(tmp_path):
    (tmp_path / "work.txt").write_text("mine")
    with pytest.raises(UsageError, match="has other files"):
        initialize(Sources("x"), tmp_path, force=True)
    with pytest.raises(UsageError, match="nothing to start from"):
        initialize(Sources(), tmp_path / "m")


def test_an_error_leaves_no_new_folder(tmp_path):
    parameters = {
        "type": "object",
        "properties": {"plate": {"type": "string", "pattern": "^[A-Z]{9}$", "maxLength": 3}},
        "required": ["plate"],
    }
    tools = [{"type": "function", "function": {"name": "book", "parameters": parameters}}]
    with pytest.raises(UsageError, match="draws no arguments for book"):
        initialize(Sources(prompt="Be S.", tools=tools), tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_an_invalid_tools_file_is_named(tmp_path):
    (tmp_path / "t.json").write_text('[{"type": "function"}]')
    with pytest.raises(UsageError, match="is not a list of tools"):
        CliRunner().invoke(
            cli, ["init", "--tools", str(tmp_path / "t.json"), "--prompt", str(tmp_path / "t.json"), "--output", "x"],
            catch_exceptions=False,
        )  # fmt: skip
