"""Does a server run the arithmetic that its checkpoint was evaluated with? (`annie-quant doctor --server URL`)"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from annie_quant.doctor.logprobs import served_answers
from annie_quant.doctor.probe import Finding, fault, note, ok

if TYPE_CHECKING:
    from annie_quant.evaluate.fingerprint import Fingerprint

CHECK = "served arithmetic"
N_PROMPTS, N_TOKENS, N_BEST = 20, 12, 5


def check_server(
    url: str, checkpoint: Path, reference: Path, headers: Mapping[str, str] | None = None
) -> tuple[list[Finding], Fingerprint]:
    """Name the numerics profile that a server runs on a checkpoint, by the log-probabilities of about 20 short answers.

    Raises ServerError where the server returns no log-probabilities with token ids.
    """
    from annie_quant.evaluate import fingerprint as offline

    prompts = offline.prompts(reference, N_PROMPTS)
    served = served_answers(url, prompts, N_TOKENS, N_BEST, headers)
    tokens, logprobs = [a.tokens for a in served.answers], [a.logprobs for a in served.answers]
    result = offline.fingerprint(checkpoint, reference, prompts, tokens, logprobs, served.family)
    return [finding(result, checkpoint, reference, offline.REFERENCE)], result


def finding(result: Fingerprint, checkpoint: Path, reference: Path, reference_name: str) -> Finding:
    """Return the finding for a fingerprint."""
    from annie_quant.hf.profiles import find_profile

    best = result.candidates[0]
    figures = (
        f"mean difference {best.difference:.3g} nats over {result.n_values} log-probabilities of {result.n_prompts} answers, "
        f"expected {best.noise:.3g}; {result.equal_tokens:.0%} of tokens equal"
    )
    if result.name is None:
        return fault(
            CHECK,
            f"none of these: {', '.join(c.name for c in result.candidates)}; closest {best.name}, {figures}",
            "the server computes something else than this checkpoint: another checkpoint, or a faulty kernel",
            "annie-quant validate-gpu --stack all, and compare the served folder with --checkpoint",
        )
    also = f"; cannot be distinguished from {', '.join(result.also)}" if result.also else ""
    message = f"{best.name} ({best.arithmetic}); {figures}{also}"
    if best.name == reference_name:
        return fault(
            CHECK, message, "the server serves the bf16 model, not the checkpoint", "serve the checkpoint's folder"
        )
    if result.is_doubtful:
        return note(
            CHECK,
            message,
            "two noisy computations of one checkpoint differ by 1.4 times the expected at most: the server may have another "
            "checkpoint of this model",
            "compare the served folder with --checkpoint",
        )
    w4a4 = any(c.name == "vllm-cutlass" for c in result.candidates)
    if w4a4 and not find_profile(best.name).needs_input_scale:
        return note(
            CHECK,
            message,
            "the checkpoint has scales for 4-bit activations, and this server does not use them",
            f"annie-quant eval {checkpoint} --reference {reference} --numerics {best.name}",
        )
    return ok(CHECK, message)
