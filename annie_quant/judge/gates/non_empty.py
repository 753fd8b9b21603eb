"""Something came back: visible content, or a tool call. An error or an answer of white space is a failure."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold
from annie_quant.judge.workloads import Case, Workload

NAME = "non_empty"
TITLE = "non-empty"
# The founding documents say "all"; as many as the thinking gate decided on.
THRESHOLD = Threshold("zero", founding_n=25)
ADVISORY = False


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    if answer.error:
        return f"the request failed: {answer.error}"
    if not answer.silent:
        return ""
    if answer.reasoning.strip():
        return "the content is empty; all that came was thinking"
    return "the content is empty"
