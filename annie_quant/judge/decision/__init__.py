"""The decision about a checkpoint or a run.

rule      counts in, verdicts out
verdict   an evaluation, and a run with its roles, confounds and outcome
roles     candidate, reference, incumbent
wording   every sentence about a verdict

Reports and search render or call these functions; they decide nothing themselves.
"""

# ruff: noqa: F401
from __future__ import annotations

from annie_quant.judge.decision.roles import assign, formats_of, other_side, roles_of
from annie_quant.judge.decision.rule import (
    FAILING,
    POOLED,
    RULE,
    JudgedGate,
    deciding_pairs,
    judge_gates,
    looks,
    member_verdict,
)
from annie_quant.judge.decision.verdict import (
    Decision,
    apply,
    blocking_of,
    candidate_decision,
    compared_with,
    deciding_gates,
    early_reasons,
    failing,
    final_reasons,
    judge_evaluation,
    judge_members,
    judge_sides,
    missing_numerics,
    peak_bytes,
    run_verdict,
    served_as,
    standing_of,
    verdict_of,
)
