"""What an evaluation's verdict was counted from: a digest of it, and the counts and the verdict made from it again.

Counts are in a document for its readers; the outcomes per prompt, in the same document, decide. A digest of the outcomes shows an
edit of them. It has no key: who changes the outcomes, the counts and the digest together is not noticed (docs/threat-model.md).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import msgspec

from annie_quant.core.files import sha256_text
from annie_quant.documents import (
    Evaluation,
    GateResult,
    Member,
    NumericsResult,
    OfflineSide,
    PairedGate,
    PooledGates,
)
from annie_quant.judge.decision.rule import RULE
from annie_quant.judge.decision.verdict import judge_evaluation
from annie_quant.judge.gates import tabulate
from annie_quant.judge.pairing import pair_checks, with_floor

Checks = dict[str, dict[str, bool]]  # prompt → gate → passed
COUNTED = {"1": True, "0": False}  # "-": the gate does not apply
SHOWN = {
    **COUNTED,
    "p": True,
    "f": False,
}  # in the tables alone: answers that are not complete, gates for information
Row = GateResult | PairedGate | PooledGates | None
Side = NumericsResult | Member | OfflineSide
COUNTS = ("passes", "n", "lost", "won", "passed")


def evidence_sha256(evaluation: Evaluation) -> str:
    """Return the digest of the outcomes, what blocks the verdict, and the hashes of models and prompts."""
    e = evaluation
    parts = [
        e.version,
        e.reference_sha256,
        e.checkpoint_files,
        e.reference_files,
        e.workloads,
        e.blocking,
    ]
    outcomes = [
        e.prompts,
        e.reference_outcomes,
        e.floor_outcomes,
        e.outcomes(),
        *([e.rule] if e.rule else []),
    ]
    return sha256_text(msgspec.json.encode([*parts, *outcomes], order="deterministic").decode())


def differences(
    evaluation: Evaluation, shown: Mapping[str, OfflineSide] | None = None
) -> list[str]:
    """Return one line per fact of an evaluation that its outcomes do not give, and one for outcomes that were changed.

    shown: its sides as run.json has them, which are compared too. Verdicts are compared only where this rule made them.
    """
    if not evaluation.evidence_sha256:
        return ["no digest of its outcomes (an older annie-quant wrote it): evaluate again"]
    counted = recounted(evaluation)
    lines = list(_changed_counts(evaluation, counted))
    if evidence_sha256(evaluation) != evaluation.evidence_sha256:
        lines.insert(0, "its outcomes, its hashes or the reasons that block it were changed")
    others = sides(counted)
    for name, side in (shown or {}).items():
        if name in others:
            lines += _changed_side(f"run.json, {name}", side, others[name], evaluation.rule == RULE)
        else:
            lines.append(f"run.json, {name}: not in the evaluation")
    return lines


def sides(evaluation: Evaluation) -> dict[str, NumericsResult | Member]:
    return {**evaluation.numerics, **evaluation.members}


def recounted(evaluation: Evaluation) -> Evaluation:
    """Return a copy whose counts and verdicts are made from the outcomes again."""
    result = copy.deepcopy(evaluation)
    prompts = result.prompts
    result.reference_gates = tabulate(
        counted_checks(prompts, result.reference_outcomes, SHOWN).values()
    )
    for name, side in sides(result).items():
        side.gates = tabulate(counted_checks(prompts, side.outcomes, SHOWN).values())
        side.paired, side.pooled = pair_checks(pairs(result, name))
    return judge_evaluation(result)


def pairs(evaluation: Evaluation, name: str) -> list[tuple[Mapping[str, bool], Mapping[str, bool]]]:
    """Return (reference's checks, checkpoint's checks) per prompt under one arithmetic."""
    prompts = evaluation.prompts
    noisy = counted_checks(prompts, evaluation.floor_outcomes)
    after = counted_checks(prompts, sides(evaluation)[name].outcomes)
    return [
        (
            with_floor(row, noisy.get(prompt, {})) if evaluation.floor_outcomes else row,
            after.get(prompt, {}),
        )
        for prompt, row in counted_checks(prompts, evaluation.reference_outcomes).items()
    ]


def counted_checks(
    prompts: Mapping[str, list[str]],
    outcomes: Mapping[str, str],
    results: Mapping[str, bool] = COUNTED,
) -> Checks:
    """Return the checks of each prompt that has any.

    outcomes: as in Evaluation.
    results: which characters count.
    """
    rows: Checks = {}
    for gate, names in prompts.items():
        for name, passed in zip(names, outcomes.get(gate, ""), strict=False):
            if passed in results:
                rows.setdefault(name, {})[gate] = results[passed]
    return rows


def _changed_counts(stored: Evaluation, counted: Evaluation) -> Iterator[str]:
    same_rule = stored.rule == RULE
    yield from _changed("bf16", stored.reference_gates, counted.reference_gates, same_rule=False)
    others = sides(counted)
    for name, side in sides(stored).items():
        yield from _changed_side(name, side, others[name], same_rule)
    if same_rule and stored.verdict != counted.verdict:
        before, after = stored.verdict, counted.verdict
        texts = [f"{v.verdict} ({v.sentence})" if v else "none" for v in (before, after)]
        yield f"verdict: {texts[0]} in the file, {texts[1]} from its outcomes"


def _changed_side(where: str, side: Side, other: Side, same_rule: bool) -> Iterator[str]:
    yield from _changed(where, side.gates, other.gates, same_rule)
    yield from _changed(f"{where} against bf16", side.paired, other.paired, same_rule)
    yield from _changed(
        f"{where} against bf16", {"all": side.pooled}, {"all": other.pooled}, same_rule
    )


def _changed(
    where: str, stored: Mapping[str, Row], counted: Mapping[str, Row], same_rule: bool
) -> Iterator[str]:
    fields = (*COUNTS, "verdict") if same_rule else COUNTS
    for gate in dict.fromkeys([*stored, *counted]):
        row, other = stored.get(gate), counted.get(gate)
        for field in fields:
            value, again = getattr(row, field, None), getattr(other, field, None)
            if value != again:
                yield f"{where}, {gate}: {field} {value} in the file, {again} from its outcomes"
                break
