"""What the answers of a file do, next to the persona's gates: counts, what is missing, the command that adds it, and weights."""

from __future__ import annotations

import json
import random
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from command_line import annie_quant
from paths import DATA

from annie_quant.core.errors import UsageError
from annie_quant.data import behaviours, load_persona
from annie_quant.data.behaviour_prompts import add_prompts
from annie_quant.data.behaviours import Mixture, compare, count_asked, count_rows, mixture_of
from annie_quant.data.row_rules import faults
from annie_quant.data.rows import gate_texts, read_rows
from annie_quant.data.workloads import resolve
from annie_quant.judge.library import build_workload

Row = dict[str, Any]
LIBRARY = str(DATA / "personas" / "library.json")


def tool(name: str) -> Row:
    parameters = {"type": "object", "properties": {"day": {"type": "string", "format": "date"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("open_on"), tool("closed_on")]


def row(*messages: Row, tools: Sequence[Row] = TOOLS, **more: Any) -> Row:
    first = {"role": "user", "content": "When?"}
    return {"messages": [first, *messages], "tools": list(tools), **more}


def said(text: str = "I see.") -> Row:
    return {"role": "assistant", "content": text}


def calling(*names: str) -> Row:
    calls = [{"type": "function", "function": {"name": n, "arguments": "{}"}} for n in names]
    return {"role": "assistant", "content": "", "tool_calls": calls}


RESULT = {"role": "tool", "content": "{}"}
USER = {"role": "user", "content": "And then?"}


def test_each_answer_has_one_behaviour() -> None:
    rows = [
        row(calling("open_on"), RESULT, said()),
        row(calling("open_on", "closed_on"), RESULT, RESULT, calling("closed_on")),
        row(said(), USER, said()),
        row(said(), tools=[]),
        row(said(), tools=[], thinking=True),
        row(calling("open_on"), RESULT),  # the answer from the result is missing
        row(),
    ]
    expected = {
        "calls open_on": 2,
        "calls closed_on": 1,
        "several calls": 1,
        "answers from a result": 1,
        "declines": 2,
        "talk": 2,
        "thinks": 1,
        "no answer yet": 2,
    }
    assert count_rows(rows) == Counter(expected)


def test_gates_ask_for_what_their_labels_and_their_logs_state() -> None:
    call = {"open_on": {"day": ["2026-12-24"]}}
    user = {"role": "user", "content": "When?"}
    cases = [
        {"id": 1, "messages": [user], "expect": {"tool": "open_on", "arguments": {}}},
        {"id": 2, "messages": [user], "expect": {"calls": [call, call]}},
        {"id": 3, "messages": [user], "expect": {"no_tool": True}},
        {"id": 4, "messages": [user], "expect": {"logged": {"calls": ["closed_on"]}}},
        {"id": 5, "messages": [user]},  # the model decides
        {"id": 6, "messages": [user, calling("open_on"), RESULT]},
        {"id": 7, "turns": ["Hi", {"results": []}], "expect": {"turns": [{"tool": "open_on"}, {}]}},
        {"id": 8, "messages": [user], "tools": []},
    ]
    document = {"name": "w", "max_tokens": 9, "tools": TOOLS, "cases": cases}
    document["gates"] = ["tool_call", "tool_arguments", "abstention", "tool_selection"]
    expected = {
        "calls open_on": 2,
        "calls closed_on": 1,
        "several calls": 1,
        "declines": 1,
        "answers from a result": 2,
        "talk": 1,
    }
    assert count_asked([build_workload(document)]) == Counter(expected)
    thinking = build_workload({**document, "thinking": True})
    assert count_asked([thinking])["thinks"] == 9


def library_rows(*answers: Row) -> list[Row]:
    persona = load_persona(LIBRARY)
    provenance = {"persona": LIBRARY, "prompt_sha256": persona.prompt_sha256}
    system = {"role": "system", "content": persona.system_prompt}
    rows = []
    for number, answer in enumerate(answers):
        user = {"role": "user", "content": f"Question {number}"}
        rows.append(
            {
                "messages": [system, user, answer],
                "tools": list(persona.tools),
                "provenance": provenance,
            }
        )
    return rows


def write(file: Path, rows: Sequence[Row]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_file_of_declines_lacks_calls_and_the_printed_command_adds_them(tmp_path: Path) -> None:
    file = write(tmp_path / "c.jsonl", library_rows(*[said()] * 20))
    compared = compare(file)
    assert compared.persona is not None
    assert compared.file == Counter({"declines": 20})
    missing = compared.missing()
    tools = [t["function"]["name"] for t in compared.persona.tools]
    assert {f"calls {name}" for name in tools} <= {*missing}
    assert "declines" not in missing
    (note,) = behaviours.notes_on(compared, file)
    assert "the gates test what c.jsonl lacks" in note
    command = note[note.index("annie-quant data") : note.rindex(" adds prompts")]
    done = annie_quant(*shlex.split(command)[1:])
    assert done.returncode == 0, done.stderr
    more = read_rows(tmp_path / "c-more.jsonl")
    assert more[:20] == read_rows(file)
    called = Counter(r["id"].rpartition("-")[0] for r in more[20:])
    assert called["prompt-calls"] == 40
    assert not behaviours.notes_on(compare(tmp_path / "c-more.jsonl"), file)


def test_a_file_that_shows_what_the_gates_test_has_no_note(tmp_path: Path) -> None:
    asked = count_asked(resolve(LIBRARY))
    answers = []
    for name in asked:
        answer = said()
        if name == "several calls":
            answer = calling("a", "b")
        elif name.startswith("calls "):
            answer = calling(name.removeprefix("calls "))
        answers.append(answer)
    rows = library_rows(*answers)
    for one in rows:
        one["messages"].insert(2, RESULT)
        one["messages"].insert(2, calling("renew_loan"))
    rows += library_rows(said())
    file = write(tmp_path / "c.jsonl", rows)
    compared = compare(file)
    assert compared.gates == asked
    assert compared.missing() == []


def test_a_file_of_no_known_persona_is_described_without_gates(tmp_path: Path) -> None:
    rows = [{**row(said()), "provenance": {"persona": "/nowhere/persona.json"}}]
    compared = compare(write(tmp_path / "c.jsonl", rows))
    assert compared.persona is None
    assert compared.missing() == []
    with pytest.raises(UsageError, match="no gates to take shares of"):
        mixture_of("gates", compared)
    with pytest.raises(UsageError, match="no logs to take shares of"):
        mixture_of("logs", compared)


# ---- generated prompts


@pytest.mark.parametrize(
    "behaviour",
    ["calls", "calls renew_loan", "several calls", "answers from a result", "declines", "talk"],
)
def test_prompts_ask_for_the_behaviour_and_are_none_of_the_gates(
    behaviour: str, tmp_path: Path
) -> None:
    persona = load_persona(LIBRARY)
    output = tmp_path / "more.jsonl"
    result = add_prompts(LIBRARY, [behaviour], output, n=12)
    rows = read_rows(output)
    assert result.added == {behaviour: len(rows)}
    assert len(rows) == 12 or result.short == [behaviour]
    users = [r["messages"][1]["content"] for r in rows]
    assert len({*users}) == len(users)
    assert not {*users} & {text for _, text in gate_texts(persona)}
    for one in rows:
        assert faults(one, persona) == []
        assert one["messages"][0]["content"] == persona.system_prompt
        ends_with = "tool" if behaviour == "answers from a result" else "user"
        assert one["messages"][-1]["role"] == ends_with
        assert bool(one.get("tools")) == (behaviour != "talk")
    # Another seed draws other prompts, the same seed the same.
    again = tmp_path / "again.jsonl"
    add_prompts(LIBRARY, [behaviour], again, n=12)
    assert again.read_bytes() == output.read_bytes()


def test_prompts_are_apart_from_the_file_that_they_are_added_to(tmp_path: Path) -> None:
    first = tmp_path / "first.jsonl"
    second = tmp_path / "second.jsonl"
    add_prompts(LIBRARY, ["calls"], first, n=10)
    result = add_prompts(LIBRARY, ["calls"], second, n=10, add_to=first)
    rows = read_rows(second)
    assert result.rows == len(rows) == 20
    texts = [json.dumps(r["messages"]) for r in rows]
    assert len({*texts}) == 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--behaviour", "sulks"], "--behaviour 'sulks' is not known"),
        (["--behaviour", "calls fly"], "no prompt asks for 'calls fly': it has no tool 'fly'"),
        (["--add-to", LIBRARY], "--add-to takes the prompts of --behaviour"),
    ],
)
def test_what_cannot_be_added_is_one_line_and_writes_nothing(
    words: list[str], message: str, tmp_path: Path
) -> None:
    output = tmp_path / "more.jsonl"
    done = annie_quant("data", "--persona", LIBRARY, "--output", str(output), *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert not output.exists()


def test_an_existing_output_stays(tmp_path: Path) -> None:
    output = write(tmp_path / "more.jsonl", [row(said())])
    before = output.read_bytes()
    with pytest.raises(UsageError, match="exists"):
        add_prompts(LIBRARY, ["talk"], output, n=3)
    assert output.read_bytes() == before
    add_prompts(LIBRARY, ["talk"], output, n=3, force=True)
    assert len(read_rows(output)) == 3


def test_a_persona_without_tools_has_nothing_to_decline(tmp_path: Path) -> None:
    persona = tmp_path / "persona.json"
    persona.write_text(json.dumps({"name": "Otto", "system_prompt": "Be brief."}))
    for behaviour, reason in (("declines", "nothing to decline"), ("calls", "it has no tools")):
        with pytest.raises(UsageError, match=reason):
            add_prompts(str(persona), [behaviour], tmp_path / "more.jsonl", n=3)


# ---- weights


def random_answers(rng: random.Random) -> list[str]:
    names = ["calls a", "calls b", "declines", "talk", "several calls"]
    return [rng.choice(names) for _ in range(rng.randrange(1, 60))]


@pytest.mark.parametrize("seed", range(30))
def test_weights_are_one_on_average_and_in_the_ratio_of_the_factors(seed: int) -> None:
    rng = random.Random(seed)
    answers = random_answers(rng)
    present = sorted({*answers})
    factors = {name: rng.uniform(0.1, 9) for name in present if rng.random() < 0.6}
    weights = Mixture(factors=factors).weights(answers)
    assert sum(weights) == pytest.approx(len(answers))
    for name, weight in zip(answers, weights, strict=True):
        ratio = factors.get(name, 1.0) / factors.get(answers[0], 1.0)
        assert weight == pytest.approx(weights[0] * ratio)


@pytest.mark.parametrize("seed", range(30))
def test_shares_become_those_of_the_gates_within_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    answers = random_answers(rng)
    counts = Counter(answers)
    # Shares that no weight beyond the limit is needed for.
    wanted = {name: n * rng.uniform(0.6, 1.6) for name, n in counts.items()}
    gates = Counter({name: round(1000 * n) for name, n in wanted.items()})
    mixture = mixture_of("gates", behaviours.Compared(counts, None, gates))
    weights = mixture.weights(answers)
    for name in counts:
        share = sum(w for a, w in zip(answers, weights, strict=True) if a == name) / len(answers)
        assert share == pytest.approx(gates[name] / sum(gates.values()), rel=1e-6)


def test_calls_stand_for_the_calls_of_every_tool() -> None:
    weights = Mixture(factors={"calls": 3.0}).weights(["calls a", "calls b", "talk"])
    assert weights[0] == weights[1] == pytest.approx(3 * weights[2])


def test_one_rare_behaviour_does_not_outweigh_the_rest() -> None:
    answers = ["declines"] * 400 + ["calls a"]
    mixture = Mixture(shares={"calls a": 0.9, "declines": 0.1})
    weights = mixture.weights(answers)
    assert weights[-1] <= behaviours.MAX_WEIGHT**2 * weights[0] + 1e-9


@pytest.mark.parametrize("text", ["declines", "declines=0", "declines=nan", "sulks=2", "", "=2"])
def test_a_mixture_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--mixture"):
        mixture_of(text, behaviours.Compared(Counter()))


def test_a_factor_that_no_answer_has_is_refused() -> None:
    with pytest.raises(UsageError, match="calls fly: no answer"):
        Mixture(factors={"calls fly": 2.0}).weights(["calls a", "talk"])
    with pytest.raises(UsageError, match="show none of the behaviours"):
        Mixture(shares={"declines": 1.0}).weights(["talk"])


def test_every_answer_counts_once_by_default() -> None:
    assert Mixture().weights(["talk", "declines"]) == [1.0, 1.0]
