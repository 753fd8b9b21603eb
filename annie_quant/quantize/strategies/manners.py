"""manners: block scales that spare what carries tool calls and the end of a turn.

Where a checkpoint loses its manners, few tokens decide: the markup of a call, and the token that ends the turn. Each
weight's squared error counts by its input's second moment over the calibration answers, in which those tokens weigh
more than content, and the codec searches all E4M3 codes of a block for the least of it.
"""

from __future__ import annotations

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.quantize import calibration_samples
from annie_quant.quantize.export import NVFP4, W4A16, Decided, choose, export, say_size
from annie_quant.quantize.input_stats import gather
from annie_quant.quantize.job import Job, Report

NAME = "manners"
SCALE = "sweep"
OPTIONS = {"activations": 4}  # 4: W4A4, 16: weights alone
SUMMARY = "ours: block scales searched for the least error where tool calls and ends of turns are decided"

BY_MARK = {
    calibration_samples.PROMPT: 0.1,
    calibration_samples.CONTENT: 1.0,
    calibration_samples.TOOL_MARKUP: 8.0,
    calibration_samples.THINKING: 1.0,
    calibration_samples.END_OF_TURN: 8.0,
}


def quantize(job: Job, report: Report) -> None:
    folder = ModelFolder(job.model)
    formats = dict.fromkeys(choose(folder, job), W4A16 if job.options["activations"] == 16 else NVFP4)
    say_size(folder, formats, job, report)
    found = gather(folder, calibration_samples.read(job), BY_MARK, report)
    importance = {n: found.second[n] for n in formats}
    export(folder, job, Decided(formats, found.amax, job.scale, importance))
