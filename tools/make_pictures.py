"""Draw the pictures of README.md: docs/flow.svg and docs/real-model.svg.

    python tools/make_pictures.py

The chart's figures are the rows of tests/perf/real_model.jsonl, which repeat the tables of tests/perf/bfcl.md.
"""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "tests/perf/real_model.jsonl"
BF16_CALLS = 448  # right calls of the bf16 model
PROMPTS = 940  # prompts with a call
LINEARS = 168
W4A4_COLOUR = "#d1495b"
W4A16_COLOUR = "#30638e"
OURS = "annie_quant"
# (text, column, row) of the flow; commands are the first line of each box.
STAGES = (
    ("init, data\nprompt, tools, logs", 0, 1),
    ("bf16 model", 0, 0),
    ("quantize\nNVFP4 checkpoint", 1, 0.5),
    ("audit\nevery tensor", 2, 0.5),
    ("eval\nverdict, no server", 3, 0.5),
    ("serve\nvLLM, SGLang,\nllama.cpp", 4, 0.5),
    ("bench\nagainst Q4_K_M", 5, 0.5),
    ("report\npublish", 6, 0.5),
)
ARROWS = ((0, 2), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7))


def draw_flow() -> Figure:
    """Draw the stages from a bf16 model to a published checkpoint."""
    figure, axes = pyplot.subplots(figsize=(11, 1.6))
    axes.set_axis_off()
    axes.set_xlim(-0.6, 6.6)
    axes.set_ylim(-0.45, 1.45)
    box = {"boxstyle": "round,pad=0.45", "facecolor": "#eef3f7", "edgecolor": "#30638e"}
    figure.subplots_adjust(left=0, right=1, bottom=0, top=1)
    texts = []
    for text, column, row in STAGES:
        texts.append(axes.text(column, row, text, ha="center", va="center", fontsize=8, bbox=box))
    figure.canvas.draw()
    for start, end in ARROWS:
        axes.annotate(
            "",
            xy=(STAGES[end][1], STAGES[end][2]),
            xytext=(STAGES[start][1], STAGES[start][2]),
            arrowprops={
                "arrowstyle": "->",
                "color": "#30638e",
                "patchA": texts[start].get_bbox_patch(),
                "patchB": texts[end].get_bbox_patch(),
            },
        )
    return figure


def draw_chart() -> Figure:
    """Draw the right calls of each recipe in both arithmetics, next to what its prompts cost."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    figure, axes = pyplot.subplots(figsize=(9, 3.6))
    for height, row in enumerate(rows):
        draw_row(axes, height, row)
    axes.axvline(BF16_CALLS, color="black", linewidth=1)
    axes.text(BF16_CALLS, len(rows) - 0.35, f" bf16 {BF16_CALLS}", va="bottom", fontsize=8)
    axes.text(505, len(rows) - 0.35, "linears with 4-bit inputs", va="bottom", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{row['library']}: {row['recipe']}" for row in rows])
    for label, row in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_fontweight("bold" if row["library"] == OURS else "normal")
        label.set_fontsize(8)
    axes.set_xlim(190, 560)
    axes.set_xticks(range(200, 451, 50))
    axes.set_ylim(-0.6, len(rows) + 0.2)
    axes.set_xlabel(
        f"right calls to {PROMPTS} prompts of BFCL; Qwen2.5-Coder-0.5B, all at {rows[0]['megabytes']:g} MB",
        fontsize=8,
    )
    axes.scatter([], [], color=W4A4_COLOUR, label="as stored (W4A4 where inputs have 4 bits)")
    axes.scatter([], [], color=W4A16_COLOUR, label="W4A16 (Marlin, llama.cpp)")
    axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    return figure


def draw_row(axes: Axes, height: int, row: dict) -> None:
    counts = [*row["w4a4_calls"], *row["w4a16_calls"]]
    axes.plot([min(counts), max(counts)], [height, height], color="#bbbbbb", zorder=1)
    for name, colour in (("w4a4_calls", W4A4_COLOUR), ("w4a16_calls", W4A16_COLOUR)):
        axes.scatter(row[name], [height] * len(row[name]), color=colour, zorder=2)
    axes.text(505, height, f"{row['inputs_in_4_bits'] / LINEARS:.0%}", va="center", fontsize=8)


def main() -> None:
    pyplot.rcParams["svg.fonttype"] = "none"
    pyplot.rcParams["svg.hashsalt"] = "annie_quant"
    pyplot.rcParams["font.family"] = "DejaVu Sans, sans-serif"
    for name, draw in (("flow", draw_flow), ("real-model", draw_chart)):
        draw().savefig(ROOT / f"docs/{name}.svg", format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
