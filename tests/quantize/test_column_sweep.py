"""GPTQ in torch against independent float64 solutions: columns one by one, every scale tried."""

from __future__ import annotations

import os

import numpy as np
import pytest

from annie_quant import nvfp4

torch = pytest.importorskip(
    "torch", reason="the sweep runs on torch: pip install annie-quant[quantize]"
)
from annie_quant.offline import codec  # noqa: E402
from annie_quant.quantize import gptq  # noqa: E402
from annie_quant.quantize.gptq import FactorError  # noqa: E402

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [
        (c & 7) / 8 * 2.0**-6 if c < 8 else (1 + (c & 7) / 8) * 2.0 ** ((c >> 3) - 7)
        for c in range(127)
    ]
)
ALL = range(-125, 126)


def problem(
    rows: int = 12, columns: int = 64, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a weight, inputs with correlated columns of unequal size, and their mean second moment."""
    rng = np.random.default_rng(seed)
    mixing = np.eye(columns) + 0.3 * rng.normal(size=(columns, columns)) / np.sqrt(columns)
    x = rng.normal(size=(4 * columns, columns)) @ mixing * np.exp(0.7 * rng.normal(size=columns))
    return rng.normal(size=(rows, columns)) * 0.02, x, x.T @ x / len(x)


def run(w: np.ndarray, hessian: np.ndarray, **options) -> tuple[gptq.Rounded, float]:
    scale = float(nvfp4.tensor_scale(np.abs(w).max()))
    rows = torch.full((len(w),), scale)
    weight, matrix = torch.from_numpy(w).float(), torch.from_numpy(hessian).float()
    return gptq.sweep(weight, matrix, rows, **options), scale


def in_activation_order(w: np.ndarray, hessian: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the same problem with its columns in the order in which the sweep rounds them."""
    order = gptq.activation_order(torch.tensor(np.diag(hessian))).numpy()
    return w[:, order], hessian[np.ix_(order, order)]


def nearest(x: np.ndarray) -> np.ndarray:
    return np.copysign(GRID[np.abs(np.abs(x)[..., None] - GRID).argmin(-1)], x)


def one_column_at_a_time(
    w: np.ndarray, hessian: np.ndarray, step: np.ndarray, order: np.ndarray
) -> np.ndarray:
    """Optimal brain surgery in float64: each error is solved into the columns that are still free, by their own inverse."""
    w, free = w.copy(), list(order)
    for column in order:
        inverse = np.linalg.inv(hessian[np.ix_(free, free)])
        rounded = nearest(w[:, column] / step[:, column]) * step[:, column]
        w[:, free[1:]] -= np.outer((w[:, column] - rounded) / inverse[0, 0], inverse[0, 1:])
        w[:, column] = rounded
        free = free[1:]
    return w


def test_it_is_the_column_by_column_solution() -> None:
    w, _, hessian = problem(columns=160, seed=3)  # more than one window
    rounded, _ = run(w, hessian, damping=0.05)
    damped = hessian + 0.05 * np.diag(hessian).mean() * np.eye(len(hessian))
    step = np.repeat(rounded.step.double().numpy(), 16, axis=1)
    columns = gptq.activation_order(torch.tensor(np.diag(hessian))).numpy()
    expected = one_column_at_a_time(w, damped, step, columns)
    # float32 against float64: a near-tie may fall the other way, and then what follows in its row.
    same = np.abs(rounded.values.numpy() - expected) < 1e-6
    assert same.mean() > 0.97
    other = one_column_at_a_time(w, damped, step, np.arange(160))
    assert (np.abs(other - expected) > 1e-6).mean() > 0.03, "another order gives other codes"


def test_blocks_and_the_columns_in_them_fall() -> None:
    diagonal = torch.tensor(np.random.default_rng(0).permutation(64).astype(np.float32) + 1)
    blocks = gptq.activation_order(diagonal).view(4, 16)
    assert all(
        sorted(b.tolist()) == list(range(16 * (int(b[0]) // 16), 16 * (int(b[0]) // 16) + 16))
        for b in blocks
    )
    sums = diagonal[blocks].sum(1)
    assert (sums[1:] <= sums[:-1]).all() and (
        diagonal[blocks][:, 1:] < diagonal[blocks][:, :-1]
    ).all()


def test_the_scale_in_the_sweep_is_the_best_of_all_codes() -> None:
    """The first block, by every code in float64: the loss is the quadratic form that is left once later columns are free."""
    w, _, hessian = problem(columns=48, seed=5)
    w, hessian = in_activation_order(w, hessian)
    rounded, scale = run(w, hessian, damping=0.05, candidates=ALL)
    damped = hessian + 0.05 * np.diag(hessian).mean() * np.eye(48)
    a, b, c = damped[:16, :16], damped[:16, 16:], damped[16:, 16:]
    left = a - b @ np.linalg.inv(c) @ b.T
    losses = np.empty((len(w), 127))
    losses[:, 0] = np.inf
    for code in range(1, 127):
        step = np.full((len(w), 16), E4M3[code] * scale)
        error = one_column_at_a_time(w[:, :16], left, step, np.arange(16)) - w[:, :16]
        losses[:, code] = np.einsum("ni,ij,nj->n", error, left, error)
    chosen = losses[np.arange(len(w)), rounded.scale_codes[:, 0].numpy()]
    np.testing.assert_allclose(chosen, losses.min(1), rtol=1e-4)
    near, _ = run(w, hessian, damping=0.05)
    assert (near.scale_codes[:, 0] == rounded.scale_codes[:, 0]).all()
    amax, _ = run(w, hessian, damping=0.05, candidates=range(1))
    assert (losses[np.arange(len(w)), amax.scale_codes[:, 0].numpy()] > 1.01 * losses.min(1)).any()


def test_the_loss_it_reports_is_the_output_error() -> None:
    w, _, hessian = problem(columns=96, seed=1)
    rounded, _ = run(w, hessian, damping=1e-6)
    error = rounded.values.double().numpy() - w
    np.testing.assert_allclose(
        rounded.loss.numpy(), np.einsum("ni,ij,nj->n", error, hessian, error), rtol=2e-3
    )


def test_each_part_lowers_the_error() -> None:
    """Summed over five problems: scales in the sweep, both well below plain rounding."""
    totals = dict.fromkeys(("plain", "amax", "sweep"), 0.0)
    for seed in range(5):
        w, _, hessian = problem(rows=32, columns=128, seed=seed)
        scale = torch.full((32,), float(nvfp4.tensor_scale(np.abs(w).max())))
        values = {
            "plain": gptq.nearest(torch.from_numpy(w), scale).values,
            "amax": run(w, hessian, candidates=range(1))[0].values,
            "sweep": run(w, hessian)[0].values,
        }
        for name, value in values.items():
            error = value.double().numpy() - w
            totals[name] += float(np.einsum("ni,ij,nj->", error, hessian, error))
    assert totals["sweep"] < totals["amax"] < totals["plain"]


def test_without_correlation_it_is_plain_rounding_in_place() -> None:
    w, *_ = problem()
    diagonal = np.diag(np.exp(np.random.default_rng(1).normal(size=64)))
    rounded, scale = run(w, diagonal, candidates=range(1))
    plain = nvfp4.pack(w.astype(np.float32), tensor_scale=scale)
    packed = rounded.packed(scale)
    assert packed.block_scale.tobytes() == plain.block_scale.tobytes()
    np.testing.assert_array_equal(nvfp4.unpack(packed, "float32"), nvfp4.unpack(plain, "float32"))


def test_codes_say_what_the_values_are() -> None:
    w, _, hessian = problem(columns=128, seed=8)
    rounded, scale = run(w, hessian)
    np.testing.assert_array_equal(
        nvfp4.unpack(rounded.packed(scale), "float32"), rounded.values.numpy()
    )


def test_e2m1_rounds_as_the_codec() -> None:
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    x = np.concatenate(
        [
            middles,
            np.nextafter(middles, 0),
            np.nextafter(middles, 9),
            GRID.astype(np.float32),
            [5.9, 6],
        ]
    )
    x = np.concatenate([x, -x, np.linspace(-6, 6, 1001)]).astype(np.float32)
    blocks = np.concatenate(
        [np.full((len(x), 1), 6, np.float32), np.repeat(x[:, None], 15, 1)], axis=1
    )
    expected = nvfp4.unpack(nvfp4.pack(blocks, tensor_scale=1.0), "float32")[:, 1]
    np.testing.assert_array_equal(codec.to_e2m1(torch.from_numpy(x)).numpy(), expected)
    assert codec.to_e2m1(torch.tensor([7.0, -100.0])).tolist() == [6, -6]


def test_columns_without_input_are_rounded_to_nearest_and_bad_hessians_are_refused() -> None:
    w, _, hessian = problem()
    hessian[:, 7] = hessian[7] = 0
    rounded, _ = run(w, hessian)
    step = rounded.step[:, 0].double().numpy()
    np.testing.assert_allclose(rounded.values[:, 7], nearest(w[:, 7] / step) * step, rtol=1e-6)
    with pytest.raises(FactorError, match="all its inputs are 0"):
        run(w, np.zeros((64, 64)))
    with pytest.raises(FactorError, match="NaN or inf"):
        run(w, np.full((64, 64), np.nan))
    rank_one = np.outer(np.arange(1, 65), np.arange(1, 65)) * 1.0
    assert run(w, rank_one, damping=1e-12)[0].values.isfinite().all(), (
        "more damping makes it factorable"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the sweep on a GPU needs a CUDA GPU")
def test_a_gpu_gives_the_same_codes() -> None:
    w, _, hessian = problem(rows=64, columns=512, seed=7)
    scale = torch.full((64,), float(nvfp4.tensor_scale(np.abs(w).max())))
    inputs = (torch.from_numpy(w).float(), torch.from_numpy(hessian).float(), scale)
    cpu = gptq.sweep(*inputs)
    gpu = gptq.sweep(*(t.cuda() for t in inputs))
    # Sums have another order there: near-ties fall either way, and then what follows in the row.
    assert (cpu.codes == gpu.codes.cpu()).float().mean() > 0.97
    assert float(gpu.loss.sum()) == pytest.approx(float(cpu.loss.sum()), rel=0.01)


@pytest.mark.parametrize("candidates", [range(-1, 2), range(1), gptq.NEAR_CODES])
def test_one_launch_per_block_column_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, candidates: range
) -> None:
    """The Triton function, on a GPU or, with TRITON_INTERPRET=1, on the CPU."""
    pytest.importorskip("triton", reason="pip install triton, then TRITON_INTERPRET=1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without a GPU: TRITON_INTERPRET=1 python -m pytest")
    from annie_quant.quantize import triton_kernels

    w, _, hessian = problem(rows=37, columns=160, seed=7)
    w[:, 32:48] *= np.logspace(-9, 0, 37)[:, None]  # block scales down to E4M3's least code
    w[3, 16:32] = 0
    weight, matrix = (
        torch.from_numpy(w).float().to(device),
        torch.from_numpy(hessian).float().to(device),
    )
    upper = gptq.upper_factor(matrix).contiguous()
    scale = torch.full((37,), float(nvfp4.tensor_scale(np.abs(w).max())), device=device)
    for start in (0, 16, 32, 144):
        results = []
        for function in (gptq.round_column, triton_kernels.round_column):
            result = gptq.Sweep.of(weight, upper, scale, candidates)
            errors = torch.zeros(37, 48, device=device)
            function(result, start, errors[:, 16:32])
            results.append(
                [
                    t.cpu().numpy()
                    for t in (errors, result.codes, result.steps, result.chosen, result.loss)
                ]
            )
        same = results[0][3][start // 16] == results[1][3][start // 16]
        assert (
            same.mean() > 0.97
        )  # sums in another order: of two candidates with one loss, the other may be taken
        rows = np.flatnonzero(same)
        for expected, got in zip(
            *[[a[rows] if len(a) == 37 else a[:, rows] for a in r] for r in results], strict=True
        ):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
