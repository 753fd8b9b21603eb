"""Which servers load a checkpoint, from which version on, and why others do not.

Rules and sources are of November 2026.

Versions are those of assets/server_versions.json. The table has what was read in the servers'
sources at its date, or what a pull request states. A feature without a row was not read; since:
null says that no version that was read has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from annie_quant import models
from annie_quant.checkpoint import runtime_names
from annie_quant.checkpoint.checks import DEADLY, NOT_JUDGED
from annie_quant.checkpoint.dialects import compressed_tensors, fp8, modelopt
from annie_quant.checkpoint.gguf.layout import Layout, read_settings, written_families
from annie_quant.checkpoint.gguf.reader import BLACKWELL_PROMPTS
from annie_quant.checkpoint.linears import COLUMNS_PER_RANK, HEAD
from annie_quant.core.errors import CheckpointError
from annie_quant.core.files import ASSETS
from annie_quant.core.host import version_key
from annie_quant.core.text import printable
from annie_quant.documents import Finding, ServerSupport
from annie_quant.documents.checkpoint import Loads
from annie_quant.models.formats import FP8_CHANNEL, KNOWN_ALGORITHMS, MIXED, NVFP4, NVFP4_AWQ, W4A16

if TYPE_CHECKING:
    from annie_quant.checkpoint.dialects import QuantizedFolder

CONVERTED = {"llama.cpp"}  # servers that load a file that is made from the folder
RELEASED = (0, 2, 0)  # builds without a tag call themselves 0.0 or 0.1.dev
Rule = tuple[Loads, str]  # ServerSupport.loads and .note


def verdicts(model: QuantizedFolder, findings: Sequence[Finding]) -> list[ServerSupport]:
    """Return which servers load a checkpoint."""
    deadly = next((f for f in findings if f.code in DEADLY), None)
    if deadly is not None:
        return [ServerSupport(name, "no", deadly.code) for name in RULES]
    unknown = next((f for f in findings if f.code in NOT_JUDGED), None)
    if unknown is not None:
        return [ServerSupport(name, "unknown", unknown.code) for name in RULES]
    judged = [ServerSupport(name, *rule(model)) for name, rule in RULES.items()]
    oldest = _oldest_of_formats(model)
    for support in judged:
        if support.loads != "no" and support.server in oldest:
            support.note = ", ".join(filter(None, [oldest[support.server], support.note]))
    return judged


def is_awq(model: QuantizedFolder) -> bool:
    return model.config.algo == NVFP4_AWQ or any(x.pre_quant for x in model.linears.values())


def _vllm(model: QuantizedFolder) -> Rule:
    folder = model.folder
    if is_awq(model):
        return "no", "NVFP4_AWQ is not loaded (#45333)"
    if (
        runtime_names.is_multimodal(folder)
        and not (folder.path / runtime_names.PREPROCESSOR).is_file()
    ):
        return "no", f"{runtime_names.PREPROCESSOR} is missing (annie-quant audit --repair)"
    if any(c % COLUMNS_PER_RANK for c in nvfp4_columns(model).values()):
        return "no", f"columns are not a multiple of {COLUMNS_PER_RANK} (#48898)"
    notes = []
    if tensor_parallel_ranks(model) < 2:
        notes.append(
            f"on one rank only: columns per rank are not a multiple of {COLUMNS_PER_RANK} (#48898)"
        )
    if f"{folder.family.mtp}fc" in nvfp4_columns(model):
        notes.append("without drafts: it builds mtp.fc in 16 bits, and it is in NVFP4 (#38832)")
    # vLLM on a GPU keeps DeltaNet's state in the model's dtype, not in float32 (docs/numerics.md).
    if "mamba_ssm_dtype" not in folder.text_config and any(map(models.is_log_decay, folder)):
        flag = "unless served with --mamba-ssm-cache-dtype float32 (config.json has no mamba_ssm_dtype)"
        notes.append(f"with DeltaNet's state in bfloat16 {flag}")
    return "yes", ", ".join(notes)


def nvfp4_columns(model: QuantizedFolder) -> dict[str, int]:
    """Return NVFP4 linear → columns.

    0 for a weight without dimensions, which is a finding (weight_shape).
    """
    return {x.name: 2 * (model.folder.info(x.weight).shape or (0,))[-1] for x in model.nvfp4}


def tensor_parallel_ranks(model: QuantizedFolder) -> int:
    """Return the largest number of ranks over which every NVFP4 linear can be divided.

    It is 1, 2, 4 or 8.

    Only row-parallel linears are divided by columns; each rank's columns must be a multiple of
    COLUMNS_PER_RANK.
    """
    row_parallel = model.folder.family.row_parallel
    columns = [c for name, c in nvfp4_columns(model).items() if name.endswith(row_parallel)]
    for ranks in (8, 4, 2):
        if not any(c % (ranks * COLUMNS_PER_RANK) for c in columns):
            return ranks
    return 1


def fits_modelopt_option(method: str, algorithm: str) -> bool:
    """Return whether --quantization modelopt or modelopt_fp4 names a checkpoint's format.

    A checkpoint of another format is served without the option: servers read the format from
    config.json (docs.sglang.io/advanced_features/quantization.html: no --quantization for a
    quantized model).

    method, algorithm: of the checkpoint's settings.
    """
    return method == modelopt.NAME and "MIXED" not in algorithm


def sglang(model: QuantizedFolder) -> Rule:
    if is_awq(model):
        return "no", "NVFP4_AWQ is not loaded"
    plain_nvfp4 = model.linears and fits_modelopt_option(model.config.method, model.config.algo)
    if plain_nvfp4 and not (model.folder.path / modelopt.HF_QUANT_CONFIG).exists():
        flag = "with --quantization modelopt_fp4 (hf_quant_config.json is missing)"
        return "after", ", ".join(filter(None, [flag, _sglang_drafts(model)]))
    return "yes", _sglang_drafts(model)


def _sglang_drafts(model: QuantizedFolder) -> str:
    """Return why SGLang accepts no drafts of the checkpoint's head, "" where it does or where there is none."""
    family = model.folder.family
    if not any(map(family.in_mtp, model.folder)) or not model.linears:
        return ""
    newest = table()["SGLang"].newest
    if model.config.method == compressed_tensors.NAME:
        return f"without drafts up to {newest}: no linear of the head is loaded from this layout (#35797)"
    if any(map(family.in_mtp, nvfp4_columns(model))):
        return f"without drafts up to {newest}: the head is built in 16 bits, and it is in NVFP4"
    return ""


