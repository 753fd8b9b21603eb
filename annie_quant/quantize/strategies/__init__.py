"""One file per strategy, with one `STRATEGY` (annie_quant.quantize.strategy)."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from annie_quant import models
from annie_quant.core import registry
from annie_quant.core.errors import CheckpointError
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


def check_family(strategy: Strategy, config: Mapping[str, object]) -> None:
    """Raise CheckpointError where a strategy cannot take the family of a config.json, with the commands that can."""
    if not strategy.needs_family or config.get("auto_map"):
        return  # a checkpoint with code of its own is refused when it is loaded
    try:
        models.family_of(config)
    except CheckpointError as error:
        others = ", ".join(s.name for s in by_rank() if not s.needs_family)
        raise CheckpointError(
            f"{error.message}, and --strategy {strategy.name} computes its layers one by one",
            f"these take it: quantize --strategy {others}; audit, compare, eval, convert --to bf16 or compressed-tensors "
            f"({error.hint})",
        ) from None
