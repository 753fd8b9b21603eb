"""The checks of an audit, one module per subject, and the codes of their findings.

A check takes a QuantizedFolder and yields findings; none raises on a fault. `annie-quant explain
CODE` prints what a code of a finding or of a ShardError means and what to do. The texts are in
assets/codes.json; tests/checkpoint/test_codes.py compares them with the codes in this package.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from annie_quant.checkpoint.header import ShardError
from annie_quant.core.files import ASSETS
from annie_quant.documents import Finding


class Explanation(NamedTuple):
    """The explanation of one code.

    meaning: what is wrong, and what it does to a server or a conversion.
    fix: the command or change that removes it.
    """

    meaning: str
    fix: str


_TEXTS = json.loads((ASSETS / "codes.json").read_text(encoding="utf-8"))
CODES = {code: Explanation(**texts) for code, texts in _TEXTS.items()}
# Findings that make every server fail or give wrong answers.
DEADLY = {
    "block_scale_nan",
    "tensor_scale_bad",
    "tensor_scale_missing",
    "input_scale_bad",
    "scale_shape",
    "scale_dtype",
    "fp8_scale_missing",
    "fp8_scale_bad",
    "fp8_code_nan",
    "format_disagrees",
    "tensor_scale_inverted",
    "input_scale_inverted",
    "orphan_scale",
    "block_scale_missing",
    "not_finite",
    "names_disagree",
    "prefix_disagrees",
    "expert_count",
    "experts_mixed",
    "kv_scale_bad",
    "decoder_incomplete",
}

# Findings with which servers differ, or about a tensor of which nothing is known.
NOT_JUDGED = {
    "settings_unread",
    "tensor_unknown",
    "tensor_repeated",
    "head_ambiguous",
    "vocab_size",
}

# Findings that only the values of tensors show.
OF_VALUES = {
    "block_scale_nan",
    "block_scale_negative",
    "block_scale_zero",
    "block_scale_underflow",
    "tensor_scale_bad",
    "tensor_scale_inverted",
    "input_scale_bad",
    "input_scale_inverted",
    "fused_tensor_scale",
    "fused_input_scale",
    "expert_scale_range",
    "fp8_scale_bad",
    "fp8_code_nan",
    "kv_scale_bad",
    "kv_scale_default",
    "not_finite",
    "all_zero",
    "head_ambiguous",
}
# The same, of a comparison with the source.
OF_SOURCE_VALUES = {
    "large_error",
    "differs_from_source",
    "vision_differs",
    "fold_plus_one",
    "fold_mismatch",
}


def fault(code: str, tensor: str, problem: str) -> Finding:
    """Return a finding whose message is "TENSOR: PROBLEM"."""
    return Finding(code, tensor, f"{tensor}: {problem}")


def finding_of(error: ShardError, tensor: str = "") -> Finding:
    """Return the finding that reports an error.

    tensor: what was read, for an error that names no tensor.
    """
    return Finding(error.code, error.tensor or tensor, error.message)
