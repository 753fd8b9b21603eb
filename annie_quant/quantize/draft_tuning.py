"""Tune an MTP head on the model's own answers, with the server's keys (offline/draft_head.py) and nothing else trained.

The loss of step k is the cross-entropy with the model's own distribution, weighted by STEP_DECAY^(k-1) (FastMTP, arXiv 2509.18362).
A head that was trained for one step alone drafts the first token and little after it.

After each epoch the tokens per step are measured on held-out prompts, and on general prompts that are not the user's. The head with
the most tokens per step stays, of those that lose no more than GENERAL_LOSS of the general prompts' accepted drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch.nn import functional

from annie_quant.core.progress import Progress
from annie_quant.documents.drafts import DraftSteps
from annie_quant.offline.draft_head import DraftHead
from annie_quant.offline.draft_prediction import right_drafts, simulate, steps_of
from annie_quant.offline.engine import Engine
from annie_quant.offline.hidden_states import AnswerStates

STEPS = 3
STEP_DECAY = 0.6
EPOCHS = 8
# Epochs without a better head after which the tuning ends.
PATIENCE = 3
# Of a model with 4,096 columns; narrower ones take proportionally larger steps.
LEARNING_RATE = 1e-4
REFERENCE_COLUMNS = 4096
WARM_UP = 0.05
BETAS = (0.9, 0.95)
GENERAL_LOSS = 0.01
ROUNDING = 1e-9  # of a difference of shares
CHUNK_LOGITS = 1 << 24  # in memory at one time


@dataclass(frozen=True)
class TuningData:
    """Hidden states of answers: to learn from, held out, and to general prompts."""

    train: Sequence[AnswerStates]
    held_out: Sequence[AnswerStates]
    general: Sequence[AnswerStates]


@dataclass
class TuningResult:
    """What tuning did.

    epochs: number of finished ones.
    best_epoch: whose head stays; 0: that from before the tuning.
    held_out, general: steps before and after; general ones are None without general prompts.
    """

    epochs: int
    best_epoch: int
    held_out: tuple[DraftSteps, DraftSteps]
    general: tuple[DraftSteps, DraftSteps] | None


@dataclass
class _Stage:
    """State of a tuning: what a killed run goes on from."""

    epoch: int = 0
    best_epoch: int = 0
    held_out: list[DraftSteps] = field(default_factory=list)
    general: list[DraftSteps] = field(default_factory=list)


def tune(
    engine: Engine,
    head: DraftHead,
    data: TuningData,
    progress: Progress,
    work: Path,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
    seed: int = 0,
) -> TuningResult:
    """Tune a head with float32 weights in place. work: folder in which a killed run's state is found."""
    output = dense_weight(engine)
    parameters = [p.requires_grad_(True) for p in head.parameters()]
    rate = learning_rate * REFERENCE_COLUMNS / engine.config.hidden_size
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=BETAS, weight_decay=0.0)
    stage = _Stage()
    best = {name: value.clone() for name, value in head.state_dict().items()}
    saved = work / "tuning.pt"
    if saved.is_file():
        stored = torch.load(saved, map_location=engine.device, weights_only=True)
        stage = msgspec.json.decode(stored["stage"], type=_Stage)
        best = stored["best"]
        head.load_state_dict(stored["head"])
        optimizer.load_state_dict(stored["optimizer"])
    if not stage.held_out:
        _measure(engine, head, data, stage)
    total = epochs * len(data.train)
    while stage.epoch < epochs and stage.epoch - stage.best_epoch < PATIENCE:
        order = np.random.default_rng([seed, stage.epoch]).permutation(len(data.train))
        for number, index in enumerate(order):
            at = stage.epoch * len(data.train) + number
            optimizer.param_groups[0]["lr"] = rate * schedule(at, total)
            accumulate_gradients(engine, head, output, data.train[index])
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            tokens = stage.held_out[-1].tokens_per_step.value
            progress.update(at + 1, total, f"epoch {stage.epoch + 1}, {tokens:.2f} tokens per step")
        stage.epoch += 1
        _measure(engine, head, data, stage)
        if _is_better(stage):
            stage.best_epoch = stage.epoch
            best = {name: value.clone() for name, value in head.state_dict().items()}
        _save(saved, stage, best, head, optimizer)
    head.load_state_dict(best)
    head.requires_grad_(False)
    chosen = stage.best_epoch
    general = (stage.general[0], stage.general[chosen]) if stage.general else None
    held_out = (stage.held_out[0], stage.held_out[chosen])
    return TuningResult(stage.epoch, chosen, held_out, general)


