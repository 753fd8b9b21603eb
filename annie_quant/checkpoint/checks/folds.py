"""Check that scales which were moved between tensors (AWQ, SmoothQuant) cancel.

The model then computes the same.

A fold divides what produces a linear's input by s and multiplies the linear's columns by s. The
outputs of a linear for an input in one channel alone are that channel's gain times the linear's
column, so both products are compared, column by column: ours ~ diag(r) theirs diag(s) with s from
the norm's own weights, or from the rows of the linear before it. A column may differ by what
rounding can do to it: half a step of the format in each of its elements. Rows may have factors of
their own where the next linear cancels them. Where a norm computes (1 + w) the right fold is (1 +
w) / s - 1; ModelOpt 0.47's AWQ export writes w / s for Qwen3.5
(modelopt/torch/export/quant_utils.py lists other models' norms only).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from annie_quant.checkpoint.checks import fault
from annie_quant.checkpoint.header import ShardError
from annie_quant.checkpoint.linears import Linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.documents import Finding
from annie_quant.models import LinearInput

if TYPE_CHECKING:
    from annie_quant.checkpoint.dialects import QuantizedFolder

# Of rows that nothing cancels: root mean square; rounding leaves a percent where rows are short
ROW_TOLERANCE = 0.025
COLUMN_TOLERANCE = 0.02  # of a column, in addition to its rounding: for the fitted rows
PLAIN_STEP = 2.0**-8  # relative rounding of a weight in 16 bits that was multiplied by a scale
FP8_STEP = 2.0**-4  # half a step of E4M3, relative
# Of an NVFP4 block, relative to the tensor scale: E4M3 has steps of 2^-9 below it.
SUBNORMAL_SCALE = 2.0**-6
# Columns whose rounding explains less than this show how factors depend on scales.
MAX_CERTAIN_ROUNDING = 0.4
# Standard deviation of log(scale) from which that dependence can be measured.
MIN_LOG_SCALE_SPREAD = 0.05
# Slope of log(factor) over log(scale): 0 where a fold is right, -1 where one linear was left out
MAX_DEPENDENCE = 0.25


@dataclass(frozen=True)
class Fit:
    """One linear compared with the source's under declared input scales.

    rows: factor of every row (r).
    noise: root mean square of the change of r by rounding.
    columns: remaining factor of every column, 1 where the scale cancels.
    allowed: largest deviation of `columns` from 1 by rounding.
    scales: the declared scales.
    """

    rows: np.ndarray
    noise: float
    columns: np.ndarray
    allowed: np.ndarray
    scales: np.ndarray

    @property
    def worst(self) -> int:
        """Return the column that is farthest outside of what is allowed."""
        return int(np.argmax(np.abs(self.columns - 1) - self.allowed))

    @property
    def dependence(self) -> float:
        """Return the slope of log(column) over log(scale).

        0 where scales or rounding do not allow to measure it.
        """
        certain = (self.allowed < MAX_CERTAIN_ROUNDING) & (self.columns > 0) & (self.scales > 0)
        x = np.log(self.scales[certain])
        y = np.log(self.columns[certain])
        if len(x) < 8 or x.std() < MIN_LOG_SCALE_SPREAD:
            return 0.0
        x = x - x.mean()
        return float(x @ (y - y.mean()) / (x @ x))

    @property
    def scales_rows(self) -> bool:
        """Return whether the rows have factors of their own."""
        return float(np.sqrt(np.mean(np.square(self.rows - 1)))) > ROW_TOLERANCE + self.noise

    @property
    def sound(self) -> bool:
        """Return whether the scales cancel."""
        within = bool((np.abs(self.columns - 1) <= self.allowed).all())
        return within and abs(self.dependence) <= MAX_DEPENDENCE


def fit(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column factors r, c of ours ~ diag(r) theirs diag(c).

    They are fitted by alternating least squares.

    The median of r is 1.
    """
    r = np.ones(theirs.shape[0])
    c = np.ones(theirs.shape[1])
    for _ in range(4):
        scaled = theirs * r[:, None]
        c = ratio(np.einsum("ij,ij->j", ours, scaled), np.einsum("ij,ij->j", scaled, scaled))
        scaled = theirs * c
        r = ratio(np.einsum("ij,ij->i", ours, scaled), np.einsum("ij,ij->i", scaled, scaled))
    median = np.median(r) or 1.0
    return r / median, c * median


def ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    """Return top / bottom, and 1 where bottom is 0."""
    return np.divide(top, bottom, out=np.ones(len(top)), where=bottom > 0)


