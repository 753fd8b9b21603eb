"""Displays for notebooks: tensors, audits, timings and gates as small HTML tables, with every text escaped.

from annie_quant import notebook
notebook.register()                      # in IPython: nvfp4.Tensor, Audit and Timings show themselves as HTML
notebook.Gates({"naive W4A4": gates})    # tables of gates side by side
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from annie_quant.report.charts.svg import esc
from annie_quant.report.format import DASH, SIGNS, count, interval, name, share, significant, size
from annie_quant.schema import Audit, GateResult

_CELL = "padding:2px 8px;text-align:right;white-space:nowrap"
_COLOURS = {"pass": "#1d7a46", "fail": "#c0392b", "undecided": "#8a6100"}
SHOWN_ROWS, SHOWN_BLOCKS = 6, 2
SHOWN_REQUESTS = 8
SHOWN_FINDINGS = 20


def register(shell: Any = None) -> None:
    """Register the displays with IPython; do nothing outside IPython."""
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
    """Return a table with a left-aligned first column. Cells are escaped unless they are Markup."""

    def cells(row: Sequence[Any], tag: str) -> str:
        first = f'<{tag} style="{_CELL};text-align:left">'
        return "".join(
            (first if i == 0 else f'<{tag} style="{_CELL}">') + (c if isinstance(c, Markup) else esc(c)) + f"</{tag}>"
            for i, c in enumerate(row)
        )

    head = f"<thead><tr>{cells(header, 'th')}</tr></thead>" if header else ""
    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    title = f'<caption style="text-align:left;padding:2px 8px">{esc(caption)}</caption>' if caption else ""
    return f"<table>{title}{head}<tbody>{body}</tbody></table>"


class Markup(str):
    """HTML, which is not escaped again."""


def tensor(t: Any) -> str:
    """nvfp4.Tensor: its size and its first blocks (scale and values)."""
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
            row += [f"{scales[index, block]:g}", Markup("".join(map(_square, values)))]
        rows.append(row)
    header = ["", *(w for _ in range(min(SHOWN_BLOCKS, scales.shape[1])) for w in ("scale", "E2M1 values"))]
    return f"<div><p>{esc(facts)}</p>{table(header, rows)}</div>"


def _square(value: float) -> str:
    strength = abs(float(value)) / 6
    colour = f"rgba(200,69,47,{strength:.2f})" if value < 0 else f"rgba(31,111,178,{strength:.2f})"
    style = f"display:inline-block;width:2.1em;text-align:center;background:{colour}"
    return f'<span style="{style}">{value:g}</span>'


def audit(result: Audit) -> str:
    """checkpoint.Audit: sound or not, the findings, the summary."""
    verdict = "sound" if result.ok else f"{len(result.findings)} faults"
    colour, sign = _COLOURS["pass" if result.ok else "fail"], SIGNS["pass" if result.ok else "fail"]
    head = f'<p><b style="color:{colour}">{sign} {esc(verdict)}</b> {esc(result.path)}</p>'
    rows = [(f.code, f.tensor, f.message) for f in result.findings[:SHOWN_FINDINGS]]
    faults = table(["fault", "where", "what"], rows) if rows else ""
    summary = msgspec.to_builtins(result.summary).items()
    texts = [(name(k), ", ".join(map(str, v)) if isinstance(v, list) else v) for k, v in summary if v not in (None, [])]
    left = _CELL.replace("right;white-space:nowrap", "left;vertical-align:top")
    facts = "".join(f'<tr><td style="{left}">{esc(k)}</td><td style="{left}">{esc(v)}</td></tr>' for k, v in texts)
    return f"<div>{head}{faults}<table><tbody>{facts}</tbody></table></div>"


def timings(result: Any) -> str:
    """stream.Timings: one row per request."""
    records = result.records()[:SHOWN_REQUESTS]
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
    caption = f"{len(result)} requests" + (f", the first {len(records)} shown" if len(result) > len(records) else "")
    header = ["request", *columns.values(), "tokens", "ended"]
    return table(header, rows, caption)


class Gates:
    """Gate tables of one or several sides: {title: {gate: GateResult}}, as judge.gate_table and evaluate return them.

    A result as a dict of JSON values, from run.json, is accepted too.
    """

    def __init__(self, sides: Mapping[str, Mapping[str, Any]]) -> None:
        self.sides = {
            title: {gate: msgspec.convert(r, GateResult, from_attributes=True) for gate, r in results.items()}
            for title, results in sides.items()
        }

    def _repr_html_(self) -> str:
        titles = {
            gate: r.title or name(gate) for results in reversed(self.sides.values()) for gate, r in results.items()
        }
        gates = dict.fromkeys(gate for results in self.sides.values() for gate in results)
        rows = [[titles[gate], *(Markup(_gate(r.get(gate))) for r in self.sides.values())] for gate in gates]
        return table(["gate", *self.sides], rows, "passes of n with their 95 % Wilson interval")

    def __repr__(self) -> str:
        return "\n".join(
            f"{title}: " + ", ".join(f"{gate} {r.passes}/{r.n} {r.verdict}" for gate, r in results.items())
            for title, results in self.sides.items()
        )


def _gate(result: GateResult | None) -> str:
    if result is None:
        return DASH
    text = f"{count(result.passes)}/{count(result.n)} {SIGNS[result.verdict]}"
    between = interval(result.low, result.high, share)
    return f'<span style="color:{_COLOURS[result.verdict]}">{esc(text)}</span> {esc(between)}'
