"""Checks of a checkpoint before it is served: shards, format and its loaders, config names, files for vision.

They read headers and configs only; `annie-quant audit` reads every tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from annie_quant.doctor.probe import Finding, fault, note, ok
from annie_quant.files import read_whole_json

TEXT_TYPE = "qwen3_5_text"
DOWNLOAD = "hf download REPO --local-dir DIR"


def check_model(folder: Path) -> list[Finding]:
    config = _json_object(folder / "config.json")
    if config is None:
        return [fault("checkpoint", f"{folder} has no readable config.json", "no server can load it")]
    return [_check_shards(folder), _check_format(folder, config), *_check_names(folder, config)]


def _check_shards(folder: Path) -> Finding:
    index = _json_object(folder / "model.safetensors.index.json")
    names = sorted(set(index["weight_map"].values())) if index else [p.name for p in folder.glob("*.safetensors")]
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


def _check_format(folder: Path, config: dict[str, Any]) -> Finding:
    quantized = config.get("quantization_config") or {}
    if not quantized:
        return ok("format", "not quantized")
    exported = (_json_object(folder / "hf_quant_config.json") or {}).get("quantization", {})
    algorithm = quantized.get("quant_algo") or exported.get("quant_algo")
    algorithm = algorithm or quantized.get("format") or quantized.get("quant_method")
    if algorithm == "NVFP4_AWQ":
        why = "vLLM and SGLang load plain NVFP4, not its pre_quant_scale"
        return fault("format", algorithm, why, f"annie-quant audit {folder} --repair --source BF16")
    if algorithm == "MIXED_PRECISION":
        return note("format", algorithm, "needs vLLM 0.19 or newer")
    return ok("format", str(algorithm))


def _check_names(folder: Path, config: dict[str, Any]) -> list[Finding]:
    """Config fields and files that differ between runtimes (R18, R19)."""
    findings = []
    if config.get("model_type") == TEXT_TYPE:
        why = "images with transformers before 5.2 stop with 'qwen3_5_text not recognized'"
        findings.append(note("model_type", TEXT_TYPE, why, f"annie-quant audit {folder} --repair --names old"))
    multimodal = "text_config" in config or "ConditionalGeneration" in str(config.get("architectures"))
    if multimodal and not (folder / "preprocessor_config.json").is_file():
        findings.append(
            fault(
                "preprocessor_config.json",
                "missing, and the config is multimodal",
                "servers read it even for text",
                f"annie-quant audit {folder} --repair, or serve with --language-model-only",
            )
        )
    tokenizer = _json_object(folder / "tokenizer_config.json") or {}
    if not (folder / "chat_template.jinja").is_file() and "chat_template" not in tokenizer:
        why = "tools and thinking would not be rendered"
        findings.append(fault("chat template", "missing", why, "copy it from the source checkpoint"))
    return findings


def _json_object(path: Path) -> dict[str, Any] | None:
    try:
        value = read_whole_json(path)
    except OSError:
        return None
    return value if isinstance(value, dict) else None
