"""Faults that explain an evaluation: the checkpoint was not made from the reference, or its export is broken."""

from __future__ import annotations

import os
import shlex

from annie_quant import models
from annie_quant.checkpoint.audit import audit
from annie_quant.checkpoint.linears import is_linear
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.documents import Audit, Finding

FROM_SOURCE = ("large_error", "differs_from_source", "not_in_source", "source_shape")
LEAST_SHARE = 0.5  # of the compared tensors: one broken tensor is a fault, half of them are another model
LEAST_PLAIN = 4  # linears that were not quantized, whose values are then compared exactly
SHOWN = 3


def export_notes(path: str | os.PathLike[str], reference: str | os.PathLike[str]) -> list[str]:
    """Return one line if the reference is not the checkpoint's source, and else one per fault of the export.

    A checkpoint without quantized tensors and a folder that cannot be read give no lines.
    """
    result = audit(path, source=reference)
    if not result.summary.quantized and not result.findings:
        return []
    differing = {f.tensor for f in result.findings if f.code in FROM_SOURCE}
    compared = {row.name for row in result.tensors if row.rel_l2 is not None} | differing
    if len(differing) > LEAST_SHARE * len(compared) > 0:
        worst = next(f for f in result.findings if f.code in FROM_SOURCE)
        return [
            f"THE REFERENCE IS NOT ITS SOURCE: {len(differing)} of {len(compared)} quantized tensors do not come from it "
            f"({worst.message}); differences between the two models are no loss of the quantization"
        ]
    changed, plain = _changed_plain(result, ModelFolder(path))
    if plain >= LEAST_PLAIN and changed > LEAST_SHARE * plain:
        return [
            f"THE REFERENCE IS NOT ITS SOURCE: {changed} of {plain} linears that are not quantized have other values there (a "
            "close fine-tune?); differences between the two models are no loss of the quantization"
        ]
    command = f"annie-quant audit {shlex.quote(str(path))} --source {shlex.quote(str(reference))}"
    return [f"BROKEN EXPORT: {text}; {command}" for text in _messages(result.findings)]


def _changed_plain(result: Audit, folder: ModelFolder) -> tuple[int, int]:
    """Return how many of the layers' unquantized linears differ from the source, and how many there are.

    Quantization hides a fine-tune that changes weights by a few percent; these linears are copies of the source's.
    """
    quantized = {f"{row.name}.weight" for row in result.tensors if row.rel_l2 is not None}
    plain = {
        name
        for name in folder
        if models.layer_of(name) and is_linear(name, folder.info(name).shape) and name not in quantized
    }
    return len(plain & {f.tensor for f in result.findings if f.code == "differs_from_source"}), len(plain)


def _messages(findings: list[Finding]) -> list[str]:
    lines = [f"{finding.message} ({finding.code})" for finding in findings[:SHOWN]]
    if len(findings) > SHOWN:
        lines[-1] += f"; and {len(findings) - SHOWN} more findings"
    return lines
