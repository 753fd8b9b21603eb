"""The right tool is called: its name, arguments that parse as JSON, and types that fit its schema."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold
from annie_quant.judge.tools import call_fault
from annie_quant.judge.workloads import Case, Workload

NAME = "tool_call"
TITLE = "tool calls"
THRESHOLD = Threshold("rate", founding_n=10, rate=0.6)
ADVISORY = False


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    wanted = case.expect.get("tool")
    return call_fault(answer, wanted, workload.tools_for(case)) if wanted else None
