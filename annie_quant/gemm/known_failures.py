"""What is known to fail on GB10 (SM121), recognised by its symptom and named with its remedy.

Sources are in each row: issue numbers of vLLM, CUTLASS's tile constraints, NVIDIA's forum, as collected in the
project's notes.
"""

from __future__ import annotations

import re

KNOWN = (
    (
        r"no kernel image is available",
        "the wheel carries no sm_12x machine code",
        "install a build for 121a, or use the cu130 image",
    ),
    (
        r"illegal instruction|cudaErrorIllegalInstruction",
        "CUTLASS without SM12x tile constraints, or sm_120 code on sm_121",
        "a newer vLLM (#38423), or a build for 121a",
    ),
    (
        r"only supports sm120|enable_sm120_only",
        "the kernel's guard admits 12.0 and this GPU is 12.1",
        "a build whose guard is enable_sm120_family",
    ),
    (
        r"sm_121a?'? is not defined|Value 'sm_121a?' is not defined|unsupported gpu architecture.*121",
        "Triton's bundled ptxas is older than CUDA 13",
        "export TRITON_PTXAS_PATH=$(which ptxas)   # CUDA 13's",
    ),
    (
        r"partial_rotary|rotary.*(shape|size)|shape.*rotary",
        "an old vLLM with Qwen3.5's partial_rotary_factor 0.25",
        "a newer vLLM (#35519)",
    ),
    (
        r"(graph|captur).*(fail|error|invalid|not permitted|unsupported)|cudaErrorStreamCapture",
        "CUDA graphs on SM121 in images of early 2026",
        "a newer image; --enforce-eager until then, at about half the speed",
    ),
)
WRONG = (
    "plausible but wrong results without an error: reported of the CUTLASS FP4 path on SM121 with vLLM 0.19",
    "choose a backend that is right here: --linear-backend marlin (vLLM), --fp4-gemm-backend (SGLang)",
)
# What no message says, but a choice of kernels shows.
RANKED = (
    "if prefill is slow, the server took the weight-only kernel before the FP4 one (vLLM #53014, fixed by #55170): "
    "name the backend, --linear-backend"
)
NOT_NATIVE = (
    "only a weight-only kernel is right here. 13 tok/s were seen where 49 are possible with images that hold no native "
    "SM12x code: try a newer image, then this examination again"
)


def recognise(text: str) -> tuple[str, str] | None:
    """(cause, remedy) of an error message, or None."""
    return next((row[1:] for row in KNOWN if re.search(row[0], text, re.IGNORECASE)), None)
