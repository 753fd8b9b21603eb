"""Generated rows and labels do not contradict the system prompt that they were made for: five invented personas.

Their prompts and tools are in tests/data/personas; tests/perf/generated_rows.md is a reading of their rows.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter

import pytest
from command_line import CliRunner
from paths import TESTS, TINY_ANNIE

from annie_quant.cli import app as cli
from annie_quant.core.progress import SILENT
from annie_quant.data import generate, load_persona, read_rows
from annie_quant.data.init_folder import Sources, initialize
from annie_quant.data.log_sample import max_tokens
from annie_quant.data.model_rows import ModelAnswer, read_back, write_rows
from annie_quant.data.prompt_rules import rules_of
from annie_quant.data.tool_results import named_fields
from annie_quant.data.workloads import gate_documents
from annie_quant.documents.persona import Persona

FOLDER = TESTS / "data" / "personas"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
# the weekdays on which each prompt says that nobody is there, and its today
CLOSED = {"restaurant": {0}, "hausarzt": {5, 6}}
TODAY = {
    "library": "2027-01-12", "restaurant": "2027-03-04", "hausarzt": "2027-02-08",
    "courier": "2027-05-20", "greenhouse": "2027-03-03",
}  # fmt: skip
RANGES = [
    ("from_date", "to_date"), ("von", "bis"), ("start", "end"),
    ("min_temperature", "max_temperature"), ("opening_time", "closing_time"), ("lowest", "average"), ("average", "highest"),
]  # fmt: skip
# what each description, or result schema, says that the tool returns
FIELDS = {
    "find_book": {"title", "shelf", "copies", "available"},
    "renew_loan": {"loan_id", "due_date"},
    "loan_history": {"loan_id", "title", "returned_on_date"},
    "library_hours": {"opening_time", "closing_time"},
    "free_tables": {"free_times", "tables_left"},
    "book_table": {"booking_id", "table", "time"},
    "termin_buchen": {"Terminnummer", "Raum"},
    "freie_termine": {"freie_uhrzeiten"},
    "rueckruf": {"Rückrufnummer", "Uhrzeit"},
    "get_quote": {"price", "currency", "delivery_days"},
    "schedule_pickup": {"pickup_id", "driver", "date"},
    "read_sensor": {"sensor", "value", "unit", "measured_at_time"},
    "reading_history": {"average", "lowest", "highest"},
}


def persona_of(name):
    return load_persona(FOLDER / f"{name}.json")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return 50 rows of each persona by the offline teacher."""
    folder = tmp_path_factory.mktemp("rows")
    result = {}
    for name in NAMES:
        generate(FOLDER / f"{name}.json", n=50, output=folder / name, seed=1)
        result[name] = read_rows(folder / name)
    return result


def calls_of(row):
    for message in row["messages"]:
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"], json.loads(call["function"]["arguments"])


def results_of(row):
    """Yield (tool, result) of each result, which follows its call."""
    for call, message in zip(row["messages"], row["messages"][1:], strict=False):
        if message["role"] == "tool":
            yield call["tool_calls"][0]["function"]["name"], json.loads(message["content"])


def objects(value):
    """Yield a JSON value's objects, nested ones included."""
    if isinstance(value, dict):
        yield value
    for item in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from objects(item)


def test_there_are_fifty_rows_of_each_persona(rows):
    assert len(NAMES) == 5 and {len(own) for own in rows.values()} == {50}


@pytest.mark.parametrize("name", NAMES)
def test_no_range_ends_before_it_begins(rows, name):
    n_compared = 0
    for row in rows[name]:
        for value in (*dict_values(calls_of(row)), *dict_values(results_of(row))):
            for part in objects(value):
                for low, high in RANGES:
                    if low in part and high in part:
                        n_compared += 1
                        assert part[low] <= part[high], part
    assert n_compared >= 5 or name == "restaurant"


def dict_values(pairs):
    return [value for _, value in pairs]


