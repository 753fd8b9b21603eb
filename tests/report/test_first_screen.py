"""The first screen of terminal and report answers five questions in its first six lines, for every verdict.

Is it good enough? What got worse? Under which server? How sure? What now?
"""

from __future__ import annotations

import html
import json
import re

import evaluations
import pytest

from annie_quant import documents, judge
from annie_quant.cli import tables
from annie_quant.judge.gates import GATES, tabulate
from annie_quant.report import compose
from annie_quant.report.run import load

KEPT = {
    "tool_call": (240, 0, 0), "tool_arguments": (240, 0, 0), "abstention": (181, 0, 0), "factual": (100, 0, 0),
    "several_calls": (60, 0, 0), "use_result": (60, 0, 0), "stop": (240, 0, 0), "thinking_leak": (240, 0, 0),
    "no_markdown": (240, 0, 0), "same_text": (240, 0, 0),
}  # fmt: skip
LOST = KEPT | {
    "abstention": (181, 28, 2), "several_calls": (60, 39, 2), "same_text": (240, 55, 2), "tool_call": (240, 40, 1),
}  # fmt: skip
OPEN = KEPT | {"factual": (100, 3, 0)}
NOTHING = {"non_empty": (100, 0, 0)}
EIGHT = [f"{p}{m}" for p in ("w4a4", "w4a16") for m in ("", "+bf16", "+perm1", "+cut16")]
LOSES = (
    "Loses under W4A4 and W4A16: misses calls where several are needed (37 more of 60 prompts), does "
    "not call the right tool (39 more of 240), calls a tool where none fits (26 more of 181) and 1 more."
)
# Verdict → counts by arithmetic; the start of the first line; what the other lines contain.
STATES = {
    "keeps": (
        dict.fromkeys(EIGHT, KEPT),
        "Keeps everything that was tested under W4A4 and W4A16 (10 gates).",
        ("keeps under W4A4 (vLLM CUTLASS) and W4A16 (Marlin)", "no gate loses 5 points or more (95 %), in 8", "annie-quant serve"),
    ),
    "loses": (
        dict.fromkeys(EIGHT, LOST),
        LOSES,
        ("loses under W4A4 (vLLM CUTLASS) and W4A16 (Marlin)", "-61.7 points", "in 8 of 8 arithmetics", "do not serve it"),
    ),
    "undecided": (
        dict.fromkeys(EIGHT, OPEN),
        "Undecided under W4A4 and W4A16, too few prompts to exclude that it gets a fact wrong (3 more of 100 prompts).",
        ("undecided under W4A4 (vLLM CUTLASS) and W4A16 (Marlin)", "-3.0 points", "judge more prompts, about "),
    ),
    "fragile": (
        {name: LOST if name == "w4a4+perm1" else KEPT for name in EIGHT},
        "Fragile under W4A4: in some of its arithmetics, not in all, it misses calls where several are needed "
        "(37 more of 60 prompts)",
        ("fragile under W4A4 (vLLM CUTLASS); keeps under W4A16 (Marlin)", "in 1 of 8 arithmetics", "under W4A16 only"),
    ),
    "not tested": (
        dict.fromkeys(EIGHT, NOTHING),
        "Undecided under W4A4 and W4A16: nothing was tested that bf16 does; not tested: call a tool, decline,",
        ("undecided under W4A4 (vLLM CUTLASS) and W4A16 (Marlin)", "no prompt decides", "annie-quant init"),
    ),
}  # fmt: skip
# No gate's key, no arithmetic's name. Keys that are plain words ("stop") are not looked for.
INTERNAL = re.compile("|".join([*(name for name in GATES if "_" in name), r"\w\+\w", "VLLM-"]))


def answers(lines, start, parts):
    """Assert that the first six lines have the sentence and the parts, and nothing internal in the first three."""
    text = " ".join(" ".join(lines[:6]).split())
    assert text.startswith(start), text
    for part in (*parts, "Where: ", "How sure: ", "Next: "):
        assert part in text, (part, text)
    assert not INTERNAL.search(" ".join(lines[:3])), lines[:3]


def page_lines(page):
    """The lines of a page's head: its heading, then the items below it."""
    found = re.findall(r"<h1[^>]*>(.*?)</h1>|<li>(.*?)</li>", page, re.DOTALL)
    return [html.unescape(heading or item) for heading, item in found]


def markdown_lines(text):
    lines = (line.replace("\\", "").strip("#*- ") for line in text.splitlines())
    return [line for line in lines if line]


@pytest.mark.parametrize("state", STATES)
def test_the_terminal(state):
    members, start, parts = STATES[state]
    evaluation = evaluations.from_counts(members)
    lines = tables.evaluation_lines(evaluation, "nv")
    assert max(map(len, lines)) <= 80
    answers(lines, start, parts)


