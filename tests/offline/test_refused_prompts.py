"""Gate prompts that the model's chat template refuses: left out and named, and an error where most are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from paths import TINY_ANNIE

from annie_quant import judge
from annie_quant.core.errors import UsageError

pytest.importorskip("transformers", reason="prompts are rendered with the model's tokenizer")
from annie_quant.offline.prompts import Template, rendered_workloads


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
