"""Reading a checkpoint for everything that can be known to be wrong before a server loads it.

A finding is a fault: a sound checkpoint has none. What was merely noticed is in the summary.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from annie_quant.checkpoint import checks, dialects, loader_support, runtime_names
from annie_quant.checkpoint.linears import Linear, QuantConfig, is_linear
from annie_quant.checkpoint.shards import ModelFolder, ShardError


@dataclass(frozen=True)
class Finding:
    """One fault: a code that tests and scripts can rely on, the tensor or module, and a sentence."""

    code: str
    tensor: str
    message: str


@dataclass
class Audit:
    """The outcome. `summary` is for reading; `tensors` has one row for each linear and each kept tensor."""

    path: str
    findings: list[Finding] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    tensors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    def add(self, code: str, tensor: str, message: str) -> None:
        self.findings.append(Finding(code, tensor, message))

    def to_dict(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "ok": self.ok,
            "findings": [{"code": f.code, "tensor": f.tensor, "message": f.message} for f in self.findings],
            "summary": self.summary,
            "tensors": self.tensors,
        }


def audit(path: str | os.PathLike[str], source: str | os.PathLike[str] | None = None) -> Audit:
    """Audit a model folder, against the bf16 checkpoint it was made from where `source` is given.

    Faults of the files themselves (a missing or truncated shard, a header that lies) are findings too. A folder that
    is not there raises CheckpointError.
    """
    result = Audit(str(path))
    try:
        folder = ModelFolder(path)
        dialect = dialects.of(folder)
        linears = dialect.linears(folder) if dialect else {}
        config = dialect.config(folder) if dialect else QuantConfig("", "", None, [])
    except ShardError as error:
        if error.code == "no_folder":
            raise
        result.add(error.code, error.tensor, error.message)
        result.summary = {"size_bytes": None, "loads": []}
        return result
    if dialect is None and not checks.known_method(folder, result.add):
        result.summary = {"size_bytes": folder.weight_bytes, "loads": []}
        return result
    for linear in linears.values():
        result.tensors.append(checks.linear(folder, linear, config, result.add))
    owned = {t for x in linears.values() for t in x.tensors()}
    for name in folder:
        if name not in owned:
            result.tensors.append(checks.plain(folder, name, result.add))
    checks.fused(folder, linears, result.add)
    checks.configuration(folder, dialect, linears, config, result.add)
    runtime_names.check(folder, result.add)
    if source is not None:
        from annie_quant.checkpoint import source_diff

        source_diff.compare_to_source(folder, ModelFolder(source), linears, result)
    result.summary = summarize(folder, dialect.NAME if dialect else "plain", linears, config, result)
    return result


def summarize(
    folder: ModelFolder, dialect: str, linears: dict[str, Linear], config: QuantConfig, result: Audit
) -> dict[str, Any]:
    """What is quantized, what is not, how large it is and who can load it."""
    quantized_bytes = quantized_weights = 0
    for linear in linears.values():
        quantized_bytes += sum(folder.info(t).size_bytes for t in linear.tensors())
        try:
            rows, columns = linear.shape(folder)
        except ShardError:
            continue
        quantized_weights += rows * columns
    kept = [n for n in folder if n not in {t for x in linears.values() for t in x.tensors()}]
    kept_weights = sum(folder.info(n).elements for n in kept)
    total = quantized_weights + kept_weights
    return {
        "dialect": dialect,
        "algorithm": config.algo or "none",
        "quantized": by_kind(linears),
        "kept": by_kind(n.removesuffix(".weight") for n in kept if is_linear(n, folder.info(n).shape)),
        "weights": total,
        "size_bytes": folder.weight_bytes,
        "bits_per_weight": round(8 * folder.weight_bytes / total, 3) if total else 0.0,
        "bits_per_quantized_weight": round(8 * quantized_bytes / quantized_weights, 3) if quantized_weights else None,
        "shards": len(folder.shards),
        "loads": loader_support.verdicts(folder, linears, config, result.findings),
    }


def by_kind(names: Any) -> list[str]:
    """Module names counted by their last two parts: "24 x mlp.gate_proj"."""
    counts = Counter(".".join(n.split(".")[-2:]) if "." in n else n for n in names)
    return [f"{n} x {kind}" if n > 1 else kind for kind, n in sorted(counts.items())]
