"""The head of a checkpoint for multi-token prediction (MTP), run as the servers run it.

One decoder layer drafts several tokens. Step 1 at position t reads the model's hidden state after its final norm and the embedding
of token t+1, and drafts token t+2: norm(layer(fc([norm(embedding), norm(hidden)]))), with the model's own output layer. Each
further step reads the head's own normed output and the embedding of the draft before, one position later.

Servers compute the keys of verified tokens in step 1, from the model's hidden states, and replace those of earlier drafts. So a
query of step k at position t sees the keys of step 1 up to t, and its own keys of steps 2 to k. A draft counts only where all
drafts before it were right, so the true tokens are its inputs. Order, normed state and keys are those of vLLM's qwen3_5_mtp.py and
llm_base_proposer.py, and of llama.cpp's qwen35.cpp.

The head's weights are the checkpoint's, dequantized; its activations are not rounded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from annie_quant.checkpoint import ModelFolder, dialects
from annie_quant.checkpoint.linears import Linear
from annie_quant.core.errors import CheckpointError


@dataclass(frozen=True)
class DraftInputs:
    """Rows of hidden states, each with the tokens that follow it. Padding is on the right, where no query of a row sees it.

    hidden: [B, T, D], the model's after its final norm.
    tokens: int64 [B, at least T + steps - 1]; tokens[:, t] follows hidden[:, t].
    first: column of the first drafts.
    prefix_hidden, prefix_tokens: [S, D] and [S], pairs that precede all rows; None: no pairs.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    first: int = 0
    prefix_hidden: torch.Tensor | None = None
    prefix_tokens: torch.Tensor | None = None


class StepKeys:
    """Keys and values of one layer in all steps so far, in the place of transformers' cache."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *args: object, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values [B, Hkv, L, D] with these after the earlier ones."""
        if self.keys is not None and self.values is not None:
            rows = (len(keys), -1, -1, -1)
            keys = torch.cat([self.keys.expand(rows), keys], 2)
            values = torch.cat([self.values.expand(rows), values], 2)
        self.keys = keys
        self.values = values
        return keys, values


def step_mask(prefix: int, columns: int, first: int, step: int) -> torch.Tensor:
    """Return which keys the queries of a step see, bool [1, 1, queries, keys].

    The keys are those of the prefix, of the columns in step 1, and of the columns from `first` on in each further step.
    """
    begin = 0 if step == 1 else first
    n_queries = columns - begin
    seen_prefix = torch.ones(n_queries, prefix, dtype=torch.bool)
    seen_first = torch.ones(n_queries, columns, dtype=torch.bool).tril(begin)
    own = torch.eye(n_queries, dtype=torch.bool)
    return torch.cat([seen_prefix, seen_first, *[own] * (step - 1)], 1)[None, None]


