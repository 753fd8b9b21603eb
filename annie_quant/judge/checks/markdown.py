"""Markdown in a text (R31): CommonMark's tokens (markdown-it-py), without what reads as prose or arithmetic.

An answer that is spoken has no **, no #, no list dashes, no backticks, no numbered lists. A minus in prose, a product sign
between numbers, '#1', 'C#' and '__init__' are not markdown.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from typing import Any

from annie_quant.judge.answers import Answer
from annie_quant.judge.workloads import Case, Workload

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
def _parser() -> Any:
    from markdown_it import MarkdownIt

    # Indented code, HTML and <autolinks> are ignored: they do not change how the text is spoken.
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    return parser.disable(["code", "html_block", "html_inline", "autolink"])


@lru_cache(maxsize=2048)  # as in garble.py
def markdown_in(text: str) -> str:
    """Return the first kind of markdown ("bold", "list", "heading", …); "" where there is none."""
    tokens, lines = _parser().parse(text), text.split("\n")
    for index, token in enumerate(tokens):
        kind = _BLOCKS.get(token.type)
        if kind and not _prose_block(lines, tokens, index):
            return kind
        if token.type in ("bullet_list_open", "ordered_list_open") and _is_list(tokens, index):
            return "list" if token.type == "bullet_list_open" else "numbered list"
        if token.type == "inline":
            kind = _inline_kind(token.children or [])
            if kind:
                return kind
    if _BULLET.search(text):
        return "list"
    return "bold" if _OPEN_BOLD.search(text) else ""


def _prose_block(lines: list[str], tokens: list[Any], index: int) -> bool:
    """Blocks to CommonMark that are prose to a reader: a single dash under a line, '> 5 is too many'."""
    token = tokens[index]
    if token.type == "heading_open" and token.markup in ("-", "="):
        # CommonMark accepts one character under a heading; only a longer line is meant as one.
        return len(lines[token.map[1] - 1].strip()) < 3
    if token.type == "blockquote_open":
        content = next((t.content for t in tokens[index:] if t.type == "inline"), "")
        return bool(_SIGNED_NUMBER.match(content))
    return False


def _is_list(tokens: list[Any], index: int) -> bool:
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
    if not content:
        return False
    return not (items[0].markup in "-+" and _SIGNED_NUMBER.match(content))


def _inline_kind(children: list[Any]) -> str:
    for index, child in enumerate(children):
        kind = _INLINE.get(child.type)
        if kind is None:
            continue
        if child.type in ("em_open", "strong_open") and _not_emphasis(children, index):
            continue
        return kind
    return ""


def _not_emphasis(children: list[Any], index: int) -> bool:
    """Product signs between numbers or single letters ('3*5*2', 'a*b*c'), and Python's dunder names."""
    start = children[index]
    before = children[index - 1].content if index and children[index - 1].type == "text" else ""
    inside = children[index + 1].content if index + 1 < len(children) and children[index + 1].type == "text" else ""
    if start.markup == "__":
        return bool(_DUNDER.match(inside))
    return bool(re.search(r"(?:\d|\)|\b[a-zA-Z])\s*$", before) and re.match(r"^\s*(?:\d|\(|[a-zA-Z]\b)", inside))


def no_markdown(answer: Answer, case: Case, workload: Workload) -> str | None:
    """An empty answer fails; a tool call without text is not checked."""
    if not answer.text.strip():
        return None if answer.tool_calls else "no text was received"
    kind = markdown_in(answer.text)
    return f"markdown: {kind}" if kind else ""