@pytest.mark.parametrize("name", NAMES)
def test_dates_are_near_the_prompts_today_and_not_on_closed_days(rows, name):
    today = datetime.date.fromisoformat(TODAY[name])
    dates = []
    for row in rows[name]:
        for tool, arguments in calls_of(row):
            text = json.dumps(arguments)
            found = [datetime.date.fromisoformat(d) for d in re.findall(r"20\d\d-\d\d-\d\d", text)]
            assert all(day.weekday() not in CLOSED.get(name, ()) for day in found), arguments
            if tool not in ("loan_history", "reading_history"):
                assert all(day > today for day in found), arguments
            else:
                assert all(day < today for day in found), arguments
            dates += found
    assert dates and all(abs((day - today).days) < 60 for day in dates)


@pytest.mark.parametrize("name", NAMES)
def test_results_have_the_fields_of_the_tool_and_are_not_one_answer(rows, name):
    contents = []
    for row in rows[name]:
        for tool, result in results_of(row):
            assert set(result) >= FIELDS.get(tool, set()), (tool, result)
            assert "status" not in result and "reference" not in result
            contents.append(json.dumps(result))
    assert len(contents) >= 10 and len(set(contents)) == len(contents)


def test_a_book_is_not_returned_before_it_is_borrowed(rows):
    returned = 0
    for row in rows["library"]:
        for tool, result in results_of(row):
            if tool == "loan_history":
                returned += 1
                assert result["returned_on_date"] >= result["to_date"]
    assert returned


def test_a_measurement_has_the_unit_of_its_quantity(rows):
    units = {"temperature": "celsius", "humidity": "percent", "light": "lux"}
    measured = [
        r for row in rows["greenhouse"] for tool, r in results_of(row) if tool == "read_sensor"
    ]
    assert measured
    for result in measured:
        assert result["unit"] == units[result["quantity"]]
        assert isinstance(result["value"], (int, float))
    ranges = [a for row in rows["greenhouse"] for tool, a in calls_of(row) if tool == "set_range"]
    assert {a["unit"] for a in ranges} == {"celsius"}


def test_no_row_of_the_decliner_is_about_anything_but_its_tools(rows):
    for own in rows.values():
        for row in own:
            assert list(calls_of(row)) and row["tools"]
    texts = " ".join(
        m["content"] for row in rows["library"] for m in row["messages"][1:] if m["role"] == "user"
    )
    assert "capital" not in texts and "Tessa" not in texts


def test_what_must_be_confirmed_is_confirmed_before_the_call(rows):
    n_confirmed = 0
    for row in rows["restaurant"]:
        called = {name for name, _ in calls_of(row)}
        roles = [m["role"] for m in row["messages"]]
        if called & {"book_table", "cancel_booking"}:
            n_confirmed += 1
            assert roles[1:5] == ["user", "assistant", "user", "assistant"]
            question = row["messages"][2]["content"]
            assert question.endswith("?") and "tool_calls" not in row["messages"][2]
            values = [str(v) for _, arguments in calls_of(row) for v in arguments.values()]
            assert all(value in question for value in values)
        else:
            assert roles[1:3] == ["user", "assistant"] and row["messages"][2]["tool_calls"]
    assert n_confirmed >= 25


def test_every_value_of_a_call_is_in_what_the_user_says(rows):
    """So that a persona that must ask for missing values has none to ask for."""
    for own in rows.values():
        for row in own:
            user = row["messages"][1]["content"].lower().replace("_", " ")
            for _, arguments in calls_of(row):
                for value in leaves(arguments):
                    assert value.lower().replace("_", " ") in user, (value, user)


def leaves(value):
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif not isinstance(value, bool):
        yield f"{value:g}" if isinstance(value, float) else str(value)


def test_the_german_persona_has_german_users_phones_and_dates(rows):
    users = [row["messages"][1]["content"] for row in rows["hausarzt"]]
    assert not any(
        re.search(r"\b(?:please|go ahead|next|with that|can you)\b", text.lower()) for text in users
    )
    calls = [call for row in rows["hausarzt"] for call in calls_of(row)]
    births = [a["geburtsdatum"] for tool, a in calls if tool == "termin_buchen"]
    assert births and all(re.fullmatch(r"\d\d\.\d\d\.(19|20)\d\d", birth) for birth in births)
    phones = [a["telefon"] for tool, a in calls if tool == "rueckruf"]
    assert phones and all(re.fullmatch(r"\+49 30 23125 \d{3}", phone) for phone in phones)


