"""KL divergence and the related figures, compared with a separate float64 computation in NumPy and SciPy."""

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")
scipy_special = pytest.importorskip("scipy.special")

from annie_quant.offline.divergence import (  # noqa: E402
    FIELDS,
    TokenLabels,
    compare_logits,
    flip_chance,
    kl_summary,
)


def separate(
    reference: np.ndarray, quantized: np.ndarray, target: np.ndarray
) -> dict[str, np.ndarray]:
    """Compute the same fields from probabilities, one token at a time."""
    rows = {name: [] for name in FIELDS}
    for p_logits, q_logits, token in zip(
        reference.astype(np.float64), quantized.astype(np.float64), target, strict=True
    ):
        p, q = scipy_special.softmax(p_logits), scipy_special.softmax(q_logits)
        rows["kl"].append(scipy_special.rel_entr(p, q).sum())
        rows["same_top"].append(float(p_logits.argmax() == q_logits.argmax()))
        rows["nll_reference"].append(-np.log(p[token]))
        rows["nll"].append(-np.log(q[token]))
        rows["delta_p"].append(q[token] - p[token])
        top = np.sort(p_logits)[::-1]
        rows["margin"].append(top[0] - top[1])
        near = np.argsort(-p_logits)[:8]
        rows["noise"].append(np.std((q_logits - p_logits)[near], ddof=1))
    return {k: np.array(v) for k, v in rows.items()}


@pytest.fixture(scope="module")
def logits() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    reference = (rng.standard_normal((400, 300)) * 4).astype(np.float32)
    quantized = (reference + rng.standard_normal((400, 300)) * rng.random((400, 1))).astype(
        np.float32
    )
    return reference, quantized, rng.integers(0, 300, 400)


def test_each_token_agrees_with_the_separate_computation(logits) -> None:
    fields = compare_logits(*(torch.from_numpy(x) for x in logits))
    for i, (name, expected) in enumerate(separate(*logits).items()):
        assert FIELDS[i] == name
        np.testing.assert_allclose(fields[:, i], expected, rtol=1e-9, atol=1e-12, err_msg=name)


def test_the_summary_is_that_of_all_tokens(logits) -> None:
    expected = separate(*logits)
    fields = compare_logits(*(torch.from_numpy(x) for x in logits))
    kinds = np.arange(400) % 3 == 0
    categories = np.repeat(["factual", "tool", "factual"], [150, 20, 230])
    labels = TokenLabels(categories, kinds.astype(int), np.zeros(400, dtype=bool))
    summary = kl_summary(fields, labels)
    kl = expected["kl"]
    assert summary.n_tokens == 400
    for name, value in (
        ("mean", kl.mean()),
        ("median", np.median(kl)),
        ("p99", np.percentile(kl, 99)),
        ("max", kl.max()),
    ):
        assert getattr(summary, name) == pytest.approx(value, rel=1e-9)
    assert summary.perplexity == pytest.approx(np.exp(expected["nll"].mean()))
    assert summary.perplexity_reference == pytest.approx(np.exp(expected["nll_reference"].mean()))
    assert summary.flips == 400 - expected["same_top"].sum()
    assert summary.by_category["tool"].mean == pytest.approx(kl[150:170].mean())
    assert summary.by_class["tool_markup"].mean == pytest.approx(kl[kinds].mean())
    assert sum(row.n_tokens for row in summary.margins) == 400
    assert sum(row.flips for row in summary.margins) == summary.flips


def test_equal_logits_have_no_divergence(logits) -> None:
    reference = torch.from_numpy(logits[0])
    fields = compare_logits(reference, reference.clone(), torch.from_numpy(logits[2]))
    assert (fields[:, FIELDS.index("kl")] == 0).all() and (
        fields[:, FIELDS.index("same_top")] == 1
    ).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("annie_quant.offline.divergence.MAX_COMPARED_LOGITS", 3 * logits[0].shape[1])
        in_parts = compare_logits(reference, reference.clone(), torch.from_numpy(logits[2]))
    assert np.array_equal(in_parts, fields)
    shifted = compare_logits(reference, reference + 3, torch.from_numpy(logits[2]))
    np.testing.assert_allclose(shifted[:, FIELDS.index("kl")], 0, atol=1e-6)
    np.testing.assert_allclose(shifted[:, FIELDS.index("noise")], 0, atol=1e-6)


def test_a_token_made_impossible_is_a_large_but_finite_divergence() -> None:
    reference = torch.zeros(1, 4)
    quantized = torch.tensor([[0.0, 0.0, 0.0, -200.0]])
    assert compare_logits(reference, quantized, torch.tensor([3]))[0, 0] == pytest.approx(
        0.25 * 200 + np.log(3 / 4), abs=1e-6
    )


def test_predicted_flips_are_those_of_two_noisy_logits() -> None:
    rng = np.random.default_rng(1)
    margin = rng.exponential(1.0, 2000)
    noise = 0.7
    draws = rng.standard_normal((2, 200, 2000)) * noise
    happened = (margin + draws[0] - draws[1] < 0).mean()
    assert flip_chance(margin, np.full(2000, noise)).mean() == pytest.approx(happened, abs=0.005)