class DraftHead(nn.Module):
    """The MTP head of a checkpoint on a loaded model, whose embedding, output layer and rotary embedding it uses.

    dtype: of the weights; None: the embedding's.
    """

    def __init__(self, folder: ModelFolder, model: Any, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        text = model.model
        config = copy.deepcopy(model.config.get_text_config())
        config._attn_implementation_internal = "sdpa"
        kinds = (
            getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        )
        index = kinds.index("full_attention")
        norm = type(text.norm)
        count = int(folder.text_config.get("mtp_num_hidden_layers") or 1)
        with torch.device("meta"):
            self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            self.layers = nn.ModuleList(
                type(text.layers[index])(config, index) for _ in range(count)
            )
            self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.pre_fc_norm_embedding = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.pre_fc_norm_hidden = norm(config.hidden_size, eps=config.rms_norm_eps)
        weight = model.get_input_embeddings().weight
        weights = head_weights(folder, self.state_dict(), weight.device, dtype or weight.dtype)
        self.load_state_dict(dict(weights), assign=True)
        self.requires_grad_(False).eval()
        # in a list, so that they are not part of this module
        self.shared = [model.get_input_embeddings(), model.get_output_embeddings(), text.rotary_emb]

    def forward(self, inputs: DraftInputs, steps: int) -> list[torch.Tensor]:
        """Return the normed states of each step [B, T - first, D]; the output layer makes the drafts of them.

        Those of step k at column t draft the token that follows tokens[:, t + k - 1].
        """
        keys = [StepKeys() for _ in self.layers]
        prefix = 0
        if inputs.prefix_hidden is not None and inputs.prefix_tokens is not None:
            prefix = len(inputs.prefix_tokens)
            self._step(inputs.prefix_hidden[None], inputs.prefix_tokens[None], 0, keys, None)
        columns = inputs.hidden.shape[1]
        first = inputs.first
        device = inputs.hidden.device
        mask = step_mask(prefix, columns, first, 1).to(device)
        state = self._step(inputs.hidden, inputs.tokens[:, :columns], prefix, keys, mask)
        states = [state[:, first:]]
        for step in range(2, steps + 1):
            begin = first + step - 1
            tokens = inputs.tokens[:, begin : begin + columns - first]
            mask = step_mask(prefix, columns, first, step).to(device)
            states.append(self._step(states[-1], tokens, prefix + begin, keys, mask))
        return states

    def _step(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        position: int,
        keys: list[StepKeys],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the normed states of one step. position: of the first column."""
        embedding, _, rotary = self.shared
        embedded = embedding(tokens).to(hidden.dtype)
        both = (self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden))
        x = self.fc(torch.cat(both, -1))
        positions = torch.arange(position, position + x.shape[1], device=x.device)[None]
        cosines = rotary(x, positions)
        for layer, cache in zip(self.layers, keys, strict=True):
            x = layer(x, position_embeddings=cosines, attention_mask=mask, past_key_values=cache)
            x = x[0] if isinstance(x, tuple) else x
        return self.norm(x)


def has_head(folder: ModelFolder) -> bool:
    """Return whether a checkpoint stores an MTP head."""
    return (
        f"{folder.family.mtp}fc.weight" in folder
        or f"{folder.family.mtp}fc.weight_packed" in folder
    )


def head_weights(
    folder: ModelFolder,
    state: dict[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of the head's state, dequantized, in a dtype and on a device.

    Raises CheckpointError for one that is missing or has another shape.
    """
    linears = dialects.linears(folder)
    for name, empty in state.items():
        value = head_weight(folder, linears, f"{folder.family.mtp}{name}")
        if value is None or value.shape != tuple(empty.shape):
            problem = (
                "missing"
                if value is None
                else f"of shape {list(value.shape)}, expected {list(empty.shape)}"
            )
            raise CheckpointError(
                f"{folder.path}: {folder.family.mtp}{name} is {problem}",
                "annie-quant audit DIR --repair --source BF16",
            )
        yield name, torch.from_numpy(value.astype(np.float32)).to(device, dtype)


def head_weight(folder: ModelFolder, linears: dict[str, Linear], name: str) -> np.ndarray | None:
    """Return one weight: dequantized, plain, or of all experts from a tensor per expert; None where it is missing."""
    linear = linears.get(name.removesuffix(".weight"))
    if linear is not None:
        return linear.dequantize(folder)
    stored = folder.find(name)
    if stored is not None:
        return folder.tensor(stored)
    experts = folder.family.experts
    merged = experts.merged_part(name) if experts else None
    if experts is None or merged is None:
        return None
    layer, part = merged
    matrices = []
    for i in range(int(folder.text_config.get(experts.count) or 0)):
        base = f"{layer}.{experts.module}.{i}"
        rows = [
            head_weight(folder, linears, f"{base}.{linear}.weight")
            for linear in experts.merged[part]
        ]
        present = [r for r in rows if r is not None]
        if len(present) < len(rows):
            return None
        matrices.append(np.concatenate([r.astype(np.float32) for r in present]))
    return np.stack(matrices) if matrices else None
