"""Tokens per second with drafts: against published times of a DGX Spark and of other machines, and what is written of it."""

from __future__ import annotations

import pytest

from annie_quant.checkpoint.decode_speed import DEVICES, TokenBytes
from annie_quant.checkpoint.draft_speed import DraftCosts, describe, speeds_of
from annie_quant.documents import Device
from annie_quant.documents.drafts import DraftPrediction, DraftSteps, PromptEstimate


def prediction(tokens: list[float]) -> DraftPrediction:
    """tokens: per step, with one draft, two and so on."""
    steps = []
    for n, value in enumerate(tokens, 1):
        accepted = [PromptEstimate(0.9**k, 0.8**k, 1.0) for k in range(1, n + 1)]
        steps.append(DraftSteps(n, 100, accepted, PromptEstimate(value, value - 0.1, value + 0.1)))
    return DraftPrediction(20, steps)


@pytest.mark.parametrize(
    ("output", "layer", "published_ms"), [(2.54e9, 0.85e9, 15.1), (0.72e9, 0.85e9, 7.0)]
)
def test_the_output_layers_format_decides_what_a_draft_costs(
    output: float, layer: float, published_ms: float
) -> None:
    """A 27B on a Spark, with the output layer in bf16 and in NVFP4, computed elsewhere from its sizes."""
    costs = DraftCosts(DEVICES["gb10"], TokenBytes(18e9, 64), 0, 1, layer, output)
    assert costs.draft_s * 1e3 == pytest.approx(published_ms, rel=0.05)


def test_more_tokens_of_a_mixture_read_more_experts() -> None:
    device = Device(name="x", read_bytes_s=1e9)
    costs = DraftCosts(device, TokenBytes(1e9, 0), experts=8e9, active=1 / 8, layer=0, output=0)
    assert costs.seconds(0) == pytest.approx(1.0)
    # Two tokens meet 15 of 64 pairs' share of the experts: 1 - (7/8)^2.
    assert costs.seconds(1) == pytest.approx(1.0 + 8 * (15 / 64 - 1 / 8))


def test_drafts_that_cost_more_than_they_give_are_off() -> None:
    line = describe("web", prediction([1.9, 2.7]), lambda drafts: 1e-3 + drafts * 1e-3)
    assert line.startswith("drafts, web: off: 1,000 tok/s without, 950 with one")

    def fast(drafts: int) -> float:
        return 0.1 + drafts * 0.01

    speeds = speeds_of(prediction([1.9, 2.7, 2.75]), fast)
    assert speeds == pytest.approx([10, 1.9 / 0.11, 2.7 / 0.12, 2.75 / 0.13])
    line = describe("web", prediction([1.9, 2.7, 2.75]), fast)
    assert line.startswith("drafts, web: 2 per step, about 22.5 tok/s against 10 without: 2.70")
