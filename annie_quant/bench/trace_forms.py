"""Traces that have lengths, times and shared blocks of prompts instead of texts, as requests.

    Mooncake  one line per request: timestamp (ms), input_length, output_length, hash_ids of 512 tokens each
    WEKA      one JSON object per session of an agent, in a file or a line: requests with t (s), in, out, hash_ids of block_size
              tokens, think_time and api_time; those of type "subagent" have requests of their own. Also AgentX's corpora
    OTLP      spans without content, of which the counts of tokens are known (data/otel.py)

WEKA's form as of 2026-11-28: callanjfox/kv-cache-tester at 94f6046d (docs/trace_replay_tester.md, and its traces), and
ai-dynamo/aiperf at df64ed7d (dataset/loader/weka_trace_models.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from annie_quant.core.errors import UsageError
from annie_quant.core.untrusted import decode_json
from annie_quant.data import otel
from annie_quant.data.logs import files_of
from annie_quant.judge.workloads import BLOCK_TOKENS, Case

MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 1 << 20, 1 << 17
MAX_LINE = 1 << 28  # bytes; a session of WEKA's has up to 4 MB
MAX_WAIT_S = 60.0  # of an agent's user, as kv-cache-tester's --max-delay

Tokens = Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
AnswerTokens = Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
T = TypeVar("T")


class MooncakeRow(msgspec.Struct):
    """One line of a Mooncake trace. timestamp: milliseconds; hash_ids: one per block of BLOCK_TOKENS tokens."""

    timestamp: Annotated[float, Meta(ge=0, lt=1e15)]
    input_length: Tokens
    output_length: AnswerTokens
    hash_ids: list[int | str] = []


class WekaCall(msgspec.Struct, tag_field="type", tag="n"):
    """A request of an agent. t: seconds since the session's start; of a subagent's in raw traces since its own."""

    t: Seconds
    prompt_tokens: Tokens = msgspec.field(name="in")
    answer_tokens: AnswerTokens = msgspec.field(name="out")
    hash_ids: list[int | str] = []
    api_time: Seconds | None = None
    think_time: Seconds | None = None


class WekaStream(WekaCall, tag_field="type", tag="s"):
    """A request whose answer was streamed."""


class WekaSubagent(msgspec.Struct, tag_field="type", tag="subagent"):
    """An agent that another one starts."""

    t: Seconds
    requests: list[WekaCall | WekaStream | WekaSubagent] = []


class WekaSession(msgspec.Struct):
    """One session of an agent. hash_id_scope: "local" where equal ids of two sessions are not the same text."""

    id: str | int
    requests: list[WekaCall | WekaStream | WekaSubagent]
    block_size: Annotated[int, Meta(ge=16, le=1 << 16)] = 64
    hash_id_scope: str = "local"


def read(path: Path, n: int | None = None) -> list[Case]:
    """Return a trace's first n requests in order of arrival; [] for a file of another form.

    Sessions of WEKA's form follow each other, and no wait is longer than MAX_WAIT_S. Raises UsageError for a record that is not of
    the first one's form.
    """
    form, rows = _form(path)
    found: Iterator[Case] = iter(())
    if form is WekaSession:
        found = _one_after_another(map(_agents, _converted(rows, WekaSession)))
    elif form is MooncakeRow:
        mooncake = _converted(rows, MooncakeRow)
        found = (_case(r.timestamp / 1e3, r.input_length, r.output_length, r.hash_ids) for r in mooncake)
    elif form is dict:
        found = _lengths([value for _, value in rows])
    return sorted(itertools.islice(found, n), key=_arrival)


def conversations(path: Path) -> Iterator[list[Case]]:
    """Yield the requests of each agent in a file of WEKA's form, of subagents too; none for a file of another form."""
    form, rows = _form(path)
    for session in _converted(rows, WekaSession) if form is WekaSession else ():
        yield from _agents(session).values()


