"""Which servers can load a checkpoint, and why not. Facts with their sources, as of November 2026."""

from __future__ import annotations

from typing import Any

from annie_quant.checkpoint import runtime_names
from annie_quant.checkpoint.gguf import names
from annie_quant.checkpoint.linears import Linear, QuantConfig
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.errors import CheckpointError

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
    "names_disagree",
    "prefix_disagrees",
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
    if (
        runtime_names.architecture(folder.config) == runtime_names.WRAPPED
        and not (folder.path / runtime_names.PREPROCESSOR).is_file()
    ):
        return f"no, {runtime_names.PREPROCESSOR} is missing (annie-quant audit --repair)"
    if config.algo == "MIXED_PRECISION" and config.method == "modelopt":
        return "yes, from 0.19 (mixed precision)"
    return "yes"


def sglang(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> str:
    if any(x.pre_quant for x in linears.values()) or config.algo == "NVFP4_AWQ":
        return "no, NVFP4_AWQ is not loaded"
    if linears and config.method == "modelopt" and not (folder.path / "hf_quant_config.json").exists():
        return "with --quantization modelopt_fp4 (hf_quant_config.json is missing)"
    return "yes"


def old_runtimes(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> str:
    """vLLM 0.16 and SGLang 0.5.4 and their like, which know Qwen3.5 by its multimodal form alone."""
    if any(x.pre_quant for x in linears.values()) or config.algo == "NVFP4_AWQ":
        return "no, NVFP4_AWQ is not loaded"
    if config.algo == "MIXED_PRECISION":
        return "no, mixed precision is not loaded"
    if not runtime_names.architecture(folder.config):
        return "not judged, config.json names no dense Qwen3.5"
    why = runtime_names.why_not_old(folder)
    return f"no, {why} (annie-quant audit --repair --names old)" if why else "yes"


def transformers(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> str:
    if not linears:
        return "yes, from 5.2"
    if config.method == "compressed-tensors":
        return "yes, from 5.2 with the compressed-tensors package"
    return "after `import annie_quant.runtime` (no ModelOpt loader of its own, #46772)"


def llama_cpp(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> str:
    if any(x.pre_quant for x in linears.values()):
        return "no, activation scales have no place in GGUF"
    try:
        layers = int(folder.text_config["num_hidden_layers"])
        parts = {t for x in linears.values() for t in x.tensors()}
        for name in [*(n for n in folder if n not in parts), *(f"{n}.weight" for n in linears)]:
            names.gguf_name(name, layers)
        heads = names.Heads.of(folder.text_config)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return "no, it is no Qwen3.5 text model"
    if heads.key_dim != heads.value_dim:
        return "no, DeltaNet's key and value heads differ in size"
    wide = [x.name for x in linears.values() if x.format == "nvfp4" and folder.info(x.weight).shape[-1] * 2 % 64]
    if wide or any(x.format == "fp8" for x in linears.values()):
        return "after `annie-quant convert --to gguf`, FP8 and rows that are no multiple of 64 as 16-bit numbers"
    return "after `annie-quant convert --to gguf`"


RULES = {
    "vLLM": vllm,
    "SGLang": sglang,
    "runtimes on transformers 4.57": old_runtimes,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
}
