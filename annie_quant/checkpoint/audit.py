"""Audit a checkpoint: find every fault that can be known before a server loads it.

A finding is a fault: a sound checkpoint has none. Other properties are in the summary.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

from annie_quant.checkpoint import (
    auxiliary_checks,
    checks,
    completeness,
    dialects,
    expert_checks,
    loader_support,
    prompt_files,
    runtime_names,
    settings_checks,
    source_diff,
)
from annie_quant.checkpoint.linears import Linear, QuantConfig, is_linear, label_of, owned_tensors
from annie_quant.checkpoint.shards import ModelFolder, ShardError
from annie_quant.checkpoint.size import folder_size
from annie_quant.documents import Audit, AuditSummary


def audit(path: str | os.PathLike[str], source: str | os.PathLike[str] | None = None) -> Audit:
    """Audit a model folder, and compare it with the bf16 checkpoint it was made from where `source` is given.

    Faults of the files themselves (a missing or truncated shard, an invalid header) are findings, too.
    Raises ShardError where the folder does not exist.
    """
    result = Audit(str(path))
    try:
        folder = ModelFolder(path)
        dialect = dialects.of(folder)
        linears = dialect.linears(folder) if dialect else {}
        config = dialects.config(folder)
    except ShardError as error:
        if error.code == "no_folder":
            raise
        result.add(error.code, error.tensor, error.message)
        return result
    if dialect is None and not settings_checks.check_method(folder, result):
        result.summary.size_bytes = folder.weight_bytes
        return result
    for linear in linears.values():
        result.tensors.append(checks.check_linear(folder, linear, config, result))
    owned = owned_tensors(linears.values())
    for name in folder:
        if name not in owned:
            result.tensors.append(checks.check_plain(folder, name, result))
    checks.check_fused(folder, linears, result)
    expert_checks.check(folder, linears, config, result)
    settings_checks.check_kv_cache(folder, config, result)
    settings_checks.check_settings(folder, dialect, linears, config, result)
    runtime_names.check(folder, result)
    original = ModelFolder(source) if source is not None else None
    auxiliary_checks.check(folder, original, linears, result)
    completeness.check(folder, original, linears, result)
    if original is not None:
        source_diff.compare_to_source(folder, original, linears, result)
        prompt_files.check(folder.path, original.path, result)
    result.summary = summarize(folder, dialect.NAME if dialect else "plain", linears, config, result)
    return result


def summarize(
    folder: ModelFolder, dialect: str, linears: dict[str, Linear], config: QuantConfig, result: Audit
) -> AuditSummary:
    """Return what is quantized, what is not, the sizes, and which servers load it."""
    owned = owned_tensors(linears.values())
    plain = [n for n in folder if n not in owned]
    size = folder_size(folder, linears)
    servers = loader_support.verdicts(folder, linears, config, result.findings)
    return AuditSummary(
        dialect=dialect,
        algorithm=config.algo or "none",
        quantized=count_kinds(linears),
        unquantized=count_kinds(
            part.removesuffix(".weight")
            for n in plain
            for part in folder.parts_of(n) or [n]
            if is_linear(part, folder.info(part).shape)
        ),
        weights=size.weights,
        size_bytes=size.size_bytes,
        bits_per_weight=size.bits_per_weight,
        bits_per_quantized_weight=size.bits_per_quantized_weight,
        shards=len(folder.shards),
        mtp=auxiliary_checks.describe_mtp(folder, linears),
        loads=[str(support) for support in servers],
        servers=servers,
    )


def count_kinds(modules: Iterable[str]) -> list[str]:
    """Count module names by their last two names: "24 x mlp.down_proj", "6144 x experts.up_proj"."""
    counts = Counter(label_of(n) for n in modules)
    return [f"{n} x {kind}" if n > 1 else kind for kind, n in sorted(counts.items())]
