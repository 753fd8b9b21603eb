"""A bounded sample of logged conversations, split into gate cases and calibration rows that share no prompt.

The sample is the same for the same conversations in any order. Each behaviour (the tool that is
called first, or none) has its own pool, so that a rare tool in a million rows is kept. A pool holds
the conversations with the smallest hashes; an exact repetition has the hash of its original.

Each answer in a conversation is one gate case: the messages before it, with the logged calls and
results, are the prompt. So a conversation of several turns with tools is replayed up to each
answer, the same for bf16 and for the quantized model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from annie_quant.core.progress import Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.conversations import (
    Conversation,
    LoggedTool,
    called,
    row_of,
    tool_names,
    with_text_arguments,
)
from annie_quant.data.duplicates import DuplicateFinder
from annie_quant.data.logs import Problems, read_logs
from annie_quant.data.masking import Scanner
from annie_quant.data.row_rules import Row, form_faults, user_text
from annie_quant.documents import CaseFile, ChatMessage, ChatRow, WorkloadFile
from annie_quant.documents.persona import Persona
from annie_quant.judge.gates import NAMED_REFERENCE_GATES

MAX_SYSTEM_PROMPTS = 1000  # different system prompts that are counted
MAX_CONVERSATIONS = 600  # per behaviour, for calibration and gates together
GATE_SHARE = 0.6  # of the conversations of a behaviour
POOL_SIZE = 1200  # conversations per behaviour
MAX_POOLS = 200
NO_TOOL = "no tool"
OTHER_TOOLS = "other tools"
CASES_PER_CONVERSATION = 4
MIN_TOKENS_OF_CASE = 128
MAX_TOKENS_OF_CASE = 4096
CHARACTERS_PER_TOKEN = 2.0  # fewer than most texts have, so that no answer is cut
HEADROOM = 2.0  # of max_tokens over the longest usual answer
USUAL_SHARE = 0.95
DESCRIPTIONS = {
    "calls": "prompts that production answered with a tool call",
    "answers": "prompts that production answered in words",
    "results": "answers from a tool's result",
}


class Pool:
    """Conversations by behaviour, of each at most `size` with the smallest hashes.

    n: number of conversations that were added.
    behaviours: how many of them per behaviour.
    repeated: exact repetitions within the pools.
    """

    def __init__(self, seed: int = 0, size: int = POOL_SIZE) -> None:
        self.n = 0
        self.repeated = 0
        self.behaviours: Counter[str] = Counter()
        self._seed = seed
        self._size = size
        self._conversations: dict[str, dict[int, Conversation]] = {}  # behaviour → hash → …
        self._largest: dict[str, int] = {}  # hash of each full pool

    def add(self, conversation: Conversation) -> None:
        self.n += 1
        behaviour = next(iter(conversation.calls), NO_TOOL)
        if behaviour not in self._conversations and len(self._conversations) >= MAX_POOLS:
            behaviour = OTHER_TOOLS
        self.behaviours[behaviour] += 1
        pool = self._conversations.setdefault(behaviour, {})
        digest = _digest([self._seed, conversation.system, conversation.messages], 8).digest()
        key = int.from_bytes(digest, "big")
        if key in pool:
            self.repeated += 1
        elif key < self._largest.get(behaviour, 1 << 64):
            pool[key] = conversation
            if len(pool) > self._size:
                del pool[max(pool)]
            if len(pool) == self._size:
                self._largest[behaviour] = max(pool)

    def conversations(self) -> Iterator[tuple[str, Conversation]]:
        """Yield (behaviour, conversation), the rarest behaviour first, within a behaviour by hash."""
        for behaviour in sorted(self._conversations, key=lambda b: (self.behaviours[b], b)):
            for _, conversation in sorted(self._conversations[behaviour].items()):
                yield behaviour, conversation


def _digest(value: object, size: int) -> hashlib.blake2b:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size)


@dataclass
class LogSample:
    """What the logs contain.

    prompts: system prompt → number of its conversations.
    tools: name → first definition.
    formats, files: number of conversations per format of a log, and per file.
    """

    pool: Pool
    prompts: Counter[str] = field(default_factory=Counter)
    tools: dict[str, LoggedTool] = field(default_factory=dict)
    formats: Counter[str] = field(default_factory=Counter)
    files: Counter[str] = field(default_factory=Counter)
    problems: Problems = field(default_factory=Problems)


def read_sample(logs: Sequence[Path], seed: int, progress: Progress) -> LogSample:
    """Read all logs as a stream. seed: of the choice of conversations."""
    sample = LogSample(Pool(seed))
    for conversation in read_logs(logs, sample.problems):
        sample.formats[conversation.format] += 1
        sample.files[conversation.source] += 1
        if conversation.system and (
            len(sample.prompts) < MAX_SYSTEM_PROMPTS or conversation.system in sample.prompts
        ):
            sample.prompts[conversation.system] += 1
        for tool in conversation.tools or ():
            sample.tools.setdefault(tool["function"]["name"], tool)
        sample.pool.add(conversation)
        if sample.pool.n % 1000 == 0:
            progress.update(sample.pool.n, None, "reading logs")
    return sample


def inferred_tools(sample: LogSample) -> list[LoggedTool]:
    """Return definitions of the called tools, inferred from the calls; an argument that every call has is required."""
    arguments: dict[str, list[JsonObject]] = {}
    for _, conversation in sample.pool.conversations():
        for message in conversation.messages:
            for call in message.get("tool_calls") or ():
                function = call["function"]
                arguments.setdefault(str(function["name"]), []).append(function["arguments"])
    return [_inferred_tool(name, calls) for name, calls in sorted(arguments.items())]


def _inferred_tool(name: str, calls: Sequence[JsonObject]) -> LoggedTool:
    properties = {}
    for argument in sorted(set().union(*calls)):
        properties[argument] = _schema([call[argument] for call in calls if argument in call])
    required = sorted(set(calls[0]).intersection(*calls))
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": name.replace("_", " "), "parameters": parameters}
    return {"type": "function", "function": function}


SCHEMA_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}


def _schema(values: Sequence[object]) -> JsonObject:
    names = {SCHEMA_TYPES.get(type(value), "object") for value in values}
    return {"type": names.pop()} if len(names) == 1 else {}


def without_prefixes(
    conversations: list[tuple[str, Conversation]],
) -> list[tuple[str, Conversation]]:
    """Return the conversations that are not the beginning of another one.

    Request logs have one record per turn, each of which repeats the turns before.
    """
    prefixes: set[bytes] = set()
    keys = []
    for _, conversation in conversations:
        key = b""
        for message in conversation.messages:
            prefixes.add(key)
            key = _digest([key.hex(), *_content(message)], 16).digest()
        keys.append(key)
    return [item for item, key in zip(conversations, keys, strict=True) if key not in prefixes]


def _content(message: ChatMessage) -> list[object]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [[function["name"], function["arguments"]] for function in functions]
    return [message["role"], message["content"], calls]


class GateCases:
    """Gate cases per kind of answer.

    behaviours: number of cases per tool, of answers in words, and of answers from a tool's result.
    shared: number of cases left out because the calibration rows have nearly the same prompt.
    count: returns the number of tokens of a text; None: lengths are in characters.
    """

    def __init__(
        self,
        persona: Persona,
        calibration: Sequence[Row],
        count: Callable[[str], int] | None,
    ) -> None:
        self.persona = persona
        self._count_tokens = count
        self.behaviours: Counter[str] = Counter()
        self.shared = 0
        self._cases: dict[tuple[str, bool], list[CaseFile]] = {}
        self._lengths: dict[tuple[str, bool], list[int]] = {}
        self._calibration = DuplicateFinder(
            (str(row["id"]), text) for row in calibration for text in _prompts_of(row)
        )
        self._prompts = {kind: DuplicateFinder() for kind in DESCRIPTIONS}

    def add(self, conversation: Conversation) -> None:
        for at in answer_positions(conversation):
            prompt = conversation.messages[:at]
            logged = next(iter(conversation.messages[at:]), None)
            text = prompt_text(prompt)
            kind = "answers"
            if prompt[-1]["role"] == "tool":
                kind = "results"
            elif logged and logged.get("tool_calls"):
                kind = "calls"
            if self._calibration.find(text) is not None:
                self.shared += 1
            elif self._prompts[kind].find(text) is None:
                self._prompts[kind].add("", text)
                self._count(kind, prompt, logged)
                self._store((kind, conversation.thinking), conversation, prompt, logged)

    def _count(self, kind: str, prompt: Sequence[ChatMessage], logged: ChatMessage | None) -> None:
        if logged is not None:
            self.behaviours.update(f"calls {name}" for name in set(called(logged)))
        if kind == "results":
            self.behaviours["answers from a result"] += 1
        elif kind == "answers":
            self.behaviours["answers in words"] += 1
        if sum(m["role"] == "user" for m in prompt) > 1:
            self.behaviours["several turns"] += 1

    def _store(
        self,
        key: tuple[str, bool],
        conversation: Conversation,
        prompt: Sequence[ChatMessage],
        logged: ChatMessage | None,
    ) -> None:
        cases = self._cases.setdefault(key, [])
        messages = [without_thinking(m) for m in prompt]
        system = conversation.system
        if system is not None and system.strip() != self.persona.system_prompt:
            messages.insert(0, {"role": "system", "content": system})
        case = CaseFile(id=f"{key[0]}-{len(cases):04d}", messages=messages)
        if conversation.tools is not None and conversation.tools != list(self.persona.tools):
            case.tools = conversation.tools
        if logged is not None:
            if self.persona.tools:  # without tools no gate judges calls
                case.expect = {"logged": {"calls": called(logged)}}
            arguments = [c["function"]["arguments"] for c in logged.get("tool_calls") or ()]
            texts = (logged["content"], str(arguments), logged.get("reasoning_content") or "")
            count = self._count_tokens or len
            self._lengths.setdefault(key, []).append(sum(map(count, texts)))
        cases.append(case)

    def documents(self, limit: int | None) -> Iterator[WorkloadFile]:
        """Yield the workloads, one per kind of answer. limit: of tokens; None: from the logged answers."""
        per_token = CHARACTERS_PER_TOKEN if self._count_tokens is None else 1
        for (kind, thinking), cases in sorted(self._cases.items()):
            yield WorkloadFile(
                name=f"{kind}_thinking" if thinking else kind,
                description=f"{DESCRIPTIONS[kind]}, from logs",
                persona="..",
                tools="persona" if self.persona.tools else None,
                thinking=thinking,
                max_tokens=limit or max_tokens(self._lengths.get((kind, thinking), ()), per_token),
                gates=[*NAMED_REFERENCE_GATES, *(["logged_tool"] if self.persona.tools else [])],
                cases=cases,
            )


def answer_positions(conversation: Conversation) -> list[int]:
    """Return the positions of at most CASES_PER_CONVERSATION answers: calls first, then answers after results, then others.

    A conversation that ends with a question has the position after it.
    """
    messages = conversation.messages
    roles = [message["role"] for message in messages]
    positions = []
    for at in range(1, len(messages) + 1):
        is_answer = at == len(messages) or roles[at] == "assistant"
        if is_answer and roles[at - 1] != "assistant":
            positions.append(at)

    def rank(at: int) -> int:
        if at < len(messages) and messages[at].get("tool_calls"):
            return 0
        return 1 if roles[at - 1] == "tool" else 2

    return sorted(sorted(positions, key=rank)[:CASES_PER_CONVERSATION])


def calibration_row(conversation: Conversation, persona: Persona, index: int) -> ChatRow | None:
    """Return a conversation as a calibration row; None where its form is invalid, such as arguments that violate the schema."""
    row = row_of(conversation, index, persona.system_prompt, persona.tools)
    row["provenance"] |= {"persona": persona.source, "prompt_sha256": persona.prompt_sha256}
    return None if form_faults(row, needs_answer=conversation.has_answer) else row


def _prompts_of(row: Row) -> Iterator[str]:
    """Yield the prompt before each answer of a row, or the row's own where it has no answer."""
    messages = [m for m in row["messages"] if m["role"] != "system"]
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            yield prompt_text(messages[:at])
    if messages[-1]["role"] != "assistant":
        yield prompt_text(messages)