def old_runtimes(model: QuantizedFolder) -> Rule:
    """vLLM 0.16, SGLang 0.5.4 and others that know Qwen3.5 in its multimodal form only."""
    if is_awq(model):
        return "no", "NVFP4_AWQ is not loaded"
    if model.config.algo == MIXED:
        return "no", "mixed precision is not loaded"
    if runtime_names.named_form(model.folder) is None:
        return "unknown", "these versions are judged for dense Qwen3.5 only"
    reason = runtime_names.obstacle_on_old_runtimes(model.folder)
    return (
        "no" if reason else "yes",
        f"{reason} (annie-quant audit --repair --names old)" if reason else "",
    )


def transformers(model: QuantizedFolder) -> Rule:
    if not model.linears or model.config.method == fp8.NAME:
        return "yes", "from 5.2"
    if model.config.method == "compressed-tensors":
        return "yes", "from 5.2 with the compressed-tensors package"
    if model.config.algo and model.config.algo not in KNOWN_ALGORITHMS:
        return "no", f"quant_algo {printable(model.config.algo, 40)!r} is not known here"
    return "after", "after `import annie_quant.runtime` (it has no ModelOpt loader, #46772)"


def llama_cpp(model: QuantizedFolder) -> Rule:
    folder = model.folder
    linears = model.linears
    if any(x.pre_quant for x in linears.values()):
        return "no", "GGUF has no activation scales"
    try:
        layout = Layout.of(folder.family, read_settings(folder))
        for name in model.weights:
            layout.name(name)
    except (CheckpointError, KeyError, TypeError, ValueError):
        return (
            "no",
            f"its tensors are not of a text model that is written here ({written_families()})",
        )
    if layout.heads and layout.heads.key_dim != layout.heads.value_dim:
        return "no", "DeltaNet's key and value heads differ in size"
    convert = "after `annie-quant convert --to gguf`"
    columns = nvfp4_columns(model)
    if columns and not layout.names.computes_nvfp4(folder):
        return "after", f"{convert}, as 16-bit numbers: no NVFP4 in {layout.names.architecture}"
    if any(x.format == "fp8" for x in linears.values()):
        convert += ", FP8 as Q8_0" if columns else ", as 16-bit numbers"
    if any(c % 64 for c in columns.values()):
        convert += ", rows not a multiple of 64 as 16-bit numbers"
    if any(x.input_global is None for x in model.nvfp4):
        convert += f"; {BLACKWELL_PROMPTS}"
    return "after", convert


