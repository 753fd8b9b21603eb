"""annie-quant retention: two lm-eval runs, paired sample by sample."""

from __future__ import annotations

import json
import math
import random

import pytest
from command_line import CliRunner
from scipy.stats import binomtest, bootstrap

from annie_quant.cli import app as cli
from annie_quant.core.errors import UsageError
from annie_quant.judge import retention as table
from annie_quant.judge.statistics import score_interval


def store(folder, task, values, metric="acc", date="2026-11-22T10-00-00.0", **more):
    """Write samples as lm-eval 0.4.13 does."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"doc_id": i, "doc": {}, "target": "0", "arguments": {}, "resps": [], "filtered_resps": [], "filter": "none",
         "metrics": [metric], "doc_hash": f"d{i}", "prompt_hash": f"p{i}", "target_hash": f"t{i}", metric: value, **more}
        for i, value in enumerate(values)
    ]  # fmt: skip
    (folder / f"samples_{task}_{date}.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    return folder


def test_a_binary_metric_has_lost_and_won_samples_and_tangos_interval(tmp_path):
    before = [1.0] * 70 + [0.0] * 30
    after = [1.0] * 58 + [0.0] * 12 + [1.0] * 2 + [0.0] * 28
    (row,) = table.compare_runs(
        store(tmp_path / "a", "t_1", before), store(tmp_path / "b", "t_1", after)
    ).rows
    assert (row.task, row.n, row.lost, row.won, row.bf16, row.quantized) == (
        "t_1",
        100,
        12,
        2,
        0.7,
        0.6,
    )
    assert row.p == pytest.approx(binomtest(2, 14, alternative="less").pvalue)
    # the interval itself is checked against published figures in test_paired_outcomes.py
    assert (row.low, row.high) == score_interval(
        12, 2, 100, 0.95
    ) and row.low < row.difference < row.high < 0
    assert (
        row.retention == pytest.approx(60 / 70)
        and row.retention_low < 60 / 70 < row.retention_high < 1
    )


def test_other_numbers_have_the_paired_bootstrap_interval_of_scipy(tmp_path):
    rng = random.Random(0)
    before = [rng.random() for _ in range(80)]
    after = [v - 0.1 * rng.random() for v in before]
    (row,) = table.compare_runs(
        store(tmp_path / "a", "t", before, "f1"), store(tmp_path / "b", "t", after, "f1")
    ).rows
    expected = bootstrap(
        (before, after),
        lambda a, b, axis: b.mean(axis) / a.mean(axis),
        paired=True,
        method="percentile",
        rng=1,
    ).confidence_interval
    assert (row.retention_low, row.retention_high) == (
        pytest.approx(expected.low, abs=0.004), pytest.approx(expected.high, abs=0.004)
    )  # fmt: skip
    assert row.lost is None and row.high < 0


def test_perplexities_are_of_all_words_together(tmp_path):
    before, after = [[-20.0, 10], [-60.0, 20]] * 10, [[-22.0, 10], [-66.0, 20]] * 10
    result = table.compare_runs(
        store(tmp_path / "a", "t", before, "word_perplexity"),
        store(tmp_path / "b", "t", after, "word_perplexity"),
    )
    (row,) = result.rows
    assert row.bf16 == pytest.approx(math.exp(80 / 30)) and row.quantized == pytest.approx(
        math.exp(88 / 30)
    )
    assert row.retention == pytest.approx(math.exp(-8 / 30)) and row.retention_high < 1


def test_equal_runs_keep_everything(tmp_path):
    rng = random.Random(1)
    a = store(tmp_path / "a", "t", [float(rng.random() < 0.6) for _ in range(200)])
    result = table.compare_runs(a, a)
    assert (result.rows[0].retention, result.rows[0].lost, result.rows[0].p) == (1.0, 0, 1.0)
    assert "no significant loss" in next(table.summary(result))


def test_samples_that_differ_in_prompt_or_are_missing_are_left_out_and_counted(tmp_path):
    a = store(tmp_path / "a", "t", [1.0] * 30)
    b = store(tmp_path / "b", "t", [1.0] * 20, prompt_hash="other")
    with pytest.raises(UsageError, match="no sample in common"):
        table.compare_runs(a, b)
    store(tmp_path / "b", "u", [1.0] * 5)
    store(tmp_path / "a", "u", [1.0] * 5)
    assert table.compare_runs(a, b).left_out == {
        "in one run only": 10,
        "another prompt or target": 20,
    }


def test_the_newest_run_of_a_task_counts(tmp_path):
    a = store(tmp_path / "a", "t", [1.0] * 12)
    store(tmp_path / "a", "t", [0.0] * 12, date="2026-11-23T10-00-00.0")
    assert table.compare_runs(a, a).rows[0].bf16 == 0


@pytest.mark.parametrize(
    "line", ["", "not json", "[1]", '{"doc_id": 1}', '{"doc_id": 1, "metrics": 3}', "[" * 9999]
)
def test_files_that_are_not_lm_evals_are_one_line(tmp_path, line):
    (tmp_path / "samples_t_2026.jsonl").write_text(line)
    with pytest.raises(UsageError) as caught:
        table.compare_runs(tmp_path, tmp_path)
    assert "lm" in caught.value.message + caught.value.hint and "\n" not in caught.value.message


def test_the_command_prints_a_table_and_json(tmp_path):
    a, b = (
        store(tmp_path / "a", "task", [1.0] * 90 + [0.0] * 10),
        store(tmp_path / "b", "task", [1.0] * 60 + [0.0] * 40),
    )
    done = CliRunner().invoke(cli, ["retention", str(a), str(b)])
    assert done.exit_code == 0 and "66.7%" in done.output and "a significant loss" in done.output
    rows = json.loads(CliRunner().invoke(cli, ["retention", str(a), str(b), "--json"]).stdout)[
        "rows"
    ]
    assert rows[0]["lost"] == 30 and rows[0]["p_holm"] < 1e-6
