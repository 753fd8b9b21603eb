"""What a harmless change of arithmetic does to bf16's own answers: the floor of every comparison with them.

The reference answers again, rounded to bfloat16 as GPU servers round (a model in bfloat16: with its sums in another order): a
sample of the prompts and all whose answer is uncertain (ensemble.py). Such an answer is as good as the first. A checkpoint loses a
gate that compares with bf16's own answers only if it changes more of them than that (judge/decision/paired.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from annie_quant.evaluate import ensemble
from annie_quant.evaluate.decoding import Completion
from annie_quant.evaluate.pair import ModelPair
from annie_quant.evaluate.prompts import Answered
from annie_quant.evaluate.reference import AnswerCache, request_key
from annie_quant.hf.emulation import emulate
from annie_quant.hf.profiles import find_profile

NAME = "bf16, second arithmetic"


def second_answers(pair: ModelPair, answered: Sequence[Answered]) -> list[Answered]:
    """Return the reference's answers in the second arithmetic, from the cache where it has all of them."""
    reference = pair.reference
    cache = AnswerCache(reference.cache_path("second"), pair.group)
    keys = [request_key(request, pair.template.end_tokens) for request, _ in answered]
    if not all(key in cache.answers for key in keys):
        cache.add(dict(zip(keys, _compute(pair, answered), strict=True)))
    cache.close()
    return [Answered(a.request, cache.answers[key]) for a, key in zip(answered, keys, strict=True)]


def _compute(pair: ModelPair, answered: Sequence[Answered]) -> list[Completion]:
    profile, order = ensemble.second_arithmetic(pair, find_profile("bf16"))
    base = ensemble.choose(pair, pair.reference.scores, answered, range(len(answered)), "bf16: margins")
    engine = pair.reference.engine()
    with emulate(engine.model, profile, order):
        choices, _, _ = ensemble.perturbed(pair, engine, answered, base, NAME)
        outcomes = ensemble.answers_of(pair, engine, answered, ensemble.differences_of(choices), NAME)
    return [outcome.completion for outcome in outcomes]
