"""Checks of an answer's text alone: it exists, ends, is language, and has no markdown and no thinking. No model is needed."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from annie_quant.documents import incomplete

if TYPE_CHECKING:
    from annie_quant.judge.answers import Answer
    from annie_quant.judge.workloads import Case, Workload

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

# ---- repetition, and text that is not language

_WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
_SPECIAL = re.compile(r"<\|[a-z_]+\|>|\[/?INST\]|</?s>")
_RUN = re.compile(r"([^\s.\-=_~…])\1{9,}")
_SCRIPTS = (
    "LATIN",
    "CYRILLIC",
    "GREEK",
    "ARABIC",
    "HEBREW",
    "DEVANAGARI",
    "THAI",
    "HANGUL",
    "CJK",
    "HIRAGANA",
    "KATAKANA",
)
_ODD_WORD = re.compile(r"^[^aeiouyAEIOUY]+$|[a-z][A-Z]{2}|[bcdfghjklmnpqrstvwxz]{6}")


@lru_cache(
    maxsize=2048
)  # several models give most answers alike, and each is counted several times
def repeats(text: str) -> str:
    """Return what is repeated, as a phrase; "" where nothing is."""
    if run := _RUN.search(text):
        return f"{run.group(1)!r} over and over"
    words = [w.casefold() for w in _WORD.findall(text)]
    for period in range(1, 13):
        # "No, no, no" is normal speech: a word must come six times in a row, a phrase four times, a sentence three.
        least = 6 if period == 1 else 4 if period <= 4 else 3
        if (at := _cycle(words, period, least)) is not None:
            return f"{' '.join(words[at : at + period])!r} over and over"
    sentences = Counter(
        s.strip().casefold() for s in re.split(r"[.!?\n]+", text) if len(s.split()) >= 4
    )
    sentence, times = sentences.most_common(1)[0] if sentences else ("", 0)
    if times >= 3:
        return f"{sentence!r} {times} times"
    fours = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    if len(fours) >= 60 and len(set(fours)) < 0.5 * len(fours):
        return "more than half of its phrases are repeats"
    return ""


def _cycle(words: list[str], period: int, times: int) -> int | None:
    """Return where a cycle of `period` words starts that comes `times` times in a row."""
    same, needed = 0, period * (times - 1)
    for index in range(period, len(words)):
        same = same + 1 if words[index] == words[index - period] else 0
        if same >= needed:
            return index - same - period + 1
    return None


@lru_cache(maxsize=2048)
def garbled(text: str) -> str:
    """Return why the text is not language, as a phrase; "" where it may be."""
    if special := _SPECIAL.search(text):
        return f"a special token in the text: {special.group(0)}"
    if "\ufffd" in text:
        return "broken characters in the text"
    scripts = _scripts(text)
    if len(scripts) >= 3:
        return f"letters of {len(scripts)} scripts: {', '.join(sorted(scripts))}"
    visible = [c for c in text if not c.isspace()]
    if len(visible) >= 20 and sum(c.isalnum() for c in visible) < 0.5 * len(visible):
        return "more signs than letters"
    return _nonsense(text)


def _scripts(text: str) -> set[str]:
    names = [unicodedata.name(char, "") for char in set(text) if char.isalpha()]
    scripts = {s for s in _SCRIPTS for name in names if name.startswith(s)}
    # Japanese uses three scripts.
    return scripts - {"HIRAGANA", "KATAKANA"} | (
        {"CJK"} if scripts & {"HIRAGANA", "KATAKANA"} else set()
    )


def _nonsense(text: str) -> str:
    """English words have vowels and rarely change case inside; where a third of the words differ, the text is noise."""
    words = re.findall(r"[A-Za-z]{4,}", text)
    odd = [w for w in words if _ODD_WORD.search(w)]
    return (
        f"not words: {', '.join(odd[:3])}" if len(words) >= 6 and len(odd) * 3 > len(words) else ""
    )


# ---- the answer as a whole


def non_empty(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Visible content or a tool call was received. An error, or white space alone, fails."""
    if answer.error:
        return f"the request failed: {answer.error}"
    if not answer.silent:
        return ""
    return "the content is empty" + (
        "; only thinking was received" if answer.reasoning.strip() else ""
    )


def stop(answer: Answer, case: Case, workload: Workload, reference: Answer | None) -> str | None:
    """The model ended its answer itself."""
    if answer.error or not answer.finish_reason:
        return None
    if answer.finish_reason == "length":
        return f"not finished at max_tokens ({workload.max_tokens_for(case)})"
    return incomplete("", answer.finish_reason)


