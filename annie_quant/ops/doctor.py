"""Checks of this machine: what is missing for which stage, and the one command that fixes it. Nothing is changed.

examine()                          the machine: installation, GPU, containers
examine(model=folder)              also a checkpoint before it is served
examine(log=file)                  also a server's log against the known errors
fix_plan(findings)                 the commands alone, faults first
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType, field

from annie_quant.core.errors import UsageError
from annie_quant.documents import salvage, salvage_or_default
from annie_quant.ops import machine_checks
from annie_quant.ops.probe import CheckResult, Probe, fault, note, ok
from annie_quant.ops.recipes import TokenizerConfig

__all__ = ["CheckResult", "Probe", "examine", "fix_plan"]


def examine(
    model: str | os.PathLike | None = None, log: str | os.PathLike | None = None, probe: Probe | None = None
) -> list[CheckResult]:
    """Run all checks, in the order in which a run needs them. Raises UsageError for a log that cannot be read."""
    probe = probe or Probe()
    findings = [f for check in machine_checks.CHECKS for f in check(probe)]
    if model is not None:
        findings += check_model(Path(model))
    if log is not None:
        findings.append(check_log(Path(log)))
    return findings


def check_log(path: Path) -> CheckResult:
    """Compare a server's log with the known errors."""
    from annie_quant.ops import known_errors, server

    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {str(error.strerror).lower()}", "pass a server's log file") from None
    known = known_errors.find_error(text)
    if known:
        return fault("server log", server.cause_line(path), known.cause, known.fix)
    return ok("server log", f"no known error; the server's phase: {known_errors.phase(text)}")


def fix_plan(findings: Iterable[CheckResult]) -> list[str]:
    """Return the commands that fix the findings, faults first, each once."""
    rows = [f for f in findings if f.fix and f.level != "ok"]
    return list(dict.fromkeys(f.fix for level in ("fault", "note") for f in rows if f.level == level))


TEXT_TYPE = "qwen3_5_text"
DOWNLOAD = "hf download REPO --local-dir DIR"


class Quantization(msgspec.Struct):
    """Its names for the format, in config.json and hf_quant_config.json."""

    quant_algo: str | None = None
    format: str | None = None
    quant_method: str | None = None
    kv_cache_scheme: object = None
    kv_cache_quant_algo: str | None = None


class ModelConfig(msgspec.Struct):
    """What the checks need of config.json."""

    model_type: str | None = None
    architectures: list[str] | None = None
    text_config: dict | UnsetType | None = UNSET
    quantization_config: Quantization | None = None


class Exported(msgspec.Struct):
    """hf_quant_config.json."""

    quantization: Quantization = field(default_factory=Quantization)


class Index(msgspec.Struct):
    """model.safetensors.index.json."""

    weight_map: dict[str, str] = {}


def check_model(folder: Path) -> list[CheckResult]:
    """Check a checkpoint before it is served, by headers and configs only; `annie-quant audit` reads every tensor."""
    try:
        config = salvage(ModelConfig, folder / "config.json")
    except (ValueError, OSError):
        config = None
    if config is None:
        return [fault("checkpoint", f"{folder} has no readable config.json", "no server can load it")]
    return [
        _check_shards(folder),
        _check_format(folder, config),
        *_check_names(folder, config),
        *_check_kv_cache(folder, config),
    ]


def _check_kv_cache(folder: Path, config: ModelConfig) -> list[CheckResult]:
    """Report a KV cache in NVFP4, which servers accept."""
    scheme = config.quantization_config.kv_cache_scheme if config.quantization_config else None
    exported = salvage_or_default(Exported, folder / "hf_quant_config.json").quantization
    kv_cache = (scheme if isinstance(scheme, str) else exported.kv_cache_quant_algo or "").upper()
    if "NVFP4" not in kv_cache:
        return []
    why = "it loops at token 0 with thinking and tools (Qwen3.8-Flash-Next #19, 2026)"
    return [fault("KV cache", f"the checkpoint asks for {kv_cache}", why, "--kv-cache-dtype fp8")]


def _check_shards(folder: Path) -> CheckResult:
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


def _check_format(folder: Path, config: ModelConfig) -> CheckResult:
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


def _check_names(folder: Path, config: ModelConfig) -> list[CheckResult]:
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
