"""What the answers of a set of conversations do, next to what gates ask for and what logs show.

An answer has one behaviour:

    calls NAME             one call of a tool
    several calls          two or more calls
    answers from a result  no call, after what a tool returned
    declines               no call, although tools are on offer
    talk                   no tools on offer

Answers with thinking count under "thinks", too. A row that ends with the user's message or a tool's result has no answer yet:
the model gives it before calibration (quantize/own_answers.py).

A Mixture says how much an answer of each behaviour counts in calibration.
"""

from __future__ import annotations

import itertools
import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from annie_quant.core.errors import UsageError
from annie_quant.core.files import exists
from annie_quant.data.row_rules import Row, teacher_of
from annie_quant.data.rows import Rows, read_rows
from annie_quant.documents.persona import Persona, built_in, load_persona
from annie_quant.judge import Workload

CALLS = "calls"  # of any tool
SEVERAL = "several calls"
RESULT = "answers from a result"
DECLINES = "declines"
TALK = "talk"
THINKS = "thinks"
NO_ANSWER = "no answer yet"
OTHER_BEHAVIOURS = (SEVERAL, RESULT, DECLINES, TALK)
ADDED_PROMPTS = 40  # of a behaviour that a file lacks, unless --n says so
# Of a file's answers: with fewer a behaviour counts as one that the file lacks.
LEAST_SHARE = 0.01
MAX_TOOLS = 3  # that a line names
# How much more or less an answer counts, at most, so that a few answers do not stand for half of a text.
MAX_WEIGHT = 4.0


def calls_of(tool: str) -> str:
    """Return the behaviour of a single call of a tool."""
    return f"{CALLS} {tool}"


def behaviour_of(calls: Sequence[str], after_result: bool, offered: bool) -> str:
    """Return the behaviour of an answer.

    calls: names of the functions that it calls.
    after_result: it follows what a tool returned.
    offered: tools are on offer.
    """
    if calls:
        return calls_of(calls[0]) if len(calls) == 1 else SEVERAL
    if after_result:
        return RESULT
    return DECLINES if offered else TALK


def count_rows(rows: Iterable[Row]) -> Counter[str]:
    """Return the number of answers per behaviour, by the rows' own answers."""
    counts: Counter[str] = Counter()
    for row in rows:
        messages = row["messages"]
        thinks = bool(row.get("thinking"))
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            calls = [_name_of(call) for call in message.get("tool_calls") or ()]
            after_result = at > 0 and messages[at - 1]["role"] == "tool"
            counts[behaviour_of(calls, after_result, bool(row.get("tools")))] += 1
            counts[THINKS] += thinks
        counts[NO_ANSWER] += messages[-1]["role"] != "assistant"
    return +counts


def _name_of(call: Mapping[str, object]) -> str:
    function = call.get("function")
    named = function if isinstance(function, Mapping) else call
    return str(named.get("name"))


def count_asked(workloads: Iterable[Workload]) -> Counter[str]:
    """Return the number of answers per behaviour that gates ask for.

    A prompt without a label asks for a behaviour only where no tools are on offer, or where it ends with a tool's result: in
    others the model decides.
    """
    counts: Counter[str] = Counter()
    for workload in workloads:
        for case in workload.cases:
            offered = bool(workload.tools_for(case))
            for turn in range(case.n_turns):
                at = case.at_turn(turn)
                calls = _expected_calls(at.expect)
                counts[THINKS] += workload.thinking
                if calls or at.after_result or not offered or at.expect.get("no_tool"):
                    counts[behaviour_of(calls, at.after_result, offered)] += 1
    return +counts


def _expected_calls(expect: Mapping[str, object]) -> list[str]:
    """Return the names of the functions that a gate expects, or that the log of its prompt calls."""
    if expect.get("tool"):
        return [str(expect["tool"])]
    calls = expect.get("calls")
    if isinstance(calls, list):
        return list(itertools.chain.from_iterable(calls))  # {name: arguments} each
    logged = expect.get("logged")
    return list(map(str, logged.get("calls") or ())) if isinstance(logged, Mapping) else []


