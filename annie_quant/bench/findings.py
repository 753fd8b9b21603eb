"""The findings of a benchmark in words. assets/confounds.json has each code's severity and message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec

from annie_quant.bench.stability import LEAST_SHIFT, DepthRow
from annie_quant.core.files import ASSETS
from annie_quant.documents import Confound, Drift, MemoryGrowth
from annie_quant.documents.results import Severity
from annie_quant.judge.metrics import METRICS
from annie_quant.judge.statistics import LEVEL


class FindingText(msgspec.Struct):
    """A code's severity, unless a finding states another one, and its message with placeholders."""

    severity: Severity
    message: str


TEXTS = msgspec.json.decode((ASSETS / "confounds.json").read_bytes(), type=dict[str, FindingText])


def finding(code: str, *backends: str, **values: object) -> Confound:
    """Return a finding about these backends.

    values: what the message's placeholders stand for; `severity`: instead of the code's.
    """
    text = TEXTS[code]
    names, listed = (joint.join(backends) for joint in (" and ", ", "))
    severity = cast("Severity", values.pop("severity", text.severity))
    message = text.message.format(*backends, names=names, listed=listed, **values)
    return Confound(code=code, severity=severity, message=message, backends=list(backends))


def growth_findings(rows: Mapping[str, MemoryGrowth]) -> list[Confound]:
    """Return one finding per server whose memory grows."""
    growing = {name: row for name, row in rows.items() if row.grows}
    mb = {
        n: {"mb": row.bytes_per_hour / 1e6, "low": row.low / 1e6, "high": row.high / 1e6}
        for n, row in growing.items()
    }
    return [
        finding("memory_growth", name, hours=row.hours, **mb[name]) for name, row in growing.items()
    ]


def drift_findings(rows: Sequence[Drift]) -> list[Confound]:
    """Return one finding per backend whose times changed significantly: about its largest change."""
    largest: dict[str, Drift] = {}
    for row in sorted(rows, key=lambda row: -abs(row.shift)):
        if row.significant:
            largest.setdefault(row.backend, row)
    order = dict.fromkeys(row.backend for row in rows)
    return [_drift_finding(largest[name]) for name in order if name in largest]


def _drift_finding(row: Drift) -> Confound:
    causes, throttles = _causes(row)
    slower = row.shift > 0
    after_s = row.after_s
    severity, direction = ("fault", "slower") if slower else ("note", "faster")
    after = f"{after_s / 60:.1f} minutes" if after_s >= 90 else f"{after_s:.0f} seconds"
    words = {
        "severity": severity,
        "direction": direction,
        "after": after,
        "metric": METRICS[row.metric].title,
    }
    figures = {
        "shift": row.shift,
        "low": row.low,
        "high": row.high,
        "p": row.p_holm or row.p,
        "n": row.n,
    }
    return finding(
        "throttled" if throttles and slower else "drift",
        row.backend,
        causes=causes,
        **words,
        **figures,
    )


def _causes(row: Drift) -> tuple[str, bool]:
    """Return (what the machine did at the same time, whether it throttled)."""
    sure = {name: figures for name, figures in row.machine.items() if figures[2] < LEVEL}
    clock, heat, load = (sure.get(name) for name in ("clock_mhz", "temperature_c", "load_per_core"))
    slower = row.shift > 0
    parts = []
    throttled = False
    if slower and clock and clock[1] < clock[0]:
        parts.append(f"the clock fell from {clock[0]:.0f} to {clock[1]:.0f} MHz (p {clock[2]:.2g})")
        throttled = True
    if slower and heat and heat[1] > heat[0]:
        parts.append(
            f"the temperature rose from {heat[0]:.0f} to {heat[1]:.0f} °C (p {heat[2]:.2g})"
        )
    if slower and row.throttle and row.throttled_after > row.throttled_before:
        parts.append(
            f"the driver reports {row.throttle} in {row.throttled_after:.0%} of the later requests"
        )
        throttled = True
    if slower and load and load[1] > load[0]:
        parts.append(
            f"other work rose from {load[0]:.1f} to {load[1]:.1f} per core (p {load[2]:.2g})"
        )
    if not parts:
        known = "clock_mhz" in row.machine or row.throttle is not None
        return (
            "clocks and temperature did not change with it" if known else "clocks were not recorded"
        ), False
    return ("the machine throttled: " if throttled else "at the same time ") + ", ".join(
        parts
    ), throttled


def depth_findings(rows: Sequence[DepthRow]) -> list[Confound]:
    """Return the deepest significant change of each pair and metric as a note."""
    deepest: dict[tuple[str, str, str], DepthRow] = {}
    for row in rows:
        if row.p_holm is not None and row.p_holm < LEVEL and abs(row.growth) >= LEAST_SHIFT:
            deepest[row.a, row.b, row.metric] = row
    return [_depth_finding(row) for row in deepest.values()]


def _depth_finding(row: DepthRow) -> Confound:
    slower, other = (row.b, row.a) if row.growth > 0 else (row.a, row.b)
    ratios = [row.ratio, row.low, row.high, row.shallow, row.shallow_low, row.shallow_high]
    if slower == row.a:
        ratios = [
            1 / x
            for x in (row.ratio, row.high, row.low, row.shallow, row.shallow_high, row.shallow_low)
        ]
    deep, low, high, shallow, shallow_low, shallow_high = (ratio - 1 for ratio in ratios)
    only = (
        shallow_low - LEAST_SHIFT <= 0 <= shallow_high + LEAST_SHIFT and abs(shallow) < LEAST_SHIFT
    )
    words = {
        "slower": "slower only" if only else "slower, relative to short prompts,",
        "other": other,
    }
    words |= {
        "metric": METRICS[row.metric].title,
        "depth": _tokens(row.depth),
        "shallow_depth": _tokens(row.shallow_depth),
    }
    figures = {"deep": deep, "low": low, "high": high, "p": row.p_holm, "n": row.n_prompts}
    short = {"shallow": shallow, "shallow_low": shallow_low, "shallow_high": shallow_high}
    return finding("slower_at_depth", slower, **words, **figures, **short)


def _tokens(depth: int) -> str:
    return f"{depth // 1024}k" if depth >= 1024 else str(depth)
