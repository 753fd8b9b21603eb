"""A bounded sample of logged conversations, split into gate cases and calibration rows that share no prompt.

The sample is the same for the same conversations in any order. Each behaviour (the tool that is called first, or none) has its
own pool, so that a rare tool in a million rows is kept. A pool holds the conversations with the smallest hashes; an exact
repetition has the hash of its original.

Each answer in a conversation is one gate case: the messages before it, with the logged calls and results, are the prompt. So a
conversation of several turns with tools is replayed up to each answer, the same for bf16 and for the quantized model.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from annie_quant.core.progress import Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.data.log_records import Conversation, Tool, called, row_of, with_text_arguments
from annie_quant.data.logs import Problems, read_logs
from annie_quant.data.masking import Scanner
from annie_quant.data.rows import DuplicateFinder, Row, form_faults, user_text
from annie_quant.documents import CaseFile, ChatMessage, ChatRow, WorkloadFile
from annie_quant.documents.persona import Persona
from annie_quant.judge.gates import NAMED_REFERENCE_GATES

MAX_PROMPTS = 1000  # different system prompts that are counted
MAX_CONVERSATIONS = 600  # per behaviour, for calibration and gates together
GATE_SHARE = 0.6  # of the conversations of a behaviour
POOL_SIZE = 1200  # conversations per behaviour
MAX_POOLS = 200
NO_TOOL = "no tool"
OTHER = "other tools"
CASES_PER_CONVERSATION = 4
MIN_TOKENS, MAX_TOKENS = 64, 1024
CHARACTERS_PER_TOKEN = 3.0
HEADROOM = 1.5  # of max_tokens over the longest usual answer
USUAL_SHARE = 0.95
DESCRIPTIONS = {
    "calls": "prompts that production answered with a tool call",
    "answers": "prompts that production answered in words",
    "results": "answers from a tool's result",
}


class Pool:
    """Conversations by behaviour.

    n: number of conversations that were added.
    behaviours: how many of them per behaviour.
    repeated: exact repetitions within the pools.
    """

    def __init__(self, seed: int = 0, size: int = POOL_SIZE) -> None:
        self.n = self.repeated = 0
        self.behaviours: Counter[str] = Counter()
        self._seed, self._size = seed, size
        self._heaps: dict[
            str, list[tuple[int, int, Conversation]]
        ] = {}  # (-hash, -order, conversation)
        self._hashes: dict[str, set[int]] = {}

    def add(self, conversation: Conversation) -> None:
        self.n += 1
        behaviour = next(iter(conversation.calls), NO_TOOL)
        if behaviour not in self._heaps and len(self._heaps) >= MAX_POOLS:
            behaviour = OTHER
        self.behaviours[behaviour] += 1
        heap = self._heaps.setdefault(behaviour, [])
        hashes = self._hashes.setdefault(behaviour, set())
        key = self._hash(conversation)
        if key in hashes:
            self.repeated += 1
            return
        item = (-key, -self.n, conversation)
        if len(heap) < self._size:
            heapq.heappush(heap, item)
        elif key < -heap[0][0]:
            hashes.discard(-heapq.heapreplace(heap, item)[0])
        else:
            return
        hashes.add(key)

    def conversations(self) -> Iterator[tuple[str, Conversation]]:
        """Yield (behaviour, conversation), the rarest behaviour first, within a behaviour by hash."""
        for behaviour in sorted(self._heaps, key=lambda b: (self.behaviours[b], b)):
            for _, _, conversation in sorted(
                self._heaps[behaviour], key=lambda item: (-item[0], -item[1])
            ):
                yield behaviour, conversation

    def _hash(self, conversation: Conversation) -> int:
        text = json.dumps(
            [self._seed, conversation.system, conversation.messages],
            sort_keys=True,
            ensure_ascii=False,
        )
        return int.from_bytes(
            hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
        )


@dataclass
class LogSample:
    """What the logs contain.

    prompts: system prompt → number of its conversations.
    tools: name → first definition.
    formats, files: number of conversations per format of a log, and per file.
    """

    pool: Pool
    prompts: Counter[str] = field(default_factory=Counter)
    tools: dict[str, Tool] = field(default_factory=dict)
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
            len(sample.prompts) < MAX_PROMPTS or conversation.system in sample.prompts
        ):
            sample.prompts[conversation.system] += 1
        for tool in conversation.tools or ():
            sample.tools.setdefault(tool["function"]["name"], tool)
        sample.pool.add(conversation)
        if sample.pool.n % 1000 == 0:
            progress.update(sample.pool.n, None, "reading logs")
    return sample


def inferred_tools(sample: LogSample) -> list[Tool]:
    """Return definitions of the called tools, inferred from the calls; an argument that every call has is required."""
    calls_by_tool: dict[str, list[JsonObject]] = {}
    for _, conversation in sample.pool.conversations():
        for message in conversation.messages:
            for call in message.get("tool_calls") or ():
                calls_by_tool.setdefault(str(call["function"]["name"]), []).append(
                    call["function"]["arguments"]
                )
    tools = []
    for name, calls in sorted(calls_by_tool.items()):
        properties = {
            k: _schema([a[k] for a in calls if k in a]) for k in sorted(set().union(*calls))
        }
        required = sorted(set(calls[0]).intersection(*calls))
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": name, "description": name.replace("_", " "), "parameters": parameters}
        tools.append({"type": "function", "function": function})
    return tools


def _schema(values: Sequence[object]) -> JsonObject:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    kinds = {names.get(type(value), "object") for value in values}
    return {"type": kinds.pop()} if len(kinds) == 1 else {}


def without_prefixes(
    conversations: list[tuple[str, Conversation]],
) -> list[tuple[str, Conversation]]:
    """Return the conversations that are not the beginning of another one.

    Request logs have one record per turn, each of which repeats the turns before.
    """
    prefixes: set[str] = set()
    keys = []
    for _, conversation in conversations:
        digest = hashlib.blake2b(digest_size=16)
        for message in conversation.messages[:-1]:
            digest.update(_content(message))
            prefixes.add(digest.hexdigest())
        digest.update(_content(conversation.messages[-1]))
        keys.append(digest.hexdigest())
    return [item for item, key in zip(conversations, keys, strict=True) if key not in prefixes]


def _content(message: ChatMessage) -> bytes:
    calls = [
        [c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or ()
    ]
    text = json.dumps(
        [message["role"], message["content"], calls], sort_keys=True, ensure_ascii=False
    )
    return text.encode("utf-8", "surrogatepass")


class GateCases:
    """Gate cases per kind of answer.

    behaviours: number of cases per tool, of answers in words, and of answers from a tool's result.
    shared: number of cases left out because the calibration rows have nearly the same prompt.
    """

    def __init__(self, persona: Persona, calibration: Sequence[Row]) -> None:
        self.persona = persona
        self.behaviours: Counter[str] = Counter()
        self.shared = 0
        self._cases: dict[tuple[str, bool], list[CaseFile]] = {}
        self._lengths: dict[tuple[str, bool], list[int]] = {}
        self._calibration = DuplicateFinder(
            (str(row["id"]), text) for row in calibration for text in prompts_of(row)
        )
        self._prompts = {kind: DuplicateFinder() for kind in DESCRIPTIONS}

    def add(self, conversation: Conversation) -> None:
        for at in answer_positions(conversation):
            prompt = conversation.messages[:at]
            logged = conversation.messages[at] if at < len(conversation.messages) else None
            kind = "calls" if logged is not None and logged.get("tool_calls") else "answers"
            kind, text = "results" if prompt[-1]["role"] == "tool" else kind, prompt_text(prompt)
            if self._calibration.find(text) is not None:
                self.shared += 1
            elif self._prompts[kind].find(text) is None:
                self._prompts[kind].add("", text)
                self._store(kind, conversation, prompt, logged)

    def _store(
        self,
        kind: str,
        conversation: Conversation,
        prompt: Sequence[ChatMessage],
        logged: ChatMessage | None,
    ) -> None:
        key = (kind, conversation.thinking)
        cases = self._cases.setdefault(key, [])
        messages = [plain(m) for m in prompt]
        if (
            conversation.system is not None
            and conversation.system.strip() != self.persona.system_prompt
        ):
            messages.insert(0, {"role": "system", "content": conversation.system})
        case = CaseFile(id=f"{kind}-{len(cases):04d}", messages=messages)
        if conversation.tools is not None and conversation.tools != list(self.persona.tools):
            case.tools = conversation.tools
        if logged is not None:
            calls = called(logged)
            case.expect = {"logged": {"calls": calls}}
            arguments = [c["function"]["arguments"] for c in logged.get("tool_calls") or ()]
            length = (
                len(logged["content"])
                + len(str(arguments))
                + len(logged.get("reasoning_content") or "")
            )
            self._lengths.setdefault(key, []).append(length)
            self.behaviours.update({f"calls {name}" for name in calls})
        if kind == "results":
            self.behaviours["answers from a result"] += 1
        elif kind == "answers":
            self.behaviours["answers in words"] += 1
        if sum(m["role"] == "user" for m in prompt) > 1:
            self.behaviours["several turns"] += 1
        cases.append(case)

    def documents(self) -> Iterator[WorkloadFile]:
        """Yield the workloads, one per kind of answer."""
        for (kind, thinking), cases in sorted(self._cases.items()):
            yield WorkloadFile(
                name=f"{kind}_thinking" if thinking else kind,
                description=f"{DESCRIPTIONS[kind]}, from logs",
                persona="..",
                tools="persona" if self.persona.tools else None,
                thinking=thinking,
                max_tokens=max_tokens(self._lengths.get((kind, thinking), ())),
                gates=[*NAMED_REFERENCE_GATES, *(["logged_tool"] if self.persona.tools else [])],
                cases=cases,
            )


def answer_positions(conversation: Conversation) -> list[int]:
    """Return the positions of at most CASES_PER_CONVERSATION answers: calls first, then answers after results, then others.

    A conversation that ends with a question has the position after it.
    """
    messages = conversation.messages
    positions = [
        i
        for i, m in enumerate(messages)
        if m["role"] == "assistant" and messages[i - 1]["role"] != "assistant"
    ]
    if messages[-1]["role"] in ("user", "tool"):
        positions.append(len(messages))

    def rank(i: int) -> int:
        if i < len(messages) and messages[i].get("tool_calls"):
            return 0
        return 1 if messages[i - 1]["role"] == "tool" else 2

    return sorted(sorted(positions, key=lambda i: (rank(i), i))[:CASES_PER_CONVERSATION])


def calibration_row(conversation: Conversation, persona: Persona, index: int) -> ChatRow | None:
    """Return a conversation as a calibration row; None where its form is invalid, such as arguments that violate the schema."""
    row = row_of(conversation, index, persona.system_prompt, persona.tools)
    row["provenance"] |= {"persona": persona.source, "prompt_sha256": persona.prompt_sha256}
    return None if form_faults(row) else row


def prompts_of(row: Row) -> Iterator[str]:
    """Yield the prompt before each answer of a row."""
    messages = [m for m in row["messages"] if m["role"] != "system"]
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            yield prompt_text(messages[:at])


def prompt_text(messages: Sequence[Mapping[str, object]]) -> str:
    """Return what identifies a prompt: the users' texts, and the last result where the answer follows one."""
    texts = [str(m["content"]) for m in messages if m["role"] == "user"]
    return "\n".join(texts + [str(m["content"]) for m in messages[-1:] if m["role"] == "tool"])


