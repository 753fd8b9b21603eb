"""records.jsonl: one line per request of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, TypedDict

import msgspec
from msgspec import Meta

from annie_quant.core.errors import UsageError
from annie_quant.documents.reading import Count, Milliseconds, decode, encode, salvage_line

MAX_EVENT_TOKENS = 1000  # values of one event in `itl_token_ms`


class Load(msgspec.Struct, frozen=True):
    """How requests reach a server.

    concurrency: requests in flight (closed loop).
    rate_per_s: mean arrivals per second (open loop).
    trace_speed: factor on the speed of a trace's arrivals. With this or rate_per_s, concurrency is
        0.
    """

    concurrency: int = 1
    rate_per_s: float | None = None
    trace_speed: float | None = None

    def __post_init__(self) -> None:
        if self.trace_speed is not None and not 0 < self.trace_speed < float("inf"):
            raise UsageError(f"a trace's speed must be more than 0, got {self.trace_speed}")
        if self.rate_per_s is None and self.trace_speed is None and self.concurrency < 1:
            raise UsageError(f"concurrency must be 1 or more, got {self.concurrency}")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise UsageError(
                f"an arrival rate must be more than 0 per second, got {self.rate_per_s}"
            )

    @property
    def label(self) -> str:
        """Return the suffix of a workload's name for this load.

        "" (one in flight), "@8" (eight in flight), "@2/s" (two per second), "@trace" (as a trace
        has them), "@trace-x2" (twice as fast).
        """
        if self.trace_speed is not None:
            return "@trace" if self.trace_speed == 1 else f"@trace-x{self.trace_speed:g}"
        if self.rate_per_s is not None:
            return f"@{self.rate_per_s:g}/s"
        return f"@{self.concurrency}" if self.concurrency > 1 else ""


class ToolCall(TypedDict, total=False):
    """One call of a tool; `arguments` is a JSON string, as the server sent it."""

    id: str | None
    name: str | None
    arguments: Any


# Finish reasons of answers that the model ended; with any other ("length", "content_filter",
# "abort") the answer was cut.
COMPLETE_REASONS = ("stop", "tool_calls", "function_call", "stop_sequence", "eos_token")


def incomplete(error: str | None, finish_reason: str | None) -> str:
    """Return why an answer is not complete, "" for one that is."""
    if error:
        return f"the request failed: {error}"
    if not finish_reason:
        return "it ended without a finish reason"
    if finish_reason == "length":
        return "it was cut at max_tokens"
    return (
        "" if finish_reason in COMPLETE_REASONS else f"it ended with the reason {finish_reason!r}"
    )


class RequestLoad(msgspec.Struct, kw_only=True):
    """How a request reached the server, and how busy the client's machine was after it."""

    concurrency: Count = 1  # requests in flight; 0 in an open loop
    rate_per_s: Annotated[float, Meta(ge=0)] | None = (
        None  # mean arrivals per second of an open loop
    )
    trace_speed: Annotated[float, Meta(ge=0)] | None = (
        None  # how many times as fast a trace's requests arrive
    )
    arrival_s: float | None = (
        None  # planned start of an open loop's request, or of one that waits, in seconds
    )
    depth: int | None = (
        None  # prompt tokens that the workload aims at; `prompt_tokens` has how many there were
    )
    prefix: Literal["hit", "miss"] | None = (
        None  # whether its beginning should be in the prefix cache
    )
    n_tools: int = 0  # tools on offer
    started_at: str | float | None = None  # ISO 8601, UTC
    load_per_core: float | None = None  # load average of the last minute per core
    invalid: str | None = None  # why its times do not count: the machine's state (bench/machine.py)

    @property
    def level(self) -> Load:
        """The load of the plan that the request was measured under."""
        if self.trace_speed:
            return Load(0, None, self.trace_speed)
        return Load(0, self.rate_per_s) if self.rate_per_s else Load(self.concurrency or 1)

    @property
    def alone(self) -> bool:
        """Whether no other request was in flight at this backend."""
        return not self.rate_per_s and not self.trace_speed and self.concurrency <= 1


class Answer(msgspec.Struct):
    """The answer to one request: from a server, from transformers, or from a record of a benchmark."""

    text: str = ""  # content, without reasoning
    reasoning: str = ""  # thinking, in its own field of the stream
    tool_calls: list[ToolCall] = []  # in the order of the stream
    finish_reason: str | None = None  # as the server sent it
    error: str | None = None  # one line
    completion_tokens: Annotated[int, Meta(ge=-(10**15), le=10**15)] | None = (
        None  # reasoning included
    )
    tokens_estimated: bool = False  # counted from events, because the server reported no count
    status: int = 0  # HTTP status; 0: no answer
    cause: str | None = (
        None  # the error's short form (annie_quant.stream.answer), "hung" or "not_sent"
    )
    warnings: list[str] = []  # about the stream, one line each

    @property
    def silent(self) -> bool:
        """Whether there is neither visible text nor a tool call."""
        return not self.text.strip() and not self.tool_calls

    @property
    def fault(self) -> str:
        """Why the answer is not complete: an error, no finish reason, or a cut at max_tokens; "" for a complete answer."""
        return incomplete(self.error, self.finish_reason)

    @property
    def counted_tokens(self) -> int | None:
        """The server's own count of tokens; None where it reported none."""
        return None if self.tokens_estimated else self.completion_tokens


