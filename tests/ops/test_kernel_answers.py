"""The comparisons of tests/perf/kernel_answers.py, which runs where vLLM and a GPU are."""

import importlib.util
import json
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "perf" / "kernel_answers.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("kernel_answers", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("one", "other", "steps"),
    [
        (5.0, 5.0, 0),
        (5.03125, 5.0, 1),
        (8.0, 7.9375, 1),
        (12.6875, 12.625, 1),
        (-3.0, -3.015625, 1),
        (0.5, -0.5, 256),
    ],
)
def test_bf16_steps_are_those_of_the_larger_logit(script, one, other, steps):
    assert script.bf16_steps(one, other) == steps


def write(path, cuts):
    path.write_text(json.dumps({"kernel": "K", "mode": "eager", "cuts": cuts}))
    return path


def test_an_answer_that_differs_is_reported_with_its_margin(script, tmp_path):
    best = [{"7": 4.0, "9": 3.5}, {"3": 6.0, "5": 5.96875, "8": 1.0}]
    a = write(
        tmp_path / "a.json", {"64": {"0": [[7, 3], best], "1": [[7, 3], best], "2": [[7, 3], best]}}
    )
    b = write(
        tmp_path / "b.json",
        {"48": {"0": [[7, 3], best], "1": [[7, 5], best], "2": [[7, 4], best], "3": [[7], best]}},
    )
    result = script.compare(a, b, "64", "48")
    assert (result["answers"], result["equal"]) == (3, 1)
    assert result["differ"][0] == {
        "prompt": 1,
        "at": 1,
        "logits": [6.0, 5.96875],
        "bf16_steps": 1.0,
    }
    assert result["differ"][1] == {
        "prompt": 2,
        "at": 1,
    }  # not among the best: no margin, so no excuse


def test_an_answer_that_only_ends_earlier_differs(script, tmp_path):
    best = [{"7": 4.0}, {"3": 6.0}]
    a = write(tmp_path / "a.json", {"64": {"0": [[7, 3], best]}})
    b = write(tmp_path / "b.json", {"64": {"0": [[7], best]}})
    result = script.compare(a, b, "64", "64")
    assert (result["equal"], result["differ"]) == (0, [{"prompt": 0, "at": None}])


def test_decode_steps_are_counted_where_both_have_them(script, tmp_path):
    def lines(path, rows):
        path.write_text(
            "".join(json.dumps({"chunk": c, "streams": s, "tokens": t}) + "\n" for c, s, t in rows)
        )
        return path

    eager = [
        lines(tmp_path / "e0", [(0, 4, [[1, 2, 3]] * 4), (0, 1, [[1, 2, 3]])]),
        lines(tmp_path / "e1", [(1, 1, [[5, 6, 7]])]),
    ]
    graphs = lines(
        tmp_path / "g", [(0, 4, [[1, 2, 3]] * 4), (0, 1, [[1, 2, 4]]), (2, 1, [[1, 1, 1]])]
    )
    with graphs.open("a") as f:
        f.write('{"chunk": 1, "streams": 1, "tok')  # a run that was ended while it wrote
    result = script.compare_steps([*eager, tmp_path / "missing"], [graphs])
    assert result["decode_steps"] == {64: 0, 16: 0, 4: 2, 1: 2}
    assert (result["tokens"], result["runs"], result["different"]) == (15, 2, [(0, 1)])
