"""One file per strategy, with one `STRATEGY` (annie_quant.quantize.strategy)."""

from __future__ import annotations

import sys

from annie_quant import registry
from annie_quant.quantize.strategy import Strategy


def names() -> list[str]:
    """Return the names of all strategies, in alphabetical order."""
    return registry.names(sys.modules[__name__])


def find(name: str) -> Strategy:
    """Return the strategy called `name`. Raises UsageError that lists all of them."""
    strategy: Strategy = registry.find(sys.modules[__name__], name, "strategy").STRATEGY
    return strategy


def by_rank() -> list[Strategy]:
    """Return all strategies in the order in which a search tries them."""
    return sorted(map(find, names()), key=lambda s: (s.cost.rank, s.name))
