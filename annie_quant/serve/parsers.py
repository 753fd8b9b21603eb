"""The servers' parsers of tool calls and of thinking that fit a checkpoint's chat template.

Recipes name those of Qwen3.5. Sources: vLLM's documentation, "Tool Calling" (hermes, llama3_json), and SGLang's, "Tool Parser"
(qwen25, llama3), both read on 2026-11-23.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from annie_quant.judge.tool_markup import THINK, Form, form_of
from annie_quant.schema import salvage_or_default

TOOL_PARSERS: dict[str, dict[Form, str]] = {
    "vllm": {"hermes": "hermes", "llama_json": "llama3_json"},
    "sglang": {"hermes": "qwen25", "llama_json": "llama3"},
}


class TokenizerConfig(msgspec.Struct):
    """tokenizer_config.json; chat_template is a text or a list of named ones."""

    chat_template: object = msgspec.UNSET


def template_of(model: Path) -> str:
    """Return the source of a checkpoint's chat template, of all of them where they are several; "" without one."""
    try:
        return (model / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    except OSError:
        named = salvage_or_default(TokenizerConfig, model / "tokenizer_config.json").chat_template
    templates = named if isinstance(named, list) else [{"template": named}]
    texts = [t.get("template") for t in templates if isinstance(t, Mapping)]
    return "\n".join(text for text in texts if isinstance(text, str))


def fitted(words: list[str], model: Path, runtime: str) -> list[str]:
    """Return a copy of a command with the parsers for a checkpoint's template; an equal one where no template can be read.

    A template without thinking gets no reasoning parser, because vLLM's stops at a vocabulary without its marks; one without
    tools gets no tool parser.
    """
    template, words = template_of(model), list(words)
    if not template:
        return words
    if THINK not in template:
        remove(words, "--reasoning-parser", 2)
    if "tools" not in template:
        remove(words, "--tool-call-parser", 2)
        remove(words, "--enable-auto-tool-choice", 1)
    elif "--tool-call-parser" in words and (parser := TOOL_PARSERS[runtime].get(form_of(template))):
        words[words.index("--tool-call-parser") + 1] = parser
    return words


def remove(words: list[str], option: str, count: int) -> None:
    """Take an option out of a command, if it is there. count: of its words, the value included."""
    if option in words:
        at = words.index(option)
        del words[at : at + count]
