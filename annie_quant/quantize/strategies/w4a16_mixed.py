"""w4a16_mixed (the founding strategy D): MLP and head in NVFP4 weights with 16-bit activations, attention in FP8.

Upstream's own recipe for Qwen3.5: nothing computes on 4-bit activations, so what they break stays whole; 7.42 GB for a
9B by count of its parameters. Block scales of the weights by the codec's full search unless --scale says otherwise.
"""

from __future__ import annotations

from annie_quant.checkpoint.linears import matches
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.quantize import calibration_samples
from annie_quant.quantize.exclude import excluded
from annie_quant.quantize.export import FP8, W4A16, Decided, choose, export, linears_of, say_size
from annie_quant.quantize.input_stats import gather
from annie_quant.quantize.job import Job, Report

NAME = "w4a16_mixed"
SCALE = "sweep"
SUMMARY = "D: MLP and head in NVFP4 W4A16, attention and DeltaNet in FP8: no 4-bit activation anywhere"


def quantize(job: Job, report: Report) -> None:
    folder = ModelFolder(job.model)
    formats = {n: W4A16 if ".mlp." in n else FP8 for n in choose(folder, job)}
    head = [n for n in linears_of(folder) if matches(n, ["*lm_head"])]
    formats |= dict.fromkeys(set(head) - excluded(job.exclude, linears_of(folder)), W4A16)
    say_size(folder, formats, job, report)
    found = gather(folder, calibration_samples.read(job), calibration_samples.RESPONSE, report)
    export(folder, job, Decided(formats, found.amax, job.scale))
