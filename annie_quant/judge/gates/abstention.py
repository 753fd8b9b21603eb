"""No tool is called where none fits (over-calling); an answer in words is wanted instead."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold
from annie_quant.judge.workloads import Case, Workload

NAME = "abstention"
TITLE = "no tool where none fits"
# Not in the founding documents: the same share as for no markdown.
THRESHOLD = Threshold("rate", founding_n=10, rate=0.8)
ADVISORY = False


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    if not case.expect.get("no_tool"):
        return None
    if answer.tool_calls:
        return f"it called {answer.tool_calls[0].get('name')!r} where no tool fits"
    if "<tool_call>" in answer.text or "<function=" in answer.text:
        return "a tool call stands in the text where no tool fits"
    return "" if answer.text.strip() else "no text came"
