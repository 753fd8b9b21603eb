"""What a conversation should state in a turn stands in that turn's answer (a fact asked in the middle of small talk)."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold
from annie_quant.judge.text import statement_fault
from annie_quant.judge.workloads import Case, Workload

NAME = "recall"
TITLE = "right in conversation"
# Not in the founding documents; it informs.
THRESHOLD = Threshold("rate", founding_n=10, rate=0.8)
ADVISORY = True


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    return statement_fault(case.expect.get("contains"), answer.text)
