"""Numbers and foreign text as a reader meets them: units said, digits that mean something, nothing that can act.

Model output is hostile until shown otherwise: control characters, text-direction overrides and lone surrogates are
written out as visible marks here, once, for every place that shows text. Escaping for HTML is the template's work.
"""

from __future__ import annotations

import math
import re
from typing import Any

DASH = "—"
# C0 without tab and newline, DEL and C1, separators, bidi marks and isolates, surrogates, specials, variation tags.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    "\ufff0-\uffff\U000e0000-\U000e0fff]"
)


def clean(text: Any) -> str:
    """Text that cannot steer what shows it: unsafe characters become ⟨U+XXXX⟩, carriage returns line ends."""
    text = str(text).replace("\r\n", "\n")
    return _UNSAFE.sub(lambda found: f"⟨U+{ord(found.group()):04X}⟩", text)


def number(value: Any) -> float | None:
    """A finite float, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def significant(value: Any, least_decimals: int = 0) -> str:
    """About three digits: 0.0123, 1.23, 12.3, 123, 12 345."""
    value = number(value)
    if value is None:
        return DASH
    if value == 0:
        return "0"
    decimals = max(least_decimals, min(6, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{decimals}f}".replace(",", "\u202f")


def count(value: Any) -> str:
    value = number(value)
    return DASH if value is None else f"{value:,.0f}".replace(",", "\u202f")


def share(value: Any) -> str:
    """A share of one as a percentage: 100 %, 97.4 %, 0.31 %."""
    value = number(value)
    if value is None:
        return DASH
    if value in (0.0, 1.0):
        return f"{value:.0%}".replace("%", "\u00a0%")
    digits = 2 if min(value, 1 - value) < 0.01 else 1
    return f"{100 * value:.{digits}f}\u00a0%"


def size(size_bytes: Any) -> str:
    """Decimal units, as disks and model pages count."""
    value = number(size_bytes)
    if value is None:
        return DASH
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{significant(value / scale)}\u00a0{unit}"
    return f"{value:.0f}\u00a0B"


def p_value(value: Any) -> str:
    value = number(value)
    if value is None:
        return DASH
    return "< .0001" if value < 1e-4 else f"{value:.4f}".lstrip("0") if value < 1 else "1"


def seconds(value: Any) -> str:
    value = number(value)
    if value is None:
        return DASH
    return f"{value:.1f}\u00a0s" if value < 90 else f"{int(value // 60)}\u00a0min\u00a0{value % 60:.0f}\u00a0s"


def bounds(low: Any, high: Any, write: Any = significant) -> str:
    return "" if number(low) is None or number(high) is None else f"{write(low)}–{write(high)}"


def name(key: Any) -> str:
    """An identifier as words."""
    return clean(key).replace("_", " ")
