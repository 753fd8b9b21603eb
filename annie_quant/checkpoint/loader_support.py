"""Which servers load a checkpoint, and why not. The rules and their sources are of November 2026."""

from __future__ import annotations

from collections.abc import Sequence

from annie_quant import models
from annie_quant.checkpoint import runtime_names
from annie_quant.checkpoint.checks import COLUMNS_PER_RANK
from annie_quant.checkpoint.dialects import fp8, modelopt
from annie_quant.checkpoint.gguf import names
from annie_quant.checkpoint.linears import Linear, QuantConfig, owned_tensors
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError
from annie_quant.documents import Finding, ServerSupport
from annie_quant.documents.checkpoint import Loads

Rule = tuple[Loads, str]  # ServerSupport.loads and .note

# Findings that make any server fail or give wrong answers.
DEADLY = {
    "block_scale_nan", "tensor_scale_bad", "tensor_scale_missing", "input_scale_bad", "scale_shape", "scale_dtype",
    "fp8_scale_missing", "fp8_scale_bad", "fp8_code_nan", "format_disagrees",
    "tensor_scale_inverted", "input_scale_inverted", "orphan_scale", "block_scale_missing", "not_finite",
    "names_disagree", "prefix_disagrees", "expert_count", "experts_mixed", "expert_scales_missing", "kv_scale_bad",
    "decoder_incomplete",
}  # fmt: skip


def verdicts(
    folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig, findings: Sequence[Finding]
) -> list[ServerSupport]:
    """Return which servers load a checkpoint."""
    deadly = next((f for f in findings if f.code in DEADLY), None)
    if deadly is not None:
        return [ServerSupport(name, "no", deadly.code) for name in RULES]
    return [ServerSupport(name, *rule(folder, linears, config)) for name, rule in RULES.items()]


def is_awq(linears: dict[str, Linear], config: QuantConfig) -> bool:
    return config.algo == "NVFP4_AWQ" or any(x.pre_quant for x in linears.values())


