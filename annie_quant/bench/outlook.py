"""How much longer a benchmark takes, and when its questions will be decided, from the records so far.

A comparison of times is decided when its difference is significant or its interval is within EQUIVALENT of the other side
(bench/sequential.py); intervals shrink with the square root of the prompts, so the number of prompts that decides it is
predicted from the present ones. Gates predict their own number (PairedGate.n_to_decide).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence

from annie_quant.bench.sequential import EQUIVALENT, compared_times, paired_gates
from annie_quant.judge import decision
from annie_quant.judge.statistics import LEVEL
from annie_quant.schema import PairedGate, PairedResult, RequestRecord, Roles

LEAST_PROMPTS = 8  # of both sides, before anything is predicted
PAUSE_S = 15.0  # between two predictions
COST_SHARE = 0.01  # of the time that predicting may take


def growth_to_decide(
    records: Sequence[RequestRecord], backends: Sequence[str], greedy: Collection[str], roles: Roles | None = None
) -> float | None:
    """Return by which factor the measured prompts must grow until all is decided: 1 when it is, inf when none would do.

    None where too little was measured to predict it.
    """
    factors: list[float] = []
    for *_, result in compared_times(records, backends):
        if result.n_prompts < LEAST_PROMPTS:
            return None
        factors.append(_comparison(result))
    factors += [_gate(pair) for _, gates in paired_gates(records, backends, greedy, roles) for pair in gates.values()]
    return max(factors) if factors else None


def _comparison(result: PairedResult) -> float:
    if result.p is not None and result.p < LEVEL:
        return 1.0
    ways = [math.inf]
    if result.n_to_decide:
        ways.append(max(1.0, result.n_to_decide / result.n_prompts))
    if result.low is not None and result.high is not None and result.median_a:
        half = (result.high - result.low) / 2
        slack = EQUIVALENT * result.median_a - abs((result.high + result.low) / 2)
        if slack > 0:
            ways.append(max(1.0, (half / slack) ** 2))
    return min(ways)


def _gate(pair: PairedGate) -> float:
    if pair.n_to_decide:
        return max(1.0, pair.n_to_decide / pair.n)
    return 1.0 if pair.verdict != "undecided" else math.inf


def duration(seconds: float) -> str:
    """Return a time in round numbers: "about 40 seconds", "about 4 minutes", "about 1.5 hours"."""
    return f"about {' '.join(_rounded(seconds))}"


def _rounded(seconds: float) -> tuple[str, str]:
    """Return (number, unit) of a time."""
    if seconds < 90:
        value, unit = float(max(5, 5 * round(seconds / 5))), "second"
    elif seconds < 5400:
        value, unit = round(seconds / 60), "minute"
    else:
        value, unit = round(2 * seconds / 3600) / 2, "hour"
    return f"{value:g}", unit if value == 1 else f"{unit}s"


class Outlook:
    """The expected end of a run, as text for its progress.

    stop_early: the run stops when everything is decided. clock: seconds, for tests. roles: those that the user named.
    """

    def __init__(
        self,
        backends: Sequence[str],
        greedy: Collection[str] = (),
        stop_early: bool = False,
        clock: Callable[[], float] = time.monotonic,
        roles: Roles | None = None,
    ) -> None:
        self.roles = decision.assign(list(backends), {}, roles)
        self.backends, self.greedy, self.stop_early, self._clock = list(backends), greedy, stop_early, clock
        self._records: list[RequestRecord] = []
        self._began: tuple[float, float] | None = None  # (time, visits done) of the first update
        self._next = 0.0
        self._growth: float | None = None

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)

    def text(self, done: float, total: float | None) -> str:
        """Return what is expected after `done` of `total` visits; "" while nothing can be predicted."""
        now = self._clock()
        if self._began is None:
            self._began = now, done
        seconds, visits = now - self._began[0], done - self._began[1]
        if not total or visits < 1 or seconds <= 0:
            return ""
        rate = visits / seconds
        left_s = (total - done) / rate
        if left_s <= 0:
            return ""
        if len(self.backends) > 1 and now >= self._next:
            self._growth = growth_to_decide(self._records, self.backends, self.greedy, self.roles)
            cost = self._clock() - now
            self._next = now + max(PAUSE_S, cost / COST_SHARE)
        if self._growth is None:
            return f"{duration(left_s)} left"
        if self._growth <= 1:
            return "decided" if self.stop_early else f"decided; {duration(left_s)} left"
        until_s = (self._growth - 1) * done / rate
        if until_s >= left_s:
            return f"{duration(left_s)} left, then still undecided"
        number, unit = _rounded(until_s)
        text = f"about {number} more {unit} until decided"
        return text if self.stop_early else f"{text}, {' '.join(_rounded(left_s))} in all"
