"""naive: every linear but the head in NVFP4 W4A4, scales from the largest values. The control that loses manners."""

from __future__ import annotations

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.quantize.job import Job
from annie_quant.quantize.select import choose
from annie_quant.quantize.strategy import ALL_NVFP4, Cost, Strategy


def quantize(job: Job, progress: Progress) -> None:
    from annie_quant.quantize import max_calibration

    folder = ModelFolder(job.model)
    max_calibration.quantize(job, folder, choose(folder, job.exclude), progress)


STRATEGY = Strategy(
    name="naive",
    summary="ModelOpt's NVFP4_DEFAULT_CFG, max calibration: smallest, loses manners (the control)",
    formats=ALL_NVFP4,
    cost=Cost(rank=10, layerwise=True, passes=1),
    quantize=quantize,
    any_family=True,
)
