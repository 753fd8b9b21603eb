"""Requests of a log or a trace as workloads: conversations that are replayed, and requests that arrive at their recorded times.

    replay(logs)   conversations turn by turn: the user's texts and the logged results of tools; the server's own answers are kept
    trace(file)    one request per record, at its time. Mooncake's traces (timestamp, input_length, output_length, hash_ids) name
                   the blocks of a prompt: they become text of that length, and equal blocks equal text. Any log with times
                   (annie_quant.data.logs has the formats) is sent as it is, each request with the history that it had.

Secrets in logs are masked, because a run directory has all prompts.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.core.untrusted import decode_json
from annie_quant.data.log_records import Conversation, called
from annie_quant.data.log_sample import max_tokens, plain
from annie_quant.data.logs import Problems, read_logs
from annie_quant.data.masking import Scanner
from annie_quant.documents import ChatMessage, ContextFile
from annie_quant.judge.answers import Tool
from annie_quant.judge.gates import REFERENCE_GATES
from annie_quant.judge.workloads import BLOCK_TOKENS, Case, Turn, Workload

PathLike = str | os.PathLike[str]

MAX_CHARACTERS = 2_000_000  # of one conversation: over 256k tokens
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 1 << 20, 1 << 17
MAX_TRACE_LINE = 1 << 20  # bytes


class MooncakeRow(msgspec.Struct):
    """One line of a Mooncake trace.

    timestamp: milliseconds.
    hash_ids: one per block of BLOCK_TOKENS tokens.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int | str] = []

    def __post_init__(self) -> None:
        if not 0 <= self.timestamp < 1e15:
            raise ValueError(f"timestamp {self.timestamp}, expected 0 or more milliseconds")
        if not 0 < self.input_length <= MAX_PROMPT_TOKENS or not 0 <= self.output_length <= MAX_OUTPUT_TOKENS:
            raise ValueError(
                f"input_length {self.input_length} and output_length {self.output_length} are not a request"
            )


# ---- conversations


def replay(paths: Iterable[PathLike], n: int, seed: int = 0, problems: Problems | None = None) -> Workload:
    """Return a workload of at most n logged conversations, a seeded sample. Raises UsageError where the logs have none."""
    problems, rng = problems or Problems(), random.Random(f"{seed}/replay")
    chosen: list[tuple[int, Conversation, list[LoggedTurn]]] = []
    for number, conversation in enumerate(read_logs(paths, problems, MAX_CHARACTERS)):
        turns = turns_of(conversation.messages)  # every conversation that is read has a user's message
        at = len(chosen) if len(chosen) < n else rng.randrange(number + 1)
        if at < n:
            chosen[at : at + 1] = [(number, conversation, turns)]
    if not chosen:
        reasons = "; ".join(problems.lines()) or "no records"
        raise UsageError(f"the logs have no conversation to replay: {reasons}", "--replay takes chat logs")
    scanner, cases, lengths = Scanner(), [], []
    for number, conversation, turns in sorted(chosen, key=lambda item: item[0]):
        lengths += [_length(m) for m in conversation.messages if m["role"] == "assistant"]
        cases.append(
            Case(
                id=f"replay-{number:05d}",
                turns=tuple(scanner.masked([t.turn for t in turns])),
                tools=_tools(conversation, scanner),
                system=scanner.masked(conversation.system or ""),
                expect={"turns": [{} if t.calls is None else {"logged": {"calls": t.calls}} for t in turns]},
            )
        )
    return _workload(
        "replay", "Logged conversations, turn by turn, with their tools' results", cases, max_tokens(lengths)
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
            turns[-1].results.append({"name": name, "content": message["content"], "arguments": arguments})
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
    content = [[c.id, c.system, [*c.turns], [*c.messages], [*(c.tools or ())], c.arrival_s, c.blocks] for c in cases]
    return Workload(
        name=name, description=description, persona=None, system=None, tools=None, thinking=False, max_tokens=tokens,
        temperature=0.0, cases=tuple(cases), default=False, sha256=sha256_text(msgspec.json.encode(content).decode()),
        gates=(*gates, "logged_tool") if with_tools else gates,
    )  # fmt: skip


# ---- traces


def trace(path: PathLike, n: int, problems: Problems | None = None) -> Workload:
    """Return a workload of a trace's first n requests, with their arrival times.

    Raises UsageError for a file without requests, and for a log without times.
    """
    rows = _mooncake(Path(path), n)
    return _mooncake_workload(rows) if rows else _log_trace(path, n, problems or Problems())


def _mooncake(path: Path, n: int) -> list[MooncakeRow]:
    """Read the first n rows of a Mooncake trace; [] for another format. Raises UsageError for a line that is not such a row."""
    rows: list[MooncakeRow] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_TRACE_LINE), b""), 1):
                if not line.strip():
                    continue
                if len(rows) >= n:
                    break
                try:
                    value = decode_json(line)
                    if not rows and not (isinstance(value, dict) and "input_length" in value):
                        return []
                    rows.append(msgspec.convert(value, MooncakeRow))
                except ValueError as error:
                    if not rows:
                        return []
                    raise UsageError(
                        f"{path.name}, line {number}: {error}", "a Mooncake trace has one JSON object per line"
                    ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    return rows


def _mooncake_workload(rows: Sequence[MooncakeRow]) -> Workload:
    first, cases = min(row.timestamp for row in rows), []
    for number, row in enumerate(sorted(rows, key=lambda row: row.timestamp)):
        count = -(-row.input_length // BLOCK_TOKENS)
        names = [str(name) for name in row.hash_ids[:count]]
        names += [f"{number}/{i}" for i in range(len(names), count)]  # without an id: text of this request alone
        cases.append(
            Case(
                id=f"trace-{number:05d}",
                blocks=tuple(names),
                prompt_tokens=row.input_length,
                max_tokens=max(1, row.output_length),
                arrival_s=(row.timestamp - first) / 1e3,
            )
        )
    text = "Requests of a Mooncake trace: its lengths, shared prefixes and arrivals"
    workload = _workload("trace", text, cases, 256)
    extra, context = {"ignore_eos": True}, ContextFile(tokens=0)
    return dataclasses.replace(workload, gates=("non_empty",), extra=extra, context=context)


def _log_trace(path: PathLike, n: int, problems: Problems) -> Workload:
    scanner = Scanner()
    lengths: list[int] = []
    requests: list[tuple[float, Case]] = []
    for number, conversation in enumerate(read_logs([path], problems, MAX_CHARACTERS)):
        prompt = list(conversation.messages)
        answers = [] if prompt[-1]["role"] in ("user", "tool") else [prompt.pop()]
        if conversation.time_s is None or not prompt:
            problems.add("no time" if conversation.time_s is None else "no prompt", conversation.source)
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
        requests.append((conversation.time_s, case))
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
    cases = [dataclasses.replace(case, arrival_s=time_s - first) for time_s, case in requests]
    return _workload("trace", "Logged requests at their recorded times", cases, max_tokens(lengths))
