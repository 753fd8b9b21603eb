"""Gate prompts that the model's chat template refuses: left out and named, and an error where most are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paths import TINY_ANNIE

from annie_quant import judge
from annie_quant.core.errors import UsageError

pytest.importorskip("transformers", reason="prompts are rendered with the model's tokenizer")
from annie_quant.checkpoint.chat_template import ConversationRefused
from annie_quant.offline.answers import FirstDifference, answer_from_differences, answer_workloads
from annie_quant.offline.decoding import Completion
from annie_quant.offline.evaluation import unanswered_notes
from annie_quant.offline.prompts import Answered, OfflineRequest, Template, rendered_workloads


@pytest.fixture(scope="module")
def workload():
    found = next(w for w in judge.load_workloads() if not w.cases[0].turns)
    return replace(found, cases=found.cases[:5], system=None, persona=None)


def refused(case):
    """tiny-annie's template, as Qwen3.5's, raises for a conversation without a user's message."""
    return replace(case, messages=({"role": "assistant", "content": "Hello."},), turns=())


def test_a_refused_prompt_is_left_out_and_named(workload):
    cases = list(workload.cases)
    cases[3] = refused(cases[3])
    (kept,), lines = rendered_workloads(
        Template(TINY_ANNIE), [replace(workload, cases=tuple(cases))]
    )
    assert [c.id for c in kept.cases] == [c.id for i, c in enumerate(cases) if i != 3]
    assert lines == [
        "1 prompt (the chat template refuses it: TemplateError: a conversation needs a user message, "
        f"first in {workload.name}, {cases[3].id})"
    ]
    (same,), none = rendered_workloads(Template(TINY_ANNIE), [workload])
    assert same is workload and none == []


def test_mostly_refused_prompts_are_an_error(workload):
    cases = (workload.cases[0], *map(refused, workload.cases[1:]))
    with pytest.raises(UsageError, match="only 1 of 5 prompts can be rendered"):
        rendered_workloads(Template(TINY_ANNIE), [replace(workload, cases=cases)])


class OneCallTemplate:
    """Refuses a prompt after an answer with the word "two"; a prompt is the number of the turn."""

    end_tokens = (0,)

    def request(self, workload, case, turn=0, answers=()):
        if any("two" in message["content"] for message in answers):
            raise ConversationRefused("m", "one call only")
        return OfflineRequest(workload, case, turn, (turn + 1,))

    def message(self, request, completion):
        text = "two" if completion.tokens == [2] else "one"
        return {"role": "assistant", "content": text}


def test_a_later_turn_that_the_template_refuses_ends_its_conversation_and_is_named():
    workload = next(w for w in judge.load_workloads() if len(w.cases[0].turns) > 1)
    cases = workload.cases[:2]
    workload = replace(workload, cases=cases)

    def generate(requests):
        return [Completion([2 if r.case is cases[0] else 1], True) for r in requests]

    answered = answer_workloads(OneCallTemplate(), [workload], generate)
    counts = [sum(r.case is case for r, _ in answered) for case in cases]
    assert counts == [1, cases[1].n_turns]
    (note,) = unanswered_notes([workload], answered)
    assert note.startswith(f"left out: {cases[0].n_turns - 1} later turns (the chat template")
    assert note.endswith(f"first in {workload.name}/{cases[0].id})")


def test_a_checkpoint_whose_own_answer_makes_the_next_turn_refused_has_no_answer_there(monkeypatch):
    workload = next(w for w in judge.load_workloads() if len(w.cases[0].turns) > 1)
    case = replace(workload.cases[0], turns=workload.cases[0].turns[:2])
    template = OneCallTemplate()
    reference = [
        Answered(OfflineRequest(workload, case, turn, (turn + 1,)), Completion([1], True))
        for turn in (0, 1)
    ]
    two = [Completion([], True)]
    monkeypatch.setattr("annie_quant.offline.answers.generate", lambda *a: two[: len(a[1])])
    outcomes = answer_from_differences(
        None, template, reference, {0: FirstDifference(0, 2), 1: None}
    )
    assert outcomes[0].completion.tokens == [2]
    assert outcomes[1].completion == Completion([], False) and not outcomes[1].same
