"""Keeping secrets out of everything that is kept or shown: URLs, headers, error texts and a server's echoes of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

_SECRET = re.compile(r"auth|key|token|secret|cookie|passw|signature", re.IGNORECASE)
_SHORTEST = 8  # masking less would hide ordinary words: "EMPTY" and "none" are customary keys of local servers


def is_secret_name(name: str) -> bool:
    """A header or query parameter whose value must not be shown."""
    return bool(_SECRET.search(name))


def safe_url(url: str) -> str:
    """The URL without user, password and the values of secret query parameters."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "[a URL that cannot be read]"
    place = parts.netloc.rpartition("@")[2]
    query = "&".join(
        f"{name}=[redacted]" if sep and is_secret_name(name) else f"{name}{sep}{value}"
        for name, sep, value in (q.partition("=") for q in parts.query.split("&"))
    )
    return urlunsplit((parts.scheme, place, parts.path, query, ""))


def secrets_of(url: str, headers: Mapping[str, str] | None) -> Iterator[bytes]:
    """What must be masked wherever it comes back: values of secret headers, their last word, the URL's own secrets."""
    values: list[str] = []
    for name, value in (headers or {}).items():
        if is_secret_name(name):
            values += [value.strip(), *value.split()[-1:]]
    parts = urlsplit(url)
    if parts.password:
        values += [parts.password, unquote(parts.password)]
    for name, _, value in (q.partition("=") for q in parts.query.split("&")):
        if is_secret_name(name):
            values += [value, unquote(value)]
    yield from {v.encode() for v in values if len(v) >= _SHORTEST}


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """What another program said, without the values of secret variables that it was given and may repeat."""
    for name, value in environment.items():
        if is_secret_name(name) and len(value) >= _SHORTEST:
            text = text.replace(value, "[redacted]")
    return text
