"""Evaluations made from outcomes per prompt, as `annie-quant eval` stores them: counts, verdict and digest follow from them."""

from __future__ import annotations

from collections.abc import Mapping

from annie_quant import __version__, documents, judge
from annie_quant.judge import evidence

Outcomes = Mapping[str, str]  # gate → one character per prompt: "1", "0" or "-"
NOTHING = dict.fromkeys(
    ("kl", "kl_conversations", "kl_text", "perplexity", "perplexity_reference", "verbosity_ratio")
)


def from_outcomes(
    sides: Mapping[str, Outcomes], before: Outcomes, **fields
) -> documents.Evaluation:
    """Return an evaluation. sides: by numerics or member ("w4a4+perm1"). before: the reference's. Each gate has its own prompts."""
    numerics, members = {}, {}
    for name, outcomes in sides.items():
        common = {"gates": {}, "paired": {}, "outcomes": dict(outcomes)}
        if "+" in name:
            members[name] = documents.Member(arithmetic="", n_computed=1, n_changed=0, **common)
        else:
            numerics[name] = documents.NumericsResult(
                same_answers=documents.SameAnswers(1, 1), cases=[], seconds=1.0, **NOTHING, **common
            )
    values = {
        "schema_version": documents.SCHEMA_VERSION, "version": __version__, "rule": judge.decision.RULE,
        "model": "nv", "reference": "bf16",
        "reference_sha256": "", "dtype": "float32", "device": "cpu", "workloads": {}, "n_answers": 400,
        "n_conversation_answers": 0, "n_text_tokens": 0, "notes": [], "seconds": 1.0, "reference_gates": {},
    }  # fmt: skip
    names = {gate: [f"{gate}/{i}" for i in range(len(text))] for gate, text in before.items()}
    evaluation = documents.Evaluation(
        numerics=numerics,
        members=members,
        prompts=names,
        reference_outcomes=dict(before),
        **(values | fields),
    )
    evaluation = evidence.recounted(evaluation)
    evaluation.evidence_sha256 = evidence.evidence_sha256(evaluation)
    return judge.judge_evaluation(evaluation)


def from_counts(
    members: Mapping[str, Mapping[str, tuple[int, int, int]]], **fields
) -> documents.Evaluation:
    """Return an evaluation in which each member lost and won so many answers. members: name → gate → (n, lost, won)."""
    n_won = {
        gate: max(m[gate][2] for m in members.values()) for m in members.values() for gate in m
    }
    sizes = {gate: counts[0] for m in members.values() for gate, counts in m.items()}
    reference = {gate: "1" * (n - n_won[gate]) + "0" * n_won[gate] for gate, n in sizes.items()}
    sides = {
        name: {
            gate: "0" * lost
            + "1" * (n - n_won[gate] - lost)
            + "1" * won
            + "0" * (n_won[gate] - won)
            for gate, (n, lost, won) in counts.items()
        }
        for name, counts in members.items()
    }
    return from_outcomes(sides, reference, **fields)
