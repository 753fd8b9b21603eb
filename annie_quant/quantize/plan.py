"""The result of a strategy, and its export as a checkpoint in ModelOpt's layout: NVFP4, W4A16, FP8, bf16, or a mixture.

Linears that a server merges into one matrix share their tensor scale and input scale. Only headers are read before the first
tensor is written; rows are packed in pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint import writer
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.linears import HEAD, all_linears, unties, weight_name
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import CalibrationUse, FormatPlan, HeldOut, Ingredient
from annie_quant.models import Family
from annie_quant.models.formats import FP8, FP8_CHANNEL, GROUP, QUANTIZED, Format
from annie_quant.quantize.formats import expected_bytes


@dataclass
class PlannedLinear:
    """How one linear is stored. Its weight is the source's, or that of QuantizationPlan.tensors.

    format: of the weight and the inputs. A tied head becomes a tensor of its own, and the embedding stays.
    input_amax: largest |input| in calibration, for the input scale; None where none was observed.
    packed: finished codes; None: the weight is rounded to nearest when it is written.
    weight_amax: largest magnitude for the tensor scale, where that is not the weight's own.
    tokens: calibration tokens that reached an expert, at the first of its linears that read one input.
    """

    format: Format
    input_amax: float | None = None
    packed: nvfp4.Tensor | None = None
    weight_amax: float | None = None
    tokens: int | None = None


@dataclass
class QuantizationPlan:
    """The result of a strategy.

    linears: full name of each linear that is quantized → how it is stored; all other tensors stay as they are.
    scale: rule by which block scales are chosen.
    tensors: tensor name → array that replaces the source's, in any float dtype; one that is not quantized is rounded to the
        source's dtype.
    held_out, ingredients, frontier: comparison with plain rounding, and of formats, for annie_quant.json.
    calibration: which conversations were used.
    kv_cache: "FP8", or None for a KV cache in 16 bits.
    kv_scales: layer → scales of its keys and values; empty where the cache's numbers are cast without any.
    notes: what a user should know about the result, one sentence each.
    """

    linears: dict[str, PlannedLinear] = field(default_factory=dict)
    scale: nvfp4.Scale = "amax"
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    held_out: HeldOut | None = None
    ingredients: list[Ingredient] = field(default_factory=list)
    frontier: FormatPlan | None = None
    calibration: CalibrationUse | None = None
    kv_cache: str | None = None
    kv_scales: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        formats: Mapping[str, Format],
        amax: Mapping[str, float] = MappingProxyType({}),
        tokens: Mapping[str, int] = MappingProxyType({}),
        scale: nvfp4.Scale = "amax",
    ) -> QuantizationPlan:
        """Return the plan of linears in these formats. amax, tokens: linear → its `input_amax` and `tokens`."""
        linears = {
            name: PlannedLinear(kind, input_amax=amax.get(name), tokens=tokens.get(name))
            for name, kind in formats.items()
        }
        return cls(linears, scale)

    @property
    def formats(self) -> dict[str, Format]:
        """Linear → its format."""
        return {name: linear.format for name, linear in self.linears.items()}

    @property
    def tokens(self) -> dict[str, int]:
        """First linear of those of an expert that read one input → calibration tokens that it saw."""
        return {n: x.tokens for n, x in self.linears.items() if x.tokens is not None}

    def input_scales(self, family: Family) -> dict[str, np.float32]:
        """Return the multiplier of the activations of every linear that quantizes them, one per fused group.

        An expert that saw no token may have no `input_amax` if another expert of its layer has one.
        """
        largest: dict[str, float] = {}
        for name, linear in self.linears.items():
            is_expert = family.experts is not None and family.experts.split(name) is not None
            if linear.format.calibrated and (linear.input_amax is not None or is_expert):
                largest[name] = linear.input_amax or 0.0
        scales: dict[str, np.float32] = {}
        for name, amax in family.largest_of_input(largest).items():
            scales[name] = np.float32(amax) / np.float32(self.linears[name].format.largest)
        return scales


def announce_size(folder: ModelFolder, formats: Mapping[str, Format], progress: Progress) -> None:
    """Report the output's size before the work starts."""
    counts = Counter(formats.values())
    kinds = [f"{counts[kind]} linears {kind.modelopt}" for kind in QUANTIZED if counts[kind]]
    megabytes = expected_bytes(folder, formats) / 1e6
    progress.message(f"expected size {megabytes:,.1f} MB: {', '.join(kinds)}")


