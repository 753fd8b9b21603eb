"""Which arithmetic a server runs, from the log-probabilities that it returns.

The server's tokens are scored offline under every numerics profile of the checkpoint, and with the bf16 reference where there is
one. The differences between served and offline log-probabilities have a Laplace distribution, whose scale under each profile is the
profile's own noise: the mean change between its arithmetic and the same formats in float32 (for an arithmetic in float32: sums in
another order). The profile of the largest likelihood is named. Others whose likelihood is
not significantly smaller (paired over the prompts) are listed with it, and among these one of the server's own family comes first.
It is "none of these" where the served values are further away than NOISE_LIMIT times that noise, or than CLOSEST times the
distance to another candidate: a fault is not W4A4 because it is large.

Under W4A4 a last bit changes codes, which changes log-probabilities by tenths for a small model. A fault that is smaller than
that noise is not seen, so the noise is part of the result.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from annie_quant import judge
from annie_quant.core.progress import SILENT, Progress
from annie_quant.offline import profiles
from annie_quant.offline.emulation import PERMUTED, USUAL, SumOrder, emulate
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.loading import load, profiles_of
from annie_quant.offline.pair import StrPath
from annie_quant.offline.profiles import Profile, find_profile
from annie_quant.offline.prompts import Template

FLOOR = 0.001  # least noise: approximate exponentials and other orders of sums
NOISE_LIMIT = 2.0  # times the noise
INDEPENDENT = 2**0.5  # times the noise: where the server and the emulation have independent noise
SIGNIFICANT = 2.0  # standard errors of the mean difference of log-likelihoods per prompt
CLOSEST = 1.5  # times the difference from the closest candidate
FAR_BELOW = 6.0  # nats below the best token; less likely tokens are noisy
FALSE_ALARM_RATE = 1e-3  # of right servers
REFERENCE_NAME = "bf16 reference"
SAMPLED_CASES = 24  # per workload, of which the shortest prompts are chosen

PromptValues = list[np.ndarray]  # per prompt, the log-probabilities of the served tokens


@dataclass(frozen=True)
class Candidate:
    """One arithmetic against the server.

    difference: mean |served - offline| log-probability, in nats. noise: the scale expected if the server runs this arithmetic.
    log_likelihood: in nats, over all values.
    """

    name: str
    arithmetic: str
    difference: float
    noise: float
    log_likelihood: float


@dataclass(frozen=True)
class Fingerprint:
    """candidates: the named one, then most likely first. also: names that cannot be distinguished from the first.

    n_values: compared log-probabilities. equal_tokens: share of served tokens that the first candidate also chooses.
    """

    candidates: list[Candidate]
    also: list[str]
    n_prompts: int
    n_values: int
    equal_tokens: float

    @property
    def name(self) -> str | None:
        """The named arithmetic; None for none of these."""
        best = self.candidates[0]
        closest = min(max(c.difference, FLOOR) for c in self.candidates)
        limit = min(NOISE_LIMIT * best.noise, max(CLOSEST * closest, FLOOR))
        return best.name if best.difference <= limit else None

    @property
    def is_doubtful(self) -> bool:
        """Whether the named arithmetic is further away than independent noise explains."""
        best = self.candidates[0]
        return self.name is not None and best.difference > INDEPENDENT * max(best.noise, FLOOR)


def prompts(reference: StrPath, n: int) -> list[tuple[int, ...]]:
    """Return n prompts as token ids: the shortest single-turn ones, evenly over the workloads."""
    template = Template(reference)
    shortest = []
    for workload in judge.load_workloads():
        if workload.cases[0].turns:
            continue
        cases = workload.cases[:: max(1, len(workload.cases) // SAMPLED_CASES)]
        rows = [template.request(workload, case).prompt for case in cases]
        shortest.append(sorted(rows, key=len))
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*shortest))
    return [prompt for prompt in in_turn if prompt is not None][:n]


@dataclass(frozen=True)
class ServedAnswers:
    """What a server has answered.

    rows: prompts with the tokens that the server chose.
    tokens: per prompt and step, the tokens that are compared.
    values: per prompt, the server's log-probabilities of these tokens in a row.
    """

    rows: list[Row]
    tokens: list[list[list[int]]]
    values: PromptValues

    def offline(
        self, engine: Engine, profile: Profile, order: SumOrder
    ) -> tuple[PromptValues, float]:
        """Return the values under an offline arithmetic, and the share of served tokens that it also chooses."""
        by_row: dict[int, np.ndarray] = {}
        n_equal = 0
        for i, own in log_probabilities(engine, self.rows, profile, order):
            n_equal += int((own.argmax(-1) == torch.tensor(self.rows[i].target)).sum())
            steps = [own[at, tokens] for at, tokens in enumerate(self.tokens[i])]
            by_row[i] = torch.cat(steps).numpy()
        n_tokens = sum(len(row.target) for row in self.rows)
        return [by_row[i] for i in range(len(self.rows))], n_equal / n_tokens


@dataclass(frozen=True)
class _Comparison:
    """A candidate with what it is ranked by. by_prompt: log-likelihoods. equal_tokens: as of Fingerprint."""

    candidate: Candidate
    by_prompt: np.ndarray
    equal_tokens: float


def compare_with_server(
    checkpoint: StrPath,
    reference: StrPath | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[Mapping[int, float]]],
    family: str = "",
    device: str | None = None,
    progress: Progress = SILENT,
) -> Fingerprint:
    """Compare served log-probabilities with a checkpoint's own.

    reference: the bf16 checkpoint, which is one more candidate; None: it is not compared.
    answers: the tokens that the server chose after each prompt. logprobs: per answer and token, {token id: log-probability}.
    family: "vllm" or "llama.cpp", the server's kind; "" for unknown.
    """
    served = _served_answers(prompts, answers, logprobs)
    engine = loaded(checkpoint, device)
    available = profiles_of(engine.model)
    names = named_profiles(available)
    comparisons = []
    for done, name in enumerate(names):
        progress.update(done, len(names), f"the same answers under {name}")
        comparisons.append(_compare(served, engine, name, find_profile(name)))
    if reference is not None and available != [profiles.UNQUANTIZED.name]:
        rounded = profiles.in_bfloat16(profiles.UNQUANTIZED)
        comparisons.append(_compare(served, loaded(reference, device), REFERENCE_NAME, rounded))
    comparisons.sort(key=lambda c: -c.candidate.log_likelihood)
    most_likely = comparisons[0].by_prompt
    likely = [c for c in comparisons if not significantly_less(c.by_prompt, most_likely)]
    likely.sort(key=lambda c: not c.candidate.name.startswith(family))  # stable
    ranked = [*likely, *(c for c in comparisons if c not in likely)]
    return Fingerprint(
        candidates=[c.candidate for c in ranked],
        also=[c.candidate.name for c in likely[1:]],
        n_prompts=len(served.rows),
        n_values=sum(len(v) for v in served.values),
        equal_tokens=ranked[0].equal_tokens,
    )


def _served_answers(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[Mapping[int, float]]],
) -> ServedAnswers:
    """Return the answers that have tokens, each step with the tokens near its best one."""
    rows = []
    tokens = []
    values = []
    for prompt, answer, steps in zip(prompts, answers, logprobs, strict=True):
        if not answer:
            continue
        near = [near_the_best(step) for step in steps]
        rows.append(Row(prompt, list(answer)))
        tokens.append([list(step) for step in near])
        values.append(np.array([v for step in near for v in step.values()], np.float64))
    return ServedAnswers(rows, tokens, values)


def _compare(served: ServedAnswers, engine: Engine, name: str, profile: Profile) -> _Comparison:
    own, equal_tokens = served.offline(engine, profile, USUAL)
    other, _ = served.offline(engine, *noise_arithmetic(profile))
    noise = max(FLOOR, mean_difference(own, other))
    pairs = zip(served.values, own, strict=True)
    by_prompt = np.array([-np.sum(np.log(2 * noise) + np.abs(a - b) / noise) for a, b in pairs])
    difference = mean_difference(served.values, own)
    candidate = Candidate(name, profile.describe(), difference, noise, float(by_prompt.sum()))
    return _Comparison(candidate, by_prompt, equal_tokens)


def log_probabilities(
    engine: Engine, rows: Sequence[Row], profile: Profile, order: SumOrder
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (row index, log-probabilities float64 [len(target), V] on the CPU) under an arithmetic."""
    with emulate(engine.model, profile, order):
        for i, logits in engine.scores(rows):
            yield i, torch.log_softmax(logits.double(), -1).cpu()


