"""How many prompts per gate are needed so that gates which compare with bf16's own answers apply to enough of them.

How many answers such a gate applies to is known only when bf16 has answered: a language, for example, is compared in answers of
six words or more. Without this, such a gate stays undecided although the workloads have more prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from annie_quant.schema import GateResult

LEAST_ANSWERS = 60  # a gate without a changed answer keeps from 52 on (judge/decision/paired.py)
MOST_PROMPTS = 4  # times n per gate, at most, to get them


def prompts_per_gate(n: int, reference: Mapping[str, GateResult]) -> int:
    """Return n, or more where a gate that compares with bf16's own answers applies to fewer than LEAST_ANSWERS of n prompts.

    reference: bf16's gates over n prompts per gate. A gate that is too rare to be judged (advisory) does not count.
    """
    fewest = min((g.n for g in reference.values() if g.basis == "reference" and not g.advisory and g.n), default=n)
    if n < LEAST_ANSWERS or fewest >= LEAST_ANSWERS:
        return n
    return min(MOST_PROMPTS * n, math.ceil(n * LEAST_ANSWERS / fewest))
