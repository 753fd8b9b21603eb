"""direct: NVFP4 straight from the shards by the C codec. No GPU, no ModelOpt, no torch, bounded memory.

Activations stay bf16 (W4A16) unless input scales are given: nothing is calibrated, so no text is needed. An interrupted
run resumes after its last complete shard.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from annie_quant.checkpoint import dialects, writer
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import source_key
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.core.files import read_json
from annie_quant.core.progress import Progress
from annie_quant.models import short_name
from annie_quant.models.formats import NVFP4, W4A16
from annie_quant.quantize.formats import choose
from annie_quant.quantize.plan import PlannedLinear, QuantizationPlan, export
from annie_quant.quantize.strategy import ALL_NVFP4, Cost, Job, Strategy, StrategyOptions, described

UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}


class DirectOptions(StrategyOptions, frozen=True):
    shard_size: Annotated[str, described("size of the output's files: 500MB, 5GB")] = "5GB"
    input_scales: Annotated[
        str,
        described(
            "for W4A4: a JSON file {module: input_scale}, or a quantized checkpoint's folder"
        ),
    ] = ""


def plan(job: Job[DirectOptions], progress: Progress) -> QuantizationPlan:
    """Return every chosen linear in one format, with its input scale if these are given."""
    folder = ModelFolder(job.model)
    file = job.options.input_scales
    chosen = choose(folder, job.exclude)
    if not file:
        return QuantizationPlan.of(dict.fromkeys(chosen, W4A16), scale=job.scale)
    scales = {short_name(name): value for name, value in read_input_scales(file).items()}
    experts = folder.family.experts
    missing = next(
        (m for m in chosen if short_name(m) not in scales and not (experts and experts.split(m))),
        None,
    )
    if missing:
        raise CheckpointError(
            f"{missing}: no input scale in {file}",
            "calibrate it, exclude it with --exclude-layers, or leave input_scales out for W4A16",
        )
    shared = folder.family.largest_of_input({m: scales.get(short_name(m), 0.0) for m in chosen})
    linears = {m: PlannedLinear(NVFP4, input_scale=np.float32(s)) for m, s in shared.items()}
    return QuantizationPlan(linears, job.scale)


def write(job: Job[DirectOptions], plan: QuantizationPlan, progress: Progress) -> None:
    shard_bytes = parse_size(job.options.shard_size)
    write_tensors = partial(writer.write, shard_bytes=shard_bytes, progress=progress, resume=True)
    export(ModelFolder(job.model), job.output, plan, write_tensors)


def resume_key(job: Job[DirectOptions]) -> dict[str, object]:
    """Return what must be equal for a rerun to keep the shards of an interrupted run."""
    file = job.options.input_scales
    return {
        "source": source_key(ModelFolder(job.model)),
        "exclude": job.exclude,
        "scale": job.scale,
        "options": msgspec.structs.asdict(job.options),
        "inputs": repr(list(read_input_scales(file).items()) if file else []),
    }


def parse_size(text: str) -> int:
    """Return the bytes of "500MB", "5GB", "2GiB" or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise UsageError(
            f"shard_size={text!r}: expected a size", "for example --set shard_size=2GB"
        )
    return int(float(match[1]) * unit)


def read_input_scales(path: str) -> dict[str, float]:
    """Return module → multiplier of the activations, from a JSON file or a quantized checkpoint."""
    if Path(path).is_dir():
        source = ModelFolder(path)
        linears = dialects.linears(source).values()
        scales = {x.name: float(s.multiplier) for x in linears if (s := x.input_scale(source))}
    else:
        try:
            scales = {str(k): float(v) for k, v in read_json(path).items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(
                f"input_scales={path}: {error}"[:200], "a JSON object {module: number}"
            ) from None
    invalid = next(
        (k for k, v in scales.items() if not np.isfinite(np.float32(v)) or np.float32(v) <= 0), None
    )
    if invalid or not scales:
        fault = f"{invalid} is {scales[invalid]}" if invalid else "holds no input scale"
        raise UsageError(
            f"input_scales={path}: {fault}", "expected positive finite multipliers, amax / 2688"
        )
    return scales


STRATEGY = Strategy(
    name="direct",
    summary="weight-only NVFP4 from the shards by our C codec: no GPU, no text; --scale amax, four_over_six or sweep",
    formats=ALL_NVFP4,
    cost=Cost(rank=20, layerwise=True),
    plan=plan,
    options=DirectOptions,
    write=write,
    requires=(),
    resume_key=resume_key,
)
