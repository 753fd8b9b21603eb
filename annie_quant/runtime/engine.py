"""Batched forwards and greedy decoding for evaluation: shared prefixes once, rows of unequal length together.

Rows are padded on the right, so no real token ever sees padding; attention masks padded columns out of decoding, and
DeltaNet's states are those after each row's own last token (deltanet.py). In float32 the outcome does not depend on how
rows were batched beyond rounding of sums; tests/test_runtime_engine.py compares it with transformers' own generate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from annie_quant.errors import UsageError
from annie_quant.runtime.deltanet import Batch, RoomyKeys, ragged_layers
from annie_quant.runtime.prefix import group_by_prefix

LOGITS = 1 << 25  # logits alive at a time


@dataclass(frozen=True)
class Row:
    """A prompt and the tokens that are to be scored after it."""

    prompt: Sequence[int]
    target: Sequence[int]


@dataclass
class Decoded:
    """Greedy continuation: token ids without the end mark; finished is False when the limit cut it."""

    tokens: list[int]
    finished: bool


class Engine:
    """One model with its batching. `tokens`: most tokens (rows x length) in a forward; `rows`: most rows in a decode
    step."""

    def __init__(self, model: Any, tokens: int = 4096, rows: int = 128) -> None:
        self.model, self.tokens, self.rows = model, tokens, rows
        self.device = next(model.parameters()).device
        config = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        strange = set(kinds) - {"full_attention", "linear_attention"}
        if strange:
            raise UsageError(f"layers of type {sorted(strange)[0]} cannot be evaluated offline yet")
        self.kinds = kinds
        self.batch = Batch()
        self.head = model.get_output_embeddings()

    def scores(self, rows: Sequence[Row]) -> Iterator[tuple[int, torch.Tensor]]:
        """(row index, logits float32 [len(target), V]) for each row: what each target token was chosen from.

        The order is the batching's; it depends on the rows alone, so two models go through the same rows in step.
        """
        inputs = [[*row.prompt, *row.target[:-1]] for row in rows]
        width = head_size(self.head)
        for indices, hidden, start in self.forwards(inputs, [len(r.prompt) - 1 for r in rows]):
            sizes = [len(rows[i].target) for i in indices]
            for part in in_parts(sizes, max(1, LOGITS // width)):
                firsts = [len(rows[indices[j]].prompt) - 1 - start for j in part]
                states = torch.cat([hidden[j, f : f + sizes[j]] for j, f in zip(part, firsts, strict=True)])
                logits = self.logits(states).float()
                for j, own in zip(part, logits.split([sizes[j] for j in part]), strict=True):
                    yield indices[j], own

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        ends: Sequence[int],
        hints: Sequence[int] | None = None,
        tick: Callable[[int], None] = lambda n: None,
    ) -> list[Decoded]:
        """Greedy continuations of at most limits[i] tokens, each up to and without an end token of `ends`.

        hints: expected lengths where known, so that rows that end together run together.
        """
        done = [Decoded([], False) for _ in prompts]
        order = sorted((i for i in range(len(prompts)) if limits[i] > 0), key=lambda i: -(hints or limits)[i])
        for at in range(0, len(order), self.rows):
            wave = order[at : at + self.rows]
            self.decode([prompts[i] for i in wave], [limits[i] for i in wave], set(ends), [done[i] for i in wave], tick)
        return done

    def forwards(
        self, inputs: list[list[int]], caps: list[int], keep: list[Cached] | None = None
    ) -> Iterator[tuple[list[int], torch.Tensor, int]]:
        """Run rows of tokens; yields (row indices, last hidden states [B, T, D] from token `start` on, start).

        keep: where given, the cache of each batch is appended to it, with the row indices.
        """
        for group in group_by_prefix(inputs, caps):
            shared = None
            if group.shared:
                shared = self.cache()
                self.step(
                    torch.tensor([inputs[group.rows[0]][: group.shared]], device=self.device), shared, group.shared
                )
            longest_first = sorted(group.rows, key=lambda i: -len(inputs[i]))
            while longest_first:
                width = len(inputs[longest_first[0]]) - group.shared
                count = max(1, min(self.rows, self.tokens // width))
                batch, longest_first = longest_first[:count], longest_first[count:]
                tails = [inputs[i][group.shared :] for i in batch]
                ids = torch.zeros(len(batch), width, dtype=torch.long)
                for j, tail in enumerate(tails):
                    ids[j, : len(tail)] = torch.tensor(tail)
                lengths = torch.tensor([len(t) for t in tails], device=self.device)
                cache = self.repeat(shared, len(batch))
                self.batch.set(lengths if int(lengths.min()) < width else None, width, cache)
                hidden = self.step(ids.to(self.device), cache, group.shared + width)
                self.batch.set(None, 0, None)
                if keep is not None:
                    keep.append(Cached(cache, batch, lengths + group.shared, group.shared + width))
                yield batch, hidden, group.shared

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    @torch.inference_mode()
    def step(self, ids: torch.Tensor, cache: DynamicCache, total: int, **more: Any) -> torch.Tensor:
        """Hidden states [B, T, D] after the final norm; `total`: columns of the cache after this step."""
        if "position_ids" not in more:
            more["position_ids"] = torch.arange(total - ids.shape[1], total, device=self.device).expand(len(ids), -1)
        with ragged_layers(self.model, self.batch):
            return self.model.base_model(input_ids=ids, past_key_values=cache, use_cache=True, **more).last_hidden_state

    def decode(
        self, prompts: list, limits: list[int], ends: set[int], out: list[Decoded], tick: Callable[[int], None]
    ) -> None:
        """One wave of rows, all at once; rows that have ended leave the batch when a quarter of it is idle."""
        kept: list[Cached] = []
        tokens = torch.zeros(len(prompts), dtype=torch.long, device=self.device)
        for indices, hidden, start in self.forwards([list(p) for p in prompts], [len(p) - 1 for p in prompts], kept):
            last = torch.tensor([len(prompts[i]) - 1 - start for i in indices], device=self.device)
            tokens[indices] = self.logits(hidden[torch.arange(len(indices), device=self.device), last]).argmax(-1)
        cache, order, lengths, real = self.merge(kept)
        tokens = tokens[order]
        live = [True] * len(order)
        while True:
            for j, token in enumerate(tokens.tolist()):
                if not live[j]:
                    continue
                row = out[order[j]]
                if token in ends:
                    row.finished, live[j] = True, False
                else:
                    row.tokens.append(token)
                    live[j] = len(row.tokens) < limits[order[j]]
                tick(not live[j])
            if not any(live):
                return
            if sum(live) <= 0.75 * len(live):
                stay = torch.tensor([j for j, alive in enumerate(live) if alive], device=self.device)
                select(cache, stay)
                order = [order[j] for j in stay.tolist()]
                tokens, lengths, real, live = tokens[stay], lengths[stay], real[stay], [True] * len(order)
            real = torch.cat((real, real.new_ones(len(real), 1)), 1)
            hidden = self.step(
                tokens[:, None], cache, real.shape[1], attention_mask=real, position_ids=lengths[:, None]
            )
            lengths = lengths + 1
            tokens = self.logits(hidden[:, -1]).argmax(-1)

    def cache(self) -> DynamicCache:
        cache = DynamicCache(config=self.model.config)
        cache.layers = [LinearAttentionLayer() if k == "linear_attention" else RoomyKeys() for k in self.kinds]
        return cache

    def repeat(self, cache: DynamicCache | None, batch: int) -> DynamicCache:
        """A cache of `batch` rows that all stand where `cache` (of one row) stands."""
        new = self.cache()
        for ours, theirs in zip(new.layers, cache.layers if cache else [], strict=False):
            fill(ours, [theirs], [batch])
        return new

    def merge(self, kept: list[Cached]) -> tuple[DynamicCache, list[int], torch.Tensor, torch.Tensor]:
        """Batches as one: (cache, row indices, lengths [B], mask int64 [B, columns] of real ones)."""
        width = max(k.columns for k in kept)
        cache = self.cache()
        for n, layer in enumerate(cache.layers):
            fill(layer, [k.cache.layers[n] for k in kept], [1] * len(kept), width)
        lengths = torch.cat([k.lengths for k in kept])
        real = (torch.arange(width, device=self.device) < lengths.unsqueeze(1)).long()
        return cache, [i for k in kept for i in k.rows], lengths, real


@dataclass
class Cached:
    """The cache of one batch: its rows, how many tokens each holds, and how many columns there are."""

    cache: DynamicCache
    rows: list[int]
    lengths: torch.Tensor
    columns: int


def fill(layer: Any, sources: list[Any], repeats: list[int], width: int | None = None) -> None:
    """Set a fresh cache layer from other layers, side by side in the batch, attention padded on the right to
    `width`."""
    if isinstance(layer, LinearAttentionLayer):
        both = [("conv_states", "is_conv_states_initialized"), ("recurrent_states", "is_recurrent_states_initialized")]
        for name, flag in both:
            states = [getattr(s, name)[0].repeat_interleave(r, 0) for s, r in zip(sources, repeats, strict=True)]
            getattr(layer, name)[0] = torch.cat(states)
            getattr(layer, flag)[0] = True
        first = sources[0]
        layer.conv_kernel_size[0], layer.has_previous_state[0] = first.conv_kernel_size[0], True
        layer.dtype, layer.device = first.dtype, first.device
        return
    first = sources[0]
    layer.lazy_initialization(first.keys, first.values)
    layer.buffers = None
    for name in ("keys", "values"):
        parts = [
            getattr(s, name).expand(r, -1, -1, -1) if r > 1 else getattr(s, name)
            for s, r in zip(sources, repeats, strict=True)
        ]
        if width is not None:
            parts = [torch.nn.functional.pad(p, (0, 0, 0, width - p.shape[-2])) for p in parts]
        setattr(layer, name, torch.cat(parts) if len(parts) > 1 else parts[0])


def select(cache: DynamicCache, rows: torch.Tensor) -> None:
    """Keep these rows of the batch."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.conv_states[0], layer.recurrent_states[0] = (
                layer.conv_states[0][rows],
                layer.recurrent_states[0][rows],
            )
        else:
            layer.keys, layer.values, layer.buffers = layer.keys[rows], layer.values[rows], None


def head_size(head: Any) -> int:
    """Width of the vocabulary."""
    return int(getattr(head, "out_features", 0) or head.weight.shape[0])


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
