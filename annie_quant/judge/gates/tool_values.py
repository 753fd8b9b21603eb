"""Argument correctness: the expected calls with allowed values for every argument."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.call_values import values_fault
from annie_quant.judge.rules import Threshold
from annie_quant.judge.workloads import Case, Workload

NAME = "tool_values"
TITLE = "argument correctness"
THRESHOLD = Threshold("rate", founding_n=10, rate=0.6)
ADVISORY = True


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    wanted = case.expect.get("calls")
    return values_fault(answer, wanted) if wanted else None
