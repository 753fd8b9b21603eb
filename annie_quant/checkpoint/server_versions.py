"""From which version on servers load a checkpoint, by the features that it needs: assets/server_versions.json.

The table has what was read in the servers' sources at its date, or what a pull request states. A feature without a row was not
read; since: null says that no version that was read has it.
"""

from __future__ import annotations

import re
from functools import cache

import msgspec

from annie_quant.checkpoint.dialects import QuantizedFolder, compressed_tensors, fp8
from annie_quant.checkpoint.linears import FP8_DYNAMIC, HEAD
from annie_quant.core.files import ASSETS

MIXED, W4A16 = "MIXED_PRECISION", "W4A16_NVFP4"
CONVERTED = {"llama.cpp"}  # servers that load a file that is made from the folder


class Feature(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """since: the first version that has it, of those that were read; None: none."""

    since: str | None
    source: str


class ServerFeatures(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """newest: of the versions that were read; read: which they were, how and when."""

    newest: str
    read: str
    features: dict[str, Feature]


class LoadingVersions(msgspec.Struct, frozen=True):
    """The versions of a server that load a folder.

    since: the first one; "" where that is not known, None where no version that was read loads it.
    reason: the feature that decides, with its source. read: what the table rests on.
    """

    server: str
    since: str | None
    reason: str
    read: str

    def __str__(self) -> str:
        versions = (
            f"from {self.since}" if self.since else "no version that was read" if self.since is None else "not known"
        )
        return f"{self.server}: {versions} ({self.reason}; {self.read})"


@cache
def table() -> dict[str, ServerFeatures]:
    return msgspec.json.decode((ASSETS / "server_versions.json").read_bytes(), type=dict[str, ServerFeatures])


def needed(model: QuantizedFolder) -> list[str]:
    """Return the features of a server that a folder needs, by the names of the table."""
    architectures = model.folder.config.get("architectures")
    classes = [str(c) for c in architectures[:1]] if isinstance(architectures, list) else []
    if not model.linears or model.config.method == fp8.NAME:
        return classes
    config = model.config
    algorithms = {config.algo_of(name) for name in model.linears} if config.layers else {config.algo}
    if config.method == compressed_tensors.NAME:
        kinds = [f"compressed-tensors {a}" for a in sorted(algorithms) if a in ("NVFP4", W4A16)]
    elif config.algo == MIXED:
        kinds = [MIXED, *(f"{a} in {MIXED}" for a in (W4A16, FP8_DYNAMIC) if a in algorithms)]
    else:
        kinds = [config.algo]
    head = [f"quantized head of {model.folder.family.name.removesuffix(' MoE')}"] if HEAD in model.linears else []
    return [*classes, *kinds, *head]


def versions(model: QuantizedFolder) -> list[LoadingVersions]:
    """Return from which version on each server loads a folder, as far as the table knows."""
    result = []
    for server, known in table().items():
        features = needed(model) if server not in CONVERTED else ["GGUF NVFP4"] if model.linears else []
        rows = {name: known.features.get(name) for name in features}
        unknown = [name for name, row in rows.items() if row is None]
        found = {name: row for name, row in rows.items() if row is not None}
        never = next(((n, r) for n, r in found.items() if r.since is None), None)
        if never:
            result.append(LoadingVersions(server, None, f"{never[0]}: {never[1].source}", known.read))
        elif unknown or not found:
            result.append(
                LoadingVersions(server, "", f"{', '.join(unknown) or 'a 16-bit model'} was not read", known.read)
            )
        else:
            name, row = max(found.items(), key=lambda item: key(item[1].since or ""))
            result.append(LoadingVersions(server, row.since, f"{name}: {row.source}", known.read))
    return result


def key(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version or build (b9123); what follows, as in 0.28.1rc1.dev43, does not count."""
    release = re.split(r"[a-zA-Z+]", version.lstrip("bv"))[0]
    return (*map(int, re.findall(r"\d{1,6}", release)[:3]), 0, 0, 0)[:3]
