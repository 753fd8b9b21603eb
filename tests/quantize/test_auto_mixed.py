"""auto_mixed: the scores that choose the formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("modelopt", reason="the strategy runs on ModelOpt: pip install annie-quant[quantize]")

import torch
from modelopt.torch.opt.utils import named_hparams
from modelopt.torch.quantization import algorithms
from paths import TINY_ANNIE
from torch import nn

from annie_quant import data, quantize
from annie_quant.quantize.calibration_samples import Sample
from annie_quant.quantize.strategies import auto_mixed

ALL_BUT_LAST = ",".join(f"layers.{i}" for i in range(7))


def own_divergence(model: nn.Module, samples: Sequence[Sample], before: Sequence[torch.Tensor]) -> float:
    """Return the summed KL divergence over the answers' tokens, one whole forward per answer."""
    total = 0.0
    for sample, p in zip(samples, before, strict=True):
        q = log_probabilities(model, sample)
        total += float((p.exp() * (p - q)).sum())
    return total


@torch.inference_mode()
def log_probabilities(model: nn.Module, sample: Sample) -> torch.Tensor:
    logits: Any = model(input_ids=torch.tensor([sample.ids]), use_cache=False).logits[0]
    return torch.log_softmax(logits[len(sample.prompt) - 1 :].double(), -1)


def test_scores_are_the_divergence_of_each_group_and_format(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Scored answers share their prompts' computation; one forward per answer gives the same sums."""
    rows = tmp_path / "rows.jsonl"
    data.generate("annie", n=10, output=rows, seed=1, split="calibration")
    checked: dict[str, tuple[float, float]] = {}
    score = auto_mixed.score

    def compare(searcher: Any, scored: Sequence[Sample], *rest: Any) -> None:
        score(searcher, scored, *rest)
        before = [log_probabilities(searcher.model, s) for s in scored]
        for name, group in named_hparams(searcher.model, unique=True):
            if not isinstance(group, algorithms.QuantRecipeHparam) or not group.is_configurable:
                continue
            plain = group.active
            for recipe in (r for r in group.choices if r != plain):
                stored = group._importance_dict[recipe][group.score_modules[0]]
                group.active = recipe
                checked[f"{name} {recipe}"] = (float(stored), own_divergence(searcher.model, scored, before))
            group.active = plain

    monkeypatch.setattr(auto_mixed, "score", compare)
    options: dict[str, Any] = {"exclude": ALL_BUT_LAST, "answers": 4, "calib_samples": 6, "bits": 6}
    quantize.run("auto_mixed", TINY_ANNIE, tmp_path / "out", calib_data=rows, **options)
    assert "Calibrating for" not in capfd.readouterr().err, "ModelOpt's progress bar breaks up the console's lines"
    assert len(checked) == 8, "four groups of the last layer, two formats each"
    for stored, own in checked.values():
        assert stored == pytest.approx(own, rel=0.02)
        assert own > 1e-4
