"""From a fine-tuned bf16 checkpoint to NVFP4, by one of several strategies.

run(strategy, model, output, ...)    one strategy, one output folder, written atomically
available()                          name → summary of every strategy

A strategy is one file in strategies/ with a STRATEGY (strategy.py); adding a file adds a strategy.
"""

from __future__ import annotations

from annie_quant.quantize.runner import QuantizeResult, available, run
from annie_quant.quantize.strategy import Job

__all__ = ["Job", "QuantizeResult", "available", "run"]