@dataclass(frozen=True)
class GreedyTokens:
    """Served tokens under one arithmetic of the checkpoint, where a server returns no log-probabilities.

    n: tokens. differing: of them not its own choice. margin: the most nats by which its own choice is better.
    noise: as of Candidate.
    """

    name: str
    n: int
    differing: int
    margin: float
    noise: float

    @property
    def limit(self) -> float:
        """The margin that a right server's n tokens exceed with probability FALSE_ALARM_RATE, if differences are Laplace."""
        return self.noise * math.log(self.n / FALSE_ALARM_RATE)


def compare_tokens(
    checkpoint: StrPath,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    device: str | None = None,
) -> GreedyTokens:
    """Score a server's greedy tokens under the arithmetics of a checkpoint. Returns the one that they fit best."""
    pairs = zip(prompts, answers, strict=False)
    rows = [Row(prompt, list(answer)) for prompt, answer in pairs if answer]
    engine = loaded(checkpoint, device)
    results = []
    for name in named_profiles(profiles_of(engine.model)):
        profile = find_profile(name)
        best, chosen = greedy_scores(engine, rows, profile, USUAL)
        _, other = greedy_scores(engine, rows, *noise_arithmetic(profile))
        margins = best - chosen
        results.append(
            GreedyTokens(
                name=name,
                n=len(margins),
                differing=int((margins > 0).sum()),
                margin=float(margins.max()),
                noise=max(FLOOR, float(np.abs(chosen - other).mean())),
            )
        )
    return min(results, key=lambda r: r.margin / r.limit)


