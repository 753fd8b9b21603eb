"""direct: weight-only NVFP4 straight from the shards by the C codec. No GPU, no ModelOpt, no torch, bounded memory.

Activations stay bf16 (W4A16): nothing is calibrated, so no text is needed. What ModelOpt leaves alone by default is
left alone here too; linears that a server fuses share one tensor scale. Rows go through in chunks, mapped and streamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import numpy as np

from annie_quant import nvfp4
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.linears import fused_groups, is_linear, matches
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import Planned, planned, write
from annie_quant.errors import CheckpointError, UsageError
from annie_quant.files import write_json
from annie_quant.quantize.exclude import excluded
from annie_quant.quantize.job import Job, Report

NAME = "direct"
SUMMARY = "weight-only NVFP4 from the shards by our C codec: no GPU, no text; --scale amax, four_over_six or sweep"

# ModelOpt's default exclusions for this family: routers, DeltaNet's small projections and convolution, MTP, vision.
LEFT_ALONE = (
    "*lm_head", "*embed_tokens*", "*linear_attn.conv1d", "*linear_attn.in_proj_a", "*linear_attn.in_proj_b",
    "*mlp.gate", "*router*", "*shared_expert_gate", "mtp.*", "*visual*", "*vision*",
)  # fmt: skip
CHUNK_ELEMENTS = 1 << 24
GROUP = 16
FLOATS = ("BF16", "F16", "F32")


def quantize(job: Job, report: Report) -> None:
    if job.scale not in get_args(nvfp4.Scale):
        raise UsageError(f"--scale {job.scale!r}", f"choose one of: {', '.join(get_args(nvfp4.Scale))}")
    rule: nvfp4.Scale = job.scale  # type: ignore[assignment]
    folder = ModelFolder(job.model)
    modules = [n.removesuffix(".weight") for n in folder if is_linear(n, folder.info(n).shape)]
    chosen = choose(folder, modules, job)
    scales = shared_scales(folder, chosen, rule)
    plan = [t for name in folder for t in plan_tensor(folder, name, scales, rule)]
    total, done = sum(t.size_bytes for t in plan), 0

    def progress(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        report(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB written")

    write(job.output, plan, progress=progress)
    write_config(folder, job, chosen, sorted(set(modules) - set(chosen)))


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


def shared_scales(folder: ModelFolder, chosen: list[str], scale: nvfp4.Scale) -> dict[str, np.float32]:
    """Module → tensor scale, one for each group that is served as one matrix."""
    largest = {m: largest_of(folder, f"{m}.weight") for m in chosen}
    for group in fused_groups(set(chosen)):
        top = max(largest[m] for m in group)
        largest |= dict.fromkeys(group, top)
    return {m: np.float32(nvfp4.tensor_scale(v, scale=scale)) for m, v in largest.items()}


def largest_of(folder: ModelFolder, name: str) -> float:
    """The largest absolute weight, refusing a tensor that holds NaN or inf."""
    values = [float(nvfp4.amax(rows)) for rows in chunks(folder, name)]
    if not np.isfinite(values).all():
        raise CheckpointError(f"{name}: holds NaN or inf", "the source checkpoint is damaged: download it again")
    return max(values, default=0.0)


def chunks(folder: ModelFolder, name: str) -> Iterator[np.ndarray]:
    weight = folder.tensor(name)
    step = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        yield weight[start : start + step]
    folder.release(name)


def plan_tensor(folder: ModelFolder, name: str, scales: dict[str, np.float32], scale: nvfp4.Scale) -> list[Planned]:
    """One source tensor as it will stand in the output: three tensors for a linear, itself otherwise."""
    info = folder.info(name)
    module = name.removesuffix(".weight")
    if module not in scales:
        return [Planned(name, info.dtype, info.shape, lambda: folder.tensor(name))]
    rows, columns = info.shape
    found: list[np.ndarray] = []

    def codes() -> Iterator[np.ndarray]:
        found.clear()
        for part in chunks(folder, name):
            packed = nvfp4.pack(part, tensor_scale=float(scales[module]), scale=scale, group=GROUP)
            found.append(packed.block_scale)
            yield packed.codes

    def block_scales() -> Iterator[np.ndarray]:
        # The codes come first in the file and leave the scales here, unless an earlier run wrote them already.
        if not found:
            for _ in codes():
                pass
        yield from found
        found.clear()

    return [
        Planned(name, "U8", (rows, columns // 2), codes),
        Planned(f"{module}.weight_scale", "F8_E4M3", (rows, columns // GROUP), block_scales),
        planned(f"{module}.weight_scale_2", np.array(scales[module], np.float32)),
    ]


def write_config(folder: ModelFolder, job: Job, chosen: list[str], left: list[str]) -> None:
    settings = modelopt.settings(dict.fromkeys(chosen, "nvfp4"), left, GROUP, with_input=False)
    write_json(job.output / "config.json", folder.config | {"quantization_config": settings})
    write_json(job.output / modelopt.HF_QUANT_CONFIG, modelopt.companion(settings, GROUP))
