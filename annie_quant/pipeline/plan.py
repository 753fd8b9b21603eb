"""How long the stages of a run take, from their usual times and from how long the finished ones took here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

WEIGHT_S = 20.0  # the usual times count as much as so many seconds of finished stages


class Plan:
    """The stages of one run. usual_s: stage -> its share of the run's time on the machine that the times are of, in seconds."""

    def __init__(self, usual_s: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self.usual_s, self._clock, self._start = usual_s, clock, clock()
        self._done: list[str] = []
        self._before_s = 0.0  # usual seconds of stages that an earlier run finished

    def finish(self, name: str, before: bool = False) -> None:
        """Note that a stage has finished. before: in an earlier run."""
        self._done.append(name)
        self._before_s += self.usual_s.get(name, 0.0) if before else 0.0

    @property
    def left_s(self) -> float:
        """Return the seconds that the other stages take, at the pace of this run so far."""
        done_s = sum(self.usual_s.get(name, 0.0) for name in self._done)
        pace = (self._clock() - self._start + WEIGHT_S) / (done_s - self._before_s + WEIGHT_S)
        return (sum(self.usual_s.values()) - done_s) * pace

    def text(self) -> str:
        """Return the state in one line: "3 of 14 stages finished, about 2 minutes left"."""
        minutes = round(self.left_s / 60)
        left = f"about {minutes} minute{'s' * (minutes > 1)}" if minutes else "less than a minute"
        return f"{len(self._done)} of {len(self.usual_s)} stages finished, {left} left"
