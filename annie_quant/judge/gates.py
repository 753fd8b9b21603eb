"""All gates in one table, and gates over many answers: the table that evaluation and benchmark print.

Adding a gate: one entry in GATES, and its check in annie_quant/judge/checks.

The absolute requirements: thresholds of the original plan for few answers, Wilson intervals from 100 answers on.

rate    a share that must pass. n < 100: at least this share of at least `least_n` answers; n >= 100: the lower 95 % bound is
        at or above it.
zero    no fault is accepted. One fault fails at any n; a pass needs `least_n` answers.
all     every answer must pass. n < 100: all of at least `least_n`; n >= 100: the lower bound is at or above 0.95.

A rate fails, at any n, when the upper bound is below it. What n cannot decide is "undecided", with the n that would decide it at
the observed rate (R30). Where there is a reference, judge/decision/rule.py decides, and the requirement is reported next to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec.structs import replace

from annie_quant.core.errors import UsageError
from annie_quant.documents import Answer, GateResult, Outcome, incomplete
from annie_quant.judge.checks import calls, reference, statements, text
from annie_quant.judge.statistics import MAX_N_TO_DECIDE, Z, wilson
from annie_quant.judge.workloads import Case, Workload

LARGE_N = 100
ALL_RATE = 0.95


@dataclass(frozen=True)
class Threshold:
    """least_n: how many answers decide, where they are few. rate: the share that must pass; only for kind "rate"."""

    kind: Literal["rate", "zero", "all"]
    least_n: int
    rate: float = 1.0

    @property
    def limit(self) -> float:
        """The share that the interval is compared with."""
        return {"rate": self.rate, "zero": 1.0, "all": ALL_RATE}[self.kind]


def decide(passes: int, n: int, threshold: Threshold) -> GateResult:
    """Decide one gate from the number of answers that passed."""
    low, high = wilson(passes, n)
    result = GateResult(passes=passes, n=n, low=low, high=high, threshold=threshold.limit)
    if n < LARGE_N:
        result.rule = f"n < {LARGE_N}: {_SHARES[threshold.kind]} at least {threshold.least_n}"
        if threshold.kind == "rate":
            result.rule = result.rule.replace("RATE", f"{threshold.rate:.0%}")
        result.verdict = _decide_few(result, threshold)
    elif threshold.kind == "zero":
        result.rule = (
            f"n >= {LARGE_N}: none seen; the true share of faults is below {1 - low:.2%} (95 %)"
        )
        result.verdict = "pass" if passes == n else "fail"
    else:
        result.rule = f"n >= {LARGE_N}: lower 95 % Wilson bound >= {threshold.limit:.0%}"
        result.verdict = _outside(low, high, threshold.limit)
    if result.verdict == "undecided":
        result.n_to_decide = threshold.least_n
        if n >= threshold.least_n:
            result.n_to_decide = n_to_decide(passes / n, threshold.limit, n)
    return result


_SHARES = {"rate": "at least RATE of", "zero": "none seen in", "all": "every one of"}


def _decide_few(result: GateResult, threshold: Threshold) -> Outcome:
    failed = result.n - result.passes
    if threshold.kind == "zero" and failed:
        return "fail"
    needed = result.n
    if threshold.kind == "rate":
        needed = math.ceil(threshold.rate * result.n - 1e-9)  # 0.6 * 10 is 6.000000000000001
    if result.n >= threshold.least_n and result.passes >= needed:
        return "pass"
    return "fail" if result.n and result.high < threshold.limit else "undecided"


def _outside(low: float, high: float, limit: float) -> Outcome:
    if low >= limit:
        return "pass"
    return "fail" if high < limit else "undecided"


def n_to_decide(rate: float, limit: float, n: int = 1) -> int | None:
    """Return the smallest number of answers, above n, whose interval excludes `limit` at this rate.

    Wilson's interval excludes a limit where the score test does: |rate - limit| >= z * standard
    error under the limit. More answers decide too. None where more than MAX_N_TO_DECIDE are needed.
    """
    if abs(rate - limit) < 1e-12:
        return None
    needed = limit * (1 - limit) * (Z / (rate - limit)) ** 2
    count = max(n + 1, math.ceil(needed - 1e-9))
    return count if count <= MAX_N_TO_DECIDE else None


# ---- the table

Basis = Literal["label", "reference", "rule"]
Check = Callable[[Answer, Case, Workload, Answer | None], str | None]


class Judged(NamedTuple):
    """An answer with what judges it.

    reference: the bf16 model's own answer to the same prompt, for the gates that compare with it.
    """

    workload: Workload
    case: Case
    answer: Answer
    reference: Answer | None = None


@dataclass(frozen=True)
class Gate:
    """check: the reason why an answer fails, "" where it passes, None where the gate does not apply to the case.

    threshold: the absolute requirement and its number, "" for one that the original plan does not have.
    margin: the loss against the reference that is accepted (judge/decision/rule.py), as a share of the prompts; 0 for
        faults of which none is accepted.
    advisory: a figure without a right and wrong for the model; it never decides.
    basis: what the answer is compared with: "label" (what the workload expects), "reference" (the bf16 model's own answer
        to the same prompt; the gate applies only where bf16 has the property) or "rule" (a property that needs neither).
    behaviours: what an answer that passes shows (BEHAVIOURS).
    two_sided: more is as much a change as less; a gate of all prompts that it applies to.
    """

    name: str
    title: str
    threshold: Threshold
    check: Check
    requirement: str = ""
    margin: float = 0.05
    advisory: bool = False
    basis: Basis = "label"
    behaviours: tuple[str, ...] = ()
    two_sided: bool = False


def _rate(least_n: int, rate: float) -> Threshold:
    return Threshold("rate", least_n, rate)


def _same(name: str, title: str, rate: float, check: Check, *behaviours: str) -> Gate:
    """Return a gate that compares with the bf16 model's own answer."""
    return Gate(name, title, _rate(10, rate), check, basis="reference", behaviours=behaviours)


