"""direct: NVFP4 straight from the shards by the C codec. No GPU, no ModelOpt, no torch, bounded memory.

Activations stay bf16 (W4A16): nothing is calibrated, so no text is needed. An interrupted run resumes after its last complete
shard.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated

import msgspec

from annie_quant.checkpoint import writer
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.checkpoint.writer import source_key
from annie_quant.core.errors import UsageError
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import four_bit_formats
from annie_quant.quantize.plan import QuantizationPlan, export
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


def plan_direct(job: Job[DirectOptions], progress: Progress) -> QuantizationPlan:
    return QuantizationPlan.of(four_bit_formats(job, 16), scale=job.scale)


def write_shards(job: Job[DirectOptions], plan: QuantizationPlan, progress: Progress) -> None:
    shard_bytes = parse_size(job.options.shard_size)
    write_tensors = partial(writer.write, shard_bytes=shard_bytes, progress=progress, resume=True)
    export(ModelFolder(job.model), job.output, plan, write_tensors)


def resume_key(job: Job[DirectOptions]) -> dict[str, object]:
    """Return what must be equal for a rerun to keep the shards of an interrupted run."""
    return {
        "source": source_key(ModelFolder(job.model)),
        "exclude": job.exclude,
        "scale": job.scale,
        "options": msgspec.structs.asdict(job.options),
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


STRATEGY = Strategy(
    name="direct",
    summary="weight-only NVFP4 from the shards by our C codec: no GPU, no text; --scale amax, four_over_six or sweep",
    formats=ALL_NVFP4,
    cost=Cost(rank=20, layerwise=True),
    plan=plan_direct,
    options=DirectOptions,
    write=write_shards,
    requires=(),
    resume_key=resume_key,
)
