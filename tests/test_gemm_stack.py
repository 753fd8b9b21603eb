"""The judge of other people's FP4 kernels, with right, planted-wrong and failing ones in NumPy; no GPU."""

import numpy as np
import pytest

from annie_quant.errors import UsageError
from annie_quant.gemm import known, oracle, stack


def product(case, a=None, w=None, sa=None, sw=None):
    left = oracle.dequantize(case.a if a is None else a, case.a_scale if sa is None else sa)
    right = oracle.dequantize(case.w if w is None else w, case.w_scale if sw is None else sw)
    import ml_dtypes

    return ((left.astype(np.float32) @ right.astype(np.float32).T) * np.float32(case.alpha)).astype(ml_dtypes.bfloat16)


def swap(codes):
    return (codes >> 4) | (codes << 4)


def drop_tail(case):
    out = product(case)
    out[-1, -1] = 0
    return out


PLANTED = {
    "swapped nibbles": lambda c: product(c, w=swap(c.w)),
    "both swapped but one row": lambda c: product(c, w=np.concatenate([swap(c.w[:1]), c.w[1:]])),
    "swizzled scales read as linear": lambda c: product(
        c, sw=stack.swizzled(c.w_scale)[: c.w_scale.shape[0], : c.w_scale.shape[1]]
    ),
    "a neighbour's scale": lambda c: product(c, sw=np.roll(c.w_scale, 1, 1)),
    "alpha forgotten": lambda c: product(c) / c.alpha,
    "one element lost": drop_tail,
    "not a number": lambda c: product(c) * np.nan,
}


def test_a_right_kernel_passes():
    assert stack.judge("right", product)["verdict"] == "right"


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_called_wrong_and_given_a_remedy(fault):
    row = stack.judge(fault, PLANTED[fault])
    assert row["verdict"] == "wrong"
    assert row["worst"] > 1
    assert "backend" in row["remedy"]


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("CUDA error: no kernel image is available for execution on the device", "121a"),
        ("CUDA error: an illegal instruction was encountered", "38423"),
        ("This kernel only supports sm120.", "sm120_family"),
        ("ptxas fatal : Value 'sm_121a' is not defined for option 'gpu-name'", "TRITON_PTXAS_PATH"),
    ],
)
def test_known_failures_are_named(message, remedy):
    def call(case):
        raise RuntimeError(message)

    row = stack.judge("broken", call)
    assert row["verdict"] == "failed"
    assert remedy in row["remedy"]
    assert known.recognise("something else entirely") is None


def test_missing_stacks_are_said_and_unknown_ones_refused():
    found = stack.examine("flashinfer")
    assert [r["verdict"] for r in found["backends"]] == ["missing"] or found["backends"]
    with pytest.raises(UsageError, match="no stack called"):
        stack.examine("nonsense")


def test_swizzle_is_the_stated_formula():
    scales = np.random.default_rng(0).integers(1, 127, (200, 9), dtype=np.uint8)
    flat = stack.swizzled(scales).reshape(-1)
    tiles = 3
    for m in range(200):
        for k in range(9):
            at = ((m // 128) * tiles + k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4
            assert flat[at] == scales[m, k]
    assert flat.size == 256 * 12
    assert (flat == 0).sum() == 256 * 12 - 200 * 9
