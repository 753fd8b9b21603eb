"""Acceptance of the drafts of an MTP head (multi-token prediction), by workload, without a server.

The head reads the model's hidden state at token t, after the final norm, and the embedding of token t+1, and drafts token t+2:
norm(layers(fc([norm(embedding), norm(hidden)]))), with the model's own embedding and output layer. A greedy server accepts a draft
that is the token which the model chooses itself. Order and normed state are those of vLLM's qwen3_next_mtp.py and llama.cpp's
#24025 (2026-06). Only the first draft of each step is measured. The head's weights are the checkpoint's, also where they are
quantized; its activations are not rounded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from annie_quant.checkpoint import ModelFolder, dialects
from annie_quant.checkpoint.linears import Linear
from annie_quant.core.errors import CheckpointError
from annie_quant.documents import DraftAcceptance
from annie_quant.judge.statistics import wilson
from annie_quant.offline.engine import Engine

MOST_ANSWERS = 32  # per workload: about 1,000 tokens, for one more forward over so many answers


class Drafted(NamedTuple):
    """A model's own answer to a prompt of a workload, in tokens."""

    workload: str
    prompt: Sequence[int]
    answer: Sequence[int]


class DraftHead(nn.Module):
    """The MTP head of a checkpoint on a loaded model, whose embedding, output layer and rotary embedding it uses."""

    def __init__(self, folder: ModelFolder, model: Any) -> None:
        super().__init__()
        text, config = model.model, copy.deepcopy(model.config.get_text_config())
        config._attn_implementation_internal = "sdpa"
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        index, norm = kinds.index("full_attention"), type(text.norm)
        count = int(folder.text_config.get("mtp_num_hidden_layers") or 1)
        with torch.device("meta"):
            self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
            self.layers = nn.ModuleList(type(text.layers[index])(config, index) for _ in range(count))
            self.norm = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.pre_fc_norm_embedding = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.pre_fc_norm_hidden = norm(config.hidden_size, eps=config.rms_norm_eps)
        weight = model.get_input_embeddings().weight
        self.load_state_dict(dict(weights(folder, self.state_dict(), weight)), assign=True)
        self.requires_grad_(False).eval()
        # in a list, so that they are not part of this module
        self.shared = [model.get_input_embeddings(), model.get_output_embeddings(), text.rotary_emb]

    @torch.inference_mode()
    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the draft logits [n, V]: row t drafts the token after the next one of hidden[t].

        hidden: [n, D], after the model's final norm.  tokens: int64 [n], the token that follows each of them.
        """
        embedding, head, rotary = self.shared
        states = (self.pre_fc_norm_embedding(embedding(tokens)), self.pre_fc_norm_hidden(hidden))
        x = self.fc(torch.cat(states, -1))[None]
        positions = rotary(x, torch.arange(len(tokens), device=tokens.device)[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=positions, attention_mask=None)
            x = x[0] if isinstance(x, tuple) else x
        return head(self.norm(x)[0])


def has_head(folder: ModelFolder) -> bool:
    """Return whether a checkpoint stores an MTP head."""
    return f"{folder.family.mtp}fc.weight" in folder or f"{folder.family.mtp}fc.weight_packed" in folder


def weights(
    folder: ModelFolder, state: dict[str, torch.Tensor], like: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of the head's state, dequantized, in `like`'s dtype and on its device.

    Raises CheckpointError for one that is missing or has another shape.
    """
    linears = dialects.linears(folder)
    for name, empty in state.items():
        value = weight(folder, linears, f"{folder.family.mtp}{name}")
        if value is None or value.shape != tuple(empty.shape):
            problem = "missing" if value is None else f"of shape {list(value.shape)}, expected {list(empty.shape)}"
            raise CheckpointError(
                f"{folder.path}: {folder.family.mtp}{name} is {problem}", "annie-quant audit DIR --repair --source BF16"
            )
        yield name, torch.from_numpy(value.astype(np.float32)).to(like.device, like.dtype)


def weight(folder: ModelFolder, linears: dict[str, Linear], name: str) -> np.ndarray | None:
    """Return one weight: dequantized, plain, or of all experts from a tensor per expert; None where it is missing."""
    linear = linears.get(name.removesuffix(".weight"))
    if linear is not None:
        return linear.dequantize(folder)
    if (stored := folder.find(name)) is not None:
        return folder.tensor(stored)
    experts = folder.family.experts
    merged = experts.merged_part(name) if experts else None
    if experts is None or merged is None:
        return None
    layer, part = merged
    matrices = []
    for i in range(int(folder.text_config.get(experts.count) or 0)):
        base = f"{layer}.{experts.module}.{i}"
        rows = [weight(folder, linears, f"{base}.{linear}.weight") for linear in experts.merged[part]]
        present = [r for r in rows if r is not None]
        if len(present) < len(rows):
            return None
        matrices.append(np.concatenate([r.astype(np.float32) for r in present]))
    return np.stack(matrices) if matrices else None


def acceptance(engine: Engine, folder: ModelFolder, answers: Sequence[Drafted]) -> dict[str, DraftAcceptance]:
    """Return by workload how many first drafts equal the token that the model chose. Empty without a head.

    answers: the model's own answers; at most MOST_ANSWERS per workload are used, evenly spread.
    """
    if not has_head(folder):
        return {}
    chosen = spread(answers)
    head = DraftHead(folder, engine.model)
    accepted = {a.workload: [0, 0] for a in chosen}
    inputs = [[*a.prompt, *a.answer] for a in chosen]
    for batch in engine.forwards(inputs, [0] * len(inputs), prompts=[len(a.prompt) for a in chosen]):
        for row, i in enumerate(batch.rows):
            tokens, first = torch.tensor(inputs[i], device=engine.device), len(chosen[i].prompt)
            # hidden[t] and token t+1 draft token t+2, which is one of the answer from t = first - 2 on
            drafts = head(batch.hidden[row, : len(tokens) - 2], tokens[1:-1]).argmax(-1)[max(0, first - 2) :]
            expected = tokens[max(2, first) :]
            counts = accepted[chosen[i].workload]
            counts[0] += int((drafts == expected).sum())
            counts[1] += len(expected)
    return {w: DraftAcceptance(n, hits, *wilson(hits, n)) for w, (hits, n) in accepted.items() if n}


def spread(answers: Sequence[Drafted]) -> list[Drafted]:
    """Return at most MOST_ANSWERS answers of two tokens or more per workload, evenly spread over them."""
    groups: dict[str, list[Drafted]] = {}
    for answer in answers:
        if len(answer.answer) > 1:
            groups.setdefault(answer.workload, []).append(answer)
    chosen = []
    for group in groups.values():
        count = min(MOST_ANSWERS, len(group))
        chosen += [group[i * len(group) // count] for i in range(count)]
    return chosen
