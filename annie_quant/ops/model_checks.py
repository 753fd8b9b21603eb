"""Checks of a checkpoint before it is served: shards, format and its loaders, config names, files for vision.

They read headers and configs only; `annie-quant audit` reads every tensor.

Access to the machine for all checks, in one class, so that tests can replace it with another machine's answers.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType, field

from annie_quant.core import host
from annie_quant.documents import salvage, salvage_or_default
from annie_quant.ops.recipes import TokenizerConfig

Level = Literal["ok", "note", "fault"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    level    "ok"; "note": limits something; "fault": stops the work
    check    what was checked
    message  what is there
    why      why it matters
    fix      the command or change that fixes it
    """

    level: Level
    check: str
    message: str
    why: str = ""
    fix: str = ""


def ok(check: str, message: str) -> Finding:
    return Finding("ok", check, message)


def note(check: str, message: str, why: str = "", fix: str = "") -> Finding:
    return Finding("note", check, message, why, fix)


def fault(check: str, message: str, why: str = "", fix: str = "") -> Finding:
    return Finding("fault", check, message, why, fix)


@dataclass(frozen=True)
class Answer:
    """Output of a program. code: its exit code; 127 if it is not installed, 124 if it did not end in time."""

    code: int
    text: str

    @property
    def first_line(self) -> str:
        return self.text.splitlines()[0] if self.text else ""


class Probe:
    """The real machine."""

    def run(self, *command: str, timeout_s: float = 20.0) -> Answer:
        if self.which(command[0]) is None:
            return Answer(127, "")
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return Answer(124, f"no answer in {timeout_s:g} s")
        except OSError as error:
            return Answer(126, str(error))
        output = process.stdout if process.returncode == 0 else process.stderr or process.stdout
        return Answer(process.returncode, output.strip())

    def which(self, program: str) -> str | None:
        return shutil.which(program)

    def memory(self) -> host.Memory | None:
        return host.memory()

    def machine(self) -> str:
        return platform.machine()

    def python(self) -> tuple[int, ...]:
        return tuple(sys.version_info[:3])

    def in_venv(self) -> bool:
        return sys.prefix != sys.base_prefix

    def externally_managed(self) -> bool:
        """Whether the system's Python refuses pip (PEP 668)."""
        return any(Path(sys.base_prefix).glob("lib/python3*/EXTERNALLY-MANAGED"))

    def installed(self, module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    def version(self, distribution: str) -> str | None:
        return host.package_version(distribution)

    def disk_free(self, path: str = ".") -> int:
        return shutil.disk_usage(path).free

    def writable(self, path: Path) -> bool:
        return os.access(path, os.W_OK)

    def env(self, name: str) -> str | None:
        return os.environ.get(name)

    def torch_cuda_version(self) -> str | None:
        """Return the CUDA version of torch's build. It runs in another process: importing torch costs seconds and memory."""
        answer = self.run(sys.executable, "-c", "import torch; print(torch.version.cuda or '')", timeout_s=60)
        return answer.text or None if answer.code == 0 else None


TEXT_TYPE = "qwen3_5_text"
DOWNLOAD = "hf download REPO --local-dir DIR"


class Quantization(msgspec.Struct):
    """Its names for the format, in config.json and hf_quant_config.json."""

    quant_algo: str | None = None
    format: str | None = None
    quant_method: str | None = None
    kv_cache_scheme: object = None
    kv_cache_quant_algo: str | None = None


class Config(msgspec.Struct):
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
        *_check_kv_cache(folder, config),
    ]


def _check_kv_cache(folder: Path, config: Config) -> list[Finding]:
    """A KV cache in NVFP4, which servers accept."""
    scheme = config.quantization_config.kv_cache_scheme if config.quantization_config else None
    exported = salvage_or_default(Exported, folder / "hf_quant_config.json").quantization
    kv_cache = (scheme if isinstance(scheme, str) else exported.kv_cache_quant_algo or "").upper()
    if "NVFP4" not in kv_cache:
        return []
    why = "it loops at token 0 with thinking and tools (Qwen3.8-Flash-Next #19, 2026)"
    return [fault("KV cache", f"the checkpoint asks for {kv_cache}", why, "--kv-cache-dtype fp8")]


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
