"""The gate table: thresholds of the original plan at small n, intervals at n of 100 and more, and what stays undecided."""

from __future__ import annotations

import subprocess
import sys

import pytest

from annie_quant import judge
from annie_quant.documents import Answer
from annie_quant.judge.answers import constant_answer
from annie_quant.judge.gates import GATES, Threshold, decide, n_to_decide, tabulate
from annie_quant.judge.library import build_workload

RATE = Threshold("rate", least_n=10, rate=0.6)
ZERO = Threshold("zero", least_n=25)
ALL = Threshold("all", least_n=5)


@pytest.mark.parametrize(
    ("threshold", "passes", "n", "verdict"),
    [
        # The original plan's table, n < 100 (R22 to R27).
        (RATE, 6, 10, "pass"),
        (RATE, 5, 10, "undecided"),
        (RATE, 0, 10, "fail"),
        (Threshold("rate", 15, 12 / 15), 12, 15, "pass"),
        (Threshold("rate", 15, 12 / 15), 11, 15, "undecided"),
        (ZERO, 25, 25, "pass"),
        (ZERO, 20, 25, "fail"),
        (ZERO, 24, 25, "fail"),
        (ALL, 5, 5, "pass"),
        (ALL, 4, 5, "undecided"),
        # What does not pass fails only if the interval excludes the rate, as from n = 100 on.
        (RATE, 5, 5, "undecided"),
        (RATE, 0, 5, "fail"),
        (RATE, 1, 5, "undecided"),
        (ZERO, 24, 24, "undecided"),
        (ZERO, 0, 1, "fail"),
        (ALL, 4, 4, "undecided"),
        (ALL, 3, 4, "undecided"),
        (RATE, 0, 0, "undecided"),
        # n >= 100. Wilson: 70/100 (0.604, 0.781), 69/100 (0.594, 0.772), 50/100 (0.404, 0.596), 51/100 (0.413, 0.606).
        (RATE, 70, 100, "pass"),
        (RATE, 69, 100, "undecided"),
        (RATE, 50, 100, "fail"),
        (RATE, 51, 100, "undecided"),
        (ZERO, 100, 100, "pass"),
        (ZERO, 99, 100, "fail"),
        # 100/100 has the lower bound 0.963, 99/100 0.9455.
        (ALL, 100, 100, "pass"),
        (ALL, 99, 100, "undecided"),
        (ALL, 85, 100, "fail"),
    ],
)
def test_verdicts(threshold, passes, n, verdict):
    assert decide(passes, n, threshold).verdict == verdict


@pytest.mark.parametrize("n", range(4, 400, 7))
def test_one_miss_is_not_judged_harder_with_fewer_answers(n):
    """99 of 100 was undecided while 29 of 30 failed."""
    assert decide(n - 1, n, ALL).verdict in ("undecided", "pass")
    assert decide(n - 1, n, ZERO).verdict == "fail", "of leaks and empty answers none is accepted"


def test_undecided_names_the_n_that_decides():
    row = decide(69, 100, RATE)
    enough = row.n_to_decide
    assert enough > 100
    assert judge.wilson(round(0.69 * enough), enough)[0] >= 0.6 - 0.003
    assert judge.wilson(0.69 * (enough - 1), enough - 1)[0] < 0.6
    assert decide(24, 24, ZERO).n_to_decide == 25
    assert n_to_decide(0.6, 0.6) is None
    assert decide(70, 100, RATE).n_to_decide is None


def test_zero_gate_states_its_upper_bound():
    # The rule of three: about 3/n; Wilson's bound for 0 of 100 is 3.70 %.
    assert "3.70%" in decide(100, 100, ZERO).rule


WORKLOAD = {
    "name": "w",
    "max_tokens": 50,
    "gates": ["non_empty", "factual", "no_markdown", "thinking_leak", "tool_call", "stop"],
    "cases": [
        {
            "id": "a",
            "messages": [{"role": "user", "content": "?"}],
            "expect": {"contains": ["Tokyo"]},
        }
    ],
}


def test_gate_table_counts_only_what_applies():
    workload = build_workload(WORKLOAD)
    case = workload.cases[0]
    answers = [
        judge.Answer("Tokyo.", finish_reason="stop"),
        judge.Answer("**Tokyo**", finish_reason="length"),
        judge.Answer("", error="HTTP 400"),
    ]
    table = judge.gate_table([judge.Judged(workload, case, a) for a in answers])
    assert {g: (r.passes, r.n) for g, r in table.items()} == {
        "non_empty": (2, 3),
        "factual": (2, 3),
        "no_markdown": (1, 3),
        "thinking_leak": (2, 2),
        "stop": (1, 2),
    }
    assert (table["factual"].title, table["factual"].verdict) == ("factual", "fail")


