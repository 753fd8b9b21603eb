"""What is asked and scored offline: workload cases and conversations as tokens, and each token's class.

Prompts are rendered by the reference's own chat template with `enable_thinking` always given, as the benchmark sends
them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from annie_quant.checkpoint.remote_code import refused
from annie_quant.errors import UsageError
from annie_quant.evaluate.decoding import Decoded
from annie_quant.evaluate.prefix import common
from annie_quant.files import read_whole_json
from annie_quant.judge import Answer, Case, Workload, parse_raw

CLASSES = ("content", "tool_markup", "thinking", "end_of_turn")
_SPANS = re.compile(
    r"(?P<tool_markup><tool_call>.*?(?:</tool_call>|$))|(?P<thinking><think>.*?(?:</think>|$))", re.DOTALL
)


@dataclass(frozen=True)
class Ask:
    """One request of one case. `talk` says which asks are turns of the same conversation."""

    workload: Workload
    case: Case
    turn: int
    prompt: tuple[int, ...]

    @property
    def talk(self) -> tuple[str, str]:
        return (self.workload.name, self.case.id)

    @property
    def name(self) -> str:
        return f"{self.workload.name}/{self.case.id}" + (f"/{self.turn + 1}" if self.case.turns else "")


class Template:
    """A tokenizer with its chat template and its end marks."""

    def __init__(self, folder: str | os.PathLike) -> None:
        from transformers import AutoTokenizer

        with refused(Path(folder)):
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        if not self.tokenizer.chat_template:
            raise UsageError(f"{folder} has no chat template", "copy chat_template.jinja beside the tokenizer")
        ends = {self.tokenizer.eos_token_id}
        generation = read_whole_json(Path(folder) / "generation_config.json")
        if isinstance(generation, dict):
            more = generation.get("eos_token_id")
            ends |= set(more) if isinstance(more, list) else {more}
        self.ends = sorted(e for e in ends if e is not None)
        if not self.ends:
            raise UsageError(f"{folder}: neither the tokenizer nor generation_config.json names an end token")

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Any, thinking: bool, answer_next: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            [decoded_calls(m) for m in messages],
            tools=tools or None,
            add_generation_prompt=answer_next,
            enable_thinking=thinking,
            tokenize=False,
        )

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def ask(self, workload: Workload, case: Case, turn: int = 0, answers: Sequence[Mapping[str, Any]] = ()) -> Ask:
        text = self.text(workload.messages(case, turn, answers), workload.tools_for(case), workload.thinking)
        return Ask(workload, case, turn, tuple(self.ids(text)))

    def answer(self, ask: Ask, decoded: Decoded) -> Answer:
        """What a careful server would have made of these tokens."""
        raw = self.tokenizer.decode(decoded.tokens, skip_special_tokens=False)
        end = self.tokenizer.decode([self.ends[0]]) if decoded.finished else ""
        tools = ask.workload.tools_for(ask.case)
        found = parse_raw(raw, ask.workload.thinking, tools, completion_tokens=len(decoded.tokens) + decoded.finished)
        reason = "length" if not end else "tool_calls" if found.tool_calls else "stop"
        return Answer(found.text, found.reasoning, found.tool_calls, reason, "", found.completion_tokens)

    def classes(self, target: Sequence[int], thinking: bool) -> list[int]:
        """For each target token the index of its class in CLASSES."""
        pieces = self.tokenizer.batch_decode([[t] for t in target], skip_special_tokens=False)
        opened = "<think>" if thinking else ""
        text = opened + "".join(pieces)
        kinds = [0] * len(text)
        for match in _SPANS.finditer(text):
            kinds[match.start() : match.end()] = [CLASSES.index(str(match.lastgroup))] * (match.end() - match.start())
        found, at = [], len(opened)
        for token, piece in zip(target, pieces, strict=True):
            found.append(3 if token in self.ends else kinds[min(at, len(kinds) - 1)] if kinds else 0)
            at += len(piece)
        return found


@dataclass(frozen=True)
class Scored:
    """One answer whose tokens are scored: where it comes from and what its tokens are."""

    category: str
    prompt: tuple[int, ...]
    target: tuple[int, ...]
    thinking: bool = False


def assistant_message(answer: Answer) -> dict[str, Any]:
    """An answer as the message that the next turn's request holds."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.tool_calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in answer.tool_calls
        ]
    return message


def decoded_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its calls' arguments as dicts, which Qwen3.5's template asks for."""
    message = dict(message)
    calls = []
    for call in message.get("tool_calls") or ():
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError:
                function["arguments"] = {"arguments": function["arguments"]}
        calls.append({**call, "function": function})
    if calls:
        message["tool_calls"] = calls
    return message


def conversation_answers(template: Template, rows: Iterable[Mapping[str, Any]]) -> list[Scored]:
    """Every assistant message of every conversation, each behind the prompt that it would have been asked with."""
    found = []
    for row in rows:
        messages, tools, thinking = row["messages"], row.get("tools"), bool(row.get("thinking"))
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = template.text(messages[:n], tools, thinking)
            whole = template.text(messages[: n + 1], tools, thinking, answer_next=False)
            if not whole.startswith(prompt):
                whole = prompt + whole[common(prompt, whole) :]
            target = template.ids(whole[len(prompt) :])
            ends = [i for i, t in enumerate(target) if t in template.ends]
            if ends:  # the template's newline after the end mark is not the model's to say
                found.append(
                    Scored(row.get("category", ""), tuple(template.ids(prompt)), tuple(target[: ends[0] + 1]), thinking)
                )
    return found


def text_pieces(template: Template, path: str | os.PathLike, length: int = 512) -> list[Scored]:
    """A plain text file in pieces of `length` tokens; every token but a piece's first is scored from those before it."""
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"{path} is not there", "--text wants a plain text file")
    ids = template.ids(path.read_text(encoding="utf-8"))
    pieces = [ids[at : at + length] for at in range(0, len(ids), length)]
    found = [Scored(path.name, tuple(p[:1]), tuple(p[1:])) for p in pieces if len(p) > 1]
    if not found:
        raise UsageError(f"{path} holds {len(ids)} tokens; perplexity needs two or more")
    return found
