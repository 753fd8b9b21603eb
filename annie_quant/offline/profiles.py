"""The table of numerics profiles: which arithmetic a server runs on an NVFP4 checkpoint.

A profile is the format in which NVFP4 linears get their activations, and where everything else is rounded. Weights are exact in
all of them: E2M1 times E4M3 times the tensor scale, summed in float32. docs/numerics.md has the versions of servers that run each
profile, with sources. emulation.py computes a profile; adding one is one row here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass

from annie_quant.core.errors import UsageError

EXACT = "exact"
# A KV cache in that format (codec.cache_rounding). "+" would make it a further member of the profile without it.
KV_SUFFIXES = {"-fp8kv": "fp8", "-nvfp4kv": "nvfp4"}
UNROUNDED = "unrounded"
NVFP4 = "nvfp4"
Q8_0 = "q8_0"
NVFP4_SEARCHED = "nvfp4 (searched)"
# of Profile.beta
FLOAT32 = "float32"
_BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Profile:
    """One arithmetic.

    activations   the format of the activations that NVFP4 linears multiply: "unrounded"; "nvfp4": blocks of 16 with the
                  checkpoint's input scale; "q8_0": blocks of 32, a float16 scale and 8-bit integers; "nvfp4 (searched)": blocks of
                  16 with the best of five E4M3 scales and no tensor scale
    stream        dtype of the residual stream and of the outputs of norms, linears, convolution, DeltaNet, attention and logits
    plain_input   dtype of the activations that plain (bf16) linears multiply
    kv            dtype of keys and values, or "fp8" or "nvfp4"
    operands      "exact", or the dtype to which the dequantized values of both sides of an NVFP4 product are rounded
    beta          how DeltaNet's beta, a sigmoid, is rounded: "float32": not; "bfloat16": once, as transformers in bfloat16, SGLang
                  (sgl-project/sglang #38975) and vLLM's packed decode before vllm-project/vllm #53877 do
    served_by     the server and its kernel, "" for an arithmetic that no server has
    answers       the format of the activations at the positions of an answer, which a server decodes with few rows at a time; "":
                  as `activations`, which then are those of prompts alone
    """

    name: str
    activations: str
    stream: str = "float32"
    plain_input: str = "float32"
    kv: str = "float32"
    served_by: str = ""
    operands: str = EXACT
    beta: str = FLOAT32
    answers: str = ""

    @property
    def needs_input_scale(self) -> bool:
        return self.activations == NVFP4

    @property
    def rounds(self) -> bool:
        """Whether anything but the activations of NVFP4 linears is rounded."""
        return {self.stream, self.plain_input, self.kv} != {"float32"}

    def describe(self) -> str:
        """Return the profile in a few words."""
        where = f"{self.stream} stream" if self.stream != "float32" else "float32"
        if self.stream == "float32" and self.rounds:
            where += f", {self.plain_input} inputs of plain linears, {self.kv} keys and values"
        operands = "" if self.operands == EXACT else f", products of {self.operands} values"
        beta = "" if self.beta == FLOAT32 else f", DeltaNet's beta in {self.beta}"
        answers = f" in prompts, {self.answers} in answers" if self.answers else ""
        return f"{self.activations} activations{answers}, {where}{operands}{beta}"


def _bf16(name: str, activations: str, served_by: str, operands: str = EXACT) -> Profile:
    return Profile(name, activations, "bfloat16", "bfloat16", "bfloat16", served_by, operands)


PROFILES = {
    p.name: p
    for p in (
        Profile("float32", UNROUNDED),
        Profile("w4a4", NVFP4),
        Profile("w4a16", UNROUNDED),
        # One copy of a W4A4 checkpoint, multiplied by the number of rows (vllm-project/vllm #54614, open).
        Profile("w4a4-prompts", NVFP4, answers=UNROUNDED),
        _bf16("vllm-cutlass", NVFP4, "vLLM and SGLang with CUTLASS or FlashInfer FP4 kernels"),
        _bf16(
            "vllm-emulation", NVFP4, "vLLM with --linear-backend emulation, on any GPU", "bfloat16"
        ),
        _bf16("vllm-marlin", UNROUNDED, "vLLM with Marlin"),
        Profile("llama.cpp-cpu", Q8_0, "float32", "bfloat16", "float16", "llama.cpp on a CPU"),
        Profile(
            "llama.cpp-blackwell",
            NVFP4_SEARCHED,
            "float32",
            "bfloat16",
            "float16",
            "llama.cpp on a Blackwell GPU",
            answers=Q8_0,
        ),
    )
}
UNQUANTIZED = Profile("bf16", UNROUNDED)  # of a model without NVFP4 linears
SERVED = tuple(p.name for p in PROFILES.values() if p.served_by)


def is_supported(name: str, supported: Sequence[str]) -> bool:
    """Return whether a profile is one of `supported`, with a KV cache in any format."""
    for suffix in KV_SUFFIXES:
        name = name.removesuffix(suffix)
    return name in supported


def choose_profiles(
    requested: Sequence[str], supported: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the requested profiles that a checkpoint supports, and those that it does not.

    A model without NVFP4 linears, which supports "bf16" alone, is computed as it is: nothing is left out.

    Raises UsageError for an unknown profile, and where the checkpoint supports none.
    """
    for name in requested:
        find_profile(name)
    if list(supported) == [UNQUANTIZED.name]:
        return [UNQUANTIZED.name], []
    chosen = [n for n in dict.fromkeys(requested) if is_supported(n, supported)]
    if not chosen:
        raise UsageError(
            f"the checkpoint does not support {', '.join(requested)}",
            f"it supports: {', '.join(supported)}",
        )
    return chosen, [n for n in requested if n not in chosen]


@functools.cache
def find_profile(name: str) -> Profile:
    """Return a profile by its name, which may end in -fp8kv or -nvfp4kv. Raises UsageError for an unknown one."""
    for suffix, kind in KV_SUFFIXES.items():
        if name.endswith(suffix):
            return dataclasses.replace(find_profile(name.removesuffix(suffix)), name=name, kv=kind)
    if name == UNQUANTIZED.name:
        return UNQUANTIZED
    if name not in PROFILES:
        raise UsageError(
            f"unknown numerics {name!r}",
            f"choose from: {', '.join(PROFILES)}; with a quantized KV cache: NAME{' or NAME'.join(KV_SUFFIXES)}",
        )
    return PROFILES[name]


def in_float32(profile: Profile) -> Profile:
    """Return the same activation format with everything else in float32."""
    kv = profile.kv if profile.kv in KV_SUFFIXES.values() else "float32"
    return dataclasses.replace(
        profile, stream="float32", plain_input="float32", kv=kv, operands=EXACT, beta=FLOAT32
    )


def in_bfloat16(profile: Profile) -> Profile:
    """Return the same activation format with everything else rounded to bfloat16, as GPU servers do, DeltaNet's beta too."""
    kv = profile.kv if profile.kv in KV_SUFFIXES.values() else "bfloat16"
    return with_rounded_beta(
        dataclasses.replace(profile, stream="bfloat16", plain_input="bfloat16", kv=kv)
    )


def with_rounded_beta(profile: Profile) -> Profile:
    """Return the profile with beta rounded once, where its stream is bfloat16 and its beta is not rounded."""
    rounds = profile.stream == "bfloat16" and profile.beta == FLOAT32
    return dataclasses.replace(profile, beta=_BFLOAT16) if rounds else profile


def profile_of(model: object) -> Profile:
    """Return the profile that emulate() has set, for the functions that are not modules (attention, DeltaNet)."""
    return getattr(model, "annie_quant_profile", None) or UNQUANTIZED
