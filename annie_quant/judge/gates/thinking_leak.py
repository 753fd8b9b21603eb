"""No thinking where it does not belong: none in the content ever, none at all when thinking is switched off.

Seen as think tags (whole, or half open) and as the preamble of base Qwen3.5 ("Thinking Process:" first).
With thinking off, thinking that a server hides in the reasoning field counts too: it is what the user waits for.
"""

from __future__ import annotations

import re

from annie_quant.judge.answers import Answer
from annie_quant.judge.rules import Threshold
from annie_quant.judge.workloads import Case, Workload

NAME = "thinking_leak"
TITLE = "no thinking leak"
THRESHOLD = Threshold("zero", founding_n=25)
ADVISORY = False

_TAG = re.compile(r"</?\s*think(?:ing)?\s*>|<think(?:ing)?\s*$", re.IGNORECASE)
_DECORATION = r"[\s*_#>`]*"
_USER = (
    r"the\s+user\s+(?:is\s+(?:asking|saying|greeting|requesting|looking)|asks|asked|wants|said|says|just|has\s+asked"
    r"|greeted|seems)\b"
)
_PREAMBLE = re.compile(
    rf"^{_DECORATION}(?:"
    r"(?:here(?:'|’)?s\s+|here\s+is\s+)?(?:my\s+|a\s+|the\s+)?(?:thinking|thought|reasoning)\s+process\b"
    r"|(?:thinking|reasoning|analysis|internal monologue|thoughts)[*_ \t]*(?::|\n)"
    r"|1[.)]\s*[*_]*analy[sz]e\s+(?:the\s+)?(?:user'?s?\s+)?(?:request|input|question|query|message)"
    r"|analy[sz]e\s+the\s+(?:request|user|input)"
    rf"|(?:okay|ok|alright|hmm|so|right|wait|first)?,?\s*(?:let\s+me\s+think\s+(?:about|through)\b.*\buser|{_USER})"
    r"|i\s+(?:need\s+to|have\s+to|should)\s+(?:respond|reply|answer)\s+(?:to\s+the\s+user|as\s+\w+)\b"
    r")",
    re.IGNORECASE,
)


def leaked(text: str) -> str:
    """What thinking stands in visible text, in words; "" when there is none."""
    tag = _TAG.search(text)
    if tag:
        return f"a {tag.group(0).strip()!r} tag in the content"
    preamble = _PREAMBLE.match(text)
    return f"the content starts with thinking: {preamble.group(0).strip()[:40]!r}" if preamble else ""


def fault(answer: Answer, case: Case, workload: Workload) -> str | None:
    if not workload.thinking and answer.reasoning.strip():
        return "it thought although thinking is off (hidden in the reasoning field)"
    if answer.silent:
        return None
    return leaked(answer.text)
