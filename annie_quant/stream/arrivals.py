"""Start times of an open loop, in seconds after the run's start: requests arrive whatever the server does.

A closed loop (concurrency) slows down with the server and so hides its worst moments (coordinated omission); an open
loop does not. With a bound on what is in flight a request may still wait beyond its start: its record says how long
(`wait_ms`), and counts its times from the actual start (first_content_ms, e2e_ms: the server's part) as well as from the
intended one (scheduled_first_content_ms, scheduled_e2e_ms: what a user would have lived through).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from annie_quant.errors import UsageError


def poisson(count: int, rate_per_s: float, seed: int = 0) -> list[float]:
    """Independent arrivals: exponential gaps with a mean of 1/rate_per_s. The first request comes after one gap."""
    gaps = np.random.default_rng(seed).exponential(1 / _positive(rate_per_s, "rate_per_s"), count)
    return np.cumsum(gaps).tolist()


def constant(count: int, rate_per_s: float) -> list[float]:
    """Every 1/rate_per_s seconds, from 0 on."""
    return (np.arange(count) / _positive(rate_per_s, "rate_per_s")).tolist()


def burst(count: int, size: int, every_s: float) -> list[float]:
    """`size` requests at once, every `every_s` seconds, from 0 on."""
    return (np.arange(count) // int(_positive(size, "size")) * _positive(every_s, "every_s")).tolist()


def trace(stamps: Iterable[float], speed: float = 1.0) -> list[float]:
    """A recorded log's arrival times (seconds, any origin), `speed` times as fast; the earliest becomes 0."""
    times = np.asarray(list(stamps), dtype=np.float64)
    if times.size == 0:
        return []
    if not np.isfinite(times).all():
        raise UsageError("the trace holds a time that is not a number", "clean the log")
    return ((times - times.min()) / _positive(speed, "speed")).tolist()


def _positive(value: float, name: str) -> float:
    if not value > 0 or value == float("inf"):
        raise UsageError(f"{name}={value} must be more than 0", "give a positive number")
    return value
