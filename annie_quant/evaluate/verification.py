"""Gates by verification: what a quantized model would answer, found with as little decoding as can be.

Greedy decoding is deterministic, so one teacher-forced forward over the reference's own greedy answer decides: where
the quantized model's most likely token agrees at every position, end of turn included, its own greedy answer is that
answer.
Where it does not, its answer is the same up to the first difference and is decoded from there alone. In a conversation
the turns after a different answer have other prompts, and are decoded as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from annie_quant.evaluate.decoding import Decoded, generate_together
from annie_quant.evaluate.engine import Engine
from annie_quant.evaluate.prompts import Ask, Template, assistant_message
from annie_quant.judge import Workload

Answer = Callable[[Sequence[Ask]], list[Decoded]]


@dataclass(frozen=True)
class Outcome:
    """What one model answers to one ask. same: exactly the reference's answer; agreed: tokens up to the first
    difference."""

    ask: Ask
    decoded: Decoded
    same: bool
    agreed: int


def converse(template: Template, workloads: Sequence[Workload], answer: Answer) -> list[tuple[Ask, Decoded]]:
    """Every turn of every case, each turn asked with the model's own earlier answers; turn by turn, all cases
    together."""
    cases = [(w, c) for w in workloads for c in w.cases]
    said: dict[tuple[str, str], list[dict[str, Any]]] = {(w.name, c.id): [] for w, c in cases}
    found = []
    for turn in range(max((c.n_turns for _, c in cases), default=0)):
        asks = [template.ask(w, c, turn, said[w.name, c.id]) for w, c in cases if turn < c.n_turns]
        for ask, decoded in zip(asks, answer(asks), strict=True):
            said[ask.talk].append(assistant_message(template.answer(ask, decoded)))
            found.append((ask, decoded))
    return found


def target_of(decoded: Decoded, ends: Sequence[int]) -> list[int]:
    """The answer's tokens and, where the model ended the turn itself, the end mark."""
    return [*decoded.tokens, ends[0]] if decoded.finished else list(decoded.tokens)


@dataclass(frozen=True)
class Difference:
    """Where an answer first leaves the reference's: at which token, and for which."""

    at: int
    token: int


def first_difference(choices: torch.Tensor, target: Sequence[int], ends: Sequence[int]) -> Difference | None:
    """choices int64 [len(target)]: the model's most likely tokens. Any end mark is as good as another."""
    for at, (chosen, wanted) in enumerate(zip(choices.tolist(), target, strict=True)):
        if chosen != wanted and not (chosen in ends and wanted in ends):
            return Difference(at, chosen)
    return None


def answers(
    engine: Engine,
    template: Template,
    reference: Sequence[tuple[Ask, Decoded]],
    differences: Mapping[int, Difference | None],
    tick: Callable[[int], None] = lambda n: None,
) -> list[Outcome]:
    """The quantized model's own greedy answers, from where they leave the reference's.

    reference: asks and answers in turn order; differences[i]: of reference[i], from first_difference.
    """
    ends = set(template.ends)
    outcomes: dict[int, Outcome] = {}
    said: dict[tuple[str, str], list[dict[str, Any]]] = {}
    strayed: set[tuple[str, str]] = set()
    for turn in range(1 + max((ask.turn for ask, _ in reference), default=-1)):
        work: list[tuple[int, Ask, list[int]]] = []  # index, ask, tokens already known
        for i, (ask, decoded) in enumerate(reference):
            if ask.turn != turn:
                continue
            if ask.talk in strayed:
                work.append((i, template.ask(ask.workload, ask.case, turn, said[ask.talk]), []))
                continue
            difference = differences[i]
            if difference is None:
                outcomes[i] = Outcome(ask, decoded, True, len(decoded.tokens) + decoded.finished)
                continue
            strayed.add(ask.talk)
            known = decoded.tokens[: difference.at]
            if difference.token in ends:
                outcomes[i] = Outcome(ask, Decoded(known, True), False, difference.at)
            else:
                work.append((i, ask, [*known, difference.token]))
        limits = [ask.workload.max_tokens - len(known) for _, ask, known in work]
        rest = generate_together(engine, [[*ask.prompt, *known] for _, ask, known in work], limits, template.ends, tick)
        for (i, ask, known), more in zip(work, rest, strict=True):
            agreed = max(0, len(known) - 1)
            outcomes[i] = Outcome(ask, Decoded(known + more.tokens, more.finished), False, agreed)
        for i, outcome in outcomes.items():
            if outcome.ask.turn == turn and reference[i][0].case.turns:
                message = assistant_message(template.answer(outcome.ask, outcome.decoded))
                said.setdefault(outcome.ask.talk, []).append(message)
    return [outcomes[i] for i in range(len(reference))]
