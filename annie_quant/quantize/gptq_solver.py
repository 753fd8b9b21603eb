"""GPTQ for one linear: columns rounded one after the other, each one's error taken out of the columns to come.

The Hessian of the squared output error is the inputs' weighted second moment X^T W X (Frantar et al. 2022). The loop over
columns is C (csrc/nvfp4/gptq.c) and chooses block scales as the codec does; the factorisation is torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from annie_quant import _nvfp4, nvfp4
from annie_quant.errors import need

GROUP = 16
DAMPING = 0.05  # of the mean of the Hessian's diagonal; llm-compressor's comparison (#2922) found .05 better than .01


class Hessian:
    """Sums the weighted second moment of the inputs [n, K] that it hears, and their largest value."""

    def __init__(self, table: Any) -> None:
        self.table, self.weight, self.amax = table, 0.0, 0.0
        self.total: Any = None

    def __call__(self, x: Any, marks: Any) -> None:
        if not len(x):
            return
        self.amax = max(self.amax, float(x.abs().max()))
        weight = self.table[marks]
        used = weight > 0
        rows = x[used].float() * weight[used].sqrt()[:, None]
        if self.total is None:
            self.total = rows.T @ rows
        else:
            self.total.addmm_(rows.T, rows)
        self.weight += float(weight.sum())

    def mean(self) -> Any:
        return self.total / max(self.weight, 1e-30)


def factor(hessian: Any, damping: float = DAMPING) -> tuple[np.ndarray, np.ndarray]:
    """(upper Cholesky factor of the inverse of the damped Hessian, which columns no input ever reached).

    A Hessian that float32 cannot factor gets ten times the damping, and so on.
    """
    torch = need("torch", "quantize")
    diagonal = hessian.diagonal()
    dead = diagonal <= 0
    base = hessian.clone()
    base.diagonal()[dead] = 1.0
    mean = float(base.diagonal().mean())
    while True:
        damped = base.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return np.ascontiguousarray(upper.float().cpu().numpy()), dead.cpu().numpy()
        damping *= 10


def round_columns(
    weight: np.ndarray, upper: np.ndarray, dead: np.ndarray, tensor_scale: float, scale: nvfp4.Scale = "amax"
) -> tuple[nvfp4.Tensor, np.ndarray]:
    """(packed, dequantized float32) of a weight [N, K] in any float dtype; `upper` and `dead` from factor().

    A column's error counts by 1 / upper[k, k]^2 in the search for a block's scale, as it does in GPTQ's own objective.
    Raises ValueError where feedback made a number that is not finite.
    """
    w = np.array(weight, np.float32, order="C")
    w[:, dead] = 0
    rows, columns = w.shape
    codes, scales = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // GROUP), np.uint8)
    importance = np.ascontiguousarray(1 / np.square(upper.diagonal()), np.float32)
    choice = ("amax", "four_over_six", "sweep").index(scale)
    finite = _nvfp4.gptq(
        w.reshape(-1),
        columns,
        upper.reshape(-1),
        GROUP,
        choice,
        float(tensor_scale),
        256.0 if scale == "four_over_six" else 448.0,
        None if scale == "amax" else importance,
        codes.reshape(-1),
        scales.reshape(-1),
    )
    if not finite:
        raise ValueError("feedback made weights that are not finite")
    packed = nvfp4.Tensor(codes, scales.view(nvfp4.E4M3), np.float32(tensor_scale), (rows, columns), GROUP)
    return packed, w
