"""Checks of an answer's text alone: it exists, ends, is language, and has no markdown and no thinking. No model is needed."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from annie_quant.documents import incomplete
from annie_quant.judge.checks.statements import fold

if TYPE_CHECKING:
    from annie_quant.documents import Answer
    from annie_quant.judge.workloads import Case, Workload

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

# ---- repetition, and text that is not language

_SPECIAL = re.compile(r"<\|[a-z_]+\|>|\[/?INST\]|</?s>")
# A number may have many equal digits.
_RUN = re.compile(r"([^\s.\-=_~…\d])\1{9,}|(\d)\2{39,}")
# "No, no, no" is normal speech: how many times a cycle must come, by its words.
_MIN_CYCLES = {1: 6} | dict.fromkeys(range(2, 5), 4) | dict.fromkeys(range(5, 13), 3)
MIN_PHRASES = 60  # of four words, in a text whose repeated phrases are counted
MIN_WORDS_TO_JUDGE = 6  # with four letters or more
MAX_ACRONYM = 5  # letters
MIN_SIGNS = 20  # visible characters of a text whose signs are counted
_SYLLABIC = re.compile("(?<=[a-z])[lr](?=[a-z])")  # "prst", "vlk"
_DIGRAPHS = re.compile("sch|[cstp]h|ck|tz|[sczrd]z")
_VOWELS = "aeiouyøæœıə"
_ODD_WORD = re.compile(rf"^[^{_VOWELS}]+$|[^{_VOWELS}]{{6}}")
_PROSE_WORD = re.compile(r"(?<![\w.$])[^\W\d_]{4,}(?![\w(=]|\.\w)")
_ODD_CASE = re.compile("[a-z][A-Z]{2}")


@lru_cache(maxsize=2048)  # several models give most answers alike, and each is counted often
def repeats(text: str) -> str:
    """Return what is repeated, as a phrase; "" where nothing is."""
    run = _RUN.search(text)
    if run:
        return f"{run.group()[0]!r} over and over"
    words = _words(text)
    for period, times in _MIN_CYCLES.items():
        at = _cycle(words, period, times)
        if at is not None:
            return f"{' '.join(words[at : at + period])!r} over and over"
    sentences = Counter(
        s.strip().casefold() for s in re.split(r"[.!?\n]+", text) if len(s.split()) >= 4
    )
    for sentence, times in sentences.most_common(1):
        if times >= 3:
            return f"{sentence!r} {times} times"
    phrases = list(zip(*(words[i:] for i in range(4)), strict=False))
    if len(phrases) >= MIN_PHRASES and len(set(phrases)) < 0.5 * len(phrases):
        return "more than half of its phrases are repeats"
    return ""


def _words(text: str) -> list[str]:
    """Return the words of a text in any script, in lower case; vowel signs are parts of words."""
    spaced = "".join(c if _in_word(c) or c in "'’-" else " " for c in text)
    return [word for part in spaced.casefold().split() if (word := part.strip("'’-"))]


def _in_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character).startswith("M")


def _cycle(words: list[str], period: int, times: int) -> int | None:
    """Return where a cycle of `period` words starts that comes `times` times in a row."""
    same = 0
    needed = period * (times - 1)
    for index in range(period, len(words)):
        same = same + 1 if words[index] == words[index - period] else 0
        if same >= needed:
            return index - same - period + 1
    return None


@lru_cache(maxsize=2048)
def garbled(text: str) -> str:
    """Return why the text is not language, as a phrase; "" where it may be."""
    special = _SPECIAL.search(text)
    if special:
        return f"a special token in the text: {special.group()}"
    if "\ufffd" in text:
        return "broken characters in the text"
    return _mixed_scripts(text) or _signs(text) or _nonsense(text)


def _mixed_scripts(text: str) -> str:
    """Where three scripts follow each other without the commonest one between them, the text is noise.

    A sentence with words of several languages has its own words between them.
    """
    scripts = [_script(character) for character in text if character.isalpha()]
    counts = Counter(scripts)
    if len(counts) < 3:
        return ""
    [(commonest, _)] = counts.most_common(1)
    changes = sum(
        before != after and commonest not in (before, after)
        for before, after in itertools.pairwise(scripts)
    )
    if changes < 2:
        return ""
    return f"letters of {len(counts)} scripts: {', '.join(sorted(counts))}"


@lru_cache(maxsize=4096)
def _script(letter: str) -> str:
    """Return the script of a letter, one for all that Japanese uses."""
    script = unicodedata.name(letter, "?").split()[0]
    return "CJK" if script in ("HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA") else script


def _signs(text: str) -> str:
    """More signs than letters are noise where they stand alone; code and JSON have names among them."""
    words = text.split()
    visible = "".join(words)
    n_letters = sum(map(_in_word, visible))
    alone = sum(not any(map(_in_word, word)) for word in words)
    if len(visible) < MIN_SIGNS or 2 * n_letters >= len(visible) or 2 * alone <= len(words):
        return ""
    return "more signs than letters"


def _nonsense(text: str) -> str:
    """Words in Latin letters have vowels and rarely change case inside; where a third differ, the text is noise.

    Short words in capitals are acronyms. Names in code are not counted.
    """
    words = [
        word
        for word in _PROSE_WORD.findall(text)
        if not (word.isupper() and len(word) <= MAX_ACRONYM) and _script(word[0]) == "LATIN"
    ]
    odd = [word for word in words if _ODD_CASE.search(word) or _ODD_WORD.search(_skeleton(word))]
    if len(words) < MIN_WORDS_TO_JUDGE or 3 * len(odd) <= len(words):
        return ""
    return f"not words: {', '.join(odd[:3])}"


def _skeleton(word: str) -> str:
    """Return a word in lower case, without accents, syllabic consonants as vowels, digraphs as one letter."""
    return _DIGRAPHS.sub("c", _SYLLABIC.sub("e", fold(word)))


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
# An answer that is spoken has no **, no #, no list dashes, no backticks, no numbered lists. A minus
# in prose, a product sign between numbers, '#1', 'C#' and '__init__' are not markdown.

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
    tokens = _parser().parse(text)
    lines = text.split("\n")
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
    items = []
    contents = []
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
# It is recognised by think tags (complete, or half open) and by the way base Qwen3.5 starts
# ("Thinking Process:" first).

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