def test_the_table_of_gates_is_complete():
    assert sorted(GATES) == [gate.name for gate in GATES.values()]
    workload = build_workload(WORKLOAD | {"gates": list(GATES)})
    for gate in GATES.values():
        assert (
            gate.title
            and gate.threshold.kind in ("rate", "zero", "all")
            and gate.threshold.least_n > 0
        )
        assert isinstance(
            gate.check(judge.Answer("Tokyo."), workload.cases[0], workload, None), str | None
        )


def test_gates_of_another_version_are_left_out():
    table = tabulate([{"non_empty": True, "no_such_gate": False}])
    assert list(table) == ["non_empty"]


def test_judge_never_imports_torch():
    code = (
        "import sys, annie_quant.judge as j\n"
        "from annie_quant.judge.library import build_workload\n"
        f"w = build_workload({WORKLOAD!r})\n"
        "j.gate_table([j.Judged(w, w.cases[0], j.Answer('Tokyo'))])\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def tool(**function) -> dict:
    return {"type": "function", "function": {"name": "stock", **function}}


CALL = "<tool_call>\n<function=stock>\n<parameter=part>\nchain\n</parameter>\n</function>\n</tool_call><|im_end|>"


@pytest.mark.parametrize(
    "parameters", [{"parameters": None}, {}, {"parameters": {"type": "object", "properties": {}}}]
)
def test_a_call_of_a_tool_without_parameters_is_parsed(parameters):
    """OpenAI's clients send null for a tool that takes none; the model may give it an argument all the same."""
    answer = judge.parse_raw(CALL, False, [tool(**parameters)])
    assert [(c["name"], c["arguments"]) for c in answer.tool_calls] == [
        ("stock", '{"part": "chain"}')
    ]


@pytest.mark.parametrize(("more", "passes"), [({}, False), ({"additionalProperties": True}, True)])
def test_an_argument_that_the_schema_does_not_name(more, passes):
    """It fails the gate, unless the schema itself allows further arguments."""
    schema = {"type": "object", "properties": {"size": {"type": "number"}}, **more}
    workload = build_workload(
        {"name": "w", "description": "", "tools": [tool(parameters=schema)], "thinking": False, "max_tokens": 50,
         "temperature": 0, "gates": ["tool_call"], "cases": [
             {"id": "c", "messages": [{"role": "user", "content": "x"}], "expect": {"tool": "stock"}, "max_tokens": 7}]}
    )  # fmt: skip
    answer = judge.parse_raw(CALL, False, list(workload.tools))
    assert judge.checks(answer, workload.cases[0], workload) == {
        "tool_call": passes,
        "call_rate": True,
    }


def test_the_token_limit_of_a_case_is_its_own_where_it_has_one():
    workload = build_workload(
        {"name": "w", "description": "", "thinking": False, "max_tokens": 50, "temperature": 0, "gates": ["stop"], "cases": [
            {"id": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 7},
            {"id": "b", "messages": [{"role": "user", "content": "x"}]}]}
    )  # fmt: skip
    cut = judge.Answer("x", finish_reason="length")
    assert [workload.max_tokens_for(c) for c in workload.cases] == [7, 50]
    assert [judge.faults(cut, c, workload)["stop"][-4:] for c in workload.cases] == [" (7)", "(50)"]


def test_one_answer_to_different_questions_is_noticed():
    """No check of single answers notices it: the answer is fluent, of the right length, and has words of bf16's."""
    own = [Answer(text=f"The capital of country {i} is city {i}.") for i in range(60)]
    one = [Answer(text="The capital of a country is a city.")] * 60
    assert constant_answer(one, own).startswith("one answer to 60 of 60 prompts ('The capital")
    assert (
        not constant_answer(own, own)
        and not constant_answer(own, one)
        and not constant_answer([], [])
    )
    assert not constant_answer(one, one), "bf16 answers all of them alike too"
    refusal = [Answer(text="I have no tool for that.")] * 40 + own[40:]
    assert not constant_answer(refusal, [*refusal[:30], *own[30:]]), (
        "a quarter of bf16's refusals are others"
    )
    assert not constant_answer([*one[:9], *own[9:]], own)
    call = Answer(tool_calls=[{"id": "", "name": "f", "arguments": '{"q": "xyzzy"}'}])
    assert "one answer to 60 of 60" in constant_answer([call] * 60, own)
    assert "one answer to 60 of 60" in constant_answer([Answer()] * 60, own), "it answers nothing"
