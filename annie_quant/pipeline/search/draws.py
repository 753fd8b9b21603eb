"""Calibration draws: a strategy made again from other rows, and where the spread of its answers comes from (judge/variance.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from annie_quant.errors import AnnieError, NoRoom
from annie_quant.judge import Workload, variance
from annie_quant.judge.decision import POOLED
from annie_quant.judge.gates import REFERENCE_GATES, decides
from annie_quant.pipeline.stages import Stages, drawn
from annie_quant.schema import CalibrationDraw, Evaluation, PairedVerdict, Ranked, Spread, StrategyRow

FACTORS = ("prompts", "calibration", "arithmetic")


class Draws:
    """The calibration draws of one search. tables: numerics → strategy → right answers [prompts, draws, arithmetics]."""

    def __init__(self, stages: Stages, seeds: int) -> None:
        self.stages, self.seeds = stages, seeds
        self.tables: dict[str, dict[str, Any]] = {}

    def evaluate(self, row: StrategyRow, first: Evaluation, prompts: Sequence[Workload]) -> None:
        """Make and evaluate the further draws of a strategy: sets draws and spread; one that does not keep ends `passed`."""
        evaluations = [first]
        for seed in range(1, self.seeds):
            try:
                self.stages.quantize(row.strategy, seed)
                audit = self.stages.audit(row.strategy, seed)
            except NoRoom:
                raise
            except AnnieError as error:
                self.reject(row, f"calibration draw {seed} could not be made: {error.message}")
                return
            if not audit.ok:
                self.reject(row, f"calibration draw {seed}: {audit.summary}")
                return
            folder = self.stages.checkpoint(row.strategy, seed)
            evaluation = self.stages.evaluate(drawn(row.strategy, seed), folder, prompts, ensemble=True)
            evaluations.append(evaluation)
            verdict = evaluation.verdict or PairedVerdict()
            gates = {
                kind: {gate: [r.passes, r.n] for gate, r in side.gates.items() if not r.advisory}
                for kind, side in evaluation.numerics.items()
            }
            row.draws.append(CalibrationDraw(seed, verdict, gates))
            row.path.append(f"calibration draw {seed} → {verdict.sentence}")
            if verdict.verdict != "keeps":
                self.reject(row, f"calibration draw {seed}: {verdict.sentence}")
        if self.seeds > 1:
            for kind in first.numerics:
                row.spread[kind] = spreads(evaluations, kind)
                self.tables.setdefault(kind, {})[row.strategy] = right_answers(evaluations, kind)

    @staticmethod
    def reject(row: StrategyRow, reason: str) -> None:
        row.passed = False
        row.why.append(reason)

    def ranking(self) -> list[Ranked]:
        """Return the pairs of strategies whose order is sure, per numerics."""
        ranked = []
        for kind, tables in self.tables.items():
            shapes = {table.shape for table in tables.values()}
            if len(tables) > 1 and len(shapes) == 1:
                ranked += [Ranked(kind, *rest) for rest in variance.ranking(tables, FACTORS)]
        return ranked


def members(evaluation: Evaluation, kind: str) -> list[Mapping[str, str]]:
    """Return the outcomes (gate → one character per prompt) of a numerics and of its ensemble's further members."""
    return [own for name, own in evaluation.outcomes().items() if name.partition("+")[0] == kind]


def spreads(evaluations: Sequence[Evaluation], kind: str) -> dict[str, Spread]:
    """Return the spread of each deciding gate, and of right answers ("all"). evaluations: one per calibration draw."""
    result = {POOLED: variance.spread(right_answers(evaluations, kind), FACTORS)}
    for gate in evaluations[0].prompts:
        if decides(gate):
            table = outcomes(evaluations, kind, gate)
            if len(table) > 1:
                result[gate] = variance.spread(table, FACTORS)
    return result


def outcomes(evaluations: Sequence[Evaluation], kind: str, gate: str) -> Any:
    """Return one gate's outcomes, float64 [prompts, draws, arithmetics], of the prompts that it applies to everywhere."""
    rows = [[own.get(gate, "") for own in members(e, kind)] for e in evaluations]
    n = min(len(text) for draw in rows for text in draw)
    table = np.array([[list(text[:n]) for text in draw] for draw in rows]).reshape(len(rows), len(rows[0]), n)
    table = table.transpose(2, 0, 1)
    return (table[(table != "-").all(axis=(1, 2))] == "1").astype(np.float64)


def right_answers(evaluations: Sequence[Evaluation], kind: str) -> Any:
    """Return whether each answer passes all of its deciding gates, float64 [prompts, draws, arithmetics]."""
    prompts = evaluations[0].prompts
    gates = [gate for gate in prompts if decides(gate) and gate not in REFERENCE_GATES] or [
        g for g in prompts if decides(g)
    ]
    reference = evaluations[0].reference_outcomes
    applying = [
        name
        for gate in gates
        for name, passed in zip(prompts[gate], reference.get(gate, "1" * len(prompts[gate])), strict=False)
        if passed != "-"
    ]
    position = {name: i for i, name in enumerate(dict.fromkeys(applying))}
    sides = [[*members(e, kind)] for e in evaluations]
    right = np.ones((len(position), len(evaluations), len(sides[0])))
    for draw, (evaluation, own) in enumerate(zip(evaluations, sides, strict=True)):
        for arithmetic, text in enumerate(own):
            for gate in gates:
                for name, passed in zip(evaluation.prompts[gate], text.get(gate, ""), strict=False):
                    if passed == "0" and name in position:
                        right[position[name], draw, arithmetic] = 0
    return right
