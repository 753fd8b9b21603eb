"""manners: block scales that keep the error small where tool calls and the end of a turn are decided.

Each weight's squared error counts by its input's second moment over the calibration answers, in which the markup of calls
and the end of a turn weigh more than content. The codec searches all E4M3 codes of a block for the least of it.
"""

from __future__ import annotations

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import Progress
from annie_quant.quantize.formats import NVFP4, W4A16
from annie_quant.quantize.job import Job
from annie_quant.quantize.plan import Plan, announce_size
from annie_quant.quantize.select import choose
from annie_quant.quantize.strategy import ACTIVATIONS, ALL_NVFP4, SWEEP_TIME, Cost, Strategy


def quantize(job: Job, progress: Progress) -> None:
    from annie_quant.quantize import calibration_samples
    from annie_quant.quantize.export import export
    from annie_quant.quantize.input_stats import collect_stats

    folder = ModelFolder(job.model)
    formats = dict.fromkeys(choose(folder, job.exclude), W4A16 if job.options["activations"] == 16 else NVFP4)
    announce_size(folder, formats, job, progress)
    samples = calibration_samples.read_samples(job)
    stats = collect_stats(folder, samples, calibration_samples.MANNERS, progress)
    stats.coverage.report(job.output, progress)
    export(folder, job, Plan(formats, stats.amax, job.scale, {n: stats.second[n] for n in formats}))


STRATEGY = Strategy(
    name="manners",
    summary="ours: block scales searched for the least error where tool calls and ends of turns are decided",
    formats=ALL_NVFP4,
    cost=Cost(rank=40, layerwise=True, passes=1, encode=SWEEP_TIME),
    quantize=quantize,
    options={"activations": ACTIVATIONS},
    scale="sweep",
)
