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
    PromptOutcome,
    decode_outcomes,
)
from annie_quant.judge.decision.rule import RULE
from annie_quant.judge.decision.verdict import judge_evaluation
from annie_quant.judge.gates import tabulate
from annie_quant.judge.pairing import pair_checks, with_floor

_Checks = dict[str, dict[str, bool]]  # prompt → gate → passed
_Row = GateResult | PairedGate | PooledGates | None
_Side = NumericsResult | Member | OfflineSide
COUNTS = ("passes", "n", "lost", "won", "passed")


def evidence_sha256(evaluation: Evaluation) -> str:
    """Return the digest of the outcomes, what blocks the verdict, and the hashes of models and prompts."""
    e = evaluation
    parts: list[object] = [
        e.version,
        e.reference_sha256,
        e.checkpoint_files,
        e.reference_files,
        e.workloads,
        e.blocking,
        e.prompts,
        e.reference_outcomes,
        e.floor_outcomes,
        e.outcomes(),
    ]
    if e.rule:
        parts.append(e.rule)
    return sha256_text(msgspec.json.encode(parts, order="deterministic").decode())


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
    result.reference_gates = _table(result, result.reference_outcomes)
    for name, side in sides(result).items():
        side.gates = _table(result, side.outcomes)
        side.paired, side.pooled = pair_checks(pairs(result, name))
    return judge_evaluation(result)


def _table(evaluation: Evaluation, outcomes: Mapping[str, str]) -> dict[str, GateResult]:
    """Return the gate table of outcomes, also of those that inform only."""
    return tabulate(checks_of(evaluation.prompts, outcomes, uncounted=True).values())


def pairs(evaluation: Evaluation, name: str) -> list[tuple[Mapping[str, bool], Mapping[str, bool]]]:
    """Return (reference's checks, checkpoint's checks) per prompt under one arithmetic."""
    prompts = evaluation.prompts
    before = checks_of(prompts, evaluation.reference_outcomes)
    after = checks_of(prompts, sides(evaluation)[name].outcomes)
    if evaluation.floor_outcomes:
        noisy = checks_of(prompts, evaluation.floor_outcomes)
        before = {prompt: with_floor(row, noisy.get(prompt, {})) for prompt, row in before.items()}
    return [(row, after.get(prompt, {})) for prompt, row in before.items()]


def checks_of(
    prompts: Mapping[str, list[str]], outcomes: Mapping[str, str], uncounted: bool = False
) -> _Checks:
    """Return the checks of each prompt that has any.

    outcomes: as in Evaluation.
    uncounted: also those that inform only.
    """
    rows: _Checks = {}
    for gate, names in prompts.items():
        decoded = decode_outcomes(outcomes.get(gate, ""))
        for name, outcome in zip(names, decoded, strict=False):
            applies = outcome != PromptOutcome.NOT_APPLICABLE
            if outcome.counts or (uncounted and applies):
                rows.setdefault(name, {})[gate] = outcome.passed
    return rows


def _changed_counts(stored: Evaluation, counted: Evaluation) -> Iterator[str]:
    same_rule = stored.rule == RULE
    yield from _changed("bf16", stored.reference_gates, counted.reference_gates, same_rule=False)
    others = sides(counted)
    for name, side in sides(stored).items():
        yield from _changed_side(name, side, others[name], same_rule)
    if same_rule and stored.verdict != counted.verdict:
        both = (stored.verdict, counted.verdict)
        texts = [f"{v.verdict} ({v.sentence})" if v else "none" for v in both]
        yield f"verdict: {texts[0]} in the file, {texts[1]} from its outcomes"


def _changed_side(where: str, side: _Side, other: _Side, same_rule: bool) -> Iterator[str]:
    yield from _changed(where, side.gates, other.gates, same_rule)
    yield from _changed(f"{where} against bf16", side.paired, other.paired, same_rule)
    yield from _changed(
        f"{where} against bf16", {"all": side.pooled}, {"all": other.pooled}, same_rule
    )


def _changed(
    where: str, stored: Mapping[str, _Row], counted: Mapping[str, _Row], same_rule: bool
) -> Iterator[str]:
    fields = (*COUNTS, "verdict") if same_rule else COUNTS
    for gate in dict.fromkeys([*stored, *counted]):
        for field in fields:
            value = getattr(stored.get(gate), field, None)
            again = getattr(counted.get(gate), field, None)
            if value != again:
                yield f"{where}, {gate}: {field} {value} in the file, {again} from its outcomes"
                break