def export(
    folder: ModelFolder,
    output: Path,
    plan: QuantizationPlan,
    write: Callable[[Path, list[Planned]], object] = writer.write,
) -> None:
    """Write tensors and settings into the folder `output`. write: writes the planned tensors into a folder."""
    exported = Export(folder, plan)
    exported.check()
    write(output, exported.tensors())
    config = untied(folder.config) if unties(folder, plan.formats) else folder.config
    settings = modelopt.settings(plan.formats, exported.excluded_names(), GROUP, plan.kv_cache)
    writer.write_settings(output, config, settings)


def untied(config: JsonObject) -> JsonObject:
    """Return config.json of a model whose head is a tensor of its own."""
    changed = config | {"tie_word_embeddings": False}
    text = config.get("text_config")
    if isinstance(text, dict):
        changed["text_config"] = text | {"tie_word_embeddings": False}
    return changed


class Export:
    """What a plan makes of a checkpoint: names, formats and tensors. Scales of whole tensors are computed when they are needed."""

    def __init__(self, folder: ModelFolder, plan: QuantizationPlan) -> None:
        self.folder = folder
        self.plan = plan
        self.experts = folder.family.experts
        self.inputs = plan.input_scales(folder.family)
        self.scales: dict[str, np.float32] = {}
        unpacked = []
        for name, linear in plan.linears.items():
            if linear.packed is None:
                unpacked.append(name)
            else:
                self.scales[name] = np.float32(linear.packed.tensor_scale)
        groups = folder.family.fused_groups(unpacked)
        self.group_of = {member: group for group in groups for member in group}

    def excluded_names(self) -> list[str]:
        """Return the names that settings list as excluded: modules with a matrix, and for a layer's experts all of them at once.

        ModelOpt lists embeddings, convolutions and a tied head as well. It shortens names to prefixes
        ("model.layers.0.self_attn*").
        """
        folder = self.folder
        modules = set(all_linears(folder))
        for name in folder:
            if name.endswith(".weight") and len(folder.info(name).shape) > 1:
                modules.add(name.removesuffix(".weight"))
        if folder.text_config.get("tie_word_embeddings", folder.config.get("tie_word_embeddings")):
            modules.add(HEAD)
        names = set()
        for module in modules - self.plan.linears.keys():
            expert = self.experts.split(module) if self.experts else None
            if self.experts and expert:
                single = f"{module}.weight" in folder
                names.add(f"{expert[0]}.{self.experts.module}{'*' if single else ''}")
            else:
                names.add(module)
        return sorted(names)

    def check(self) -> None:
        """Check that linears that are served together have one format, and that every quantized input has a scale."""
        formats = self.plan.formats
        for group in self.folder.family.served_groups(all_linears(self.folder)):
            if len({formats.get(name) for name in group}) > 1:
                more = f" and {len(group) - 3} more" if len(group) > 3 else ""
                raise CheckpointError(
                    f"{', '.join(group[:3])}{more} are served together and would differ in format",
                    "exclude or quantize them together",
                )
        for name, kind in formats.items():
            if kind.calibrated and not self.inputs.get(name):
                raise CheckpointError(
                    f"{name}: no input reached it in calibration, so it has no input scale",
                    "give more --calib-data",
                )

    def tensors(self) -> list[Planned]:
        """Return the output's tensors in the source's order: two to four per quantized linear, the others as they are.

        Merged experts that change in parts get one name per expert and linear.
        """
        planned: list[Planned] = []
        for whole in self.folder:
            parts = self.folder.parts_of(whole)
            changes = any(self.quantized(part) or part in self.plan.tensors for part in parts)
            for name in parts if changes else [whole]:
                if self.quantized(name):
                    planned += self.linear(name.removesuffix(".weight"))
                else:
                    planned.append(self.other(name))
        if unties(self.folder, self.plan.linears):
            planned += self.linear(HEAD)
        for layer, (k_scale, v_scale) in self.plan.kv_scales.items():
            planned.append(modelopt.kv_scale(layer, "k_scale", np.array(k_scale, np.float32)))
            planned.append(modelopt.kv_scale(layer, "v_scale", np.array(v_scale, np.float32)))
        return planned

    def quantized(self, tensor: str) -> bool:
        """Return whether a tensor is the weight of a linear that is quantized."""
        return tensor.endswith(".weight") and tensor.removesuffix(".weight") in self.plan.linears

    def other(self, name: str) -> Planned:
        """Return a tensor that is not quantized."""
        info = self.folder.info(name)
        changed = self.plan.tensors.get(name)
        if changed is None:
            return Planned(name, info.dtype, info.shape, partial(self.folder.pieces, name))
        load = partial(np.asarray, changed, info.numpy_dtype)
        return Planned(name, info.dtype, info.shape, load)

    def linear(self, module: str) -> list[Planned]:
        """Return the tensors of one quantized linear."""
        kind = self.plan.linears[module].format
        info = self.folder.info(weight_name(self.folder, module))
        shape = (info.shape[0], info.shape[1])
        scale = partial(self.scale, module)
        input_scale = self.inputs.get(module)
        if kind == FP8:
            weight = partial(self.weight, info.name)
            return modelopt.fp8_tensors(module, shape, weight, scale, input_scale)
        if kind == FP8_CHANNEL:
            return modelopt.fp8_channel_tensors(module, shape, partial(self.rows, info.name))
        pack = partial(self.pack_rows, module)
        return modelopt.nvfp4_tensors(
            module, shape, pack, scale, GROUP, input_scale, source_bytes=info.size_bytes
        )

    def weight(self, name: str) -> np.ndarray:
        """Return a weight as the strategy changed it, or the source's."""
        changed = self.plan.tensors.get(name)
        return self.folder.tensor(name) if changed is None else changed

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """Yield a weight's rows in order, in one or more pieces."""
        changed = self.plan.tensors.get(name)
        return self.folder.rows(name) if changed is None else iter([changed])

    def pack_rows(self, module: str) -> Iterator[nvfp4.Tensor]:
        """Yield a linear's packed rows in order, in one or more pieces."""
        packed = self.plan.linears[module].packed
        if packed is not None:
            yield packed
            return
        for rows in self.rows(weight_name(self.folder, module)):
            scale = float(self.scale(module))
            yield nvfp4.pack(rows, tensor_scale=scale, scale=self.plan.scale, group=GROUP)

    def scale(self, module: str) -> np.float32:
        """Return the multiplier of a linear's weight: amax / 2688 for NVFP4 (by the rule of plan.scale), amax / 448 for FP8."""
        if module not in self.scales:
            group = self.group_of.get(module, [module])
            top = max(self.amax(member) for member in group)
            if self.plan.linears[module].format == FP8:
                scale = modelopt.fp8_scale(top)
            else:
                scale = np.float32(nvfp4.tensor_scale(top, scale=self.plan.scale))
            self.scales |= dict.fromkeys(group, scale)
        return self.scales[module]

    def amax(self, module: str) -> float:
        """Return the largest magnitude of a linear's weight. Raises CheckpointError where it holds NaN or inf."""
        known = self.plan.linears[module].weight_amax
        if known is not None:
            return known
        name = weight_name(self.folder, module)
        values = [float(nvfp4.amax(rows)) for rows in self.rows(name)]
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{name}: holds NaN or inf", "the source checkpoint is damaged: download it again"
            )
        return max(values, default=0.0)
