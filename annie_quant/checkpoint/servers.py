"""Which servers can load a checkpoint, and why not. Facts with their sources, as of November 2026."""

from __future__ import annotations

from typing import Any

from annie_quant.checkpoint.linears import Linear, QuantConfig
from annie_quant.checkpoint.shards import ModelFolder

# Findings that make any server fail or answer nonsense, whatever its name.
DEADLY = {
    "block_scale_nan",
    "tensor_scale_bad",
    "tensor_scale_missing",
    "input_scale_bad",
    "scale_shape",
    "scale_dtype",
    "tensor_scale_inverted",
    "input_scale_inverted",
    "orphan_scale",
    "block_scale_missing",
    "not_finite",
}


def verdicts(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig, findings: list[Any]) -> list[str]:
    """One line a server: "vLLM: yes", or the reason why not."""
    deadly = next((f for f in findings if f.code in DEADLY), None)
    return [
        f"{name}: {('no, ' + deadly.code) if deadly else rule(folder, linears, config)}" for name, rule in RULES.items()
    ]


def vllm(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> str:
    if any(x.pre_quant for x in linears.values()) or config.algo == "NVFP4_AWQ":
        return "no, NVFP4_AWQ is not loaded (#45333)"
    if config.algo == "MIXED_PRECISION" and config.method == "modelopt":
        return "yes, from 0.19 (mixed precision)"
    return "yes"


def sglang(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> str:
    if any(x.pre_quant for x in linears.values()) or config.algo == "NVFP4_AWQ":
        return "no, NVFP4_AWQ is not loaded"
    if linears and config.method == "modelopt" and not (folder.path / "hf_quant_config.json").exists():
        return "with --quantization modelopt_fp4 (hf_quant_config.json is missing)"
    return "yes"


def transformers(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> str:
    if not linears:
        return "yes, from 5.2"
    if config.method == "compressed-tensors":
        return "yes, from 5.2 with the compressed-tensors package"
    return "after `import annie_quant.runtime` (no ModelOpt loader of its own, #46772)"


def llama_cpp(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> str:
    if any(x.pre_quant for x in linears.values()):
        return "no, activation scales have no place in GGUF"
    return "after `annie-quant convert --to gguf`"


RULES = {"vLLM": vllm, "SGLang": sglang, "transformers": transformers, "llama.cpp": llama_cpp}
