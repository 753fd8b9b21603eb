"""Streaming HTTP requests, timed to the microsecond. The loop is C (_stream) and runs no Python.

    timings = aq.stream.run([aq.stream.Request(url, json=body)], concurrency=1)
    timings.records()     one dict per request: text, tool calls, usage, first_content_ms, itl_ms, error ...
    timings.events        NumPy structured array, one row per event: user and kernel stamp, bytes
    timings.save(folder)  raw frames with their stamps; Timings.load(folder) decodes them again

The meaning of each time is in `annie_quant.stream.decode`; how it is measured, in csrc/stream/clock.h and plan.h.
"""

from __future__ import annotations

from annie_quant.stream.client import Cancel, Request, chat, poisson, run, trace
from annie_quant.stream.timings import Timings

__all__ = ["Cancel", "Request", "Timings", "chat", "poisson", "run", "trace"]