def prompt_text(messages: Sequence[Mapping[str, object]]) -> str:
    """Return what identifies a prompt: the users' texts, and the last result where the answer follows one."""
    texts = [str(m["content"]) for m in messages if m["role"] == "user"]
    return "\n".join(texts + [str(m["content"]) for m in messages[-1:] if m["role"] == "tool"])


def without_thinking(message: ChatMessage) -> ChatMessage:
    """Return a message of a prompt: earlier thinking is not part of it."""
    result = with_text_arguments(message)
    result.pop("reasoning_content", None)
    return result


def max_tokens(lengths: Sequence[int], per_token: float = CHARACTERS_PER_TOKEN) -> int:
    """Return a token limit that holds nearly all answers like the logged ones.

    lengths: of the answers, in characters. per_token: 1 where they are in tokens.
    """
    if not lengths:
        return 256
    usual = sorted(lengths)[int(USUAL_SHARE * (len(lengths) - 1))]
    tokens = int(HEADROOM * usual / per_token) + 32
    return max(MIN_TOKENS_OF_CASE, min(MAX_TOKENS_OF_CASE, tokens))


@dataclass(frozen=True)
class SplitConversations:
    """Logged conversations without secrets, split into two sets that share no prompt.

    notes: what was left out, one line per reason.
    """

    rows: list[ChatRow]
    gates: GateCases
    notes: list[str]


