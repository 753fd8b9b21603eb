"""Conversations that the user's own model writes, because it reads the system prompt, and rows read back against that prompt.

Users' messages and tools' results are drawn as for the offline teacher; every answer is the model's own greedy one. A user
agrees once where the model asks before it calls.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from annie_quant.core.progress import Progress
from annie_quant.core.templates import render_text
from annie_quant.core.untrusted import decode_json
from annie_quant.data import exchanges
from annie_quant.data.prompt_rules import rules_of
from annie_quant.data.row_rules import Row, faults, spread
from annie_quant.data.tool_exchanges import draw_exchange, with_drawn_tools
from annie_quant.data.tool_results import draw_result
from annie_quant.documents import ChatMessage, ChatRow, RowProvenance
from annie_quant.documents.persona import Persona, Tool

MODEL_TEACHER = "model"
SPLIT = "calibration"
_MAX_ANSWERS = 6  # of one conversation
ROW_MAX_TOKENS = 512  # of one answer; a row with a longer one is left out
REQUESTS_PER_TALK = 2  # requests for a tool, for each other message
MAX_DRAWS = 20  # per conversation, until its first message is new
READ_BACK_ROWS = 30
READ_BACK_TOKENS = 8
EXAMPLE_ROWS = 10
MAX_EXAMPLE = 300  # characters


class ModelAnswer(NamedTuple):
    """complete: whether the model ended it, and not the token limit. refused: why the chat template cannot render its prompt."""

    message: ChatMessage
    complete: bool
    n_tokens: int
    refused: str = ""


class AnsweringModel(Protocol):
    """The bf16 model, as offline/model_answers.py runs it. folder: recorded in the provenance of each row."""

    folder: str

    def answer(
        self,
        conversations: Sequence[Sequence[ChatMessage]],
        tools: Sequence[Tool],
        max_tokens: int,
        progress: Progress,
        text: str,
    ) -> list[ModelAnswer]:
        """Return the greedy answer to each conversation. text: what is reported as progress."""

    def count(self, text: str) -> int:
        """Return how many tokens a text has."""


@dataclass
class _Talk:
    """A conversation that is being written.

    tool: that its first message asks for, until it is called or the user has agreed.
    further: users' later messages.
    """

    messages: list[ChatMessage]
    tool: str = ""
    further: list[str] = field(default_factory=list)
    finished: bool = False


@dataclass(frozen=True)
class WrittenRows:
    """rows: finished conversations. lengths: of their answers, in tokens. left_out: number of others by reason."""

    rows: list[ChatRow]
    lengths: list[int]
    left_out: Counter[str]


def write_rows(
    persona: Persona, model: AnsweringModel, n: int, seed: int, progress: Progress
) -> WrittenRows:
    """Let the model write up to n conversations, all of them turn by turn together."""
    talks = _first_messages(persona, n, random.Random(f"{seed}:rows"))
    rng = random.Random(f"{seed}:results")
    left_out: Counter[str] = Counter()
    lengths: list[int] = []
    active = talks
    for turn in range(_MAX_ANSWERS):
        text = f"rows, answer {turn + 1}"
        conversations = [talk.messages for talk in active]
        answers = model.answer(conversations, persona.tools, ROW_MAX_TOKENS, progress, text)
        remaining = []
        for talk, answer in zip(active, answers, strict=True):
            if not answer.refused:
                lengths.append(answer.n_tokens)
            reason = _continue(talk, answer, persona, rng)
            if reason:
                left_out[reason] += 1
            elif not talk.finished:
                remaining.append(talk)
        active = remaining
        if not active:
            break
    left_out["the model calls tools without an end"] += len(active)
    provenance: RowProvenance = {
        "teacher": MODEL_TEACHER,
        "model": model.folder,
        "persona": persona.source,
        "prompt_sha256": persona.prompt_sha256,
    }
    rows: list[ChatRow] = []
    for talk in talks:
        if not talk.finished:
            continue
        row: ChatRow = {
            "id": f"model-{len(rows):04d}",
            "messages": talk.messages,
            "thinking": False,
        }
        row["tools"] = [dict(tool) for tool in persona.tools]
        row["provenance"] = provenance
        row_faults = faults(row, persona)
        if row_faults:
            left_out[row_faults[0]] += 1
        else:
            rows.append(row)
    return WrittenRows(rows, lengths, +left_out)


def _first_messages(persona: Persona, n: int, rng: random.Random) -> list[_Talk]:
    """Return up to n conversations of a system prompt and a user's message that no other one has."""
    persona, _ = with_drawn_tools(persona, SPLIT)
    talks: list[_Talk] = []
    known: set[str] = set()
    for index in range(n):
        for _ in range(MAX_DRAWS):
            tool = ""
            if persona.tools and index % (REQUESTS_PER_TALK + 1):
                number = index - index // (REQUESTS_PER_TALK + 1)
                tool = persona.tools[number % len(persona.tools)]["function"]["name"]
            texts = _users_texts(persona, tool, rng)
            if texts and texts[0] not in known:
                known.add(texts[0])
                system: ChatMessage = {"role": "system", "content": persona.system_prompt}
                user: ChatMessage = {"role": "user", "content": texts[0]}
                talks.append(_Talk([system, user], tool, texts[1:]))
                break
    return talks


