"""Hostile values and documents: a grammar over JSON, driven by a seeded random generator.

`Hostile.value()` is any value; `Hostile.changed(document)` is a valid document with hostile values in random places, which
reaches deeper than random bytes; `encode` writes what `json` cannot: lone surrogates, NaN, nesting without end.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Raw:
    """Bytes that stand in a document as they are."""

    bytes: bytes


NUMBERS = (
    0, 1, -1, 2, 7, 255, 4096, -(2**31), 2**31 - 1, 2**31, 10**9, 2**53, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**30,
    0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, 3.0, True, False,
)  # fmt: skip
RAW = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 4000, b"9" * 5000, b'"\\ud800"', b'"\\udfff\\ud800"', b'"\\u0000"',
    b"[" * 2000 + b"]" * 2000, b'{"a":' * 1500 + b"1" + b"}" * 1500, b"[" * 100_000, b"{", b"", b'"\xff\xfe"', b"nul",
    b'{"a":1,"a":[2]}', b"\x00", b"[1,]", b"-", b'"\\x"',
)  # fmt: skip
TEXTS = (
    "", " ", "\x00", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "\x9b2J",
    "\u202egnp.exe", "\u2066", "\ufeff", "\r\noverwritten", "a\nb", "[red]markup[/red]", "[/]", "[link=http://evil]x[/link]",
    "<script>alert(1)</script>", "../../../../etc/passwd", "/etc/passwd", "C:\\x", "..", ".", "~", "$(id)", "`id`", "; id",
    "%s%n", "{0.__class__}", "{{ 7*7 }}", "{% for i in range(9**9) %}{% endfor %}", "\U0001f600" * 50, "e\u0301" * 50,
    "x" * 1000, "x" * 100_000, "-rf", "--help", "null", "NaN", "1e999", "__class__", "__proto__", "constructor", "https://evil/",
    "auto_map", "a" * 300 + "/b", "\u2028", "\ufffe", "\ud7ff", "😀\u200d", "\t" * 30, "0x10", "１２", "İ", "ß" * 300,
)  # fmt: skip


class Hostile:
    """A generator of hostile values. The same seed gives the same values."""

    def __init__(self, seed: Any) -> None:
        self.random = random.Random(str(seed))

    def text(self) -> str:
        pick = self.random.random()
        if pick < 0.75:
            return self.random.choice(TEXTS)
        characters = [
            chr(self.random.choice((self.random.randrange(256), self.random.randrange(0xD800))))
            for _ in range(8)
        ]
        return "".join(characters)

    def number(self) -> Any:
        return self.random.choice(NUMBERS)

    def value(self, depth: int = 2) -> Any:
        kind = self.random.random()
        if kind < 0.3:
            return self.text()
        if kind < 0.55:
            return self.number()
        if kind < 0.63:
            return Raw(self.random.choice(RAW))
        if kind < 0.7 or depth == 0:
            return None
        if kind < 0.85:
            return [self.value(depth - 1) for _ in range(self.random.randrange(4))]
        return {self.text()[:200]: self.value(depth - 1) for _ in range(self.random.randrange(4))}

    def changed(self, document: Any, changes: int | None = None) -> Any:
        """Return a copy of a JSON document with a few hostile changes at random places."""
        document = json.loads(json.dumps(document))
        for _ in range(changes or self.random.choice((1, 1, 1, 2, 3, 6))):
            document = self._change(document)
        return document

    def _change(self, document: Any) -> Any:
        holder, node, path = [document], document, 0
        parent: Any = holder
        key: Any = 0
        while (
            isinstance(node, (dict, list)) and node and (path == 0 or self.random.random() < 0.85)
        ):
            parent, path = node, path + 1
            key = (
                self.random.choice(list(node))
                if isinstance(node, dict)
                else self.random.randrange(len(node))
            )
            node = node[key]
        action = self.random.random()
        if action < 0.12 and parent is not holder:
            del parent[key]
        elif action < 0.2 and isinstance(parent, dict):
            parent[self.text()[:2000]] = parent.pop(key)
        elif action < 0.28 and isinstance(parent, dict):
            parent[self.text()[:200]] = self.value()
        elif action < 0.34 and isinstance(parent, list):
            parent.append(self.value())
        else:
            parent[key] = self.value()
        return holder[0]

    def damaged(self, data: bytes) -> bytes:
        """Return bytes that are sometimes cut, or have other bytes inserted."""
        if self.random.random() < 0.9 or not data:
            return data
        at, inserted = (
            self.random.randrange(len(data)),
            (b"", b"\x00", b"\xff", b"[" * 5000, b"\n", b"}", b'"'),
        )
        return data[:at] + self.random.choice(inserted) + data[at + self.random.randrange(3) :]


def encode(value: Any) -> bytes:
    """Return a document as JSON, with Raw parts as they are."""
    if isinstance(value, Raw):
        return value.bytes
    if isinstance(value, dict):
        return (
            b"{"
            + b",".join(json.dumps(k).encode() + b":" + encode(v) for k, v in value.items())
            + b"}"
        )
    if isinstance(value, list):
        return b"[" + b",".join(map(encode, value)) + b"]"
    return json.dumps(value).encode()
