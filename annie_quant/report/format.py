"""Numbers as pages show them.

A page shows text from models and from other machines: each output format calls
annie_quant.core.text.visible for every text it writes. Escaping for HTML is the template's task.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from annie_quant.documents import Outcome, PredictedFirstToken, Standing

DASH = "—"
SIGNS = {
    "pass": "✓",
    "fail": "✗",
    "undecided": "?",
    "keeps": "✓",
    "loses": "✗",
    "fragile": "✗",
}
# Classes of the page's style sheet.
CSS: dict[Standing, Outcome] = {
    "keeps": "pass",
    "loses": "fail",
    "fragile": "fail",
    "undecided": "undecided",
}


def significant(value: float | None) -> str:
    """Three significant digits: 0.0123, 1.23, 12.3, 123, 12 345."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    decimals = max(0, min(6, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{decimals}f}".replace(",", "\u202f")


def signed(value: float | None) -> str:
    text = significant(value).replace("-", "−")
    return f"+{text}" if value is not None and value > 0 else text


def count(value: float | None) -> str:
    return DASH if value is None else f"{value:,.0f}".replace(",", "\u202f")


def share(value: float | None) -> str:
    """Return a share as a percentage: 100 %, 97.4 %, 0.31 %."""
    if value is None:
        return DASH
    if value in (0.0, 1.0):
        return f"{value:.0%}".replace("%", "\u00a0%")
    digits = 2 if min(value, 1 - value) < 0.01 else 1
    return f"{100 * value:.{digits}f}\u00a0%"


def percent(value: float) -> str:
    """Return a share as a percentage without its unit."""
    return share(value).removesuffix("\u00a0%")


def size(size_bytes: float | None) -> str:
    """Return a size in decimal units."""
    if size_bytes is None:
        return DASH
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{significant(size_bytes / scale)}\u00a0{unit}"
    return f"{size_bytes:.0f}\u00a0B"


def first_token(predicted: PredictedFirstToken | None) -> str:
    """Return "279 (226 to 362) at 2,048 tokens, NVIDIA GB10"; without an interval "at least 279 ..."."""
    if predicted is None:
        return DASH
    low = predicted.low_ms
    high = predicted.high_ms
    where = f"{count(predicted.prompt_tokens)} tokens, {predicted.device}"
    if low is None or high is None:
        return f"at least {count(predicted.ms)} at {where}"
    return f"{count(predicted.ms)} ({count(low)} to {count(high)}) at {where}"


def p_value(value: float | None) -> str:
    if value is None:
        return DASH
    if value < 1e-4:
        return "< .0001"
    return f"{value:.4f}".lstrip("0") if value < 1 else "1"


def seconds(value: float | None) -> str:
    if value is None:
        return DASH
    if value < 90:
        return f"{value:.1f}\u00a0s"
    return f"{int(value // 60)}\u00a0min\u00a0{value % 60:.0f}\u00a0s"


def interval(
    low: float | None, high: float | None, write: Callable[[float], str] = significant
) -> str:
    """Both ends of an interval; "" where one is missing."""
    return "" if low is None or high is None else f"{write(low)}–{write(high)}"


def bounds(low: float | None, high: float | None) -> str:
    """Both ends of an interval of differences, with their signs."""
    return DASH if low is None or high is None else f"{signed(low)} to {signed(high)}"


def tolerance(value: float | None) -> str:
    return DASH if value is None else f"± {significant(value)}"


def ends(values: list[int]) -> str:
    """Return the smallest and the largest count: "12–15", or "12" where they are equal."""
    return "–".join(dict.fromkeys(count(v) for v in (min(values), max(values))))


def name(key: str) -> str:
    """Return an identifier as words."""
    return key.replace("_", " ")
