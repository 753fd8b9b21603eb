"""Any persona with tools: the resolver, the offline teacher from JSON schemas, the one form of a row, README's own path."""

from __future__ import annotations

import contextlib
import json
import random

import jsonschema
import pytest

from annie_quant import judge
from annie_quant.core.errors import ServerError, UsageError
from annie_quant.data import Options, check_prompt_hash, generate, load_persona, read_rows, validate
from annie_quant.data.duplicates import THRESHOLD, DuplicateFinder, features
from annie_quant.data.row_rules import faults, form_faults, form_report
from annie_quant.data.schema_values import draw_arguments
from annie_quant.data.tool_exchanges import draw_exchange
from annie_quant.data.workloads import gate_documents, generated_workloads, personas_of, resolve
from annie_quant.documents.persona import Persona
from annie_quant.judge.library import build_workload
from annie_quant.judge.workloads import NO_RESULT


def function(name, description="", **parameters):
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


NESTED = function(
    "book",
    "Book a trip.",
    type="object",
    properties={
        "from": {"type": "string", "minLength": 3},
        "date": {"type": "string", "format": "date"},
        "travellers": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {"$ref": "#/$defs/person"},
        },
        "class": {"enum": ["first", "second"]},
        "pets": {"type": ["integer", "null"], "minimum": 1, "maximum": 3},
        "window": {"type": "boolean"},
        "price": {"anyOf": [{"type": "number", "maximum": 99.5, "exclusiveMinimum": 10}, {"type": "null"}]},
    },
    required=["from", "date", "travellers", "class"],
    additionalProperties=False,
    **{"$defs": {"person": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 18}},
                            "required": ["name", "age"], "additionalProperties": False}}},
)  # fmt: skip
NOTHING = function("reset", "Reset everything.", type="object", properties={})


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.json"
    path.write_text(
        json.dumps({"name": "Otto", "system_prompt": "You book trips.", "tools": [NESTED, NOTHING]})
    )
    return path


@pytest.fixture
def many(tmp_path):
    path = tmp_path / "many.json"
    tools = [
        function(f"tool_{i}", f"Do thing {i} for the user.", type="object",
                 properties={"subject": {"type": "string"}, "n": {"type": "integer"}}, required=["subject"])
        for i in range(52)
    ]  # fmt: skip
    path.write_text(json.dumps({"name": "Many", "system_prompt": "Use tools.", "tools": tools}))
    return path


@pytest.mark.parametrize("split", ["train", "calibration", "gate"])
def test_drawn_arguments_fit_their_schema(split):
    rng, schema = random.Random(0), NESTED["function"]["parameters"]
    drawn = [draw_arguments(schema, rng, split) for _ in range(200)]
    assert all(not list(jsonschema.Draft202012Validator(schema).iter_errors(d)) for d in drawn)
    assert {"pets" in d for d in drawn} == {True, False} and {d["class"] for d in drawn} == {
        "first",
        "second",
    }


def test_the_splits_share_no_request(own):
    persona = load_persona(own)
    texts = {}
    for split in ("train", "calibration", "gate"):
        rng = random.Random(1)
        texts[split] = {draw_exchange(persona, "book", rng, split).user for _ in range(200)}
    assert not texts["train"] & texts["gate"] and not texts["calibration"] & texts["gate"]


def test_data_for_a_persona_that_is_not_annie(own, tmp_path):
    result = generate(own, n=60, output=tmp_path / "d.jsonl")
    rows = read_rows(tmp_path / "d.jsonl")
    assert result.ok and result.with_tools >= 12
    assert validate(rows, load_persona(own)).faults == {} and check_prompt_hash(rows, own) is None
    assert {c["function"]["name"] for r in rows for m in r["messages"] for c in m.get("tool_calls", ())} == {
        "book", "reset",
    }  # fmt: skip
    assert all(len(r["tools"]) == 2 for r in rows)


def test_52_tools_and_the_built_in_personas(many, tmp_path):
    assert generate(many, n=165, output=tmp_path / "m.jsonl").with_tools >= 100
    (calls, *_) = resolve(many)
    assert {c.expect["tool"] for c in calls.cases} == {f"tool_{i}" for i in range(52)}
    assert len(calls.tools_for(calls.cases[0])) == 52
    for name, n_tools in (("home", 12), ("support", 4)):
        persona = load_persona(name)
        assert len(persona.tools) == n_tools and persona.is_built_in
        assert generate(name, n=120, output=tmp_path / f"{name}.jsonl").ok
        workloads = resolve(name)
        assert [w.name for w in workloads] == [
            "no_tool",
            "parallel_calls",
            "talk",
            "tool_calls",
            "tool_results",
        ]
        assert all(w.system_prompt == persona.system_prompt for w in workloads)
        called = {c.expect["tool"] for w in workloads if w.name == "tool_calls" for c in w.cases}
        assert called == {t["function"]["name"] for t in persona.tools}