def _case(time_s: float, prompt: int, answer: int, names: Iterable[int | str], block: int = BLOCK_TOKENS) -> Case:
    """Return a request without an id, with the blocks of its prompt that have names."""
    blocks = tuple(itertools.islice(map(str, names), -(-prompt // block)))
    case = Case(id="", blocks=blocks, block_tokens=block, prompt_tokens=prompt, arrival_s=time_s)
    return dataclasses.replace(case, max_tokens=max(1, answer))


def _arrival(case: Case) -> float:
    return case.arrival_s or 0.0


def _form(path: Path) -> tuple[type | None, Iterator[tuple[str, object]]]:
    """Return the type of a file's records, None for another form, and the records as (place, value)."""
    records = _json_records(path)
    first = next(records, ("", None))
    value = first[1] if isinstance(first[1], dict) else {}
    entries = value.get("requests")
    is_agent = isinstance(entries, list) and entries and isinstance(entries[0], dict) and "t" in entries[0]
    form = (
        dict if otel.is_export(value) else WekaSession if is_agent else MooncakeRow if "input_length" in value else None
    )
    return form, itertools.chain([first], records)


def _json_records(path: Path) -> Iterator[tuple[str, object]]:
    """Yield (place, value) of the lines of JSON, or the one document, of a file or of each file of a folder."""
    for file in files_of(path):
        with file.open("rb") as stream:
            lines = (
                (i, line) for i, line in enumerate(iter(lambda: stream.readline(MAX_LINE), b""), 1) if line.strip()
            )
            for index, (number, line) in enumerate(lines):
                try:
                    value = decode_json(line)
                except ValueError as error:
                    if index:
                        raise UsageError(f"{file.name}, line {number}: {error}") from None
                    if line.lstrip()[:1] in (b"{", b"["):  # else a text, which may be large
                        with contextlib.suppress(ValueError):
                            yield file.name, decode_json(line + stream.read())
                    break
                yield f"{file.name}, line {number}", value


def _converted(records: Iterable[tuple[str, object]], form: type[T]) -> Iterator[T]:
    for where, value in records:
        try:
            yield msgspec.convert(value, form)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: {error}", "a trace has one JSON object per line, all of one form") from None


def _agents(session: WekaSession) -> dict[str, list[Case]]:
    """Return the requests of a session by agent, in order of time."""
    scope = f"{session.id}/" if session.hash_id_scope == "local" else ""
    subagents = [entry for entry in session.requests if isinstance(entry, WekaSubagent)]
    # In raw traces a subagent's times start at its own start, in AgentX's corpora at the session's.
    relative = any(request.t < agent.t for agent in subagents for request in agent.requests)
    agents: dict[str, list[Case]] = {}

    def add(name: str, agent: WekaSession | WekaSubagent, start_s: float) -> None:
        before: WekaCall | None = None
        for index, entry in enumerate(sorted(agent.requests, key=lambda entry: entry.t)):
            if isinstance(entry, WekaSubagent):
                add(f"{name}/{index}", entry, start_s + entry.t * relative)
                continue
            between_s = max(0.0, entry.t - before.t - (before.api_time or 0.0)) if before else 0.0
            wait_s = between_s if entry.think_time is None or not before else entry.think_time
            lengths, names = (entry.prompt_tokens, entry.answer_tokens), (f"{scope}{block}" for block in entry.hash_ids)
            case = _case(start_s + entry.t, *lengths, names, session.block_size)
            agents.setdefault(name, []).append(dataclasses.replace(case, wait_s=min(wait_s, MAX_WAIT_S)))
            before = entry

    add("", session, 0.0)
    return agents


def _one_after_another(sessions: Iterable[Mapping[str, list[Case]]]) -> Iterator[Case]:
    """Yield the requests of all sessions, with waits of at most MAX_WAIT_S, which is also the time between two sessions."""
    time_s = -MAX_WAIT_S
    for agents in sessions:
        before_s = -math.inf
        for case in sorted(itertools.chain.from_iterable(agents.values()), key=_arrival):
            time_s += min(_arrival(case) - before_s, MAX_WAIT_S)
            before_s = _arrival(case)
            yield dataclasses.replace(case, arrival_s=time_s, wait_s=None)


def _lengths(exports: list[object]) -> Iterator[Case]:
    """Yield the calls of exports of which none has content: a log with content is sent as it is."""
    if not any("messages" in record for export in exports for record in otel.records(export)):
        for time_s, prompt, answer in itertools.chain.from_iterable(map(otel.lengths, exports)):
            if prompt <= MAX_PROMPT_TOKENS and answer <= MAX_OUTPUT_TOKENS:
                yield _case(time_s, prompt, answer, ())
