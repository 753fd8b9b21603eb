"""Hidden states of prompts with their answers. Pairs of a prefix that rows share are computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.nn import functional

from annie_quant.offline.draft_head import DraftInputs
from annie_quant.offline.engine import Engine


class DraftedAnswer(NamedTuple):
    """A model's own answer to a prompt, in tokens. kind: workload, or category of the conversation."""

    kind: str
    prompt: Sequence[int]
    answer: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.answer]


@dataclass(frozen=True)
class AnswerStates:
    """Hidden states of answers whose prompts begin with the same tokens.

    rows: the answers' indices.
    firsts: per row, the column at whose hidden state the first token of the answer is chosen.
    lengths: per row, its columns.
    ids: int64 [B, T], the tokens of the columns.
    hidden: [B, T, D], after the final norm.
    prefix_ids, prefix_hidden: [S] and [S, D], the tokens before the columns of all rows.
    """

    rows: list[int]
    firsts: list[int]
    lengths: list[int]
    ids: torch.Tensor
    hidden: torch.Tensor
    prefix_ids: torch.Tensor
    prefix_hidden: torch.Tensor

    def copy(self) -> AnswerStates:
        """Return the same states in tensors of their own, which autograd can use."""
        return replace(
            self,
            ids=self.ids.clone(),
            hidden=self.hidden.clone(),
            prefix_ids=self.prefix_ids.clone(),
            prefix_hidden=self.prefix_hidden.clone(),
        )

    def inputs(self, steps: int) -> DraftInputs:
        """Return the inputs of a draft head for so many steps.

        The last pair of the prefix needs the first token of a row, so it is the first pair of each row.
        """
        rows = len(self.rows)
        ids = functional.pad(self.ids, (0, steps))
        hidden = self.hidden[:, :-1]
        first = min(self.firsts)
        prefix = len(self.prefix_ids)
        if not prefix:
            return DraftInputs(hidden, ids[:, 1:], first)
        last = self.prefix_hidden[-1:].expand(rows, 1, -1)
        return DraftInputs(
            torch.cat([last, hidden], 1),
            ids,
            first + 1,
            self.prefix_hidden[:-1],
            self.prefix_ids[1:],
        )


@torch.inference_mode()
def answer_states(engine: Engine, answers: Sequence[DraftedAnswer]) -> Iterator[AnswerStates]:
    """Yield the hidden states of all answers, in batches, on the engine's device."""
    inputs = [answer.tokens for answer in answers]
    prompts = [len(answer.prompt) for answer in answers]
    prefixes: dict[tuple[int, ...], torch.Tensor] = {}
    for batch in engine.forwards(inputs, [n - 1 for n in prompts], prompts=prompts):
        shared = batch.shared
        prefix = tuple(inputs[batch.rows[0]][:shared])
        if prefix not in prefixes:
            prefixes[prefix] = _prefix_states(engine, prefix)
        width = batch.hidden.shape[1]
        ids = torch.zeros(len(batch.rows), width, dtype=torch.long)
        for j, i in enumerate(batch.rows):
            ids[j, : len(inputs[i]) - shared] = torch.tensor(inputs[i][shared:])
        yield AnswerStates(
            rows=batch.rows,
            firsts=[prompts[i] - 1 - shared for i in batch.rows],
            lengths=[len(inputs[i]) - shared for i in batch.rows],
            ids=ids.to(engine.device),
            hidden=batch.hidden,
            prefix_ids=torch.tensor(prefix, dtype=torch.long, device=engine.device),
            prefix_hidden=prefixes[prefix],
        )


def _prefix_states(engine: Engine, prefix: Sequence[int]) -> torch.Tensor:
    """Return the hidden states [S, D] of a prefix."""
    if not prefix:
        return torch.empty(0, engine.config.hidden_size, device=engine.device)
    return next(iter(engine.forwards([prefix], [0]))).hidden[0]