def test_the_stored_workloads_are_those_that_the_grammar_makes():
    for name in ("home", "support"):
        persona = load_persona(name)
        for document in gate_documents(persona, 120):
            stored = next(w for w in resolve(name) if w.name == document.name)
            assert [c.expect for c in stored.cases] == [c.expect or {} for c in document.cases]


def plain_value(value):
    if isinstance(value, dict):
        return {k: plain_value(v[0]) for k, v in value.items()}
    return [plain_value(v) for v in value] if isinstance(value, list) else value


def test_labels_of_generated_cases_are_right(own):
    """A model that answers every label's call passes, and one that calls another tool fails."""
    for persona in (load_persona(own), load_persona("home"), load_persona("support")):
        workloads = {w.name: w for w in generated_workloads(persona, n=40)}
        workload = workloads["tool_calls"]
        for case in workload.cases[:40]:
            arguments = {
                k: v[0] if isinstance(v, list) else v for k, v in case.expect["arguments"].items()
            }
            calls = [{"id": "", "name": case.expect["tool"], "arguments": json.dumps(arguments)}]
            answer = judge.Answer(tool_calls=calls, finish_reason="tool_calls")
            verdicts = judge.checks(answer, case, workload)
            assert verdicts["tool_call"] and verdicts.get("tool_arguments", True), (case, verdicts)
            wrong = judge.Answer(tool_calls=[{**calls[0], "name": "none"}])
            assert not judge.checks(wrong, case, workload)["tool_call"]
        workload = workloads["parallel_calls"]
        for case in workload.cases[:20]:
            calls = [
                {"id": "", "name": name, "arguments": json.dumps(plain_value(arguments))}
                for call in case.expect["calls"] for name, arguments in call.items()
            ]  # fmt: skip
            assert judge.checks(judge.Answer(tool_calls=calls[::-1]), case, workload)["tool_values"]
            assert not judge.checks(judge.Answer(tool_calls=calls[:1]), case, workload)[
                "tool_values"
            ]


def test_the_resolver(own, tmp_path):
    annie = [w.name for w in resolve()]
    assert annie == [w.name for w in judge.load_workloads()] and "tool_web" in annie
    assert [w.name for w in resolve(workloads="factual, tool_web")] == ["factual", "tool_web"]
    mixed = resolve(own, "factual,tool_web")
    assert {w.system_prompt for w in mixed} == {"You book trips."} and personas_of(mixed) == [
        str(own)
    ]
    assert mixed[1].tools_for(mixed[1].cases[0]) == [NESTED, NOTHING]
    plain = tmp_path / "w" / "plain.json"
    plain.parent.mkdir()
    plain.write_text(json.dumps({"name": "plain", "max_tokens": 9, "gates": ["same_text"], "cases": [
        {"id": 1, "messages": [{"role": "user", "content": "x"}]}]}))  # fmt: skip
    for given in (
        str(plain),
        plain,
        [plain],
        str(plain.parent),
        resolve(workloads=plain),
    ):  # language: data
        (workload,) = resolve(workloads=given)
        assert workload.persona is None and workload.messages(workload.cases[0]) == [
            {"role": "user", "content": "x"}
        ]
    (workload,) = resolve(own, plain)
    assert workload.system_prompt == "You book trips."
    with pytest.raises(UsageError, match="two workloads are called 'plain'"):
        resolve(workloads=[plain, plain])
    with pytest.raises(UsageError, match="unknown workload 'nothing'"):
        resolve(workloads="nothing")
    with pytest.raises(UsageError, match="unknown persona 'nobody'"):
        resolve("nobody")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no workloads"):
        resolve(workloads=str(tmp_path / "empty"))


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
CONVERSATION = {
    "name": "w",
    "max_tokens": 9,
    "gates": [],
    "cases": [
        {
            "id": "a",
            "turns": [
                "one",
                {"results": [{"name": "f", "arguments": {"x": 1}, "content": "r"}]},
                "two",
            ],
        }
    ],
}


def test_tool_results_are_replayed_to_the_models_own_calls():
    workload = build_workload(CONVERSATION)
    (case,) = workload.cases
    answer = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    messages = workload.messages(case, 1, [answer])
    assert [m["role"] for m in messages] == ["user", "assistant", "tool"] and messages[2][
        "content"
    ] == "r"
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"]
    messages = workload.messages(case, 2, [answer, {"role": "assistant", "content": "it is r"}])
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "user"]


def test_a_model_that_calls_nothing_or_something_else_is_asked_on_all_the_same():
    workload = build_workload(CONVERSATION)
    (case,) = workload.cases
    messages = workload.messages(case, 1, [{"role": "assistant", "content": "no"}])
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert messages[2]["content"] == "r"
    other = {"type": "function", "function": {"name": "g", "arguments": "{}"}}
    messages = workload.messages(
        case, 1, [{"role": "assistant", "content": "", "tool_calls": [CALL, other]}]
    )
    assert [m["content"] for m in messages[2:]] == ["r", NO_RESULT]


@pytest.mark.parametrize(
    "turns", [[{"results": []}], ["a", {"result": 1}], ["a", {"results": [{"name": "f"}]}]]
)
def test_invalid_turns_are_named(turns):
    with pytest.raises(UsageError, match=r"turns\[\d\]"):
        build_workload(CONVERSATION | {"cases": [{"id": "a", "turns": turns}]})


