"""Masking of secrets in logged text: keys by their form (core/secrets.py), passwords by their name, personal data on request.

What is masked is counted by kind and never shown.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar, cast

from annie_quant.core.secrets import FORMS, is_secret_name
from annie_quant.documents import ChatMessage

_T = TypeVar("_T")

MASK = "[masked]"
MIN_SECRET = 8  # characters of an environment variable's value
_BY_NAME = (
    r"(?i:(?<![a-z])(?:pass(?:word|wd|phrase)?|pwd|secret|api[_ -]?key|access[_ -]?key|auth[_ -]?token|client[_ -]?secret"
    r"|token)\b[\"']?\s*(?:is\s*:?|[:=])\s*[\"']?)(?P<value>[^\s\"',;]{6,})"
)


def _patterns() -> dict[str, str]:
    """Return the pattern of each kind of secret."""
    patterns: dict[str, list[str]] = {}
    for form in FORMS:
        patterns.setdefault(form.kind, []).append(form.likely)
    return {kind: "|".join(parts) for kind, parts in patterns.items()} | {"password": _BY_NAME}


_KINDS = _patterns()
_PERSONAL = {
    "email address": r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b",
    "card number": r"\b(?:\d[ -]?){13,19}\b",
    "phone number": r"(?<![\w-])\+?\d{1,3}[ ./-]?\(?\d{2,4}\)?(?:[ ./-]?\d{2,4}){2,4}(?![\w-])",
}
_NAME = re.compile(r"\b(?i:my name is|name's|call me|this is)\s+([A-Z][\w'-]+(?:\s+[A-Z][\w'-]+)?)")


class Scanner:
    """Masks text.

    personal: also mask email addresses, card and phone numbers, and a name that a user states ("my
        name is ..."), everywhere in that conversation.
    words: further texts to mask, in any letter case.
    counts: kind of secret → number of places that were masked.
    """

    def __init__(self, personal: bool = False, words: Iterable[str] = ()) -> None:
        kinds = {**_KINDS, **(_PERSONAL if personal else {})}
        self._kinds = [(kind, re.compile(pattern)) for kind, pattern in kinds.items()]
        values = [
            v
            for k, v in os.environ.items()
            if is_secret_name(k) and len(v) >= MIN_SECRET and not v.startswith("/")
        ]
        self._words = [("secret of this environment", re.compile(re.escape(v))) for v in values]
        self._words += [
            ("masked word", re.compile(re.escape(w), re.IGNORECASE)) for w in words if w
        ]
        self._personal = personal
        self.counts: Counter[str] = Counter()

    def masked(self, value: _T) -> _T:
        """Return a JSON value without the secrets in its texts and property names."""
        return cast("_T", self._masked(value))

    def _masked(self, value: object) -> object:
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, Mapping):
            result: dict[object, object] = {}
            for key, item in value.items():
                name = self._text(key) if isinstance(key, str) else key
                while name in result:  # two masked names would be one
                    name += "'"
                result[name] = self._field(key, item)
            return result
        return [self._masked(item) for item in value] if isinstance(value, (list, tuple)) else value

    def conversation(self, messages: list[ChatMessage]) -> list[ChatMessage]:
        """Return the messages without secrets, and without the names that users state, if `personal`."""
        result = self.masked(messages)
        if not self._personal:
            return result
        names = {n for m in messages if m["role"] == "user" for n in _NAME.findall(m["content"])}
        parts = sorted({part for n in names for part in (n, *n.split())}, key=len, reverse=True)
        return cast("list[ChatMessage]", _changed(result, partial(self._without_names, parts)))

    def _without_names(self, names: Sequence[str], text: str) -> str:
        for name in names:
            text, n = re.subn(rf"\b{re.escape(name)}\b", MASK, text)
            self.counts["name"] += n
        return text

    def _field(self, name: str, value: object) -> object:
        if (
            isinstance(value, str)
            and len(value) >= 6
            and re.search(r"passw|secret|api_?key|token$", str(name), re.I)
        ):
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
    """Return whether a card number's check digit is correct (ISO/IEC 7812)."""
    digits = [int(c) for c in reversed(text) if c.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _changed(value: object, change: Callable[[str], str]) -> object:
    """Return messages with the texts changed, but not their roles, ids and names of functions."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        fixed = ("role", "name", "id", "tool_call_id")
        return {
            key: item if key in fixed else _changed(item, change) for key, item in value.items()
        }
    return [_changed(item, change) for item in value] if isinstance(value, list) else value
