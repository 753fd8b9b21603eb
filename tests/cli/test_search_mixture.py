"""The search on a small mixture of experts: every stage, and the bytes that a token reads."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip(
    "torch", reason="the search needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the search needs transformers: pip install annie-quant[quantize]"
)

import runtime_models  # noqa: E402

from annie_quant.checkpoint import ModelFolder  # noqa: E402
from annie_quant.checkpoint.size import bytes_per_token  # noqa: E402
from annie_quant.cli.pipeline import search  # noqa: E402
from annie_quant.core.progress import SilentConsole  # noqa: E402
from annie_quant.data import generate  # noqa: E402


def test_two_strategies_on_a_mixture(tmp_path):
    """Random weights have no manners, so bf16's own answers are the reference."""
    source = runtime_models.save_mixture(tmp_path / "merged", experts=4)
    generate("annie", teacher="offline", n=10, output=tmp_path / "calib.jsonl", seed=1)
    cases = [
        {"id": str(i), "messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(2)
    ]
    workload = {"name": "answers", "max_tokens": 8, "gates": ["same_text"], "cases": cases}
    (tmp_path / "answers.json").write_text(json.dumps(workload))
    result = search.run(
        search.SearchSettings(
            model=source, calib_data=tmp_path / "calib.jsonl", output=tmp_path / "s", n=2, every=True,
            strategies=["direct", "gptq"], required=["w4a16"], samples=2, workloads=str(tmp_path / "answers.json"),
        ),
        SilentConsole(),
    )  # fmt: skip
    assert [row.strategy for row in result.strategies] == [
        "direct",
        "gptq",
    ] and result.stopped is None
    source_bytes = bytes_per_token(ModelFolder(source))
    for row in result.strategies:
        assert row.error is None and row.outcome not in (
            "could not be made",
            "unsound checkpoint",
        ), row
        assert "W4A16" in {kind.upper() for kind in row.numerics}
        assert 0.2 * source_bytes < row.read_bytes < 0.6 * source_bytes
    page = (tmp_path / "s" / "search.md").read_text()
    assert "| direct |" in page and "| gptq |" in page
