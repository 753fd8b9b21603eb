"""Start times of an open loop, in seconds after the run's start: requests arrive independently of the server's speed.

A closed loop (concurrency) slows down with the server and so hides its worst moments (coordinated omission); an open
loop does not. With a limit on requests in flight a request may still wait after its start time. Its record has the wait
(`wait_ms`), the times from the actual start (first_content_ms, e2e_ms: the server's part) and the times from the
intended start (scheduled_first_content_ms, scheduled_e2e_ms: what a user experiences).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from annie_quant.core.errors import UsageError


def poisson(count: int, rate_per_s: float, seed: int = 0) -> list[float]:
    """Return independent arrivals: exponential gaps with a mean of 1/rate_per_s. The first request follows one gap."""
    gaps = np.random.default_rng(seed).exponential(1 / _positive(rate_per_s, "rate_per_s"), count)
    return np.cumsum(gaps).tolist()


def constant(count: int, rate_per_s: float) -> list[float]:
    """Return one arrival per 1/rate_per_s seconds, starting at 0."""
    return (np.arange(count) / _positive(rate_per_s, "rate_per_s")).tolist()


def burst(count: int, size: int, every_s: float) -> list[float]:
    """Return groups of `size` simultaneous arrivals, one group per `every_s` seconds, starting at 0."""
    return (np.arange(count) // int(_positive(size, "size")) * _positive(every_s, "every_s")).tolist()


def trace(stamps: Iterable[float], speed: float = 1.0) -> list[float]:
    """Return a log's arrival times (seconds, any origin), `speed` times as fast, with the earliest at 0."""
    times = np.asarray(list(stamps), dtype=np.float64)
    if times.size == 0:
        return []
    if not np.isfinite(times).all():
        raise UsageError("the trace has a time that is not a finite number", "remove that line from the log")
    return ((times - times.min()) / _positive(speed, "speed")).tolist()


def _positive(value: float, name: str) -> float:
    if not value > 0 or value == float("inf"):
        raise UsageError(f"{name}={value}, expected a finite number greater than 0", "use a positive number")
    return value
