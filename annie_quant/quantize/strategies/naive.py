"""naive: every linear but the head in NVFP4 W4A4, scales from the largest values (the founding v1, the bad control)."""

from __future__ import annotations

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import need
from annie_quant.quantize import modelopt
from annie_quant.quantize.export import NVFP4, choose, say_size
from annie_quant.quantize.job import Job, Report

NAME = "naive"
SUMMARY = "ModelOpt's NVFP4_DEFAULT_CFG, max calibration: smallest, loses manners (the control)"


def quantize(job: Job, report: Report) -> None:
    folder = ModelFolder(job.model)
    say_size(folder, dict.fromkeys(choose(folder, job), NVFP4), job, report)
    modelopt.run(job, need("modelopt.torch.quantization", "quantize").NVFP4_DEFAULT_CFG, report)