def test_a_case_with_its_own_system_prompt_keeps_it():
    case = {
        "id": "a",
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "x"}],
    }
    workload = build_workload({**CONVERSATION, "system": "T", "cases": [case]})
    assert workload.messages(workload.cases[0]) == case["messages"]


ROW = {
    "messages": [
        {"role": "user", "content": "reset it"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "reset", "arguments": {}}}],
        },
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "done"},
    ]
}


def test_one_form_of_a_row(own):
    persona = load_persona(own)
    assert (
        faults(ROW, persona) == []
    )  # no category, no tools of its own, arguments as an object, no system prompt
    assert form_faults(ROW, persona.tools) == form_faults({**ROW, "tools": [NOTHING]}) == []
    assert "'reset' is called and not offered" in faults({**ROW, "tools": [NESTED]}, persona)
    text = json.loads(json.dumps(ROW).replace('"arguments": {}', '"arguments": "{}"'))
    assert faults(text, persona) == []
    stale = {"messages": [{"role": "system", "content": "You are someone else."}, *ROW["messages"]]}
    assert faults(stale, persona) == ["the system prompt is not the persona's"]
    with pytest.raises(UsageError, match="differs from production's"):
        check_prompt_hash([stale], own)
    markdown = {"messages": [ROW["messages"][0], {"role": "assistant", "content": "- **a**\n- b"}]}
    assert (
        faults(markdown, persona) == [] and "markdown" in faults(markdown)[0]
    )  # Otto's prompt does not forbid it
    assert form_report([ROW, {"messages": []}], persona) == (
        "1 of 2 conversations break a rule of the row form, 1 of them: no messages"
    )
    assert validate([ROW], persona).by_category == {"none": 1} and validate([ROW], persona).ok


def test_too_many_conversations_for_the_templates_is_refused_at_once(tmp_path):
    with pytest.raises(
        UsageError, match=r"not enough different conversations for Support: .*greeting \d+"
    ) as error:
        generate("support", n=2500, output=tmp_path / "d.jsonl")
    assert not list(tmp_path.iterdir())
    n = int(error.value.hint.split(",")[0].removeprefix("--n "))
    assert n >= 20 and generate("support", n=n, output=tmp_path / "d.jsonl").ok


def test_a_wrong_teacher_url_is_a_server_error_and_leaves_nothing(tmp_path):
    pytest.importorskip("annie_quant._stream", reason="the C client is not built here")
    for model in ("m", None):
        with pytest.raises(ServerError, match="nothing answers") as error:
            generate(
                "annie",
                "openai",
                5,
                tmp_path / "d.jsonl",
                options=Options(model=model, url="http://127.0.0.1:9"),
            )
        assert error.value.exit_code == 4
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".jsonl"]


def test_the_index_of_near_duplicates_is_exact():
    rng, names = random.Random(1), [f"w{i}" for i in range(12)]
    for _ in range(30):
        finder, texts, base = DuplicateFinder(), [], []
        for i in range(60):
            base = (
                [rng.choice(names) for _ in range(rng.randint(0, 30))]
                if rng.random() < 0.4
                else list(base)
            )
            if base and rng.random() < 0.6:
                base[rng.randrange(len(base))] = rng.choice(names)
            new = features(" ".join(base))
            slow = any(new == t or len(new & t) >= THRESHOLD * len(new | t) > 0 for t in texts)
            assert (finder.find(" ".join(base)) is not None) is slow
            finder.add(str(i), " ".join(base))
            texts.append(new)


@pytest.mark.parametrize("name", ["a" * 5000, "ß" * 300, "a\0b", "a" * 5000 + "/b.json"])
def test_a_persona_name_that_no_file_can_have_is_a_usage_error_or_not_readable(name):
    """From a fuzzer: os.stat of a long name raises OSError, also of one in the provenance of a row."""
    with pytest.raises(UsageError):
        load_persona(name)
    row = {"messages": [{"role": "system", "content": "x"}], "provenance": {"persona": name}}
    with contextlib.suppress(UsageError):
        check_prompt_hash([row])


def test_a_user_message_without_content_is_a_fault():
    row = {
        **ROW,
        "messages": [{"role": "user"}, *ROW["messages"][1:]],
        "provenance": {"teacher": "offline"},
    }
    assert any("empty" in fault for fault in faults(row, load_persona("home")))


def test_a_tool_without_arguments_leaves_its_turn_to_the_others():
    """It has two prompts. Generation stopped at its third turn, with 8 of 120 cases."""
    find = {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string"}},
            "required": ["q"],
        },
    }
    tools = tuple({"type": "function", "function": f} for f in (find, {"name": "ping"}))
    persona = Persona(name="S", system_prompt="Be S.", tools=tools)
    cases = {w.name: w.cases for w in gate_documents(persona, 60)}["tool_calls"]
    called = [case.expect["tool"] for case in cases]
    assert called.count("ping") == 2 and called.count("find") == 58
