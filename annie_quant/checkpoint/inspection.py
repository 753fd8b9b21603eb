"""Audit a checkpoint: find every fault that can be detected before a server loads it.

A finding is a fault: a sound checkpoint has none. Other properties are in the summary.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from annie_quant import models
from annie_quant.checkpoint import dialects, loader_support, prompt_files, remote, runtime_names
from annie_quant.checkpoint.checks import (
    OF_SOURCE_VALUES,
    OF_VALUES,
    completeness,
    contents,
    finding_of,
    settings,
    tensors,
)
from annie_quant.checkpoint.checks.source import source_differences
from annie_quant.checkpoint.dialects import QuantizedFolder
from annie_quant.checkpoint.linears import is_linear, label_of
from annie_quant.checkpoint.remote import OpenedFolder
from annie_quant.checkpoint.shards import ModelFolder, ShardError, read_object
from annie_quant.checkpoint.size import folder_size
from annie_quant.checkpoint.template_lint import start_lint
from annie_quant.core.errors import UsageError
from annie_quant.documents import Audit, AuditSummary, Finding, TensorRow

NOT_FROM_SOURCE = ("large_error", "differs_from_source", "not_in_source", "source_shape")
# Where more of the compared tensors differ, the reference is another model; else the export is at
# fault.
MIN_DIFFERING_SHARE = 0.5
# With fewer unquantized linears, their values do not show whether the reference is the source
MIN_PLAIN_LINEARS = 4
MAX_NOTES = 3  # findings that the notes of an evaluation list


def audit(path: str | os.PathLike[str], source: str | os.PathLike[str] | None = None) -> Audit:
    """Audit a model folder, or from afar what the headers and small files of one show.

    path: a folder, hf:OWNER/NAME[@REVISION], or the URL of a folder.
    source: the bf16 checkpoint that it was made from, given in the same ways; its tensors are
        compared.

    Faults of the files themselves (a missing or truncated shard, an invalid header) are findings,
    too. Raises ShardError where the folder does not exist, and the errors of `remote.opened`.
    """
    if source is not None and remote.is_address(source) and not remote.is_address(path):
        raise UsageError(
            f"{source}: the source of a local checkpoint is compared by its values",
            "download it, and give the folder",
        )
    with remote.opened(path) as here:
        result = audit_folder(here, source)
        if here.remote:
            for number, finding in enumerate(result.findings):
                message = finding.message.replace(str(here.path), here.address)
                result.findings[number] = Finding(finding.code, finding.tensor, message)
        return result


def audit_folder(here: OpenedFolder, source: str | os.PathLike[str] | None) -> Audit:
    """Audit an opened folder. source: a path or an address."""
    not_checked = sorted(OF_VALUES | (OF_SOURCE_VALUES if source is not None else set()))
    result = Audit(here.address)
    if here.remote:
        result.remote = msgspec.structs.replace(here.remote, not_checked=not_checked)
    try:
        model = dialects.read(ModelFolder(here.path, headers_only=here.remote is not None))
    except ShardError as error:
        if error.code == "no_folder":
            raise
        result.findings = [finding_of(error)]
        return result
    unread = settings.unread_method(model)
    if unread:
        result.findings = [unread]
        result.summary = AuditSummary(size_bytes=model.folder.weight_bytes)
        return result
    with contextlib.ExitStack() as stack:
        original = None
        if source is not None:
            there = stack.enter_context(remote.opened(source))
            original = ModelFolder(there.path, headers_only=there.remote is not None)
        lint = start_lint(model.folder.path)
        result.findings, result.tensors = check_all(model, original)
        result.template = lint.result()
    result.summary = audit_summary(model, result.findings)
    return result


def check_all(
    model: QuantizedFolder, original: ModelFolder | None
) -> tuple[list[Finding], list[TensorRow]]:
    """Return the findings of all checks, and a row per tensor. original: the source."""
    folder = model.folder
    inspected = [tensors.inspect_linear(model, linear) for linear in model.linears.values()]
    inspected += [tensors.inspect_plain(folder, name) for name in model.unowned]
    rows = [row for row, _ in inspected]
    # Both checks need tokenizer.json, and a large one takes a second to parse.
    read_json = functools.cache(read_object)
    findings = list(contents.check_contents(model, read_json))
    prompt_faults = []
    if original is not None:
        prompt_faults = prompt_files.differences(folder.path, original.path, read_json)
    read_json.cache_clear()
    findings += [fault for _, faults in inspected for fault in faults]
    for check in (
        tensors.check_fused,
        completeness.check_experts,
        settings.check_kv_cache,
        settings.check,
    ):
        findings += check(model)
    findings += runtime_names.check_names(folder)
    findings += completeness.check_auxiliary(model, original)
    findings += completeness.check_decoder(model, original)
    if original is not None:
        differences = source_differences(model, original, {(f.code, f.tensor) for f in findings})
        for row in rows:
            row.rel_l2 = differences.rel_l2.get(row.name)
            row.tuned = row.name in differences.tuned
        findings += differences.findings
        findings += prompt_faults
    return findings, rows


def audit_summary(model: QuantizedFolder, findings: Sequence[Finding]) -> AuditSummary:
    """Return what is quantized, what is not, the sizes, and which servers load it."""
    folder = model.folder
    unquantized = [part for n in model.unowned for part in folder.parts_of(n) or [n]]
    size = folder_size(folder, model.linears)
    servers = loader_support.verdicts(model, findings)
    return AuditSummary(
        dialect=model.dialect.NAME if model.dialect else "plain",
        algorithm=model.config.algo or "none",
        quantized=count_labels(model.linears),
        unquantized=count_labels(
            n.removesuffix(".weight") for n in unquantized if is_linear(n, folder.info(n).shape)
        ),
        weights=size.weights,
        size_bytes=size.size_bytes,
        bits_per_weight=size.bits_per_weight,
        bits_per_quantized_weight=size.bits_per_quantized_weight,
        shards=len(folder.shards),
        mtp=completeness.describe_mtp(model),
        kv_cache=settings.describe_kv_cache(model.config.kv_cache),
        loads=[str(support) for support in servers],
        servers=servers,
    )


def count_labels(modules: Iterable[str]) -> list[str]:
    """Count module names by their last two names: "24 x mlp.down_proj", "6144 x experts.up_proj"."""
    counts = Counter(label_of(n) for n in modules)
    return [f"{n} x {label}" if n > 1 else label for label, n in sorted(counts.items())]


# ---- faults that explain an evaluation: the reference is another model, or the export is broken


def export_notes(path: str | os.PathLike[str], reference: str | os.PathLike[str]) -> list[str]:
    """Return one line per fault of the export, or one if the reference is not its source.

    A checkpoint without quantized tensors and a folder that cannot be read give no lines.
    """
    result = audit(path, source=reference)
    if not result.summary.quantized and not result.findings:
        return []
    other_model = "THE REFERENCE IS NOT ITS SOURCE: {}; differences between the models are no loss of the quantization"
    faults = [f for f in result.findings if f.code in NOT_FROM_SOURCE]
    differing = {f.tensor for f in faults}
    compared = {row.name for row in result.tensors if row.rel_l2 is not None} | differing
    if len(differing) > MIN_DIFFERING_SHARE * len(compared) > 0:
        reason = f"{len(differing)} of {len(compared)} quantized tensors do not come from it ({faults[0].message})"
        return [other_model.format(reason)]
    changed, plain = changed_plain(result, ModelFolder(path))
    if plain >= MIN_PLAIN_LINEARS and changed > MIN_DIFFERING_SHARE * plain:
        reason = f"{changed} of {plain} linears that are not quantized have other values there (a close fine-tune?)"
        return [other_model.format(reason)]
    command = f"annie-quant audit {shlex.quote(str(path))} --source {shlex.quote(str(reference))}"
    texts = [f"{finding.message} ({finding.code})" for finding in result.findings[:MAX_NOTES]]
    if len(result.findings) > MAX_NOTES:
        texts[-1] += f"; and {len(result.findings) - MAX_NOTES} more findings"
    return [f"BROKEN EXPORT: {text}; {command}" for text in texts]


def changed_plain(result: Audit, folder: ModelFolder) -> tuple[int, int]:
    """Return how many of the layers' plain linears differ from the source, and their number.

    Quantization hides a fine-tune that changes weights by a few percent; these linears are copies
    of the source's.
    """
    quantized = {f"{row.name}.weight" for row in result.tensors if row.rel_l2 is not None}
    plain = {
        n
        for n in folder
        if models.layer_of(n) and is_linear(n, folder.info(n).shape) and n not in quantized
    }
    changed = {f.tensor for f in result.findings if f.code == "differs_from_source"}
    return len(plain & changed), len(plain)
