"""The common parts of both ways to round a decoder layer: settings, groups of linears, and a result that can be stored.

rounding.py rounds a layer with the C loop, and each linear multiplies each token once. two_streams.py rounds it in torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

from annie_quant import nvfp4
from annie_quant.core.files import replacing
from annie_quant.offline import codec
from annie_quant.offline.engine import split_by_size
from annie_quant.quantize import calibration_samples as text
from annie_quant.quantize.calibration_samples import TokenWeights
from annie_quant.quantize.formats import GROUP
from annie_quant.quantize.layerwise import DecoderLayer

HESSIAN_BYTES = 6 << 30  # of one pass over the text; 256 experts of 2048 x 512 have 4.6 GB


@dataclass(frozen=True)
class Method:
    """How the linears of a model are rounded.

    prompt: weight of a prompt's token relative to a response's.
    markup: weight of tool-call markup and ends of turns relative to other tokens of responses.
    damping: added to the Hessian's diagonal, relative to its mean.
    plain: round to nearest, as naive does; the other settings then have no effect.
    two_streams: round by two_streams.py, else by rounding.py.
    """

    prompt: float = 0.1
    markup: float = 1.0
    damping: float = 0.05
    plain: bool = False
    two_streams: bool = False

    def token_weights(self) -> TokenWeights:
        marks = dict.fromkeys((text.TOOL_MARKUP, text.END_OF_TURN), self.markup)
        return {**text.RESPONSE, **marks, text.PROMPT: self.prompt}


@dataclass
class LayerResult:
    """One rounded layer, by names inside the layer.

    packed: the rounded linears.
    amax: their largest inputs.
    tokens: calibration tokens that reached each group of an expert's linears, by its first linear.
    """

    packed: dict[str, nvfp4.Tensor] = field(default_factory=dict)
    amax: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write a file that has its name only when it is complete."""
        arrays: dict[str, np.ndarray] = {}
        for name, tensor in self.packed.items():
            arrays[f"codes.{name}"] = tensor.codes
            arrays[f"scales.{name}"] = tensor.block_scale.view(np.uint8)
        # float.hex keeps every bit.
        scales = {n: float(t.tensor_scale).hex() for n, t in self.packed.items()}
        amax = {n: value.hex() for n, value in self.amax.items()}
        about = {"tensor_scales": json.dumps(scales), "amax": json.dumps(amax), "tokens": json.dumps(self.tokens)}
        with replacing(path) as file:
            file.write(safetensors.numpy.save(arrays, metadata=about))

    @classmethod
    def load(cls, path: Path) -> LayerResult:
        """Read a file of save()."""
        arrays = safetensors.numpy.load_file(path)
        with safetensors.safe_open(path, "numpy") as file:
            about = {key: json.loads(value) for key, value in file.metadata().items()}
        packed = {}
        for name, scale in about["tensor_scales"].items():
            codes, scales = arrays[f"codes.{name}"], arrays[f"scales.{name}"]
            shape = (codes.shape[0], codes.shape[1] * 2)
            packed[name] = nvfp4.Tensor(codes, scales.view(nvfp4.E4M3), np.float32(float.fromhex(scale)), shape, GROUP)
        return cls(packed, {n: float.fromhex(v) for n, v in about["amax"].items()}, about["tokens"])


@dataclass(frozen=True)
class RoundingTask:
    """The settings that all layers of a model share.

    formats: full name of each linear that is rounded → "nvfp4" where a server also rounds its inputs, else "w4a16".
    table: weight of each kind of token, float32.
    scale: rule by which block scales are chosen; two_streams.py has its own.
    """

    formats: Mapping[str, str]
    table: torch.Tensor
    method: Method
    scale: nvfp4.Scale = "amax"


class LayerRounder:
    """Rounds the linears of one decoder layer, those that read one input together, in the order in which they run."""

    def __init__(self, layer: DecoderLayer, task: RoundingTask) -> None:
        self.layer, self.task = layer, task
        chosen = ([n for n in group if f"{layer.name}.{n}" in task.formats] for group in layer.groups())
        self.groups = [group for group in chosen if group]
        self.packed: dict[str, nvfp4.Tensor] = {}
        self.amax: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self.warnings: list[str] = []

    def round(self) -> LayerResult:
        """Return the rounded layer. Its outputs are then the next layer's inputs."""
        raise NotImplementedError

    def repeat(self, result: LayerResult) -> None:
        """Apply the result of an earlier run in place of `round`."""
        raise NotImplementedError

    def full(self, group: Sequence[str]) -> list[str]:
        """Return the full names of linears."""
        return [f"{self.layer.name}.{n}" for n in group]

    def largest_weights(self) -> dict[str, float]:
        """Return the largest magnitude that sets the tensor scale of each linear, by full name."""
        names = [n for group in self.groups for n in group]
        tops = {f"{self.layer.name}.{n}": float(self.layer.linears[n].weight.detach().abs().max()) for n in names}
        return self.layer.model.folder.family.largest_of_group(tops)

    def in_memory(self, groups: Sequence[list[str]]) -> Iterator[list[list[str]]]:
        """Yield as many groups at a time as have Hessians of at most HESSIAN_BYTES together."""
        sizes = [4 * self.layer.linears[g[0]].in_features ** 2 for g in groups]
        yield from ([groups[i] for i in run] for run in split_by_size(sizes, HESSIAN_BYTES))

    def warn(self, group: Sequence[str], message: str) -> None:
        warning = f"{', '.join(self.full(group))}: {message}"
        self.warnings += [warning] if warning not in self.warnings else []

    def restore(self, module: torch.nn.Module, result: LayerResult) -> None:
        """Give a module of this layer the rounded weights of an earlier run."""
        for name, tensor in result.packed.items():
            linear = module.get_submodule(name)
            linear.weight.data = codec.to_torch(nvfp4.unpack(tensor, "float32")).to(linear.weight)  # type: ignore[arg-type]
        self.amax = result.amax
