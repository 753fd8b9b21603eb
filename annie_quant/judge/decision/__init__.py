"""The decision about a checkpoint or a run.

rule          keeps, loses, undecided or fragile, against the reference on the same prompts; when the search drops a strategy
roles         candidate, reference, incumbent
judged        the deciding gates of a side
run           which side of a run is the candidate, what it would replace, whether it passes, and why
replacement   the drop-in checklist and the recommendation: switch, stay or wait

Reports and search render or call these functions; they decide nothing themselves.
"""

# ruff: noqa: F401
from __future__ import annotations

from annie_quant.judge.decision.judged import blocking_of, deciding_gates, standing_of
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
    POOLED,
    apply,
    cannot_keep,
    decided_at,
    deciding,
    early_reasons,
    failing,
    final_reasons,
    judge_evaluation,
    judge_gates,
    judge_members,
    judge_sides,
    looks,
    member_verdict,
    missing_numerics,
    verdict_of,
)
from annie_quant.judge.decision.run import combined, decision, verdict
