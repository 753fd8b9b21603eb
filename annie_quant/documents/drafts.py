"""Drafts of a head for multi-token prediction: what share a server accepts, as predicted before one runs."""

from __future__ import annotations

import msgspec


class PromptEstimate(msgspec.Struct, frozen=True):
    """A figure, and its 95 % bootstrap interval over prompts: drafts of one answer depend on each other."""

    value: float
    low: float
    high: float

    def percent(self) -> str:
        """Return "94.1 % (93.0 to 95.2)"."""
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


class DraftSteps(msgspec.Struct, frozen=True):
    """A server's steps through a model's answers, with a number of drafts per step.

    drafts: per step.
    steps: number of them.
    accepted: share of the steps whose first k drafts are all accepted, for k from 1 on. Drafts of the last token of an
        answer, and after it, do not count.
    tokens_per_step: tokens of the answers, without the first of each, per step.
    """

    drafts: int
    steps: int
    accepted: list[PromptEstimate]
    tokens_per_step: PromptEstimate


class DraftPrediction(msgspec.Struct, frozen=True):
    """What drafts give for one kind of prompt.

    prompts: number of answers.
    by_drafts: for 1 draft per step, 2 and so on.
    """

    prompts: int
    by_drafts: list[DraftSteps]

    def of(self, drafts: int) -> DraftSteps:
        """Return the steps with `drafts` drafts, or with the most that were simulated."""
        return self.by_drafts[min(drafts, len(self.by_drafts)) - 1]


DRAFTS_FILE = "annie_quant_drafts.json"


class TunedHead(msgspec.Struct, kw_only=True):
    """How a checkpoint's MTP head was tuned, and what its drafts give (DRAFTS_FILE in the checkpoint's folder).

    base: name of the folder whose head it was; "" for the model's own.
    base_head_sha256, head_sha256: of the head's tensors before and after.
    numerics: the arithmetic of the answers and hidden states.
    answers, tokens: that it learned from.
    epochs, best_epoch: finished ones, and the one whose head stays.
    before, after: by kind of held-out prompt.
    general_before, general_after: on prompts that are not the user's; None where the chat template refuses them.
    """

    version: str
    base: str
    base_head_sha256: str
    head_sha256: str
    numerics: str
    answers: int
    tokens: int
    epochs: int
    best_epoch: int
    before: dict[str, DraftPrediction]
    after: dict[str, DraftPrediction]
    general_before: DraftPrediction | None = None
    general_after: DraftPrediction | None = None
