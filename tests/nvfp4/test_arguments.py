"""What the codec refuses: outputs that overlap other arguments, scales that are no scales; and modules in sub-interpreters."""

from __future__ import annotations

import numpy as np
import pytest

from annie_quant import _nvfp4, nvfp4

N, K = 4, 256
BLOCKS = N * K // 16

# Per function: its arguments, with the sizes in bytes of the buffers, outputs and inputs.
CALLS = {
    "pack": (
        lambda b: (b["x"], 0, 16, 0, 0, 0.01, 448.0, 0.0, b["importance"], b["codes"], b["scales"]),
        {"codes": N * K // 2, "scales": BLOCKS},
        {"x": 4 * N * K, "importance": 4 * K},
    ),
    "unpack": (
        lambda b: (b["codes"], b["scales"], 2, 16, False, 0.01, b["out"]),
        {"out": 2 * N * K},
        {"codes": N * K // 2, "scales": BLOCKS},
    ),
    "fake_quant": (lambda b: (b["x"], 0, 16, 0.01, b["out"]), {"out": 4 * N * K}, {"x": 4 * N * K}),
    "gemv": (
        lambda b: (b["x"], 0, K, b["codes"], b["scales"], 16, False, 0.01, b["y"]),
        {"y": 4 * N},
        {"x": 4 * K, "codes": N * K // 2, "scales": BLOCKS},
    ),
    "gptq": (
        lambda b: (
            b["w"],
            K,
            b["factor"],
            16,
            2,
            0.01,
            448.0,
            b["importance"],
            b["codes"],
            b["scales"],
        ),
        {"w": 4 * N * K, "codes": N * K // 2, "scales": BLOCKS},
        {"factor": 4 * K * K, "importance": 4 * K},
    ),
    "to_ggml": (
        lambda b: (b["codes"], b["scales"], b["out"]),
        {"out": BLOCKS // 4 * 36},
        {"codes": N * K // 2, "scales": BLOCKS},
    ),
    "from_ggml": (
        lambda b: (b["raw"], b["codes"], b["scales"]),
        {"codes": N * K // 2, "scales": BLOCKS},
        {"raw": BLOCKS // 4 * 36},
    ),
    "swizzle": (lambda b: (b["scales"], 128, 4, b["out"]), {"out": 512}, {"scales": 512}),
    "unswizzle": (lambda b: (b["tiles"], 128, 4, b["out"]), {"out": 512}, {"tiles": 512}),
    "kquantize": (
        lambda b: (b["x"], 0, "Q4_K", K, b["importance"], b["out"]),
        {"out": 144 * N},
        {"x": 4 * N * K, "importance": 4 * K},
    ),
    "kdequantize": (lambda b: (b["raw"], "Q4_K", b["out"]), {"out": 4 * N * K}, {"raw": 144 * N}),
}
PAIRS = [
    (name, out, other)
    for name, (_, outputs, inputs) in CALLS.items()
    for i, out in enumerate(outputs)
    for other in (*list(outputs)[i + 1 :], *inputs)
]


def apart(name: str) -> dict[str, np.ndarray]:
    _, outputs, inputs = CALLS[name]
    return {part: np.zeros(size, np.uint8) for part, size in (outputs | inputs).items()}


@pytest.mark.parametrize("name", CALLS)
def test_buffers_that_do_not_overlap_are_accepted(name):
    """The negative control: the cases below differ in one buffer."""
    buffers = apart(name)
    if name == "gptq":
        buffers["factor"] = np.eye(K, dtype=np.float32).reshape(-1).view(np.uint8)
    getattr(_nvfp4, name)(*CALLS[name][0](buffers))


@pytest.mark.parametrize(("name", "out", "other"), PAIRS, ids=map("-".join, PAIRS))
@pytest.mark.parametrize("shared_bytes", [1, 4])
def test_an_output_that_overlaps_another_argument_is_refused(name, out, other, shared_bytes):
    """One before the end of the other, whichever comes first in memory."""
    for first, second in ((out, other), (other, out)):
        buffers = apart(name)
        sizes = buffers[first].size, buffers[second].size
        memory = np.zeros(sum(sizes), np.uint8)
        buffers[first] = memory[: sizes[0]]
        buffers[second] = memory[sizes[0] - shared_bytes : sizes[0] - shared_bytes + sizes[1]]
        before = memory.copy()
        with pytest.raises(ValueError, match="overlap in memory"):
            getattr(_nvfp4, name)(*CALLS[name][0](buffers))
        np.testing.assert_array_equal(memory, before)


def test_fake_quant_in_place_is_accepted_and_a_partial_overlap_is_not():
    memory = np.random.default_rng(0).standard_normal(64 + 16).astype(np.float32)
    expected = nvfp4.fake_quant(memory[:64], 0.01)
    with pytest.raises(ValueError, match="overlap"):
        nvfp4.fake_quant(memory[:64], 0.01, out=memory[16:])
    np.testing.assert_array_equal(nvfp4.fake_quant(memory[:64], 0.01, out=memory[:64]), expected)


@pytest.mark.parametrize("scale", [float("nan"), -0.5, -1e-30, float("inf"), float("-inf"), 1e39])
def test_fake_quant_refuses_a_scale_that_is_not_one(scale):
    x = np.ones((1, 16), np.float32)
    with np.errstate(over="ignore"), pytest.raises(ValueError, match="tensor_scale"):
        nvfp4.fake_quant(x, scale)
    with pytest.raises(ValueError, match="tensor_scale"):
        _nvfp4.fake_quant(
            x.reshape(-1).view(np.uint8),
            0,
            16,
            float(np.clip(scale, -1, 1e300)),
            np.empty(64, np.uint8),
        )


def test_fake_quant_of_zeros_has_a_computed_scale():
    x = np.zeros((2, 32), np.float32)
    np.testing.assert_array_equal(nvfp4.fake_quant(x), x)
    np.testing.assert_array_equal(nvfp4.fake_quant(x, 0.0), x)