def plain(message: ChatMessage) -> ChatMessage:
    """Return a message of a prompt: earlier thinking is not part of it."""
    result = with_text_arguments(message)
    result.pop("reasoning_content", None)
    return result


def max_tokens(lengths: Sequence[int]) -> int:
    """Return a token limit that holds nearly all logged answers. lengths: of the answers, in characters."""
    if not lengths:
        return 256
    usual = sorted(lengths)[int(USUAL_SHARE * (len(lengths) - 1))]
    return max(MIN_TOKENS, min(MAX_TOKENS, int(HEADROOM * usual / CHARACTERS_PER_TOKEN) + 32))


@dataclass(frozen=True)
class SplitConversations:
    """Logged conversations without secrets, split into two sets that share no prompt.

    notes: what was left out, one line per reason.
    """

    rows: list[ChatRow]
    gates: GateCases
    notes: list[str]


def split_conversations(
    sample: LogSample, persona: Persona, scanner: Scanner
) -> SplitConversations:
    """Return calibration rows and gate cases of disjoint conversations, none of them nearly a repetition of another."""
    chosen, notes = _distinct_conversations(sample, persona, scanner)
    rows: list[ChatRow] = []
    for_gates: list[Conversation] = []
    for conversations in chosen.values():
        n_rows = len(conversations) - round(GATE_SHARE * len(conversations))
        calibration = [c for c in conversations if c.has_answer][:n_rows]
        taken = {id(c) for c in calibration}
        for_gates += [c for c in conversations if id(c) not in taken]
        rows += filter(
            None, (calibration_row(c, persona, i) for i, c in enumerate(calibration, len(rows)))
        )
    gates = GateCases(persona, rows)
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
    offered = {t["function"]["name"] for t in persona.tools}
    finder, n_repeated, n_missing = DuplicateFinder(), sample.pool.repeated, Counter[str]()
    chosen: dict[str, list[Conversation]] = {}
    for behaviour, conversation in without_prefixes(list(sample.pool.conversations())):
        tools = {t["function"]["name"] for t in conversation.tools or ()} or offered
        if missing := set(conversation.calls) - tools:
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
