"""Name what is wrong with a draft head whose drafts are not accepted as predicted.

A server that loads a head wrongly computes another head. Each known fault is computed here on the same answers: the halves of fc
exchanged, the hidden state before the final norm, random weights, parts that are dropped. The fault that explains the
accepted drafts of the most steps is the cause; where only counts are known, the one that makes them likeliest.

The same faults may be in a checkpoint itself. A fault that is its own inverse, computed on a faulty head, gives a sound one.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from annie_quant.checkpoint import ModelFolder
from annie_quant.documents.drafts import DraftSteps
from annie_quant.offline.draft_head import DraftHead
from annie_quant.offline.draft_prediction import right_drafts, simulate, steps_of
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine
from annie_quant.offline.hidden_states import AnswerStates, DraftedAnswer, answer_states
from annie_quant.offline.loading import load, profiles_of
from annie_quant.offline.profiles import find_profile

AS_STORED = "the checkpoint's head"
EXCHANGED = "the halves of mtp.fc are exchanged: it reads [hidden state, embedding]"
BEFORE_NORM = "the head reads the hidden state before the final norm"
RANDOM = "the head's weights are random, or another model's: they were not loaded"
DROPPED = "{} is dropped"
# A gap is a fault where the mean over positions is larger than the first, or one of them larger than the second.
MEAN_GAP = 0.05
LARGEST_GAP = 0.1
UNLIKELY = 0.005  # share that no fault makes certain or impossible
LOW_SHARE = 0.4  # of accepted first drafts, below which a checkpoint's own head is examined
SOUND_SHARE = 0.6


@dataclass(frozen=True)
class AcceptedDrafts:
    """What a server accepted in its answers.

    offered, accepted: per position from 1 on, the steps in which such a draft could count and did.
    steps: per answer, (tokens of the answer before the step, drafts that could count, accepted ones) of each step; [] where only
        counts are known.
    """

    offered: Sequence[int]
    accepted: Sequence[int]
    steps: Sequence[Sequence[tuple[int, int, int]]] = ()

    @property
    def shares(self) -> list[float]:
        """Share of accepted drafts per position."""
        pairs = zip(self.offered, self.accepted, strict=True)
        return [accepted / max(1, offered) for offered, accepted in pairs]


@dataclass(frozen=True)
class _Diagnosis:
    """The prediction for a server's own answers, and the fault that explains what it accepted; "" where nothing is wrong.

    in_checkpoint: the fault is one of the checkpoint, which the server serves as it is.
    """

    predicted: DraftSteps
    cause: str
    in_checkpoint: bool = False


def zero(module: nn.Module) -> None:
    """Set all weights to zero: a norm that computes 1 + w then scales nothing, a linear gives nothing."""
    for parameter in module.parameters():
        parameter.zero_()


def drop_part(part: str, head: DraftHead) -> None:
    zero(head.get_submodule(part))


def exchange_halves(head: DraftHead) -> None:
    first, second = head.fc.weight.chunk(2, 1)
    head.fc.weight.copy_(torch.cat([second, first], 1))


def randomize(head: DraftHead) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            noise = (
                torch.randn(parameter.shape, generator=generator) * parameter.float().std().cpu()
            )
            parameter.copy_(noise)


def _changes(head: DraftHead) -> dict[str, Callable[[DraftHead], None]]:
    """Return fault → the change of a head that makes it, without those of the hidden state."""
    faults: dict[str, Callable[[DraftHead], None]] = {
        EXCHANGED: exchange_halves,
        RANDOM: randomize,
    }
    parts = ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
    layer = head.layers[0]
    parts += [f"layers.0.{name}" for name, _ in layer.named_children()]
    for part in parts:
        faults[DROPPED.format(f"mtp.{part}")] = partial(drop_part, part)
    return faults


def diagnose_folder(
    folder: ModelFolder,
    answers: Sequence[DraftedAnswer],
    served: AcceptedDrafts,
    numerics: str | None = None,
) -> _Diagnosis:
    """Return the diagnosis for a checkpoint's folder. numerics: profile of the server, where it is a known one."""
    engine = Engine(load(folder.path, dtype=torch.float32))
    is_known = numerics in profiles_of(engine.model)
    arithmetic = emulate(engine.model, find_profile(str(numerics))) if is_known else nullcontext()
    with arithmetic:
        return _diagnose(engine, folder, answers, served)


