"""The claude-cli teacher with a fake `claude` program that shows every known behaviour of the real one."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from paths import HELPERS

from annie_quant.core.errors import AnnieError, EnvironmentFault, ServerError, UsageError
from annie_quant.core.untrusted import cost_usd
from annie_quant.data import (
    Category,
    Options,
    Persona,
    generate,
    generation,
    load_persona,
    read_rows,
)
from annie_quant.data.init_folder import Sources, initialize
from annie_quant.data.teachers import prompt_for, schema_for
from annie_quant.documents.persona import default_categories

FAKE = HELPERS / "fake_claude.py"


class Fake:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.waits: list[float] = []

    def script(self, *steps: str | dict, **more) -> None:
        listed = [{"do": s} if isinstance(s, str) else s for s in steps]
        (self.folder / "script.json").write_text(json.dumps({"steps": listed, **more}))

    def calls(self) -> list[dict]:
        file = self.folder / "calls.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def make(self, n=10, **more):
        return generate("annie", "claude-cli", n, self.folder / "out.jsonl", **more)

    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "out.jsonl").read_text().splitlines()]


@pytest.fixture
def claude(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{FAKE}" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLAUDE", str(tmp_path))
    fake = Fake(tmp_path)
    monkeypatch.setattr(generation, "sleep", fake.waits.append)
    fake.script("ok")
    return fake


def test_the_documented_command_gets_the_prompt_on_stdin(claude):
    summary = claude.make(n=10)
    assert summary.ok and summary.valid == 10 and summary.with_tools == 4
    call = claude.calls()[0]
    assert call["argv"][:5] == ["-p", "--model", "claude-opus-4-6", "--output-format", "json"]
    assert "You are Annie" in call["stdin"] and not any("Annie" in word for word in call["argv"])
    assert call["cwd"] == [], "an empty folder, so that no project's notes are read"
    assert {r["provenance"]["model"] for r in claude.rows()} == {"claude-opus-4-6"}
    assert {r["provenance"]["teacher"] for r in claude.rows()} == {"claude_cli"}


def test_optional_flags_are_used_where_the_help_lists_them(claude):
    claude.make(n=5)
    argv = claude.calls()[0]["argv"]
    assert json.loads(argv[argv.index("--json-schema") + 1])["required"] == ["conversations"]
    (claude.folder / "calls.jsonl").unlink()
    claude.script("ok", help="plain")
    claude.make(n=5, force=True)
    assert claude.calls()[0]["argv"] == [
        "-p",
        "--model",
        "claude-opus-4-6",
        "--output-format",
        "json",
    ]


def test_an_older_program_is_refused_by_its_help(claude):
    claude.script("ok", help="old")
    with pytest.raises(EnvironmentFault, match="--output-format"):
        claude.make()
    assert claude.calls() == []


def test_a_missing_program_is_refused(claude, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EnvironmentFault, match="not on the PATH"):
        claude.make()


@pytest.mark.parametrize("how", ["fences", "lines", "structured", "verbose"])
def test_every_form_of_the_answer_is_read(claude, how):
    claude.script(how)
    assert claude.make(n=10).valid == 10
    assert "```" not in (claude.folder / "out.jsonl").read_text()


def test_complete_conversations_of_a_truncated_answer_count_and_the_rest_is_requested_again(claude):
    claude.script("cut", "ok")
    summary = claude.make(n=40)
    assert summary.valid == 40 and not summary.failed
    counts = [int(c["stdin"].split()[1]) for c in claude.calls()]
    assert counts[0] == 8 and 1 <= counts[1] < 8, "only what is missing"


@pytest.mark.parametrize("how", ["broken", "not_json", {"do": "exit", "code": 1, "err": "boom"}])
def test_only_a_failed_batch_is_requested_again(claude, how):
    claude.script("ok", how, "ok")
    assert claude.make(n=10).valid == 10
    prompts = [c["stdin"] for c in claude.calls()]
    assert len(prompts) == 6 and prompts[1] == prompts[2]


def test_a_batch_that_always_fails_is_given_up_and_the_others_are_kept(claude):
    claude.script("ok", "ok", "ok", "ok", {"do": "exit", "code": 1, "err": "boom"})
    assert claude.make(n=10).failed == ["multi_turn: claude ended with exit code 1: boom"]
    assert len(claude.calls()) == 4 + 4
    claude.script({"do": "exit", "code": 1, "err": "boom"})
    with pytest.raises(AnnieError, match=r"0 of 10 conversations are kept") as error:
        claude.make(n=10, force=True)
    assert "boom" in error.value.message


@pytest.mark.parametrize("code", [126, 127])
def test_a_program_that_cannot_run_ends_the_run_at_once(claude, code):
    claude.script({"do": "exit", "code": code, "err": "cannot execute"})
    with pytest.raises(EnvironmentFault, match=str(code)):
        claude.make()
    assert len(claude.calls()) == 1


def test_a_missing_login_ends_the_run_at_once(claude):
    claude.script({"do": "error", "text": "Invalid API key · Please run /login"})
    with pytest.raises(EnvironmentFault, match="not logged in"):
        claude.make()
    assert len(claude.calls()) == 1


def test_a_rate_limit_is_waited_for_longer_each_time_and_is_not_a_failure(claude):
    limit = {
        "do": "error",
        "text": 'API Error: 429 {"type":"error","error":{"type":"rate_limit_error"}}',
    }
    claude.script(limit, limit, limit, "ok")
    assert claude.make(n=5).valid == 5
    assert claude.waits == [5.0, 10.0, 20.0]


def test_a_limit_with_a_reset_time_is_waited_for_or_the_run_stops(claude):
    soon = {"do": "error", "text": f"Claude AI usage limit reached|{int(time.time()) + 50}"}
    claude.script(soon, "ok")
    assert claude.make(n=5).valid == 5
    assert len(claude.waits) == 1 and 30 < claude.waits[0] <= 50
    late = {"do": "error", "text": f"Claude AI usage limit reached|{int(time.time()) + 9000}"}
    (claude.folder / "calls.jsonl").unlink()
    claude.script("ok", "ok", late)
    with pytest.raises(ServerError, match="2 of 5 conversations are kept"):
        claude.make(n=5, force=True)
    claude.script("ok")
    assert claude.make(n=5).valid == 5
    assert len(claude.calls()) == 3 + 3, "kept conversations are not requested again"


def test_a_program_that_hangs_is_killed_with_its_children(claude):
    claude.script("hang", "ok")
    start = time.monotonic()
    assert claude.make(n=5, options=Options(timeout_s=2.0)).valid == 5
    assert time.monotonic() - start < 30
    assert len(claude.calls()) == 6


def test_the_budget_includes_resumed_runs(claude):
    claude.script("ok", cost=0.40)
    with pytest.raises(AnnieError, match=r"budget of 1.00 USD is spent \(1.20\); 3 of 5"):
        claude.make(n=5, options=Options(max_usd=1.0))
    with pytest.raises(AnnieError, match="3 of 5"):
        claude.make(n=5, options=Options(max_usd=1.0))
    assert len(claude.calls()) == 3
    summary = claude.make(n=5, options=Options(max_usd=5.0))
    assert summary.cost_usd == pytest.approx(2.0) and summary.ok


def test_a_conversation_that_breaks_a_rule_is_dropped_and_requested_again(claude):
    claude.script("markdown", "ok")
    summary = claude.make(n=5)
    assert summary.valid == 5 and any("markdown" in reason for reason in summary.dropped)


def test_a_finished_set_is_not_paid_for_twice_nor_overwritten(claude):
    claude.make(n=5)
    again = claude.make(n=5)
    assert again.done_before and len(claude.calls()) == 5
    with pytest.raises(UsageError, match="claude_cli"):
        generate("annie", "offline", 5, claude.folder / "out.jsonl")


def test_a_killed_run_keeps_its_finished_batches(claude):
    """The journal of a run that was killed while it wrote a line: the partial line is dropped, the rest is used."""
    claude.script("ok", "ok", {"do": "error", "text": "Invalid API key"})
    with pytest.raises(EnvironmentFault):
        claude.make(n=5)
    journal = claude.folder / ".out.jsonl.journal"
    with journal.open("ab") as file:
        file.write(b'{"row": {"id": "fact')
    with pytest.raises(UsageError, match="another n"):
        claude.make(n=10)
    claude.script("ok")
    assert claude.make(n=5).valid == 5
    assert len(claude.calls()) == 3 + 3 and not journal.exists()


@pytest.mark.parametrize(
    "cost",
    [float("nan"), float("inf"), -1.0, 1e9, 10**400, True, "0.01", [], {"usd": 1}, None],
    ids=lambda c: str(c)[:12],
)
def test_an_invalid_cost_is_unknown(cost):
    assert cost_usd(cost) is None


def test_an_unknown_cost_ends_a_run_with_a_budget(claude):
    claude.script("ok", cost=float("nan"))
    with pytest.raises(UsageError, match="does not report its costs"):
        claude.make(n=5, options=Options(max_usd=5.0))
    (claude.folder / ".out.jsonl.journal").unlink(missing_ok=True)
    assert claude.make(n=5, force=True).cost_usd in (None, 0.0)


@pytest.mark.parametrize(
    "fields",
    [
        {"usage": "500"}, {"usage": {"output_tokens": "many"}}, {"usage": {"output_tokens": -5}}, {"subtype": 7},
        {"usage": {"output_tokens": 10**30}}, {"usage": {"output_tokens": True}}, {"stop_reason": ["end_turn"]},
    ],
    ids=str,
)  # fmt: skip
def test_side_fields_of_another_type_do_not_lose_the_answer(claude, fields):
    claude.script("ok", fields=fields)
    summary = claude.make(n=5)
    assert summary.valid == 5 and 0 <= summary.tokens < 10**6
    lines = [json.loads(line) for line in (claude.folder / "calls.jsonl").read_text().splitlines()]
    assert len(lines) == 5, "no batch was requested twice"


def test_an_error_flag_that_is_not_false_is_an_error(claude):
    claude.script({"do": "error", "text": "Invalid API key", "code": 0}, fields={"is_error": 1})
    with pytest.raises(EnvironmentFault, match="not logged in"):
        claude.make(n=5)


def test_init_lets_claude_write_the_rows_and_a_failed_run_resumes(claude):
    """The rows of a run that costs money are next to the folder, which an error removes."""
    annie = load_persona("annie")
    tools = [dict(tool) for tool in annie.tools]
    sources = Sources(annie.system_prompt, tools, teacher="claude-cli", n_rows=20)
    claude.script("ok", {"do": "error", "text": "Please run /login"})
    with pytest.raises(AnnieError):
        initialize(sources, claude.folder / "mine")
    assert not (claude.folder / "mine").exists()
    claude.script("ok")
    n_before = len(claude.calls())
    result = initialize(sources, claude.folder / "mine")
    assert result.calibration_rows == 20
    rows = read_rows(claude.folder / "mine" / "calibration.jsonl")
    assert {row["provenance"]["teacher"] for row in rows} == {"claude_cli"}
    categories = len(default_categories([tool["function"]["name"] for tool in tools]))
    assert len(claude.calls()) - n_before < 1 + categories  # the first batch is not made again
    assert not list(claude.folder.glob("*.rows.jsonl"))


def test_a_call_that_must_be_confirmed_has_a_turn_for_the_question():
    tool = {"type": "function", "function": {"name": "book_room", "parameters": {}}}
    prompt = "Always confirm with the user before you book."
    persona = Persona(name="P", system_prompt=prompt, tools=(tool,))
    category = Category("book_room", "rooms", "book_room")
    text = prompt_for(persona, category, 2, [])
    assert "has 2 turns: P asks for confirmation" in text
    turns = schema_for(persona, category)["properties"]["conversations"]["items"]["properties"][
        "turns"
    ]
    assert (turns["minItems"], turns["maxItems"]) == (1, 2)
