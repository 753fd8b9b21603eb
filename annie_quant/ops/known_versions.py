"""Versions of serving software with a known fault on some GPU or kind of model: assets/known_bad_versions.json.

The list has what was reported in the thread that a row names, as of its date. A version that is in no row is not thereby right.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import msgspec

from annie_quant.checkpoint.loader_support import key
from annie_quant.core.files import ASSETS
from annie_quant.models import Family


class KnownBad(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A fault of a package's versions from `first` to `last`, both included; "" for no limit.

    gpu: beginning of the compute capability that has it; model: "deltanet" or "experts" where only such models have it.
    """

    package: str
    effect: str
    fix: str
    source: str
    date: str
    first: str = ""
    last: str = ""
    gpu: str = ""
    model: str = ""

    def concerns(self, package: str, version: str, capability: str, family: Family | None) -> bool:
        """Return whether a version has the fault. capability: "" for an unknown GPU; family: None for any model."""
        found = key(version)
        in_range = (not self.first or key(self.first) <= found) and (not self.last or found <= key(self.last))
        there = not self.gpu or capability.startswith(self.gpu)
        concerned = not self.model or family is None or getattr(family, self.model) is not None
        return package == self.package and in_range and there and concerned


@cache
def rows() -> list[KnownBad]:
    return msgspec.json.decode((ASSETS / "known_bad_versions.json").read_bytes(), type=list[KnownBad])


def find(
    versions: Iterable[tuple[str, str]], capability: str = "", family: Family | None = None
) -> list[tuple[str, KnownBad]]:
    """Return the known faults of (package, version), each with the version.

    capability: of the GPU, as "12.1".
    family: of the model that is served.
    """
    return [
        (version, row)
        for package, version in versions
        for row in rows()
        if row.concerns(package, version, capability, family)
    ]
