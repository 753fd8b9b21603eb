"""direct: NVFP4 straight from the shards by the C codec. No GPU, no ModelOpt, no torch, bounded memory.

Activations stay bf16 (W4A16) unless input scales are given: nothing is calibrated, so no text is needed. What ModelOpt
leaves alone by default is left alone here too; linears that a server fuses share one tensor scale. Rows go through in
chunks, mapped and streamed, shard by shard: a stopped run goes on after its last whole shard, and shards may be made by
several machines (distributed.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint import dialects, staging
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.linears import fused_groups, is_linear, matches
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, finished, layout, need_room, planned, write_index, write_shard
from annie_quant.errors import CheckpointError, UsageError
from annie_quant.files import read_json, write_json
from annie_quant.quantize.exclude import excluded
from annie_quant.quantize.job import Job, Report
from annie_quant.quantize.meter import Meter

NAME = "direct"
SUMMARY = "weight-only NVFP4 from the shards by our C codec: no GPU, no text; --scale amax, four_over_six or sweep"
OPTIONS = {
    "shard_size": "5GB",  # of the output's files: 500MB, 5GB
    "input_scales": "",  # W4A4: a JSON file {module: input_scale}, or a quantized checkpoint's folder to take them from
    "ray": "",  # address of a Ray cluster that makes the shards ("local" starts one here)
}

# ModelOpt's default exclusions for this family: routers, DeltaNet's small projections and convolution, MTP, vision.
LEFT_ALONE = (
    "*lm_head", "*embed_tokens*", "*linear_attn.conv1d", "*linear_attn.in_proj_a", "*linear_attn.in_proj_b",
    "*mlp.gate", "*router*", "*shared_expert_gate", "mtp.*", "*visual*", "*vision*",
)  # fmt: skip
GROUP = 16
FLOATS = ("BF16", "F16", "F32")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


def quantize(job: Job, report: Report) -> None:
    conversion = Conversion(job)
    shards = layout(conversion.plan, size_of(job.options["shard_size"]))
    missing = [s for s in shards if not finished(job.output, s)]
    need_room(job.output, sum(s.size_bytes for s in missing))
    total = sum(s.work_bytes for s in shards)
    meter = Meter(report, total, kept=total - sum(s.work_bytes for s in missing))
    if job.options["ray"]:
        from annie_quant.quantize import distributed

        distributed.make(job, {s.name: s.work_bytes for s in missing}, meter, make_shard)
    else:
        for shard in missing:
            write_shard(job.output, shard, meter.add)
    write_index(job.output, shards)
    conversion.write_config()


def stamp(job: Job) -> dict[str, Any]:
    """What must be the same for a rerun to keep the shards of a stopped run."""
    given = job.options["input_scales"]
    options = {k: v for k, v in job.options.items() if k != "ray"}
    scales = list(read_input_scales(given).items()) if given else []
    source = staging.fingerprint(ModelFolder(job.model))
    return {"source": source, "exclude": job.exclude, "scale": job.scale, "options": options, "inputs": repr(scales)}


def make_shard(job: Job, name: str) -> None:
    """One shard of the output by its name: what a worker does."""
    shards = layout(Conversion(job).plan, size_of(job.options["shard_size"]))
    write_shard(job.output, next(s for s in shards if s.name == name))


def size_of(text: str) -> int:
    """Bytes of "500MB", "5GB", "2GiB" or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise UsageError(f"shard_size={text!r}: expected a size", "for example --set shard_size=2GB")
    return int(float(match[1]) * unit)


