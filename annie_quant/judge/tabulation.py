"""Gates over many answers: the table that both the offline evaluation and the benchmark print."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from types import ModuleType

from annie_quant import registry
from annie_quant.judge import gates as package
from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold, decide, judged
from annie_quant.judge.workloads import Case, Workload
from annie_quant.schema import GateResult


@cache
def _gate(name: str) -> ModuleType:
    return registry.find(package, name, "gate")


def gate_names() -> list[str]:
    return registry.names(package)


def advisory(name: str) -> bool:
    """Whether a gate informs only and never fails a run."""
    return bool(_gate(name).ADVISORY)


def threshold(name: str) -> Threshold:
    return _gate(name).THRESHOLD


def faults(answer: Answer, case: Case, workload: Workload) -> dict[str, str | None]:
    """For each gate of the workload what is wrong in plain words: "" passes, None does not apply to this case."""
    return {name: _gate(name).fault(answer, case, workload) for name in workload.gates}


def checks(answer: Answer, case: Case, workload: Workload) -> dict[str, bool]:
    """The gates that apply to this case, and whether the answer passes each."""
    seen = {name: judged(fault) for name, fault in faults(answer, case, workload).items()}
    return {name: passed for name, passed in seen.items() if passed is not None}


def count(checked: Iterable[dict[str, bool]]) -> dict[str, tuple[int, int]]:
    """Checks of many answers → {gate: (passes, n)}."""
    counts: dict[str, tuple[int, int]] = {}
    for row in checked:
        for name, passed in row.items():
            passes, n = counts.get(name, (0, 0))
            counts[name] = (passes + bool(passed), n + 1)
    return counts


def tabulate(checked: Iterable[dict[str, bool]]) -> dict[str, GateResult]:
    """Checks of many answers → the gate table, gates in a fixed order."""
    counts = count(checked)
    table = {}
    for name in sorted(counts, key=lambda gate: (_gate(gate).ADVISORY, gate)):
        gate = _gate(name)
        table[name] = decide(*counts[name], gate.THRESHOLD)
        table[name].title, table[name].advisory = gate.TITLE, gate.ADVISORY
    return table


def gate_table(answers: Iterable[tuple[Workload, Case, Answer]]) -> dict[str, GateResult]:
    """The result of each gate over all the answers.

    Only gates that a workload names and that apply to a case are counted. Advisory gates inform and never fail a run.
    """
    return tabulate(checks(answer, case, workload) for workload, case, answer in answers)
