"""Answers side by side: which prompts are shown, what is cut, where the faults stand in the text.

Prompts where an answer failed a gate come first, then those where the backends differ, then the rest, spread evenly
over the workloads, up to a number of prompts and of characters; what was left out is counted and said.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from annie_quant.report.format import clean, name
from annie_quant.report.run import Run

MAX_PROMPTS = 240
MAX_CHARACTERS = 900_000
ANSWER_CHARACTERS = 900
PROMPT_CHARACTERS = 400
LONG_CHARACTERS = 120
# What to point at in an answer that failed a gate; the gate itself has judged.
_SPOTS = {
    "no_markdown": re.compile(
        r"\*\*[^*\n]+\*\*|^#{1,6} .*$|^\s*[-*+•] |^\s*\d+\. |`[^`\n]+`|^```.*$|\|.*\|", re.MULTILINE
    ),
    "thinking_leak": re.compile(
        r"</?think>|^(?:okay|hmm|wait|let me|thinking process|the user)\b[^\n.]*", re.I | re.MULTILINE
    ),
    "stop": re.compile(r".{1,40}\Z", re.DOTALL),
}


_CALL_GATES = {"tool_call", "abstention"}


@dataclass
class Shown:
    backend: str
    label: str
    model: str
    pieces: list[tuple[str, bool]]  # text, whether it is marked
    reasoning: str
    calls: list[str]
    wrong_call: bool  # a gate of calls failed, so the calls are marked
    faults: list[tuple[str, str]]  # gate's title, what was wrong
    note: str  # what was cut, or the error
    same_as: str = ""  # the label of an earlier answer in the same words, which is then not repeated
    tokens: Any = None
    ttft_ms: Any = None


@dataclass
class Prompt:
    workload: str
    case: str
    turn: int
    text: str
    answers: list[Shown]
    gates: list[str] = field(default_factory=list)  # failed by any
    differs: bool = False


@dataclass
class Browser:
    prompts: list[Prompt]
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


def collect(run: Run) -> Browser:
    """Choose and cut; texts come out clean (text.clean), still to be escaped by the template."""
    groups: dict[tuple, dict[str, dict]] = {}
    for record in run.measured:
        key = (
            str(record["workload"]),
            str(record.get("case")),
            record.get("turn") if isinstance(record.get("turn"), int) else 0,
        )
        side = groups.setdefault(key, {})
        before = side.get(record["backend"])
        # Of several repeats the first, unless a later one failed where it did not.
        if before is None or (_failed(record) and not _failed(before)):
            side[record["backend"]] = record
    informs = {gate for side in run.sides for gate, row in side.gates.items() if row["advisory"]}
    ranks = {key: _rank(side, informs) for key, side in groups.items()}
    faulty = sum(any(_failed(r) for r in side.values()) for side in groups.values())
    asked = _asked(run)
    prompts: list[Prompt] = []
    budget = MAX_CHARACTERS
    for key in _spread(ranks)[:MAX_PROMPTS]:
        prompt = _prompt(run, key, groups[key], asked)
        budget -= len(prompt.text) + sum(_length(a) for a in prompt.answers)
        if budget < 0 and prompts:
            break
        prompts.append(prompt)
    return Browser(prompts, len(groups), faulty)


def _failed(record: dict[str, Any]) -> list[str]:
    found = [gate for gate, passed in record["checks"].items() if not passed]
    return found or (["error"] if record.get("error") else [])


def _differs(side: dict[str, dict]) -> bool:
    return len({(str(r.get("text")), str([c.get("name") for c in r["tool_calls"]])) for r in side.values()}) > 1


def _rank(side: dict[str, dict], informs: set[str]) -> int:
    """0: an answer failed a gate that decides; 1: one that only informs; 2: the answers differ; 3: nothing to see."""
    failed = {gate for record in side.values() for gate in _failed(record)}
    return 0 if failed - informs else 1 if failed else 2 if _differs(side) else 3


def _spread(ranks: dict[tuple, int]) -> list[tuple]:
    """Within a rank take the workloads in turn, so that none crowds out the others."""
    places: dict[tuple, int] = {}
    seen: dict[tuple, int] = {}
    for key, rank in ranks.items():
        lane = (rank, key[0])
        places[key] = seen[lane] = seen.get(lane, -1) + 1
    return sorted(ranks, key=lambda key: (ranks[key], places[key], key[0]))


def _length(shown: Shown) -> int:
    return sum(len(t) for t, _ in shown.pieces) + len(shown.reasoning) + sum(map(len, shown.calls)) + 250


def _asked(run: Run) -> dict[tuple[str, str, int], str]:
    """What each case asked, by (workload, case, turn)."""
    return {
        (workload["name"], case, turn): words
        for workload in run.inputs
        for case, turns in workload["cases"].items()
        for turn, words in enumerate(turns)
    }


def _cut(text: Any, limit: int) -> tuple[str, str]:
    text = str(text or "")
    if len(text) <= limit:
        return clean(text), ""
    return clean(text[:limit]) + " …", f"the first {limit} of {len(text):,} characters".replace(",", "\u202f")


def _prompt(run: Run, key: tuple, side: dict[str, dict], asked: dict[tuple[str, str, int], str]) -> Prompt:
    answers = []
    for served in run.of("served"):
        backend = served.key.split("/", 1)[1]
        if backend in side:
            answers.append(_shown(run, backend, served.model, side[backend]))
    for index, answer in enumerate(answers):
        twin = next((a for a in answers[:index] if not a.same_as and _alike(a, answer)), None)
        if twin is not None:
            answer.same_as = twin.label
    gates = list(dict.fromkeys(g for r in side.values() for g in _failed(r)))
    text, _ = _cut(asked.get(key, ""), PROMPT_CHARACTERS)
    return Prompt(name(key[0]), clean(key[1]), key[2], text, answers, gates, _differs(side))


def _shown(run: Run, backend: str, model: str, record: dict[str, Any]) -> Shown:
    text, cut = _cut(record.get("text"), ANSWER_CHARACTERS)
    reasoning, _ = _cut(record.get("reasoning"), ANSWER_CHARACTERS // 2)
    said = record["faults"]
    failed = _failed(record)
    faults = [(run.gate_title(g) if g != "error" else "error", _cut(said.get(g, ""), 160)[0]) for g in failed]
    calls = [_cut(f"{c.get('name')}({c.get('arguments')})", 300)[0] for c in record["tool_calls"]]
    error = _cut(record.get("error"), 300)[0] if record.get("error") else ""
    return Shown(
        backend=clean(backend),
        label=run.label(model),
        model=model,
        pieces=_mark(text, [] if error else failed),
        reasoning=reasoning,
        calls=calls[:8],
        wrong_call=bool(_CALL_GATES & set(failed)),
        faults=faults,
        note="; ".join(filter(None, [error, cut])),
        tokens=record.get("completion_tokens"),
        ttft_ms=record.get("first_content_ms"),
    )


def _alike(a: Shown, b: Shown) -> bool:
    """The same words, calls and faults, and long enough that repeating them would cost the reader time."""
    long = sum(len(words) for words, _ in a.pieces) + len(a.reasoning) > LONG_CHARACTERS
    return long and (a.pieces, a.reasoning, a.calls, a.faults, a.note) == (
        b.pieces,
        b.reasoning,
        b.calls,
        b.faults,
        b.note,
    )


def _mark(text: str, failed: list[str]) -> list[tuple[str, bool]]:
    """The text in pieces, those that a failed gate points at marked."""
    spans = sorted(
        (m.start(), m.end())
        for gate in failed
        if gate in _SPOTS
        for m in _SPOTS[gate].finditer(text)
        if m.end() > m.start()
    )
    pieces, at = [], 0
    for start, end in spans:
        if start < at:
            continue
        if start > at:
            pieces.append((text[at:start], False))
        pieces.append((text[start:end], True))
        at = end
    if at < len(text):
        pieces.append((text[at:], False))
    return pieces
