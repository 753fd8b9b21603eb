"""A known fact stands in the answer (the founding question: the capital of Japan, Tokyo)."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold
from annie_quant.judge.text import statement_fault
from annie_quant.judge.workloads import Case, Workload

NAME = "factual"
TITLE = "factual"
THRESHOLD = Threshold("all", founding_n=5)
ADVISORY = False


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    return statement_fault(case.expect.get("contains"), answer.text)
