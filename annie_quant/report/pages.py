"""report.html (one file, which requests nothing from any network), report.md and comparison.md, the document of R48.

report.html shows answers side by side: prompts with an answer that failed a gate first, then those
where the backends differ, then the rest, taken in turn from the workloads, up to a number of
prompts and of characters, and how many were left out.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from annie_quant import __version__
from annie_quant.core.templates import render_html, render_markdown
from annie_quant.core.text import visible
from annie_quant.documents import RequestRecord
from annie_quant.report import comparison, format, prompt_times, tables
from annie_quant.report.drafts import drafts_table
from annie_quant.report.format import count, name
from annie_quant.report.recheck import caveats, check_figures
from annie_quant.report.run import LoadedRun
from annie_quant.report.svg import MARKS, Figure

MAX_PROMPTS = 240
MAX_CHARACTERS = 900_000
ANSWER_CHARACTERS = 900
PROMPT_CHARACTERS = 400
LONG_CHARACTERS = 120  # a longer answer that equals an earlier one is not repeated
CALL_GATES = {"tool_call", "abstention"}
# What is marked in an answer that failed a gate.
_MARKED = {
    "no_markdown": re.compile(
        r"\*\*[^*\n]+\*\*|^#{1,6} .*$|^\s*[-*+•] |^\s*\d+\. |`[^`\n]+`|^```.*$|\|.*\|", re.MULTILINE
    ),
    "thinking_leak": re.compile(
        r"</?think>|^(?:okay|hmm|wait|let me|thinking process|the user)\b[^\n.]*",
        re.I | re.MULTILINE,
    ),
    "stop": re.compile(r".{1,40}\Z", re.DOTALL),
}

PromptKey = tuple[str, str, int]  # workload, case, turn
ByBackend = dict[str, RequestRecord]


@dataclass
class ShownAnswer:
    """One backend's answer as the page shows it.

    pieces: (text, whether it is marked).
    wrong_call: whether the calls are marked.
    faults: (gate's title, reason).
    note: what was cut, or the error.
    same_as: the label of an earlier equal answer; this one is then not repeated.
    """

    label: str
    model: str
    record: RequestRecord
    pieces: list[tuple[str, bool]]
    reasoning: str
    calls: list[str]
    wrong_call: bool
    faults: list[tuple[str, str]]
    note: str
    same_as: str = ""

    @property
    def shown(self) -> tuple[object, ...]:
        return self.pieces, self.reasoning, self.calls, self.faults, self.note

    @property
    def characters(self) -> int:
        return self.n_text + sum(map(len, self.calls))

    @property
    def n_text(self) -> int:
        return sum(len(text) for text, _ in self.pieces) + len(self.reasoning)


@dataclass
class ShownPrompt:
    """One prompt with its answers.

    gates: those that any answer failed.
    """

    workload: str
    case: str
    turn: int
    text: str
    answers: list[ShownAnswer]
    gates: list[str] = field(default_factory=list)
    differs: bool = False


@dataclass
class Browser:
    """The prompts that are shown.

    total: all prompts.
    faulty: those with a fault.
    """

    prompts: list[ShownPrompt]
    total: int
    faulty: int

    @property
    def note(self) -> str:
        if len(self.prompts) == self.total:
            return f"All {self.total} prompts are here."
        shown_faulty = sum(bool(p.gates) for p in self.prompts)
        return (
            f"{len(self.prompts)} of {self.total} prompts are here: {shown_faulty} of the {self.faulty} with a fault, "
            "then those where the backends differ, then others spread evenly over the workloads. All: records.jsonl."
        )


def collect(run: LoadedRun) -> Browser:
    """Return the prompts to show, with their answers cut to length; the template escapes the texts."""
    groups: dict[PromptKey, ByBackend] = {}
    for record in run.measured:
        answers = groups.setdefault(record.prompt, {})
        earlier = answers.get(record.backend)
        # Of several repeats the first that failed is shown, else the first.
        if earlier is None or (_failed(record) and not _failed(earlier)):
            answers[record.backend] = record
    advisory: set[str] = set()
    for side in run.sides:
        advisory |= side.gates.keys() - side.deciding.keys()
    ranks = {key: _rank(answers, advisory) for key, answers in groups.items()}
    questions = _questions(run)
    prompts: list[ShownPrompt] = []
    budget = MAX_CHARACTERS
    for key in _in_turn(ranks)[:MAX_PROMPTS]:
        prompt = _prompt(run, key, groups[key], questions.get(key, ""))
        budget -= len(prompt.text) + sum(a.characters + 250 for a in prompt.answers)
        if budget < 0 and prompts:
            break
        prompts.append(prompt)
    n_faulty = sum(rank <= ADVISORY_FAILED for rank in ranks.values())
    return Browser(prompts, len(groups), n_faulty)


def _failed(record: RequestRecord) -> list[str]:
    failed = [gate for gate, passed in record.judgement.checks.items() if not passed]
    return failed or ["error"] * bool(record.answer.error)


def _differs(answers: ByBackend) -> bool:
    distinct: set[tuple[str, str]] = set()
    for record in answers.values():
        called = [call.get("name") for call in record.answer.tool_calls]
        distinct.add((record.answer.text, str(called)))
    return len(distinct) > 1


# In the order in which prompts are shown.
GATE_FAILED, ADVISORY_FAILED, DIFFERENT, EQUAL = range(4)


def _rank(answers: ByBackend, advisory: set[str]) -> int:
    failed = {gate for record in answers.values() for gate in _failed(record)}
    if failed:
        return GATE_FAILED if failed - advisory else ADVISORY_FAILED
    return DIFFERENT if _differs(answers) else EQUAL


def _in_turn(ranks: dict[PromptKey, int]) -> list[PromptKey]:
    """Return the prompts by rank; within a rank the workloads take turns."""
    lengths = defaultdict[tuple[int, str], Iterator[int]](itertools.count)
    places = {key: next(lengths[rank, key[0]]) for key, rank in ranks.items()}
    return sorted(ranks, key=lambda key: (ranks[key], places[key], key[0]))


def _questions(run: LoadedRun) -> dict[PromptKey, str]:
    """Return what was asked: the turns of a conversation, else the last user message."""
    questions: dict[PromptKey, str] = defaultdict(str)
    for workload in run.inputs:
        for case in workload.cases:
            texts = [m.get("content") for m in case.messages if m.get("role") == "user"]
            user = [each for each in texts if isinstance(each, str)]
            for turn, text in enumerate(case.turns or user[-1:]):
                questions[workload.name, case.id, turn] = str(
                    text
                )  # a turn of results is an object
    return questions


def _cut(text: str, limit: int) -> tuple[str, str]:
    """Return (text, note): cut to `limit` characters, with a note where something was cut."""
    if len(text) <= limit:
        return visible(text), ""
    return visible(text[:limit]) + " …", f"the first {limit} of {count(len(text))} characters"


def _prompt(run: LoadedRun, key: PromptKey, records: ByBackend, question: str) -> ShownPrompt:
    answers: list[ShownAnswer] = []
    for side in run.served:
        if side.name not in records:
            continue
        answer = _answer(run, side.model, records[side.name])
        if answer.n_text > LONG_CHARACTERS:
            equal = (a.label for a in answers if not a.same_as and a.shown == answer.shown)
            answer.same_as = next(equal, "")
        answers.append(answer)
    gates = list(dict.fromkeys(gate for record in records.values() for gate in _failed(record)))
    text, _ = _cut(question, PROMPT_CHARACTERS)
    return ShownPrompt(
        name(key[0]),
        key[1],
        key[2],
        text,
        answers,
        gates,
        _differs(records),
    )


def _answer(run: LoadedRun, model: str, record: RequestRecord) -> ShownAnswer:
    text, cut = _cut(record.answer.text, ANSWER_CHARACTERS)
    failed = _failed(record)
    error, _ = _cut(record.answer.error or "", 300)
    calls = [f"{c.get('name')}({c.get('arguments')})" for c in record.answer.tool_calls[:8]]
    faults = []
    for gate in failed:
        title = "error" if gate == "error" else run.gate_title(gate)
        faults.append((title, _cut(record.judgement.faults.get(gate, ""), 160)[0]))
    return ShownAnswer(
        label=run.label(model),
        model=model,
        record=record,
        pieces=marked(text, [] if error else failed),
        reasoning=_cut(record.answer.reasoning, ANSWER_CHARACTERS // 2)[0],
        calls=[_cut(call, 300)[0] for call in calls],
        wrong_call=bool(CALL_GATES & set(failed)),
        faults=faults,
        note="; ".join(filter(None, [error, cut])),
    )


def marked(text: str, failed: list[str]) -> list[tuple[str, bool]]:
    """Split `text` into (piece, whether a failed gate is about it)."""
    spans: list[tuple[int, int]] = []
    for gate in _MARKED.keys() & failed:
        spans += [match.span() for match in _MARKED[gate].finditer(text)]
    pieces = []
    at = 0
    for start, end in sorted(spans):
        if start < end and start >= at:
            pieces += [(text[at:start], False), (text[start:end], True)]
            at = end
    pieces.append((text[at:], False))
    return [(piece, mark) for piece, mark in pieces if piece]


def render(run: LoadedRun, figures: list[Figure]) -> dict[str, str]:
    """Return report.html, report.md and comparison.md, made of the same values."""
    check = check_figures(run)
    items = comparison.checklist_items(run)
    values = {
        "version": __version__,
        "text": format,
        "grid": tables.grid,
        "run": run,
        "figures": {f.key: f for f in figures},
        "check": check,
        "sentence": run.sentence or "No verdict has been reached for this run.",
        "outcome": format.CSS[comparison.outcome_of(run)],
        "badge": run.verdict.badge or comparison.outcome_of(run),
        "caveats": caveats(run),
        "times": tables.TIMES,
        "main": tables.side_by_side(run),
        "changes": tables.changes(run),
        "gates": tables.gates_table(run),
        "kl": tables.kl_table(run),
        "drafts": drafts_table(run),
        "latency": {metric: tables.latency_table(run, metric) for metric in tables.LABELS},
        "overall": tables.comparisons_table(run, only_all=True),
        "comparisons": tables.comparisons_table(run),
        "noise": tables.noise_table(run),
        "memory": tables.memory_table(run),
        "ladders": tables.ladder_tables(run),
        "first_token": prompt_times.lines_table(run),
        "first_token_lengths": prompt_times.lengths_table(run),
        "first_token_turns": prompt_times.turns_table(run),
        "first_token_notes": prompt_times.statements(run),
        "browser": collect(run),
        "checklist": items,
        "checklist_title": comparison.checklist_title(run),
        "checklist_table": comparison.checklist_table(run, items),
        "operation": comparison.operation_changes(run),
        "stages": tables.stages_table(run),
        "dimensions": comparison.dimensions(run),
        "budget": comparison.memory_budget(run),
        "missing": {m.part: m for m in run.missing},
        "facts": tables.facts(run),
    }
    return {
        "report.html": render_html("report.html", MARKS, **values),
        **{name: render_markdown(name, **values) for name in ("report.md", "comparison.md")},
    }