def split_conversations(
    sample: LogSample,
    persona: Persona,
    scanner: Scanner,
    count: Callable[[str], int] | None,
) -> SplitConversations:
    """Return calibration rows and gate cases of disjoint conversations, none of them nearly a repetition of another.

    count: returns the number of tokens of a text; None where the tokenizer is not known.
    """
    chosen, notes = _distinct_conversations(sample, persona, scanner)
    rows: list[ChatRow] = []
    for_gates: list[Conversation] = []
    every = itertools.chain.from_iterable(chosen.values())
    answered = any(conversation.has_answer for conversation in every)
    if chosen and not answered:
        notes.append("the logs have no answers: the model gives them before calibration")
    for conversations in chosen.values():
        n_rows = len(conversations) - round(GATE_SHARE * len(conversations))
        calibration = [c for c in conversations if c.has_answer or not answered][:n_rows]
        used = {id(c) for c in calibration}
        for_gates += [c for c in conversations if id(c) not in used]
        candidates = [calibration_row(c, persona, i) for i, c in enumerate(calibration, len(rows))]
        rows += filter(None, candidates)
    gates = GateCases(persona, rows, count)
    for conversation in for_gates:
        gates.add(conversation)
    if gates.shared:
        notes.append(
            f"left out: {gates.shared} gate prompts that are also in the calibration data, or nearly"
        )
    return SplitConversations(rows, gates, notes)


