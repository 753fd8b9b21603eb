"""The search for a strategy: the cheapest one that passes every gate (requirements R45 to R47)."""

from __future__ import annotations

from annie_quant.pipeline.search.search import Search, chosen_order, run
from annie_quant.pipeline.search.table import outcome, tree

__all__ = ["Search", "chosen_order", "outcome", "run", "tree"]
