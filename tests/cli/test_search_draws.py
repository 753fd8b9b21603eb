"""`search --seeds N`: a strategy must keep in every calibration draw; tests/perf/strategies.py states the spread over the draws."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import numpy as np
import pytest
import variance
from paths import ROOT

from annie_quant import documents, judge
from annie_quant.cli.pipeline import search as searching
from annie_quant.cli.pipeline.run_directory import RunDirectory
from annie_quant.cli.pipeline.stages import Stages
from annie_quant.core.progress import SilentConsole
from annie_quant.data.rows import read_rows
from annie_quant.documents import Evaluation, StrategyRow
from annie_quant.judge.gates import tabulate
from annie_quant.judge.pairing import pair_checks

N = 200
MEMBERS = ("w4a4", "w4a4+bf16", "w4a4+perm1")


def evaluation(rng, rate, members=MEMBERS):
    """tool_call of N prompts at this rate, each member with its own changes; bf16 passes all. non_empty always passes."""
    sides = {}
    for name in members:
        passes = rng.random(N) < rate
        checks = [{"tool_call": bool(p), "non_empty": True} for p in passes]
        pairs, pooled = pair_checks(({"tool_call": True, "non_empty": True}, own) for own in checks)
        own = {
            "gates": tabulate(checks),
            "paired": pairs,
            "pooled": pooled,
            "outcomes": {
                "tool_call": "".join("01"[p] for p in passes.astype(int)),
                "non_empty": "1" * N,
            },
        }
        if "+" in name:
            sides[name] = documents.Member(arithmetic="", n_computed=N, n_changed=0, **own)
        else:
            nothing = dict.fromkeys(
                (
                    "kl",
                    "kl_conversations",
                    "kl_text",
                    "perplexity",
                    "perplexity_reference",
                    "verbosity_ratio",
                )
            )
            same = documents.SameAnswers(N, N)
            sides[name] = documents.NumericsResult(
                same_answers=same, cases=[], seconds=0.0, **nothing, **own
            )
    names = [f"p{i}" for i in range(N)]
    return judge.judge_evaluation(
        Evaluation(
            schema_version=1, version="", model="", reference="", reference_sha256="", dtype="", device="", workloads={},
            n_answers=N, n_conversation_answers=0, n_text_tokens=0, notes=[], reference_gates={}, seconds=0.0,
            numerics={k: v for k, v in sides.items() if "+" not in k}, members={k: v for k, v in sides.items() if "+" in k},
            prompts={"tool_call": names, "non_empty": names},
        )
    )  # fmt: skip


class FakeStages:
    """Stages whose strategies have a rate per calibration draw. rates: strategy → rates."""

    def __init__(self, rates, seed=0):
        self.rates, self.rng, self.done = rates, np.random.default_rng(seed), []

    def quantize(self, strategy, draw=0):
        self.done.append(f"quantize-{strategy}-{draw}")

    def audit(self, strategy, draw=0):
        return SimpleNamespace(ok=True, summary="sound")

    def checkpoint(self, strategy, draw=0):
        return (strategy, draw)

    def evaluate(self, name, folder, prompts, ensemble=False):
        assert ensemble, "a draw is judged as the first one: under all arithmetics"
        strategy, draw = folder
        return evaluation(self.rng, self.rates[strategy][draw])


def search(rates, seed=0):
    """Return the rows of a search of these strategies, as Search.evaluate makes them."""
    stages = FakeStages(rates, seed)
    rows = []
    for strategy, own in rates.items():
        first = evaluation(stages.rng, own[0])
        row = StrategyRow(
            strategy,
            passed=first.verdict.verdict == "keeps",
            outcome="",
            why=[],
            path=[],
            numerics={},
        )
        row.verdict = first.verdict
        searching.try_draws(stages, row, [], len(own))
        rows.append(row)
    return rows, stages


def evaluations(rates, seed=0):
    rng = np.random.default_rng(seed)
    return [evaluation(rng, rate) for rate in rates]


def test_a_strategy_must_keep_in_every_draw():
    (good, bad), stages = search({"good": [1.0, 1.0, 1.0], "bad": [1.0, 0.7, 1.0]})
    assert (
        good.passed
        and not good.why
        and [d.verdict.verdict for d in good.draws] == ["keeps", "keeps"]
    )
    assert not bad.passed and bad.why[0].startswith("calibration draw 1: Loses under W4A4: ")
    assert [d.verdict.verdict for d in bad.draws] == ["loses", "keeps"], (
        "the further draws still show the spread"
    )
    assert bad.draws[0].gates["w4a4"]["tool_call"][1] == N
    assert stages.done == [f"quantize-{s}-{d}" for s in ("good", "bad") for d in (1, 2)]


def test_one_seed_is_the_search_without_draws():
    (row,), stages = search({"good": [1.0]})
    assert row.passed and not row.draws and not stages.done


def test_the_spread_names_the_calibration():
    even, uneven = (
        variance.spread(variance.right_answers(evaluations(rates), "w4a4"), variance.FACTORS)
        for rates in ([0.8] * 4, [0.95, 0.6, 0.9, 0.5])
    )
    assert uneven.components["calibration"].of_mean > 20 * max(
        0.0001, even.components["calibration"].of_mean
    )
    assert (
        uneven.levels == {"prompts": N, "calibration": 4, "arithmetic": 3}
        and uneven.low < 0.74 < uneven.high
    )
    assert uneven.high - uneven.low > 0.3 > even.high - even.low


def test_a_ranking_needs_more_than_one_lucky_draw():
    rng = np.random.default_rng(0)
    rates = {"a": [0.95, 0.6, 0.9], "b": [0.9, 0.7, 0.85], "c": [0.2, 0.25, 0.2]}
    tables = {
        name: variance.right_answers([evaluation(rng, r) for r in own], "w4a4")
        for name, own in rates.items()
    }
    stated = {(better, worse) for better, worse, *_ in variance.ranking(tables, variance.FACTORS)}
    assert not stated & {("a", "b"), ("b", "a")}
    rates = {"a": [0.9, 0.91, 0.9], "c": [0.6, 0.6, 0.61]}
    tables = {
        name: variance.right_answers([evaluation(rng, r) for r in own], "w4a4")
        for name, own in rates.items()
    }
    ((better, worse, difference, _),) = variance.ranking(tables, variance.FACTORS)
    assert (better, worse) == ("a", "c") and difference.mean == pytest.approx(0.3, abs=0.06)


def test_draws_are_seeded_samples_of_the_calibration_rows(tmp_path):
    file = tmp_path / "data.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "a"}]}
        for i in range(60)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = tmp_path / "model"
    model.mkdir()
    stages = Stages(RunDirectory(tmp_path / "run"), model, file, 20, SilentConsole())
    assert stages.rows_of_draw(0) == file
    texts = {
        d: [row["messages"][0]["content"] for row in read_rows(stages.rows_of_draw(d))]
        for d in (1, 2)
    }
    assert len(texts[1]) == len(texts[2]) == 20 and set(texts[1]) != set(texts[2])
    assert [row["messages"][0]["content"] for row in read_rows(stages.rows_of_draw(1))] == texts[
        1
    ], "a resumed run has the same"
    assert (
        stages.checkpoint("naive", 1).name == "naive-draw1"
        and stages.checkpoint("naive").name == "naive"
    )


def strategies_script():
    spec = importlib.util.spec_from_file_location("strategies", ROOT / "tests/perf/strategies.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error(cell):
    """The standard error in "1.20 (2.1)"."""
    return float(cell.split()[0])


def test_fine_tunes_are_a_further_factor(tmp_path):
    """Three folders of a search, one per fine-tune; the strategy is worse on the third."""
    rng = np.random.default_rng(5)
    for name, rate in (("a", 0.95), ("b", 0.93), ("c", 0.5)):
        (tmp_path / name / "eval").mkdir(parents=True)
        for draw in range(3):
            file = tmp_path / name / "eval" / (f"naive-draw{draw}.json" if draw else "naive.json")
            file.write_text(json.dumps(evaluation(rng, rate).to_dict()))
        (tmp_path / name / "eval/bf16.json").write_text(
            json.dumps(evaluation(rng, 1.0, members=("bf16",)).to_dict())
        )
    module = strategies_script()
    text = module.spread_table([tmp_path / name for name in "abc"])
    row = next(line for line in text.splitlines() if line.startswith("| naive | w4a4 |"))
    cells = [cell.strip() for cell in row.split("|")]
    assert (
        "(100.0 %)" in cells[3]
        and f"of {N}×3×3×3" in cells[3]
        and text.endswith("- w4a4: the spread allows no order")
    )
    errors = dict(
        zip(
            ("prompts", "calibration", "arithmetic", "fine-tune"),
            map(error, cells[5:9]),
            strict=True,
        )
    )
    assert errors["fine-tune"] > 10 and all(errors[f] < 2 for f in errors if f != "fine-tune")
    # The same rates against a bf16 that is as bad on the third: no loss, and no component of the fine-tune.
    own = evaluation(rng, 0.5, members=("bf16",))
    (tmp_path / "c/eval/bf16.json").write_text(json.dumps(own.to_dict()))
    row = next(
        line
        for line in module.spread_table([tmp_path / name for name in "abc"]).splitlines()
        if "naive | w4a4" in line
    )
    assert error(row.split("|")[8].strip()) < 4
    short = evaluation(rng, 0.9, members=("w4a4",))
    (tmp_path / "c" / "eval" / "naive.json").write_text(json.dumps(short.to_dict()))
    with pytest.raises((SystemExit, IndexError)):
        module.spread_table([tmp_path / name for name in "abc"])