def vllm(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> Rule:
    if is_awq(linears, config):
        return "no", "NVFP4_AWQ is not loaded (#45333)"
    if runtime_names.is_multimodal(folder) and not (folder.path / runtime_names.PREPROCESSOR).is_file():
        return "no", f"{runtime_names.PREPROCESSOR} is missing (annie-quant audit --repair)"
    if has_uneven_columns(folder, linears):
        return "no", f"columns are not a multiple of {COLUMNS_PER_RANK} (#48898)"
    ranks = tensor_parallel_ranks(folder, linears)
    limit = (
        f", on one rank only: columns per rank are not a multiple of {COLUMNS_PER_RANK} (#48898)" if ranks < 2 else ""
    )
    state = (
        ", with DeltaNet's state in bfloat16 unless served with --mamba-ssm-cache-dtype float32 "
        "(config.json has no mamba_ssm_dtype)"
        if rounds_state(folder)
        else ""
    )
    if config.algo == "MIXED_PRECISION" and config.method == "modelopt":
        return "yes", f"from 0.19 (mixed precision){limit}{state}"
    return "yes", f"{limit}{state}".removeprefix(", ")


def rounds_state(folder: ModelFolder) -> bool:
    """Return whether vLLM on a GPU keeps DeltaNet's state in the model's dtype, not in float32 (docs/numerics.md)."""
    return "mamba_ssm_dtype" not in folder.text_config and any(models.is_log_decay(name) for name in folder)


def has_uneven_columns(folder: ModelFolder, linears: dict[str, Linear]) -> bool:
    """Return whether the columns of an NVFP4 linear are not a multiple of COLUMNS_PER_RANK."""
    return any(x.format == "nvfp4" and columns_of(folder, x) % COLUMNS_PER_RANK for x in linears.values())


def columns_of(folder: ModelFolder, linear: Linear) -> int:
    """Return the columns of an NVFP4 linear; 0 for a weight without dimensions, which is a finding (weight_shape)."""
    return 2 * (folder.info(linear.weight).shape or (0,))[-1]


def tensor_parallel_ranks(folder: ModelFolder, linears: dict[str, Linear]) -> int:
    """Return the largest number of ranks (1, 2, 4 or 8) over which the columns of every NVFP4 linear can be divided.

    Only row-parallel linears are divided by columns; each rank's columns must be a multiple of COLUMNS_PER_RANK.
    """
    columns = [
        columns_of(folder, x)
        for x in linears.values()
        if x.format == "nvfp4" and x.name.endswith(folder.family.row_parallel)
    ]
    return max((n for n in (1, 2, 4, 8) if all(c % (n * COLUMNS_PER_RANK) == 0 for c in columns)), default=1)


def fits_modelopt_option(method: str, algorithm: str) -> bool:
    """Return whether a --quantization option of ModelOpt's plain NVFP4 (modelopt, modelopt_fp4) names a checkpoint's format.

    method, algorithm: of its settings.  A checkpoint of another format is served without the option: servers read the
    format from config.json (docs.sglang.io/advanced_features/quantization.html: no --quantization for a quantized model).
    """
    return method == modelopt.NAME and "MIXED" not in algorithm


def sglang(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> Rule:
    if is_awq(linears, config):
        return "no", "NVFP4_AWQ is not loaded"
    if (
        linears
        and fits_modelopt_option(config.method, config.algo)
        and not (folder.path / "hf_quant_config.json").exists()
    ):
        return "after", "with --quantization modelopt_fp4 (hf_quant_config.json is missing)"
    return "yes", ""


def old_runtimes(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> Rule:
    """VLLM 0.16, SGLang 0.5.4 and others that know Qwen3.5 in its multimodal form only."""
    if is_awq(linears, config):
        return "no", "NVFP4_AWQ is not loaded"
    if config.algo == "MIXED_PRECISION":
        return "no", "mixed precision is not loaded"
    if runtime_names.named_form(folder) is None:
        return "unknown", "these versions are judged for dense Qwen3.5 only"
    reason = runtime_names.obstacle_on_old_runtimes(folder)
    return "no" if reason else "yes", f"{reason} (annie-quant audit --repair --names old)" if reason else ""


def transformers(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> Rule:
    if not linears or config.method == fp8.NAME:
        return "yes", "from 5.2"
    if config.method == "compressed-tensors":
        return "yes", "from 5.2 with the compressed-tensors package"
    return "after", "after `import annie_quant.runtime` (it has no ModelOpt loader, #46772)"


def llama_cpp(folder: ModelFolder, linears: dict[str, Linear], config: QuantConfig) -> Rule:
    if any(x.pre_quant for x in linears.values()):
        return "no", "GGUF has no activation scales"
    try:
        layout = names.Layout.of(folder)
        owned = owned_tensors(linears.values())
        for name in [*(n for n in folder if n not in owned), *(f"{n}.weight" for n in linears)]:
            for part in folder.parts_of(name) or [name]:
                layout.name(part)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return "no", f"its tensors are not of a text model that is written here ({names.written()})"
    if layout.heads and layout.heads.key_dim != layout.heads.value_dim:
        return "no", "DeltaNet's key and value heads differ in size"
    if not layout.names.computes_nvfp4(folder) and any(x.format == "nvfp4" for x in linears.values()):
        return (
            "after",
            f"after `annie-quant convert --to gguf`, as 16-bit numbers: no NVFP4 in {layout.names.architecture}",
        )
    wide = [x.name for x in linears.values() if x.format == "nvfp4" and columns_of(folder, x) % 64]
    if wide or any(x.format == "fp8" for x in linears.values()):
        return "after", "after `annie-quant convert --to gguf`, FP8 and rows not a multiple of 64 as 16-bit numbers"
    return "after", "after `annie-quant convert --to gguf`"


RULES = {
    "vLLM": vllm,
    "SGLang": sglang,
    "runtimes on transformers 4.57": old_runtimes,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
}
