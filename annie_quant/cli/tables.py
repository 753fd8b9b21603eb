"""Tables of gates as plain text that fits a terminal: the reference first, one column group per side, or one row per side."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from annie_quant import documents
from annie_quant.judge.decision import POOLED, member_verdict
from annie_quant.judge.decision.wording import is_change, points, title

WIDTH = 80
RIGHT_OR_WRONG = "Right or wrong (by labels and rules):"
CHANGED = "Changed (compared with bf16's own answers; a change is not an error):"
INFORMATION = "For information, without a verdict:"
ABSOLUTE: dict[documents.Outcome, str] = {
    "pass": "meets",
    "fail": "misses",
    "undecided": "undecided",
}


JudgedSide = documents.ServedSide | documents.OfflineSide | documents.SearchNumerics


@dataclass(frozen=True)
class Column:
    """One side: its gates, and its answers paired with the reference's (empty where there is none)."""

    name: str
    gates: Mapping[str, documents.GateResult]
    paired: Mapping[str, documents.PairedGate] = field(default_factory=dict)
    pooled: documents.PooledGates | None = None

    @classmethod
    def of(cls, name: str, side: JudgedSide) -> Column:
        return cls(name, side.gates, side.paired, side.pooled)

    @property
    def verdict(self) -> str:
        return member_verdict(self.paired, self.pooled).verdict if self.paired else "no reference"


def gate_lines(
    reference: Mapping[str, documents.GateResult] | None,
    columns: Sequence[Column],
    width: int = WIDTH,
    name: str = "bf16",
) -> list[str]:
    """Return two tables, right or wrong and changed, with one row per gate and one column per side.

    reference: its gates, the first column of each table, under `name`. A cell has the passes, the
        difference in points and the verdict; "finds" is the smallest true loss, in points, that n
        prompts find in 80 % of runs.
    """
    gates = _ordered([*([reference] if reference else []), *(c.gates for c in columns)])
    groups: dict[str, dict[str, documents.GateResult]] = {}
    for gate, result in gates.items():
        heading = CHANGED if is_change(gate) else RIGHT_OR_WRONG
        groups.setdefault(INFORMATION if result.advisory else heading, {})[gate] = result
    lines: list[str] = []
    for heading in (RIGHT_OR_WRONG, CHANGED, INFORMATION):
        if heading in groups:
            lines += ["", heading] if lines else [heading]
            lines += _gate_rows(groups[heading], reference, columns, width, name)
    return [line[:width].rstrip() for line in lines]


def _gate_rows(
    gates: Mapping[str, documents.GateResult],
    reference: Mapping[str, documents.GateResult] | None,
    columns: Sequence[Column],
    width: int,
    name: str,
) -> list[str]:
    """Return one row per gate, in as many tables as the width needs."""
    n = {gate: _most_answers(columns, gate) or result.n for gate, result in gates.items()}
    head = [["gate", *(result.title or title(gate) for gate, result in gates.items())]]
    head.append(["n", *map(str, n.values())])
    losses = [_finds(columns, gate) for gate in gates]
    if any(losses):
        head.append(["finds", *losses])
    if reference:
        head.append([name, *(_passes(reference.get(gate), n[gate]) for gate in gates)])
    lines: list[str] = []
    for table in _tables(head, [_column(column, gates, n) for column in columns], width):
        lines += ["", *_rows(table)] if lines else _rows(table)
    return lines


def _most_answers(columns: Sequence[Column], gate: str) -> int:
    answers = [column.gates[gate].n for column in columns if gate in column.gates]
    prompts = [column.paired[gate].n for column in columns if gate in column.paired]
    return max([*answers, *prompts], default=0)


def _tables(
    head: Sequence[list[str]], cells: Sequence[list[str]], width: int
) -> list[list[list[str]]]:
    """Return the columns of each table: the head's, then as many sides as the width has room for, at least one."""
    tables = [list(head)]
    for side in cells:
        if (
            len(tables[-1]) > len(head)
            and sum(map(_width, [*tables[-1], side])) + len(tables[-1]) > width
        ):
            tables.append(list(head))
        tables[-1].append(side)
    return tables


