"""A conversation as logs have it, the count of what in them cannot be used, a bounded sample of them, and rows for calibration.

Pool: a sample of a stream in bounded memory, the same for the same conversations in any order. Each behaviour (a tool that is
called, or none) has its own pool, so that a rare tool in a million rows is kept. A pool holds the conversations with the smallest
hashes; an exact repetition has the hash of its original.

Masking of secrets in logged text: keys by their form (annie_quant.core.secrets), passwords by
their name, on request personal data.

What is masked is counted by kind and never shown.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from annie_quant.core.secrets import FORMS, is_secret_name
from annie_quant.documents import ChatCall, ChatMessage, ChatRow


class Unusable(Exception):
    """A record is not a conversation that can be used. The message is the reason, the same for all such records."""


@dataclass
class Conversation:
    """messages: in OpenAI's form, arguments as objects, without a system prompt. system: that prompt, None where the log
    has none. tools: on offer; None where the log does not record them. thinking: whether an answer has thinking.
    format: of the log. source: file name. time_s: when it was logged, in seconds since 1970; None where the log has no time.
    """

    messages: list[ChatMessage]
    system: str | None = None
    tools: list[dict[str, Any]] | None = None
    thinking: bool = False
    format: str = ""
    source: str = ""
    time_s: float | None = None

    @property
    def characters(self) -> int:
        """Size of its texts and of the calls' arguments."""
        calls = sum(len(str(c["function"]["arguments"])) for m in self.messages for c in m.get("tool_calls") or ())
        return sum(len(m["content"]) for m in self.messages) + len(self.system or "") + calls

    @property
    def calls(self) -> list[str]:
        """Names of all functions that are called, in order."""
        return [str(c["function"]["name"]) for m in self.messages for c in m.get("tool_calls") or ()]

    @property
    def has_answer(self) -> bool:
        return any(m["role"] == "assistant" for m in self.messages)