def test_times_are_in_the_opening_hours(rows):
    times = [a["time"] for row in rows["restaurant"] for _, a in calls_of(row) if "time" in a]
    assert times and all("17:00" <= time <= "22:00" for time in times)


# ---- what is read from a prompt


@pytest.mark.parametrize(
    ("prompt", "confirmed"),
    [
        ("Always confirm with the user before booking.", {"book_room"}),
        ("Ask for confirmation before every tool call.", {"book_room", "find_room", "send_mail"}),
        (
            "Before you send or book anything, wait until the user said yes.",
            {"book_room", "send_mail"},
        ),
        ("Bevor du etwas buchst, lass es dir bestätigen.", {"book_room"}),
        ("Tell the user the confirmation number.", set()),
        ("Never use markdown. Be brief.", set()),
    ],
)
def test_tools_that_must_be_confirmed(prompt, confirmed):
    tools = tuple(
        {"type": "function", "function": {"name": name}}
        for name in ("find_room", "book_room", "send_mail")
    )
    rules = rules_of(Persona(name="P", system_prompt=prompt, tools=tools))
    if "buchst" in prompt:  # no English tool has a German verb: all that change something
        confirmed = {"book_room", "send_mail"}
    assert rules.confirmed == confirmed


@pytest.mark.parametrize(
    ("prompt", "language"),
    [
        ("You are a shop's assistant. Answer only in German.", "de"),
        ("Du bist die Stimme eines Hauses und sprichst nicht viel.", "de"),
        ("Vous êtes un assistant et vous répondez avec une phrase.", ""),
        ("Reply in French, always.", ""),
        ("You book trips.", "en"),
        ("", "en"),
    ],
)
def test_the_language_of_answers(prompt, language):
    assert rules_of(Persona(name="P", system_prompt=prompt)).language == language


@pytest.mark.parametrize(
    ("prompt", "today"),
    [
        ("Today is 12 January 2027.", "2027-01-12"),
        ("Heute ist der 8.2.2027.", "2027-02-08"),
        ("Current date: March 3, 2027.", "2027-03-03"),
        ("Today is 45 January 2027.", "2026-12-01"),
        ("Founded on 1 May 1999.", "2026-12-01"),
    ],
)
def test_todays_date(prompt, today):
    assert rules_of(Persona(name="P", system_prompt=prompt)).today.isoformat() == today


@pytest.mark.parametrize(
    ("description", "fields"),
    [
        ("Returns the order's status, carrier and expected delivery date.", ["status", "carrier", "expected_delivery_date"]),
        ("Get weather. Returns an object with temperature and wind_speed.", ["temperature", "wind_speed"]),
        ("Return the current temperature of a room.", ["temperature"]),
        ("Gibt die Buchungsnummer und den Tisch zurück.", ["Buchungsnummer", "Tisch"]),
        ("Books a table.", []),
    ],
)  # fmt: skip
def test_fields_that_a_description_names(description, fields):
    assert named_fields(description) == fields


# ---- labels


@pytest.mark.parametrize("name", NAMES)
def test_prompts_of_a_persona_with_rules_have_no_labels(name):
    for document in gate_documents(persona_of(name), 30):
        assert document.cases
        for case in document.cases:
            assert set(case.expect or {}) <= {"logged"}
        assert not {"tool_call", "tool_arguments", "abstention", "recall"} & {*document.gates}


def test_prompts_of_a_persona_without_rules_have_labels_and_facts_have_none(tmp_path):
    """A fact may be looked up by a tool, so that it cannot have the label "calls nothing"."""
    persona = json.loads((FOLDER / "greenhouse.json").read_text())
    persona["system_prompt"] = "You help a grower."
    (tmp_path / "p.json").write_text(json.dumps(persona))
    documents = {d.name: d for d in gate_documents(load_persona(tmp_path / "p.json"), 30)}
    assert all("tool" in case.expect for case in documents["tool_calls"].cases)
    expects = Counter(bool(case.expect) for case in documents["no_tool"].cases)
    assert expects[True] == 20 and expects[False] == 10


