"""The groups of linears that servers need in one format, what they take in each, and the measured divergence of a choice."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from annie_quant.checkpoint.linears import HEAD, unties, weight_name
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.files import sha256_text
from annie_quant.quantize import mixed_formats, recipe_choice
from annie_quant.quantize.backend import device_and_dtype, device_kind
from annie_quant.quantize.calibration_samples import RESPONSE, CalibrationSample
from annie_quant.quantize.formats import FP8_CHANNEL, GROUP, W4A16, active_weights, names_module, quantized_bytes
from annie_quant.quantize.kl_trial import Trial, answers_to_score
from annie_quant.quantize.plan import QuantizationPlan
from annie_quant.quantize.strategy import Job, StrategyOptions

PLAIN = "bf16"


@dataclass(frozen=True)
class Group:
    """Linears with one format. Lists are parallel to `formats`, whose first entry has the fewest bytes.

    size: bytes of tensors.
    read: bytes per token.
    weights: number of weights.
    """

    members: list[str]
    formats: list[str]
    size: list[float]
    read: list[float]
    weights: float


def groups_of(job: Job[StrategyOptions], four_bit: Mapping[str, str]) -> dict[str, Group]:
    """Return the groups by their first linear, and the head last. four_bit: linear → its 4-bit format."""
    folder = ModelFolder(job.model)
    units = mixed_formats.units_of(folder.family, list(four_bit))
    if device_kind(device_and_dtype(folder)[0]) == "cpu":
        units = mixed_formats.bands_of(units, mixed_formats.BANDS)
    groups = {unit: group_of(folder, members, four_bit[unit]) for unit, members in units.items()}
    info = folder.info(weight_name(folder, HEAD))
    if info.shape[1] % GROUP == 0 and not any(names_module(p, HEAD) for p in job.exclude):
        # No 4-bit inputs: a server computes the head for the last position of a prompt only.
        groups[HEAD] = group_of(folder, [HEAD], W4A16)
    return groups


def group_of(folder: ModelFolder, members: list[str], four_bit: str) -> Group:
    """Return linears as a group that may have a 4-bit format, FP8 or 16 bits."""
    active = active_weights(folder, members)
    infos = {n: folder.info(weight_name(folder, n)) for n in members}
    stored = {f: {n: quantized_bytes(i.shape, f) for n, i in infos.items()} for f in (four_bit, FP8_CHANNEL)}
    stored[PLAIN] = {n: i.size_bytes for n, i in infos.items()}
    size = [float(sum(of.values())) for of in stored.values()]
    read = [sum(b * active[n] / infos[n].elements for n, b in of.items()) for of in stored.values()]
    if unties(folder, members):
        size[-1] = 0.0  # 16 bits take no bytes besides the embedding, which stays
    return Group(members, list(stored), size, read, sum(active.values()))


class FormatTrials:
    """Measures choices of formats on held-out answers, and keeps the figures for an interrupted run.

    rounded: all decoder linears in NVFP4, by the conversations that are not held out.
    """

    def __init__(
        self, job: Job[StrategyOptions], samples: Sequence[CalibrationSample], rounded: QuantizationPlan
    ) -> None:
        self.folder, self.rounded, self.samples = ModelFolder(job.model), rounded, samples
        self.file = job.measurements("format_figures.json")
        self.figures: dict[str, list[list[float]]] = self.file.load({})
        self.loaded: Trial | None = None

    @property
    def trial(self) -> Trial:
        if self.loaded is None:
            on_cpu = device_kind(device_and_dtype(self.folder)[0]) == "cpu"
            tokens, positions = (
                (mixed_formats.TOKENS, mixed_formats.POSITIONS) if on_cpu else (recipe_choice.TOKENS, math.inf)
            )
            self.loaded = Trial(self.folder, answers_to_score(self.samples, RESPONSE, tokens, positions))
        return self.loaded

    def measure(self, formats: Mapping[str, str]) -> np.ndarray:
        """Return Trial.shares of a choice of formats, without those of the unchanged model."""
        return self.stored(formats) - self.stored({})

    def stored(self, formats: Mapping[str, str]) -> np.ndarray:
        key = sha256_text(json.dumps(sorted(formats.items())))[:16]
        if key not in self.figures:
            packed = {n: self.rounded.packed[n] for n, f in formats.items() if f != FP8_CHANNEL}
            shares = self.trial.shares(QuantizationPlan(dict(formats), self.rounded.amax, packed=packed))
            self.figures[key] = np.nan_to_num(shares, nan=recipe_choice.BROKEN, posinf=recipe_choice.BROKEN).tolist()
            self.file.save(self.figures)
        return np.array(self.figures[key])
