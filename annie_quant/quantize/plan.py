"""The result of a strategy, and its export as a checkpoint in ModelOpt's layout: NVFP4, W4A16, FP8, bf16, or a mixture.

Linears that a server merges into one matrix share their tensor scale and input scale. Only headers are read before the first
tensor is written; rows are packed in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint import writer
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.dialects.modelopt import LARGEST_E4M3, LARGEST_NVFP4
from annie_quant.checkpoint.linears import HEAD, all_linears, unties, weight_name
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned
from annie_quant.core.errors import CheckpointError
from annie_quant.core.progress import Progress
from annie_quant.core.untrusted import JsonObject
from annie_quant.documents import CalibrationUse, FormatPlan, HeldOut, Ingredient
from annie_quant.models import Family
from annie_quant.quantize.formats import (
    ALGORITHM,
    FP8,
    FP8_CHANNEL,
    GROUP,
    NVFP4,
    QUANTIZED_INPUTS,
    expected_bytes,
)


@dataclass
class QuantizationPlan:
    """The result of a strategy. Keys are full names of linears, except in `weights`.

    formats: "nvfp4" (W4A4), "w4a16", "fp8" or "fp8_channel"; all other tensors stay as they are. A tied head that has a format
        becomes a tensor of its own, and the embedding stays.
    amax: largest |input| of the linears with quantized activations. An expert that saw no token may be left out if another
        expert of its layer is present.
    scale: rule by which block scales are chosen.
    weights: tensor name → array that replaces the source's tensor, in any float dtype; one that is not quantized is rounded
        to the source's dtype.
    packed: finished codes.
    tensor_amax: largest magnitude for the tensor scale, where that is not the weight's own.
    input_scales: multipliers of the activations that replace those from `amax`.
    tokens: first linear of those of an expert that read one input → calibration tokens that it saw.
    held_out, ingredients, frontier: comparison of recipes and of formats, for annie_quant.json.
    calibration: which conversations were used.
    kv_cache: "FP8", or None for a KV cache in 16 bits.
    kv_scales: layer → scales of its keys and values; empty where the cache's numbers are cast without any.
    """

    formats: dict[str, str]
    amax: dict[str, float] = field(default_factory=dict)
    scale: nvfp4.Scale = "amax"
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    packed: dict[str, nvfp4.Tensor] = field(default_factory=dict)
    tensor_amax: dict[str, float] = field(default_factory=dict)
    input_scales: dict[str, np.float32] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    held_out: HeldOut | None = None
    ingredients: list[Ingredient] = field(default_factory=list)
    frontier: FormatPlan | None = None
    calibration: CalibrationUse | None = None
    kv_cache: str | None = None
    kv_scales: dict[str, tuple[float, float]] = field(default_factory=dict)

    def all_input_scales(self, family: Family) -> dict[str, np.float32]:
        """Return the multiplier of the activations of every linear that quantizes them, one per fused group."""
        span = {NVFP4: np.float32(LARGEST_NVFP4), FP8: np.float32(LARGEST_E4M3)}
        is_expert = family.experts.split if family.experts else lambda name: None
        needed = {
            n: self.amax.get(n, 0.0)
            for n, f in self.formats.items()
            if f in QUANTIZED_INPUTS and (n in self.amax or is_expert(n))
        }
        scales = {
            n: np.float32(a) / span[self.formats[n]]
            for n, a in family.largest_of_input(needed).items()
        }
        return scales | self.input_scales


def announce_size(folder: ModelFolder, formats: Mapping[str, str], progress: Progress) -> None:
    """Report the output's size before the work starts."""
    count = {kind: sum(f == kind for f in formats.values()) for kind in ALGORITHM}
    kinds = ", ".join(f"{n} linears {ALGORITHM[kind]}" for kind, n in count.items() if n)
    progress.message(f"expected size {expected_bytes(folder, formats) / 1e6:,.1f} MB: {kinds}")


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
    text = config.get("text_config")
    nested = (
        {"text_config": text | {"tie_word_embeddings": False}} if isinstance(text, dict) else {}
    )
    return config | nested | {"tie_word_embeddings": False}