# ---- rows by the model


class ScriptedModel:
    """A model that asks before it books, declines facts, and answers a result. folder: its name."""

    folder = "bf16"

    def __init__(self, cut=(), broken=()):
        self.cut = cut
        self.broken = broken
        self.questions = []

    def answer(self, conversations, tools, max_tokens, progress, text):
        self.questions += [c[-1]["content"] for c in conversations]
        answers = [self.reply([dict(m) for m in c]) for c in conversations]
        return [ModelAnswer(a, "long" not in a["content"], 12) for a in answers]

    def reply(self, messages):
        last = messages[-1]
        if "one word: yes or no" in last["content"]:
            return assistant("Yes." if "Berlin" in last["content"] else "no")
        if last["role"] == "tool":
            return assistant(f"It is arranged: {last['content']}")
        if last["content"] == "Yes, please.":
            return assistant("", "book_table", TABLE)
        if "book a table" in last["content"].lower():
            return assistant("Shall I?")
        if "cancel" in last["content"].lower():
            return assistant("", "cancel_booking", {"booking": 1})
        if "free tables" in last["content"].lower():
            return assistant("", "free_tables", {"date": "2027-03-06", "guests": 2})
        return assistant(
            "That is too long" if "capital" in last["content"] else "I only take bookings."
        )

    def count(self, text):
        return len(text.split())


TABLE = {
    "date": "2027-03-06",
    "time": "18:00",
    "guests": 2,
    "name": "Ida",
    "phone": "+1 202 555 0100",
}


def assistant(text, name="", arguments=None):
    message = {"role": "assistant", "content": text}
    if name:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        ]
    return message


def test_the_model_writes_whole_conversations_and_what_is_not_valid_is_counted():
    persona = persona_of("restaurant")
    written = write_rows(persona, ScriptedModel(), 60, 0, SILENT)
    booked = [row for row in written.rows if ("book_table", TABLE) in calls_of(row)]
    assert booked
    for row in booked:
        roles = [m["role"] for m in row["messages"]]
        assert roles == ["system", "user", "assistant", "user", "assistant", "tool", "assistant"]
        assert {"booking_id", "table"} <= set(json.loads(row["messages"][5]["content"]))
    assert not any("cancel_booking" in name for row in written.rows for name, _ in calls_of(row))
    assert any(
        "arguments of cancel_booking" in why or "schema" in why or "'booking'" in why
        for why in written.left_out
    )
    assert written.left_out["an answer is longer than 512 tokens"]
    assert len(written.rows) + sum(written.left_out.values()) == 60
    assert {row["provenance"]["teacher"] for row in written.rows} == {"model"}


def test_rows_are_read_back_and_those_that_break_the_prompt_are_named():
    rows = []
    for i in range(30):
        user = {"role": "user", "content": "x"}
        answer = {"role": "assistant", "content": "Berlin" if i == 3 else "No."}
        rows.append({"id": f"r{i}", "messages": [user, answer]})
    model = ScriptedModel()
    result = read_back(rows, persona_of("library"), model, SILENT)
    assert (result.n, result.contradicting, result.unclear) == (30, ["r3"], 0)
    assert "1 break it (r3)" in result.line()
    assert "general knowledge" in model.questions[0].lower()


def test_init_with_a_model_shows_ten_rows_and_reads_thirty(tmp_path):
    document = json.loads((FOLDER / "restaurant.json").read_text())
    sources = Sources(
        document["system_prompt"], document["tools"], model=ScriptedModel(), n_rows=240
    )
    result = initialize(sources, tmp_path / "mine")
    assert result.read_back.n == 30 and len(result.examples) == 10
    assert result.next.startswith("next: annie-quant search")
    # twice 12 tokens and a margin is below the least limit
    assert set(result.max_tokens.values()) == {128}
    written = read_rows(tmp_path / "mine" / "calibration.jsonl")
    assert {row["provenance"]["teacher"] for row in written} == {"model"}


