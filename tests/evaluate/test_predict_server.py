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
