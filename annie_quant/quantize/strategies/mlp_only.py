"""mlp_only (the founding strategy B): the MLP in NVFP4 W4A4, attention and DeltaNet stay bf16.

Tool-call formatting was seen to survive where attention kept its precision; the price is size: 10.96 GB for a 9B, by
count of its parameters.
"""

from __future__ import annotations

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import need
from annie_quant.quantize import modelopt
from annie_quant.quantize.export import NVFP4, choose, say_size
from annie_quant.quantize.job import Job, Report

NAME = "mlp_only"
SUMMARY = "B: ModelOpt's NVFP4_MLP_ONLY_CFG: MLP in NVFP4, attention and DeltaNet stay bf16"


def quantize(job: Job, report: Report) -> None:
    folder = ModelFolder(job.model)
    formats = {n: NVFP4 for n in choose(folder, job) if ".mlp." in n}
    say_size(folder, formats, job, report)
    modelopt.run(job, need("modelopt.torch.quantization", "quantize").NVFP4_MLP_ONLY_CFG, report)
