"""The gates' outcomes of answers that were computed offline.

Counts and verdicts are made from them, here and when a stored evaluation is read (judge/evidence.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from annie_quant import documents, judge
from annie_quant.documents import PromptOutcome, encode_outcomes
from annie_quant.judge import Answer, Case, Judged, Workload
from annie_quant.judge.answers import constant_answer
from annie_quant.judge.gates import GATES, IMPLIED
from annie_quant.judge.pairing import deciding_checks
from annie_quant.offline.answers import AnswerOutcome
from annie_quant.offline.prompts import Answered, Template


@dataclass(frozen=True)
class ReferenceAnswers:
    """What a checkpoint's answers are judged against.

    answered: the reference's answers.
    judged: the same with what judges them, each with itself as its reference.
    own_outcomes: those of `judged`, by gate.
    """

    template: Template
    answered: list[Answered]
    judged: list[Judged]
    own_outcomes: list[dict[str, PromptOutcome]]

    def judge(self, outcomes: Sequence[AnswerOutcome | Answered]) -> list[Judged]:
        """Return answers of a checkpoint, or of the reference in another arithmetic, each with the reference's to the same prompt.

        An answer that equals the reference's, to the same request, is the reference's.
        """
        rows: list[Judged] = []
        for outcome, before, old in zip(outcomes, self.answered, self.judged, strict=True):
            if outcome.request is before.request and outcome.completion == before.completion:
                rows.append(old)
                continue
            answered = Answered(outcome.request, outcome.completion)
            rows.append(judged(self.template, answered)._replace(reference=old.reference))
        return rows

    def outcomes(self, rows: Sequence[Judged]) -> dict[str, str]:
        """Return by gate the outcomes of all prompts, as the document has them. rows: all answers, of judge()."""
        outcomes: dict[str, list[PromptOutcome]] = {}
        for row, old, of_old in zip(rows, self.judged, self.own_outcomes, strict=True):
            for gate, outcome in (of_old if row is old else prompt_outcomes(*row)).items():
                outcomes.setdefault(gate, []).append(outcome)
        return {gate: encode_outcomes(own) for gate, own in outcomes.items()}

    def prompts(self) -> dict[str, list[str]]:
        """Return by gate the names of the prompts of `outcomes`."""
        names: dict[str, list[str]] = {}
        for (request, _), of_old in zip(self.answered, self.own_outcomes, strict=True):
            for gate in of_old:
                names.setdefault(gate, []).append(request.name)
        return names


def reference_answers(template: Template, answered: Sequence[Answered]) -> ReferenceAnswers:
    """Return the reference's answers, each with itself as its reference, so that it passes every gate that compares."""
    rows = [judged(template, a) for a in answered]
    rows = [row._replace(reference=row.answer) for row in rows]
    own_outcomes = [prompt_outcomes(*row) for row in rows]
    return ReferenceAnswers(template, list(answered), rows, own_outcomes)


def judged(template: Template, answered: Answered) -> Judged:
    """Return an answer with the workload and the case, at its turn, that judge it."""
    request, completion = answered
    case = request.case.at_turn(request.turn)
    return Judged(request.workload, case, template.answer(request, completion))


def prompt_outcomes(
    workload: Workload, case: Case, answer: Answer, reference: Answer | None
) -> dict[str, PromptOutcome]:
    """Return the outcome of each gate of the workload for one answer.

    What passes or fails and does not count is not complete, or left out by the workload's author.
    """
    checks = judge.checks(answer, case, workload, reference)
    counting = deciding_checks(checks, answer, workload)
    names = dict.fromkeys((*workload.gates, *IMPLIED))
    return {gate: PromptOutcome.of(checks.get(gate), gate in counting) for gate in names}


def gives_one_answer(references: ReferenceAnswers, after: Sequence[Judged]) -> str:
    """Return how many prompts the checkpoint gives one answer to where the reference does not, or "".

    after: its answers. Labels judge the prompts that have some.
    """
    pairs = zip(after, references.judged, strict=True)
    unlabelled = [(row.answer, old.answer) for row, old in pairs if not old.case.expect]
    return constant_answer([own for own, _ in unlabelled], [old for _, old in unlabelled])


def differing_answers(
    outcomes: Sequence[AnswerOutcome], after: Sequence[Judged], before: Sequence[Judged]
) -> list[documents.DifferingAnswer]:
    """Return the answers that differ from the reference's, with both texts and the gates that now fail."""
    differing = []
    for outcome, row, old in zip(outcomes, after, before, strict=True):
        if outcome.same:
            continue
        checks = judge.checks(row.answer, row.case, row.workload, row.reference)
        differing.append(
            documents.DifferingAnswer(
                case=outcome.request.name,
                agreed_tokens=outcome.agreed,
                failed=[g for g, ok in checks.items() if not (ok or GATES[g].two_sided)],
                text=row.answer.text,
                tool_calls=calls_as_text(row.answer),
                reference_text=old.answer.text,
                reference_tool_calls=calls_as_text(old.answer),
            )
        )
    return differing


def calls_as_text(answer: Answer) -> list[str]:
    return [f"{c['name']}({c['arguments']})" for c in answer.tool_calls]
