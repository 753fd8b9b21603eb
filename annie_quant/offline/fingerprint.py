"""Which arithmetic a server runs, from the log-probabilities that it returns.

The server's tokens are scored offline under every numerics profile of the checkpoint, and with the bf16 reference where there is
one. The differences between served and offline log-probabilities have a Laplace distribution, whose scale under each profile is the
profile's own noise: the mean change between its arithmetic and the same formats in float32 (for an arithmetic in float32: sums in
another order). The profile of the largest likelihood is named. Others whose likelihood is
not significantly smaller (paired over the prompts) are listed with it, and among these one of the server's own family comes first.
It is "none of these" where the served values are further away than LIMIT times that noise, or than CLOSEST times the distance to
another candidate: a fault is not W4A4 because it is large.

Under W4A4 a last bit changes codes, which changes log-probabilities by tenths for a small model. A fault that is smaller than
that noise is not seen, so the noise is part of the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from annie_quant import judge
from annie_quant.offline import profiles
from annie_quant.offline.emulation import USUAL, SumOrder, emulate
from annie_quant.offline.engine import Engine, Row
from annie_quant.offline.loading import load, profiles_of
from annie_quant.offline.pair import StrPath
from annie_quant.offline.profiles import Profile, find_profile
from annie_quant.offline.prompts import Template

FLOOR = 0.001  # least noise: approximate exponentials and other orders of sums
LIMIT = 2.0  # times the noise
INDEPENDENT = 2**0.5  # times the noise: where the server and the emulation have independent noise
SIGNIFICANT = 2.0  # standard errors of the mean difference of log-likelihoods per prompt
CLOSEST = 1.5  # times the difference from the closest candidate
FAR_BELOW = 6.0  # nats below the best token; less likely tokens are noisy
RARE = 1e-3  # of right servers
REFERENCE = "bf16 reference"
PERMUTED = SumOrder(permutation=1)

Values = list[np.ndarray]  # per prompt, the log-probabilities of the served tokens


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
        return (
            best.name
            if best.difference <= min(LIMIT * best.noise, max(CLOSEST * closest, FLOOR))
            else None
        )

    @property
    def is_doubtful(self) -> bool:
        """Whether the named arithmetic is further away than independent noise explains."""
        best = self.candidates[0]
        return self.name is not None and best.difference > INDEPENDENT * max(best.noise, FLOOR)


def prompts(reference: StrPath, n: int) -> list[tuple[int, ...]]:
    """Return n prompts as token ids: the shortest single-turn ones, evenly over the workloads."""
    template = Template(reference)
    workloads = [w for w in judge.load_workloads() if not w.cases[0].turns]
    per_workload = -(-n // len(workloads))
    requests = [
        sorted(
            (template.request(w, c) for c in w.cases[:: max(1, len(w.cases) // 24)]),
            key=lambda r: len(r.prompt),
        )
        for w in workloads
    ]
    chosen = [rows[i].prompt for i in range(per_workload) for rows in requests if i < len(rows)]
    return chosen[:n]


def compare_with_server(
    checkpoint: StrPath,
    reference: StrPath | None,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[Mapping[int, float]]],
    family: str = "",
    device: str | None = None,
) -> Fingerprint:
    """Compare served log-probabilities with a checkpoint's own.

    reference: the bf16 checkpoint, which is one more candidate; None: it is not compared.
    answers: the tokens that the server chose after each prompt. logprobs: per answer and token, {token id: log-probability}.
    family: "vllm" or "llama.cpp", the server's kind; "" for unknown.
    """
    used = [i for i, answer in enumerate(answers) if answer]
    rows = [Row(prompts[i], list(answers[i])) for i in used]
    near = [[near_the_best(step) for step in logprobs[i]] for i in used]
    served = [
        np.array([v for step in answer for v in step.values()], np.float64) for answer in near
    ]
    token_lists = [[list(step) for step in answer] for answer in near]
    rows_equal: dict[str, float] = {}
    by_prompt: dict[str, np.ndarray] = {}  # log-likelihoods

    def values(engine: Engine, name: str, profile: Profile, order: SumOrder = USUAL) -> Values:
        by_row: dict[int, np.ndarray] = {}
        n_equal = 0
        with emulate(engine.model, profile, order):
            for i, logits in engine.scores(rows):
                own = torch.log_softmax(logits.double(), -1).cpu()
                n_equal += int((own.argmax(-1) == torch.tensor(rows[i].target)).sum())
                picked = [own[p, tokens] for p, tokens in enumerate(token_lists[i])]
                by_row[i] = torch.cat(picked).numpy()
        rows_equal[name] = n_equal / sum(len(r.target) for r in rows)
        return [by_row[i] for i in range(len(rows))]

    def candidate(engine: Engine, name: str, profile: Profile) -> Candidate:
        own = values(engine, name, profile)
        other = values(engine, "", *second_arithmetic(profile))
        noise = max(FLOOR, mean_difference(own, other))
        gaps = np.abs(np.concatenate(served) - np.concatenate(own))
        by_prompt[name] = np.array(
            [
                -np.sum(np.log(2 * noise) + np.abs(a - b) / noise)
                for a, b in zip(served, own, strict=True)
            ]
        )
        return Candidate(
            name, profile.describe(), float(gaps.mean()), noise, float(by_prompt[name].sum())
        )

    engine = loaded(checkpoint, device)
    available = profiles_of(engine.model)
    names = named_profiles(available)
    candidates = [candidate(engine, name, find_profile(name)) for name in names]
    if reference is not None and available != [profiles.UNQUANTIZED.name]:
        candidates.append(
            candidate(
                loaded(reference, device), REFERENCE, profiles.in_bfloat16(profiles.UNQUANTIZED)
            )
        )
    candidates.sort(key=lambda c: -c.log_likelihood)
    likely = [
        c
        for c in candidates
        if not significantly_less(by_prompt[c.name], by_prompt[candidates[0].name])
    ]
    likely.sort(key=lambda c: not c.name.startswith(family))  # stable
    candidates = [*likely, *(c for c in candidates if c not in likely)]
    n_values = sum(len(v) for v in served)
    also = [c.name for c in likely[1:]]
    return Fingerprint(candidates, also, len(rows), n_values, rows_equal[candidates[0].name])


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
        """The margin that none of n tokens of a right server exceeds but in RARE of all cases, if differences are Laplace."""
        return self.noise * math.log(self.n / RARE)


def compare_tokens(
    checkpoint: StrPath,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    device: str | None = None,
) -> GreedyTokens:
    """Score a server's greedy tokens under the arithmetics of a checkpoint. Returns the one that they fit best."""
    rows = [Row(prompts[i], list(answer)) for i, answer in enumerate(answers) if answer]
    engine = loaded(checkpoint, device)

    def scores(profile: Profile, order: SumOrder) -> tuple[np.ndarray, np.ndarray]:
        by_row = {}
        with emulate(engine.model, profile, order):
            for i, logits in engine.scores(rows):
                own = torch.log_softmax(logits.double(), -1).cpu()
                by_row[i] = (
                    own.max(-1).values,
                    own.gather(-1, torch.tensor(rows[i].target)[:, None])[:, 0],
                )
        best, chosen = (torch.cat([by_row[i][j] for i in range(len(rows))]).numpy() for j in (0, 1))
        return best, chosen

    results = []
    for name in named_profiles(profiles_of(engine.model)):
        best, chosen = scores(find_profile(name), USUAL)
        _, other = scores(*second_arithmetic(find_profile(name)))
        margins = best - chosen
        noise = max(FLOOR, float(np.abs(chosen - other).mean()))
        results.append(
            GreedyTokens(name, len(margins), int((margins > 0).sum()), float(margins.max()), noise)
        )
    return min(results, key=lambda r: r.margin / r.limit)


