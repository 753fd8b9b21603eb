"""naive: every linear but the head in NVFP4 W4A4, scales from the largest values. The control that loses manners."""

from __future__ import annotations

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.progress import Progress
from annie_quant.quantize.formats import NVFP4
from annie_quant.quantize.job import Job
from annie_quant.quantize.plan import announce_size
from annie_quant.quantize.select import choose
from annie_quant.quantize.strategy import ALL_NVFP4, Cost, Strategy


def quantize(job: Job, progress: Progress) -> None:
    import modelopt.torch.quantization as mtq

    from annie_quant.quantize import modelopt

    folder = ModelFolder(job.model)
    announce_size(folder, dict.fromkeys(choose(folder, job.exclude), NVFP4), job, progress)
    modelopt.quantize(job, mtq.NVFP4_DEFAULT_CFG, progress)


STRATEGY = Strategy(
    name="naive",
    summary="ModelOpt's NVFP4_DEFAULT_CFG, max calibration: smallest, loses manners (the control)",
    formats=ALL_NVFP4,
    cost=Cost(rank=10, passes=1),
    quantize=quantize,
    requires=("torch", "transformers", "modelopt"),
)