def total(counts: Mapping[str, int]) -> int:
    """Return the number of answers."""
    return sum(n for name, n in counts.items() if name not in (THINKS, NO_ANSWER))


def ordered(names: Iterable[str]) -> list[str]:
    """Return behaviours in the order of a description: calls by their tools' names, then the others."""
    last = (*OTHER_BEHAVIOURS, THINKS, NO_ANSWER)
    return sorted(names, key=lambda name: (last.index(name) if name in last else -1, name))


# ---- a file next to a persona's gates


@dataclass(frozen=True)
class Compared:
    """The behaviours of a file of conversations, of the gates that will judge, and of logs.

    persona: of the gates; None where the file names none that is known.
    gates: empty without a persona.
    logs: of those rows of the file that were logged.
    """

    file: Counter[str]
    persona: Persona | None = None
    gates: Counter[str] = field(default_factory=Counter)
    logs: Counter[str] = field(default_factory=Counter)

    def missing(self) -> list[str]:
        """Return the behaviours that gates ask for and the file's answers hardly show.

        A file with prompts that have no answer yet may show them all: nothing is missing there.
        """
        if self.file[NO_ANSWER]:
            return []
        least = max(1.0, LEAST_SHARE * total(self.file))
        return ordered(name for name in self.gates if self.file[name] < least)


def compare(
    conversations: Rows,
    persona: str | Persona | None = None,
    workloads: Sequence[Workload] | None = None,
) -> Compared:
    """Return the behaviours of conversations next to those of the gates of a persona.

    persona: by default the one that the rows name.
    workloads: that will judge, by default the persona's.
    """
    from annie_quant.data.workloads import resolve

    rows = read_rows(conversations)
    named = persona if persona is not None else _named_persona(rows)
    who = load_persona(named) if isinstance(named, str) else named
    if workloads is None:
        workloads = resolve(who) if who is not None else ()
    logged = [row for row in rows if teacher_of(row) == "log"]
    return Compared(count_rows(rows), who, count_asked(workloads), count_rows(logged))


def _named_persona(rows: Iterable[Row]) -> str | None:
    """Return the persona that most rows name; None where it is none of this machine."""
    names = Counter((row.get("provenance") or {}).get("persona") for row in rows)
    name = next((str(name) for name, _ in names.most_common() if name), None)
    return name if name is not None and (name in built_in() or exists(Path(name))) else None


def notes_on(compared: Compared, file: Path) -> list[str]:
    """Return a line about what the gates ask for and a file lacks, with the command that adds it."""
    missing = compared.missing()
    if not missing or compared.persona is None:
        return []
    asked = ", ".join(f"{name} ({compared.gates[name]} prompts)" for name in _shortened(missing))
    command = command_to_add(compared.persona.source, missing, file)
    return [f"the gates test what {file.name} lacks or hardly has: {asked}; {command} adds prompts"]


def command_to_add(persona: str, missing: Sequence[str], file: Path) -> str:
    """Return the command that adds generated prompts of these behaviours to a file."""
    words = ["annie-quant", "data", "--persona", persona]
    for name in _shortened(missing):
        words += ["--behaviour", name]
    output = file.with_name(f"{file.stem}-more.jsonl")
    return shlex.join([*words, "--add-to", str(file), "--output", str(output)])


def _shortened(names: Sequence[str]) -> list[str]:
    """Return the behaviours with "calls" for the calls of more than MAX_TOOLS tools."""
    tools = [name for name in names if name.startswith(f"{CALLS} ")]
    if len(tools) <= MAX_TOOLS:
        return list(names)
    return [CALLS, *(name for name in names if name not in tools)]


# ---- how much each behaviour counts


