"""The outcome in plain words: one sentence, whether it passed, the reasons, and what cannot be concluded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def verdict(aggregates: Mapping[str, Any], candidate: str | None = None) -> dict[str, Any]:
    return {"sentence": "", "passed": False, "reasons": [], "caveats": []}
