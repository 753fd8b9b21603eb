"""Rich displays for notebooks: tensors, audits, timings and gates as small HTML that is safe to show.

    from annie_quant.report import display
    display.register()                      # in IPython: nvfp4.Tensor, Audit and Timings show themselves from now on
    display.Gates({"naive W4A4": gates})    # tables of gates, side by side, with their intervals drawn

Every text goes through the report's cleaning and escaping; nothing is fetched, nothing runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from annie_quant.report.charts import svg
from annie_quant.report.charts.gates import SIGNS, rate
from annie_quant.report.charts.svg import Canvas, esc
from annie_quant.report.format import bounds, count, name, number, share, significant, size

_CELL = "padding:2px 8px;text-align:right;white-space:nowrap"
_COLOURS = {"pass": "#1d7a46", "fail": "#c0392b", "undecided": "#8a6100"}
SHOWN_ROWS, SHOWN_BLOCKS = 6, 2
SHOWN_REQUESTS = 8
# The report's drawing style, kept to the one picture: a notebook's own text has its own colours.
_STYLE = (svg.STYLE + svg.MARKS).replace("text{", ".aq text{").replace("svg{", "svg.aq{")


def register(shell: Any = None) -> None:
    """Teach IPython's HTML formatter the package's types. Does nothing outside IPython."""
    if shell is None:
        from IPython import get_ipython

        shell = get_ipython()
    if shell is None:
        return
    html = shell.display_formatter.formatters["text/html"]
    html.for_type_by_name("annie_quant.nvfp4", "Tensor", tensor)
    html.for_type_by_name("annie_quant.schema.audit", "Audit", audit)
    html.for_type_by_name("annie_quant.stream.timings", "Timings", timings)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """A plain table; the first column is left-aligned. Cells that are HTML already come as `Html`."""

    def cells(row: Sequence[Any], tag: str) -> str:
        first = f'<{tag} style="{_CELL};text-align:left">'
        return "".join(
            (first if i == 0 else f'<{tag} style="{_CELL}">') + (c if isinstance(c, Html) else esc(c)) + f"</{tag}>"
            for i, c in enumerate(row)
        )

    head = f"<thead><tr>{cells(header, 'th')}</tr></thead>" if header else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    words = f'<caption style="text-align:left;padding:2px 8px">{esc(caption)}</caption>' if caption else ""
    return f"<table>{words}{head}<tbody>{body}</tbody></table>"


class Html(str):
    """Text that is HTML already."""


def drawing(canvas: Canvas) -> str:
    return canvas.inline().replace("<svg", '<svg class="aq" style="max-width:100%"', 1).replace(
        "</title>", f"</title><style>{_STYLE}</style>", 1
    )  # fmt: skip


def tensor(t: Any) -> str:
    """nvfp4.Tensor: its figures, its first blocks (scale and values) and how often each code is used."""
    import numpy as np

    from annie_quant import nvfp4

    elements = int(np.prod(t.shape)) if t.shape else 0
    facts = (
        f"NVFP4 {' × '.join(map(str, t.shape))}, blocks of {t.group}, {size(t.nbytes)}, "
        f"{significant(8 * t.nbytes / elements) if elements else '—'} bits per weight, tensor scale {float(t.tensor_scale):.4g}"
    )
    codes = t.codes.reshape(-1, t.codes.shape[-1])
    scales = t.block_scale.reshape(-1, t.block_scale.shape[-1]).astype(np.float32)
    rows = []
    for index in range(min(SHOWN_ROWS, len(codes))):
        row: list[Any] = [f"row {index}"]
        for block in range(min(SHOWN_BLOCKS, scales.shape[1])):
            packed = codes[index, block * t.group // 2 : (block + 1) * t.group // 2]
            values = nvfp4.E2M1_VALUES[np.stack([packed & 15, packed >> 4], -1).reshape(-1)]
            row += [f"{scales[index, block]:g}", Html("".join(map(_square, values)))]
        rows.append(row)
    header = ["", *(w for _ in range(min(SHOWN_BLOCKS, scales.shape[1])) for w in ("scale", "E2M1 values"))]
    used = np.bincount(codes.reshape(-1) & 15, minlength=16) + np.bincount(codes.reshape(-1) >> 4, minlength=16)
    c = Canvas(340, 96, "How often each value is used", ", ".join(f"{v:g}: {n}" for v, n in _by_value(used)))
    highest = max(1, int(used.max()))
    for place, (value, n) in enumerate(_by_value(used)):
        height = 64 * n / highest
        c.bar(6 + 22 * place, 70 - height, 16, height, "f s2", f"{value:g}: {n}")
        c.text(14 + 22 * place, 86, f"{value:g}", "m")
    return f"<div><p>{esc(facts)}</p>{table(header, rows)}{drawing(c)}</div>"


def _by_value(used: Any) -> list[tuple[float, int]]:
    """Counts by value, the two zeros as one."""
    from annie_quant import nvfp4

    found: dict[float, int] = {}
    for value, n in zip(nvfp4.E2M1_VALUES.tolist(), used.tolist(), strict=True):
        found[value + 0.0] = found.get(value + 0.0, 0) + n
    return sorted(found.items())


def _square(value: float) -> str:
    strength = abs(float(value)) / 6
    colour = f"rgba(200,69,47,{strength:.2f})" if value < 0 else f"rgba(31,111,178,{strength:.2f})"
    style = f"display:inline-block;width:2.1em;text-align:center;background:{colour}"
    return f'<span style="{style}">{value:g}</span>'


def audit(found: Any) -> str:
    """checkpoint.Audit: sound or not, the faults, the summary."""
    colour = _COLOURS["pass" if found.ok else "fail"]
    verdict = "sound" if found.ok else f"{len(found.findings)} faults"
    head = f'<p><b style="color:{colour}">{"✓" if found.ok else "✗"} {esc(verdict)}</b> {esc(found.path)}</p>'
    faults = table(["fault", "where", "what"], [(f.code, f.tensor, f.message) for f in found.findings[:20]])
    rows = [
        (name(k), ", ".join(map(str, v)) if isinstance(v, list) else v) for k, v in found.to_dict()["summary"].items()
    ]
    left = _CELL.replace("right;white-space:nowrap", "left;vertical-align:top")
    facts = "".join(f'<tr><td style="{left}">{esc(k)}</td><td style="{left}">{esc(v)}</td></tr>' for k, v in rows)
    return f"<div>{head}{faults if found.findings else ''}<table><tbody>{facts}</tbody></table></div>"


def timings(found: Any) -> str:
    """stream.Timings: a row a request, and when the pieces of each answer arrived."""
    records = found.records()[:SHOWN_REQUESTS]
    columns = {"first_content_ms": "TTFT content, ms", "tpot_ms": "TPOT, ms", "e2e_ms": "E2E, ms"}
    rows = [
        [
            r.get("tag") or f"request {i}",
            *(significant(r.get(k)) for k in columns),
            count(r.get("completion_tokens")),
            r.get("error") or r.get("finish_reason") or "",
        ]
        for i, r in enumerate(records)
    ]
    more = f"{len(found)} requests" + (f", the first {len(records)} shown" if len(found) > len(records) else "")
    return (
        f"<div>{table(['request', *columns.values(), 'tokens', 'ended'], rows, more)}{drawing(_ticks(records))}</div>"
    )


def _ticks(records: Sequence[Mapping[str, Any]]) -> Canvas:
    streams = []
    for record in records:
        firsts = [number(record.get(f"first_{kind}_ms")) for kind in ("reasoning", "content", "tool")]
        at = min((v for v in firsts if v is not None), default=None)
        times = [] if at is None else [at]
        for gap in record.get("itl_ms") or ():
            times.append(times[-1] + gap)
        streams.append(times)
    end = max((t[-1] for t in streams if t), default=1.0) or 1.0
    c = Canvas(680, 24 * len(streams) + 36, "Pieces of each answer as they arrived", f"{len(streams)} streams")
    place = svg.scale(0, end, 60, 670)
    svg.x_axis(c, place, svg.ticks(0, end, 6), 0, 24 * len(streams), title="milliseconds since the request")
    for index, (record, times) in enumerate(zip(records, streams, strict=True)):
        y = 24 * index + 12
        c.text(52, y + 4, str(record.get("tag") or index)[:8], "e")
        if times:
            c.line(place(0), y, place(times[0]), y, "l s2", f"first after {significant(times[0])} ms")
            c.parts.append(f'<path d="{"".join(f"M{place(t):.1f} {y - 7}v14" for t in times)}" class="l s2"/>')
    return c


class Gates:
    """Gate tables of one side or several: {title: {gate: row}} as judge.gate_table and evaluate give them."""

    def __init__(self, sides: Mapping[str, Mapping[str, Any]]) -> None:
        self.sides: dict[str, dict[str, dict[str, Any]]] = msgspec.to_builtins(dict(sides))

    def _repr_html_(self) -> str:
        gates = list(dict.fromkeys(g for rows in self.sides.values() for g in rows))
        rows = [
            [
                next(r.get("title") or name(gate) for s in self.sides.values() if (r := s.get(gate))),
                *(Html(_gate(side.get(gate))) for side in self.sides.values()),
            ]
            for gate in gates
        ]
        return table(["gate", *self.sides], rows, "passes of n with their 95 % Wilson interval; | the threshold")

    def __repr__(self) -> str:
        return "\n".join(
            f"{title}: " + ", ".join(f"{g} {r['passes']:g}/{r['n']:g} {r['verdict']}" for g, r in rows.items())
            for title, rows in self.sides.items()
        )


def _gate(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "—"
    verdict = str(row.get("verdict", ""))
    c = Canvas(96, 14, f"{share(rate(dict(row)))}", bounds(row.get("low"), row.get("high"), share))
    c.line(2, 7, 94, 7, "g")
    low, high = number(row.get("low")), number(row.get("high"))
    if low is not None and high is not None:
        c.line(2 + 92 * low, 7, 2 + 92 * high, 7, "w s2")
    if (threshold := number(row.get("threshold"))) is not None:
        c.line(2 + 92 * threshold, 1, 2 + 92 * threshold, 13, "h")
    c.dot(2 + 92 * rate(dict(row)), 7, "f s2", 3)
    words = f"{count(row['passes'])}/{count(row['n'])} {SIGNS.get(verdict, '')}"
    return f'<span style="color:{_COLOURS.get(verdict, "inherit")}">{esc(words)}</span> {drawing(c)}'
