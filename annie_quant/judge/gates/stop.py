"""The model ended its answer by itself. finish_reason "length" is a refusal to stop."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold
from annie_quant.judge.workloads import Case, Workload

NAME = "stop"
TITLE = "stops by itself"
# Not in the founding documents; a voice assistant that talks to its token limit is broken.
THRESHOLD = Threshold("all", founding_n=5)
ADVISORY = False


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    if answer.error or answer.finish_reason is None:
        return None
    return f"still talking at max_tokens ({workload.max_tokens})" if answer.finish_reason == "length" else ""
