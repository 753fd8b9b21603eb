"""tests/perf/predict_server.py: how a served run's verdict agrees with the offline ensemble's."""

from __future__ import annotations

import importlib.util

import answer_log
import pytest
from paths import ROOT

pytest.importorskip("torch", reason="the runtime needs torch: pip install annie-quant[quantize]")
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location(
        "predict_server", ROOT / "tests/perf/predict_server.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        (
            "loses",
            "fragile",
            ["keeps", "loses"],
            "member",
        ),  # one arithmetic of several, as the ensemble found
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
def test_agreement(served, ensemble, members, expected):
    from served_verdicts import agreement  # imports torch

    assert agreement(served, ensemble, members) == expected


def test_a_sample_caps_every_answer(module):
    template = module.Template(module.MODEL)
    capped, free = (
        module.Sample(4, ("tool_web",), limit).prompts(template)[1] for limit in (7, None)
    )
    assert [r.prompt for r in capped] == [r.prompt for r in free] and {
        r.max_tokens for r in capped
    } == {7}
    assert min(r.max_tokens for r in free) > 7


def test_answers_are_judged_against_bf16_s_own(module):
    template = module.Template(module.MODEL)
    requests = module.Sample(3, ("tool_web",), 7).prompts(template)[1]
    one, other = (
        module.Completion(template.ids(text), True)
        for text in ("Good morning to all of you.", "It rains in Oslo.")
    )
    ones, others = [one] * len(requests), [other] * len(requests)
    with_floor, without = (
        module.Prompts(template, requests, ones, others),
        module.Prompts(template, requests, ones),
    )
    assert with_floor.changes(ones)["same_text"] == [len(requests), 0, len(requests)]
    assert without.changes(others)["same_text"] == [len(requests), len(requests), 0]
    assert "same_text" not in module.Prompts(template, requests, ones, compares=False).changes(
        others
    )


def test_answers_of_a_run_that_was_cut_off_are_kept_and_only_the_others_are_missing(tmp_path):
    path = tmp_path / "served" / "answers.jsonl"
    log = answer_log.AnswerLog(path)
    log.write(vllm="0.32")
    log.add("16", 2, [[5, 6], True])
    log.add("16", 0, [[7], False])
    with path.open("a") as file:
        file.write('{"cut": "16", "index": 1, "ans')
    assert answer_log.missing(path, "16,8", 4) == {"16": [1, 3], "8": [3, 2, 1, 0]}
    assert answer_log.missing(path, "8,16", 4, again=2) == {"8": [0, 1, 2, 3], "16": [1]}
    answer_log.AnswerLog(path).add("8", 1, [[9], True])
    assert answer_log.read(path) == {
        "16": {2: [[5, 6], True], 0: [[7], False]},
        "8": {1: [[9], True]},
    }


def test_a_checkpoint_is_compared_with_bf16_in_the_same_server(module, tmp_path):
    """Offline bf16 calls and the server's does not, so what the checkpoint does not call in the server is not lost there."""
    template = module.Template(module.MODEL)
    sample = module.Sample(3, ("tool_web",), 64)
    requests = sample.prompts(template)[1]
    call = "<tool_call>\n<function=web_search>\n<parameter=query>\nx\n</parameter>\n</function>\n</tool_call>"
    called, silent = (template.ids(text) for text in (call, "I cannot do that."))
    end = template.end_tokens[0]
    for name, last in (("source", silent), ("naive", silent)):
        log = answer_log.AnswerLog(module.served_path(tmp_path, name, "vllm-gpu-marlin", 3))
        for i in range(len(requests)):
            log.add("16", i, [[*(called if i else last), end], True])
    answers = {
        "called": [[called, True]] * len(requests),
        "lost": [[silent, True], *[[called, True]] * (len(requests) - 1)],
    }
    document = {"members": {"vllm-marlin": answers["lost"]}, "reference": answers["called"]}
    module.files.write_json(tmp_path / "offline" / "naive.3.json", document)
    row = module.compare(tmp_path, template, sample, "naive", "vllm-gpu-marlin", "source")
    assert row["agree"] == {"vllm-marlin": len(requests)} and row["bf16"]["equal"] == len(requests)
    n = len(requests)
    assert row["bf16"]["served"]["tool_call"] == [n, 0, 0]
    assert row["bf16"]["offline"]["vllm-marlin"]["tool_call"] == [n, 1, 0]
    assert str(n) in module.line(row)
