"""GPTQ for one linear: columns are rounded one after the other, and each error is corrected in the columns that follow.

The Hessian of the squared output error is the inputs' weighted second moment X^T W X (Frantar et al. 2022), factored by torch.
`round_columns` is the loop over the columns in C (csrc/nvfp4/gptq.c), which chooses block scales as the codec does;
column_sweep.py chooses them by GPTQ's own objective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from annie_quant import nvfp4

DAMPING = 0.05  # of the mean of the Hessian's diagonal; in llm-compressor's comparison (#2922) .05 was better than .01
ATTEMPTS = 12  # factorisations of one Hessian, with ten times the damping each
# Prompts have many more tokens than responses. With a weight of .01, one prompt token in twenty is multiplied.
LEAST_WEIGHT = 0.2


class Sampling:
    """Takes a sample of the tokens with small weights; each sampled token gets the weight of those that it stands for.

    This is systematic sampling: of the tokens whose weight is below `least`, one is taken with the weight `least` each time the sum
    of their weights has grown by `least`. The tokens may come in parts of any size.

    table: weights of all kinds of tokens.
    """

    def __init__(self, table: torch.Tensor, least: float) -> None:
        self.least, self.total = least, 0.0  # total: of the weights below `least` so far
        self.needed = bool(((table > 0) & (table < least)).any())

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weights [n] with which the next n tokens count."""
        if not self.needed or not len(weight):
            return weight
        small = weight < self.least
        sums = self.total + torch.where(small, weight, 0).double().cumsum(0)
        steps = (sums / self.least).floor()
        taken = steps.diff(prepend=steps.new_tensor([self.total / self.least]).floor()) > 0
        self.total = float(sums[-1])
        return torch.where(small, taken * self.least, weight)


@contextlib.contextmanager
def tensor_cores(use: bool) -> Iterator[None]:
    """Let a GPU multiply float32 matrices in TF32, which holds products of bf16 values exactly; sums stay float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = use or before
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Hessian:
    """Accumulates the weighted second moment of inputs x [n, K], and their largest magnitude.

    table: weight of each kind of token.
    least: of Sampling; 0 takes all tokens.
    fast: multiply on a GPU's tensor cores.
    Tokens with NaN or inf are counted in `not_finite` and left out of both.
    """

    def __init__(self, table: torch.Tensor, least: float = 0.0, fast: bool = False) -> None:
        self.table, self.fast = table, fast
        self.weight, self.amax, self.not_finite, self.tokens = 0.0, 0.0, 0, 0
        self.sampling = Sampling(table, least)
        self.total: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, kinds: torch.Tensor) -> None:
        self.tokens += len(x)
        largest = x.abs().amax(-1).float()  # NaN where a token has one
        finite = largest.isfinite()
        if not bool(finite.all()):
            self.not_finite += int((~finite).sum())
            x, kinds, largest = x[finite], kinds[finite], largest[finite]
        if not len(x):
            return
        self.amax = max(self.amax, float(largest.max()))
        weight = self.sampling(self.table[kinds])
        used = weight.nonzero()[:, 0]
        # float32 sums with and without zeros round differently, so each way of rounding keeps its own sum, and its bytes.
        self.weight += float((weight[used] if self.fast else weight).sum())
        if len(used) or not self.fast:
            self.add(x.index_select(0, used), weight[used])

    def add(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        """Add inputs [n, K], each with its weight [n] > 0.

        fast: inputs in bfloat16 that all weigh 1 are multiplied as they are, others in TF32; sums are float32 in both.
        """
        fast = self.fast and x.dtype == torch.bfloat16
        if fast and x.is_cuda and bool((weight == 1).all()):
            product = torch.mm(x.T, x, out_dtype=torch.float32)
            self.total = product if self.total is None else self.total.add_(product)
            return
        rows = x.float() * weight.sqrt()[:, None]
        with tensor_cores(fast):
            self.total = rows.T @ rows if self.total is None else self.total.addmm_(rows.T, rows)

    def mean(self) -> torch.Tensor | None:
        """Return the weighted mean of x x^T, float32 [K, K], or None if no finite input counted."""
        return None if self.total is None else self.total / max(self.weight, 1e-30)

    def unusable(self) -> str:
        """Return why no error can be corrected with it, or ""."""
        if self.not_finite:
            return f"{self.not_finite} of its calibration inputs hold NaN or inf"
        if self.total is None:
            return "all its inputs are 0" if self.tokens else "no calibration input reached it"
        return ""


@dataclass(frozen=True)
class Factor:
    """A factored Hessian.

    upper: upper Cholesky factor of the inverse of the damped Hessian, float32 [K, K].
    dead: columns whose input was always 0, bool [K]; their weights have no effect and become 0.
    """

    upper: np.ndarray
    dead: np.ndarray


class FactorError(ValueError):
    """A Hessian that GPTQ cannot use. The message is the reason."""


def factor(hessian: torch.Tensor, damping: float = DAMPING) -> Factor:
    """Factor a Hessian [K, K]. Where float32 cannot factor it, the damping is multiplied by ten, up to ATTEMPTS times.

    Raises FactorError for NaN and inf, for inputs that are all 0, and if no damping makes the Hessian factorable.
    """
    check_usable(hessian)
    dead = hessian.diagonal() <= 0
    base = hessian.clone()
    base.diagonal()[dead] = 1.0
    upper = damped_factor(base, float(base.diagonal().mean()), damping)
    return Factor(np.ascontiguousarray(upper.float().cpu().numpy()), dead.cpu().numpy())


def check_usable(hessian: torch.Tensor) -> None:
    """Raise FactorError for NaN and inf, and for inputs that are all 0."""
    if not bool(hessian.isfinite().all()):
        raise FactorError("its inputs hold NaN or inf")
    if not bool((hessian.diagonal() > 0).any()):
        raise FactorError("all its inputs are 0")


def damped_factor(hessian: torch.Tensor, mean: float, damping: float) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of a Hessian with damping * mean added to its diagonal.

    Where float32 has no such factor, the damping is multiplied by ten, up to ATTEMPTS times; then FactorError is raised.

    hessian: float32 [K, K]; its diagonal is changed in place.
    """
    diagonal = hessian.diagonal().clone()
    for _ in range(ATTEMPTS):
        hessian.diagonal().copy_(diagonal + damping * mean)
        lower, failed = torch.linalg.cholesky_ex(hessian)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed):
                return upper
        damping *= 10
    raise FactorError("no damping makes its Hessian factorable")


def round_columns(
    weight: np.ndarray, factor: Factor, tensor_scale: float, scale: nvfp4.Scale = "amax"
) -> tuple[nvfp4.Tensor, np.ndarray]:
    """Return (packed, dequantized float32 [N, K]) of a weight [N, K] in any float dtype.

    A column's error counts by 1 / upper[k, k]^2 in the search for a block's scale, as it does in GPTQ's own objective.
    Raises ValueError where the corrections made a number that is not finite.
    """
    w = np.array(weight, np.float32, order="C")
    w[:, factor.dead] = 0
    importance = 1 / np.square(factor.upper.diagonal())
    packed = nvfp4.gptq(w, factor.upper, tensor_scale, scale, importance=importance)
    return packed, w