def half_steps(folder: ModelFolder, linear: Linear | None, ours: np.ndarray) -> np.ndarray:
    """Return the largest change of every element of a linear by rounding to nearest.

    float32 [N, K].

    linear: None for a linear that is not quantized.
    ours: its dequantized weight.
    """
    if linear is None or linear.format == "fp8":
        return np.abs(ours) * np.float32(PLAIN_STEP if linear is None else FP8_STEP)
    tensor = linear.load(folder)
    scale = np.repeat(tensor.block_scale.astype(np.float32), tensor.group, axis=1)
    pre_quant = (
        folder.tensor(linear.pre_quant).astype(np.float32).reshape(1, -1)
        if linear.pre_quant
        else np.float32(1)
    )
    unit = np.float32(tensor.tensor_scale) * np.abs(pre_quant)
    codes = np.abs(ours) / np.maximum(scale * unit, np.float32(1e-30))
    # E2M1 has steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6; a largest value above 6 is cut.
    steps = np.where(
        codes < 1.75, np.float32(0.25), np.where(codes < 3.5, np.float32(0.5), np.float32(1))
    )
    coarse = np.where(scale < SUBNORMAL_SCALE, np.float32(6 * 2.0**-10), np.float32(0))
    return (steps * scale + coarse) * unit


def _compare(
    ours: np.ndarray, theirs: np.ndarray, steps: np.ndarray, scales: np.ndarray, slack: np.ndarray
) -> Fit:
    """Compare a linear with the source's under the scales [K] that its input was divided by.

    steps: half_steps.
    slack: relative error [K] of the scales themselves.
    """
    expected = theirs * scales.astype(np.float32)
    r, c = fit(ours, expected)
    expected *= r.astype(np.float32)[:, None]
    energy = np.einsum("ij,ij->j", expected, expected)
    reach = np.einsum("ij,ij->j", steps, np.abs(expected))
    allowed = np.divide(reach, energy, out=np.full(len(energy), np.inf), where=energy > 0)
    # One uniform factor can belong to rows or columns: it is measured on the columns that rounding
    # changed least.
    uniform = abs(float(np.median(c[allowed <= np.median(allowed)]))) or 1.0
    variance = ratio(
        np.einsum("ij,ij->i", np.square(steps) / 3, np.square(expected)),
        np.square(np.square(expected).sum(1)),
    )
    noise = float(np.sqrt(np.mean(variance)))
    return Fit(
        r * uniform, noise, c / uniform, allowed / uniform + slack + COLUMN_TOLERANCE, scales
    )


def check(model: QuantizedFolder, source: ModelFolder, layers: set[str]) -> Iterator[Finding]:
    """Yield a finding for every moved scale that its neighbour does not cancel.

    layers: names of the layers to check.
    """
    for layer in sorted(layers - {""}):
        yield from LayerCheck(model, source, layer).run()


