"""KL divergence of a checkpoint's next-token distributions from its reference's, on assistant tokens.

Per token: KL(p || q) = sum p (ln p - ln q) in nats, with p the reference's distribution and q the quantized model's, computed
in float64 from the logits; whether both have the same most likely token; the negative log likelihood of the actual token
under both and the change of its probability; the reference's margin (best minus second-best logit); and the noise (standard
deviation of the logit errors over the reference's most likely tokens).
Margins and noise predict flips: with independent normal noise n on both top logits, P(flip) = Φ(-margin / (n √2)). More flips
than predicted mean that the errors are not such noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from scipy.stats import norm

from annie_quant.documents import KLFigures, KLSummary, MarginBin
from annie_quant.offline.prompts import CLASSES, ScoredAnswer, Template

FIELDS = ("kl", "same_top", "nll_reference", "nll", "delta_p", "margin", "noise")
# Logits that are compared at once: in float64 there are six copies of them.
MAX_COMPARED_LOGITS = 1 << 22
NOISE_TOKENS = 8  # most likely tokens over which the noise is computed
MARGIN_EDGES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, math.inf)


@dataclass(frozen=True)
class TokenLabels:
    """What the figures are grouped by, one entry per scored token.

    categories: text [n], in the order in which they are shown.
    classes: int64 [n], indices in CLASSES.
    decisions: bool [n], whether a token decides.
    """

    categories: np.ndarray
    classes: np.ndarray
    decisions: np.ndarray


def token_labels(template: Template, answers: Sequence[ScoredAnswer]) -> TokenLabels:
    """Return the labels of all tokens of these answers."""
    categories: list[str] = []
    classes: list[int] = []
    decisions: list[bool] = []
    for answer in answers:
        categories += [answer.category] * len(answer.target)
        classes += template.classes(answer.target, answer.thinking)
        decisions += template.decisions(answer.target, answer.thinking)
    return TokenLabels(np.array(categories), np.array(classes), np.array(decisions, dtype=bool))


@torch.inference_mode()
def compare_logits(
    reference: torch.Tensor, quantized: torch.Tensor, target: torch.Tensor
) -> np.ndarray:
    """Return FIELDS of n tokens, float64 [n, len(FIELDS)]. reference, quantized: logits [n, V]. target: tokens int64 [n]."""
    n_parts = 1
    if reference.device.type == "cpu":
        n_parts = max(1, -(-reference.numel() // MAX_COMPARED_LOGITS))
    tensors = (reference, quantized, target)
    parts = zip(*(tensor.tensor_split(n_parts) for tensor in tensors), strict=True)
    return np.concatenate([_compare_part(*part) for part in parts if len(part[0])])


def _compare_part(
    reference: torch.Tensor, quantized: torch.Tensor, target: torch.Tensor
) -> np.ndarray:
    p = torch.log_softmax(reference.double(), -1)
    q = torch.log_softmax(quantized.double(), -1)
    top = reference.topk(min(NOISE_TOKENS, reference.shape[-1]), -1)
    error = (quantized.double() - reference.double()).gather(-1, top.indices)
    at = target.unsqueeze(-1)
    p_target = p.gather(-1, at).squeeze(-1)
    q_target = q.gather(-1, at).squeeze(-1)
    columns = (
        (p.exp() * (p - q)).sum(-1).clamp_min(0),
        (top.indices[:, 0] == quantized.argmax(-1)).double(),
        -p_target,
        -q_target,
        q_target.exp() - p_target.exp(),
        (top.values[:, 0] - top.values[:, 1]).double(),
        error.std(-1, correction=1),
    )
    return torch.stack(columns, -1).cpu().numpy()


def kl_summary(fields: np.ndarray, labels: TokenLabels) -> KLSummary:
    """Return the figures of n tokens, per category, per class and of decisions. fields: from compare_logits."""
    by_category = {
        str(name): figures(fields[labels.categories == name])
        for name in dict.fromkeys(labels.categories)
    }
    by_class = {}
    for index, name in enumerate(CLASSES):
        inside = labels.classes == index
        if inside.any():
            by_class[name] = figures(fields[inside])
    return KLSummary(
        **msgspec.structs.asdict(figures(fields)),
        by_category=by_category,
        by_class=by_class,
        margins=margin_bins(fields),
        decisions=figures(fields[labels.decisions]) if labels.decisions.any() else None,
    )


def figures(rows: np.ndarray) -> KLFigures:
    """Return the figures of tokens float64 [n, len(FIELDS)], n >= 1."""
    col = {name: rows[:, i] for i, name in enumerate(FIELDS)}
    return KLFigures(
        n_tokens=len(rows),
        mean=float(col["kl"].mean()),
        median=float(np.median(col["kl"])),
        p99=float(np.quantile(col["kl"], 0.99)),
        max=float(col["kl"].max()),
        same_top=float(col["same_top"].mean()),
        flips=int((col["same_top"] == 0).sum()),
        flips_predicted=float(flip_chance(col["margin"], col["noise"]).sum()),
        perplexity=float(np.exp(col["nll"].mean())),
        perplexity_reference=float(np.exp(col["nll_reference"].mean())),
        delta_p_mean=float(col["delta_p"].mean()),
        delta_p_rms=float(np.sqrt(np.square(col["delta_p"]).mean())),
        margin_median=float(np.median(col["margin"])),
        noise_median=float(np.median(col["noise"])),
    )


def flip_chance(margin: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Return Φ(-margin / (noise √2)), the probability that independent errors swap the two top logits."""
    return norm.cdf(-margin / np.maximum(noise * math.sqrt(2), 1e-30))


def margin_bins(rows: np.ndarray) -> list[MarginBin]:
    """Return counts of tokens, flips and predicted flips per range of the reference's margin."""
    margin = rows[:, FIELDS.index("margin")]
    noise = rows[:, FIELDS.index("noise")]
    flipped = rows[:, FIELDS.index("same_top")] == 0
    bins = []
    for low, high in itertools.pairwise(MARGIN_EDGES):
        inside = (margin >= low) & (margin < high)
        flips_predicted = float(flip_chance(margin[inside], noise[inside]).sum())
        end = None if math.isinf(high) else high
        bins.append(
            MarginBin(
                low,
                end,
                n_tokens=int(inside.sum()),
                flips=int(flipped[inside].sum()),
                flips_predicted=flips_predicted,
            )
        )
    return bins
