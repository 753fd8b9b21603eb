"""What an evaluation has measured of a checkpoint under one numerics, and its storage until the evaluation ends.

A killed evaluation continues after its last complete numerics. A file counts only for the same models, prompts, answers of the
reference and arithmetic; it is removed when the evaluation has its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import msgspec

from annie_quant import __version__, documents
from annie_quant.checkpoint.prompt_files import model_files
from annie_quant.core.files import replacing, sha256_text
from annie_quant.offline.answers import AnswerOutcome
from annie_quant.offline.decoding import Completion
from annie_quant.offline.ensemble import MemberOutcomes, Outcome
from annie_quant.offline.pair import ModelPair
from annie_quant.offline.prompts import Answered, ScoredAnswer


@dataclass(frozen=True)
class Measurement(Generic[Outcome]):
    """A checkpoint's answers and figures under one numerics.

    outcomes: its answers to all prompts; in memory each an AnswerOutcome, in a file a StoredOutcome.
    kl, kl_conversations: of the scored texts; None for an empty one.
    drafts: by workload, of its MTP head.
    members, figures: of the ensemble; none and None without one.
    """

    name: str
    outcomes: list[Outcome]
    kl: documents.KLSummary | None
    kl_conversations: documents.KLSummary | None
    drafts: dict[str, documents.DraftPrediction]
    members: list[MemberOutcomes[Outcome]]
    figures: documents.EnsembleFigures | None
    seconds: float


class StoredOutcome(msgspec.Struct, array_like=True):
    """An AnswerOutcome. prompt: of its request where that is not the reference's."""

    tokens: list[int]
    finished: bool
    same: bool
    agreed: int
    prompt: list[int] | None


def with_outcomes(
    measurement: Measurement[Any], convert: Callable[[Sequence[Any]], list[Outcome]]
) -> Measurement[Outcome]:
    """Return a measurement with its outcomes, and those of its members, in another form."""
    members = [replace(m, outcomes=convert(m.outcomes)) for m in measurement.members]
    return replace(measurement, outcomes=convert(measurement.outcomes), members=members)


class MeasurementStore:
    """The measurements of one evaluation, in the folder of the reference's answers.

    answered: the reference's answers to all prompts.
    conversations: further scored texts.
    """

    def __init__(
        self, pair: ModelPair, answered: Sequence[Answered], conversations: Sequence[ScoredAnswer]
    ) -> None:
        self.answered = answered
        self.folder = pair.reference.cache_folder
        inputs = [
            __version__,
            model_files(pair.job.checkpoint).sha256,
            pair.reference.files.sha256,
            pair.dtype,
            pair.device,
            pair.engine.rows,
            pair.job.has_ensemble,
            [(a.request.name, a.request.prompt, a.completion.tokens) for a in answered],
            [(scored.prompt, scored.target) for scored in conversations],
        ]
        self.key = sha256_text(msgspec.json.encode(inputs).decode())[:32]

    def measured(
        self, name: str, measure: Callable[[], Measurement[AnswerOutcome]]
    ) -> Measurement[AnswerOutcome]:
        """Return the measurement under a numerics: the stored one, else that of `measure`, which is stored."""
        path = self.folder / f"measured-{self.key}-{name}.msgpack"
        try:
            stored = msgspec.msgpack.decode(path.read_bytes(), type=Measurement[StoredOutcome])
        except (OSError, msgspec.MsgspecError):
            measurement = measure()
            with replacing(path) as file:
                file.write(
                    msgspec.msgpack.encode(with_outcomes(measurement, self._stored_outcomes))
                )
            return measurement
        return with_outcomes(stored, self._outcomes)

    def remove(self) -> None:
        for path in self.folder.glob(f"measured-{self.key}-*.msgpack"):
            path.unlink(missing_ok=True)

    def _stored_outcomes(self, outcomes: Sequence[AnswerOutcome]) -> list[StoredOutcome]:
        rows = []
        for outcome, (request, _) in zip(outcomes, self.answered, strict=True):
            prompt = None if outcome.request is request else list(outcome.request.prompt)
            completion = outcome.completion
            rows.append(
                StoredOutcome(
                    completion.tokens, completion.finished, outcome.same, outcome.agreed, prompt
                )
            )
        return rows

    def _outcomes(self, rows: Sequence[StoredOutcome]) -> list[AnswerOutcome]:
        outcomes = []
        for row, (request, _) in zip(rows, self.answered, strict=True):
            own = request if row.prompt is None else replace(request, prompt=tuple(row.prompt))
            completion = Completion(row.tokens, row.finished)
            outcomes.append(AnswerOutcome(own, completion, row.same, row.agreed))
        return outcomes
