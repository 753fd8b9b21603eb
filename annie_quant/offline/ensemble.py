"""The same answers in several correct arithmetics: one arithmetic is a sample, and a server is another sample.

Under one numerics NAME the members are
  NAME         every prompt, in the profile's arithmetic
  NAME+bf16    a sample and the uncertain prompts, the same activation format with everything else rounded to bfloat16, as GPU
               servers do (NAME+float32 for a profile that rounds by itself)
  NAME+perm1   uncertain prompts, sums in another order (K permuted after activations were rounded)
  NAME+cut16   uncertain prompts, as a server computes a small batch: every product summed in three parts of K (split-K), decoded
               token by token from the prompt (the recurrent form of DeltaNet and attention over a cache instead of one forward
               over the answer), and with DeltaNet's beta rounded where the profile rounds the stream and not beta, as SGLang and
               older versions of vLLM do
Batches have as many rows in all members: on most devices a row's float32 product does not depend on the rows next to it.
An answer is uncertain where NAME or the second arithmetic differs from the reference, or where at some token the best logit is
above the second by less than MARGIN_FACTOR times the noise. The noise is the change of such margins between those two arithmetics
(its median, as the standard deviation of a normal distribution) in a seeded sample of NOISE_CONVERSATIONS conversations. All other
answers are certain: further members have the reference's (measured: docs/numerics.md), unless an earlier turn of the conversation
has changed, and with it the prompt.

Neither ties nor batch cuts decide: equal logits (frequent in bfloat16) give the token of the lowest index on every device, and an
answer that hangs on a tie or on a batch's cut has a small margin, so all members compute it, and the verdict is taken over members.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch

from annie_quant.documents import EnsembleFigures
from annie_quant.offline.answers import (
    AnswerCache,
    AnswerOutcome,
    FirstDifference,
    TokenChoices,
    answer_from_differences,
    choices_of,
    request_key,
)
from annie_quant.offline.decoding import Completion
from annie_quant.offline.emulation import PERMUTED, USUAL, SumOrder, emulate
from annie_quant.offline.engine import Engine, Row, batches
from annie_quant.offline.pair import ModelPair
from annie_quant.offline.profiles import (
    Profile,
    find_profile,
    in_bfloat16,
    in_float32,
    with_rounded_beta,
)
from annie_quant.offline.prompts import Answered

MARGIN_FACTOR = 3.0
NORMAL_MEDIAN = 0.6745  # median of |x| for a standard normal x
NOISE_CONVERSATIONS = 100  # about 2,000 tokens: the noise is known to a few percent
# Two halves of K = 256 give the same bits on CPUs whose product keeps partial sums (MKL).
SPLIT_SUMS = SumOrder(parts=3)
PERMUTED_SUFFIX = "perm1"
FROM_THE_PROMPT = FirstDifference(0, None)
# By the answer's index; an answer that is not in it is the reference's.
Differences = Mapping[int, FirstDifference | None]


Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class MemberOutcomes(Generic[Outcome]):
    """A member's answers to all prompts.

    arithmetic: a description.
    outcomes: in the order of the prompts, in memory each an AnswerOutcome.
    n_computed: answers that were computed in this arithmetic; later turns of a changed conversation are not counted.
    n_changed: answers among them that differ from those of the numerics.
    """

    name: str
    arithmetic: str
    outcomes: list[Outcome]
    n_computed: int
    n_changed: int


def further_members(
    pair: ModelPair,
    name: str,
    answered: Sequence[Answered],
    base: Mapping[int, TokenChoices],
    outcomes: Sequence[AnswerOutcome],
) -> tuple[list[MemberOutcomes[AnswerOutcome]], EnsembleFigures]:
    """Return the further members of a numerics. base, outcomes: choices and answers of the member NAME, for all prompts."""
    profile = find_profile(name)
    members: list[MemberOutcomes[AnswerOutcome]] = []

    def add(suffix: str, arithmetic: str, computed: Differences) -> None:
        member = f"{name}+{suffix}"
        own = member_answers(pair, pair.engine, answered, computed, member)
        pairs = zip(own, outcomes, strict=True)
        n_changed = sum(a.completion != b.completion for a, b in pairs)
        members.append(MemberOutcomes(member, arithmetic, own, len(computed), n_changed))

    second, order = second_arithmetic(pair, profile)
    text = f"{name}: second arithmetic"
    with emulate(pair.model, second, order):
        other, noise, uncertain = perturbed(pair, pair.engine, answered, base, text)
        suffix = "float32" if profile.rounds else "bf16"
        suffix = PERMUTED_SUFFIX if order == PERMUTED else suffix
        add(suffix, arithmetic_text(second, order), differences_of(other))
    if order == USUAL:
        text = f"{name}: sums in another order"
        with emulate(pair.model, profile, PERMUTED):
            choices = score_choices(pair, pair.engine.scores, answered, uncertain, text)
            add(PERMUTED_SUFFIX, arithmetic_text(profile, PERMUTED), differences_of(choices))
    other_beta = with_rounded_beta(profile)
    with emulate(pair.model, other_beta, SPLIT_SUMS):
        arithmetic = f"{arithmetic_text(other_beta, SPLIT_SUMS)}, decoded token by token"
        add("cut16", arithmetic, dict.fromkeys(uncertain, FROM_THE_PROMPT))
    return members, EnsembleFigures(noise, len(uncertain), len(answered))


def perturbed(
    pair: ModelPair,
    engine: Engine,
    answered: Sequence[Answered],
    base: Mapping[int, TokenChoices],
    text: str,
) -> tuple[dict[int, TokenChoices], float, list[int]]:
    """Return the model's choices for a sample and all uncertain answers, the noise, and the indices of the uncertain answers."""
    other = score_choices(pair, engine.scores, answered, sampled(answered), text, base)
    noise = margin_noise(base, other)
    rest = [i for i in uncertain_answers(base, other, noise) if i not in other]
    other |= score_choices(pair, engine.scores, answered, rest, text, base)
    return other, noise, uncertain_answers(base, other, noise)