class RequestTokens(msgspec.Struct, kw_only=True):
    """Counts of tokens."""

    usage: dict[str, Any] | None = None  # as the server sent it
    token_events: Count | None = None  # events with text, reasoning or a tool call
    tokens_per_event: Annotated[float, Meta(ge=0, le=1e12)] | None = (
        None  # the server's count over these events
    )
    event_tokens: list[
        Count
    ] = []  # tokens of each such event but the first, where each has the server's count
    cached_tokens: Count | None = (
        None  # prompt tokens from the server's prefix cache; None: it does not report them
    )
    drafted_tokens: Annotated[float, Meta(ge=0, le=1e15)] | None = (
        None  # by a speculative decoder for this request
    )
    accepted_tokens: Annotated[float, Meta(ge=0, le=1e15)] | None = None  # of those
    # "timings": llama.cpp's, of this request. "metrics": vLLM's counters over the requests that
    # were sent together, split by their completion tokens.
    acceptance_source: Literal["timings", "metrics"] | None = None

    @property
    def acceptance(self) -> float | None:
        """Share of drafted tokens that were accepted; None where nothing was drafted, or it is unknown."""
        if not self.drafted_tokens or self.accepted_tokens is None:
            return None
        return min(1.0, self.accepted_tokens / self.drafted_tokens)

    @property
    def computed_tokens(self) -> int | None:
        """Prompt tokens that were not in a cache; None where the server does not report both counts."""
        if not self.prompt_tokens or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens

    @property
    def prompt_tokens(self) -> int:
        """The server's count of prompt tokens; 0 where it sent none."""
        tokens = (self.usage or {}).get("prompt_tokens")
        return tokens if isinstance(tokens, int) else 0


class RequestTimings(msgspec.Struct, kw_only=True):
    """Times of a request and of its connection.

    Names in _ms are milliseconds after the request was handed to its connection
    (annie_quant.stream.decode defines each).
    """

    first_byte_ms: Milliseconds | None = None  # of the body
    first_event_ms: Milliseconds | None = None  # of any kind
    first_reasoning_ms: Milliseconds | None = None  # first event with reasoning
    first_content_ms: Milliseconds | None = None  # first event with text
    first_tool_ms: Milliseconds | None = None  # first event with a tool call
    last_token_ms: Milliseconds | None = None  # last event with text, reasoning or a tool call
    done_ms: Milliseconds | None = None  # [DONE]
    e2e_ms: Milliseconds | None = None  # end of the answer
    tpot_ms: Milliseconds | None = None  # (last - first token) / (completion_tokens - 1)
    itl_ms: list[Milliseconds] = []  # gaps between events with tokens
    decode_tok_s: Annotated[float, Meta(ge=-1e12, le=1e12)] | None = (
        None  # tokens per second after the first
    )
    merged_reads: int = 0  # network reads with more than one event that has tokens
    server_timings: dict[str, Any] | None = None  # llama.cpp's own account
    clock: str | None = None  # "kernel" or "user": where the stamps are from
    realtime: bool | None = None  # the client had a real-time priority
    unstamped_events: int = 0  # events without a kernel stamp
    started_s: float | None = None  # seconds after the start of the client's run
    started_unix_s: float | None = None  # seconds since 1970
    # Open loop: times from the intended start, which include the wait for a free connection.
    wait_ms: Milliseconds | None = None  # from the intended start to the real one
    scheduled_first_content_ms: Milliseconds | None = None  # first event with text
    scheduled_e2e_ms: Milliseconds | None = None  # end of the answer
    # Phases of the connection, each with its own length.
    new_connection: bool = False  # the request opened it
    name_lookup_ms: Milliseconds | None = None  # DNS
    connect_ms: Milliseconds | None = None  # TCP
    tls_ms: Milliseconds | None = None  # TLS
    sent_ms: Milliseconds | None = None  # the request itself
    http_version: str | None = None  # of the answer
    server_date: str | None = None  # the answer's Date header
    server: str | None = None  # the answer's Server header
    body_bytes: int = 0  # of the answer

    @property
    def first_token_ms(self) -> float | None:
        """Time to the first token of any kind: reasoning, content or tool call."""
        times = (self.first_reasoning_ms, self.first_content_ms, self.first_tool_ms)
        return min((t for t in times if t is not None), default=None)


