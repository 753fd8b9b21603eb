"""The checks of a GPU without one: which builds have SM12x code, what the plans need of a GB10, and the experts' check itself."""

from __future__ import annotations

import numpy as np
import pytest
from gemm_module import DEVICES, needs_module

from annie_quant.gemm import device_checks, oracle


@pytest.mark.parametrize(
    ("built", "capability", "expected"),
    [
        ("80,89,90a,120a,121a,90-virtual", "12.1", True),
        ("80,90a,120a", "12.1", False),  # sm_120a code does not run on sm_121
        ("80,120f", "12.1", True),
        ("80,90a", "12.0", False),
        ("80,90a,121a", "9.0", None),
    ],
)
def test_native_code_is_found_by_architecture(built: str, capability: str, expected: bool | None) -> None:
    present, detail = device_checks.machine_code(built, capability)
    assert present is expected and ("not run" in detail) == (expected is None)


@needs_module
def test_a_gb10_has_the_shared_memory_that_its_plans_need() -> None:
    assert DEVICES["GB10"] == device_checks.SPARK
    assert 0 < device_checks.largest_need(device_checks.SPARK) <= device_checks.SPARK[1]


@pytest.mark.parametrize("tile", [8, 64])
def test_every_pair_is_in_one_tile_of_its_expert(tile: int) -> None:
    rng = np.random.default_rng(1)
    chosen = np.array([rng.choice(device_checks.EXPERTS, 2, replace=False) for _ in range(37)])
    layout = device_checks.tiles(chosen, tile)
    seen = []
    for i, expert in enumerate(layout.tile_experts):
        pairs = layout.sorted_pairs[i * tile : (i + 1) * tile]
        real = pairs[pairs < chosen.size]
        assert (chosen.reshape(-1)[real] == expert).all()
        seen += real.tolist()
    assert sorted(seen) == list(range(chosen.size)) and layout.padded[0] == layout.sorted_pairs.size


def numpy_launch(codes, scales, tensor_scales, x, chosen, swaps):
    """The products as the kernel computes them, tile by tile, rounded to bfloat16."""
    layout = device_checks.tiles(chosen, 16)
    experts = (layout.tile_experts + swaps) % device_checks.EXPERTS
    weights = oracle.dequantize(codes, scales).reshape(device_checks.EXPERTS, -1, codes.shape[1] * 2)
    out = np.full((chosen.size, weights.shape[1]), np.nan, x.dtype)
    for i, expert in enumerate(experts):
        pairs = layout.sorted_pairs[i * 16 : (i + 1) * 16]
        pairs = pairs[pairs < chosen.size]
        rows = x[pairs // device_checks.TOP_K].astype(np.float32)
        out[pairs] = (rows @ weights[expert].T.astype(np.float32) * tensor_scales[expert]).astype(x.dtype)
    return out


def test_right_products_pass_and_swapped_experts_and_a_lost_row_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "launch", numpy_launch)
    assert device_checks.experts_error(19) <= 1 < device_checks.experts_error(19, swaps=True)

    def loses_a_row(*arguments):
        out = numpy_launch(*arguments)
        out[-1] = 0
        return out

    monkeypatch.setattr(device_checks, "launch", loses_a_row)
    assert device_checks.experts_error(19) > 1
