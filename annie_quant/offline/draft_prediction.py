"""Predict what share of an MTP head's drafts a server accepts, and how many tokens a step gives.

A server steps through an answer: it drafts n tokens, accepts the first m that are right, and goes on m + 1 tokens later. The steps
are simulated, because a mean over tokens counts each token alike, and tokens that are hard to draft begin a step more often. The
first token of an answer is chosen without drafts, and a draft of its last one does not count: llama.cpp counts it, where it ends
an answer, as not accepted. A greedy server accepts a draft that is the token which the model chooses, so the
model's own answers are all that is needed. Intervals are over prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from annie_quant.checkpoint import ModelFolder
from annie_quant.documents.drafts import DraftPrediction, DraftSteps, PromptEstimate
from annie_quant.offline.draft_head import DraftHead, has_head
from annie_quant.offline.engine import Engine
from annie_quant.offline.hidden_states import AnswerStates, DraftedAnswer, answer_states

MAX_DRAFTS = 5
MAX_DRAFTED_ANSWERS = 64  # per kind of prompt
RESAMPLES = 1000


def predict_drafts(
    engine: Engine, folder: ModelFolder, answers: Sequence[DraftedAnswer], drafts: int = MAX_DRAFTS
) -> dict[str, DraftPrediction]:
    """Return the prediction by kind of prompt, "all" included. Empty without a head.

    answers: the model's own; at most MAX_DRAFTED_ANSWERS per kind are used, evenly spread.
    """
    if not has_head(folder):
        return {}
    chosen = spread_answers(answers)
    head = DraftHead(folder, engine.model)
    runs: list[list[int]] = [[] for _ in chosen]
    for states in answer_states(engine, chosen):
        for row, run in zip(states.rows, right_drafts(engine, head, states, drafts), strict=True):
            runs[row] = run
    return predictions([answer.kind for answer in chosen], runs, drafts)


@torch.inference_mode()
def right_drafts(
    engine: Engine, head: DraftHead, states: AnswerStates, drafts: int
) -> list[list[int]]:
    """Return for each token of each answer how many drafts after it are right before the first wrong one."""
    inputs = states.inputs(drafts)
    tops = [engine.logits(state).argmax(-1) for state in head(inputs, drafts)]
    columns = tops[0].shape[1]
    first = inputs.first
    right = torch.ones_like(tops[0], dtype=torch.bool)
    counts = torch.zeros_like(tops[0])
    for step, top in enumerate(tops, 1):
        right &= top == inputs.tokens[:, first + step : first + step + columns]
        counts += right
    listed = counts.tolist()
    runs = []
    begin = min(states.firsts)
    for row, at, length in zip(listed, states.firsts, states.lengths, strict=True):
        n_tokens = length - at - 1
        run = row[at - begin : at - begin + n_tokens]
        runs.append([min(count, n_tokens - 1 - i) for i, count in enumerate(run)])
    return runs


def spread_answers(answers: Iterable[DraftedAnswer]) -> list[DraftedAnswer]:
    """Return at most MAX_DRAFTED_ANSWERS answers of two tokens or more per kind, evenly spread over them."""
    groups: dict[str, list[DraftedAnswer]] = {}
    for answer in answers:
        if len(answer.answer) > 1:
            groups.setdefault(answer.kind, []).append(answer)
    chosen = []
    for group in groups.values():
        count = min(MAX_DRAFTED_ANSWERS, len(group))
        chosen += [group[i * len(group) // count] for i in range(count)]
    return chosen


# ---- a server's steps


class Step(NamedTuple):
    """One step. offered: drafts that count. tokens: of the answer that it gives."""

    offered: int
    accepted: int
    tokens: int


def simulate(run: Sequence[int], drafts: int) -> list[Step]:
    """Return the steps through an answer. run: per token of the answer, how many drafts after it are right."""
    steps = []
    at = 0
    while at < len(run) - 1:
        left = len(run) - 1 - at
        right = min(run[at], drafts, left)
        offered = min(drafts, left - 1)
        tokens = min(right + 1, left)
        steps.append(Step(offered, min(right, offered), tokens))
        at += tokens
    return steps


def predictions(
    kinds: Sequence[str], runs: Sequence[Sequence[int]], drafts: int
) -> dict[str, DraftPrediction]:
    """Return the prediction of each kind of prompt, and of "all" where there are several. kinds, runs: of each answer."""
    groups: dict[str, list[Sequence[int]]] = {}
    for kind, run in zip(kinds, runs, strict=True):
        groups.setdefault(kind, []).append(run)
    if len(groups) > 1:
        groups["all"] = list(runs)
    return {kind: prediction(group, drafts) for kind, group in groups.items()}


def prediction(runs: Sequence[Sequence[int]], drafts: int) -> DraftPrediction:
    """Return the prediction for answers. runs: as in simulate."""
    by_drafts = []
    for n in range(1, drafts + 1):
        answers = [simulate(run, n) for run in runs]
        by_drafts.append(steps_of(answers, n))
    return DraftPrediction(len(runs), by_drafts)


def steps_of(answers: Sequence[Sequence[Step]], drafts: int) -> DraftSteps:
    """Return the shares of accepted drafts. answers: the steps of each."""
    counts = np.array([_counts(steps, drafts) for steps in answers], dtype=np.float64)
    shares = _shares(counts.sum(0), drafts)
    generator = np.random.default_rng(0)
    share = np.full(len(counts), 1 / len(counts))
    weights = generator.multinomial(len(counts), share, size=RESAMPLES)
    resampled = _shares(weights @ counts, drafts)
    low, high = np.nanpercentile(resampled, (2.5, 97.5), axis=0)
    estimates = [
        PromptEstimate(*map(float, figures)) for figures in zip(shares, low, high, strict=True)
    ]
    return DraftSteps(drafts, int(counts[:, 0].sum()), estimates[1:], estimates[0])


def _counts(steps: Sequence[Step], drafts: int) -> list[int]:
    """Return steps, tokens, then per draft how often it could count, then per draft how often it was accepted."""
    offered = [0] * drafts
    accepted = [0] * drafts
    for step in steps:
        for k in range(step.offered):
            offered[k] += 1
        for k in range(step.accepted):
            accepted[k] += 1
    return [len(steps), sum(step.tokens for step in steps), *offered, *accepted]


def _shares(counts: np.ndarray, drafts: int) -> np.ndarray:
    """Return tokens per step and the share of accepted drafts of counts [..., 2 + 2 * drafts]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        tokens = counts[..., 1:2] / counts[..., :1]
        accepted = counts[..., 2 + drafts :] / counts[..., 2 : 2 + drafts]
    return np.nan_to_num(np.concatenate([tokens, accepted], -1))
