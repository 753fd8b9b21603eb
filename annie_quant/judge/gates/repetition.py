"""The text is language: it does not run in circles and is not garbled (the founding v3's base model was)."""

from __future__ import annotations

from annie_quant.judge.answers import Answer
from annie_quant.judge.garble import garbled, repeats
from annie_quant.judge.rules import Threshold
from annie_quant.judge.workloads import Case, Workload

NAME = "repetition"
TITLE = "no repetition or garble"
# Not in the founding documents.
THRESHOLD = Threshold("all", founding_n=5)
ADVISORY = False


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    if not answer.text.strip():
        return None
    return repeats(answer.text) or garbled(answer.text)
