"""The result of a small sum stands in the answer (the founding question: 3 boxes of 5 balls, 15)."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold
from annie_quant.judge.text import statement_fault
from annie_quant.judge.workloads import Case, Workload

NAME = "reasoning"
TITLE = "reasoning"
THRESHOLD = Threshold("all", founding_n=5)
ADVISORY = False


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    return statement_fault(case.expect.get("contains"), answer.text)
