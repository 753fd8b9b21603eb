"""Schema validity: something is called where something should be, and all arguments parse and fit their schemas."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold
from annie_quant.judge.tools import schemas_fault
from annie_quant.judge.workloads import Case, Workload

NAME = "tool_schema"
TITLE = "schema validity"
THRESHOLD = Threshold("rate", founding_n=10, rate=0.6)
ADVISORY = True


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    return schemas_fault(answer, workload.tools_for(case)) if case.expect.get("calls") else None