def _save(
    path: Path,
    stage: _Stage,
    best: dict[str, torch.Tensor],
    head: DraftHead,
    optimizer: torch.optim.Optimizer,
) -> None:
    part = path.with_suffix(".part")
    state = {
        "stage": msgspec.json.encode(stage).decode(),
        "best": best,
        "head": head.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    torch.save(state, part)
    part.replace(path)


def schedule(at: int, total: int) -> float:
    """Return the factor of the learning rate: warm-up, then a cosine to a tenth."""
    warm_up = max(1, int(WARM_UP * total))
    if at < warm_up:
        return (at + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (at - warm_up) / max(1, total - warm_up))


def _is_better(stage: _Stage) -> bool:
    """Return whether the newest head drafts more on held-out prompts and keeps the general ones."""
    newest = stage.held_out[-1].tokens_per_step.value
    if newest <= stage.held_out[stage.best_epoch].tokens_per_step.value:
        return False
    return not stage.general or keeps(stage.general[0], stage.general[-1])


def keeps(before: DraftSteps, after: DraftSteps) -> bool:
    """Return whether the mean share of accepted drafts fell by at most GENERAL_LOSS."""
    lost = [b.value - a.value for b, a in zip(before.accepted, after.accepted, strict=True)]
    return sum(lost) / len(lost) <= GENERAL_LOSS + ROUNDING


def _measure(engine: Engine, head: DraftHead, data: TuningData, stage: _Stage) -> None:
    stage.held_out.append(measured_steps(engine, head, data.held_out))
    if data.general:
        stage.general.append(measured_steps(engine, head, data.general))


def measured_steps(
    engine: Engine, head: DraftHead, answers: Sequence[AnswerStates], drafts: int = STEPS
) -> DraftSteps:
    """Return the steps of a server through these answers."""
    runs = [run for states in answers for run in right_drafts(engine, head, states, drafts)]
    return steps_of([simulate(run, drafts) for run in runs], drafts)


def dense_weight(engine: Engine) -> torch.Tensor:
    """Return the output layer's weight [V, D] in the engine's dtype, dequantized."""
    weights: Callable[[torch.dtype], torch.Tensor] | None = getattr(engine.head, "weights", None)
    if weights is not None:
        return weights(engine.model.dtype)
    weight: torch.Tensor = engine.head.weight
    return weight.detach()


def accumulate_gradients(
    engine: Engine, head: DraftHead, output: torch.Tensor, states: AnswerStates
) -> float:
    """Add the gradients of one batch's loss to the head's parameters, and return the loss.

    The logits of a large vocabulary are computed in parts: first the gradients of the head's states, then those of its weights.
    """
    is_gpu = engine.device.type == "cuda"
    inputs = states.inputs(STEPS)
    columns = inputs.hidden.shape[1] - inputs.first
    with torch.autocast(engine.device.type, torch.bfloat16, enabled=is_gpu):
        outputs = head(inputs, STEPS)
    learned = learned_columns(states, columns).to(engine.device)
    weights = [STEP_DECAY**step for step in range(STEPS)]
    total = sum(w * float(learned[step].sum()) for step, w in enumerate(weights)) or 1.0
    gradients = []
    loss = 0.0
    for step, state in enumerate(outputs):
        leaf = state.detach().requires_grad_(True)
        chosen_at = _later_columns(states, step + 1, columns)[learned[step]]
        drafted = leaf[learned[step]]
        pieces = _pieces(len(drafted), output.shape[0])
        gradient = torch.zeros_like(drafted)
        for low, high in pieces:
            piece = drafted[low:high].detach().requires_grad_(True)
            with torch.no_grad():
                target = functional.linear(chosen_at[low:high].to(output.dtype), output)
                target = target.float().softmax(-1)
            logits = functional.linear(piece.to(output.dtype), output).float()
            entropy = -(target * logits.log_softmax(-1)).sum() * weights[step] / total
            entropy.backward()
            assert piece.grad is not None
            gradient[low:high] = piece.grad
            loss += float(entropy.detach())
        whole = torch.zeros_like(leaf)
        whole[learned[step]] = gradient
        gradients.append(whole)
    torch.autograd.backward(outputs, gradients)
    return loss


def learned_columns(states: AnswerStates, columns: int) -> torch.Tensor:
    """Return at which columns each step drafts a token of the answer, bool [STEPS, B, columns]."""
    begin = min(states.firsts)
    column = torch.arange(columns)
    learned = torch.zeros(STEPS, len(states.rows), columns, dtype=torch.bool)
    for row, (at, length) in enumerate(zip(states.firsts, states.lengths, strict=True)):
        n_tokens = length - at - 1
        number = column - (at - begin)  # of the answer's token after which is drafted
        for step in range(STEPS):
            learned[step, row] = (number >= 0) & (number + step + 1 < n_tokens)
    return learned


def _later_columns(states: AnswerStates, step: int, columns: int) -> torch.Tensor:
    """Return the hidden states [B, columns, D] at which the model chooses what a step drafts."""
    begin = min(states.firsts) + step
    later = states.hidden[:, begin : begin + columns]
    missing = columns - later.shape[1]
    return functional.pad(later, (0, 0, 0, missing)) if missing else later


def _pieces(rows: int, vocabulary: int) -> Iterator[tuple[int, int]]:
    """Yield spans of rows whose logits fit in memory."""
    size = max(1, CHUNK_LOGITS // vocabulary)
    for low in range(0, rows, size):
        yield low, min(rows, low + size)
