"""Requests of a log or a trace as workloads: conversations that are replayed, and requests that arrive at their recorded times.

    replay(logs)   conversations turn by turn: the user's texts and the logged results of tools; the server's own answers are kept.
                   Of an agent's trace: its requests, each as long after the answer before it as in the trace
    trace(file)    one request per record, at its time. A trace of lengths (below) becomes text of that length, and
                   blocks of equal name equal text. Any log with times (annie_quant.data.logs has the formats) is sent as it is,
                   each request with the history that it had.

Traces that have lengths, times and shared blocks of prompts instead of texts:

    Mooncake  one line per request: timestamp (ms), input_length, output_length, hash_ids of 512 tokens each
    WEKA      one JSON object per session of an agent, in a file or a line: requests with t (s), in, out, hash_ids of block_size
              tokens, think_time and api_time; those of type "subagent" have requests of their own. Also AgentX's corpora
    OTLP      spans without content, of which the counts of tokens are known (data/otel.py)

WEKA's form as of 2026-11-28: callanjfox/kv-cache-tester at 94f6046d (docs/trace_replay_tester.md, and its traces), and
ai-dynamo/aiperf at df64ed7d (dataset/loader/weka_trace_models.py).

Secrets in logs are masked, because a run directory has all prompts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.untrusted import decode_json
from annie_quant.data import otel
from annie_quant.data.log_records import Conversation, called
from annie_quant.data.log_sample import max_tokens, plain
from annie_quant.data.logs import Problems, files_of, read_logs
from annie_quant.data.masking import Scanner
from annie_quant.documents import ChatMessage, ContextFile
from annie_quant.judge.answers import Tool
from annie_quant.judge.gates import REFERENCE_GATES
from annie_quant.judge.workloads import BLOCK_TOKENS, Case, Turn, Workload

# ---- traces of lengths

MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 1 << 20, 1 << 17
MAX_LINE = 1 << 28  # bytes; a session of WEKA's has up to 4 MB
MAX_WAIT_S = 60.0  # of an agent's user, as kv-cache-tester's --max-delay

Tokens = Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
AnswerTokens = Annotated[int, Meta(ge=0, le=MAX_OUTPUT_TOKENS)]
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]


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


def read_lengths(path: Path, n: int | None = None) -> list[Case]:
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
        found = (
            _case(r.timestamp / 1e3, r.input_length, r.output_length, r.hash_ids) for r in mooncake
        )
    elif form is dict:
        found = _lengths([value for _, value in rows])
    return sorted(itertools.islice(found, n), key=_arrival)


def agents_of(path: Path) -> Iterator[list[Case]]:
    """Yield the requests of each agent in a file of WEKA's form, of subagents too; none for a file of another form."""
    form, rows = _form(path)
    for session in _converted(rows, WekaSession) if form is WekaSession else ():
        yield from _agents(session).values()


def _case(
    time_s: float, prompt: int, answer: int, names: Iterable[int | str], block: int = BLOCK_TOKENS
) -> Case:
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
    is_agent = (
        isinstance(entries, list) and entries and isinstance(entries[0], dict) and "t" in entries[0]
    )
    form = (
        dict
        if otel.is_export(value)
        else WekaSession
        if is_agent
        else MooncakeRow
        if "input_length" in value
        else None
    )
    return form, itertools.chain([first], records)