# ---- the last line, and max_tokens


def few_logs(folder, text="Your table is at six."):
    chats = [
        {"messages": [{"role": "user", "content": f"Question {i} about {i * 7}?"}, {"role": "assistant", "content": text}]}
        for i in range(41)
    ]  # fmt: skip
    (folder / "l.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder / "l.jsonl"


def test_with_few_logs_the_last_line_says_what_to_do(tmp_path):
    arguments = ["init", "--logs", str(few_logs(tmp_path)), "--output", str(tmp_path / "mine")]
    outcome = CliRunner().invoke(cli, arguments)
    last = outcome.output.strip().splitlines()[-1]
    assert "too few" in last and "--fill --model BF16" in last and "next:" not in last


@pytest.mark.parametrize(("more", "expected"), [({}, 1034), ({"max_tokens": 77}, 77)])
def test_max_tokens_comes_from_characters_with_a_stated_margin_or_the_flag(
    tmp_path, more, expected
):
    log = few_logs(tmp_path, "x" * 1000)
    result = initialize(Sources("Be brief.", [], [log], **more), tmp_path / "mine")
    assert result.max_tokens == {"answers": expected}
    stated = [line for line in result.lines if line.startswith("max_tokens: ")]
    assert bool(stated) is not bool(more) and all("--max-tokens" in line for line in stated)


def test_max_tokens_is_counted_by_the_models_tokenizer(tmp_path):
    log = few_logs(tmp_path, "one two three " * 50)
    sources = Sources("Be brief.", [], [log], model=ScriptedModel())
    assert initialize(sources, tmp_path / "mine").max_tokens == {"answers": 2 * 151 + 32}
    assert max_tokens([], 1) == 256


# ---- the whole command, with a real model


def test_init_with_a_checkpoint_writes_rows_in_its_own_words_and_resumes(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="the offline engine needs torch")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    annie = load_persona("annie")
    (tmp_path / "prompt.txt").write_text(annie.system_prompt)
    (tmp_path / "tools.json").write_text(json.dumps(annie.tools))
    arguments = [
        "init",
        "--prompt",
        str(tmp_path / "prompt.txt"),
        "--tools",
        str(tmp_path / "tools.json"),
    ]
    arguments += [
        "--model",
        str(TINY_ANNIE),
        "--rows",
        "24",
        "--force",
        "--output",
        str(tmp_path / "mine"),
    ]
    outcome = CliRunner().invoke(cli, arguments)
    assert outcome.exit_code == 0, outcome.output
    rows = read_rows(tmp_path / "mine" / "calibration.jsonl")
    assert len(rows) >= 12 and any(list(calls_of(row)) for row in rows)
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert f"read {min(30, len(rows))} rows" in outcome.output or "cannot judge" in outcome.output
    (answers,) = (tmp_path / "cache").rglob("answers-*.jsonl")
    stored = answers.read_bytes()
    assert CliRunner().invoke(cli, arguments).exit_code == 0
    assert answers.read_bytes() == stored  # nothing was computed again
    assert read_rows(tmp_path / "mine" / "calibration.jsonl") == rows


def test_an_evaluation_names_the_file_and_the_value_for_cut_answers(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="the offline engine needs torch")
    from annie_quant.runtime import evaluate

    case = {"id": 1, "messages": [{"role": "user", "content": "Tell me a story about a fox."}]}
    document = {
        "name": "stories",
        "persona": "annie",
        "max_tokens": 3,
        "gates": ["same_text"],
        "cases": [case],
    }
    (tmp_path / "stories.json").write_text(json.dumps(document))
    result = evaluate(
        TINY_ANNIE, TINY_ANNIE, str(tmp_path / "stories.json"), cache=tmp_path, with_ensemble=False
    )
    (note,) = [note for note in result["notes"] if "cut" in note]
    assert note.startswith("1 of 1 answers of bf16 to stories are cut")
    assert f"set max_tokens to 6 (now 3) in {tmp_path / 'stories.json'}" in note
