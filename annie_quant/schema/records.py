"""records.jsonl: one line per request of a benchmark."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from annie_quant.errors import UsageError
from annie_quant.schema.limits import Count, Milliseconds


class Load(msgspec.Struct, frozen=True):
    """How requests reach a server.

    concurrency: requests in flight (closed loop). rate_per_s: mean arrivals per second (open loop); concurrency is then 0.
    """

    concurrency: int = 1
    rate_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.rate_per_s is None and self.concurrency < 1:
            raise UsageError(f"concurrency must be 1 or more, got {self.concurrency}")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise UsageError(f"an arrival rate must be more than 0 per second, got {self.rate_per_s}")

    @property
    def label(self) -> str:
        """What is added to a workload's name: "" (one in flight), "@8" (eight in flight), "@2/s" (two per second)."""
        if self.rate_per_s is not None:
            return f"@{self.rate_per_s:g}/s"
        return f"@{self.concurrency}" if self.concurrency > 1 else ""


class ToolCall(TypedDict, total=False):
    """One call of a tool; `arguments` is a JSON string, as the server sent it."""

    id: str | None
    name: str | None
    arguments: Any


class RequestRecord(msgspec.Struct, kw_only=True):
    """One line of records.jsonl: one request, its answer, its times and what the gates found.

    Times are milliseconds after the request was handed to its connection (annie_quant.stream.decode defines each).
    warmup: never counted. cold: the first request to a server. repeat: from 0. block: number of the interleaved block.
    checks: gate → passed, for the gates that apply. faults: gate → reason, for the checks that failed.
    energy_j: GPU energy in joules, split evenly over requests sent together. stream: folder of the raw frames.
    """

    id: str
    backend: str
    workload: str
    case: str
    turn: int = 0
    repeat: int = 0
    block: int = -1
    warmup: bool = False
    cold: bool = False
    session: int = 0
    model: str | None = None
    concurrency: Count = 1
    rate_per_s: Annotated[float, Meta(ge=0)] | None = None
    n_tools: int = 0
    started_at: str | float | None = None
    load_per_core: float | None = None
    energy_j: float | None = None
    arrival_s: float | None = None
    stream: str = ""
    request_sha256: str = ""

    status: int = 0
    error: str | None = None
    cause: str | None = None
    warnings: list[str] = []
    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    server_timings: dict[str, Any] | None = None
    completion_tokens: Annotated[int, Meta(ge=-(10**15), le=10**15)] | None = None
    tokens_estimated: bool = False

    first_byte_ms: Milliseconds | None = None
    first_event_ms: Milliseconds | None = None
    first_reasoning_ms: Milliseconds | None = None
    first_content_ms: Milliseconds | None = None
    first_tool_ms: Milliseconds | None = None
    first_sentence_ms: Milliseconds | None = None
    last_token_ms: Milliseconds | None = None
    done_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    itl_ms: list[Milliseconds] = []
    decode_tok_s: Annotated[float, Meta(ge=-1e12, le=1e12)] | None = None
    merged_reads: int = 0

    clock: str | None = None
    realtime: bool | None = None
    unstamped_events: int = 0
    started_s: float | None = None
    started_unix_s: float | None = None
    wait_ms: Milliseconds | None = None
    scheduled_first_content_ms: Milliseconds | None = None
    scheduled_e2e_ms: Milliseconds | None = None
    new_connection: bool = False
    name_lookup_ms: Milliseconds | None = None
    connect_ms: Milliseconds | None = None
    tls_ms: Milliseconds | None = None
    sent_ms: Milliseconds | None = None
    http_version: str | None = None
    server_date: str | None = None
    server: str | None = None
    body_bytes: int = 0

    checks: dict[str, bool] = {}
    faults: dict[str, str] = {}

    @property
    def load(self) -> Load:
        """The load that the request was measured under."""
        return Load(0, self.rate_per_s) if self.rate_per_s else Load(self.concurrency or 1)

    @property
    def alone(self) -> bool:
        """Whether no other request was in flight at this backend."""
        return not self.rate_per_s and self.concurrency <= 1

    @property
    def prompt(self) -> tuple[str, str, int]:
        """(workload, case, turn): what was asked. Equal for all backends and repeats."""
        return self.workload, self.case, self.turn

    @property
    def first_token_ms(self) -> float | None:
        """Time to the first token of any kind: reasoning, content or tool call."""
        times = (self.first_reasoning_ms, self.first_content_ms, self.first_tool_ms)
        return min((t for t in times if t is not None), default=None)

    @property
    def prompt_tokens(self) -> int:
        """The server's count of prompt tokens; 0 where it sent none."""
        tokens = (self.usage or {}).get("prompt_tokens")
        return tokens if isinstance(tokens, int) else 0
