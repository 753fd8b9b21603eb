"""Send requests to a server within the run's time budget.

The client opens each connection first, as a client in daily use has it open already, and then sends the requests together or at
their start times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from annie_quant.bench import endpoints
from annie_quant.bench.backend import PROBE_TIMEOUT_S, Backend
from annie_quant.core.files import sha256_text
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import BenchConfig, Identity

if TYPE_CHECKING:
    from annie_quant.stream import Timings

MAX_ANSWER_BYTES, MAX_ANSWER_EVENTS = 64_000_000, 1 << 18  # far above 32,768 tokens with their log probabilities
CONNECT_S = 0.2  # connections are opened this long before the first arrival of an open loop


class BudgetEnded(Exception):
    """The time budget ended before a request was complete. It is not in records.jsonl, so a resumed run sends it again.

    waited_s: how long the first of the requests in flight had waited; None where the budget ended before they were sent.
    """

    def __init__(self, waited_s: float | None = None) -> None:
        super().__init__("the time budget ended")
        self.waited_s = waited_s


@dataclass
class PlannedRequest:
    """One request to a server.

    tag: its name in the answers.
    body: of a chat completion.
    start_s: when it is sent, in seconds after the first arrival of an open loop; None in a closed loop.
    """

    tag: str
    body: JsonObject
    start_s: float | None = None


class Sender:
    """Send requests until the time budget of one execution ends.

    config: the benchmark's settings.
    session: number of the execution; no prompt of an earlier one is in a server's prefix cache.
    identities: what each server reports about itself, by backend; filled as the servers are identified.
    """

    def __init__(self, config: BenchConfig, session: int, identities: Mapping[str, Identity]) -> None:
        self.config, self.session, self.identities = config, session, identities
        self.deadline = None if config.budget_s is None else time.monotonic() + config.budget_s

    def left_s(self) -> float | None:
        """Return what is left of the time budget; None without one. Raises BudgetEnded when nothing is."""
        if self.deadline is None:
            return None
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise BudgetEnded
        return left_s

    def timeout_s(self, longest_s: float) -> float:
        """Return `longest_s`, or what is left of the time budget where that is less."""
        left_s = self.left_s()
        return longest_s if left_s is None else min(longest_s, left_s)

    def send(self, backend: Backend, requests: Sequence[PlannedRequest]) -> Timings:
        """Send the requests to a server, all at once or at their start times. Raises BudgetEnded."""
        from annie_quant import stream

        headers = dict(backend.headers)
        left_s = self.left_s()
        models, probe_s = f"{backend.root}/v1/models", min(self.config.timeout_s, PROBE_TIMEOUT_S)
        opening = [stream.Request(models, headers=headers, timeout_s=probe_s) for _ in requests]
        begins = {r.tag: None if r.start_s is None else CONNECT_S + r.start_s for r in requests}
        measured = [
            stream.Request(
                backend.completions_url,
                json=endpoints.request_body(backend.endpoint, r.body | self._cache_fields(backend.name, r.tag)),
                headers=headers,
                timeout_s=self.config.timeout_s,
                start_s=begins[r.tag],
                tag=r.tag,
            )
            for r in requests
        ]
        sent_s = time.monotonic()
        timings = stream.run(
            [*opening, *measured],
            concurrency=len(measured) if None in begins.values() else None,
            deadline_s=left_s,
            max_answer_bytes=MAX_ANSWER_BYTES,
            max_answer_events=MAX_ANSWER_EVENTS,
        )
        if left_s is not None:
            cut = {a["tag"]: a["cause"] for a in timings.records() if a["cause"] in ("deadline", "not_started")}
            cut.pop(None, None)  # the openings of connections
            if cut:
                begun = [begins[tag] or 0.0 for tag, cause in cut.items() if cause == "deadline"]
                raise BudgetEnded(time.monotonic() - sent_s - min(begun, default=math.inf))
        return timings

    def _cache_fields(self, name: str, tag: str) -> dict[str, bool | str]:
        """Return the request fields that keep a server from reusing earlier prompts."""
        if self.config.prefix_cache == "warm":
            return {}
        runtime = self.identities[name].runtime
        if runtime == "llama.cpp":
            return {"cache_prompt": False}
        # vLLM refuses a salt with "/" and some other characters that are in tags.
        return {"cache_salt": sha256_text(f"{self.session}/{tag}")} if runtime == "vllm" else {}
