"""Known faults of serving runtimes (R20): errors in a server's log with their fix, its start phases, and faulty versions.

assets/known_errors.json has errors and phases: [pattern, cause, fix] and [pattern, title]; patterns ignore case. Errors of SM121's
kernels are in annie_quant/gemm/known_failures.py. assets/known_bad_versions.json has versions with a fault on some GPU or with some
models: what was reported in the thread that a row names, as of its date. A version that is in no row is not thereby right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

import msgspec

from annie_quant.core.files import ASSETS
from annie_quant.core.host import version_key
from annie_quant.gemm.known_failures import KnownFailure, find_failure
from annie_quant.models import Family


class KnownErrors(msgspec.Struct):
    """phases: (pattern of a line of the log, title), in their order."""

    errors: list[KnownFailure]
    phases: list[tuple[str, str]]


KNOWN = msgspec.json.decode((ASSETS / "known_errors.json").read_bytes(), type=KnownErrors)


def find_error(log: str) -> KnownFailure | None:
    """Return the known error of the first line that has one, or None."""
    failures = (find_failure(line, KNOWN.errors) or find_failure(line) for line in log.splitlines())
    return next(filter(None, failures), None)


def phase(log: str) -> str:
    """Return the phase of a starting server from the newest line of its log that shows one."""
    for line in reversed(log.splitlines()[-400:]):
        for pattern, title in reversed(KNOWN.phases):
            if re.search(pattern, line, re.IGNORECASE):
                return title
    return "starting"


class KnownBad(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A fault of a package's versions from `first` to `last`, both included; "" for no limit.

    gpu: beginning of the compute capability that has it.
    model: "deltanet", "experts" or the beginning of a family's name, where only such models have it.
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
        found = version_key(version)
        in_range = (not self.first or version_key(self.first) <= found) and (
            not self.last or found <= version_key(self.last)
        )
        there = not self.gpu or capability.startswith(self.gpu)
        if family is None:
            # No other version helps where a fault has no end, so it is named for its models alone.
            concerned = not self.model or bool(self.last)
        else:
            concerned = not self.model or self._is_of(family)
        return package == self.package and in_range and there and concerned

    def _is_of(self, family: Family) -> bool:
        if self.model in ("deltanet", "experts"):
            return getattr(family, self.model) is not None
        return family.name.startswith(self.model)


@cache
def bad_versions() -> list[KnownBad]:
    return msgspec.json.decode(
        (ASSETS / "known_bad_versions.json").read_bytes(), type=list[KnownBad]
    )


def faults_of(
    versions: Iterable[tuple[str, str]], capability: str = "", family: Family | None = None
) -> list[tuple[str, KnownBad]]:
    """Return the known faults of (package, version), each with the version.

    capability: of the GPU, as "12.1".
    family: of the model that is served.
    """
    return [
        (version, row)
        for package, version in versions
        for row in bad_versions()
        if row.concerns(package, version, capability, family)
    ]