def _distinct_conversations(
    sample: LogSample, persona: Persona, scanner: Scanner
) -> tuple[dict[str, list[Conversation]], list[str]]:
    """Return the conversations to use, masked, per behaviour, and one note per reason for leaving some out."""
    offered = tool_names(persona.tools)
    finder = DuplicateFinder()
    n_repeated = sample.pool.repeated
    n_missing: Counter[str] = Counter()
    chosen: dict[str, list[Conversation]] = {}
    for behaviour, conversation in without_prefixes(list(sample.pool.conversations())):
        tools = tool_names(conversation.tools or ()) or offered
        missing = set(conversation.calls).difference(tools)
        if missing:
            n_missing.update(missing)
            continue
        if len(chosen.get(behaviour, ())) >= MAX_CONVERSATIONS:
            continue
        text = user_text({"messages": conversation.messages})
        if finder.find(text) is not None:
            n_repeated += 1
            continue
        finder.add("", text)
        conversation.messages = scanner.conversation(conversation.messages)
        conversation.system = scanner.masked(conversation.system)
        conversation.tools = scanner.masked(conversation.tools)
        chosen.setdefault(behaviour, []).append(conversation)
    notes = []
    if n_repeated:
        notes.append(f"left out: {n_repeated:,} conversations that repeat another one, or nearly")
    for name, n in sorted(n_missing.items()):
        notes.append(f"left out: {n} conversations that call {name}, which is not among the tools")
    return chosen, notes