_ZERO = Threshold("zero", 25)
_ALL = Threshold("all", 5)

BEHAVIOURS = (
    "call a tool",
    "decline",
    "right function",
    "right arguments",
    "several calls",
    "use a result",
    "right answer",
    "form",
    "stop",
    "thinking",
)
CALL, DECLINE, FUNCTION, ARGUMENTS, SEVERAL, RESULT, CONTENT, FORM, STOP, THINKING = BEHAVIOURS

# Thresholds of the original plan where one is named (docs/requirements.md).
GATES: dict[str, Gate] = {
    gate.name: gate
    for gate in (
        Gate(
            "abstention",
            "no tool where none fits",
            _rate(10, 0.8),
            calls.abstention,
            behaviours=(DECLINE,),
        ),
        Gate(
            "call_rate", "call rate", _rate(10, 0.0), calls.call_rate, basis="rule", two_sided=True
        ),
        Gate("factual", "factual", _ALL, statements.contains, "R25", behaviours=(CONTENT,)),
        Gate(
            "logged_tool",
            "tool as in the log",
            _rate(10, 0.6),
            reference.logged_tool,
            behaviours=(CALL, FUNCTION),
        ),
        Gate(
            "no_markdown",
            "no markdown",
            _rate(15, 0.8),
            text.no_markdown,
            "R24",
            basis="rule",
            behaviours=(FORM,),
        ),
        Gate("non_empty", "non-empty", _ZERO, text.non_empty, "R27", margin=0.0, basis="rule"),
        Gate("reasoning", "reasoning", _ALL, statements.contains, "R26", behaviours=(CONTENT,)),
        Gate(
            "recall",
            "right in conversation",
            _rate(10, 0.8),
            statements.contains,
            behaviours=(CONTENT,),
        ),
        Gate(
            "repetition",
            "no repetition or garble",
            _ALL,
            text.repetition,
            basis="rule",
            behaviours=(FORM,),
        ),
        _same(
            "same_arguments",
            "arguments as bf16",
            0.8,
            reference.same_arguments,
            CALL,
            FUNCTION,
            ARGUMENTS,
        ),
        _same("same_decline", "no call as bf16", 0.9, reference.same_decline, DECLINE),
        _same("same_language", "language as bf16", 0.9, reference.same_language),
        _same("same_length", "length as bf16", 0.8, reference.same_length, FORM),
        _same("same_markdown", "markdown as bf16", 0.9, reference.same_markdown, FORM),
        _same("same_several", "several calls as bf16", 0.8, reference.same_several, SEVERAL),
        _same("same_stop", "stops as bf16", 0.9, reference.same_stop, STOP),
        _same("same_text", "words as bf16", 0.9, reference.same_text, FORM),
        _same("same_thinking", "no thinking, as bf16", 0.9, reference.same_thinking, THINKING),
        _same("same_tool", "tool or none as bf16", 0.9, reference.same_tool),
        _same("same_validity", "valid calls as bf16", 0.9, reference.same_validity, CALL),
        Gate("scenario", "scenarios of tool-eval-bench", _rate(10, 0.6), calls.scenario),
        Gate(
            "several_calls",
            "several calls",
            _rate(10, 0.6),
            calls.several_calls,
            behaviours=(SEVERAL,),
        ),
        Gate("stop", "stops by itself", _ALL, text.stop, basis="rule", behaviours=(STOP,)),
        Gate(
            "thinking_leak",
            "no thinking leak",
            _ZERO,
            text.thinking_leak,
            "R22",
            margin=0.0,
            basis="rule",
            behaviours=(THINKING,),
        ),
        Gate(
            "tool_arguments",
            "tool arguments",
            _rate(10, 0.6),
            calls.tool_arguments,
            behaviours=(ARGUMENTS,),
        ),
        Gate(
            "tool_call",
            "tool calls",
            _rate(10, 0.6),
            calls.tool_call,
            "R23",
            behaviours=(CALL, FUNCTION),
        ),
        Gate(
            "tool_call_raw",
            "tool calls, raw text",
            _rate(10, 0.6),
            calls.tool_call_raw,
            advisory=True,
        ),
        Gate(
            "tool_schema", "schema validity", _rate(10, 0.6), calls.tool_schema, behaviours=(CALL,)
        ),
        Gate(
            "tool_selection",
            "tool selection",
            _rate(10, 0.6),
            calls.tool_selection,
            behaviours=(FUNCTION,),
        ),
        Gate(
            "tool_values",
            "argument correctness",
            _rate(10, 0.6),
            calls.tool_values,
            behaviours=(ARGUMENTS,),
        ),
        Gate(
            "use_result", "use of a result", _rate(10, 0.6), calls.use_result, behaviours=(RESULT,)
        ),
    )
}
REFERENCE_GATES = tuple(name for name, gate in GATES.items() if gate.basis == "reference")
# Gates of every workload: each applies only where the case or the reference's answer has what it checks.
IMPLIED = ("call_rate", "several_calls", "use_result", "same_decline", "same_several")
NAMED_REFERENCE_GATES = tuple(
    name for name in REFERENCE_GATES if name not in IMPLIED
)  # what a workload's file has


