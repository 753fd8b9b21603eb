"""Calibrate on long rows in batches: a decoder layer stores keys, values and states that later batches continue (shared_text.py).

    layer = ContinuedLayer(model, index)
    for i, state in enumerate(model.states):
        model.forward(module, state, layer.piece(i))

A DeltaNet layer keeps its convolution's and its recurrent states, an attention layer its keys and values. The tokens of a batch
attend to each earlier row in one product without a mask, for all rows that continue it, and to their own row with a causal one.
The two results are combined by the sums of their exponentials, so no keys are copied, and no mask has a column per earlier token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from annie_quant.offline import caches

if TYPE_CHECKING:
    from annie_quant.quantize.layerwise import DecoderLayers

MASK_ALIGNMENT = 16
CONTINUED_ATTENTION = "annie_quant_continued"  # name of `attend` in transformers' registry


@dataclass(frozen=True)
class RowKeys:
    """Keys and values of a batch's rows in one attention layer.

    keys, values: [B, Hkv, T, D].
    begins: position of each row's first token, int64 [B].
    lengths: number of real tokens of each row, int64 [B].
    """

    keys: torch.Tensor
    values: torch.Tensor
    begins: np.ndarray
    lengths: np.ndarray


KeyObserver = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass
class Piece:
    """One batch in one layer.

    begins: position of each row's first token, int64 [B].
    lengths: number of real tokens of each row, int64 [B].
    earlier: what the rows continue, and the row of it that each one continues, int64 [B].
    window: number of tokens that a token of a sliding layer sees, itself included.
    cache: of a DeltaNet layer.
    observe_keys: gets the keys and values of the real tokens, [n, Hkv, D].
    is_continued: whether later batches continue this one.
    row_keys: of an attention layer after the forward pass, if the batch is continued.
    """

    begins: np.ndarray
    lengths: np.ndarray
    earlier: list[tuple[RowKeys, np.ndarray]] = field(default_factory=list)
    window: int | None = None
    cache: DynamicCache | None = None
    is_continued: bool = False
    observe_keys: KeyObserver | None = None
    row_keys: RowKeys | None = None


class ContinuedLayer:
    """One layer over all batches. Batches are in depth-first order: all that continue a batch come directly after it."""

    def __init__(self, model: DecoderLayers, index: int) -> None:
        self.model = model
        self.index = index
        self.is_delta = model.types[index] == "linear_attention"
        self.continued = {batch.start for batch in model.batches}
        self.pieces: dict[int, Piece] = {}  # of batches that are continued

    def piece(self, i: int) -> Piece:
        """Return batch `i` for DecoderLayers.forward. Must be called for all batches in order."""
        batch = self.model.batches[i]
        start = batch.start
        self.pieces = {j: p for j, p in self.pieces.items() if start is not None and j <= start}
        begins = batch.offsets if batch.offsets is not None else np.zeros(len(batch.ids), np.int64)
        piece = Piece(begins, batch.lengths, is_continued=i in self.continued)
        piece.observe_keys = self.model.key_observer
        if self.is_delta:
            self.continue_states(piece, i)
        else:
            piece.window = self.model.window(self.index)
            piece.earlier = self.rows_before(i)
        if piece.is_continued:
            self.pieces[i] = piece
        return piece

    def rows_before(self, i: int) -> list[tuple[RowKeys, np.ndarray]]:
        """Return what the rows of batch `i` continue, the last part first."""
        batch = self.model.batches[i]
        rows = np.arange(len(batch.ids))
        earlier = []
        while batch.start is not None:
            assert batch.rows is not None
            rows = batch.rows[rows]
            row_keys = self.pieces[batch.start].row_keys
            assert row_keys is not None  # its forward pass has ended
            earlier.append((row_keys, rows))
            batch = self.model.batches[batch.start]
        return earlier

    def continue_states(self, piece: Piece, i: int) -> None:
        """Set the states with which a DeltaNet layer begins, and let it keep each row's states after its own last token."""
        batch = self.model.batches[i]
        ragged = self.model.ragged
        ragged.set(None, 0, None)
        if batch.start is None and not piece.is_continued:
            return
        piece.cache = caches.new_cache(self.model.model.config, self.model.types)
        if batch.start is not None:
            assert batch.rows is not None
            earlier = self.pieces[batch.start].cache
            assert earlier is not None
            rows = torch.from_numpy(batch.rows).to(self.model.device)
            caches.take_rows(self.layer_of(earlier), self.layer_of(piece.cache), rows)
        if piece.is_continued and len(set(batch.lengths)) > 1:
            lengths = torch.from_numpy(batch.lengths).to(self.model.device)
            ragged.set(lengths, batch.ids.shape[1], piece.cache)

    def layer_of(self, cache: DynamicCache) -> caches.Layered:
        """Return a view of a cache with this layer alone, for functions of caches.py; the other layers have no entries."""
        return SimpleNamespace(layers=[cache.layers[self.index]])


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return (outputs [B, T, H, D], None), as transformers' attention functions do, for the piece that `module` computes.

    query: [B, H, T, D]. key, value: [B, Hkv, T, D]; keys are those after the rotary embedding.
    """
    piece: Piece | None = module.config.annie_quant_piece  # type: ignore[union-attr, assignment]
    if piece is not None and piece.observe_keys is not None:
        steps = torch.arange(key.shape[2])
        real = (steps < torch.from_numpy(piece.lengths)[:, None]).to(key.device)
        piece.observe_keys(key.transpose(1, 2)[real], value.transpose(1, 2)[real])
    if piece is not None and piece.is_continued:
        piece.row_keys = RowKeys(key, value, piece.begins, piece.lengths)
    if piece is None or not piece.earlier:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    scale = scaling or query.shape[-1] ** -0.5
    output, log_sum = attention(query, key, value, scale, attention_mask, causal=True)
    for earlier, rows in piece.earlier:
        for row in np.unique(rows):
            mine = torch.from_numpy(np.flatnonzero(rows == row)).to(query.device)
            part = attention_to_row(query[mine], earlier, int(row), piece, mine, scale)
            if part is None:
                continue
            share = (part[1] - log_sum[mine]).sigmoid_().unsqueeze(-1).to(output.dtype)
            output[mine] = torch.lerp(output[mine], part[0], share)
            log_sum[mine] = torch.logaddexp(log_sum[mine], part[1])
    return output.transpose(1, 2), None


def attention_to_row(
    query: torch.Tensor,
    earlier: RowKeys,
    row: int,
    piece: Piece,
    mine: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return outputs [n, H, T, D] and logs of the sums of exponentials [n, H, T] of attention to one earlier row.

    None where all of the row is outside the window.

    query: [n, H, T, D], of the rows `mine` of the piece.
    """
    count, heads, steps, head_dim = query.shape
    key_heads = earlier.keys.shape[1]
    first = 0
    length = int(earlier.lengths[row])
    begins = piece.begins[mine.cpu().numpy()]
    if piece.window is not None:
        first = max(0, int(begins.min()) - piece.window + 1 - int(earlier.begins[row]))
        if first >= length:
            return None
    keys = earlier.keys[row : row + 1, :, first:length]
    values = earlier.values[row : row + 1, :, first:length]
    # The query heads of one key head, and all rows, are the rows of one product.
    grouped = query.view(count, key_heads, -1, steps, head_dim).permute(1, 2, 0, 3, 4)
    mask = None
    if piece.window is not None:
        positions = np.add.outer(begins, np.arange(steps)).reshape(-1, 1)
        columns = np.arange(first, length) + earlier.begins[row]
        visible = torch.from_numpy(positions - columns < piece.window).to(query.device)
        mask = additive(visible.repeat(heads // key_heads, 1)[None], query.dtype)
    output, log_sum = attention(
        grouped.reshape(1, key_heads, -1, head_dim), keys, values, scale, mask
    )
    shape = (key_heads, heads // key_heads, count, steps)
    output = output.view(*shape, head_dim).permute(2, 0, 1, 3, 4).flatten(1, 2)
    return output, log_sum.reshape(shape).permute(2, 0, 1, 3).flatten(1, 2)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [B, H, T, D] and the logs of the sums of exponentials, float32 [B, H, T].

    mask: added to the scores; with it, `causal` has no effect.
    """
    causal = causal and mask is None
    if query.device.type == "cpu":
        output, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=mask, scale=scale
        )
        return output, log_sum
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    if mask is not None:
        mask = mask.expand(*query.shape[:3], -1)
    output, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, 0.0, causal, scale=scale
    )
    return output, log_sum[:, :, : query.shape[2]]


def additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what attention adds to its scores, [B, 1, T, L], for the visible columns, bool [B, T, L]."""
    columns = visible.shape[-1]
    # The kernels of a GPU read rows that begin at multiples of 16 elements.
    stride = -(-columns // MASK_ALIGNMENT) * MASK_ALIGNMENT
    mask = torch.zeros((*visible.shape[:-1], stride), dtype=dtype, device=visible.device)
    return mask[..., :columns].masked_fill_(~visible, torch.finfo(dtype).min)[:, None]


ALL_ATTENTION_FUNCTIONS.register(CONTINUED_ATTENTION, attend)