def named_profiles(available: list[str]) -> list[str]:
    """Return the profiles that a server can be told to run, of those that a model has."""
    # Rounded operands (vllm-emulation) change log-probabilities by less than the noise of vllm-cutlass: no name for them.
    plain = [n for n in profiles.SERVED if find_profile(n).operands == profiles.EXACT]
    return [n for n in ("float32", *plain) if n in available] or list(available)


def second_arithmetic(profile: Profile) -> tuple[Profile, SumOrder]:
    """Return the computation whose distance is a profile's noise.

    Where nothing is rounded, only the order of sums is left.
    """
    return (profiles.in_float32(profile), USUAL) if profile.rounds else (profile, PERMUTED)


def significantly_less(likelihoods: np.ndarray, best: np.ndarray) -> bool:
    """Return whether log-likelihoods per prompt are less than those of the best candidate by more than their spread allows."""
    gaps = best - likelihoods
    return (
        bool(gaps.mean() > SIGNIFICANT * gaps.std(ddof=1) / np.sqrt(len(gaps)))
        if len(gaps) > 1
        else False
    )


def near_the_best(step: Mapping[int, float]) -> dict[int, float]:
    """Return the tokens that are at most FAR_BELOW nats less likely than the best one."""
    best = max(step.values(), default=0.0)
    return {token: value for token, value in step.items() if value >= best - FAR_BELOW}


def loaded(folder: StrPath, device: str | None) -> Engine:
    return Engine(load(folder, cache="float32", dtype=torch.float32, device=device))


def mean_difference(a: Values, b: Values) -> float:
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).mean())