class Judgement(msgspec.Struct, kw_only=True):
    """What the gates found in the answer."""

    checks: dict[str, bool] = {}  # gate → passed, for the gates that apply
    faults: dict[str, str] = {}  # gate → reason, for the checks that failed
    # An answer on a ladder (bench/cliffs.py), whose gates decide nothing and are not in `checks`
    right: bool | None = None


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request of a benchmark: its identity, and what was measured of it.

    A line of records.jsonl has the fields of the groups next to each other, without the groups.
    """

    id: str  # backend, workload, load, case, repeat and turn
    backend: str  # its name in the run
    workload: str  # its name, without the load
    case: str  # its id in the workload
    turn: int = 0  # of a conversation, from 0
    repeat: int = 0  # of the same prompt, from 0
    block: int = -1  # number of the interleaved block; -1: a warm-up or the smoke question
    warmup: bool = False  # never counted
    cold: bool = False  # the first request to a server
    # The first request of this execution to this server of about this number of computed tokens:
    # kernels may have been compiled and tuned during it.
    first_of_length: bool = False
    session: int = 0  # number of the execution in this run directory, from 1
    model: str | None = None  # the name that the request asked for
    stream: str = ""  # folder of the raw frames
    request_sha256: str = ""  # of the request's body
    prompt_sha256: str = (
        ""  # of what the case asks (judge.prompt_sha256); "" in a record of version 0.2.0 or older
    )
    load: RequestLoad = msgspec.field(default_factory=RequestLoad)
    answer: Answer = msgspec.field(default_factory=Answer)
    tokens: RequestTokens = msgspec.field(default_factory=RequestTokens)
    timings: RequestTimings = msgspec.field(default_factory=RequestTimings)
    judgement: Judgement = msgspec.field(default_factory=Judgement)

    @property
    def prompt(self) -> tuple[str, str, int]:
        """(workload, digest of the case's content, turn): what was asked.

        Equal for all backends and repeats, whatever the ids.
        """
        return self.workload, self.prompt_sha256 or self.case, self.turn

    @property
    def itl_token_ms(self) -> list[float]:
        """Return the ITL per token where an event may hold several.

        Each gap is divided by the tokens of its event; where only the whole answer was counted, by
        their mean. [] where the server counted none.
        """
        tokens = self.tokens
        gaps = self.timings.itl_ms
        if len(tokens.event_tokens) == len(gaps) and gaps:
            result: list[float] = []
            for gap, n in zip(gaps, tokens.event_tokens, strict=True):
                result += [gap / n] * min(n, MAX_EVENT_TOKENS) if n else []
            return result
        count = self.answer.counted_tokens
        if not count or count < 2 or not gaps:
            return []
        return [gap * len(gaps) / (count - 1) for gap in gaps]


# ---- records.jsonl: one flat line per request

RECORD_GROUPS: dict[str, type[msgspec.Struct]] = {
    "load": RequestLoad,
    "answer": Answer,
    "tokens": RequestTokens,
    "timings": RequestTimings,
    "judgement": Judgement,
}


def _assembled(read: Callable[[type[Any]], Any]) -> RequestRecord:
    """Return the record of a line; `read` returns the fields of a type, which ignores those of the others."""
    record: RequestRecord = read(RequestRecord)
    for name, kind in RECORD_GROUPS.items():
        setattr(record, name, read(kind))
    return record


def set_answer(record: RequestRecord, received: Mapping[str, Any]) -> None:
    """Set the answer, tokens and times of a record from the stream client's fields of the request."""
    for name in ("answer", "tokens", "timings"):
        kind = RECORD_GROUPS[name]
        fields = {field: received[field] for field in kind.__struct_fields__ if field in received}
        setattr(record, name, kind(**fields))


def decode_record(line: bytes, where: str, hint: str = "") -> RequestRecord:
    """Return the record of a line; faults as in `decode`."""
    return _assembled(lambda kind: decode(kind, line, where, hint=hint))


def salvage_record(line: bytes) -> RequestRecord:
    """Return the record of a line as `salvage_line` reads it."""
    return _assembled(lambda kind: salvage_line(kind, line))


def encode_record(record: RequestRecord) -> bytes:
    """Return a record as a line of records.jsonl, without the newline."""
    fields = msgspec.structs.asdict(record)
    groups = [fields.pop(name) for name in RECORD_GROUPS]
    for group in groups:
        fields |= msgspec.structs.asdict(group)
    return encode(fields)


def by_backend(
    records: Iterable[RequestRecord], names: Iterable[str]
) -> dict[str, list[RequestRecord]]:
    """Return each backend's records, in their order; an empty list for a name without any."""
    sides: dict[str, list[RequestRecord]] = {name: [] for name in names}
    for record in records:
        if record.backend in sides:
            sides[record.backend].append(record)
    return sides
