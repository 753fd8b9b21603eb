"""A benchmark in the forms that other tools read: results.csv."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def export(run: Mapping[str, Any], folder: str | os.PathLike) -> list[str]:
    return []