@dataclass
class Problems:
    """Reason → number of records, and the first place (file and line) of each."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, where: str = "", n: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + n
        self.first.setdefault(reason, where)

    def lines(self) -> Iterator[str]:
        """Yield one line per reason, the most frequent first."""
        for reason, n in sorted(self.counts.items(), key=lambda item: -item[1]):
            where = f" (first: {self.first[reason]})" if self.first[reason] else ""
            yield f"{n:,} × {reason}{where}"


def row_of(
    conversation: Conversation,
    index: int,
    system: str | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ChatRow:
    """Return the conversation up to its last answer. system, tools: used where the log has none."""
    last = max(i for i, m in enumerate(conversation.messages) if m["role"] == "assistant")
    system = conversation.system if conversation.system is not None else system or ""
    head: list[ChatMessage] = [{"role": "system", "content": system}] if system.strip() else []
    row: ChatRow = {
        "id": f"log-{index:05d}",
        "messages": head + [with_text_arguments(m) for m in conversation.messages[: last + 1]],
        "thinking": conversation.thinking,
        "provenance": {"teacher": "log", "model": conversation.format, "source": conversation.source},
        "split": "calibration",
    }
    if offered := conversation.tools if conversation.tools is not None else tools:
        row["tools"] = [dict(t) for t in offered]
    return row


def with_text_arguments(message: ChatMessage) -> ChatMessage:
    """Return the message with its calls' arguments as JSON strings, as OpenAI's requests have them."""
    result = message.copy()
    if calls := message.get("tool_calls"):
        result["tool_calls"] = [_with_text_arguments(call) for call in calls]
    return result


def _with_text_arguments(call: ChatCall) -> ChatCall:
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


POOL_SIZE = 1200  # conversations per behaviour
MAX_POOLS = 200
NO_TOOL = "no tool"
OTHER = "other tools"


class Pool:
    """n: conversations added. behaviours: how many of them per behaviour. repeated: exact repetitions within the pools."""

    def __init__(self, seed: int = 0, size: int = POOL_SIZE) -> None:
        self.n = self.repeated = 0
        self.behaviours: Counter[str] = Counter()
        self._seed, self._size = seed, size
        self._heaps: dict[str, list[tuple[int, int, Conversation]]] = {}  # (-hash, -order, conversation)
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
            for _, _, conversation in sorted(self._heaps[behaviour], key=lambda item: (-item[0], -item[1])):
                yield behaviour, conversation

    def _hash(self, conversation: Conversation) -> int:
        text = json.dumps([self._seed, conversation.system, conversation.messages], sort_keys=True, ensure_ascii=False)
        return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def without_prefixes(conversations: list[tuple[str, Conversation]]) -> list[tuple[str, Conversation]]:
    """Return the conversations that are not the beginning of another one, as request logs have every turn of a chat."""
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
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or ()]
    text = json.dumps([message["role"], message["content"], calls], sort_keys=True, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


MASK = "[masked]"
MIN_SECRET = 8  # of an environment variable's value
_BY_NAME = (
    r"(?i:(?<![a-z])(?:pass(?:word|wd|phrase)?|pwd|secret|api[_ -]?key|access[_ -]?key|auth[_ -]?token|client[_ -]?secret"
    r"|token)\b[\"']?\s*(?:is\s*:?|[:=])\s*[\"']?)(?P<value>[^\s\"',;]{6,})"
)
_KINDS = {
    **{kind: "|".join(f.likely for f in FORMS if f.kind == kind) for kind in dict.fromkeys(f.kind for f in FORMS)},
    "password": _BY_NAME,
}
_PERSONAL = {
    "email address": r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b",
    "card number": r"\b(?:\d[ -]?){13,19}\b",
    "phone number": r"(?<![\w-])\+?\d{1,3}[ ./-]?\(?\d{2,4}\)?(?:[ ./-]?\d{2,4}){2,4}(?![\w-])",
}
_NAME = re.compile(r"\b(?i:my name is|name's|call me|this is)\s+([A-Z][\w'-]+(?:\s+[A-Z][\w'-]+)?)")


class Scanner:
    """Masks text; counts: kind → number of places.

    personal: also email addresses, card and phone numbers, and a name that a user states ("my name is ..."), everywhere in
    that conversation. words: further texts to mask, in any letter case.
    """

    def __init__(self, personal: bool = False, words: Iterable[str] = ()) -> None:
        kinds = {**_KINDS, **(_PERSONAL if personal else {})}
        self._kinds = [(kind, re.compile(pattern)) for kind, pattern in kinds.items()]
        own = [v for k, v in os.environ.items() if is_secret_name(k) and len(v) >= MIN_SECRET and not v.startswith("/")]
        self._words = [("secret of this environment", re.compile(re.escape(v))) for v in own]
        self._words += [("masked word", re.compile(re.escape(w), re.IGNORECASE)) for w in words if w]
        self._personal = personal
        self.counts: Counter[str] = Counter()

    def masked(self, value: Any) -> Any:
        """Return a text, or every text and property name in a JSON value, without secrets."""
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            result: dict[Any, Any] = {}
            for key, item in value.items():
                name = self._text(key) if isinstance(key, str) else key
                while name in result:  # two names with secrets
                    name += "'"
                result[name] = self._field(key, item)
            return result
        return [self.masked(item) for item in value] if isinstance(value, (list, tuple)) else value

    def conversation(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Return the messages without secrets, and without the names that users state, if `personal`."""
        result: list[ChatMessage] = self.masked(messages)
        if not self._personal:
            return result
        names = {n for m in messages if m["role"] == "user" for n in _NAME.findall(m["content"])}
        for name in sorted({part for n in names for part in (n, *n.split())}, key=len, reverse=True):
            result = _replaced(result, re.compile(rf"\b{re.escape(name)}\b"), self.counts)
        return result

    def _field(self, name: str, value: Any) -> Any:
        if isinstance(value, str) and len(value) >= 6 and re.search(r"passw|secret|api_?key|token$", str(name), re.I):
            self.counts["password"] += 1
            return MASK
        return self.masked(value)

    def _text(self, text: str) -> str:
        for kind, pattern in (*self._words, *self._kinds):
            text = pattern.sub(lambda match, kind=kind: self._mask(kind, match), text)  # type: ignore[misc]
        return text

    def _mask(self, kind: str, match: re.Match[str]) -> str:
        if match[0].endswith(MASK) or (kind == "card number" and not _luhn(match[0])):
            return match[0]
        self.counts[kind] += 1
        if kind == "password":
            return match[0][: match.start("value") - match.start()] + MASK
        return f"{match[0].split()[0]} {MASK}" if kind == "authorization" else MASK


def _luhn(text: str) -> bool:
    """Return whether a card number's check digit is right (ISO/IEC 7812)."""
    digits = [int(c) for c in text if c.isdigit()]
    return sum(sum(divmod(2 * d, 10)) if i % 2 else d for i, d in enumerate(reversed(digits))) % 10 == 0


def _replaced(value: Any, pattern: re.Pattern[str], counts: Counter[str]) -> Any:
    if isinstance(value, str):
        text, n = pattern.subn(MASK, value)
        counts["name"] += n
        return text
    if isinstance(value, dict):
        return {
            k: v if k in ("role", "name", "id", "tool_call_id") else _replaced(v, pattern, counts)
            for k, v in value.items()
        }
    return [_replaced(v, pattern, counts) for v in value] if isinstance(value, list) else value
