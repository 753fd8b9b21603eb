"""The forms of secrets: tokens of known services, private keys, credentials in headers and URLs.

Each form has two patterns. `certain`: nothing else has this form, so a file with it is not published (publish/secrets.py); None
where only a scanner for that service is certain. `likely`: also shorter or truncated ones, which are masked in logs
(data/logs/secrets.py). What is certain is likely too.
"""

from __future__ import annotations

from typing import NamedTuple


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
