"""Which arm to measure next, and who is to blame: values in, values out.

An arm is the set of factors that have the suspect's values; all others have the trusted ones. The base arm has none of them and
is measured twice, which is the noise; the full arm has all. If the full arm is worse than the base, the causes are searched: an
explanation is up to two causes, each of them one factor or a pair of factors that breaks answers only together. An arm should be
worse if it contains a cause. The next arm is the one whose outcome the explanations that are left disagree about most: first
halves of the factors, then pairs. A cause is named only if it breaks answers alone, without the other factors. A factor that needs
another one (NEEDS) is measured only together with it.

A factor that has no effect in an arm (a prefix cache without hits), or with which no server starts, is left out and reported.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from annie_quant.judge.statistics import LEVEL

if TYPE_CHECKING:
    import numpy as np

MAX_ARMS = 12  # with answers; one that no server starts with costs no requests
# Of a fault that an arm contains: the test misses it. Of an arm without one: the test finds one all the same.
MISS, FALSE_ALARM = 0.03, 0.005
# Posterior probability from which an explanation, or a cause, counts as the right one.
CERTAIN = 0.85
# Open explanations are shown from this share of the likeliest one's probability on.
SHOWN = 0.3
# Prior weights: how much less likely a pair is than one factor, a second cause than none, and that the full arm's loss was chance.
PAIR, KNOWN_PAIR, SECOND, CHANCE = 0.2, 0.5, 0.2, 0.05
USED_UP, FEW = "all arms were used", "a loss that these few prompts cannot prove: use a larger --n"
# Known from reports: vllm-project/vllm#53912 and #43559 (MTP with the prefix cache), FP8 keys and values with cached prefixes.
KNOWN_PAIRS = ({"mtp", "prefix"}, {"kv", "prefix"}, {"mtp", "batch"}, {"mtp", "sampling"})
# A factor has an effect only in arms with the other one too: bf16 weights have no 4-bit activations.
NEEDS = {"activations": "weights"}

Factors = tuple[str, ...]


class Effect(msgspec.Struct, frozen=True):
    """Answers of an arm next to the base's answers to the same prompts.

    lost, won: prompts that only the base answers rightly, and only the arm; p: of a loss, one-sided.
    """

    n: int
    lost: int
    won: int
    p: float

    @property
    def broken(self) -> bool:
        """Whether the arm is worse than the base, at a level that all arms of a search share."""
        return self.p <= LEVEL / MAX_ARMS


class ArmResult(msgspec.Struct, frozen=True):
    """One arm that was tried.

    factors: those with the suspect's values.
    again: the base's second measurement.
    effect: None for the base, and for an arm without answers.
    failure: why it has no answers: the server did not start, died or hung.
    ineffective: factors whose values did not take effect, with the evidence, unless an earlier arm had found so; the arm's answers
        do not count.
    """

    factors: Factors
    again: bool = False
    effect: Effect | None = None
    failure: str = ""
    ineffective: dict[str, str] = {}

    @property
    def valid(self) -> bool:
        return not self.failure and not self.ineffective


class NextArm(msgspec.Struct, frozen=True):
    """The arm to measure, and what for."""

    factors: Factors
    why: str
    again: bool = False


class Conclusion(msgspec.Struct, frozen=True):
    """The end of a search.

    causes: each breaks answers alone: one factor, or a pair.
    open: explanations that could not be told apart, the likeliest first, each of them a list of causes.
    untested: factors that were left out, with the reason.
    unfinished: why the search ended before it named all causes; "" where it did.
    """

    causes: tuple[Factors, ...] = ()
    open: tuple[tuple[Factors, ...], ...] = ()
    untested: dict[str, str] = {}
    unfinished: str = ""


def plan(factors: Sequence[str], results: Sequence[ArmResult], max_arms: int = MAX_ARMS) -> NextArm | Conclusion:
    """Return the next arm, or the conclusion. factors: in the order of their names in arms; results: of all arms tried so far."""
    untested = untested_factors(factors, results)
    active = tuple(name for name in factors if name not in untested)
    full, bases = frozenset(active), [r for r in results if not r.factors]
    if len(bases) < 2:
        return NextArm((), "again, for the noise" if bases else "all trusted", again=bool(bases))
    measured = {frozenset(r.factors): r.effect for r in results if r.valid and r.effect and r.factors}
    refused = [frozenset(r.factors) for r in results if r.failure and full.issuperset(r.factors)]
    if not full or (full in measured and not measured[full].broken):
        return Conclusion(untested=untested, unfinished=FEW if full and measured[full].p < LEVEL else "")
    if full in refused:
        # Which of the smallest set with which no server starts is it? Its halves tell, one after the other.
        names = [name for name in active if name in min(refused, key=len)]
        for names_of_half in (names[: len(names) // 2], names[len(names) // 2 :]):
            half = with_needed(names_of_half, active)
            if frozenset(half) not in refused and not any(arm.issuperset(half) for arm in measured):
                return NextArm(half, "no server starts with more of them")
        return Conclusion(untested=untested, unfinished=f"no server starts with {' and '.join(names)} together")
    left = max_arms - sum(not r.failure for r in results)
    if full not in measured:
        return NextArm(active, "all suspected") if left > 0 else Conclusion(untested=untested, unfinished=USED_UP)
    return _CauseSearch(active, measured, refused).step(left, untested)


def untested_factors(factors: Sequence[str], results: Sequence[ArmResult]) -> dict[str, str]:
    """Return the factors that cannot be tested, with the reason: without effect, or refused alone."""
    reasons = {name: why for r in results for name, why in r.ineffective.items()}
    reasons |= {r.factors[0]: r.failure for r in results if r.failure and len(r.factors) == 1}
    reasons = {name: reasons[other] for name, other in NEEDS.items() if other in reasons} | reasons
    return {name: reasons[name] for name in factors if name in reasons}


def with_needed(cause: Iterable[str], factors: Iterable[str]) -> Factors:
    """Return the arm that has a cause and otherwise only what its factors need, in the order of `factors`."""
    names = {*cause}
    names |= {NEEDS[name] for name in names if name in NEEDS}
    return tuple(name for name in factors if name in names)


def pairs_of(factors: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs that can be one cause: not a factor with the one that it needs, because it is named alone."""
    for a, b in itertools.combinations(factors, 2):
        if NEEDS.get(a) != b and NEEDS.get(b) != a:
            yield a, b