class Conversion:
    """What becomes of each tensor. Nothing but headers is read until a planned tensor is loaded."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.folder = ModelFolder(job.model)
        modules = [n.removesuffix(".weight") for n in self.folder if is_linear(n, self.folder.info(n).shape)]
        self.chosen = choose(self.folder, modules, job)
        self.left = sorted(set(modules) - set(self.chosen))
        groups = fused_groups(set(self.chosen))
        self.together = {m: group for group in groups for m in group}
        self.scales: dict[str, np.float32] = {}
        self.inputs = self.input_scales()
        quantized = set(self.chosen)
        self.plan = [t for name in self.folder for t in self.tensors(name, quantized)]

    def tensor_scale(self, module: str) -> np.float32:
        """The multiplier of a linear, one for all that are served as one matrix; found when it is first needed."""
        if module not in self.scales:
            group = self.together.get(module, [module])
            top = max(largest_of(self.folder, f"{m}.weight") for m in group)
            self.scales |= dict.fromkeys(group, np.float32(nvfp4.tensor_scale(top, scale=self.job.scale)))
        return self.scales[module]

    def input_scales(self) -> dict[str, np.float32]:
        """The given input scale of every linear, the largest of a fused group; empty for weights alone."""
        if not self.job.options["input_scales"]:
            return {}
        given = read_input_scales(self.job.options["input_scales"])
        short = {key(name): value for name, value in given.items()}
        found = {}
        for module in self.chosen:
            if key(module) not in short:
                raise CheckpointError(
                    f"{module}: no input scale in {self.job.options['input_scales']}",
                    "calibrate it, exclude it with --exclude-layers, or leave input_scales out for W4A16",
                )
            found[module] = np.float32(
                max(short[key(m)] for m in self.together.get(module, [module]) if key(m) in short)
            )
        return found

    def tensors(self, name: str, quantized: set[str]) -> list[Planned]:
        """One source tensor as it will stand in the output: three or four tensors for a linear, itself otherwise."""
        folder, info, module = self.folder, self.folder.info(name), name.removesuffix(".weight")
        if module not in quantized:
            return [Planned(name, info.dtype, info.shape, lambda: folder.pieces(name))]
        rows, columns = info.shape
        found: list[np.ndarray] = []

        def codes() -> Iterator[np.ndarray]:
            found.clear()
            scale = float(self.tensor_scale(module))
            for part in folder.rows(name):
                packed = nvfp4.pack(part, tensor_scale=scale, scale=self.job.scale, group=GROUP)
                found.append(packed.block_scale)
                yield packed.codes

        def block_scales() -> Iterator[np.ndarray]:
            # The codes come first in the file and leave the scales here, unless they are in an earlier shard.
            if not found:
                for _ in codes():
                    pass
            yield from found
            found.clear()

        out = [
            Planned(name, "U8", (rows, columns // 2), codes, source_bytes=info.size_bytes),
            Planned(f"{module}.weight_scale", "F8_E4M3", (rows, columns // GROUP), block_scales, source_bytes=0),
            Planned(f"{module}.weight_scale_2", "F32", (), lambda: np.array(self.tensor_scale(module))),
        ]
        given = self.inputs.get(module)
        return out if given is None else [*out, planned(f"{module}.input_scale", np.array(given))]

    def write_config(self) -> None:
        formats = dict.fromkeys(self.chosen, "nvfp4")
        inline, beside = modelopt.small_files(formats, self.left, GROUP, with_input=bool(self.inputs))
        for name, value in beside.items():
            write_json(self.job.output / name, value)
        write_json(self.job.output / "config.json", self.folder.config | {"quantization_config": inline})


def choose(folder: ModelFolder, modules: list[str], job: Job) -> list[str]:
    """The linears to quantize: not left alone by default, not excluded by the user, rows that hold whole blocks."""
    out = excluded(job.exclude, modules)
    chosen = []
    for module in modules:
        info = folder.info(f"{module}.weight")
        if module in out or matches(module, list(LEFT_ALONE)):
            continue
        if info.dtype not in FLOATS:
            raise CheckpointError(f"{info.name}: dtype {info.dtype}, expected one of {', '.join(FLOATS)}",
                                  "give --model the bf16 checkpoint, not a quantized one")  # fmt: skip
        if info.shape[1] % GROUP:
            raise CheckpointError(f"{info.name}: rows of {info.shape[1]}, expected a multiple of {GROUP}",
                                  f"--exclude-layers {module}")  # fmt: skip
        chosen.append(module)
    if not chosen:
        raise CheckpointError(f"{folder.path}: there is no linear layer to quantize", "annie-quant audit it")
    return chosen


def largest_of(folder: ModelFolder, name: str) -> float:
    """The largest absolute weight, refusing a tensor that holds NaN or inf."""
    values = [float(nvfp4.amax(rows)) for rows in folder.rows(name)]
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name}: holds NaN or inf", "the source checkpoint is damaged: download it again")
    return max(values, default=0.0)


def key(name: str) -> str:
    """A module's name without what multimodal checkpoints put before it."""
    return name.removeprefix("model.").removeprefix("language_model.")


def read_input_scales(path: str) -> dict[str, float]:
    """Module → multiplier of the activations, from a JSON file or a quantized checkpoint."""
    if Path(path).is_dir():
        source = ModelFolder(path)
        linears = dialects.linears(source).values()
        found = {x.name: float(x.input_scale(source) or 0) for x in linears if x.input_global}
    else:
        try:
            found = {str(k): float(v) for k, v in read_json(path).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"input_scales={path}: {error}"[:200], "a JSON object {module: number}") from None
    wrong = next((k for k, v in found.items() if not np.isfinite(np.float32(v)) or np.float32(v) <= 0), None)
    if wrong or not found:
        seen = f"{wrong} is {found[wrong]}" if wrong else "holds no input scale"
        raise UsageError(f"input_scales={path}: {seen}", "expected positive finite multipliers, amax / 2688")
    return found
