"""The strategies: values of type Strategy (annie_quant.quantize.strategy) in the modules of this package."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

import msgspec

from annie_quant import models
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.quantize.strategy import EngineName, Strategy

# Strategies of earlier versions, and what replaces them.
REPLACED = {
    "qad": "--strategy gptq, or best: both lose less than distillation did, in minutes",
    "sensitivity": "--strategy best --max-gb N, which also chooses the head's format",
}


def available() -> dict[str, Strategy]:
    """Return name → strategy, in alphabetical order."""
    strategies: dict[str, Strategy] = {}
    for module in pkgutil.iter_modules(__path__):
        values = vars(importlib.import_module(f"{__name__}.{module.name}")).values()
        strategies |= {value.name: value for value in values if isinstance(value, Strategy)}
    return dict(sorted(strategies.items()))


def find(name: str) -> Strategy:
    """Return the strategy called `name`, in which dashes count as underscores. Raises UsageError that lists all of them."""
    strategies = available()
    name = name.replace("-", "_")
    if name in REPLACED:
        raise UsageError(f"the strategy {name!r} was removed", REPLACED[name])
    strategy = strategies.get(name)
    if strategy is None:
        raise UsageError(
            f"there is no strategy called {name!r}", f"choose one of: {', '.join(strategies)}"
        )
    return strategy


def engine_of(
    name: str, engine: EngineName, options: Mapping[str, object]
) -> tuple[Strategy, Mapping[str, object]]:
    """Return the strategy that computes the recipe of strategy `name` with an engine, and its options.

    engine: "own", or "modelopt" for ModelOpt's configuration of the same recipe.
    options: of the strategy `name`. Raises UsageError for a recipe that ModelOpt does not have, and for options that it does not.
    """
    chosen = find(name)
    if engine == "own" or chosen.external:
        return chosen, options
    by_modelopt = find("modelopt")
    if not chosen.modelopt_options:
        having = [s.name for s in by_rank() if s.modelopt_options]
        raise UsageError(
            f"ModelOpt has no configuration of the strategy {chosen.name!r}",
            f"--engine modelopt takes {', '.join(having)}; --strategy modelopt takes any configuration",
        )
    given = {**chosen.modelopt_options, **msgspec.structs.asdict(chosen.settings(options))}
    return by_modelopt, given


def by_rank() -> list[Strategy]:
    """Return all strategies, the cheapest to make first."""
    return sorted(available().values(), key=lambda s: (s.cost.rank, s.name))


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
