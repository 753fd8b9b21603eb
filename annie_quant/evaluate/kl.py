"""How far a quantized model's next-token distributions are from its reference's, on assistant tokens only.

For each token: KL(p || q) = sum p (ln p - ln q), p the reference's distribution, q the quantized model's, in nats,
computed in float64 from the logits. Besides: same top token, negative log likelihood of the token that stands there under
both, Δp of that token, the reference's margin (top-1 minus top-2 logit) and the noise of the quantized model's logits
there (standard deviation of their difference over the reference's eight most likely tokens).
Margins and noise predict flips: with independent normal noise n on both top logits, P(flip) = Φ(-margin / (n √2)). The
count of flips stands beside the prediction: more flips than predicted means errors that are not such noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

FIELDS = ("kl", "same_top", "nll_reference", "nll", "delta_p", "margin", "noise")
NEAR = 8  # most likely tokens over which the noise is taken
MARGIN_EDGES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, math.inf)


@torch.inference_mode()
def compare_logits(reference: torch.Tensor, quantized: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """Logits [n, V] of both and the tokens int64 [n] → float64 [n, len(FIELDS)]."""
    p = torch.log_softmax(reference.double(), -1)
    q = torch.log_softmax(quantized.double(), -1)
    top = reference.topk(min(NEAR, reference.shape[-1]), -1)
    error = (quantized.double() - reference.double()).gather(-1, top.indices)
    at = target.unsqueeze(-1)
    columns = (
        (p.exp() * (p - q)).sum(-1).clamp_min(0),
        (top.indices[:, 0] == quantized.argmax(-1)).double(),
        -p.gather(-1, at).squeeze(-1),
        -q.gather(-1, at).squeeze(-1),
        q.gather(-1, at).squeeze(-1).exp() - p.gather(-1, at).squeeze(-1).exp(),
        (top.values[:, 0] - top.values[:, 1]).double(),
        error.std(-1, correction=1),
    )
    return torch.stack(columns, -1).cpu().numpy()


class Tally:
    """Figures of many tokens, by category and class."""

    def __init__(self, classes: Sequence[str]) -> None:
        self.names = tuple(classes)
        self.rows: list[np.ndarray] = []
        self.categories: list[str] = []
        self.classes: list[np.ndarray] = []

    def add(self, category: str, classes: Sequence[int], figures: np.ndarray) -> None:
        """One answer: its category, each token's class index, and compare_logits' array."""
        self.rows.append(figures)
        self.categories += [category] * len(figures)
        self.classes.append(np.asarray(classes, dtype=np.int64))

    def summary(self) -> dict[str, Any]:
        """All tokens, then by category and by class. Empty tallies give n_tokens 0 alone."""
        if not self.rows:
            return {"n_tokens": 0}
        rows = np.concatenate(self.rows)
        kinds = np.concatenate(self.classes)
        groups = np.asarray(self.categories)
        return figures(rows) | {
            "by_category": {str(c): figures(rows[groups == c]) for c in dict.fromkeys(self.categories)},
            "by_class": {n: figures(rows[kinds == i]) for i, n in enumerate(self.names) if (kinds == i).any()},
            "margins": margins(rows),
        }


def figures(rows: np.ndarray) -> dict[str, Any]:
    """Of float64 [n, len(FIELDS)], n >= 1: KL in nats, shares, perplexities."""
    col = {name: rows[:, i] for i, name in enumerate(FIELDS)}
    return {
        "n_tokens": len(rows),
        "mean": float(col["kl"].mean()),
        "median": float(np.median(col["kl"])),
        "p99": float(np.quantile(col["kl"], 0.99)),
        "max": float(col["kl"].max()),
        "same_top": float(col["same_top"].mean()),
        "flips": int((col["same_top"] == 0).sum()),
        "flips_predicted": float(flip_chance(col["margin"], col["noise"]).sum()),
        "perplexity": float(np.exp(col["nll"].mean())),
        "perplexity_reference": float(np.exp(col["nll_reference"].mean())),
        "delta_p_mean": float(col["delta_p"].mean()),
        "delta_p_rms": float(np.sqrt(np.square(col["delta_p"]).mean())),
        "margin_median": float(np.median(col["margin"])),
        "noise_median": float(np.median(col["noise"])),
    }


def flip_chance(margin: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Φ(-margin / (noise √2)): independent errors of standard deviation `noise` on the two top logits change places."""
    from scipy.stats import norm

    return norm.cdf(-margin / np.maximum(noise * math.sqrt(2), 1e-30))


def margins(rows: np.ndarray) -> list[dict[str, Any]]:
    """Tokens by the reference's margin: how many, how many flipped, how many were predicted to."""
    margin, noise = rows[:, FIELDS.index("margin")], rows[:, FIELDS.index("noise")]
    flipped = rows[:, FIELDS.index("same_top")] == 0
    table = []
    for low, high in itertools.pairwise(MARGIN_EDGES):
        here = (margin >= low) & (margin < high)
        table.append(
            {
                "from": low,
                "to": None if math.isinf(high) else high,
                "n_tokens": int(here.sum()),
                "flips": int(flipped[here].sum()),
                "flips_predicted": float(flip_chance(margin[here], noise[here]).sum()),
            }
        )
    return table
