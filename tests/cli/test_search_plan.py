"""search --dry-run: the rows, what budgets of one strategy share, the sum, and that nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import annie_quant

from annie_quant.cli.pipeline import SearchSettings, search_plan
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import SILENT
from annie_quant.quantize import estimates
from annie_quant.quantize.rates import Rates

RATES = Rates(1e12, 1e12, 1e12, 1e10, 1e10, 8e9, "a machine")
EVALUATION = search_plan.EvaluationEstimate(reference_s=60.0, strategy_s=30.0, memory_bytes=2e9)


class Estimated:
    """The fields of an estimate that a plan reads."""

    def __init__(self, peak_bytes: float) -> None:
        self.seconds = {"start": 8.0, "text": 100.0, "columns": 12.0, "own answers": 40.0}
        self.peak_bytes = peak_bytes


def lines(monkeypatch: pytest.MonkeyPatch, order: list[str], tmp_path: Path) -> list[str]:
    def estimate(model: Path, strategy: str, *args: object, **options: object) -> Estimated:
        if strategy == "naive":
            raise UsageError("naive needs more text")
        return Estimated(1e9 if strategy == "gptq" else 9e9)

    monkeypatch.setattr(estimates, "estimate", estimate)
    monkeypatch.setattr(search_plan, "measure_rates", lambda: RATES)
    monkeypatch.setattr(search_plan, "estimate_evaluation", lambda *_: EVALUATION)
    settings = SearchSettings(model=tmp_path, calib_data=tmp_path, output=tmp_path / "run")
    return search_plan.dry_run(settings, order, [], SILENT)


def test_budgets_share_the_text_and_the_sum_is_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reference, first, budget, gptq, naive, total = lines(
        monkeypatch, ["best", "best@1", "gptq", "naive"], tmp_path
    )
    assert reference.endswith(" 60 s")
    assert "quantize 2.7 minutes, evaluate 30 s" in first and "DOES NOT FIT" in first
    assert budget.startswith("best@1") and "quantize 12 s" in budget
    assert "memory 2.00" in gptq and "FIT" not in gptq  # the evaluation needs more than gptq
    assert "quantize 2.0 minutes" in gptq, "the model's own answers are stored by then"
    assert naive.endswith("cannot be made: naive needs more text")
    # 60 + (160 + 30) + (12 + 30) + (120 + 30) seconds, and 60 + 190 for the first alone
    assert total.startswith("at most 7.4 minutes in all, 4.2 minutes if the first one")
    assert not (tmp_path / "run").exists()


def test_an_unknown_strategy_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("")
    done = annie_quant(
        *("search", "--dry-run", "--model", str(tmp_path), "--calib-data", str(data)),
        *("--strategies", "nothere", "--output", str(tmp_path / "run")),
    )
    assert done.returncode == 2 and "'nothere'" in done.stderr
    assert not (tmp_path / "run").exists()
