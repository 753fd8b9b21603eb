"""A sample of a stream of conversations in bounded memory: the same for the same conversations, in any order.

Each behaviour (a tool that is called, or none) has its own pool, so that a rare tool in a million rows is kept. A pool
holds the conversations with the smallest hashes; an exact repetition has the hash of its original.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Iterator

from annie_quant.data.logs.conversation import Conversation
from annie_quant.schema import ChatMessage

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
