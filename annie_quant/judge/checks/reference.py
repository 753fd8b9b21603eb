"""An answer against the bf16 model's own answer to the same prompt: no label is needed.

Each check applies only where the bf16 answer has the property: what bf16 itself does not do is not
lost by quantizing. The bf16 answer is `reference`; without one, no check applies.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from annie_quant.documents import incomplete
from annie_quant.judge.checks.calls import (
    called_names,
    has_call_markup,
    normalized_call,
    schemas_fault,
)
from annie_quant.judge.checks.text import markdown_in, repetition, stop, thinking_leak

if TYPE_CHECKING:
    from annie_quant.documents import Answer
    from annie_quant.judge.workloads import Case, Workload

LENGTH_RATIO = 2.0
LENGTH_SLACK_TOKENS = 16
MIN_WORDS = 6  # of a text whose language is compared
SHARED_WORDS = 0.2  # of the content words of the shorter of two answers about the same thing
MIN_LETTERS = 4  # of a content word; digits count at any length
# The commonest short words of languages in Latin letters, each in one language of the table only.
LANGUAGES = {
    name: frozenset(words.split())
    for name, words in (
        ("English", "the and is are you of with that this it for have what your was not they"),
        ("German", "der die das und ist nicht ich sie mit ein eine auf für den dem auch wird"),
        ("French", "le les est et une dans pour vous pas avec sur des que qui nous ce"),
        ("Spanish", "el los las es y una por con para su está como más pero usted"),
        ("Italian", "il gli è di che non per sono della nel questo ma anche più"),
        ("Portuguese", "o os não é uma para com em você mais mas seu ao são"),
        ("Dutch", "het een van niet ik je dat met voor zijn op ook maar wordt"),
    )
}
_WORD = re.compile(r"[^\W\d_]+")


def same_tool(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The same functions are called as in the bf16 answer, each as often, in any order; or none, as there."""
    if reference is None or not (workload.tools_for(case) or reference.tool_calls):
        return None
    if answer.error:
        return f"the request failed: {answer.error}"
    called = called_names(answer)
    expected = called_names(reference)
    if called == expected:
        return ""
    return f"it called {_listed(called)}, bf16 called {_listed(expected)}"


def same_arguments(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Where bf16 called a function: the same calls with equal arguments (as JSON values, text without outer white space)."""
    if reference is None or not reference.tool_calls:
        return None
    if called_names(answer) != called_names(reference):
        return same_tool(answer, case, workload, reference)
    left = [normalized_call(call) for call in answer.tool_calls]
    for call in reference.tool_calls:
        expected = normalized_call(call)
        if expected not in left:
            return f"{call.get('name')} has other arguments than bf16's: {str(call.get('arguments'))[:120]}"
        left.remove(expected)
    return ""


def same_decline(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Where tools are on offer and bf16 calls none, none is called."""
    if reference is None or reference.tool_calls or has_call_markup(reference):
        return None
    return same_tool(answer, case, workload, reference)


def same_several(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """same_arguments where bf16 made two calls or more."""
    several = reference is not None and len(reference.tool_calls) > 1
    return same_arguments(answer, case, workload, reference) if several else None


def same_validity(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Where bf16's calls parse and fit their schemas, these do too; a call left in the text counts as one that does not."""
    tools = workload.tools_for(case)
    if reference is None or not reference.tool_calls or schemas_fault(reference, tools):
        return None
    if not answer.tool_calls and not has_call_markup(answer):
        return None  # no call at all: same_tool counts it
    return schemas_fault(answer, tools)


def same_text(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Where bf16 answers in words, there are words too, some of them bf16's, and they do not repeat and are language."""
    if (
        reference is None
        or not reference.text.strip()
        or repetition(reference, case, workload, None)
    ):
        return None
    if not answer.text.strip():
        return "it has no text, bf16's has"
    words = content_words(answer.text)
    expected = content_words(reference.text)
    if expected and len(words & expected) < SHARED_WORDS * min(len(expected), max(len(words), 1)):
        return "it shares hardly a word with bf16's answer"
    return repetition(answer, case, workload, None)


def same_markdown(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Markdown where the bf16 answer has it, and none where it has none."""
    if reference is None or not answer.text.strip() or not reference.text.strip():
        return None
    kind = markdown_in(answer.text)
    expected = markdown_in(reference.text)
    if kind and not expected:
        return f"it has markdown ({kind}), bf16's has none"
    return f"it has no markdown, bf16's has ({expected})" if expected and not kind else ""


def same_thinking(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Where the bf16 answer shows no thinking, this one shows none."""
    if reference is None or thinking_leak(reference, case, workload, None):
        return None
    return thinking_leak(answer, case, workload, None)


def same_language(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """No other language than the bf16 answer's, by its letters and commonest words; short texts have none."""
    if reference is None:
        return None
    expected = language_of(reference.text)
    if expected is None:
        return None
    language = language_of(answer.text)
    return "" if language in (None, expected) else f"it is {language}, bf16's is {expected}"


def same_stop(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """Where bf16 ends its answer itself, this one ends too."""
    if reference is None or incomplete("", reference.finish_reason):
        return None
    return stop(answer, case, workload, None)


def same_length(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """At most twice as long as the bf16 answer and at least half as long, by tokens, give or take 16 of them."""
    n = answer.counted_tokens
    expected = reference.counted_tokens if reference is not None else None
    if not n or not expected:
        return None
    low = expected / LENGTH_RATIO - LENGTH_SLACK_TOKENS
    high = expected * LENGTH_RATIO + LENGTH_SLACK_TOKENS
    return "" if low <= n <= high else f"{n} tokens, bf16's has {expected}"


def logged_tool(
    answer: Answer, case: Case, workload: Workload, reference: Answer | None
) -> str | None:
    """The same functions are called as in the log that the prompt comes from. Another model may have written the log."""
    logged = case.expect.get("logged")
    if not isinstance(logged, Mapping) or not workload.tools_for(case):
        return None
    expected = sorted(str(name) for name in logged.get("calls") or ())
    called = called_names(answer)
    if called == expected:
        return ""
    return f"it called {_listed(called)}, the log has {_listed(expected)}"


def content_words(text: str) -> set[str]:
    """Return the words of a text that say what it is about: its longer words and its numbers, in lower case."""
    return {w for w in re.findall(r"\w+", text.lower()) if len(w) >= MIN_LETTERS or w.isdigit()}


@cache
def _script_of(character: str) -> str:
    """Return the first word of a letter's Unicode name: LATIN, CYRILLIC, HIRAGANA."""
    return unicodedata.name(character, "?").split()[0]


@lru_cache(maxsize=4096)  # several models give most answers alike
def language_of(text: str) -> str | None:
    """Return the language of a text, or its script where that is not Latin; None where it is short or not clear."""
    words = [word.lower() for word in _WORD.findall(text)]
    scripts = Counter(_script_of(c) for c in text if c.isalpha())
    if not scripts:
        return None
    script, n = scripts.most_common(1)[0]
    if script in ("HIRAGANA", "KATAKANA", "CJK") and sum(scripts.values()) >= MIN_WORDS:
        return "Japanese" if scripts["HIRAGANA"] + scripts["KATAKANA"] else "CJK"
    if len(words) < MIN_WORDS or n < 0.6 * sum(scripts.values()):
        return None
    if script != "LATIN":
        return script.capitalize()
    counts = Counter(dict.fromkeys(LANGUAGES, 0))
    for name, common in LANGUAGES.items():
        counts[name] = sum(word in common for word in words)
    (first, most), (_, second) = counts.most_common(2)
    return first if most >= 2 and most >= 2 * second else None


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing"
