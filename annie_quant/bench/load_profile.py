"""How requests reach a server: a number of them in flight (closed loop), or a rate of arrivals (open loop).

A closed loop slows down with the server and hides its worst moments; an open loop does not. Each load is measured and
reported separately: "greeting", "greeting@8" (eight in flight), "greeting@2/s" (two arrivals per second, Poisson).
"""

from __future__ import annotations

from collections.abc import Sequence

from annie_quant.files import sha256_text
from annie_quant.schema import Load

OPEN_LOOP_REQUESTS = 32  # of an open loop, before the next backend's requests

ALONE = Load()


def requests_together(load: Load) -> int:
    """How many requests are sent to one backend before the next backend's requests."""
    return OPEN_LOOP_REQUESTS if load.rate_per_s is not None else load.concurrency


def arrival_times(load: Load, prompts: Sequence[str]) -> list[float] | None:
    """Start times in seconds of an open loop's requests; None in a closed loop.

    The prompts seed them, so that every backend gets the same arrivals.
    """
    if load.rate_per_s is None:
        return None
    from annie_quant.stream import arrivals

    seed = int(sha256_text("\n".join(prompts))[:8], 16)
    return arrivals.poisson(len(prompts), load.rate_per_s, seed)
