"""What an evaluation takes, before it starts: seconds from the speed of a few forward passes, and memory from the files.

The shares are those that tests/perf/eval_steps.py prints. They depend on how many answers a checkpoint changes, so the estimate
is right within a factor of two.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

import torch

from annie_quant.checkpoint import ModelFolder
from annie_quant.judge import Workload
from annie_quant.offline.decoding import generate
from annie_quant.offline.engine import MAX_LOGITS, Engine, group_by_prefix
from annie_quant.offline.loading import memory_bytes
from annie_quant.offline.pair import ModelPair

BASE_BYTES = 0.5e9  # Python, torch and transformers
LOGIT_COPIES = 3  # of both models, and one without the most likely token
TIMED_PROMPTS = 8
TIMED_STEPS = 4
ANSWER_SHARE = 0.3  # of an answer's token limit
REFERENCE_PASSES = 2.6  # over all prompts: answers, margins, and the second arithmetic
REFERENCE_ANSWERS = 1.3  # of all answers, decoded
PASSES_PER_NUMERICS = 1.2  # per numerics: checked, and decoded from the first difference
ANSWERS_PER_NUMERICS = 0.2
MEMBER_PASSES = 2.0  # of all further members of one numerics
MEMBER_ANSWERS = 0.7


def estimate_line(pair: ModelPair, workloads: Sequence[Workload], n_numerics: int) -> str:
    """Return the estimate as one line: prompts, seconds, the time at which they have passed, and memory."""
    seconds = estimated_seconds(pair, workloads, n_numerics).total
    end = datetime.now().astimezone() + timedelta(seconds=seconds)
    size = memory_estimate(pair)
    cases = [case for workload in workloads for case in workload.cases]
    n_prompts = sum(case.n_turns for case in cases)
    duration = f"{seconds / 60:.0f} minutes" if seconds > 100 else f"{seconds:.0f} seconds"
    return (
        f"{n_prompts} prompts, {n_numerics} numerics: about {duration}, until {end:%H:%M}; "
        f"{size / 1e9:.1f} GB of memory"
    )


def memory_estimate(pair: ModelPair) -> float:
    """Return the bytes of both models, of a batch's keys and values, and of the logits that are compared."""
    cache = "float32" if pair.dtype == "float32" else "bf16"
    folders = {pair.job.checkpoint, pair.job.reference}
    models = sum(memory_bytes(ModelFolder(f), cache, f"torch.{pair.dtype}") for f in folders)
    engine = pair.engine
    batch = engine.cache_columns * engine.token_bytes()
    logits = LOGIT_COPIES * torch.float32.itemsize * MAX_LOGITS
    return BASE_BYTES + models + batch + logits


class EstimatedSeconds(NamedTuple):
    """Seconds without cached answers: of the reference's answers, and of what the checkpoint's numerics add."""

    reference: float
    checkpoint: float

    @property
    def total(self) -> float:
        return self.reference + self.checkpoint


def estimated_seconds(
    pair: ModelPair, workloads: Sequence[Workload], n_numerics: int
) -> EstimatedSeconds:
    """Return the seconds of an evaluation without cached answers."""
    requests = []
    for workload in workloads:
        requests += [pair.template.request(workload, case) for case in workload.cases]
    prompts = [list(request.prompt) for request in requests]
    token_seconds, step_seconds = speeds(pair.engine, prompts, pair.template.end_tokens)
    n_turns = sum(request.case.n_turns for request in requests)
    n_tokens = computed_tokens(prompts, pair.engine.group_cost) * n_turns / len(requests)
    limits = [request.max_tokens * request.case.n_turns for request in requests]
    n_steps = ANSWER_SHARE * sum(limits) / min(pair.engine.rows, n_turns)
    passes = PASSES_PER_NUMERICS
    answers = ANSWERS_PER_NUMERICS
    if pair.job.has_ensemble:
        passes += MEMBER_PASSES
        answers += MEMBER_ANSWERS
    pass_s = n_tokens * token_seconds
    answers_s = n_steps * step_seconds
    return EstimatedSeconds(
        reference=REFERENCE_PASSES * pass_s + REFERENCE_ANSWERS * answers_s,
        checkpoint=n_numerics * (passes * pass_s + answers * answers_s),
    )


def computed_tokens(prompts: Sequence[Sequence[int]], group_cost: int) -> int:
    """Return how many tokens one pass over the prompts computes: a shared prefix once."""
    groups = group_by_prefix(prompts, [len(prompt) - 1 for prompt in prompts], group_cost)
    total = 0
    for group in groups:
        total += group.shared + sum(len(prompts[i]) - group.shared for i in group.rows)
    return total


def speeds(
    engine: Engine, prompts: Sequence[Sequence[int]], end_tokens: Sequence[int]
) -> tuple[float, float]:
    """Return the seconds per token of prompts, and per decode step of a full batch."""
    chosen = prompts[:: max(1, len(prompts) // TIMED_PROMPTS)][:TIMED_PROMPTS]
    n_tokens = computed_tokens(chosen, engine.group_cost)
    seconds = []
    for limit in (1, 1, 1 + TIMED_STEPS):  # the first one prepares the libraries
        start = time.monotonic()
        generate(engine, chosen, [limit] * len(chosen), end_tokens)
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        seconds.append(time.monotonic() - start)
    _, prompt_seconds, all_seconds = seconds
    step_seconds = max(0.0, all_seconds - prompt_seconds) / TIMED_STEPS
    if engine.device.type == "cpu":  # where the seconds of a step grow with its rows
        step_seconds *= engine.rows / len(chosen)
    return prompt_seconds / n_tokens, step_seconds