class _CauseSearch:
    """The explanations of a broken full arm, weighed by what was measured. Arms and causes are bit masks of factors."""

    def __init__(
        self, active: Factors, measured: Mapping[frozenset[str], Effect], refused: Iterable[frozenset[str]]
    ) -> None:
        import numpy as np

        self.active = active
        self.explanations, weights, self.worse = _explanations(active)
        self.broken = {self.mask(f): effect.broken for f, effect in measured.items() if f.issubset(active)}
        never = [self.mask(f) for f in refused]
        arms = range(2 ** len(active))
        self.possible = np.array(
            [a and a == self.alone(a) and a not in self.broken and not any(a & r == r for r in never) for a in arms],
            bool,
        )
        chances = np.where(self.worse, 1 - MISS, FALSE_ALARM)
        posterior = weights.copy()
        for arm, broken in self.broken.items():
            posterior *= chances[:, arm] if broken else 1 - chances[:, arm]
        self.posterior: np.ndarray = posterior / posterior.sum()

    def mask(self, factors: Iterable[str]) -> int:
        return sum(1 << self.active.index(name) for name in factors)

    def names(self, mask: int) -> Factors:
        return tuple(name for i, name in enumerate(self.active) if mask >> i & 1)

    def alone(self, cause: int) -> int:
        """Return the arm that has a cause and otherwise only what its factors need."""
        return self.mask(with_needed(self.names(cause), self.active))

    def without(self, causes: Iterable[int]) -> int:
        """Return the largest arm that has no factor of the causes."""
        rest = self.names((2 ** len(self.active) - 1) & ~sum(causes))
        useless = {name for name, other in NEEDS.items() if other in self.active and other not in rest}
        return self.mask(name for name in rest if name not in useless)

    def step(self, left: int, untested: dict[str, str]) -> NextArm | Conclusion:
        """Return the arm that says most, or that proves the likeliest explanation; or the conclusion."""
        import numpy as np

        best = int(self.posterior.argmax())
        causes, certain = self.explanations[best], self.posterior[best] >= CERTAIN
        alone = [self.alone(cause) for cause in causes]
        proofs = [arm for arm in (*alone, self.without(causes)) if self.possible[arm]] if causes else []
        if left > 0 and proofs and (certain or left <= len(proofs)):
            why = "whether they break answers alone" if proofs[0] in alone else "whether anything else does"
            return NextArm(self.names(proofs[0]), why)
        worse = self.posterior @ self.worse  # how likely each arm is to be worse
        says = np.where(self.possible, np.minimum(worse, 1 - worse), 0.0)
        if left > 0 and not certain and says.max() > FALSE_ALARM:
            # Of arms that say about the same, the one with fewer factors.
            near = np.flatnonzero(says >= 0.95 * says.max()).tolist()
            return NextArm(self.names(min(near, key=int.bit_count)), "it splits the explanations that are left")
        named = tuple(self.names(c) for c in self.likely_causes() if self.broken.get(self.alone(c)))
        if certain and len(named) == len(causes) and not proofs:
            return Conclusion(named, untested=untested)
        order = self.posterior.argsort()[::-1][:5].tolist()
        likely = [self.explanations[i] for i in order if self.posterior[i] > SHOWN * self.posterior[best]]
        unfinished = "the arms do not tell the explanations apart" if left > 0 else USED_UP
        return Conclusion(named, tuple(tuple(map(self.names, each)) for each in likely if each), untested, unfinished)

    def likely_causes(self) -> list[int]:
        """Return the causes that are probably among those of the right explanation."""
        chances: Counter[int] = Counter()
        for causes, probability in zip(self.explanations, self.posterior.tolist(), strict=True):
            chances.update(dict.fromkeys(causes, probability))
        return [cause for cause, chance in chances.items() if chance >= CERTAIN]


@lru_cache(maxsize=8)
def _explanations(active: Factors) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
    """Return the explanations (chance, one cause, or two without a common factor), their prior weights, and what they predict.

    The last is bool [explanation, arm]: whether the arm contains a cause.
    """
    import numpy as np

    bits = {name: 1 << i for i, name in enumerate(active)}
    causes = dict.fromkeys(bits.values(), 1.0)
    for a, b in pairs_of(active):
        causes[bits[a] | bits[b]] = KNOWN_PAIR if {a, b} in KNOWN_PAIRS else PAIR
    weights: dict[tuple[int, ...], float] = {(): CHANCE} | {(c,): weight for c, weight in causes.items()}
    for one, other in itertools.combinations(causes, 2):
        if not one & other and one.bit_count() + other.bit_count() < 4:
            weights[one, other] = SECOND * causes[one] * causes[other] / len(active)
    arms = np.arange(2 ** len(active))
    worse = np.zeros((len(weights), len(arms)), bool)
    for row, masks in zip(worse, weights, strict=True):
        for mask in masks:
            row |= (arms & mask) == mask
    return list(weights), np.array([*weights.values()]), worse
