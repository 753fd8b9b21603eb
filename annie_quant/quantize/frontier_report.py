"""The frontier of formats as a table and as a picture in the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from annie_quant.core.errors import need
from annie_quant.documents import FormatPlan, FrontierPoint

FRONTIER_PICTURE = "frontier.svg"


def frontier_lines(plan: FormatPlan) -> list[str]:
    """Return the table, one line per point, and the reason."""
    rows = [("", "GB per token", "GB", "tok/s", "KL", "at decisions", "flips", "head", "formats")]
    for p in plan.points:
        mark = "=>" if p.taken else "measured" if p.measured else ""
        formats = ", ".join(f"{share:.0%} {name}" for name, share in p.formats.items())
        rows.append((mark, f"{p.read_bytes / 1e9:.4g}", f"{p.size_bytes / 1e9:.4g}", f"{p.tok_s:.1f}", f"{p.kl:.2e}",
                     f"{p.decisions:.2e}", f"{p.flips:.2%}", p.head, formats))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = ["  ".join((*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[-1])) for row in rows]
    return [f"frontier, tok/s on {plan.device}:", *lines, plan.reason]


def draw_frontier(plan: FormatPlan, path: Path) -> None:
    """Write the picture: divergence and flips at decisions, by bytes per token and predicted speed."""
    need("matplotlib", "plots")
    import matplotlib
    from matplotlib.figure import Figure

    predicted = [p for p in plan.points if not p.measured]
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)

    def both(points: Sequence[FrontierPoint], style: str, label: str) -> None:
        read = [p.read_bytes / 1e9 for p in points]
        upper.plot(read, [p.kl + p.decisions for p in points], style, label=label)
        lower.plot(read, [100 * p.flips for p in points], style)

    both(predicted, ".-", "predicted from single groups")
    both([p for p in plan.points if p.measured], "s", "measured as a whole")
    both([p for p in plan.points if p.taken], "k*", "taken")
    speeds = upper.twiny()
    speeds.set_xticks([p.read_bytes / 1e9 for p in predicted], [f"{p.tok_s:.0f}" for p in predicted], fontsize="small")
    speeds.set_xlabel(f"tok/s on {plan.device} (predicted)")
    upper.set_ylabel("KL + KL at decisions, nats")
    lower.set(xlabel="GB of weights per token", ylabel="flips at decisions, %")
    speeds.set_xlim(upper.get_xlim())
    upper.legend(fontsize="small")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.hashsalt": "annie_quant"}):  # the same seed gives the same bytes
        figure.savefig(path, metadata={"Date": None})