RULES = {
    "vLLM": _vllm,
    "SGLang": sglang,
    "runtimes on transformers 4.57": old_runtimes,
    "transformers": transformers,
    "llama.cpp": llama_cpp,
}


# ---- versions


class Feature(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """since: the first version that has it, of those that were read; None: none."""

    since: str | None
    source: str


class ServerFeatures(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """newest: of the versions that were read; read: which they were, how and when."""

    newest: str
    read: str
    features: dict[str, Feature]


class LoadingVersions(msgspec.Struct, frozen=True):
    """The versions of a server that load a folder.

    since: the first one; "" where that is not known, None where no version that was read loads it.
    reason: the feature that decides, with its source. read: what the table rests on.
    """

    server: str
    since: str | None
    reason: str
    read: str

    def __str__(self) -> str:
        unknown = {None: "no version that was read", "": "not known"}
        versions = unknown.get(self.since, f"from {self.since}")
        return f"{self.server}: {versions} ({self.reason}; {self.read})"


@cache
def table() -> dict[str, ServerFeatures]:
    return msgspec.json.decode(
        (ASSETS / "server_versions.json").read_bytes(), type=dict[str, ServerFeatures]
    )


def needed(model: QuantizedFolder) -> list[str]:
    """Return the features of a server that a folder needs, by the names of the table."""
    architectures = model.folder.config.get("architectures")
    classes = [str(c) for c in architectures[:1]] if isinstance(architectures, list) else []
    if not model.linears or model.config.method == fp8.NAME:
        return classes
    head = (
        [f"quantized head of {model.folder.family.name.removesuffix(' MoE')}"]
        if HEAD in model.linears
        else []
    )
    return [*classes, *_formats(model), *head]


def _formats(model: QuantizedFolder) -> list[str]:
    """Return the features that the formats of a folder's linears need."""
    config = model.config
    algorithms = {config.algo_of(name) for name in model.linears}
    if config.method == compressed_tensors.NAME:
        known = (NVFP4.modelopt, W4A16.modelopt)
        return [f"compressed-tensors {a}" for a in sorted(algorithms) if a in known]
    if config.algo != MIXED:
        return [config.algo]
    named = [a for a in (W4A16.modelopt, FP8_CHANNEL.modelopt) if a in algorithms]
    return [MIXED, *(f"{a} in {MIXED}" for a in named)]


def _oldest_of_formats(model: QuantizedFolder) -> dict[str, str]:
    """Return server → the first version that reads the formats, where these are more than plain NVFP4 in ModelOpt's layout."""
    formats = _formats(model) if model.linears and model.config.method != fp8.NAME else []
    notes: dict[str, str] = {}
    for server, known in table().items():
        rows = [(name, known.features[name]) for name in formats if name in known.features]
        dated = [row for row in rows if row[1].since]
        if formats != [NVFP4.modelopt] and dated and server not in CONVERTED:
            name, feature = max(dated, key=lambda row: version_key(row[1].since or ""))
            notes[server] = f"from {feature.since} ({name})"
    return notes


def too_old(model: QuantizedFolder, server: str, version: str) -> str:
    """Return why this version of a server does not load a folder, as far as the table knows; "" if it does."""
    if version_key(version) < RELEASED:
        return ""
    for known in versions(model):
        is_older = known.since and version_key(version) < version_key(known.since)
        if known.server.lower() == server.lower() and is_older:
            return f"{known.server} {version} is too old: from {known.since} ({known.reason})"
    return ""


def versions(model: QuantizedFolder) -> list[LoadingVersions]:
    """Return from which version on each server loads a folder, as far as the table knows."""
    result = []
    for server, known in table().items():
        features = needed(model)
        if server in CONVERTED:
            features = ["GGUF NVFP4"] if model.linears else []
        rows = [(name, known.features[name]) for name in features if name in known.features]
        unknown = [name for name in features if name not in known.features]
        never = [row for row in rows if row[1].since is None]
        since: str | None = ""
        reason = f"{', '.join(unknown) or 'a 16-bit model'} was not read"
        if never or (rows and not unknown):
            newest = max(rows, key=lambda row: version_key(row[1].since or ""))
            name, feature = never[0] if never else newest
            since = feature.since
            reason = f"{name}: {feature.source}"
        result.append(LoadingVersions(server, since, reason, known.read))
    return result
