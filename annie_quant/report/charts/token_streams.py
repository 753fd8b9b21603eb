"""One answer to the same prompt by each backend, with a tick for each token as it arrived."""

from __future__ import annotations

import itertools

from annie_quant.report.charts import svg
from annie_quant.report.charts.figure import WIDE, Figure
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import name, significant
from annie_quant.report.run import LoadedRun
from annie_quant.schema import RequestRecord

LEFT, TOP, ROW, RIGHT = 132, 14, 34, WIDE - 86


def draw(run: LoadedRun, timed: list[RequestRecord]) -> Figure:
    figure = Figure("streams", wide=True)
    answers = _answers([s.name for s in run.served], timed)
    if not answers:
        return figure
    one = next(iter(answers.values()))
    figure.caption = (
        f"One stream per backend, the same prompt ({name(one.workload)}, case {one.case}): each tick is a piece of the "
        "answer as it arrived, the line from zero is the wait for the first. n = 1 request each: an "
        "illustration, not a measurement."
    )
    streams = [
        (s.model, list(itertools.accumulate(answers[s.name].itl_ms, initial=answers[s.name].first_token_ms or 0.0)))
        for s in run.served
        if s.name in answers
    ]
    bottom = TOP + ROW * len(streams)
    end = max(times[-1] for _, times in streams) or 1.0
    description = "; ".join(
        f"{run.label(m)}: first after {significant(t[0])} ms, {len(t)} pieces, last {significant(t[-1])} ms"
        for m, t in streams
    )
    c = Canvas(WIDE, bottom + 34, "Single streams over time", description)
    x = svg.scale(0, end, LEFT, RIGHT)
    svg.x_axis(c, x, svg.ticks(0, end, 7), TOP - 4, bottom, svg.plain, "milliseconds since the request")
    for index, (model, times) in enumerate(streams):
        y, series = TOP + ROW * (index + 0.5), run.series(model)
        c.text(LEFT - 8, y + 4, run.label(model)[:19], "v e")
        c.line(x(0), y, x(times[0]), y, f"l s{series}", f"first after {significant(times[0])} ms")
        c.ticks([x(t) for t in times], y, 9, f"l s{series}")
        c.text(RIGHT + 4, y + 4, f"{len(times)} pieces")
    figure.panels.append(("streams", c))
    return figure


def _answers(backends: list[str], timed: list[RequestRecord]) -> dict[str, RequestRecord]:
    """By backend, the answers to one prompt: one that most backends streamed, with the longest shortest answer."""
    prompts: dict[tuple[str, str, int], dict[str, RequestRecord]] = {}
    for record in timed:
        if record.backend in backends and record.itl_ms:
            prompts.setdefault(record.prompt, {}).setdefault(record.backend, record)
    return max(
        prompts.values(), key=lambda answers: (len(answers), min(len(r.itl_ms) for r in answers.values())), default={}
    )
