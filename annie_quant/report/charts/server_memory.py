"""Memory of each server: idle, with one request, with five at once."""

from __future__ import annotations

from annie_quant.report.charts import svg
from annie_quant.report.charts.figure import WIDTH, Figure
from annie_quant.report.charts.svg import Canvas
from annie_quant.report.format import size
from annie_quant.report.run import LoadedRun

SOURCES = {
    "process_rss_bytes": "resident memory of the server's processes",
    "gpu_process_bytes": "GPU memory of the server's processes, reported by NVML",
    "system_used_bytes": "MemTotal − MemAvailable of the whole machine",
}
LEVELS = (("idle", "idle"), ("one", "1 request"), ("five", "5 at once"))
LEFT, TOP, ROW = 76, 26, 17


def draw(run: LoadedRun) -> Figure:
    measured = [(s, s.data.memory_bytes) for s in run.served if s.data.memory_bytes]
    sources = sorted({memory.source for _, memory in measured} - {""})
    source = ", ".join(SOURCES.get(s, s) for s in sources) or "source not recorded"
    figure = Figure("memory", f"Memory of each server: {source}; the highest seen, one measurement each (n = 1).")
    largest = max([getattr(memory, level) or 0 for _, memory in measured for level, _ in LEVELS], default=0)
    for side, memory in measured if largest > 0 else ():
        label = run.label(side.model)
        description = "; ".join(f"{title}: {size(getattr(memory, level))}" for level, title in LEVELS)
        c = Canvas(WIDTH, TOP + ROW * 3 + 4, f"Memory: {label}, {side.title}", description)
        c.text(0, 14, label, "t")
        width = svg.scale(0, largest, 0, WIDTH - LEFT - 66)
        for index, (level, title) in enumerate(LEVELS):
            value, y = getattr(memory, level), TOP + ROW * index
            c.text(LEFT - 8, y + 10, title, "e")
            if value is not None:
                c.bar(LEFT, y, width(value), ROW - 5, f"f s{run.series(side.model)}")
            c.text(LEFT + width(value or 0) + 6, y + 10, size(value), "v")
        figure.panels.append((side.key, c))
    return figure
