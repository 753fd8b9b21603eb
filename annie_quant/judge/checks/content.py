"""The answer as a whole: it exists, it ends, it is language."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.checks.garble import garbled, repeats
from annie_quant.judge.workloads import Case, Workload


def non_empty(answer: Answer, case: Case, workload: Workload) -> str | None:
    """Visible content or a tool call was received. An error, or white space alone, fails."""
    if answer.error:
        return f"the request failed: {answer.error}"
    if not answer.silent:
        return ""
    if answer.reasoning.strip():
        return "the content is empty; only thinking was received"
    return "the content is empty"


def stop(answer: Answer, case: Case, workload: Workload) -> str | None:
    """The model ended its answer itself; finish_reason "length" fails."""
    if answer.error or answer.finish_reason is None:
        return None
    return f"not finished at max_tokens ({workload.max_tokens_for(case)})" if answer.finish_reason == "length" else ""


def repetition(answer: Answer, case: Case, workload: Workload) -> str | None:
    """The text is language: no loops, no garbled characters or words."""
    if not answer.text.strip():
        return None
    return repeats(answer.text) or garbled(answer.text)