def _ordered(
    tables: Sequence[Mapping[str, documents.GateResult]],
) -> dict[str, documents.GateResult]:
    """Return the gates of all tables, deciding ones first."""
    first: dict[str, documents.GateResult] = {}
    for table in tables:
        for gate, result in table.items():
            if gate not in first or (first[gate].advisory and not result.advisory):
                first[gate] = result
    return dict(sorted(first.items(), key=lambda item: item[1].advisory))


def _finds(columns: Sequence[Column], gate: str) -> str:
    known = [
        loss
        for c in columns
        if gate in c.paired and (loss := c.paired[gate].detectable) is not None
    ]
    return f"{100 * max(known):.1f}" if known else ""


def _passes(result: documents.GateResult | None, n: int) -> str:
    if result is None:
        return "–"
    return str(result.passes) if result.n == n else f"{result.passes}/{result.n}"


def _column(
    column: Column, gates: Mapping[str, documents.GateResult], n: Mapping[str, int]
) -> list[str]:
    cells = [column.name]
    for gate in gates:
        result = column.gates.get(gate)
        pair = column.paired.get(gate)
        text = _passes(result, n[gate])
        if result is not None and pair is not None and pair.n > result.n:
            # A prompt whose answer is cut, or has nothing to judge, is lost.
            text = f"{result.passes}/{result.n}, {pair.n - result.n} missing"
        if result is not None and pair is not None:
            text += f" {points(pair.difference)}"
        if result is not None and not result.advisory:
            text += f" {pair.verdict if pair else ABSOLUTE[result.verdict]}"
        cells.append(text)
    return cells


def _width(cells: Sequence[str]) -> int:
    return max(map(len, cells))


def _rows(columns: Sequence[Sequence[str]]) -> list[str]:
    widths = [_width(column) for column in columns]
    lines = []
    for row in zip(*columns, strict=True):
        cells = []
        for column, cell, width in zip(columns, row, widths, strict=True):
            is_number = column[0] in ("n", "finds")
            cells.append(cell.rjust(width) if is_number else cell.ljust(width))
        lines.append(" ".join(cells).rstrip())
    return lines


def evaluation_lines(evaluation: documents.Evaluation, name: str, width: int = WIDTH) -> list[str]:
    """Return an evaluation's verdict, its gates next to the reference's, the reasons and the requirements."""
    columns = [Column.of(kind, side) for kind, side in evaluation.numerics.items()]
    tables = {"bf16": evaluation.reference_gates, **{c.name: c.gates for c in columns}}
    verdict = evaluation.verdict or documents.PairedVerdict()
    return [
        *verdict_lines(verdict, width),
        "",
        *wrap(f"{name} against {Path(evaluation.reference).name}, passes of n prompts:", width),
        *gate_lines(evaluation.reference_gates, columns, width),
        "",
        *reason_lines(verdict, width),
        *requirement_lines(tables, width),
    ]


def served_lines(served: Mapping[str, documents.ServedSide], width: int = WIDTH) -> list[str]:
    """Return the gates of a benchmark's sides next to their reference's, and the absolute requirements."""
    judged = {name: side for name, side in served.items() if side.judged_by}
    references = dict.fromkeys(str(side.judged_by) for side in judged.values())
    lines: list[str] = []
    for reference in references:
        columns = [Column.of(n, side) for n, side in judged.items() if side.judged_by == reference]
        own = (
            served[reference].gates if reference in served else None
        )  # bf16 may be of an earlier run
        lines += [*gate_lines(own, columns, width, reference), ""]
    alone = [
        Column(name, side.gates)
        for name, side in served.items()
        if name not in {*judged, *references}
    ]
    lines += [*gate_lines(None, alone, width), ""] if alone else []
    return [*lines, *requirement_lines({name: side.gates for name, side in served.items()}, width)]


