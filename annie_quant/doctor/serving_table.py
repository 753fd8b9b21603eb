"""What today's public recipes say about serving a checkpoint on a DGX Spark: dated lines, each with the checkpoints it is for.

Sources are the public playbooks, vLLM's recipes and issue threads named in each line; none was run by this project.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Traits:
    """What the lines need to know of a checkpoint.

    kv_cache: "", "FP8" or another format that its settings ask for.  activations: its NVFP4 linears round activations, too.
    uneven_columns: the columns of an NVFP4 linear are not a multiple of 32, on one GPU or divided among two.
    detected: its settings are not of ModelOpt's plain NVFP4, so a --quantization flag of that name does not fit.
    """

    quantized: bool = False
    experts: bool = False
    hybrid: bool = False
    mtp: bool = False
    kv_cache: str = ""
    activations: bool = False
    uneven_columns: bool = False
    detected: bool = False


@dataclass(frozen=True)
class Line:
    """One piece of advice. applies: to which checkpoints.  advice: the option or version.  why: in a few words.
    source: date and origin.
    """

    name: str
    applies: Callable[[Traits], bool]
    advice: str
    why: str
    source: str


LINES = (
    Line(
        "vLLM version",
        lambda t: t.hybrid and t.quantized,
        "vLLM 0.28 or newer on SM12x",
        "fast decode kernels for hybrid models",
        "2026-07, vllm-project/recipes #834",
    ),
    Line(
        "tool-call parser",
        lambda t: t.hybrid,
        "--tool-call-parser qwen3_xml for Qwen3.6 and 3.8; compare with qwen3_coder on your own calls",
        "qwen3_xml is the default of the recipes, and has mangled calls of a Qwen3.6 NVFP4 checkpoint",
        "2026-07, vllm-project/recipes #826; NemoClaw #6551",
    ),
    Line(
        "MoE backend",
        lambda t: t.experts and t.quantized,
        "--moe-backend marlin",
        "the native FlashInfer CUTLASS kernel gave corrupt output on GB10",
        "2026-07, NVIDIA's Spark playbook for Qwen3.6-35B-A3B; GLM-5.3 #1",
    ),
    Line(
        "KV cache",
        lambda t: t.kv_cache == "FP8",
        "--kv-cache-dtype fp8 --attention-backend flashinfer",
        "the checkpoint asks for it; some GB10 stacks do not start with it",
        "2026-07, NVIDIA's Spark playbook; playbooks #107",
    ),
    Line(
        "speculative decoding",
        lambda t: t.mtp,
        '--speculative-config {"method": "mtp", "num_speculative_tokens": 3}',
        "the checkpoint has an MTP head; acceptance is about 2.3 times higher on code than on prose",
        "2026-07, NVIDIA's Spark playbook",
    ),
    Line(
        "kernels known wrong",
        lambda t: t.uneven_columns,
        "VLLM_DISABLED_KERNELS=FlashInferCutlassNvFp4LinearKernel,CutlassNvFp4LinearKernel, or --linear-backend marlin",
        "K per rank is not a multiple of 32, and vLLM's CUTLASS kernels read stale block scales then (GSM8K 0.0 against 0.89)",
        "2026-07, vllm-project/vllm #48898, #48965; vLLM 0.25.1 on SM120",
    ),
    Line(
        "kernel choice",
        lambda t: t.activations,
        "VLLM_DISABLED_KERNELS=FlashInferCuteDslNvFp4W4A16LinearKernel up to vLLM 0.29.0",
        "on SM12x these versions take a weight-only kernel for checkpoints with 4-bit activations: slower prefill",
        "2026-09, unslothai/unsloth #10417; fixed by vllm-project/vllm #55170 (2026-09-08)",
    ),
    Line(
        "SGLang quantization",
        lambda t: t.detected,
        "no --quantization: SGLang reads the format from the checkpoint; with experts --moe-runner-backend flashinfer_cutlass",
        "modelopt_fp4 is for plain NVFP4 of ModelOpt; mixed precision is modelopt_mixed there",
        "2026-09, sgl-project/sglang #38569, #32959",
    ),
    Line(
        "prefix caching",
        lambda t: t.hybrid and t.quantized,
        "--enable-prefix-caching",
        "a system prompt and tools are computed once",
        "2026-07, NVIDIA's Spark playbook",
    ),
)


def lines_for(traits: Traits) -> list[Line]:
    """Return the lines that apply to a checkpoint."""
    return [line for line in LINES if line.applies(traits)]
