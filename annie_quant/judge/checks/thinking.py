"""Thinking where it does not belong: in the content ever, or anywhere when thinking is off.

It is recognised by think tags (complete, or half open) and by the way base Qwen3.5 starts ("Thinking Process:" first).
"""

from __future__ import annotations

import re

from annie_quant.judge.answers import Answer
from annie_quant.judge.workloads import Case, Workload

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
    """Return what thinking is in visible text, as a phrase; "" where there is none."""
    tag = _TAG.search(text)
    if tag:
        return f"a {tag.group(0).strip()!r} tag in the content"
    preamble = _PREAMBLE.match(text)
    return f"the content starts with thinking: {preamble.group(0).strip()[:40]!r}" if preamble else ""


def thinking_leak(answer: Answer, case: Case, workload: Workload) -> str | None:
    """With thinking off, thinking in the reasoning field fails too: the user waits for it."""
    if not workload.thinking and answer.reasoning.strip():
        return "it thought although thinking is off (in the reasoning field)"
    return None if answer.silent else leaked(answer.text)
