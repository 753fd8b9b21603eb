"""Gates by verification: the quantized model's greedy answers with as little decoding as possible.

Greedy decoding is deterministic, so one forward over the reference's own greedy answer decides: where the quantized model's
most likely token agrees at every position, end of turn included, its greedy answer is that answer. Otherwise its answer is the
same up to the first difference and is decoded from there. In a conversation, the turns after a different answer have other
prompts and are decoded completely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from annie_quant.documents import ChatMessage
from annie_quant.judge import Answer, Workload
from annie_quant.judge.answers import assistant_message
from annie_quant.offline.decoding import Completion, generate_distributed
from annie_quant.offline.engine import Engine
from annie_quant.offline.prompts import Answered, Template, TurnRequest

Generate = Callable[[Sequence[TurnRequest]], list[Completion]]
Messages = list[ChatMessage]


@dataclass(frozen=True)
class Outcome:
    """A model's answer to a request.

    same: whether it equals the reference's answer.
    agreed: number of tokens before the first difference.
    """

    request: TurnRequest
    completion: Completion
    same: bool
    agreed: int


@dataclass(frozen=True)
class FirstDifference:
    """Where an answer first differs from the reference's.

    index: of the token.
    token: chosen there; None: not computed yet.
    """

    index: int
    token: int | None


@dataclass(frozen=True)
class Choices:
    """What a model chooses at each token of a target.

    difference: where it first chooses another token than the target's; None: nowhere.
    best: int64 [n, 2], the two most likely tokens.
    margins: float32 [n], the difference of two logits: those of `best`, or of the `pairs` of choices_of.
    """

    difference: FirstDifference | None
    best: np.ndarray
    margins: np.ndarray


def answer_workloads(template: Template, workloads: Sequence[Workload], generate: Generate) -> list[Answered]:
    """Answer every turn of every case, turn by turn with all cases together, each with the model's own earlier answers."""
    cases = [(w, c) for w in workloads for c in w.cases]
    messages: dict[tuple[str, str], Messages] = {(w.name, c.id): [] for w, c in cases}
    answered = []
    for turn in range(max((c.n_turns for _, c in cases), default=0)):
        requests = [template.request(w, c, turn, messages[w.name, c.id]) for w, c in cases if turn < c.n_turns]
        for request, completion in zip(requests, generate(requests), strict=True):
            messages[request.conversation].append(message_of(template.answer(request, completion)))
            answered.append(Answered(request, completion))
    return answered


def message_of(answer: Answer) -> ChatMessage:
    return assistant_message(answer.text, answer.tool_calls)


def first_difference(choices: torch.Tensor, target: Sequence[int], end_tokens: Sequence[int]) -> FirstDifference | None:
    """Return where the most likely tokens, int64 [len(target)], first differ from `target`. All end tokens are equal."""
    for index, (chosen, expected) in enumerate(zip(choices.tolist(), target, strict=True)):
        if chosen != expected and not (chosen in end_tokens and expected in end_tokens):
            return FirstDifference(index, chosen)
    return None


def choices_of(
    logits: torch.Tensor,
    targets: Sequence[Sequence[int]],
    end_tokens: Sequence[int],
    pairs: Sequence[np.ndarray] | None = None,
) -> list[Choices]:
    """Return the choices of several answers. Equal logits give the token of the lowest index.

    logits: [n, V], which all tokens of `targets` were chosen from, in their order. pairs: per target int64 [len(target), 2], tokens
    whose logits are subtracted; None: the two best.
    """
    first = logits.argmax(-1)  # the lowest index among equal logits; topk leaves their order open
    without = logits.scatter(-1, first.unsqueeze(-1), -torch.inf)
    best = torch.stack((first, without.argmax(-1)), -1)
    tokens = best if pairs is None else torch.from_numpy(np.concatenate(pairs)).to(logits.device)
    two = logits.gather(-1, tokens)
    ends = np.cumsum([len(target) for target in targets])[:-1]
    bests = np.split(best.cpu().numpy(), ends)
    margins = np.split((two[:, 0] - two[:, 1]).cpu().numpy(), ends)
    return [
        Choices(first_difference(torch.from_numpy(b[:, 0]), target, end_tokens), b, m)
        for b, m, target in zip(bests, margins, targets, strict=True)
    ]


def answer_from_differences(
    engine: Engine,
    template: Template,
    reference: Sequence[Answered],
    differences: Mapping[int, FirstDifference | None],
    on_finished: Callable[[int], None] = lambda n: None,
) -> list[Outcome]:
    """Return the quantized model's own greedy answers, decoded from where they differ from the reference's.

    reference: in turn order. differences: by index, from first_difference; one that is missing is None.
    """
    outcomes: dict[int, Outcome] = {}
    messages: dict[tuple[str, str], Messages] = {}
    changed: set[tuple[str, str]] = set()  # conversations with a different answer in an earlier turn
    for turn in range(1 + max((request.turn for request, _ in reference), default=-1)):
        work: list[tuple[int, TurnRequest, list[int]]] = []  # index, request, the answer's known first tokens
        for i, (request, completion) in enumerate(reference):
            if request.turn != turn:
                continue
            if request.conversation in changed:
                earlier = messages[request.conversation]
                work.append((i, template.request(request.workload, request.case, turn, earlier), []))
                continue
            difference = differences.get(i)
            if difference is None:
                outcomes[i] = Outcome(request, completion, True, len(completion.tokens) + completion.finished)
                continue
            known = completion.tokens[: difference.index]
            if difference.token is None:
                work.append((i, request, known))
            elif difference.token in template.end_tokens:
                outcomes[i] = Outcome(request, Completion(known, True), False, difference.index)
            else:
                work.append((i, request, [*known, difference.token]))
        rest = generate_distributed(
            engine,
            [[*request.prompt, *known] for _, request, known in work],
            [request.max_tokens - len(known) for _, request, known in work],
            template.end_tokens,
            on_finished,
            [len(known) for _, _, known in work],
        )
        for (i, request, known), more in zip(work, rest, strict=True):
            completion = Completion(known + more.tokens, more.finished)
            outcomes[i] = Outcome(request, completion, False, max(0, len(known) - 1))
        for i, outcome in outcomes.items():
            if outcome.completion != reference[i].completion:
                changed.add(outcome.request.conversation)
            if outcome.request.turn == turn and reference[i].request.case.turns:
                message = message_of(template.answer(outcome.request, outcome.completion))
                messages.setdefault(outcome.request.conversation, []).append(message)
    return [outcomes[i] for i in range(len(reference))]
