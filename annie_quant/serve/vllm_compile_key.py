"""The part of vLLM's compile-cache key that stands for this package's kernels.

vLLM keeps compiled graphs by a hash of its configuration, which does not know what a plug-in does: a graph with Marlin's calls was
reused with our kernel, and the other way round. This adds a string to VllmConfig.compute_hash, from which vLLM derives the folders
of both its caches (torch.compile's and ahead-of-time compilation's).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

LENGTH = 10  # as vLLM's own hash


def extend(config_class: Any, part: Callable[[], str]) -> None:
    """Make config_class.compute_hash depend on part(), which is called each time. Does nothing when called again."""
    original = config_class.compute_hash
    if hasattr(original, "annie_quant_part"):
        return

    def compute_hash(self: Any) -> str:
        return hashlib.sha256(f"{original(self)} {part()}".encode()).hexdigest()[:LENGTH]

    compute_hash.annie_quant_part = part  # type: ignore[attr-defined]
    config_class.compute_hash = compute_hash
