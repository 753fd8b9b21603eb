"""Tool selection: the expected functions are called and no others, each as often as expected."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.call_values import selection_fault
from annie_quant.judge.rules import Threshold
from annie_quant.judge.workloads import Case, Workload

NAME = "tool_selection"
TITLE = "tool selection"
THRESHOLD = Threshold("rate", founding_n=10, rate=0.6)
ADVISORY = True


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    wanted = case.expect.get("calls")
    return selection_fault(answer, wanted) if wanted else None
