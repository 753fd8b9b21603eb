"""Recognise secrets in names, texts and files, and find a known one in a server's bytes.

is_secret_name(name), safe_url(url)    a header's or variable's name; a URL without its secrets
FORMS, secret_in(path)                 tokens of known services by their form, for logs and for files to be published
Redactor(secrets)                      a run's own keys in a server's bytes: also in part, in base64, or spread over events
"""

from __future__ import annotations

import base64
import binascii
import bisect
import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from annie_quant.core.errors import UsageError

_SECRET = re.compile(r"auth|key|token|secret|cookie|passw|signature", re.IGNORECASE)
_NO_SECRET = re.compile(
    r"tokenizer(?:_mode|_revision)?|(?:max|min)_(?:new_|completion_|output_)?tokens", re.IGNORECASE
)
_SHORTEST = 8  # shorter secrets are not masked: local servers use ordinary words such as "EMPTY" and "none" as keys


# ---- names and URLs


def is_secret_name(name: str) -> bool:
    """Return whether the value of a header, query parameter or variable with this name must not be shown."""
    return bool(_SECRET.search(name)) and not _NO_SECRET.fullmatch(name)


def safe_url(url: str) -> str:
    """Return the URL without user, password and the values of secret query parameters."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "[a URL that cannot be read]"
    host = parts.netloc.rpartition("@")[2]
    query = []
    for field in parts.query.split("&"):
        name, equals, _ = field.partition("=")
        query.append(f"{name}=[redacted]" if equals and is_secret_name(name) else field)
    return urlunsplit((parts.scheme, host, parts.path, "&".join(query), ""))


def refuse_secrets_in(url: str, name: str) -> None:
    """Raise UsageError for a URL with a user, password or query: it would be in shell histories, process lists and results.

    name: the option or setting that has the URL, for the message.
    """
    try:
        parts = urlsplit(url)
        has_secrets = parts.username is not None or parts.password is not None or bool(parts.query)
    except ValueError:
        raise UsageError(
            f"{name}: the URL cannot be read", "write it as http://127.0.0.1:8000"
        ) from None
    if has_secrets:
        raise UsageError(
            f"{name}: the URL {urlunsplit((*parts[:1], parts.netloc.rpartition('@')[2], parts.path, '', ''))} has a user, "
            "password or query",
            "remove them; a key comes from an environment variable (bench: --key-env NAME)",
        )


def secrets_of(url: str, headers: Mapping[str, str] | None) -> Iterator[bytes]:
    """Yield all values to mask: those of secret headers, their last word, and the secrets in the URL."""
    values: list[str] = []
    for name, value in (headers or {}).items():
        if is_secret_name(name):
            values += [value.strip(), *value.split()[-1:]]
            if value.lower().startswith("basic "):
                values += _basic(value.split()[-1])
    with contextlib.suppress(ValueError):  # a URL that cannot be read: libcurl refuses it too
        parts = urlsplit(url)
        if parts.password:
            values += [parts.password, unquote(parts.password)]
        for field in parts.query.split("&"):
            name, _, value = field.partition("=")
            if is_secret_name(name):
                values += [value, unquote(value)]
    yield from {v.encode() for v in values if len(v) >= _SHORTEST}


def _basic(word: str) -> list[str]:
    """Return user:password and the password of HTTP's Basic scheme (RFC 7617)."""
    try:
        pair = base64.b64decode(word, validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return []
    return [pair, pair.partition(":")[2]]


def without_secrets(text: str, environment: Mapping[str, str]) -> str:
    """Return another program's output without the values of the secret variables in its environment."""
    for name, value in environment.items():
        if is_secret_name(name) and len(value) >= _SHORTEST:
            text = text.replace(value, "[redacted]")
    return text


# ---- forms of secrets, and files that have one


class SecretForm(NamedTuple):
    """One form of secret, with two patterns; what matches `certain` matches `likely` too."""

    name: str  # with its article, for messages
    kind: str  # the group in which logs count it
    certain: (
        str | None
    )  # nothing else has this form, so a file with it is not published; None: the service decides
    likely: str  # also shorter and truncated ones, which are masked in logs


def _token(name: str, prefix: str, characters: str, certain: int | None, likely: int) -> SecretForm:
    """Return the form of a token that begins with a prefix.

    certain, likely: how many further characters it needs to be so.
    """
    start = rf"\b(?:{prefix}){characters}"
    return SecretForm(
        name,
        "API key",
        None if certain is None else f"{start}{{{certain},}}",
        f"{start}{{{likely},}}",
    )


_PRIVATE_KEY = r"-----BEGIN [A-Z ]*PRIVATE KEY-----"
_PRIVATE_KEY_END = r"-----END [A-Z ]*PRIVATE KEY-----"
_PART = r"[\w-]{8,}"  # of a JSON web token
_JWT = rf"\beyJ{_PART}"
_AWS = r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
FORMS = (
    SecretForm(
        "a private key",
        "private key",
        _PRIVATE_KEY,
        rf"{_PRIVATE_KEY}(?s:.*?)(?:{_PRIVATE_KEY_END}|\Z)",
    ),
    SecretForm(
        "a JSON web token",
        "JSON web token",
        rf"{_JWT}\.eyJ{_PART}\.{_PART}",
        rf"{_JWT}\.{_PART}\.[\w-]*",
    ),
    _token("an API key", "sk-", r"[A-Za-z0-9_-]", 24, 16),
    _token("an API key", "sk_|[pr]k[-_]", r"[A-Za-z0-9_-]", None, 16),
    _token("a Hugging Face token", "hf_", r"[A-Za-z0-9]", 30, 20),
    _token("a GitHub token", "gh[oprsu]_", r"[A-Za-z0-9]", 30, 20),
    _token("a GitHub token", "github_pat_", r"\w", 30, 20),
    _token("a GitLab token", "glpat-", r"[\w-]", 20, 16),
    SecretForm("an AWS key", "API key", _AWS, _AWS),
    _token("a Google API key", "AIza", r"[\w-]", 35, 30),
    _token("a Google token", r"ya29\.", r"[\w-]", None, 20),
    _token("a Slack token", "xox[abeoprs]-", r"[\w-]", 10, 10),
    _token("an NVIDIA API key", "nvapi-", r"[\w-]", 20, 16),
    _token("a SendGrid key", r"SG\.[\w-]{16,}\.", r"[\w-]", None, 16),
    _token("an npm token", "npm_", r"[A-Za-z0-9]", 36, 20),
    _token("a PyPI token", "pypi-", r"[\w-]", None, 20),
    SecretForm(
        "an authorization header",
        "authorization",
        r"(?i:authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)\s+[A-Z0-9._\-+/=]{16,})",
        r"(?i:\b(?:bearer|basic)\s+)[\w.~+/=-]{12,}",
    ),
    SecretForm(
        "a password in a URL",
        "password in a URL",
        r"\b[a-z][a-z0-9+.\-]{1,20}://[^\s/:@\"'<>\\]{1,100}:[^\s/@\"'<>\\]{3,100}@[\w\[]",
        r"(?<=://)[^\s/:@]+:[^\s/@]+(?=@)",
    ),
)

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit of a safetensors header
# The rules of detect-secrets (https://github.com/Yelp/detect-secrets, extra `publish`) with a fixed
# form. Those that guess by entropy or by a keyword take checksums and prompts for secrets.
LIBRARY_RULES = (
    "ArtifactoryDetector",
    "AWSKeyDetector",
    "AzureStorageKeyDetector",
    "DiscordBotTokenDetector",
    "GitHubTokenDetector",
    "GitLabTokenDetector",
    "JwtTokenDetector",
    "MailchimpDetector",
    "NpmDetector",
    "OpenAIDetector",
    "PrivateKeyDetector",
    "PypiTokenDetector",
    "SendGridDetector",
    "SlackDetector",
    "SquareOAuthDetector",
    "StripeDetector",
    "TwilioKeyDetector",
)
_ESCAPE = re.compile(r"\\u00([0-7][0-9a-fA-F])")


def secret_in(path: Path) -> str:
    """Return the name of the first form of secret in a file, or "".

    Of weights only the header is text.
    """
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            content = file.read(min(length, HEADER_LIMIT))
        else:
            content = file.read()
    return next((kind for text in readings(content) if (kind := _kind_of(text))), "")


def readings(content: bytes) -> Iterator[str]:
    """Yield the texts that a file's bytes may stand for: UTF-8, UTF-16, and both with \\u escapes decoded."""  # noqa: D301
    texts = [content.decode("utf-8", "replace")]
    if b"\0" in content:
        for encoding in ("utf-16-le", "utf-16-be"):
            texts += [content.decode(encoding, "replace"), content[1:].decode(encoding, "replace")]
    for text in texts:
        yield text
        if "\\u00" in text:
            yield _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)


