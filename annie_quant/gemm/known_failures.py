"""Failures that are known on GB10 (SM121): the symptom in a message, its cause and its fix.

Numbers are issues of vLLM; the rest is from CUTLASS's tile constraints and NVIDIA's developer
forum.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple


class KnownFailure(NamedTuple):
    """pattern: regular expression that matches the message, case-insensitive."""

    pattern: str
    cause: str
    fix: str


KNOWN_FAILURES = (
    KnownFailure(
        r"no kernel image is available",
        "the wheel has no sm_12x machine code",
        "install a build for 121a, or use the cu130 image",
    ),
    KnownFailure(
        r"illegal instruction|cudaErrorIllegalInstruction",
        "CUTLASS without SM12x tile constraints, or sm_120 code on sm_121",
        "a newer vLLM (#38423), or a build for 121a",
    ),
    KnownFailure(
        r"only supports sm120|enable_sm120_only",
        "the kernel's guard admits 12.0 and this GPU is 12.1",
        "a build whose guard is enable_sm120_family",
    ),
    KnownFailure(
        r"sm_121a?'? is not defined|Value 'sm_121a?' is not defined|unsupported gpu architecture.*121",
        "Triton's bundled ptxas is older than CUDA 13",
        "export TRITON_PTXAS_PATH=$(which ptxas)   # CUDA 13's",
    ),
    KnownFailure(
        r"partial_rotary|rotary.*(shape|size)|shape.*rotary",
        "an old vLLM with Qwen3.5's partial_rotary_factor 0.25",
        "a newer vLLM (#35519)",
    ),
    KnownFailure(
        r"(graph|captur).*(fail|error|invalid|not permitted|unsupported)|cudaErrorStreamCapture",
        "CUDA graphs on SM121 in images of early 2026",
        "a newer image; --enforce-eager until then, at about half the speed",
    ),
)
# A wrong result has no message.
WRONG_RESULT = KnownFailure(
    "",
    "plausible but wrong results without an error: reported of the CUTLASS FP4 path on SM121 with vLLM 0.19",
    "choose a backend that is right here: --linear-backend marlin (vLLM), --fp4-gemm-backend (SGLang)",
)
# Advice about a choice of kernels that no message reports.
WEIGHT_ONLY_FIRST = (
    "if prefill is slow, the server chose the weight-only kernel before the FP4 one (vLLM #53014, fixed by #55170): "
    "name the backend with --linear-backend"
)
NOT_NATIVE = (
    "only a weight-only kernel is right here. Images without native SM12x code were measured at 13 tok/s where 49 are "
    "possible: try a newer image, then run this check again"
)
NO_FP4_UNITS = "this GPU has no FP4 units: only weight-only kernels can be right here"


def find_failure(
    text: str, failures: Iterable[KnownFailure] = KNOWN_FAILURES
) -> KnownFailure | None:
    """Return the first known failure whose pattern matches the message, or None."""
    return next((f for f in failures if re.search(f.pattern, text, re.IGNORECASE)), None)