class Export:
    """What a plan makes of a checkpoint: names, formats and tensors. Scales of whole tensors are computed when they are needed."""

    def __init__(self, folder: ModelFolder, plan: QuantizationPlan) -> None:
        self.folder, self.plan, self.experts = folder, plan, folder.family.experts
        self.inputs = plan.all_input_scales(folder.family)
        groups = folder.family.fused_groups(plan.formats.keys() - plan.packed.keys())
        self.group_of = {m: group for group in groups for m in group}
        self.scales: dict[str, np.float32] = {
            m: np.float32(t.tensor_scale) for m, t in plan.packed.items()
        }

    def excluded_names(self) -> list[str]:
        """Return the names that settings list as excluded: modules with a matrix, and for a layer's experts all of them at once.

        ModelOpt lists embeddings, convolutions and a tied head as well. It shortens names to prefixes
        ("model.layers.0.self_attn*").
        """
        folder, names = self.folder, set()
        tied = folder.text_config.get(
            "tie_word_embeddings", folder.config.get("tie_word_embeddings")
        )
        other = [
            n.removesuffix(".weight")
            for n in folder
            if n.endswith(".weight") and len(folder.info(n).shape) > 1
        ]
        for module in {
            *(["lm_head"] if tied else []),
            *other,
            *all_linears(folder),
        } - self.plan.formats.keys():
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
            if len({formats.get(n) for n in group}) > 1:
                first = ", ".join(group[:3]) + (f" and {len(group) - 3} more" if group[3:] else "")
                raise CheckpointError(
                    f"{first} are served together and would differ in format",
                    "exclude or quantize them together",
                )
        if missing := [
            n for n, f in formats.items() if f in QUANTIZED_INPUTS and not self.inputs.get(n)
        ]:
            raise CheckpointError(
                f"{missing[0]}: no input reached it in calibration, so it has no input scale",
                "give more --calib-data",
            )

    def tensors(self) -> list[Planned]:
        """Return the output's tensors in the source's order: two to four per quantized linear, the others as they are.

        Merged experts that change in parts get one name per expert and linear.
        """
        folder, plan = self.folder, self.plan
        planned: list[Planned] = []
        for whole in folder:
            parts = folder.parts_of(whole)
            changes = any(
                p.removesuffix(".weight") in plan.formats or p in plan.weights for p in parts
            )
            for name in parts if changes else [whole]:
                module = name.removesuffix(".weight")
                if name.endswith(".weight") and module in plan.formats:
                    planned += self.linear(module)
                    continue
                info, changed = folder.info(name), plan.weights.get(name)
                load = (
                    partial(folder.pieces, name)
                    if changed is None
                    else partial(np.asarray, changed, info.numpy_dtype)
                )
                planned.append(Planned(name, info.dtype, info.shape, load))
        planned += self.linear(HEAD) if unties(folder, plan.formats) else []
        for layer, scales in plan.kv_scales.items():
            for end, scale in zip(("k_scale", "v_scale"), scales, strict=True):
                planned.append(modelopt.kv_scale(layer, end, np.array(scale, np.float32)))
        return planned

    def linear(self, module: str) -> list[Planned]:
        """Return the tensors of one quantized linear."""
        kind, info = self.plan.formats[module], self.folder.info(weight_name(self.folder, module))
        shape, scale, inputs = (
            (info.shape[0], info.shape[1]),
            partial(self.scale, module),
            self.inputs.get(module),
        )
        if kind == FP8:
            return modelopt.fp8_tensors(
                module, shape, partial(self.weight, info.name), scale, inputs
            )
        if kind == FP8_CHANNEL:
            return modelopt.fp8_channel_tensors(module, shape, partial(self.rows, info.name))
        pack = partial(self.pack_rows, module)
        return modelopt.nvfp4_tensors(
            module, shape, pack, scale, GROUP, inputs, source_bytes=info.size_bytes
        )

    def weight(self, name: str) -> np.ndarray:
        """Return a weight as the strategy changed it, or the source's."""
        return self.plan.weights[name] if name in self.plan.weights else self.folder.tensor(name)

    def rows(self, name: str) -> Iterator[np.ndarray]:
        """Yield a weight's rows in order, in one or more pieces."""
        return (
            iter([self.plan.weights[name]]) if name in self.plan.weights else self.folder.rows(name)
        )

    def pack_rows(self, module: str) -> Iterator[nvfp4.Tensor]:
        """Yield a linear's packed rows in order, in one or more pieces."""
        if module in self.plan.packed:
            yield self.plan.packed[module]
            return
        for rows in self.rows(weight_name(self.folder, module)):
            yield nvfp4.pack(
                rows, tensor_scale=float(self.scale(module)), scale=self.plan.scale, group=GROUP
            )

    def scale(self, module: str) -> np.float32:
        """Return the multiplier of a linear's weight: amax / 2688 for NVFP4 (by the rule of plan.scale), amax / 448 for FP8."""
        if module not in self.scales:
            group = self.group_of.get(module, [module])
            top = max(self.amax(m) for m in group)
            if self.plan.formats[module] == FP8:
                scale = modelopt.fp8_scale(top)
            else:
                scale = np.float32(nvfp4.tensor_scale(top, scale=self.plan.scale))
            self.scales |= dict.fromkeys(group, scale)
        return self.scales[module]

    def amax(self, module: str) -> float:
        """Return the largest magnitude of a linear's weight. Raises CheckpointError where it holds NaN or inf."""
        if module in self.plan.tensor_amax:
            return self.plan.tensor_amax[module]
        name = weight_name(self.folder, module)
        values = [float(nvfp4.amax(rows)) for rows in self.rows(name)]
        if not np.isfinite(values).all():
            raise CheckpointError(
                f"{name}: holds NaN or inf", "the source checkpoint is damaged: download it again"
            )
        return max(values, default=0.0)
