"""NVFP4 fake quantization in torch, stacked over M models, with ModelOpt's arithmetic (tensor scale amax / 2688,
block scale E4M3 of 16 columns, E2M1 codes, ties to even). Tests compare it with the package's codec.
"""

from __future__ import annotations

from typing import Any

import torch

GROUP = 16
NOT_QUANTIZED = ("in_proj_a", "in_proj_b")
SHARED_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"))


def e2m1(x: torch.Tensor) -> torch.Tensor:
    a = x.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.copysign((torch.round(a / step) * step).clamp(max=6.0), x)


def fake(x: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """x: [..., K]; tensor_scale broadcasts against [..., K/16, 1]. The dtype stays."""
    blocks = x.float().unflatten(-1, (-1, GROUP))
    s = (blocks.abs().amax(-1, keepdim=True) / (6 * tensor_scale)).clamp(2**-9, 448).to(torch.float8_e4m3fn).float()
    scale = s * tensor_scale
    return (e2m1(blocks / scale) * scale).flatten(-2).to(x.dtype)


def quantized(name: str, what: str) -> bool:
    """Return whether the strategy `what` ("naive", "mlp_only") quantizes this linear."""
    if any(part in name for part in NOT_QUANTIZED):
        return False
    return what == "naive" or ".mlp." in name


def partners(name: str) -> list[str]:
    """Return the linears that share this one's input, including itself: they share one tensor scale."""
    stem, _, leaf = name.removesuffix(".weight").rpartition(".")
    group = next((g for g in SHARED_INPUT if leaf in g), (leaf,))
    return [f"{stem}.{g}" for g in group]


def weights(stacked: dict[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """Return the stacked weights with those that `what` quantizes rounded to NVFP4."""
    out = dict(stacked)
    for name in [n for n, w in stacked.items() if w.dim() == 3 and "conv1d" not in n]:
        if quantized(name, what):
            peak = torch.stack([stacked[p + ".weight"].float().abs().amax((1, 2)) for p in partners(name)]).amax(0)
            out[name] = fake(stacked[name], (peak / 2688)[:, None, None, None])
    return out


class Peaks:
    """Hook for calibration: the largest |input| of each linear, [M]."""

    def __init__(self) -> None:
        self.peak: dict[str, torch.Tensor] = {}
        self.keep: torch.Tensor | None = None

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        size = x.detach().abs().amax(3).float()
        size = size if self.keep is None else size * self.keep
        amax = size.amax((1, 2))
        self.peak[name] = torch.maximum(self.peak[name], amax) if name in self.peak else amax
        return x


class Activations:
    """Hook for W4A4: dynamic block scales under the calibrated tensor scale."""

    def __init__(self, peak: dict[str, torch.Tensor], what: str) -> None:
        self.scale = {n: (p / 2688)[:, None, None, None, None] for n, p in peak.items() if quantized(n, what)}

    def __call__(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale: Any = self.scale.get(name)
        return x if scale is None else fake(x, scale)
