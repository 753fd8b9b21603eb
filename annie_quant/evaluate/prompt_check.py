"""Whether a checkpoint's own tokenizer and chat template give what the reference's give, on which the evaluation is computed.

A server uses the checkpoint's own files. Where they give other prompts, the answers that were compared are not the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from annie_quant.checkpoint import prompt_files
from annie_quant.errors import AnnieError
from annie_quant.evaluate.prompts import Answered, Template
from annie_quant.judge.answers import assistant_message

SHOWN = 3


class PromptCheck(NamedTuple):
    """blocking: why the verdict cannot be "keeps". notes: what else a reader must know."""

    blocking: list[str]
    notes: list[str]


def check(folder: Path, source: Path, template: Template, answered: Sequence[Answered]) -> PromptCheck:
    """Compare what the files of `folder` give with what the reference's give, for these prompts and the reference's answers.

    template: the reference's, of the folder `source`.
    """
    if folder.resolve() == source.resolve() or prompt_files.same_bytes(folder, source):
        return PromptCheck([], [])
    if not prompt_files.has_tokenizer(folder):
        return PromptCheck([], ["the checkpoint has no tokenizer; both models were evaluated with the reference's"])
    blocking = [difference.message for difference in prompt_files.differences(folder, source)]
    try:
        own = Template(folder)
    except AnnieError as error:
        return PromptCheck([*blocking, f"no server can use the checkpoint's tokenizer: {error.message}"], [])
    if set(own.end_tokens) != set(template.end_tokens):
        blocking.append(f"its answers end with tokens {own.end_tokens}, the reference's with {template.end_tokens}")
    if other := other_prompts(own, template, answered):
        names = ", ".join(other[:SHOWN]) + (", ..." if len(other) > SHOWN else "")
        blocking.append(
            f"the checkpoint's own tokenizer and chat template give other tokens for {len(other)} of {len(answered)} prompts "
            f"({names}); the answers that were compared are not those of a server"
        )
    notes = [] if blocking else ["the tokenizer's files differ from the reference's, and give the same tokens"]
    return PromptCheck(blocking, notes)


def other_prompts(own: Template, template: Template, answered: Sequence[Answered]) -> list[str]:
    """Return the names of the prompts, or answers, that are other tokens or another text with the checkpoint's own files."""
    other = []
    earlier: dict[tuple[str, str], list[Any]] = {}
    for request, completion in answered:
        messages = earlier.setdefault(request.conversation, [])
        try:
            same = own.request(request.workload, request.case, request.turn, messages).prompt == request.prompt
        except AnnieError:
            same = False
        texts = [t.tokenizer.decode(completion.tokens, skip_special_tokens=False) for t in (own, template)]
        if not same or texts[0] != texts[1]:
            other.append(request.name)
        answer = template.answer(request, completion)
        messages.append(assistant_message(answer.text, answer.tool_calls))
    return other
