"""The decision about a checkpoint or a run.

rule          keeps, loses, undecided or fragile, against the reference on the same prompts
roles         candidate, reference, incumbent
run           which side of a run is the candidate, what it would replace, whether it passes, and why
strategies    when the search drops a strategy early, and when it accepts one
replacement   the drop-in checklist and the recommendation: switch, stay or wait

Reports and search render or call these functions; they decide nothing themselves.
"""

# ruff: noqa: F401
from __future__ import annotations

from annie_quant.judge.decision.replacement import (
    BUDGET_BYTES,
    AnswerPairs,
    ChecklistItem,
    Recommendation,
    checklist,
    gains_and_losses,
    outcome,
    pair_answers,
    peak_bytes,
    recommendation,
    served_as,
)
from annie_quant.judge.decision.roles import RULE, assign, formats_of, other_side, roles_of
from annie_quant.judge.decision.rule import (
    FAILING,
    MARGIN,
    POOLED,
    apply,
    decided_at,
    deciding,
    judge_evaluation,
    judge_gates,
    judge_members,
    judge_sides,
    member_verdict,
    verdict_of,
)
from annie_quant.judge.decision.run import (
    Decision,
    JudgedGate,
    blocking_of,
    combined,
    deciding_gates,
    decision,
    standing_of,
    verdict,
)
from annie_quant.judge.decision.strategies import (
    cannot_keep,
    early_reasons,
    failing,
    final_reasons,
    looks,
    missing_numerics,
)