def repetition(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The text is language: no loops, no garbled characters or words."""
    return (repeats(answer.text) or garbled(answer.text)) if answer.text.strip() else None


# ---- markdown (R31): CommonMark's tokens (markdown-it-py), without what reads as prose or arithmetic
#
# An answer that is spoken has no **, no #, no list dashes, no backticks, no numbered lists. A minus in prose, a product sign
# between numbers, '#1', 'C#' and '__init__' are not markdown.

_BLOCKS = {
    "heading_open": "heading",
    "fence": "code block",
    "blockquote_open": "quote",
    "table_open": "table",
    "hr": "rule",
}
_INLINE = {
    "strong_open": "bold",
    "em_open": "emphasis",
    "code_inline": "backticks",
    "s_open": "strikethrough",
    "link_open": "link",
    "image": "image",
}
_BULLET = re.compile(r"^[ \t]*[•‣◦▪●]\s+\S", re.MULTILINE)
_OPEN_BOLD = re.compile(r"(?<![\w*\\/])\*\*(?=[A-Za-z])(?!kwargs\b)")
_SIGNED_NUMBER = re.compile(r"^[\d.,]+")
_DUNDER = re.compile(r"^[a-z][a-z0-9_]*$")


@cache
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    # Indented code, HTML and <autolinks> are ignored: they do not change how the text is spoken.
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    return parser.disable(["code", "html_block", "html_inline", "autolink"])


@lru_cache(maxsize=2048)  # as repeats()
def markdown_in(text: str) -> str:
    """Return the first kind of markdown ("bold", "list", "heading", …); "" where there is none."""
    tokens, lines = _parser().parse(text), text.split("\n")
    for index, token in enumerate(tokens):
        kind = _BLOCKS.get(token.type)
        if kind and not _prose_block(lines, tokens, index):
            return kind
        if token.type in ("bullet_list_open", "ordered_list_open") and _is_list(tokens, index):
            return "list" if token.type == "bullet_list_open" else "numbered list"
        if token.type == "inline" and (kind := _inline_kind(token.children or [])):
            return kind
    if _BULLET.search(text):
        return "list"
    return "bold" if _OPEN_BOLD.search(text) else ""


def _prose_block(lines: list[str], tokens: list[Token], index: int) -> bool:
    """Blocks to CommonMark that are prose to a reader: a single dash under a line, '> 5 is too many'."""
    token = tokens[index]
    if token.type == "heading_open" and token.markup in ("-", "="):
        # CommonMark accepts one character under a heading; only a longer line is meant as one.
        return token.map is not None and len(lines[token.map[1] - 1].strip()) < 3
    if token.type == "blockquote_open":
        content = next((t.content for t in tokens[index:] if t.type == "inline"), "")
        return bool(_SIGNED_NUMBER.match(content))
    return False


def _is_list(tokens: list[Token], index: int) -> bool:
    """A list of two items is a list; one item may be a signed number ('- 5 degrees') or prose ('15. That is …')."""
    level = tokens[index].level
    items, contents = [], []
    for token in tokens[index + 1 :]:
        if token.type.endswith("_list_close") and token.level == level:
            break
        if token.type == "list_item_open" and token.level == level + 1:
            items.append(token)
        if token.type == "inline":
            contents.append(token.content)
    if len(items) > 1:
        return True
    content = contents[0] if contents else ""
    if tokens[index].type == "ordered_list_open":
        return items[0].info == "1" and bool(content)
    return bool(content) and not (items[0].markup in "-+" and _SIGNED_NUMBER.match(content))


def _inline_kind(children: list[Token]) -> str:
    for index, child in enumerate(children):
        if child.type in _INLINE and not (
            child.type in ("em_open", "strong_open") and _not_emphasis(children, index)
        ):
            return _INLINE[child.type]
    return ""


def _not_emphasis(children: list[Token], index: int) -> bool:
    """Product signs between numbers or single letters ('3*5*2', 'a*b*c'), and Python's dunder names."""
    start = children[index]
    before = children[index - 1].content if index and children[index - 1].type == "text" else ""
    inside = next(
        (child.content for child in children[index + 1 : index + 2] if child.type == "text"), ""
    )
    if start.markup == "__":
        return bool(_DUNDER.match(inside))
    return bool(
        re.search(r"(?:\d|\)|\b[a-zA-Z])\s*$", before)
        and re.match(r"^\s*(?:\d|\(|[a-zA-Z]\b)", inside)
    )


def no_markdown(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """An empty answer fails; a tool call without text is not checked."""
    if not answer.text.strip():
        return None if answer.tool_calls else "no text was received"
    return f"markdown: {kind}" if (kind := markdown_in(answer.text)) else ""


# ---- thinking where it does not belong: in the content ever, or anywhere when thinking is off
#
# It is recognised by think tags (complete, or half open) and by the way base Qwen3.5 starts ("Thinking Process:" first).

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
    if tag := _TAG.search(text):
        return f"a {tag.group(0).strip()!r} tag in the content"
    preamble = _PREAMBLE.match(text)
    return (
        f"the content starts with thinking: {preamble.group(0).strip()[:40]!r}" if preamble else ""
    )


def thinking_leak(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """With thinking off, thinking in the reasoning field fails too: the user waits for it."""
    if not workload.thinking and answer.reasoning.strip():
        return "it thought although thinking is off (in the reasoning field)"
    return None if answer.silent else leaked(answer.text)