@pytest.mark.parametrize("state", STATES)
def test_the_report_of_an_evaluation(state, tmp_path):
    members, start, parts = STATES[state]
    evaluation = evaluations.from_counts(members)
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "nv.json").write_text(json.dumps(evaluation.to_dict()))
    files = compose(tmp_path)
    named = f"nv: {start}"
    answers(page_lines(files["report.html"]), named, parts)
    answers(markdown_lines(files["report.md"]), named, parts)
    answers(markdown_lines(files["comparison.md"])[1:], named, parts)


def served(**passes):
    """A run of bf16, of nv, and of what nv would replace, behind servers; bf16 itself misses 40 facts."""
    counts = {"tool_call": (100, 0), "factual": (100, 40), "no_markdown": (100, 0)}
    sides = {}
    for name in ("bf16", "nv", "q4"):
        lost = passes if name == "nv" else {}
        rows = [
            {g: i >= max(missed, lost.get(g, 0)) for g, (_, missed) in counts.items()}
            for i in range(100)
        ]
        pairs = {
            gate: documents.PairedGate(n, max(0, lost.get(gate, 0) - missed), 0, passed=n - missed)
            for gate, (n, missed) in counts.items()
        }
        paired = judge.decision.judge_gates({"served": pairs})[0]["served"]
        table = tabulate(rows)
        sides[name] = documents.ServedSide(
            model=name, gates=judge.decision.apply(table, paired) if name != "bf16" else table,
            judged_by=None if name == "bf16" else "bf16", paired=paired if name != "bf16" else {},
        )  # fmt: skip
    return documents.Aggregates(
        served=sides,
        roles=documents.Roles(candidate="nv", reference="bf16", incumbent="q4"),
        models=[documents.ModelRow(name=name, label=name) for name in sides],
    )


def write(folder, aggregates):
    verdict = judge.verdict(aggregates)
    documents.write_run(folder, documents.Run(aggregates=aggregates, verdict=verdict))
    return verdict


CONFOUND = documents.Confound(
    code="different_models", severity="confound", message="they differ", backends=["nv", "bf16"]
)


@pytest.mark.parametrize(
    ("lost", "confounds", "start", "parts"),
    [
        ({}, [], "nv keeps everything that was tested under its server (3 gates)", ("stay with q4",)),
        (
            {"tool_call": 30},
            [],
            "nv loses under its server: does not call the right tool (30 more of 100 prompts).",
            ("-30.0 points", "stay with q4; do not serve it"),
        ),
        (
            {},
            [CONFOUND],
            "CONFOUNDED (different models): the sides cannot be compared.",
            ("remove what differs",),
        ),
    ],
)  # fmt: skip
def test_the_report_and_the_terminal_of_a_benchmark(lost, confounds, start, parts, tmp_path):
    aggregates = served(**lost)
    aggregates.confounds = confounds
    verdict = write(tmp_path, aggregates)
    answers(tables.verdict_lines(verdict), start, parts)
    files = compose(tmp_path)
    answers(page_lines(files["report.html"]), start, parts)
    answers(markdown_lines(files["report.md"]), start, parts)
    answers(markdown_lines(files["comparison.md"])[1:], start, parts)


def test_what_bf16_itself_misses_is_grey_in_its_column(tmp_path):
    """The demo's report showed the reference with a red cross."""
    write(tmp_path, served(tool_call=30))
    page = compose(tmp_path)["report.html"]
    cells = {
        (side, gate): css
        for css, side, gate in re.findall(
            r'<td class="([^"]*)"[^>]*data-k="gate\|served/(\w+)\|(\w+)"', page
        )
    }
    assert load(tmp_path).aggregates.served["bf16"].gates["factual"].verdict == "fail"
    assert cells["bf16", "factual"] == cells["bf16", "tool_call"] == "none"
    assert cells["nv", "tool_call"] == "fail" and cells["nv", "no_markdown"] == "pass"


def test_changes_are_in_a_table_of_their_own(tmp_path):
    evaluation = evaluations.from_counts({"w4a4": LOST})
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "nv.json").write_text(json.dumps(evaluation.to_dict()))
    text = compose(tmp_path)["report.md"]
    right, changed = text.split("Changed against bf16's own answers")
    assert "| words as bf16" in changed and "| words as bf16" not in right
    assert "| tool calls" in right and "| tool calls" not in changed


def test_every_gate_has_plain_words_for_its_failure():
    faults = judge.decision.wording.FAULTS
    assert set(GATES) <= set(faults)
    assert not any(INTERNAL.search(text) for text in faults.values())
    assert len(set(faults.values())) == len(faults)
