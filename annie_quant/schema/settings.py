"""inputs.json: the settings of a benchmark, and its workloads as they were sent."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import field

from annie_quant.schema.limits import JsonScalar
from annie_quant.schema.records import Load
from annie_quant.schema.results import Roles
from annie_quant.schema.workloads import ContextFile


class BackendSettings(msgspec.Struct, kw_only=True):
    """A backend as a benchmark was asked to measure it. source: hash or name of the fine-tuned weights. endpoint: the API."""

    name: str
    model: str | None = None
    source: JsonScalar = None
    endpoint: str = "chat"


class WorkloadSettings(msgspec.Struct, kw_only=True):
    """A workload as a benchmark measured it. sha256: of its file. asked_sha256: of its requests and expectations."""

    sha256: str = ""
    asked_sha256: str = ""
    thinking: bool = False
    max_tokens: int = 0
    temperature: float = 0.0
    gates: list[str] = []


class BenchConfig(msgspec.Struct, kw_only=True):
    """All settings of a benchmark.

    warmup: requests per backend and workload that are not counted. runs: measurements per case. n: cases per workload
    (None: all). prefix_cache: "warm" (servers as they come) or "off" (no reuse between requests, where the server can).
    reference: the backend that answer length is compared with. roles: those that the user named. budget_s: stop measuring after so
    many seconds.
    noise_share: share of the prompts that are measured a second time where runs is 1, for the noise floor (bench/noise.py).
    sustained: repeat the prompts until budget_s ends, so that requests which were not sent are no caveat.
    stop_early: stop at a planned look when everything is decided (bench/sequential.py).
    """

    backends: list[BackendSettings] = []
    warmup: int = 2
    runs: int = 5
    n: int | None = None
    seed: int = 0
    loads: list[Load] = field(default_factory=lambda: [Load()])
    prefix_cache: Literal["warm", "off"] = "warm"
    reference: str | None = None
    roles: Roles = field(default_factory=Roles)
    workloads: dict[str, WorkloadSettings] = {}
    timeout_s: float = 120.0
    with_memory: bool = True
    budget_s: float | None = None
    stop_early: bool = False
    noise_share: float = 0.0
    sustained: bool = False

    # These may differ between a run and its continuation.
    NOT_COMPARED = (
        "timeout_s",
        "with_memory",
        "budget_s",
        "stop_early",
        "noise_share",
        "sustained",
        "reference",
        "roles",
    )

    def differences(self, other: BenchConfig) -> list[str]:
        """Names of the settings that decide which requests are sent, and that differ from `other`."""
        names = (name for name in self.__struct_fields__ if name not in self.NOT_COMPARED)
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @property
    def greedy(self) -> frozenset[str]:
        """Workloads whose answers are the same at every repeat."""
        return frozenset(name for name, workload in self.workloads.items() if not workload.temperature)

    @property
    def with_thinking(self) -> frozenset[str]:
        """Workloads that are asked with thinking on."""
        return frozenset(name for name, workload in self.workloads.items() if workload.thinking)


class SentCase(msgspec.Struct, kw_only=True):
    """One case in inputs.json, with all that was sent."""

    id: str
    messages: list[dict[str, Any]] = []
    turns: list[str | dict[str, Any]] = []
    expect: dict[str, Any] = {}
    tools: list[dict[str, Any]] | None = None
    system: str | None = None
    max_tokens: int | None = None
    arrival_s: float | None = None
    blocks: list[str] = []
    prompt_tokens: int = 0


class SentWorkload(msgspec.Struct, kw_only=True):
    """One workload in inputs.json: complete, so that a run directory explains itself."""

    name: str
    description: str = ""
    sha256: str = ""
    system: str | None = None
    thinking: bool = False
    max_tokens: int = 0
    temperature: float = 0.0
    gates: list[str] = []
    context: ContextFile | None = None
    cases: list[SentCase] = []


class Inputs(msgspec.Struct, kw_only=True):
    """inputs.json: the settings of a benchmark and its workloads."""

    config: BenchConfig
    workloads: list[SentWorkload] = []
