"""Secrets in files that are about to be published, by their form.

The forms of annie_quant.secret_forms always apply; those of detect-secrets (https://github.com/Yelp/detect-secrets) are added where
it is installed (pip install "annie-quant[publish]"): its rules of a fixed form, without those that guess by entropy or by a
keyword, which take checksums and prompts for secrets. Text is also searched as UTF-16 and with its \\u escapes decoded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from annie_quant.secret_forms import FORMS

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
