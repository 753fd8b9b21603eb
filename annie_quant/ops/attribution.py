"""Who is to blame when a served model lost its manners: arms over the same prompts that change one thing at a time.

Each arm is a benchmark of one server in FOLDER/arms/NAME, so that its answers are written at once and a second call goes on. A
prompt with a label is judged by its label and by the rules; one without also by the gates that compare with the base's answer, in
which the base's second measurement is the base: what changes there is noise.

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
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from annie_quant import bench, documents
from annie_quant.bench.reference_answers import mark
from annie_quant.bench.run_folder import read_records, workload_settings
from annie_quant.core.errors import CheckpointError, ServerError, UsageError
from annie_quant.core.progress import SILENT, Progress
from annie_quant.core.resume import keyed_folder
from annie_quant.core.templates import render_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import RequestRecord
from annie_quant.judge.gates import GATES, REFERENCE_GATES, decides
from annie_quant.judge.pairing import deciding_by_prompt, has_label
from annie_quant.judge.statistics import LEVEL, excess_loss, mcnemar
from annie_quant.judge.workloads import Workload
from annie_quant.ops.attribution_servers import Target, Varied, ineffective, request_settings, title

if TYPE_CHECKING:
    import numpy as np

# ---- which arm to measure next: values in, values out

MAX_ARMS = 12  # with answers; one that no server starts with costs no requests
# Of a fault that an arm contains: the test misses it. Of an arm without one: the test finds one all the same.
MISS = 0.03
FALSE_ALARM = 0.005
# Posterior probability from which an explanation, or a cause, counts as the right one.
CERTAIN = 0.85
# Open explanations are shown from this share of the likeliest one's probability on.
_MAX_SHOWN = 0.3
# Prior weights: how much less likely a pair is than one factor, a second cause than none, and that the full arm's loss was chance.
PAIR = 0.2
KNOWN_PAIR = 0.5
SECOND = 0.2
CHANCE = 0.05
USED_UP = "all arms were used"
FEW = "a loss that these few prompts cannot prove: use a larger --n"
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


def plan(
    factors: Sequence[str], results: Sequence[ArmResult], max_arms: int = MAX_ARMS
) -> NextArm | Conclusion:
    """Return the next arm, or the conclusion. factors: in the order of their names in arms; results: of all arms tried so far."""
    untested = untested_factors(factors, results)
    active = tuple(name for name in factors if name not in untested)
    full = frozenset(active)
    bases = [r for r in results if not r.factors]
    if len(bases) < 2:
        return NextArm((), "again, for the noise" if bases else "all trusted", again=bool(bases))
    measured = {
        frozenset(r.factors): r.effect for r in results if r.valid and r.effect and r.factors
    }
    refused = [frozenset(r.factors) for r in results if r.failure and full.issuperset(r.factors)]
    if not full or (full in measured and not measured[full].broken):
        return Conclusion(
            untested=untested, unfinished=FEW if full and measured[full].p < LEVEL else ""
        )
    if full in refused:
        # Which of the smallest set with which no server starts is it? Its halves tell, one after the other.
        names = [name for name in active if name in min(refused, key=len)]
        for names_of_half in (names[: len(names) // 2], names[len(names) // 2 :]):
            half = with_needed(names_of_half, active)
            if frozenset(half) not in refused and not any(arm.issuperset(half) for arm in measured):
                return NextArm(half, "no server starts with more of them")
        return Conclusion(
            untested=untested, unfinished=f"no server starts with {' and '.join(names)} together"
        )
    left = max_arms - sum(not r.failure for r in results)
    if full not in measured:
        return (
            NextArm(active, "all suspected")
            if left > 0
            else Conclusion(untested=untested, unfinished=USED_UP)
        )
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
        self,
        active: Factors,
        measured: Mapping[frozenset[str], Effect],
        refused: Iterable[frozenset[str]],
    ) -> None:
        import numpy as np

        self.active = active
        self.explanations, weights, self.worse = _explanations(active)
        self.broken = {
            self.mask(f): effect.broken for f, effect in measured.items() if f.issubset(active)
        }
        never = [self.mask(f) for f in refused]
        arms = range(2 ** len(active))
        self.possible = np.zeros(len(arms), bool)
        for arm in arms[1:]:
            is_new = arm == self.alone(arm) and arm not in self.broken
            self.possible[arm] = is_new and not any(arm & r == r for r in never)
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
        useless = {
            name for name, other in NEEDS.items() if other in self.active and other not in rest
        }
        return self.mask(name for name in rest if name not in useless)

    def step(self, left: int, untested: dict[str, str]) -> NextArm | Conclusion:
        """Return the arm that says most, or that proves the likeliest explanation; or the conclusion."""
        import numpy as np

        best = int(self.posterior.argmax())
        causes = self.explanations[best]
        certain = self.posterior[best] >= CERTAIN
        alone = [self.alone(cause) for cause in causes]
        proofs = (
            [arm for arm in (*alone, self.without(causes)) if self.possible[arm]] if causes else []
        )
        if left > 0 and proofs and (certain or left <= len(proofs)):
            why = (
                "whether they break answers alone"
                if proofs[0] in alone
                else "whether anything else does"
            )
            return NextArm(self.names(proofs[0]), why)
        worse = self.posterior @ self.worse  # how likely each arm is to be worse
        says = np.where(self.possible, np.minimum(worse, 1 - worse), 0.0)
        if left > 0 and not certain and says.max() > FALSE_ALARM:
            # Of arms that say about the same, the one with fewer factors.
            near = np.flatnonzero(says >= 0.95 * says.max()).tolist()
            return NextArm(
                self.names(min(near, key=int.bit_count)), "it splits the explanations that are left"
            )
        named = tuple(self.names(c) for c in self.likely_causes() if self.broken.get(self.alone(c)))
        if certain and len(named) == len(causes) and not proofs:
            return Conclusion(named, untested=untested)
        order = self.posterior.argsort()[::-1][:5].tolist()
        likely = [
            self.explanations[i]
            for i in order
            if self.posterior[i] > _MAX_SHOWN * self.posterior[best]
        ]
        unfinished = "the arms do not tell the explanations apart" if left > 0 else USED_UP
        return Conclusion(
            named,
            tuple(tuple(map(self.names, each)) for each in likely if each),
            untested,
            unfinished,
        )

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
    weights: dict[tuple[int, ...], float] = {(): CHANCE} | {
        (c,): weight for c, weight in causes.items()
    }
    for one, other in itertools.combinations(causes, 2):
        if not one & other and one.bit_count() + other.bit_count() < 4:
            weights[one, other] = SECOND * causes[one] * causes[other] / len(active)
    arms = np.arange(2 ** len(active))
    worse = np.zeros((len(weights), len(arms)), bool)
    for row, masks in zip(worse, weights, strict=True):
        for mask in masks:
            row |= (arms & mask) == mask
    return list(weights), np.array([*weights.values()]), worse


# ---- the arms and their answers

FILE = "attribution.json"
# Of answers without a label that may differ from the base's: a harmless change of the arithmetic changes some.
_MARGIN = 0.05
HANGS = 3  # requests without an answer in a row after which a server counts as hanging


class Attribution(msgspec.Struct, kw_only=True):
    """attribution.json: the result.

    conclusion: causes, open explanations, factors that could not be tested.
    fixed: factors that cannot be changed at these servers, with the reason.
    in_text: answers of the arm with the most factors that have a tool call in their text.
    """

    sentence: str
    guilty: bool
    conclusion: Conclusion
    varied: list[Varied]
    fixed: dict[str, str]
    in_text: int
    arms: list[ArmResult]


@dataclass
class AttributionRun:
    """The arms of one attribution and their answers.

    timeout_s: limit of one request.
    """

    target: Target
    workloads: Sequence[Workload]
    folder: Path
    headers: Mapping[str, str] = field(default_factory=dict)
    max_arms: int = 12
    timeout_s: float = 120.0
    seed: int = 0
    progress: Progress = SILENT
    results: list[ArmResult] = field(default_factory=list)
    answers: dict[tuple[Factors, bool], list[RequestRecord]] = field(default_factory=dict)

    def run(self) -> Attribution:
        """Measure arms until the planner concludes, and write the result to FOLDER/attribution.json.

        Raises ServerError where the base has no server: without it nothing can be compared.
        """
        if not any(w.cases for w in self.workloads):
            raise UsageError("there are no prompts to compare with", "choose other --workloads")
        names = [v.name for v in self.target.varied]
        for side in (
            "trusted",
            "suspect",
        ):  # a value that is not one is an error before the first server starts
            request_settings({v.name: getattr(v, side) for v in self.target.varied})
        while isinstance(step := plan(names, self.results, self.max_arms), NextArm):
            self.progress.update(len(self.results), None, f"{arm_name(step)} ({step.why})")
            result = self.measure(
                step, [name for name in names if name not in untested_factors(names, self.results)]
            )
            self.results.append(result)
            self.progress.message(f"{arm_name(step)}: {_outcome(result)}")
        most = self.answers[max(self.answers, key=lambda key: len(key[0]))]
        attribution = Attribution(
            sentence=_sentence(step, self.results),
            guilty=bool(step.causes or step.open) or any(is_broken(r) for r in self.results),
            conclusion=step,
            varied=self.target.varied,
            fixed=self.target.fixed,
            in_text=sum("<tool_call>" in r.answer.text and not r.answer.tool_calls for r in most),
            arms=self.results,
        )
        documents.write(self.folder / FILE, attribution)
        return attribution

    def measure(self, step: NextArm, tested: Sequence[str]) -> ArmResult:
        """Return the result of one arm, whose answers are taken from an earlier call where they are complete."""
        values = dict(self.target.constant)
        values |= {
            v.name: v.suspect if v.name in step.factors else v.trusted for v in self.target.varied
        }
        settings = request_settings(values)
        name = arm_name(step)
        workloads = [with_fields(w, settings.fields) for w in self.workloads]
        asked = [(w.name, workload_settings(w).asked_sha256) for w in workloads]
        folder = keyed_folder(
            self.folder / "arms" / name, {"values": values, "asked": asked, "seed": self.seed}
        )
        try:
            if not (folder / "bench.json").is_file():
                with self.target.serve(
                    values, self.folder / "logs" / f"{name}.log", self.progress
                ) as url:
                    backend = bench.Backend("server", url, headers=self.headers)
                    bench.run(
                        [backend],
                        workloads,
                        folder,
                        progress=self.progress,
                        watch=Watch(),
                        prefix_cache=settings.prefix_cache,
                        concurrency=settings.concurrency,
                        timeout_s=self.timeout_s,
                        seed=self.seed,
                        warmup=0,
                        runs=1,
                        with_memory=False,
                        stop_at_smoke=False,
                    )
            records = [r for r in read_records(folder / "records.jsonl") if not r.warmup]
            answered = [r for r in records if not r.answer.error]
            refused = all(
                400 <= r.answer.status < 500 for r in records
            )  # with a suspect's value: these answers are lost
            if not answered and not (refused and step.factors):
                raise ServerError(
                    f"no request has an answer: {records[0].answer.error}", "see the server's log"
                )
        except (ServerError, CheckpointError) as error:
            if not step.factors:
                raise
            return ArmResult(step.factors, failure=error.message)
        for record in records:
            record.prompt_sha256 = (
                ""  # its fields are part of it, and sampling changes them; the case's id is not
            )
        self.answers[step.factors, step.again] = records
        effect = compare_answers(
            self.workloads, self.answers[(), False], self.answers.get(((), True), []), records
        )
        without = ineffective(tested, step.factors, answered) if answered else {}
        return ArmResult(
            step.factors, step.again, effect if step.factors or step.again else None, "", without
        )


@dataclass
class Watch:
    """Raises ServerError where HANGS requests of an arm in a row have no answer."""

    unanswered: int = 0

    def __call__(self, record: RequestRecord) -> None:
        self.unanswered = self.unanswered + 1 if record.answer.cause in ("timeout", "idle") else 0
        if self.unanswered == HANGS:
            raise ServerError(
                f"the server hangs: {HANGS} requests in a row had no answer",
                "use a longer --timeout-s",
            )


def arm_name(step: NextArm | ArmResult) -> str:
    return "+".join(step.factors) or ("base-again" if step.again else "base")


def with_fields(workload: Workload, fields: JsonObject) -> Workload:
    """Return a workload whose requests have these fields; a temperature replaces its own."""
    rest = {name: value for name, value in fields.items() if name != "temperature"}
    return replace(
        workload,
        temperature=fields.get("temperature", workload.temperature),
        extra={**workload.extra, **rest},
    )


def compare_answers(
    workloads: Sequence[Workload],
    base: Sequence[RequestRecord],
    again: Sequence[RequestRecord],
    arm: Sequence[RequestRecord],
) -> Effect:
    """Return how many prompts only the base, and only the arm, answers rightly. Sets the checks that compare with the base.

    Without a label, the base's second measurement has to agree with the first: then an arm without a fault loses as many
    as it wins.
    """
    rows = []
    for records in (base, again, arm):
        mark(records, [replace(w, temperature=0) for w in workloads], base)
        rows.append(deciding_by_prompt(records, [w.name for w in workloads]))
    before, second, after = rows
    informative = {gate for w in workloads for gate in w.informative}
    counts = {True: [0, 0, 0], False: [0, 0, 0]}  # with a label or without: n, lost, won
    for prompt, row in before.items():
        gates = [g for g in row if decides(g) and not GATES[g].two_sided and g not in informative]
        rules = [g for g in gates if g not in REFERENCE_GATES]
        same = [] if has_label(row) else [g for g in gates if g in REFERENCE_GATES]
        new = after.get(prompt, {})
        floor = second.get(prompt, {})
        was_right = all(row[g] for g in rules) and all(floor.get(g, False) for g in same)
        is_right = all(new.get(g, False) for g in (*rules, *same))
        count = counts[has_label(row)]
        count[0] += bool(rules or same)
        count[1] += was_right and not is_right
        count[2] += is_right and not was_right
    n, lost, won = counts[True]
    n_same, lost_same, won_same = counts[False]
    p_values = [mcnemar(lost, won)] * bool(n) + [
        excess_loss(lost_same, n_same, _MARGIN, won_same)
    ] * bool(n_same)
    p = min(
        [1.0, *(len(p_values) * p for p in p_values)]
    )  # Bonferroni's correction for the two kinds of prompts
    return Effect(n + n_same, lost + lost_same, won + won_same, p)


# ---- words


def is_broken(result: ArmResult) -> bool:
    return result.valid and result.effect is not None and result.effect.broken


def _sentence(end: Conclusion, results: Sequence[ArmResult]) -> str:
    """Return the result in one sentence."""
    effects = {r.factors: r.effect for r in results if r.valid and r.effect and r.factors}
    noise = next(
        (f"{r.effect.lost} when the base is repeated" for r in results if r.again and r.effect),
        "unknown",
    )
    worst = max(effects.values(), key=lambda e: e.lost, default=None)
    either = ", or ".join(" and ".join(map(blamed, causes)) for causes in end.open)
    start = "not decided" if end.unfinished else "nobody is to blame"
    if either:
        start = f"not decided between {either}"
    everything = max((r.factors for r in results), key=len)
    parts = [
        f"{blamed(cause)} {broke(cause, effects[with_needed(cause, everything)])}"
        for cause in end.causes
    ]
    if worst is None:
        parts = ["nothing could be tested"]
    elif not parts:
        rest = "" if either else f" and fix {worst.won} ({noise})"
        which = "all tested factors" if end.untested else "all factors"
        parts = [f"{start}: {which} together break {worst.lost} of {worst.n} answers{rest}"]
    innocent = [
        f
        for f, e in effects.items()
        if len(f) == 1 and not e.broken and f[0] not in {*sum(end.causes, ())}
    ]
    parts += [f"{blamed(f)} {broke(f, effects[f])} (within noise)" for f in innocent]
    if end.untested:
        parts.append(f"not tested: {', '.join(map(title, end.untested))}")
    return "; ".join(parts)


def blamed(cause: Factors) -> str:
    return " with ".join(title(name) for name in reversed(cause))


def broke(cause: Factors, effect: Effect) -> str:
    verb = "break" if len(cause) == 1 and title(cause[0]).endswith("s") else "breaks"
    return f"{verb} {effect.lost} of {effect.n} answers" + (
        f" and fixes {effect.won}" if effect.won else ""
    )


def _outcome(result: ArmResult) -> str:
    """Return what an arm showed."""
    if result.failure:
        return f"no answers: {result.failure}"
    if not result.valid:
        return "invalid: " + "; ".join(
            f"{title(name)}: {why}" for name, why in result.ineffective.items()
        )
    if result.effect is None:
        return "measured"
    return f"lost {result.effect.lost}, won {result.effect.won} of {result.effect.n}, p {result.effect.p:.2g}"


def lines(result: Attribution) -> list[str]:
    """Return what was measured: each arm, what could not be tested, and what cannot be changed."""
    words = {"arm_name": arm_name, "outcome": _outcome, "is_broken": is_broken, "title": title}
    return render_text("attribution.txt", result=result, **words).splitlines()
