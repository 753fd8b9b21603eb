"""No markdown in what will be spoken: no **, #, lists, backticks, tables, links."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.markdown import markdown_in
from annie_quant.judge.rules import Threshold
from annie_quant.judge.workloads import Case, Workload

NAME = "no_markdown"
TITLE = "no markdown"
THRESHOLD = Threshold("rate", founding_n=15, rate=12 / 15)
ADVISORY = False


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    """An empty answer fails (it shows no manners); a bare tool call has no text to judge."""
    if not answer.text.strip():
        return None if answer.tool_calls else "no text came"
    kind = markdown_in(answer.text)
    return f"markdown: {kind}" if kind else ""
