"""How requests reach a server: a number of them in flight (closed loop), or a rate of arrivals (open loop).

A closed loop slows down with the server and hides its worst moments; an open loop does not. Each load is measured and
reported separately: "greeting", "greeting@8" (eight in flight), "greeting@2/s" (two arrivals per second, Poisson), "mine@trace"
(the arrival times of a trace).
"""

from __future__ import annotations

from collections.abc import Sequence

from annie_quant.files import sha256_text
from annie_quant.judge.workloads import Case, Workload
from annie_quant.schema import Load

OPEN_LOOP_REQUESTS = 32  # of an open loop, before the next backend's requests

ALONE = Load()


def requests_together(load: Load) -> int:
    """How many requests are sent to one backend before the next backend's requests."""
    return load.concurrency or OPEN_LOOP_REQUESTS


def applies(load: Load, workload: Workload) -> bool:
    """Whether a workload is measured under a load: a trace under its own arrivals alone, anything else under the others."""
    return workload.has_arrivals == (load.trace_speed is not None)


def arrival_times(load: Load, prompts: Sequence[str], cases: Sequence[Case]) -> list[float] | None:
    """Start times in seconds of an open loop's requests; None in a closed loop.

    The prompts seed a rate's arrivals, so that every backend gets the same. A trace's are those of its cases, the first at 0.
    """
    from annie_quant.stream import arrivals

    if load.trace_speed is not None:
        return arrivals.trace([case.arrival_s or 0.0 for case in cases], load.trace_speed)
    if load.rate_per_s is None:
        return None
    seed = int(sha256_text("\n".join(prompts))[:8], 16)
    return arrivals.poisson(len(prompts), load.rate_per_s, seed)
