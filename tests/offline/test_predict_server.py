"""tests/perf/predict_server.py: how a served run's verdict agrees with the offline ensemble's."""

from __future__ import annotations

import importlib.util

import pytest
from paths import ROOT

pytest.importorskip("torch", reason="the runtime needs torch: pip install annie-quant[quantize]")
pytest.importorskip("transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]")


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("predict_server", ROOT / "tests/perf/predict_server.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def agreement(module):
    return module.agreement


def test_answers_that_all_members_give_are_counted_apart(module):
    a, b, c = (module.Completion([token], True) for token in (1, 2, 3))
    members = [[a, a, b, c], [a, b, b, c]]
    assert module.agreed(members, [a, a, c, module.Completion([3], False)]) == (3, 1)
    assert module.agreed(members[:1], members[1]) == (4, 3)


@pytest.mark.parametrize(
    ("served", "ensemble", "members", "expected"),
    [
        ("keeps", "keeps", ["keeps", "keeps"], "same"),
        ("undecided", "fragile", ["keeps", "undecided", "loses"], "member"),
        ("loses", "fragile", ["keeps", "loses"], "member"),  # one arithmetic of several, as the ensemble found
        ("keeps", "undecided", ["keeps", "undecided"], "member"),
        ("undecided", "loses", ["loses", "loses"], "by a degree"),
        ("loses", "undecided", ["undecided"], "by a degree"),
        ("keeps", "undecided", ["undecided"], "by a degree"),
        ("keeps", "loses", ["loses", "undecided"], "reversed"),
        ("loses", "keeps", ["keeps", "keeps"], "reversed"),
        (
            "loses",
            "undecided",
            ["keeps", "undecided"],
            "reversed",
        ),  # a member keeps what the server loses, and none loses it
    ],
)
def test_agreement(agreement, served, ensemble, members, expected):
    assert agreement(served, ensemble, members) == expected


def test_a_sample_caps_every_answer(module):
    template = module.Template(module.MODEL)
    capped, free = (module.Sample(4, ("tool_web",), limit).prompts(template)[1] for limit in (7, None))
    assert [r.prompt for r in capped] == [r.prompt for r in free] and {r.max_tokens for r in capped} == {7}
    assert min(r.max_tokens for r in free) > 7


def test_answers_are_judged_against_bf16_s_own(module):
    template = module.Template(module.MODEL)
    sample = module.Sample(3, ("tool_web",), 7)
    requests = sample.prompts(template)[1]
    one, other = (
        module.Completion(template.ids(text), True) for text in ("Good morning to all of you.", "It rains in Oslo.")
    )
    everything = range(len(requests))
    prompts = module.Prompts(template, sample, [one] * len(requests), everything, [other] * len(requests))
    answers = prompts.judged([one] * len(requests))
    pairs = [module.pair_answers(prompts.before, answers, floor) for floor in (None, prompts.floor)]
    assert all("same_text" in r.workload.gates for r in prompts.requests)
    assert [paired["same_text"].won for paired, _ in pairs] == [0, len(requests)]
