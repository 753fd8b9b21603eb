"""Checks of a checkpoint before it is served: shards, format and its loaders, config names, files for vision.

They read headers and configs only; `annie-quant audit` reads every tensor.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType, field

from annie_quant.checkpoint import ModelFolder, ShardError, dialects
from annie_quant.checkpoint.dialects import modelopt
from annie_quant.checkpoint.dialects.compressed_tensors import group_algo
from annie_quant.checkpoint.loader_support import fits_modelopt_option, has_uneven_columns, tensor_parallel_ranks
from annie_quant.doctor.probe import Finding, fault, note, ok
from annie_quant.doctor.serving_table import Traits, lines_for
from annie_quant.schema import salvage, salvage_or_default
from annie_quant.serve.parsers import TokenizerConfig

TEXT_TYPE = "qwen3_5_text"
DOWNLOAD = "hf download REPO --local-dir DIR"


class Quantization(msgspec.Struct):
    """Its names for the format, in config.json and hf_quant_config.json."""

    quant_algo: str | None = None
    format: str | None = None
    quant_method: str | None = None
    kv_cache_scheme: object = None
    kv_cache_quant_algo: str | None = None
    config_groups: dict | None = None


class Config(msgspec.Struct):
    """What the checks need of config.json."""

    model_type: str | None = None
    architectures: list[str] | None = None
    text_config: dict | UnsetType | None = UNSET
    num_experts: int | None = None
    num_local_experts: int | None = None  # the same, as transformers from 5 saves Qwen3 MoE
    mtp_num_hidden_layers: int | None = None
    layer_types: list[str] | None = None
    quantization_config: Quantization | None = None


class Exported(msgspec.Struct):
    """hf_quant_config.json."""

    quantization: Quantization = field(default_factory=Quantization)


class Index(msgspec.Struct):
    """model.safetensors.index.json."""

    weight_map: dict[str, str] = {}


def check_model(folder: Path) -> list[Finding]:
    try:
        config = salvage(Config, folder / "config.json")
    except (ValueError, OSError):
        config = None
    if config is None:
        return [fault("checkpoint", f"{folder} has no readable config.json", "no server can load it")]
    return [
        _check_shards(folder),
        _check_format(folder, config),
        *_check_names(folder, config),
        *_serving_lines(traits_of(folder, config)),
    ]


def traits_of(folder: Path, config: Config) -> Traits:
    """Return what the dated table of serving lines needs to know."""
    inner = config.text_config if isinstance(config.text_config, dict) else {}
    exported = salvage_or_default(Exported, folder / "hf_quant_config.json").quantization
    quantized = config.quantization_config or Quantization()
    scheme, kv_cache = quantized.kv_cache_scheme, exported.kv_cache_quant_algo or ""
    if isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
        kv_cache = "FP8"
    elif isinstance(scheme, str):
        kv_cache = scheme
    algorithm = quantized.quant_algo or exported.quant_algo
    method = quantized.quant_method or (modelopt.NAME if exported != Quantization() else "")
    kinds = inner.get("layer_types", config.layer_types)
    mtp = inner.get("mtp_num_hidden_layers", config.mtp_num_hidden_layers)
    return Traits(
        quantized=quantized != Quantization() or exported != Quantization(),
        experts=isinstance(inner.get("num_experts", config.num_experts or config.num_local_experts), int),
        hybrid=isinstance(kinds, list) and "linear_attention" in kinds,
        mtp=isinstance(mtp, int) and mtp > 0,
        kv_cache=kv_cache.upper(),
        activations=_rounds_activations(quantized, exported),
        uneven_columns=_has_uneven_columns(folder),
        detected=bool(method) and not fits_modelopt_option(method, algorithm or ""),
    )


def _rounds_activations(quantized: Quantization, exported: Quantization) -> bool:
    """Return whether NVFP4 linears round their activations: by ModelOpt's name, or by compressed-tensors' groups."""
    if algorithm := quantized.quant_algo or exported.quant_algo:
        return algorithm == "NVFP4"
    groups = (quantized.config_groups or {}).values()
    return any(isinstance(g, dict) and group_algo(g) == "NVFP4" for g in groups)


def _has_uneven_columns(folder: Path) -> bool:
    """Return whether an NVFP4 linear's columns are not a multiple of 32, on one rank or on two (headers only)."""
    try:
        shards = ModelFolder(folder)
        linears = dialects.linears(shards)
        return has_uneven_columns(shards, linears) or tensor_parallel_ranks(shards, linears) < 2
    except ShardError:
        return False  # check_model names what is missing


def _serving_lines(traits: Traits) -> list[Finding]:
    findings = [note(line.name, line.advice, f"{line.why} ({line.source})") for line in lines_for(traits)]
    if "NVFP4" in traits.kv_cache:
        why = "it loops at token 0 with thinking and tools (Qwen3.8-Flash-Next #19, 2026)"
        findings.append(fault("KV cache", f"the checkpoint asks for {traits.kv_cache}", why, "--kv-cache-dtype fp8"))
    return findings


def _check_shards(folder: Path) -> Finding:
    index = salvage_or_default(Index, folder / "model.safetensors.index.json")
    names = sorted(set(index.weight_map.values())) or [p.name for p in folder.glob("*.safetensors")]
    if not names:
        return fault("shards", "no safetensors file", "the download was not finished", DOWNLOAD)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        message = f"{len(missing)} of {len(names)} shards are missing: {', '.join(missing[:3])}"
        return fault("shards", message, "the download was not finished", DOWNLOAD)
    incomplete = list(folder.glob("**/*.incomplete"))
    if incomplete:
        return note("shards", f"{len(incomplete)} unfinished downloads in the same folder", "", DOWNLOAD)
    return ok("shards", f"{len(names)} present")


def _check_format(folder: Path, config: Config) -> Finding:
    quantized = config.quantization_config or Quantization()
    if quantized == Quantization():
        return ok("format", "not quantized")
    exported = salvage_or_default(Exported, folder / "hf_quant_config.json").quantization
    algorithm = quantized.quant_algo or exported.quant_algo or quantized.format or quantized.quant_method
    if algorithm == "NVFP4_AWQ":
        why = "vLLM and SGLang load plain NVFP4, not its pre_quant_scale"
        return fault("format", algorithm, why, f"annie-quant audit {folder} --repair --source BF16")
    if algorithm == "MIXED_PRECISION":
        return note("format", algorithm, "needs vLLM 0.19 or newer")
    return ok("format", str(algorithm))


def _check_names(folder: Path, config: Config) -> list[Finding]:
    """Config fields and files that differ between runtimes (R18, R19)."""
    findings = []
    if config.model_type == TEXT_TYPE:
        why = "images with transformers before 5.2 stop with 'qwen3_5_text not recognized'"
        findings.append(note("model_type", TEXT_TYPE, why, f"annie-quant audit {folder} --repair --names old"))
    multimodal = config.text_config is not UNSET or "ConditionalGeneration" in str(config.architectures)
    if multimodal and not (folder / "preprocessor_config.json").is_file():
        findings.append(
            fault(
                "preprocessor_config.json",
                "missing, and the config is multimodal",
                "servers read it even for text",
                f"annie-quant audit {folder} --repair, or serve with --language-model-only",
            )
        )
    tokenizer = salvage_or_default(TokenizerConfig, folder / "tokenizer_config.json")
    if not (folder / "chat_template.jinja").is_file() and tokenizer.chat_template is UNSET:
        why = "tools and thinking would not be rendered"
        findings.append(fault("chat template", "missing", why, "copy it from the source checkpoint"))
    return findings
