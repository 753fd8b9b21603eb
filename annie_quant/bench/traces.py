"""Requests of a log as workloads: conversations that are replayed, and requests that arrive at their recorded times.

    replay(logs)   conversations turn by turn: the user's texts and the logged results of tools; the server's own answers are kept
    trace(file)    one request per record, at its time, with the history that it had. Of OpenTelemetry spans without content
                   (data/otel.py) each request has text of the recorded length

annie_quant.data.logs has the formats. Secrets in logs are masked, because a run directory has all prompts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.untrusted import decode_json
from annie_quant.data import otel
from annie_quant.data.conversations import Conversation, called
from annie_quant.data.log_sample import max_tokens, without_thinking
from annie_quant.data.logs import Problems, files_of, read_logs
from annie_quant.data.masking import Scanner
from annie_quant.documents import ChatMessage, ContextFile
from annie_quant.judge.answers import Tool
from annie_quant.judge.gates import REFERENCE_GATES
from annie_quant.judge.workloads import Case, Turn, Workload

_PathLike = str | os.PathLike[str]
_T = TypeVar("_T")

MAX_PROMPT_TOKENS = 1 << 20
_MAX_ANSWER_TOKENS = 1 << 17
MAX_LINE_BYTES = 1 << 28
_ANSWER_TOKENS = 256  # of a recorded length that is 0

# ---- conversations


def replay(paths: Iterable[_PathLike], n: int, seed: int = 0) -> Workload:
    """Return a workload of at most n logged conversations, a seeded sample. Raises UsageError where the logs have none."""
    problems = Problems()
    sample = _sampled(read_logs(list(paths), problems), n, seed)
    if not sample:
        reasons = "; ".join(problems.lines()) or "no records"
        raise UsageError(
            f"the logs have no conversation to replay: {reasons}", "--replay takes chat logs"
        )
    scanner = Scanner()
    cases = []
    lengths: list[int] = []
    for number, conversation in sample:
        # Every conversation that is read has a user's message.
        turns = turns_of(conversation.messages)
        lengths += [_length(m) for m in conversation.messages if m["role"] == "assistant"]
        expected = [{} if t.calls is None else {"logged": {"calls": t.calls}} for t in turns]
        case = Case(
            id=f"replay-{number:05d}",
            turns=tuple(scanner.masked([t.turn for t in turns])),
            tools=_tools(conversation, scanner),
            system=scanner.masked(conversation.system or ""),
            expect={"turns": expected},
        )
        cases.append(case)
    description = "Logged conversations, turn by turn, with their tools' results"
    return _workload("replay", description, cases, max_tokens(lengths))


def _sampled(items: Iterable[_T], n: int, seed: int) -> list[tuple[int, _T]]:
    """Return (position, item) of at most n items, in order; only these are in memory."""
    rng = random.Random(f"{seed}/replay")
    sample: list[tuple[int, _T]] = []
    for number, item in enumerate(items):
        at = len(sample) if len(sample) < n else rng.randrange(number + 1)
        if at < n:
            sample[at : at + 1] = [(number, item)]
    return sorted(sample, key=lambda pair: pair[0])


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
    if any(case.tools for case in cases):
        gates = (*gates, "logged_tool")
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
        sha256=sha256_text(msgspec.json.encode([dataclasses.asdict(c) for c in cases]).decode()),
        gates=gates,
    )


# ---- traces


def trace(path: _PathLike, n: int) -> Workload:
    """Return a workload of a trace's first n requests, with their arrival times.

    Raises UsageError for a file without requests, and for a log without times.
    """
    spans = sorted(itertools.islice(_recorded_lengths(Path(path)), n))
    return _lengths_trace(spans) if spans else _log_trace(path, n)


def _lengths_trace(spans: Sequence[tuple[float, int, int]]) -> Workload:
    """Return a workload of requests of which the start, the prompt's tokens and the answer's tokens are known."""
    start_s = spans[0][0]
    cases = []
    for number, (time_s, prompt_tokens, answer_tokens) in enumerate(spans):
        case = Case(
            id=f"trace-{number:05d}",
            prompt_tokens=prompt_tokens,
            max_tokens=max(1, answer_tokens),
            arrival_s=time_s - start_s,
        )
        cases.append(case)
    workload = _workload(
        "trace", "Requests of a trace: lengths and arrivals", cases, _ANSWER_TOKENS
    )
    return dataclasses.replace(
        workload,
        gates=("non_empty",),
        extra={"ignore_eos": True},
        context=ContextFile(tokens=0),
    )


def _recorded_lengths(path: Path) -> Iterator[tuple[float, int, int]]:
    """Yield (seconds since 1970, prompt tokens, answer tokens) of OpenTelemetry spans without content.

    A log with content, which is sent as it is, and a file of another form yield nothing.
    """
    documents = _json_documents(path)
    first = next(documents, None)
    if not otel.is_export(first):
        return
    exports = [first, *documents]
    records = itertools.chain.from_iterable(map(otel.records, exports))
    if any("messages" in record for record in records):
        return
    for time_s, prompt, answer in itertools.chain.from_iterable(map(otel.lengths, exports)):
        if prompt <= MAX_PROMPT_TOKENS and answer <= _MAX_ANSWER_TOKENS:
            yield time_s, prompt, answer


def _json_documents(path: Path) -> Iterator[object]:
    """Yield the lines of JSON, or the one document, of a file or of each file of a folder; nothing of another text."""
    for file in files_of(path):
        with file.open("rb") as stream:
            first = b""
            while not first.strip() and (line := stream.readline(MAX_LINE_BYTES)):
                first = line
            try:
                yield decode_json(first)
            except ValueError:
                if first.lstrip()[:1] in (b"{", b"["):  # else a text, which may be large
                    with contextlib.suppress(ValueError):
                        yield decode_json(first + stream.read())
                continue
            while line := stream.readline(MAX_LINE_BYTES):
                if line.strip():
                    yield _decoded(line, file)


def _decoded(line: bytes, file: Path) -> object:
    try:
        return decode_json(line)
    except ValueError as error:
        raise UsageError(f"{file.name}: {error}", "a trace has one JSON object per line") from None


@dataclass
class _TimedCase:
    """A logged request.

    time_s: when it was sent, in seconds since 1970.
    max_tokens: its own limit; None: it has none.
    """

    time_s: float
    max_tokens: int | None
    case: Case


def _log_trace(path: _PathLike, n: int) -> Workload:
    scanner = Scanner()
    problems = Problems()
    lengths: list[int] = []
    requests: list[_TimedCase] = []
    for number, conversation in enumerate(read_logs([path], problems)):
        prompt = list(conversation.messages)
        answers = [] if prompt[-1]["role"] in ("user", "tool") else [prompt.pop()]
        if conversation.time_s is None or not prompt:
            reason = "no time" if conversation.time_s is None else "no prompt"
            problems.add(reason, conversation.source)
            continue
        lengths += map(_length, answers)
        messages = [without_thinking(m) for m in scanner.conversation(prompt)]
        if conversation.system is not None:
            messages.insert(0, {"role": "system", "content": scanner.masked(conversation.system)})
        calls = [name for m in answers for name in called(m)]
        case = Case(
            id=f"trace-{number:05d}",
            messages=tuple(messages),
            tools=_tools(conversation, scanner),
            expect={"logged": {"calls": calls}} if answers else {},
        )
        requests.append(_TimedCase(conversation.time_s, conversation.max_tokens, case))
        if len(requests) >= n:
            break
    if not requests:
        reasons = "; ".join(problems.lines()) or "no records"
        raise UsageError(
            f"{os.fspath(path)} has no requests with times: {reasons}",
            "use --replay for conversations without times, with --rate",
        )
    requests.sort(key=lambda request: request.time_s)
    start_s = requests[0].time_s
    usual = max_tokens(lengths)
    cases = []
    for request in requests:
        # A request's own limit may exceed a smaller server's context.
        limit = min(request.max_tokens, usual) if request.max_tokens else None
        arrival_s = request.time_s - start_s
        cases.append(dataclasses.replace(request.case, arrival_s=arrival_s, max_tokens=limit))
    return _workload("trace", "Logged requests at their recorded times", cases, usual)