def sampled(answered: Sequence[Answered]) -> list[int]:
    """Return the indices of a seeded sample of conversations, with all of their turns."""
    conversations = list(dict.fromkeys(a.request.conversation for a in answered))
    n = min(NOISE_CONVERSATIONS, len(conversations))
    chosen = set(random.Random(0).sample(conversations, n))
    return [i for i, a in enumerate(answered) if a.request.conversation in chosen]


def second_arithmetic(pair: ModelPair, profile: Profile) -> tuple[Profile, SumOrder]:
    """Return the arithmetic and the order of sums of the second member.

    A model that was loaded in bfloat16 cannot be rounded otherwise, so its sums are computed in another order.
    """
    if pair.dtype != "float32":
        return profile, PERMUTED
    return (in_float32(profile) if profile.rounds else in_bfloat16(profile)), USUAL


def arithmetic_text(profile: Profile, order: SumOrder) -> str:
    """Return the arithmetic in a few words."""
    text = profile.describe()
    if order.permutation is not None:
        text += ", sums in another order"
    if order.parts > 1:
        text += f", sums in {order.parts} parts"
    return text


def score_choices(
    pair: ModelPair,
    scores: Callable[[Sequence[Row]], Iterable[tuple[int, torch.Tensor]]],
    answered: Sequence[Answered],
    indices: Sequence[int],
    text: str,
    base: Mapping[int, TokenChoices] | None = None,
) -> dict[int, TokenChoices]:
    """Score the reference's answers to the prompts of these indices, and return the model's choices by index.

    scores: as Engine.scores. base: choices whose two best tokens the margins are of; None: the model's own two best.
    """
    scored = pair.scored([answered[i] for i in indices])
    rows = [Row(s.prompt, s.target) for s in scored]
    choices: dict[int, TokenChoices] = {}
    pair.progress.update(0, len(rows), text)
    for numbers, logits in batches(scores(rows), pair.engine.compared_tokens):
        part = [indices[j] for j in numbers]
        pairs = None if base is None else [base[i].best for i in part]
        targets = [rows[j].target for j in numbers]
        chosen = choices_of(logits, targets, pair.template.end_tokens, pairs)
        choices.update(zip(part, chosen, strict=True))
        pair.progress.update(len(choices), len(rows), text)
    return choices


def differences_of(choices: Mapping[int, TokenChoices]) -> dict[int, FirstDifference | None]:
    return {i: c.difference for i, c in choices.items()}


def member_answers(
    pair: ModelPair,
    engine: Engine,
    answered: Sequence[Answered],
    differences: Differences,
    name: str,
) -> list[AnswerOutcome]:
    """Return the model's own answers to all prompts, decoded from where they differ from the reference's."""
    n_different = sum(d is not None for d in differences.values())
    text = f"{name}: answering from the first difference ({n_different})"
    n_finished = 0

    def on_finished(n: int) -> None:
        nonlocal n_finished
        n_finished += n
        pair.progress.update(n_finished, None, text)

    on_finished(0)
    return answer_from_differences(engine, pair.template, answered, differences, on_finished)


def margin_noise(base: Mapping[int, TokenChoices], other: Mapping[int, TokenChoices]) -> float:
    """Return the standard deviation of the change of the margin between base's two best tokens, from its median over tokens."""
    changes = [base[i].margins - other[i].margins for i in other]
    return float(np.median(np.abs(np.concatenate(changes)))) / NORMAL_MEDIAN if changes else 0.0


def uncertain_answers(
    base: Mapping[int, TokenChoices], other: Mapping[int, TokenChoices], noise: float
) -> list[int]:
    """Return the indices of answers that a perturbation could change."""
    return [
        i
        for i, own in sorted(base.items())
        if own.difference is not None
        or (i in other and other[i].difference is not None)
        or (len(own.margins) and float(own.margins.min()) < MARGIN_FACTOR * noise)
    ]


def second_answers(pair: ModelPair, answered: Sequence[Answered]) -> list[Answered]:
    """Return the reference's answers in the second arithmetic, from the cache where it has all of them.

    They show what a harmless change of arithmetic does to bf16's own answers, which is the floor of every comparison with them: a
    checkpoint loses such a gate only if it changes more answers than that (judge/decision/rule.py). A sample of the prompts and
    all whose answer is uncertain are computed, rounded to bfloat16 as GPU servers round (a model in bfloat16: with its sums in
    another order).
    """
    reference = pair.reference
    cache = AnswerCache(reference.cache_path("second"))
    keys = [request_key(request, pair.template.end_tokens) for request, _ in answered]
    if not all(key in cache.answers for key in keys):
        cache.add(dict(zip(keys, _compute(pair, answered), strict=True)))
    cache.close()
    return [Answered(a.request, cache.answers[key]) for a, key in zip(answered, keys, strict=True)]


def _compute(pair: ModelPair, answered: Sequence[Answered]) -> list[Completion]:
    profile, order = second_arithmetic(pair, find_profile("bf16"))
    name = "bf16, second arithmetic"
    base = score_choices(
        pair, pair.reference.scores, answered, range(len(answered)), "bf16: margins"
    )
    engine = pair.reference.engine()
    with emulate(engine.model, profile, order):
        choices, _, _ = perturbed(pair, engine, answered, base, name)
        outcomes = member_answers(pair, engine, answered, differences_of(choices), name)
    return [outcome.completion for outcome in outcomes]
