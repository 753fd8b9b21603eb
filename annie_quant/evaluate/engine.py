"""Batched forwards for evaluation: shared prefixes once, rows of unequal length together.

Rows are padded on the right, so no real token ever sees padding; attention masks padded columns out of decoding, and
DeltaNet's states are those after each row's own last token (deltanet.py). In float32 the outcome does not depend on how
rows were batched beyond rounding of sums; tests/evaluate/test_engine.py compares it with transformers' own generate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from annie_quant.errors import UsageError
from annie_quant.evaluate import caches
from annie_quant.evaluate.attention import grouped
from annie_quant.evaluate.deltanet import Batch, ragged_layers
from annie_quant.evaluate.prefix import group_by_prefix
from annie_quant.evaluate.process_group import ALONE, Team

LOGITS = 1 << 25  # logits alive at a time


@dataclass(frozen=True)
class Row:
    """A prompt and the tokens that are to be scored after it."""

    prompt: Sequence[int]
    target: Sequence[int]


@dataclass(frozen=True)
class Forward:
    """One batch that was run: the rows' indices, hidden states [B, T, D] from token `shared` on, and the cache."""

    rows: list[int]
    hidden: torch.Tensor
    shared: int
    cache: DynamicCache


class Engine:
    """One model with its batching. tokens: most tokens (rows x length) in a forward; rows: most rows in a batch."""

    def __init__(self, model: Any, tokens: int = 4096, rows: int = 128, team: Team = ALONE) -> None:
        self.model, self.tokens, self.rows, self.team = model, tokens, rows, team
        self.device = next(model.parameters()).device
        self.config = model.config.get_text_config()
        kinds = getattr(self.config, "layer_types", None) or ["full_attention"] * self.config.num_hidden_layers
        strange = set(kinds) - {"full_attention", "linear_attention"}
        if strange:
            raise UsageError(f"layers of type {sorted(strange)[0]} cannot be evaluated offline yet")
        self.kinds = kinds
        self.batch = Batch()
        self.head = model.get_output_embeddings()

    def scores(self, rows: Sequence[Row]) -> Iterator[tuple[int, torch.Tensor]]:
        """(row index, logits float32 [len(target), V]) for each row: what each target token was chosen from.

        The order is the batching's; it depends on the rows alone, so two models go through the same rows in step. Of a
        team each process gets the rows of its own batches.
        """
        inputs = [[*row.prompt, *row.target[:-1]] for row in rows]
        width = int(getattr(self.head, "out_features", 0) or self.head.weight.shape[0])
        for run in self.forwards(inputs, [len(r.prompt) - 1 for r in rows], self.team):
            sizes = [len(rows[i].target) for i in run.rows]
            for part in in_parts(sizes, max(1, LOGITS // width)):
                firsts = [len(rows[run.rows[j]].prompt) - 1 - run.shared for j in part]
                states = torch.cat([run.hidden[j, f : f + sizes[j]] for j, f in zip(part, firsts, strict=True)])
                logits = self.logits(states).float()
                for j, own in zip(part, logits.split([sizes[j] for j in part]), strict=True):
                    yield run.rows[j], own

    def forwards(self, inputs: Sequence[Sequence[int]], caps: Sequence[int], team: Team = ALONE) -> Iterator[Forward]:
        """Run rows of tokens; caps[i]: the most tokens of row i that may go with a shared prefix."""
        number = 0
        for group in group_by_prefix(inputs, caps):
            shared = None
            waiting = sorted(group.rows, key=lambda i: -len(inputs[i]))
            while waiting:
                width = len(inputs[waiting[0]]) - group.shared
                count = max(1, min(self.rows, self.tokens // width))
                batch, waiting = waiting[:count], waiting[count:]
                number += 1
                if not team.mine(number - 1):
                    continue
                if group.shared and shared is None:
                    shared = caches.empty(self.model.config, self.kinds)
                    prefix = torch.tensor([list(inputs[group.rows[0]][: group.shared])], device=self.device)
                    self.step(prefix, shared, group.shared)
                cache = caches.empty(self.model.config, self.kinds)
                if shared is not None:
                    cache = caches.repeat(shared, cache, len(batch))
                ids = torch.zeros(len(batch), width, dtype=torch.long)
                for j, i in enumerate(batch):
                    ids[j, : len(inputs[i]) - group.shared] = torch.tensor(inputs[i][group.shared :])
                lengths = torch.tensor([len(inputs[i]) - group.shared for i in batch], device=self.device)
                self.batch.set(lengths if int(lengths.min()) < width else None, width, cache)
                hidden = self.step(ids.to(self.device), cache, group.shared + width)
                self.batch.set(None, 0, None)
                yield Forward(batch, hidden, group.shared, cache)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, cache: DynamicCache, total: int, **more: Any) -> torch.Tensor:
        """Hidden states [B, T, D] after the final norm; `total`: columns of the cache after this step."""
        if "position_ids" not in more:
            more["position_ids"] = torch.arange(total - ids.shape[1], total, device=self.device).expand(len(ids), -1)
        with ragged_layers(self.model, self.batch), grouped(self.config):
            return self.model.base_model(input_ids=ids, past_key_values=cache, use_cache=True, **more).last_hidden_state


def in_parts(sizes: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices of `sizes` in runs whose sum stays within `most` (a run holds at least one)."""
    run: list[int] = []
    total = 0
    for i, size in enumerate(sizes):
        if run and total + size > most:
            yield run
            run, total = [], 0
        run.append(i)
        total += size
    if run:
        yield run
