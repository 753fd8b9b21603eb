"""GPTQ: the C loop against plain NumPy, scales as the codec chooses them, less output error than rounding, and fallbacks."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from annie_quant import nvfp4

torch = pytest.importorskip(
    "torch", reason="the Hessian is factored by torch: pip install annie-quant[quantize]"
)
from annie_quant.quantize import gptq as hessians  # noqa: E402
from annie_quant.quantize.rounding import LayerRounder, RoundingTask  # noqa: E402
from annie_quant.quantize.strategy import Method  # noqa: E402

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def inputs(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Correlated columns of unequal size, as activations are."""
    mixing = rng.normal(size=(k, k)) * np.exp(rng.normal(size=k))
    return (rng.normal(size=(n, k)) @ (np.eye(k) + 0.3 * mixing / np.sqrt(k))).astype(np.float32)


def problem(
    k: int = 160, n_rows: int = 24, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, hessians.Factor]:
    """A weight, inputs, and the factor of their Hessian."""
    rng = np.random.default_rng(seed)
    x = inputs(rng, 4 * k, k)
    factor = hessians.factor(torch.from_numpy(x.T @ x))
    return rng.normal(size=(n_rows, k)).astype(np.float32) * 0.02, x, factor


def in_numpy(
    w: np.ndarray, upper: np.ndarray, tensor_scale: np.float32, group: int
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 of the GPTQ paper, one column after the other, in float64 apart from the rounding itself."""
    w, scales = w.astype(np.float64), np.zeros((len(w), w.shape[1] // group), np.float32)
    for column in range(w.shape[1]):
        if column % group == 0:
            amax = np.abs(w[:, column : column + group]).max(1).astype(np.float32)
            scale = np.clip(amax / (np.float32(6) * tensor_scale), 2.0**-9, 448)
            scales[:, column // group] = scale.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        step = (scales[:, column // group] * tensor_scale).astype(np.float64)
        nearest = np.abs(np.abs(w[:, column] / step)[:, None] - GRID).argmin(1)
        rounded = np.copysign(GRID[nearest] * step, w[:, column])
        error = (w[:, column] - rounded) / upper[column, column]
        w[:, column + 1 :] -= np.outer(error, upper[column, column + 1 :])
        w[:, column] = rounded
    return w, scales


def test_the_c_loop_is_the_papers_algorithm() -> None:
    w, _, factor = problem(k=288)  # two windows and a rest
    scale = nvfp4.tensor_scale(nvfp4.amax(w))
    packed, rounded = hessians.round_columns(w, factor, float(scale))
    order = factor.order
    expected, scales = in_numpy(w[:, order], factor.upper, scale, 16)
    expected, scales = expected[:, np.argsort(order)], scales[:, np.argsort(order[::16] // 16)]
    same_scale = packed.block_scale.astype(np.float32) == scales
    assert (
        same_scale.mean() > 0.97
    )  # float32 against float64: near-ties may fall either way, and then what follows
    rows = same_scale.all(1)
    assert rows.sum() >= 5
    assert (np.abs(rounded[rows] - expected[rows]) < 1e-5).mean() > 0.97


def test_columns_are_rounded_in_the_order_of_their_inputs() -> None:
    """By falling second moment; the columns of a block of sixteen stay together."""
    _, x, factor = problem(k=160, n_rows=24, seed=2)
    second = np.square(x).sum(0)
    blocks = factor.order.reshape(-1, 16)
    assert (blocks // 16 == blocks[:, :1] // 16).all() and sorted(factor.order) == list(range(160))
    assert (np.diff([second[b].sum() for b in blocks]) <= 0).all() and (
        np.diff(second[blocks], axis=1) <= 0
    ).all()
    hessian = (x.T @ x).astype(np.float64)
    damped = hessian + hessians.DAMPING * hessian.diagonal().mean() * np.eye(160)
    inverse = np.linalg.inv(damped[factor.order][:, factor.order])
    assert np.abs(factor.upper.T @ factor.upper - inverse).max() < 1e-3 * np.abs(inverse).max()


def test_what_it_returns_is_what_the_codes_say() -> None:
    w, _, factor = problem()
    for scale in ("amax", "four_over_six", "sweep"):
        step = nvfp4.tensor_scale(nvfp4.amax(w), scale=scale)
        packed, rounded = hessians.round_columns(w, factor, float(step), scale)
        np.testing.assert_array_equal(nvfp4.unpack(packed, "float32"), rounded)


def test_without_correlation_it_is_plain_rounding() -> None:
    w, *_ = problem()
    factor = hessians.factor(torch.eye(w.shape[1]))
    for scale in ("amax", "four_over_six", "sweep"):
        step = float(nvfp4.tensor_scale(nvfp4.amax(w), scale=scale))
        packed, _ = hessians.round_columns(w, factor, step, scale)
        plain = nvfp4.pack(w, tensor_scale=step, scale=scale)
        assert packed.codes.tobytes() == plain.codes.tobytes()
        assert packed.block_scale.tobytes() == plain.block_scale.tobytes()


@pytest.mark.parametrize("scale", ["amax", "sweep"])
def test_output_error_falls_well_below_rounding(scale: str) -> None:
    w, x, factor = problem(k=256, n_rows=64, seed=4)
    step = float(nvfp4.tensor_scale(nvfp4.amax(w), scale=scale))
    _, fed = hessians.round_columns(w, factor, step, scale)
    plain = nvfp4.unpack(nvfp4.pack(w, tensor_scale=step, scale=scale), "float32")
    error = lambda v: float(np.square(x @ (v - w).T).sum())  # noqa: E731
    assert error(fed) < 0.7 * error(plain)


def test_threads_do_not_change_the_bytes() -> None:
    w, _, factor = problem(k=512, n_rows=70)
    step = float(nvfp4.tensor_scale(nvfp4.amax(w)))
    packed = []
    for threads in (1, 3):
        nvfp4.set_threads(threads)
        packed.append(hessians.round_columns(w, factor, step, "sweep")[0])
    nvfp4.set_threads(0)
    assert packed[0].codes.tobytes() == packed[1].codes.tobytes()


def test_a_column_that_no_input_reaches_and_a_singular_hessian() -> None:
    w, x, *_ = problem(k=64)
    x[:, 7] = 0
    x[:, 9] = x[:, 8]
    factor = hessians.factor(torch.from_numpy(x[:20].T @ x[:20]), damping=1e-12)
    assert np.isfinite(factor.upper).all()
    packed, rounded = hessians.round_columns(w, factor, float(nvfp4.tensor_scale(nvfp4.amax(w))))
    assert np.isfinite(rounded).all() and np.isfinite(packed.tensor_scale)
    # Another text may reach it: its weights are the nearest numbers, and no other column's error moves them.
    step = packed.block_scale[:, 0].astype(np.float32) * packed.tensor_scale
    nearest = GRID[np.abs(np.abs(w[:, 7] / step)[:, None] - GRID).argmin(1)]
    np.testing.assert_allclose(rounded[:, 7], np.copysign(nearest * step, w[:, 7]), rtol=1e-6)


def test_feedback_that_overflows_is_refused() -> None:
    w, _, factor = problem(k=64)
    upper = factor.upper.copy()
    upper[0, 1:] = 3e38
    with pytest.raises(ValueError, match="finite"):
        hessians.round_columns(w, hessians.Factor(upper, factor.order), 1e-5)


# -- tokens that count little


def test_tokens_that_count_little_are_sampled_with_their_weights_sum() -> None:
    table = torch.tensor([0.01, 1.0, 1.38, 0.0])
    kinds = torch.from_numpy(np.random.default_rng(3).choice(4, 5000, p=[0.8, 0.1, 0.05, 0.05]))
    weight, least = table[kinds], 0.2
    sampled = hessians.Sampling(table, least)(weight)
    small = weight < least
    assert torch.equal(sampled[~small], weight[~small]), "all others keep their weight"
    assert sampled[small].unique().tolist() == [0, pytest.approx(least)]
    assert (sampled[kinds == 3] == 0).all()
    # At each position the sampled sum is within one token's weight of the sum of all.
    difference = sampled.double().cumsum(0) - weight.double().cumsum(0)
    assert difference.abs().max() < least + 1e-3
    assert 150 < int((sampled[small] > 0).sum()) < 250, "one in twenty of 4,000"
    in_parts = hessians.Sampling(table, least)
    assert torch.equal(
        torch.cat([in_parts(part) for part in weight.split([1, 0, 700, 299, 4000])]), sampled
    )


def test_without_small_weights_all_tokens_are_taken() -> None:
    weight = torch.tensor([1.0, 0.0, 1.0, 0.3])
    assert torch.equal(hessians.Sampling(weight, 0.2)(weight), weight)
    assert torch.equal(
        hessians.Sampling(torch.tensor([0.01, 1.0]), 0.0)(torch.tensor([0.01])),
        torch.tensor([0.01]),
    )


def test_a_hessian_of_sampled_tokens_is_close_to_that_of_all() -> None:
    rng = np.random.default_rng(5)
    x, kinds = (
        torch.from_numpy(inputs(rng, 6000, 32)),
        torch.from_numpy(rng.choice(2, 6000, p=[0.9, 0.1])),
    )
    x[kinds == 0] *= 2  # a Hessian without the first kind would be another
    table = torch.tensor([0.01, 1.0])
    every, sampled, alone = (
        hessians.Hessian(table),
        hessians.Hessian(table, 0.2),
        hessians.Hessian(torch.tensor([0.0, 1.0])),
    )
    for hessian in (every, sampled, alone):
        hessian(x, kinds)
    exact = every.mean()
    assert exact is not None and sampled.amax == every.amax == float(x.abs().max())
    error = [float((h.mean() - exact).norm() / exact.norm()) for h in (sampled, alone)]
    assert error[0] < 0.5 * error[1]


# -- inputs that cannot be used


def hessian_of(x: np.ndarray, weights: tuple[float, ...] = (1.0,)) -> hessians.Hessian:
    """The Hessian of inputs [n, K], all of the first kind."""
    hessian = hessians.Hessian(torch.tensor(weights))
    hessian(torch.from_numpy(x), torch.zeros(len(x), dtype=torch.int64))
    return hessian


def rounder() -> LayerRounder:
    """A rounder of a layer without linears, for the solution of single Hessians."""
    layer = SimpleNamespace(
        name="model.layers.1", chosen_groups=lambda linears: [], experts_of=lambda name: None
    )
    return LayerRounder(layer, RoundingTask([], torch.ones(1), Method(), "sweep"))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_inputs_that_are_not_finite_are_reported_and_the_linear_is_rounded(value: float) -> None:
    _, x, _ = problem(k=64)
    largest = float(np.abs(np.delete(x, 3, axis=0)).max())
    x[3, 5] = value
    hessian = hessian_of(x)
    assert hessian.amax == largest, "a NaN hides neither itself nor the largest input"
    staged = rounder()
    assert staged.solve(["mlp.down_proj"], hessian) is None
    assert (
        "model.layers.1.mlp.down_proj: 1 of its calibration inputs hold NaN or inf"
        in staged.warnings[0]
    )


def test_a_hessian_that_is_not_finite_ends_with_an_error() -> None:
    with pytest.raises(hessians.FactorError, match="NaN or inf"):
        hessians.factor(torch.full((32, 32), torch.nan))


def test_an_input_that_is_always_zero_is_no_reason_for_a_warning() -> None:
    _, x, _ = problem(k=64)
    x[:, 7] = 0
    staged = rounder()
    assert staged.solve(["mlp.up_proj"], hessian_of(x)) is not None and not staged.warnings


@pytest.mark.parametrize("weights", [(1.0,), (0.0,)], ids=["zeros", "no response token"])
def test_a_linear_without_any_input_is_reported_and_rounded(weights: tuple[float, ...]) -> None:
    hessian = hessian_of(np.zeros((8, 64), np.float32), weights)
    staged = rounder()
    assert staged.solve(["mlp.up_proj"], hessian) is None
    assert staged.warnings == [
        "model.layers.1.mlp.up_proj: all its inputs are 0; rounded without error correction"
    ]
    assert staged.solve(["mlp.down_proj"], hessians.Hessian(torch.ones(1))) is None
    assert "model.layers.1.mlp.down_proj: no calibration input reached it" in staged.warnings[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"columns": 63}, "columns"),
        ({"columns": 128}, "w: |factor: "),
        ({"codes": 3}, "codes"),
        ({"scales": 3}, "scales"),
    ],
)
def test_sizes_are_checked(change: dict[str, int], message: str) -> None:
    from annie_quant import _nvfp4

    sizes = {"columns": 64, "codes": 4 * 32, "scales": 4 * 4} | change
    w, upper = np.zeros(4 * 64, np.float32), np.eye(64, dtype=np.float32).reshape(-1)
    codes, scales = np.zeros(sizes["codes"], np.uint8), np.zeros(sizes["scales"], np.uint8)
    with pytest.raises(ValueError, match=message):
        _nvfp4.gptq(w, sizes["columns"], upper, 16, 0, 1e-5, 448.0, None, codes, scales)
