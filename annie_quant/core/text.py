"""Foreign text (of a file, a model, a server) in this program's output.

printable(text)   for a terminal, a log or a message: without what is not shown
visible(text)     for a page that shows evidence: control characters and text-direction overrides as ⟨U+XXXX⟩
inert(text)       for Markdown, also in a table's cell: visible, on one line, and shown as it is
"""

from __future__ import annotations

import re
import unicodedata

# ECMA-48: control sequences (CSI), strings that a terminal executes (OSC, DCS, SOS, PM, APC), and
# two-character escapes.
_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]?|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?|\x1b[ -/]*.?",
    re.DOTALL,
)

# C0 without tab and newline, DEL and C1, separators, bidi marks and isolates, surrogates, specials,
# variation tags.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff0-\uffff\U000e0000-\U000e0fff]"
)

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~])")


def printable(text: str, most: int | None = None, lines: bool = False) -> str:
    """Return text without escape sequences and invisible characters, on one line (`lines`: keep line breaks and tabs).

    most: longest result. Characters that change the order of others (Trojan Source, CVE-2021-42574)
        are invisible too.
    """
    if not text.isprintable():
        allowed = "\n\t" if lines else ""
        text = _ESCAPE.sub("", text)
        text = "".join(c if c in allowed or c.isprintable() else _replacement(c) for c in text)
    if not lines:
        text = " ".join(text.split())
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def _replacement(character: str) -> str:
    """Return a space for white space, nothing for format characters, U+FFFD for a surrogate or an unassigned one."""
    category = unicodedata.category(character)
    if category.startswith("Z") or character in "\n\r\t\v\f\x85":
        return " "
    return "" if category in ("Cc", "Cf") else "\ufffd"


def visible(text: object) -> str:
    """Return text that is safe to show, with its unsafe characters as ⟨U+XXXX⟩, line ends as newlines."""
    text = str(text).replace("\r\n", "\n")
    return _UNSAFE.sub(lambda match: f"⟨U+{ord(match.group()):04X}⟩", text)


def inert(value: object) -> str:
    """Return one line of text that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\1", " ".join(visible(value).split()))
