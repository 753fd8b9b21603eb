"""A checkpoint before it is served: its shards, its format and who loads it, its config's names, its visual stub.

Quick checks alone, from headers and configs; `annie-quant audit` reads every tensor.
"""

from __future__ import annotations

import json
from pathlib import Path

from annie_quant.doctor.probe import Finding, finding

TEXT_TYPE = "qwen3_5_text"


def check_model(folder: Path) -> list[Finding]:
    config = _json(folder / "config.json")
    if config is None:
        return [finding("fault", "checkpoint", f"{folder} has no readable config.json", "no server can load it")]
    return [*_shards(folder), *_format(folder, config), *_names(folder, config)]


def _shards(folder: Path) -> list[Finding]:
    index = _json(folder / "model.safetensors.index.json")
    names = sorted(set(index["weight_map"].values())) if index else [p.name for p in folder.glob("*.safetensors")]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        seen = (
            f"{len(missing)} of {len(names)} shards are missing: {', '.join(missing[:3])}"
            if names
            else "no safetensors file"
        )
        return [finding("fault", "shards", seen, "the download was not finished", "hf download REPO --local-dir DIR")]
    parts = list(folder.glob("**/*.incomplete"))
    if parts:
        return [
            finding(
                "note",
                "shards",
                f"{len(parts)} unfinished downloads lie beside",
                "",
                "hf download REPO --local-dir DIR",
            )
        ]
    return [finding("ok", "shards", f"{len(names)} there")]


def _format(folder: Path, config: dict) -> list[Finding]:
    quantized = config.get("quantization_config") or {}
    if not quantized:
        return [finding("ok", "format", "not quantized")]
    algo = quantized.get("quant_algo") or (_json(folder / "hf_quant_config.json") or {}).get("quantization", {}).get(
        "quant_algo"
    )
    algo = algo or quantized.get("format") or quantized.get("quant_method")
    if algo == "NVFP4_AWQ":
        why = "vLLM and SGLang load plain NVFP4, not its pre_quant_scale"
        return [finding("fault", "format", algo, why, f"annie-quant audit {folder} --repair --source BF16")]
    if algo == "MIXED_PRECISION":
        return [finding("note", "format", algo, "needs vLLM 0.19 or newer")]
    return [finding("ok", "format", str(algo))]


def _names(folder: Path, config: dict) -> list[Finding]:
    """The founding documents' trouble with config fields between old and new runtimes."""
    found = []
    kind = config.get("model_type")
    if kind == TEXT_TYPE:
        why = "images with transformers before 5.2 stop with 'qwen3_5_text not recognized'"
        found.append(finding("note", "model_type", TEXT_TYPE, why, f"annie-quant audit {folder} --repair --names old"))
    wrapped = "text_config" in config or "ConditionalGeneration" in str(config.get("architectures"))
    if wrapped and not (folder / "preprocessor_config.json").is_file():
        found.append(
            finding(
                "fault",
                "preprocessor_config.json",
                "missing beside a multimodal config",
                "servers look for it even for text",
                f"annie-quant audit {folder} --repair, or serve with --language-model-only",
            )
        )
    if not (folder / "chat_template.jinja").is_file() and "chat_template" not in (
        _json(folder / "tokenizer_config.json") or {}
    ):
        found.append(
            finding(
                "fault",
                "chat template",
                "missing",
                "tools and thinking would not be rendered",
                "copy it from the source",
            )
        )
    return found


def _json(path: Path) -> dict | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
