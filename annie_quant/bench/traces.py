"""Requests of a log or a trace as workloads: conversations that are replayed, and requests that arrive at their recorded times.

    replay(logs)   conversations turn by turn: the user's texts and the logged results of tools; the server's own answers are kept.
                   Of an agent's trace: its requests, each as long after the answer before it as in the trace
    trace(file)    one request per record, at its time. A trace of lengths (bench/trace_forms.py) becomes text of that length, and
                   blocks of equal name equal text. Any log with times (annie_quant.data.logs has the formats) is sent as it is,
                   each request with the history that it had.

Secrets in logs are masked, because a run directory has all prompts.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from annie_quant.bench import trace_forms
from annie_quant.core.errors import UsageError
from annie_quant.core.files import sha256_text
from annie_quant.data.log_records import Conversation, called
from annie_quant.data.log_sample import max_tokens, plain
from annie_quant.data.logs import Problems, read_logs
from annie_quant.data.masking import Scanner
from annie_quant.documents import ChatMessage, ContextFile
from annie_quant.judge.answers import Tool
from annie_quant.judge.gates import REFERENCE_GATES
from annie_quant.judge.workloads import Case, Turn, Workload

PathLike = str | os.PathLike[str]
T = TypeVar("T")

MAX_CHARACTERS = 2_000_000  # of one conversation: over 256k tokens
# ---- conversations


def replay(paths: Iterable[PathLike], n: int, seed: int = 0, problems: Problems | None = None) -> Workload:
    """Return a workload of at most n logged conversations, a seeded sample. Raises UsageError where the logs have none."""
    problems, paths = problems or Problems(), list(paths)
    agents = itertools.chain.from_iterable(trace_forms.conversations(Path(path)) for path in paths)
    if picked := _sampled(agents, n, seed):
        return _agents(picked)
    chosen = _sampled(read_logs(paths, problems, MAX_CHARACTERS), n, seed)
    if not chosen:
        reasons = "; ".join(problems.lines()) or "no records"
        raise UsageError(f"the logs have no conversation to replay: {reasons}", "--replay takes chat logs")
    scanner, cases, lengths = Scanner(), [], []
    for number, conversation in chosen:
        turns = turns_of(conversation.messages)  # every conversation that is read has a user's message
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


def _sampled(items: Iterable[T], n: int, seed: int) -> list[tuple[int, T]]:
    """Return (position, item) of at most n items, in order; only these are in memory."""
    rng, chosen = random.Random(f"{seed}/replay"), list[tuple[int, T]]()
    for number, item in enumerate(items):
        at = len(chosen) if len(chosen) < n else rng.randrange(number + 1)
        if at < n:
            chosen[at : at + 1] = [(number, item)]
    return sorted(chosen, key=lambda pair: pair[0])


def _agents(agents: Iterable[tuple[int, Sequence[Case]]]) -> Workload:
    """Return a workload of agents' conversations, of which each request has its own text."""
    cases = []
    for number, requests in agents:
        name = f"replay-{number:05d}"
        steps = (dataclasses.replace(_named(c, f"{name}/{i}"), arrival_s=None) for i, c in enumerate(requests))
        cases.append(Case(id=name, steps=tuple(steps)))
    return _described_workload("replay", "Agents of a trace: their lengths, shared prefixes and waits", cases)


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
    content = [
        [c.id, c.system, [*c.turns], [*c.messages], [*(c.tools or ())], c.arrival_s, c.blocks, *c.steps] for c in cases
    ]
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
    requests = trace_forms.read(Path(path), n)
    if not requests:
        return _log_trace(path, n, problems or Problems())
    first = requests[0].arrival_s or 0.0
    cases = [
        dataclasses.replace(_named(case, f"trace-{number:05d}"), arrival_s=(case.arrival_s or 0.0) - first)
        for number, case in enumerate(requests)
    ]
    return _described_workload("trace", "Requests of a trace: its lengths, shared prefixes and arrivals", cases)


def _named(case: Case, name: str) -> Case:
    """Return a request of which a trace has lengths. Parts of its prompt without a name are text of this request alone."""
    own = (f"{name}/{i}" for i in range(len(case.blocks), -(-case.prompt_tokens // case.block_tokens)))
    return dataclasses.replace(case, id=name, blocks=(*case.blocks, *own))


def _described_workload(name: str, description: str, cases: Sequence[Case]) -> Workload:
    extra, context = {"ignore_eos": True}, ContextFile(tokens=0)
    workload = _workload(name, description, cases, 256)
    return dataclasses.replace(workload, gates=("non_empty",), extra=extra, context=context)


def _log_trace(path: PathLike, n: int, problems: Problems) -> Workload:
    scanner = Scanner()
    lengths: list[int] = []
    requests: list[tuple[float, int | None, Case]] = []
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
