"""The tool call as the model wrote it, also where the server's parser left it in the text.

Higher than tool_call: the server's parser is at fault (is --tool-call-parser set?), not the model.
"""

from __future__ import annotations

from annie_quant.judge.answers import Answer, raw_view
from annie_quant.judge.rules import Threshold
from annie_quant.judge.tools import call_fault
from annie_quant.judge.workloads import Case, Workload

NAME = "tool_call_raw"
TITLE = "tool calls, raw text"
THRESHOLD = Threshold("rate", founding_n=10, rate=0.6)
ADVISORY = True


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    wanted = case.expect.get("tool")
    tools = workload.tools_for(case)
    return call_fault(raw_view(answer, tools), wanted, tools) if wanted else None