def greedy_scores(
    engine: Engine, rows: Sequence[Row], profile: Profile, order: SumOrder
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities of the best token and of the served one, in a row over all rows' tokens."""
    best: dict[int, torch.Tensor] = {}
    chosen: dict[int, torch.Tensor] = {}
    for i, own in log_probabilities(engine, rows, profile, order):
        best[i] = own.max(-1).values
        chosen[i] = own.gather(-1, torch.tensor(rows[i].target)[:, None])[:, 0]
    order_of_rows = range(len(rows))
    return (
        torch.cat([best[i] for i in order_of_rows]).numpy(),
        torch.cat([chosen[i] for i in order_of_rows]).numpy(),
    )


def named_profiles(available: list[str]) -> list[str]:
    """Return the profiles that a server can be told to run, of those that a model has."""
    # Rounded operands (vllm-emulation) change log-probabilities by less than the noise of vllm-cutlass: no name for them.
    plain = [n for n in profiles.SERVED if find_profile(n).operands == profiles.EXACT]
    return [n for n in ("float32", *plain) if n in available] or list(available)


def noise_arithmetic(profile: Profile) -> tuple[Profile, SumOrder]:
    """Return the computation whose distance is a profile's noise.

    Where nothing is rounded, only the order of sums is left.
    """
    return (profiles.in_float32(profile), USUAL) if profile.rounds else (profile, PERMUTED)


def significantly_less(likelihoods: np.ndarray, best: np.ndarray) -> bool:
    """Return whether log-likelihoods per prompt are less than those of the best candidate by more than their spread allows."""
    gaps = best - likelihoods
    if len(gaps) < 2:
        return False
    return bool(gaps.mean() > SIGNIFICANT * gaps.std(ddof=1) / np.sqrt(len(gaps)))


def near_the_best(step: Mapping[int, float]) -> dict[int, float]:
    """Return the tokens that are at most FAR_BELOW nats less likely than the best one."""
    best = max(step.values(), default=0.0)
    return {token: value for token, value in step.items() if value >= best - FAR_BELOW}


def loaded(folder: StrPath, device: str | None) -> Engine:
    return Engine(load(folder, cache="float32", dtype=torch.float32, device=device))


def mean_difference(a: PromptValues, b: PromptValues) -> float:
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).mean())
