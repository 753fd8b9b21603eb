"""tests/perf/predicted_vllm.py: the bytes of a shape are those of a stored model, and its table has the least of the rounds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token

ROOT = Path(__file__).parents[2]
TINY = ROOT / "annie_quant/assets/tiny-annie"
sys.path.insert(0, str(ROOT / "tests/perf"))
import predicted_vllm  # noqa: E402


def test_bytes_of_a_shape_are_those_of_a_stored_model_without_its_norms() -> None:
    stored = bytes_per_token(ModelFolder(TINY))
    computed = predicted_vllm.shape_weights(
        json.loads((TINY / "config.json").read_text()), 2.0, 2.0
    )
    assert computed == pytest.approx(stored, rel=1e-3) and computed < stored
    assert predicted_vllm.model_bytes("bf16", TINY).weights == stored


def test_an_nvfp4_head_and_nvfp4_layers_have_fewer_bytes() -> None:
    sizes = [
        predicted_vllm.shape_bytes(e, "9b", {}, TINY).weights for e in ("bf16", "ours", "ours-head")
    ]
    head = 248320 * 4096
    assert sizes[1] - sizes[2] == pytest.approx(head * (2 - 9 / 16))
    assert sizes[0] / sizes[1] > 2.5


def test_a_token_reads_only_the_chosen_experts() -> None:
    few, many = (
        predicted_vllm.shape_bytes("ours", "35b-a3b", {"num_experts_per_tok": n}, TINY)
        for n in (8, 16)
    )
    assert many.weights - few.weights == pytest.approx(40 * 8 * 3 * 2048 * 512 * 9 / 16)


def test_the_table_has_the_least_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"engine": "ours", "job": "decode", "streams": 1, "prompt": 128, "tokens": 128}
    rows = [{**row, "round": i, "tpot_ms": t} for i, t in enumerate((3.0, 2.5, 2.75))]
    rows += [
        {**row, "round": -1, "tpot_ms": 1.0},
        {**row, "round": 3, "streams": 64, "tpot_ms": 1.0},
    ]
    rows += [{"engine": "ours", "job": "start", "ready_s": 1.0}]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    monkeypatch.setattr(sys, "argv", ["predicted_vllm.py", str(tmp_path), "--device", "4000:10"])
    predicted_vllm.main()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("| ours | 128 | 6.04 | 2.50 (2.75) | 3 | 1.83 (-26.8 %)"), line
