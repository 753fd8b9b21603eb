"""Round every decoder layer of a job's model by layer_rounding.py, and keep each finished layer for an interrupted run."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import safetensors.numpy

from annie_quant import nvfp4
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import replacing
from annie_quant.core.progress import Progress
from annie_quant.models import in_layer, layer_of
from annie_quant.offline import codec
from annie_quant.quantize import calibration_samples, column_sweep, learned_rounding
from annie_quant.quantize.calibration_samples import Sample, TokenWeights
from annie_quant.quantize.input_stats import Coverage, one_per_layer, weight_table
from annie_quant.quantize.job import Job
from annie_quant.quantize.layer_rounding import LayerRounder, Method, Streams
from annie_quant.quantize.layerwise import DecoderLayer, DecoderLayers, device_and_dtype
from annie_quant.quantize.plan import Plan
from annie_quant.quantize.select import decoder_linears
from annie_quant.quantize.strategies import awq_lite

log = logging.getLogger(__name__)

MAX_BATCH_TOKENS = {"cpu": 16384, "cuda": 32768}  # positions of one forward pass


@dataclass
class LayerResult:
    """One rounded layer. packed, amax, tokens (of experts): by the linears' names inside the layer.

    folded: tensors that a fold changed and that are not rounded, float32, by their names inside the layer.
    """

    packed: dict[str, nvfp4.Tensor] = field(default_factory=dict)
    amax: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    folded: dict[str, np.ndarray] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write a file that has its name only when it is complete."""
        arrays: dict[str, np.ndarray] = {}
        for name, tensor in self.packed.items():
            arrays[f"codes.{name}"] = tensor.codes
            arrays[f"scales.{name}"] = tensor.block_scale.view(np.uint8)
        arrays |= {f"folded.{name}": array for name, array in self.folded.items()}
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
            block_scale = scales.view(nvfp4.E4M3)
            packed[name] = nvfp4.Tensor(codes, block_scale, np.float32(float.fromhex(scale)), shape, column_sweep.GROUP)
        folded = {n.removeprefix("folded."): a for n, a in arrays.items() if n.startswith("folded.")}
        return cls(packed, {n: float.fromhex(v) for n, v in about["amax"].items()}, about["tokens"], folded)


def round_model(
    folder: ModelFolder,
    formats: Mapping[str, str],
    samples: Sequence[Sample],
    job: Job,
    progress: Progress,
    method: Method,
    token_weights: TokenWeights,
    fold: bool = False,
    name: str = "layers",
) -> Plan:
    """Return the plan with every linear of `formats` rounded. fold: fold activation-aware scales into each layer first.

    name: of the folder inside the job's, where finished layers are stored.

    Raises CheckpointError where one of them is in no decoder layer.
    """
    plan = Plan(dict(formats), scale=job.scale)
    outside = [n for n in formats if not folder.family.in_decoder(n)]
    if outside:
        raise CheckpointError(f"{outside[0]} is in no decoder layer", f"--exclude-layers {outside[0]}")
    tokens = MAX_BATCH_TOKENS[device_and_dtype(folder)[0].partition(":")[0]]
    batches = calibration_samples.make_batches(samples, tokens)
    model = DecoderLayers(folder, batches)
    progress.message(memory_needed(folder, model, method))
    streams, table, store = Streams(model), weight_table(token_weights, model.device), job.work_folder() / name
    store.mkdir(exist_ok=True)
    coverage = Coverage()
    begun, fresh = time.monotonic(), 0
    count = len(model.model.layers)
    for layer in model:
        left = f", {(time.monotonic() - begun) / fresh * (count - layer.index):,.0f} s left" if fresh else ""
        progress.update(layer.index, count, f"rounding: layer {layer.index + 1} of {count}{left}")
        file = store / f"layer-{layer.index:04d}.safetensors"
        rounder = LayerRounder(layer, plan.formats, table, method)
        outputs = rounder.measure(streams.true)
        if method.cross is None:  # then nothing reads the true inputs again, and their memory is free
            streams.true = outputs
        if file.is_file():
            result = LayerResult.load(file)
            restore(rounder, result)
            if not fresh:
                begun = time.monotonic()
        else:
            folded: dict[str, np.ndarray] = {}
            if fold:
                amax: dict[str, float] = {}
                changed = awq_lite.fold_layer(layer, set(formats), amax, advance=False)
                folded = {in_layer(n): a for n, a in changed.items() if n.removesuffix(".weight") not in formats}
                rounder.start()
                rounder.set_amax(amax)
            rounder.quantize(streams.true, model.states)
            if method.steps:
                learned_rounding.learn(rounder, model.states, outputs, method.steps, job.seed)
            for warning in one_per_layer(rounder.warnings):
                log.warning("annie-quant: %s", warning)
            packed = {n: r.packed(rounder.tensor_scales[n]) for n, r in rounder.rounded.items()}
            result = LayerResult(packed, rounder.amax, rounder.tokens, folded)
            result.save(file)
            fresh += 1
        add(plan, layer, result, coverage)
        streams.advance(rounder, outputs)
    coverage.report(job.output, progress)
    return plan