@dataclass(frozen=True)
class Mixture:
    """How much an answer counts in calibration, by its behaviour.

    name: the value of --mixture.
    gates, logs: numbers of answers per behaviour, which are recorded next to those that are used.
    shares: that the answers of each behaviour shall have; None: as many as there are.
    factors: behaviour, or "calls" for all tools → how much one of its answers counts.
    """

    name: str = "given"
    gates: Mapping[str, int] = field(default_factory=dict)
    logs: Mapping[str, int] = field(default_factory=dict)
    shares: Mapping[str, float] | None = None
    factors: Mapping[str, float] = field(default_factory=dict)

    def key(self) -> list[object]:
        """Return what the weights depend on, as JSON values."""
        return [None if self.shares is None else dict(self.shares), dict(self.factors)]

    def weights(self, behaviours: Sequence[str]) -> list[float]:
        """Return the weight of each answer, 1 on average. Raises UsageError for a factor that no answer has."""
        if not behaviours or (self.shares is None and not self.factors):
            return [1.0] * len(behaviours)
        present = Counter(behaviours)
        per_behaviour = self._of_shares(present) if self.shares else self._of_factors(present)
        mean = sum(per_behaviour[name] * n for name, n in present.items()) / len(behaviours)
        return [per_behaviour[name] / mean for name in behaviours]

    def _of_factors(self, present: Mapping[str, int]) -> dict[str, float]:
        kinds = {name.partition(" ")[0] for name in present if name not in OTHER_BEHAVIOURS}
        unknown = sorted(self.factors.keys() - present.keys() - kinds)
        if unknown:
            raise UsageError(
                f"--mixture {unknown[0]}: no answer of the calibration data does that",
                f"its answers: {', '.join(ordered(present))}",
            )
        of_calls = self.factors.get(CALLS, 1.0)
        return {
            name: self.factors.get(name, 1.0 if name in OTHER_BEHAVIOURS else of_calls)
            for name in present
        }

    def _of_shares(self, present: Mapping[str, int]) -> dict[str, float]:
        assert self.shares is not None
        answers = sum(present.values())
        known = sum(self.shares.get(name, 0.0) for name in present)
        if not known:
            raise UsageError(
                "--mixture: the calibration data show none of the behaviours that it weighs",
                f"its answers: {', '.join(ordered(present))}",
            )
        result = {}
        for name, n in present.items():
            ratio = self.shares.get(name, 0.0) / known / (n / answers)
            result[name] = min(MAX_WEIGHT, max(1 / MAX_WEIGHT, ratio))
        return result


GIVEN_MIXTURE = Mixture()


def mixture_of(text: str, compared: Compared) -> Mixture:
    """Return the mixture that --mixture names.

    "given": every answer counts once. "gates" and "logs": the shares of the persona's gates, and of the logged rows.
    "declines=2,calls=0.5": factors. Raises UsageError for another text, and where there are no gates or logs.
    """
    gates = _answers(compared.gates)
    logs = _answers(compared.logs)
    if text == "given":
        return Mixture(text, gates, logs)
    if text in ("gates", "logs"):
        counts = gates if text == "gates" else logs
        if not counts:
            hint = "--persona names one" if text == "gates" else "annie-quant init --logs"
            raise UsageError(f"--mixture {text}: there are no {text} to take shares of", hint)
        n = sum(counts.values())
        return Mixture(text, gates, logs, shares={name: k / n for name, k in counts.items()})
    return Mixture(text, gates, logs, factors=dict(map(_factor, text.split(","))))


def _answers(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: n for name, n in counts.items() if name not in (THINKS, NO_ANSWER)}


def _factor(text: str) -> tuple[str, float]:
    """Return the behaviour and the factor of "declines=2"."""
    name, _, value = text.rpartition("=")
    name = name.strip()
    try:
        factor = float(value)
    except ValueError:
        factor = math.nan
    is_call = name == CALLS or name.startswith(f"{CALLS} ")
    if not (is_call or name in OTHER_BEHAVIOURS) or not 0 < factor < math.inf:
        raise UsageError(
            f"--mixture {text!r}: expected given, gates, logs, or a behaviour and a factor above 0",
            f'"declines=2,calls=0.5"; behaviours: calls, calls TOOL, {", ".join(OTHER_BEHAVIOURS)}',
        )
    return name, factor
