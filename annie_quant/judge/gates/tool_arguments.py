"""The tool is asked for the right thing: each expected argument holds the expected words."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold
from annie_quant.judge.tools import argument_fault
from annie_quant.judge.workloads import Case, Workload

NAME = "tool_arguments"
TITLE = "tool arguments"
# Not in the founding documents; it informs.
THRESHOLD = Threshold("rate", founding_n=10, rate=0.6)
ADVISORY = True


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    wanted = case.expect.get("arguments")
    if not case.expect.get("tool") or not wanted:
        return None
    return argument_fault(answer, case.expect["tool"], wanted)