def _users_texts(persona: Persona, tool: str, rng: random.Random) -> list[str]:
    """Return a user's messages: a request for a tool, else talk in the prompt's language."""
    rules = rules_of(persona)
    if tool:
        return [draw_exchange(persona, tool, rng, SPLIT).user]
    if rules.language != "en":
        greetings = rules.phrases.greetings[SPLIT]
        return rng.sample(greetings, min(1, len(greetings)))
    if rng.random() < 0.3:
        turns = exchanges.conversation(rng, SPLIT)
    else:
        category = rng.choice(("greeting", "factual", "conversational", "abstention"))
        turns = [exchanges.draw_category(category, rng, SPLIT)]
    return [turn.user.replace("Annie", persona.name) for turn in turns]


def _continue(talk: _Talk, answer: ModelAnswer, persona: Persona, rng: random.Random) -> str:
    """Add an answer and what follows it: results of its calls, the user's next message, or the end.

    Returns why the conversation is left out, or "".
    """
    if answer.refused:
        return f"the chat template refuses it: {answer.refused}"
    if not answer.complete:
        return f"an answer is longer than {ROW_MAX_TOKENS} tokens"
    talk.messages.append(answer.message)
    calls = answer.message.get("tool_calls") or ()
    for number, call in enumerate(calls):
        name = str(call["function"]["name"])
        tool = persona.tool(name)
        try:
            arguments = decode_json(str(call["function"]["arguments"]))
        except ValueError:
            arguments = None
        if tool is None or not isinstance(arguments, dict):
            return "a call has no tool on offer, or its arguments are not JSON"
        result = draw_result(tool, arguments, rng, SPLIT, rules_of(persona))
        call.setdefault("id", f"call_{len(talk.messages)}_{number}")
        content = json.dumps(result, ensure_ascii=False)
        talk.messages.append(
            {"role": "tool", "content": content, "name": name, "tool_call_id": call["id"]}
        )
    if calls:
        talk.tool = ""
    elif talk.tool:
        talk.tool = ""  # a user agrees once
        agree = rules_of(persona).phrases.agree
        talk.messages.append({"role": "user", "content": agree})
    elif talk.further:
        talk.messages.append({"role": "user", "content": talk.further.pop(0)})
    else:
        talk.finished = True
    return ""


# ---- reading rows back


class ReadBack(msgspec.Struct, kw_only=True):
    """What the bf16 model says about rows, each read with its system prompt.

    n: rows that it read. contradicting: ids of those that it says break the prompt. unclear: answers
    that are neither yes nor no.
    """

    n: int
    contradicting: list[str]
    unclear: int

    def line(self) -> str:
        if self.unclear == self.n:
            return f"the model cannot judge its rows: it says neither yes nor no to {self.n} of {self.n}"
        named = f" ({', '.join(self.contradicting[:5])})" if self.contradicting else ""
        unclear = f", {self.unclear} unclear" if self.unclear else ""
        return (
            f"the model read {self.n} rows against the system prompt: "
            f"{len(self.contradicting)} break it{named}{unclear}"
        )


def read_back(
    rows: Sequence[Row], persona: Persona, model: AnsweringModel, progress: Progress
) -> ReadBack:
    """Ask the model about rows that are evenly spread over all."""
    chosen = spread(rows, READ_BACK_ROWS)
    questions: list[list[ChatMessage]] = []
    for row in chosen:
        text = render_text("read_back.txt", persona=persona, lines=row_lines(row))
        questions.append([{"role": "user", "content": text}])
    answers = model.answer(questions, (), READ_BACK_TOKENS, progress, "reading rows back")
    contradicting = []
    n_unclear = 0
    for row, answer in zip(chosen, answers, strict=True):
        word = re.search(r"\w+", answer.message["content"].lower())
        if word is None or word[0] not in ("yes", "no", "ja", "nein"):
            n_unclear += 1
        elif word[0] in ("yes", "ja"):
            contradicting.append(str(row["id"]))
    return ReadBack(n=len(chosen), contradicting=contradicting, unclear=n_unclear)


def row_lines(row: Row) -> list[str]:
    """Return a conversation without its system prompt, one line per message."""
    lines = []
    for message in row["messages"]:
        if message["role"] == "system":
            continue
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        texts = [f"calls {call['name']} {call['arguments']}" for call in calls]
        lines.append(f"{message['role']}: {'; '.join(filter(None, (message['content'], *texts)))}")
    return lines


def examples(rows: Sequence[Row]) -> list[str]:
    """Return ten rows to read, one line each."""
    return [" | ".join(row_lines(row))[:MAX_EXAMPLE] for row in spread(rows, EXAMPLE_ROWS)]
