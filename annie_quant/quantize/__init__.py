"""From a fine-tuned bf16 checkpoint to NVFP4, by one of several strategies.

    run(strategy, model, output, ...)   one strategy, one output folder, written atomically
    available()                         what there is to choose from

A strategy is one file in strategies/ with a NAME, a SUMMARY and quantize(job, report); adding a file adds a strategy.
"""

from __future__ import annotations

from annie_quant.quantize.job import Job, available, run

__all__ = ["Job", "available", "run"]
