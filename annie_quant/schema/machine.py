"""What a benchmark ran on: servers, machine, memory and energy."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from annie_quant.printable import printable
from annie_quant.schema.limits import Digest, JsonScalar, ShortText
from annie_quant.untrusted import limited


class ModelMeta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sizes of a model as its server reports them."""

    n_params: int | float | None = None
    n_vocab: int | float | None = None
    n_embd: int | float | None = None
    n_ctx_train: int | float | None = None
    size: int | float | None = None
    vocab_type: int | float | None = None


class Identity(msgspec.Struct, kw_only=True):
    """What a server reports about itself, cut to the limits of the types. meta: what the caller knows beforehand.

    format: of the weights, from the caller, or from the model's file where that is on this machine (bench/backend.py).
    caveats: what of it could not be read, or was cut.
    """

    name: ShortText
    url: Annotated[str, Meta(max_length=2000)] = ""
    model: ShortText | None = None
    runtime: ShortText | None = None
    version: ShortText | None = None
    models_sha256: Digest | None = None
    model_meta: ModelMeta = field(default_factory=ModelMeta)
    chat_template_sha256: Digest | None = None
    sampling_defaults: Annotated[dict[ShortText, JsonScalar | list[ShortText]], Meta(max_length=100)] = {}
    max_model_len: int | float | None = None
    format: ShortText | None = None
    meta: Annotated[dict[ShortText, JsonScalar], Meta(max_length=100)] = {}
    caveats: Annotated[list[ShortText], Meta(max_length=20)] = []


class Environment(msgspec.Struct, kw_only=True):
    """The machine and the versions of a run."""

    time: str = ""
    system: str = ""
    machine: str = ""
    python: str = ""
    cpu: str | None = None
    cores: int = 0
    load_average: list[float] = []
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    packages: dict[str, str] = {}
    gpus: list[dict[str, str]] = []


class MemoryFigures(msgspec.Struct, kw_only=True, frozen=True):
    """Memory of one server at one moment or at its peak; None where the figure cannot be read.

    process_rss_bytes: resident memory of the process and its children. system_used_bytes: MemTotal - MemAvailable, which on
    unified memory (DGX Spark) includes the GPU's share. gpu_process_bytes: NVML's figure for those processes.
    cgroup_bytes: what the kernel charges to the process's control group, which for a container is all of it.
    """

    process_rss_bytes: int | None = None
    system_used_bytes: int | None = None
    gpu_process_bytes: int | None = None
    cgroup_bytes: int | None = None


class MemoryLevels(msgspec.Struct, kw_only=True):
    """Memory of one server: idle, with one request, with five at once, and the highest of the whole run."""

    idle: MemoryFigures
    one: MemoryFigures
    five: MemoryFigures
    peak: MemoryFigures | None = None


class MemoryGrowth(msgspec.Struct, kw_only=True):
    """The slope of a server's memory over a run, its first quarter left out; low, high: 95 % interval (bench/memory_growth.py)."""

    bytes_per_hour: float
    low: float
    high: float
    hours: float
    samples: int
    grows: bool = False


class MemoryBytes(msgspec.Struct, kw_only=True):
    """One figure per level for the report's table. source: the field of MemoryFigures that all are taken from."""

    idle: int | None = None
    one: int | None = None
    five: int | None = None
    peak: int | None = None
    source: str = ""

    @property
    def highest(self) -> int | None:
        """The highest figure that was measured, at any level; None without one."""
        return max((level for level in (self.idle, self.one, self.five, self.peak) if level), default=None)


class Energy(msgspec.Struct, kw_only=True):
    """GPU energy over a backend's measured requests."""

    joules: float
    completion_tokens: int
    joules_per_token: float | None


def limited_identity(fields: dict[str, Any]) -> Identity:
    """Return an Identity of what a server sent: long texts are cut, values of an unexpected type are left out."""
    limits = {"url": 2000, "models_sha256": 64, "chat_template_sha256": 64}
    names = ("name", "url", "model", "runtime", "version", "models_sha256", "chat_template_sha256", "format")
    texts = {name: fields[name][: limits.get(name, 200)] for name in names if isinstance(fields.get(name), str)}
    sizes, caveats = _entries(fields.get("model_meta")), fields.get("caveats")
    known = {name: sizes[name] for name in ModelMeta.__struct_fields__ if _is_number(sizes.get(name))}
    length = limited(fields.get("max_model_len"))
    return Identity(
        **{"name": ""} | texts,
        model_meta=ModelMeta(**known),
        sampling_defaults=_entries(fields.get("sampling_defaults")),
        max_model_len=length if _is_number(length) else None,
        meta={key: value for key, value in _entries(fields.get("meta")).items() if not isinstance(value, list)},
        caveats=[printable(str(text), 200) for text in caveats[:20]] if isinstance(caveats, list) else [],
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _entries(value: Any) -> dict[ShortText, Any]:
    """The first 100 entries of a mapping, each a scalar or a short list of texts."""
    entries: dict[str, Any] = {}
    for key, item in list(value.items())[:100] if isinstance(value, dict) else ():
        if isinstance(item, list):
            item = [str(part)[:200] for part in item[:100]]
        elif isinstance(item, (int, float)):
            item = limited(item)
        elif item is not None:
            item = str(item)[:1000]
        entries[str(key)[:200]] = item
    return entries
