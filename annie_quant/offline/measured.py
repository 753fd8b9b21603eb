"""What an evaluation has measured of a checkpoint under one numerics, and its storage until the evaluation ends.

A killed evaluation continues after its last complete numerics. A file counts only for the same models, prompts, answers of the
reference and arithmetic; it is removed when the evaluation has its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec

from annie_quant import __version__, documents
from annie_quant.checkpoint.prompt_files import model_files
from annie_quant.core.files import replacing, sha256_text
from annie_quant.offline.answers import AnswerOutcome
from annie_quant.offline.decoding import Completion
from annie_quant.offline.ensemble import MemberOutcomes
from annie_quant.offline.pair import ModelPair
from annie_quant.offline.prompts import Answered, ScoredAnswer


@dataclass(frozen=True)
class Measurement:
    """A checkpoint's answers and figures under one numerics.

    outcomes: its answers to all prompts.
    kl, kl_conversations: of the scored texts; None for an empty one.
    drafts: by workload, of its MTP head.
    members, figures: of the ensemble; none and None without one.
    """

    name: str
    outcomes: list[AnswerOutcome]
    kl: documents.KLSummary | None
    kl_conversations: documents.KLSummary | None
    drafts: dict[str, documents.DraftAcceptance]
    members: list[MemberOutcomes]
    figures: documents.EnsembleFigures | None
    seconds: float


class StoredOutcome(msgspec.Struct, array_like=True):
    """An AnswerOutcome. prompt: of its request where that is not the reference's."""

    tokens: list[int]
    finished: bool
    same: bool
    agreed: int
    prompt: list[int] | None


class StoredMember(msgspec.Struct):
    """MemberOutcomes."""

    name: str
    arithmetic: str
    outcomes: list[StoredOutcome]
    n_computed: int
    n_changed: int


class StoredMeasurement(msgspec.Struct):
    """A file of a Measurement; it has the fields of that type."""

    name: str
    outcomes: list[StoredOutcome]
    kl: documents.KLSummary | None
    kl_conversations: documents.KLSummary | None
    drafts: dict[str, documents.DraftAcceptance]
    members: list[StoredMember]
    figures: documents.EnsembleFigures | None
    seconds: float


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

    def measured(self, name: str, measure: Callable[[], Measurement]) -> Measurement:
        """Return the measurement under a numerics: the stored one, else that of `measure`, which is stored."""
        path = self.folder / f"measured-{self.key}-{name}.msgpack"
        try:
            stored = msgspec.msgpack.decode(path.read_bytes(), type=StoredMeasurement)
        except (OSError, msgspec.MsgspecError):
            measurement = measure()
            with replacing(path) as file:
                file.write(msgspec.msgpack.encode(self._encoded(measurement)))
            return measurement
        return self._decoded(stored)

    def remove(self) -> None:
        for path in self.folder.glob(f"measured-{self.key}-*.msgpack"):
            path.unlink(missing_ok=True)

    def _encoded(self, measurement: Measurement) -> StoredMeasurement:
        members = [
            StoredMember(
                member.name,
                member.arithmetic,
                self._stored_outcomes(member.outcomes),
                member.n_computed,
                member.n_changed,
            )
            for member in measurement.members
        ]
        return StoredMeasurement(
            name=measurement.name,
            outcomes=self._stored_outcomes(measurement.outcomes),
            kl=measurement.kl,
            kl_conversations=measurement.kl_conversations,
            drafts=measurement.drafts,
            members=members,
            figures=measurement.figures,
            seconds=measurement.seconds,
        )

    def _decoded(self, stored: StoredMeasurement) -> Measurement:
        members = [
            MemberOutcomes(
                member.name,
                member.arithmetic,
                self._outcomes(member.outcomes),
                member.n_computed,
                member.n_changed,
            )
            for member in stored.members
        ]
        return Measurement(
            name=stored.name,
            outcomes=self._outcomes(stored.outcomes),
            kl=stored.kl,
            kl_conversations=stored.kl_conversations,
            drafts=stored.drafts,
            members=members,
            figures=stored.figures,
            seconds=stored.seconds,
        )

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