@torch.no_grad()
def _diagnose(
    engine: Engine, folder: ModelFolder, answers: Sequence[DraftedAnswer], served: AcceptedDrafts
) -> _Diagnosis:
    """Compare what a server accepted of its drafts in its own answers with the checkpoint's head, and name the cause of a gap."""
    drafts = len(served.offered)
    head = DraftHead(folder, engine.model)
    states = list(answer_states(engine, answers))
    own = _runs(engine, head, states, drafts)
    predicted = _steps(own, drafts)
    if not is_gap(predicted, served):
        if predicted.accepted[0].value >= LOW_SHARE:
            return _Diagnosis(predicted, "")
        return _Diagnosis(predicted, fault_of_checkpoint(engine, folder, answers), True)
    candidates = {AS_STORED: own, **_faulty_runs(engine, head, states, answers, drafts)}
    scores = {cause: score(runs, served, drafts) for cause, runs in candidates.items()}
    return _Diagnosis(predicted, max(scores, key=lambda cause: scores[cause]))


@torch.no_grad()
def fault_of_checkpoint(
    engine: Engine, folder: ModelFolder, answers: Sequence[DraftedAnswer]
) -> str:
    """Return what is wrong with a checkpoint's own head, "" where its first drafts are accepted."""
    head = DraftHead(folder, engine.model)
    states = list(answer_states(engine, answers))
    own = _steps(_runs(engine, head, states, 1), 1)
    if own.accepted[0].value >= LOW_SHARE:
        return ""
    for cause, runs in _faulty_runs(engine, head, states, answers, 1).items():
        share = _steps(runs, 1).accepted[0].value
        if cause in (EXCHANGED, BEFORE_NORM) and share >= SOUND_SHARE:
            return cause
    return RANDOM


Runs = dict[int, list[int]]  # answer → per token, how many drafts after it are right


def _faulty_runs(
    engine: Engine,
    head: DraftHead,
    states: Sequence[AnswerStates],
    answers: Sequence[DraftedAnswer],
    drafts: int,
) -> dict[str, Runs]:
    """Return fault → which drafts are right in a server with that fault."""
    runs = {}
    for cause, change in _changes(head).items():
        faulty = copy.copy(head)
        faulty._modules = copy.deepcopy(head._modules)
        change(faulty)
        runs[cause] = _runs(engine, faulty, states, drafts)
    with without_final_norm(engine.model):
        before_norm = list(answer_states(engine, answers))
    runs[BEFORE_NORM] = _runs(engine, head, before_norm, drafts)
    return runs


def _runs(engine: Engine, head: DraftHead, states: Sequence[AnswerStates], drafts: int) -> Runs:
    runs: Runs = {}
    for batch in states:
        runs |= zip(batch.rows, right_drafts(engine, head, batch, drafts), strict=True)
    return runs


def _steps(runs: Runs, drafts: int) -> DraftSteps:
    return steps_of([simulate(run, drafts) for run in runs.values()], drafts)


@contextlib.contextmanager
def without_final_norm(model: Any) -> Iterator[None]:
    """Let a model return hidden states before its final norm."""
    norm = model.base_model.norm
    norm.forward = lambda x: x
    try:
        yield
    finally:
        del norm.forward


def is_gap(predicted: DraftSteps, served: AcceptedDrafts) -> bool:
    """Return whether a server accepts another share than predicted."""
    pairs = zip(predicted.accepted, served.shares, strict=True)
    gaps = [abs(share.value - accepted) for share, accepted in pairs]
    return max(gaps) > LARGEST_GAP or sum(gaps) / len(gaps) > MEAN_GAP


def score(runs: Runs, served: AcceptedDrafts, drafts: int) -> float:
    """Return how well a head explains what a server accepted: step by step where the steps are known, else by the counts."""
    if not served.steps:
        return log_likelihood(_steps(runs, drafts), served)
    equal = 0
    for answer, steps in enumerate(served.steps):
        run = runs[answer]
        for tokens_before, offered, accepted in steps:
            equal += min(run[tokens_before - 1], offered) == accepted
    return float(equal)


def log_likelihood(predicted: DraftSteps, served: AcceptedDrafts) -> float:
    """Return the logarithm of the served counts' probability, up to a constant, with the predicted shares."""
    shares = np.clip([share.value for share in predicted.accepted], UNLIKELY, 1 - UNLIKELY)
    accepted = np.array(served.accepted)
    refused = np.array(served.offered) - accepted
    return float((accepted * np.log(shares) + refused * np.log1p(-shares)).sum())
