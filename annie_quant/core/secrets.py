"""The forms of secrets: tokens of known services, private keys, credentials in headers and URLs; and the search for them in files.

Each form has two patterns. `certain`: nothing else has this form, so a file with it is not published; None
where only a scanner for that service is certain. `likely`: also shorter or truncated ones, which are masked in logs
(data/masking.py). What is certain is likely too.

In files that are about to be published the rules of detect-secrets (https://github.com/Yelp/detect-secrets) are added where it is
installed (pip install "annie-quant[publish]"): those of a fixed form, without those that guess by entropy or by a keyword, which
take checksums and prompts for secrets. Text is also searched as UTF-16 and with its \\u escapes decoded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class SecretForm(NamedTuple):
    """name: with its article, for messages. kind: the group that counts name."""

    name: str
    kind: str
    certain: str | None
    likely: str


def _token(name: str, prefix: str, characters: str, certain: int | None, likely: int) -> SecretForm:
    """A token that begins with a prefix, and how many characters of the rest make it certain or likely."""
    start = rf"\b(?:{prefix}){characters}"
    return SecretForm(name, "API key", None if certain is None else f"{start}{{{certain},}}", f"{start}{{{likely},}}")


FORMS = (
    SecretForm(
        "a private key",
        "private key",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?s:.*?)(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    ),
    SecretForm(
        "a JSON web token",
        "JSON web token",
        r"\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]{8,}",
        r"\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
    ),
    _token("an API key", "sk-", r"[A-Za-z0-9_-]", 24, 16),
    _token("an API key", "sk_|[pr]k[-_]", r"[A-Za-z0-9_-]", None, 16),
    _token("a Hugging Face token", "hf_", r"[A-Za-z0-9]", 30, 20),
    _token("a GitHub token", "gh[oprsu]_", r"[A-Za-z0-9]", 30, 20),
    _token("a GitHub token", "github_pat_", r"\w", 30, 20),
    _token("a GitLab token", "glpat-", r"[\w-]", 20, 16),
    SecretForm("an AWS key", "API key", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"),
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
LIBRARY_RULES = (
    "ArtifactoryDetector", "AWSKeyDetector", "AzureStorageKeyDetector", "DiscordBotTokenDetector", "GitHubTokenDetector",
    "GitLabTokenDetector", "JwtTokenDetector", "MailchimpDetector", "NpmDetector", "OpenAIDetector", "PrivateKeyDetector",
    "PypiTokenDetector", "SendGridDetector", "SlackDetector", "SquareOAuthDetector", "StripeDetector", "TwilioKeyDetector",
)  # fmt: skip
_RULES = [(form.name, re.compile(form.certain)) for form in FORMS if form.certain is not None]
_ESCAPE = re.compile(r"\\u00([0-7][0-9a-fA-F])")


def secret_in(path: Path) -> str:
    """Return what kind of secret a file has, or "". Of weights only the header is text."""
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = int.from_bytes(file.read(8), "little")
            content = file.read(min(length, HEADER_LIMIT))
        else:
            content = file.read()
    return next((kind for text in readings(content) if (kind := _kind_of(text))), "")


def readings(content: bytes) -> Iterator[str]:
    """Yield the texts that a file's bytes may stand for."""
    texts = [content.decode("utf-8", "replace")]
    if b"\0" in content:
        texts += [content[start:].decode(f"utf-16-{order}", "replace") for order in ("le", "be") for start in (0, 1)]
    for text in texts:
        yield text
        if "\\u00" in text:
            yield _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text)


def _kind_of(text: str) -> str:
    for kind, rule in _RULES:
        if rule.search(text):
            return kind
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