def add(plan: Plan, layer: DecoderLayer, result: LayerResult, coverage: Coverage) -> None:
    """Add a layer's result to the plan."""
    plan.packed |= {f"{layer.name}.{n}": tensor for n, tensor in result.packed.items()}
    plan.amax |= {f"{layer.name}.{n}": value for n, value in result.amax.items()}
    plan.weights = {**plan.weights, **{f"{layer.name}.{n}": array for n, array in result.folded.items()}}
    for group in layer.expert_groups():
        if group[0] in result.tokens:
            coverage.add(layer.name, [group], {group[0]: result.tokens[group[0]]})


def restore(rounder: LayerRounder, result: LayerResult) -> None:
    """Give a layer the rounded and folded weights of an earlier run."""
    device, dtype = rounder.layer.model.device, rounder.layer.model.dtype
    state = rounder.fake.state_dict()
    state |= {n: codec.to_torch(a.astype(np.float32)).to(device, dtype) for n, a in result.folded.items()}
    rounder.fake.load_state_dict(state, assign=True)
    for name, tensor in result.packed.items():
        linear = rounder.linear(rounder.fake, name)
        linear.weight.data = codec.to_torch(nvfp4.unpack(tensor, "float32")).to(linear.weight)
    rounder.amax = result.amax
    for group in rounder.groups:
        rounder.round_inputs(group)


def memory_needed(folder: ModelFolder, model: DecoderLayers, method: Method) -> str:
    """Return a line with the memory that the work takes, by its parts, before it starts."""
    size = model.dtype.itemsize
    layers: dict[str, int] = {}
    widest = 0
    for module in decoder_linears(folder):
        rows, columns = folder.info(f"{module}.weight").shape
        layer = layer_of(module)
        layers[layer] = layers.get(layer, 0) + rows * columns
        widest = max(widest, columns)
    # Inputs of both streams, the source's outputs, and those of the rounded attention.
    states = 4 * sum(b.ids.size for b in model.batches) * folder.text_config["hidden_size"] * size
    # The source's and the rounded layer; in float32 codes, values and what was rounded, and learned offsets with gradients.
    weights = max(layers.values(), default=0) * (2 * size + 4 * (10 if method.steps else 6))
    hessians = 5 * 4 * widest**2  # both moments, the damped copy, its factor and inverse
    results = 0.28 * folder.weight_bytes  # 4.5 of 16 bits
    return (
        f"memory about {(states + weights + hessians) / 1e9:,.1f} GB on {model.device}: hidden states {states / 1e9:,.1f}, "
        f"one layer {weights / 1e9:,.1f}, Hessians {hessians / 1e9:,.1f}; results {results / 1e9:,.1f} GB of host memory"
    )