# Gates of the text that is there, and of the cut itself.
OF_ANY_TEXT = ("no_markdown", "repetition", "stop", "same_stop", "thinking_leak", "same_thinking")


def check_names(names: Iterable[str], where: str) -> None:
    """Raise UsageError for a name that is not a gate."""
    for name in names:
        if name not in GATES:
            raise UsageError(
                f"{where}: unknown gate {name!r}", f"choose one of: {', '.join(GATES)}"
            )


def faults(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None = None
) -> dict[str, str | None]:
    """Return for each gate of the workload why the answer fails: "" passes, None does not apply.

    reference: the bf16 model's own answer; without it the gates that compare with it do not apply.
    """
    reasons: dict[str, str | None] = {}
    for name in dict.fromkeys((*workload.gates, *IMPLIED)):
        reason = GATES[name].check(answer, case, workload, reference)
        if reason and answer.finish_reason == "length" and name not in OF_ANY_TEXT:
            # What is missing in an answer that was cut is the limit's fault, not the model's.
            reason = f"{incomplete('', answer.finish_reason)}: {reason}"
        reasons[name] = reason
    return reasons


def decides(name: str) -> bool:
    """Return whether a gate is known and not advisory."""
    return name in GATES and not GATES[name].advisory


def checks(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None = None
) -> dict[str, bool]:
    """Return the gates that apply to this case, and whether the answer passes each."""
    return {
        name: not fault
        for name, fault in faults(answer, case, workload, reference).items()
        if fault is not None
    }


def count(rows: Iterable[dict[str, bool]]) -> dict[str, tuple[int, int]]:
    """Return gate → (passes, n) of the checks of many answers."""
    counts: dict[str, tuple[int, int]] = {}
    for row in rows:
        for name, passed in row.items():
            passes, n = counts.get(name, (0, 0))
            counts[name] = (passes + bool(passed), n + 1)
    return counts


def tabulate(rows: Iterable[dict[str, bool]]) -> dict[str, GateResult]:
    """Return the gate table of the checks of many answers: deciding gates first, then advisory ones.

    Gates that this version does not know, in the records of another version, are left out.
    """
    counts = count(rows)
    table = {}
    for gate in sorted(GATES.values(), key=lambda gate: (gate.advisory, gate.name)):
        if gate.name in counts:
            result = decide(*counts[gate.name], gate.threshold)
            table[gate.name] = replace(
                result,
                title=gate.title,
                advisory=gate.advisory,
                basis=gate.basis,
                requirement=gate.requirement,
                meets=result.verdict,
            )
    return table


def gate_table(answers: Iterable[Judged]) -> dict[str, GateResult]:
    """Return the result of each gate over all the answers.

    Only gates that a workload names and that apply to a case are counted. Advisory gates inform and never fail a run.
    """
    return tabulate(
        checks(answer, case, workload, reference) for workload, case, answer, reference in answers
    )
