"""The source model's own answers to the prompts of the calibration data.

A label that the model would not write calibrates it on another style than its own (tests/perf/calibration_lottery.md). So the
source model answers the prompts itself, greedily, with its own template and tools. An answer that it would write anyway stays:
where it chooses nearly all of the tokens.

One pass over the given answers decides which of them stay, and is the beginning of the others: a greedy answer equals the given one
up to the first token that the model would not choose, and is decoded from there.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.prompt_files import model_files
from annie_quant.core.files import sha256_text
from annie_quant.core.progress import Progress
from annie_quant.offline.answers import (
    AnswerCache,
    TokenChoices,
    choices_of,
    default_cache,
)
from annie_quant.offline.decoding import Completion, generate
from annie_quant.offline.emulation import emulate
from annie_quant.offline.engine import Engine, Row, batches
from annie_quant.offline.loading import load
from annie_quant.offline.profiles import find_profile
from annie_quant.offline.prompts import ScoredAnswer, Template
from annie_quant.quantize.backend import device_and_dtype

# An answer stays where the model chooses so many of its tokens.
MIN_SHARE_OF_OWN_TOKENS = 0.97
# Where an own answer is longer the given one stays, unless a given one is longer still: a model that repeats itself never ends.
_MAX_ANSWER_TOKENS = 512


@dataclass(frozen=True)
class OwnAnswers:
    """Answers that the model gives itself.

    answers: in the order of the given ones.
    n_kept: given answers that stay because the model would write them.
    n_endless: given answers that stay because the model's own has more than `limit` tokens.
    n_unanswered: prompts without a given answer that stay so, for the same reason.
    """

    answers: list[ScoredAnswer]
    n_kept: int = 0
    n_endless: int = 0
    n_unanswered: int = 0
    limit: int = 0

    @property
    def n_own(self) -> int:
        """Number of answers that the model gave itself."""
        return len(self.answers) - self.n_kept - self.n_endless - self.n_unanswered


def own_answers(
    model: Path,
    template: Template,
    given: Sequence[ScoredAnswer],
    progress: Progress,
    cache: Path | None = None,
    numerics: str | None = None,
    keeps_cut: bool = False,
) -> OwnAnswers:
    """Return the model's own greedy answers to the prompts of `given`, of which some may have no answer yet.

    They are stored by model, prompt and given answer, so that a killed run goes on and a further strategy finds them.

    cache: folder of the stored answers; None: annie_quant in XDG_CACHE_HOME.
    numerics: profile whose arithmetic answers (profiles.py); None: the one that the checkpoint defines.
    keeps_cut: an answer that does not end within the limit counts as far as it goes; else the given one stays.
    """
    _, dtype = device_and_dtype(ModelFolder(model))
    limit = max([_MAX_ANSWER_TOKENS, *(len(answer.target) for answer in given)])
    key = model_files(model).sha256[:16]
    arithmetic = f"-{numerics}" if numerics else ""
    name = f"own-answers-{key}-{str(dtype).removeprefix('torch.')}{arithmetic}.jsonl"
    store = AnswerCache((cache or default_cache()) / name)
    try:
        keys = [_answer_key(answer, limit, template.end_tokens) for answer in given]
        missing = {
            key: answer for key, answer in zip(keys, given, strict=True) if key not in store.answers
        }
        if missing:
            _answer(model, template, missing, limit, store, progress, numerics)
        completions = [store.answers[key] for key in keys]
    finally:
        store.close()
    answers: list[ScoredAnswer] = []
    n_kept = 0
    n_endless = 0
    n_unanswered = 0
    for answer, completion in zip(given, completions, strict=True):
        target = answer.target
        if not completion.finished:
            n_endless += bool(target)
            n_unanswered += not target
            target = tuple(completion.tokens) if keeps_cut else target
        elif target and completion.tokens == list(target[:-1]):
            n_kept += 1
        else:
            target = tuple(template.target(completion))
        answers.append(replace(answer, target=target))
    return OwnAnswers(answers, n_kept, n_endless, n_unanswered, limit)


def _answer_key(answer: ScoredAnswer, limit: int, end_tokens: Sequence[int]) -> str:
    """Return a hash of what determines an own answer."""
    text = json.dumps([answer.prompt, answer.target, limit, sorted(end_tokens)])
    return sha256_text(text)[:32]


def _answer(
    model: Path,
    template: Template,
    missing: dict[str, ScoredAnswer],
    limit: int,
    store: AnswerCache,
    progress: Progress,
    numerics: str | None,
) -> None:
    """Add the own answers to the store."""
    device, dtype = device_and_dtype(ModelFolder(model))
    engine = Engine(load(model, dtype=dtype, device=str(device)))
    answer = partial(_complete, engine, template, limit)
    served = emulate(engine.model, find_profile(numerics)) if numerics else nullcontext()
    with served:
        store.complete(missing, answer, progress, "the model's own answers")
    del answer, engine, served
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _complete(
    engine: Engine,
    template: Template,
    limit: int,
    given: Sequence[ScoredAnswer],
    on_finished: Callable[[int], None],
) -> list[Completion]:
    """Return the greedy answers, or the given ones that stay. on_finished(n): called when n more have ended."""
    completions: dict[int, Completion] = {}
    unfinished: dict[int, list[int]] = {}  # index → its first tokens
    answered = [index for index, answer in enumerate(given) if answer.target]
    for at, choices in _choices(engine, template, [given[index] for index in answered]):
        index = answered[at]
        target = list(given[index].target)
        difference = choices.difference
        own_tokens = sum(
            chosen == expected for chosen, expected in zip(choices.best[:, 0], target, strict=True)
        )
        if difference is None or own_tokens >= MIN_SHARE_OF_OWN_TOKENS * len(target):
            completions[index] = Completion(target[:-1], True)
        elif difference.token in template.end_tokens:
            completions[index] = Completion(target[: difference.index], True)
        else:
            assert difference.token is not None  # the model's own choice
            unfinished[index] = [*target[: difference.index], difference.token]
    on_finished(len(completions))
    unfinished |= {index: [] for index, answer in enumerate(given) if not answer.target}
    known = list(unfinished.values())
    rests = generate(
        engine,
        [[*given[i].prompt, *tokens] for i, tokens in unfinished.items()],
        [limit - len(tokens) for tokens in known],
        template.end_tokens,
        on_finished,
        [len(tokens) for tokens in known],
    )
    for index, rest in zip(unfinished, rests, strict=True):
        completions[index] = Completion(unfinished[index] + rest.tokens, rest.finished)
    return [completions[i] for i in range(len(given))]


def _choices(
    engine: Engine, template: Template, given: Sequence[ScoredAnswer]
) -> Iterator[tuple[int, TokenChoices]]:
    """Yield for each given answer its index and what the model would choose at each of its tokens."""
    rows = [Row(answer.prompt, answer.target) for answer in given]
    for indices, logits in batches(engine.scores(rows), engine.compared_tokens):
        targets = [rows[i].target for i in indices]
        yield from zip(indices, choices_of(logits, targets, template.end_tokens), strict=True)
