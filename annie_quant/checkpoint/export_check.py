"""Faults that explain an evaluation: the checkpoint was not made from the reference, or its export is broken."""

from __future__ import annotations

import os
import shlex

from annie_quant.checkpoint.audit import audit
from annie_quant.schema import Finding

FROM_SOURCE = ("large_error", "differs_from_source", "not_in_source", "source_shape")
LEAST_SHARE = 0.5  # of the compared tensors: one broken tensor is a fault, half of them are another model
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
    command = f"annie-quant audit {shlex.quote(str(path))} --source {shlex.quote(str(reference))}"
    return [f"BROKEN EXPORT: {text}; {command}" for text in _messages(result.findings)]


def _messages(findings: list[Finding]) -> list[str]:
    lines = [f"{finding.message} ({finding.code})" for finding in findings[:SHOWN]]
    if len(findings) > SHOWN:
        lines[-1] += f"; and {len(findings) - SHOWN} more findings"
    return lines