def _json_records(path: Path) -> Iterator[tuple[str, object]]:
    """Yield (place, value) of the lines of JSON, or the one document, of a file or of each file of a folder."""
    for file in files_of(path):
        with file.open("rb") as stream:
            lines = (
                (i, line)
                for i, line in enumerate(iter(lambda: stream.readline(MAX_LINE), b""), 1)
                if line.strip()
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
            raise UsageError(
                f"{where}: {error}", "a trace has one JSON object per line, all of one form"
            ) from None


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
            lengths, names = (
                (entry.prompt_tokens, entry.answer_tokens),
                (f"{scope}{block}" for block in entry.hash_ids),
            )
            case = _case(start_s + entry.t, *lengths, names, session.block_size)
            agents.setdefault(name, []).append(
                dataclasses.replace(case, wait_s=min(wait_s, MAX_WAIT_S))
            )
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


PathLike = str | os.PathLike[str]
T = TypeVar("T")

MAX_CHARACTERS = 2_000_000  # of one conversation: over 256k tokens
# ---- conversations


def replay(paths: Iterable[PathLike], n: int, seed: int = 0) -> Workload:
    """Return a workload of at most n logged conversations, a seeded sample. Raises UsageError where the logs have none."""
    problems, paths = Problems(), list(paths)
    agents = itertools.chain.from_iterable(agents_of(Path(path)) for path in paths)
    if picked := _sampled(agents, n, seed):
        return _agents_workload(picked)
    chosen = _sampled(read_logs(paths, problems, MAX_CHARACTERS), n, seed)
    if not chosen:
        reasons = "; ".join(problems.lines()) or "no records"
        raise UsageError(
            f"the logs have no conversation to replay: {reasons}", "--replay takes chat logs"
        )
    scanner, cases, lengths = Scanner(), [], []
    for number, conversation in chosen:
        turns = turns_of(
            conversation.messages
        )  # every conversation that is read has a user's message
        lengths += [_length(m) for m in conversation.messages if m["role"] == "assistant"]
        cases.append(
            Case(
                id=f"replay-{number:05d}",
                turns=tuple(scanner.masked([t.turn for t in turns])),
                tools=_tools(conversation, scanner),
                system=scanner.masked(conversation.system or ""),
                expect={
                    "turns": [
                        {} if t.calls is None else {"logged": {"calls": t.calls}} for t in turns
                    ]
                },
            )
        )
    return _workload(
        "replay",
        "Logged conversations, turn by turn, with their tools' results",
        cases,
        max_tokens(lengths),
    )


def _sampled(items: Iterable[T], n: int, seed: int) -> list[tuple[int, T]]:
    """Return (position, item) of at most n items, in order; only these are in memory."""
    rng, chosen = random.Random(f"{seed}/replay"), list[tuple[int, T]]()
    for number, item in enumerate(items):
        at = len(chosen) if len(chosen) < n else rng.randrange(number + 1)
        if at < n:
            chosen[at : at + 1] = [(number, item)]
    return sorted(chosen, key=lambda pair: pair[0])


def _agents_workload(agents: Iterable[tuple[int, Sequence[Case]]]) -> Workload:
    """Return a workload of agents' conversations, of which each request has its own text."""
    cases = []
    for number, requests in agents:
        name = f"replay-{number:05d}"
        steps = (
            dataclasses.replace(_named(c, f"{name}/{i}"), arrival_s=None)
            for i, c in enumerate(requests)
        )
        cases.append(Case(id=name, steps=tuple(steps)))
    return _described_workload(
        "replay", "Agents of a trace: their lengths, shared prefixes and waits", cases
    )


@dataclass
class LoggedTurn:
    """What comes before one of the model's answers: a user's text, or the results of the calls that the answer before made.

    calls: names of the functions that production's answer called; None where the log has no answer to it.
    """

    content: str = ""
    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    calls: list[str] | None = None

    @property
    def turn(self) -> Turn:
        return {"results": self.results} if self.results else self.content


def turns_of(messages: Sequence[ChatMessage]) -> list[LoggedTurn]:
    """Return a conversation's turns, in order. Messages before the user's first one are left out."""
    turns: list[LoggedTurn] = []
    functions: dict[str, Mapping[str, Any]] = {}
    last = ""
    for message in messages:
        role = message["role"]
        if role == "user" and last == "user":
            turns[-1].content += f"\n\n{message['content']}"
        elif role == "user":
            turns.append(LoggedTurn(message["content"]))
        elif role == "assistant":
            functions = {str(c.get("id")): c["function"] for c in message.get("tool_calls") or ()}
            if turns:
                turns[-1].calls = [*(turns[-1].calls or ()), *called(message)]
        elif role == "tool" and turns:
            if last != "tool":
                turns.append(LoggedTurn())
            function = functions.get(str(message.get("tool_call_id")), {})
            name = str(message.get("name") or function.get("name") or "")
            arguments = function.get("arguments") or {}
            turns[-1].results.append(
                {"name": name, "content": message["content"], "arguments": arguments}
            )
        last = role
    return turns


def _length(answer: ChatMessage) -> int:
    """Return the approximate number of characters of an answer's text and calls."""
    return len(answer["content"]) + len(str(answer.get("tool_calls") or ""))


def _tools(conversation: Conversation, scanner: Scanner) -> tuple[Tool, ...]:
    return tuple(scanner.masked(conversation.tools or []))


def _workload(name: str, description: str, cases: Sequence[Case], tokens: int) -> Workload:
    gates = ("non_empty", "thinking_leak", *REFERENCE_GATES)
    with_tools = any(case.tools for case in cases)
    content = [
        [
            c.id,
            c.system,
            [*c.turns],
            [*c.messages],
            [*(c.tools or ())],
            c.arrival_s,
            c.blocks,
            *c.steps,
        ]
        for c in cases
    ]
    return Workload(
        name=name,
        description=description,
        persona=None,
        system=None,
        tools=None,
        thinking=False,
        max_tokens=tokens,
        temperature=0.0,
        cases=tuple(cases),
        default=False,
        sha256=sha256_text(msgspec.json.encode(content).decode()),
        gates=(*gates, "logged_tool") if with_tools else gates,
    )


# ---- traces


def trace(path: PathLike, n: int) -> Workload:
    """Return a workload of a trace's first n requests, with their arrival times.

    Raises UsageError for a file without requests, and for a log without times.
    """
    requests = read_lengths(Path(path), n)
    if not requests:
        return _log_trace(path, n)
    first = requests[0].arrival_s or 0.0
    cases = [
        dataclasses.replace(
            _named(case, f"trace-{number:05d}"), arrival_s=(case.arrival_s or 0.0) - first
        )
        for number, case in enumerate(requests)
    ]
    return _described_workload(
        "trace", "Requests of a trace: its lengths, shared prefixes and arrivals", cases
    )


def _named(case: Case, name: str) -> Case:
    """Return a request of which a trace has lengths. Parts of its prompt without a name are text of this request alone."""
    own = (
        f"{name}/{i}" for i in range(len(case.blocks), -(-case.prompt_tokens // case.block_tokens))
    )
    return dataclasses.replace(case, id=name, blocks=(*case.blocks, *own))


def _described_workload(name: str, description: str, cases: Sequence[Case]) -> Workload:
    extra, context = {"ignore_eos": True}, ContextFile(tokens=0)
    workload = _workload(name, description, cases, 256)
    return dataclasses.replace(workload, gates=("non_empty",), extra=extra, context=context)


def _log_trace(path: PathLike, n: int) -> Workload:
    scanner, problems = Scanner(), Problems()
    lengths: list[int] = []
    requests: list[tuple[float, int | None, Case]] = []
    for number, conversation in enumerate(read_logs([path], problems, MAX_CHARACTERS)):
        prompt = list(conversation.messages)
        answers = [] if prompt[-1]["role"] in ("user", "tool") else [prompt.pop()]
        if conversation.time_s is None or not prompt:
            problems.add(
                "no time" if conversation.time_s is None else "no prompt", conversation.source
            )
            continue
        lengths += map(_length, answers)
        messages = [plain(m) for m in scanner.conversation(prompt)]
        if conversation.system is not None:
            messages.insert(0, {"role": "system", "content": scanner.masked(conversation.system)})
        calls = [name for m in answers for name in called(m)]
        case = Case(
            id=f"trace-{number:05d}",
            messages=tuple(messages),
            tools=_tools(conversation, scanner),
            expect={"logged": {"calls": calls}} if answers else {},
            arrival_s=0.0,
        )
        requests.append((conversation.time_s, conversation.max_tokens, case))
        if len(requests) >= n:
            break
    if not requests:
        reasons = "; ".join(problems.lines()) or "no records"
        raise UsageError(
            f"{os.fspath(path)} has no requests with times: {reasons}",
            "use --replay for conversations without times, with --rate",
        )
    requests.sort(key=lambda item: item[0])
    first = requests[0][0]
    usual = max_tokens(lengths)  # a request's own limit may exceed a smaller server's context
    cases = [
        dataclasses.replace(case, arrival_s=time_s - first, max_tokens=limit and min(limit, usual))
        for time_s, limit, case in requests
    ]
    return _workload("trace", "Logged requests at their recorded times", cases, usual)