def _kind_of(text: str) -> str:
    for form in FORMS:
        if form.certain is not None and re.search(form.certain, text):
            return form.name
    for detector in _detectors():
        if any(True for _ in detector.analyze_string(text)):
            return f"something like: {detector.secret_type}"
    return ""


@functools.cache
def _detectors() -> tuple[Any, ...]:
    """Return detect-secrets' rules, or none where it is not installed."""
    try:
        from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
    except ImportError:
        return ()
    classes: Any = get_mapping_from_secret_type_to_class().values()
    return tuple(kind() for kind in classes if kind.__name__ in LIBRARY_RULES)


# ---- known secrets in a server's bytes

_JSON_STRING = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_UNIT = re.compile(
    rb"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|\\u....|\\.|[^\\]", re.DOTALL
)  # a surrogate pair is one unit
_FEWEST = 4  # further characters of a form that are masked in another text


class Redactor:
    """Find known secrets in a server's bytes: in any letter case, as base64, and split over several texts.

    The first half of a form (at least 8 bytes) counts as the form: a prefix of a key identifies it.
    """

    def __init__(self, secrets: Iterable[bytes]) -> None:
        forms: set[bytes] = set()
        for secret in secrets:
            forms.update(form.lower() for form in _forms(secret) if len(form) >= _SHORTEST)
        self._forms = [(form, max(_SHORTEST, (len(form) + 1) // 2)) for form in forms]
        self._longest = max(map(len, forms), default=0)

    def __bool__(self) -> bool:
        return bool(self._forms)

    def spans(self, text: bytes) -> list[tuple[int, int]]:
        """Return (start, end) of every secret in `text`. Spans may overlap."""
        text = text.lower()  # bytes.lower changes ASCII only, so positions stay valid
        spans = []
        for form, least in self._forms:
            at = text.find(form[:least])
            while at >= 0:
                end = at + least
                while end < at + len(form) and text[end : end + 1] == form[end - at : end - at + 1]:
                    end += 1
                spans.append((at, end))
                at = text.find(form[:least], end)
        return spans

    def spans_in(self, texts: Sequence[bytes]) -> list[tuple[int, int, int]]:
        """Return (text, start, end) of every part of a secret.

        It may be in one text, in consecutive ones, or at the end of one text and the beginning of
        any other, as in a message's reasoning and content.
        """
        spans = set(_parts(texts, self.spans(b"".join(texts))))
        heads = [text[: self._longest].lower() for text in texts]
        for first, text in enumerate(texts):
            rests = self._rests(text)
            followers = [i for i, head in enumerate(heads) if rests and head.startswith(rests)]
            cut = max(0, len(text) - self._longest)
            for second in followers:
                if second in (first, first + 1):
                    continue
                pair = (text[cut:], texts[second][: self._longest])
                for part, start, end in _parts(pair, self.spans(b"".join(pair))):
                    spans.add((second, start, end) if part else (first, cut + start, cut + end))
        return sorted(spans)

    def _rests(self, text: bytes) -> tuple[bytes, ...]:
        """Return the texts that complete a secret which begins at the end of a text, at least up to half of the form."""
        tail = text[-self._longest :].lower()
        rests = []
        for form, least in self._forms:
            for size in range(1, len(form)):
                if tail.endswith(form[:size]):
                    end = max(least, min(len(form), size + _FEWEST))
                    rests.append(form[size:end])
        return tuple(rests)

    def spans_in_events(
        self, events: Sequence[bytes], payload: Callable[[bytes], bytes]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (event, start, end) of every part of a secret in one answer's events.

        A secret may be in one piece, cut by network reads, or spread over the texts of many events,
        one character per event.

        payload: returns the JSON document of an event.
        """
        yield from _parts(events, self.spans(b"".join(events)))
        for index, string, start, end in self._spread(events, payload):
            for low, high in _raw_spans(events[index], string, start, end):
                yield index, low, high

    def _spread(
        self, events: Sequence[bytes], payload: Callable[[bytes], bytes]
    ) -> Iterator[tuple[int, bytes, int, int]]:
        """Yield (event, string, start, end) of the parts of JSON strings that form a secret when they are joined.

        The strings at the same path of successive events are joined, as a client does for display.
        A secret may also continue at another path.
        """
        strings: dict[tuple[object, ...], list[bytes]] = {}
        indices: dict[tuple[object, ...], list[int]] = {}
        for index, raw in enumerate(events):
            for path, string in _strings(payload(raw)):
                strings.setdefault(path, []).append(string.encode("utf-8", "surrogatepass"))
                indices.setdefault(path, []).append(index)
        paths = list(strings)
        for text, start, end in self.spans_in([b"".join(strings[path]) for path in paths]):
            path = paths[text]
            for part, low, high in _parts(strings[path], [(start, end)]):
                yield indices[path][part], strings[path][part], low, high


def _parts(
    texts: Sequence[bytes], spans: Iterable[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Yield (text, start, end) in each text for spans of all of them joined."""
    starts = [0, *itertools.accumulate(map(len, texts))]
    for start, end in spans:
        for index in range(bisect.bisect(starts, start) - 1, bisect.bisect_left(starts, end)):
            low = max(start, starts[index]) - starts[index]
            high = min(end, starts[index + 1]) - starts[index]
            if low < high:
                yield index, low, high


def _forms(secret: bytes) -> Iterator[bytes]:
    """Yield a secret, and its base64 at each position in a longer text."""
    yield secret
    for shift in range(3):  # inside a longer text, base64 depends on the position modulo 3
        coded = base64.b64encode(b"\0" * shift + secret)
        whole = coded[(0, 2, 3)[shift] : len(coded) - (0, 3, 2)[(shift + len(secret)) % 3]]
        yield whole
        yield whole.translate(bytes.maketrans(b"+/", b"-_"))


def _strings(data: bytes) -> Iterator[tuple[tuple[object, ...], str]]:
    """Yield (path, string) of each string value and property name of a JSON document; nothing if `data` is not JSON."""
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    stack: list[tuple[tuple[object, ...], Any]] = [((), document)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            stack += [((*path, key), item) for key, item in value.items()]
            yield from (((*path, None), key) for key in value if len(key) >= _SHORTEST)
        elif isinstance(value, list):
            stack += [((*path, key), item) for key, item in enumerate(value)]


def _raw_spans(raw: bytes, string: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) in a frame of string[start:end], in every JSON string that decodes to `string`."""
    for token in _JSON_STRING.finditer(raw):
        if b"\\" not in token[1]:
            if token[1] == string:
                yield token.start(1) + start, token.start(1) + end
            continue
        units = [(u.start(), u.end(), _decoded(u[0])) for u in _UNIT.finditer(token[1])]
        if b"".join(unit for _, _, unit in units) != string:
            continue
        at = 0
        for low, high, unit in units:
            if at < end and at + len(unit) > start:
                yield token.start(1) + low, token.start(1) + high
            at += len(unit)


def _decoded(unit: bytes) -> bytes:
    """Return one unit of a JSON string as UTF-8."""
    if not unit.startswith(b"\\"):
        return unit
    try:
        return str(json.loads(b'"' + unit + b'"')).encode("utf-8", "surrogatepass")
    except ValueError:
        return unit