@dataclass(frozen=True)
class LayerCheck:
    """The check of one layer.

    fits: name of a linear whose input scale cancels → its comparison with the source.
    """

    model: QuantizedFolder
    source: ModelFolder
    layer: str
    fits: dict[str, Fit] = field(default_factory=dict)

    @property
    def folder(self) -> ModelFolder:
        return self.model.folder

    def run(self) -> Iterator[Finding]:
        """Check the norms, then producers whose rows the next linear cancels, then other rows."""
        inputs = self.folder.family.inputs
        for site in inputs:
            if site.fold == "norm":
                yield from self.check_norm(site)
        cancelled = set()
        for site in inputs:
            if site.fold == "rows":
                cancelled.add(f"{self.layer}.{site.producer}")
                yield from self.check_rows(site)
        for name, result in self.fits.items():
            if name not in cancelled and result.scales_rows:
                problem = f"its rows are {np.median(result.rows):.3g} times the source's, and nothing cancels that"
                yield fault("large_error", name, problem)

    def source_shape(self, module: str) -> tuple[int, ...] | None:
        """Return the shape of a linear's weight in the source, or None.

        None where the source has no such linear.
        """
        original = self.source.find(f"{module}.weight")
        return self.source.info(original).shape if original else None

    def compared(
        self, name: str, scales: np.ndarray, slack: np.ndarray | float = 0.0
    ) -> Fit | None:
        """Return a linear compared with the source's.

        None where one of them lacks it, or it cannot be read (a finding).
        """
        original = self.source.find(f"{name}.weight")
        linear = self.model.linears.get(name)
        stored = linear.weight if linear else f"{name}.weight"
        if original is None or stored not in self.folder:
            return None
        theirs = self.source.tensor(original).astype(np.float32)
        try:
            ours = (
                linear.dequantize(self.folder)
                if linear
                else self.folder.tensor(stored).astype(np.float32)
            )
            steps = half_steps(self.folder, linear, ours)
        except ShardError:
            return None
        if ours.shape != theirs.shape or not np.isfinite(ours).all():
            return None
        result = _compare(ours, theirs, steps, scales, np.zeros(len(scales)) + slack)
        self.folder.release(stored)
        self.source.release(original)
        return result

    def check_norm(self, site: LinearInput) -> Iterator[Finding]:
        """Check that the norm's gain times the columns is the source's, for every reader."""
        norm = f"{self.layer}.{site.producer}.weight"
        original = self.source.find(norm)
        if norm not in self.folder or original is None:
            return
        ours, theirs = (
            f.tensor(n).astype(np.float64)
            for f, n in ((self.folder, norm), (self.source, original))
        )
        if ours.shape != theirs.shape:
            return
        one = 1.0 if self.folder.family.adds_one(norm) else 0.0
        for reader in (f"{self.layer}.{name}" for name in site.linears):
            result = self.behind(reader, theirs + one, ours + one, np.abs(ours))
            if result is None:
                continue
            if result.sound:
                self.fits[reader] = result
                continue
            plain = self.behind(reader, theirs, ours, np.abs(ours)) if one else None
            if plain is not None and plain.sound:
                problem = "folded as w/s, and this norm computes (1 + w), so (1 + w)/s - 1 is right"
                yield fault("fold_plus_one", norm, problem)
            else:
                problem = f"does not cancel the input scale of {reader}: {describe_fit(result)}"
                yield fault("fold_mismatch", norm, problem)
            return

    def behind(
        self, reader: str, theirs: np.ndarray, ours: np.ndarray, stored: np.ndarray
    ) -> Fit | None:
        """Return a linear compared under the scale of the norm's gains.

        Theirs / ours, both [K] or of one head.

        stored: magnitudes of the norm's own weights, whose 16 bits limit the gain's precision.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            scales = np.where(ours == theirs, 1.0, theirs / ours)
            slack = PLAIN_STEP * stored / np.abs(ours)
        scales = np.nan_to_num(scales, posinf=1e30, neginf=-1e30)
        slack = np.nan_to_num(slack, posinf=1e30)
        shape = self.source_shape(reader)
        if shape is None or not shape[1] or shape[1] % len(scales):
            return None
        heads = shape[1] // len(scales)
        return self.compared(reader, np.tile(scales, heads), np.tile(slack, heads))

    def check_rows(self, site: LinearInput) -> Iterator[Finding]:
        """Check that a producer's rows and biases cancel the columns of its reader."""
        producer = f"{self.layer}.{site.producer}"
        shape = self.source_shape(producer)
        if shape is None:
            return
        fitted = self.fits.get(producer)
        rows = np.ones(shape[0])
        noise = ROW_TOLERANCE
        if fitted is not None and fitted.scales_rows:
            rows = fitted.rows
            noise = ROW_TOLERANCE + fitted.noise
        yield from self.check_bias(producer, rows, noise)
        for consumer in (f"{self.layer}.{name}" for name in site.linears):
            consumer_shape = self.source_shape(consumer)
            if consumer_shape is None:
                continue
            produced = rows_as_columns(
                rows, consumer_shape[1], self.source.text_config.get("num_attention_heads")
            )
            result = self.compared(consumer, ratio(np.ones(len(produced)), produced), noise)
            if result is None:
                continue
            uniform = float(np.median(result.rows))
            if result.sound and abs(uniform - 1) <= ROW_TOLERANCE:
                self.fits[consumer] = result
                continue
            how = (
                f"all of it is {uniform:.3g} times the source's"
                if result.sound
                else describe_fit(result)
            )
            problem = f"its input scale is not cancelled by the rows of {producer}: {how}"
            yield fault("fold_mismatch", consumer, problem)

    def check_bias(self, producer: str, rows: np.ndarray, noise: float) -> Iterator[Finding]:
        """Check that a bias was scaled as its rows were, up to a relative error of `noise`."""
        name = f"{producer}.bias"
        original = self.source.find(name)
        if (
            name not in self.folder
            or original is None
            or self.folder.info(name).shape != rows.shape
        ):
            return
        expected = self.source.tensor(original).astype(np.float32) * rows
        ours = self.folder.tensor(name).astype(np.float32)
        error = float(np.linalg.norm(ours - expected) / max(float(np.linalg.norm(expected)), 1e-30))
        if not error <= noise:
            yield fault(
                "fold_mismatch",
                name,
                f"differs by {error:.3g} from what the rows of {producer} need",
            )


def describe_fit(result: Fit) -> str:
    """Return how the farthest column differs, or that the factors follow the scales."""
    j = result.worst
    factor = result.columns[j]
    allowed = result.allowed[j]
    if abs(factor - 1) > allowed:
        return (
            f"channel {j} is {factor:.3g} times the source's, and rounding explains {allowed:.2g}"
        )
    return (
        f"its columns follow the norm's scales with the power {result.dependence:.2f}, expected 0"
    )


def rows_as_columns(rows: np.ndarray, width: int, heads: object) -> np.ndarray:
    """Return a producer's row factors as its consumer's columns.

    Value heads are repeated for grouped queries.

    width: the consumer's columns.
    heads: num_attention_heads of config.json.
    """
    if len(rows) == width:
        return rows
    if not isinstance(heads, int) or heads < 1 or width % heads or len(rows) % (width // heads):
        return np.ones(width)
    return np.repeat(rows.reshape(-1, width // heads), width // len(rows), axis=0).reshape(-1)
