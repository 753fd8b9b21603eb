"""How requests reach a server: so many in flight (a closed loop), or so many a second whatever it does (an open loop).

A closed loop slows down with the server and hides its worst moments; an open loop does not. Each load is measured and
shown apart: "greeting", "greeting@8" (eight in flight), "greeting@2/s" (two arrivals a second, Poisson).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from annie_quant.errors import UsageError
from annie_quant.files import sha256_text

OPEN_LOOP_VISIT = 32  # requests of an open loop that one backend gets before the other has its turn


@dataclass(frozen=True)
class Load:
    """concurrency: requests in flight (closed loop). rate_per_s: mean arrivals a second (open loop); concurrency is 0."""

    concurrency: int = 1
    rate_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.rate_per_s is None and self.concurrency < 1:
            raise UsageError(f"concurrency must be 1 or more, got {self.concurrency}")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise UsageError(f"an arrival rate must be more than 0 a second, got {self.rate_per_s}")

    @property
    def together(self) -> int:
        """How many requests make a visit."""
        return OPEN_LOOP_VISIT if self.rate_per_s is not None else self.concurrency

    @property
    def label(self) -> str:
        if self.rate_per_s is not None:
            return f"@{self.rate_per_s:g}/s"
        return f"@{self.concurrency}" if self.concurrency > 1 else ""

    def arrivals(self, prompts: Sequence[str]) -> list[float] | None:
        """Start times in seconds of an open loop's requests, None in a closed loop.

        Drawn from the prompts, so that every backend meets the same arrivals.
        """
        if self.rate_per_s is None:
            return None
        from annie_quant.stream import arrivals

        seed = int(sha256_text("\n".join(prompts))[:8], 16)
        return arrivals.poisson(len(prompts), self.rate_per_s, seed)


ALONE = Load()


def load_of(row: Mapping[str, Any]) -> Load:
    """The load that a record was measured under."""
    rate = row.get("rate_per_s")
    return Load(0, rate) if rate else Load(row.get("concurrency") or 1)


def alone(row: Mapping[str, Any]) -> bool:
    """Whether the request was the only one in flight."""
    return load_of(row) == ALONE