def prefill_lines(
    prefill: Mapping[str, Sequence[documents.PrefillLine]], width: int = WIDTH
) -> list[str]:
    """Return per side and state of its cache the time to the first token over computed tokens."""
    lines = []
    for name, of_side in prefill.items():
        for line in of_side:
            if line.ms_per_1000 is None or line.start_ms is None:
                continue
            text = f"{name}, {line.cache}: first token after {line.start_ms:.0f} ms"
            text += f" and {line.ms_per_1000:.1f} ms per 1,000 computed tokens"
            if line.low is not None and line.high is not None:
                text += f" ({line.low:.1f} to {line.high:.1f})"
            text += f", {line.fewest_tokens:,} to {line.most_tokens:,} tokens"
            lines += wrap(text, width)
    return lines


def side_lines(
    columns: Sequence[Column], reference: Column | None = None, width: int = WIDTH
) -> list[str]:
    """Return one row per side: its verdict, and the gates that it does not keep, or misses where there is no reference."""
    rows = [] if reference is None else [(reference.name, "reference", _missed(reference))]
    rows += [(c.name, c.verdict, _not_kept(c) if c.paired else _missed(c)) for c in columns]
    rows.insert(0, ("side", "verdict", "gates that are not kept"))
    widths = [_width([row[0] for row in rows]), _width([row[1] for row in rows])]
    indent = sum(widths) + 2
    lines = []
    for side, verdict, rest in rows:
        wrapped = textwrap.wrap(rest, max(20, width - indent)) or [""]
        lines.append(
            f"{side.ljust(widths[0])} {verdict.ljust(widths[1])} {wrapped[0]}".rstrip()[:width]
        )
        lines += [" " * indent + line for line in wrapped[1:]]
    return lines


def _not_kept(column: Column) -> str:
    judged = member_verdict(column.paired, column.pooled)
    pairs = {**column.paired, POOLED: column.pooled}
    return "; ".join(
        f"{title(gate)} {points(pair.difference)} {pair.verdict}"
        for gate in (*judged.loses, *judged.undecided)
        if (pair := pairs.get(gate)) is not None
    )


def _missed(column: Column) -> str:
    rows = [
        (gate, r)
        for gate, r in column.gates.items()
        if not r.advisory and r.absolute_verdict == "fail"
    ]
    return "; ".join(
        f"misses {r.requirement or r.title or gate} ({r.passes} of {r.n})" for gate, r in rows
    )


def requirement_lines(
    columns: Mapping[str, Mapping[str, documents.GateResult]], width: int = WIDTH
) -> list[str]:
    """Return per side which absolute requirements it meets, misses or leaves undecided. columns: by side."""
    lines = []
    for name, gates in columns.items():
        required = sorted(
            (r.requirement, r.absolute_verdict) for r in gates.values() if r.requirement
        )
        parts = []
        for outcome, word in ABSOLUTE.items():
            numbers = [number for number, own in required if own == outcome]
            if numbers:
                parts.append(f"{word} {' '.join(numbers)}")
        if parts:
            lines += wrap(f"{name} {'; '.join(parts)}", width)
    return lines


def verdict_lines(
    verdict: documents.PairedVerdict | documents.Verdict, width: int = WIDTH
) -> list[str]:
    """Return the first screen: the sentence, where, how sure, what to do next, what was not tested."""
    return [line for text in (verdict.sentence, *verdict.head) for line in wrap(text, width)]


def reason_lines(
    verdict: documents.PairedVerdict | documents.Verdict, width: int = WIDTH
) -> list[str]:
    return [line for reason in verdict.reasons for line in wrap(f"- {reason}", width)]


def wrap(text: str, width: int = WIDTH) -> list[str]:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]


def wrap_tree(line: str, width: int = WIDTH) -> list[str]:
    """Wrap a line of a tree; its further lines are indented under its text."""
    at = next((i for i, character in enumerate(line) if character not in " │├└─"), 0)
    return textwrap.wrap(
        line[at:],
        width,
        initial_indent=line[:at],
        subsequent_indent=" " * at,
        break_on_hyphens=False,
    ) or [line]
