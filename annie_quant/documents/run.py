"""bench.json and run.json with the results of a run, and inputs.json with its settings and workloads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import field

from annie_quant.core.errors import UsageError
from annie_quant.core.host import Environment
from annie_quant.documents.prompts import ContextFile
from annie_quant.documents.reading import SCHEMA_VERSION, JsonScalar, decode, write
from annie_quant.documents.records import Load
from annie_quant.documents.results import (
    Aggregates,
    Identity,
    MemoryLevels,
    Roles,
    Verdict,
)


class BackendSettings(msgspec.Struct, kw_only=True):
    """A backend of a benchmark.

    source: hash or name of the fine-tuned weights.
    """

    name: str
    model: str | None = None
    source: JsonScalar = None


class WorkloadSettings(msgspec.Struct, kw_only=True):
    """A workload of a benchmark.

    sha256: of its file.
    asked_sha256: of its requests and expectations.
    """

    sha256: str = ""
    asked_sha256: str = ""
    thinking: bool = False
    max_tokens: int = 0
    temperature: float = 0.0
    gates: list[str] = []


class BenchConfig(msgspec.Struct, kw_only=True):
    """All settings of a benchmark.

    warmup: requests per backend and workload that are not counted.
    runs: measurements per case.
    n: cases per workload (None: all).
    prefix_cache: "warm" (servers as they come) or "off" (no reuse between requests, where the
        server can).
    roles: those that the user named.
    budget_s: time after which the measurement stops, in seconds.
    noise_share: share of the prompts that are measured a second time where runs is 1, for the noise
        floor (bench/noise.py).
    """

    backends: list[BackendSettings] = []
    warmup: int = 2
    runs: int = 5
    n: int | None = None
    seed: int = 0
    loads: list[Load] = field(default_factory=lambda: [Load()])
    prefix_cache: Literal["warm", "off"] = "warm"
    roles: Roles = field(default_factory=Roles)
    workloads: dict[str, WorkloadSettings] = {}
    timeout_s: float = 120.0
    with_memory: bool = True
    budget_s: float | None = None
    noise_share: float = 0.0

    # These may differ between a run and its continuation.
    NOT_COMPARED = (
        "timeout_s",
        "with_memory",
        "budget_s",
        "noise_share",
        "roles",
    )

    def differences(self, other: BenchConfig) -> list[str]:
        """Return the names of the settings that differ from `other` and that determine the requests."""
        names = (name for name in self.__struct_fields__ if name not in self.NOT_COMPARED)
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @property
    def greedy(self) -> frozenset[str]:
        """The workloads that are asked without sampling, so that each repeat should have the same answer."""
        return frozenset(
            name for name, workload in self.workloads.items() if not workload.temperature
        )

    @property
    def with_thinking(self) -> frozenset[str]:
        """The workloads that are asked with thinking on."""
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
    prompt_tokens: int = 0
    follow_up_tokens: int = 0


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


class Ended(msgspec.Struct, kw_only=True):
    """How a benchmark ended.

    unasked: number of visits that a time budget left out.
    """

    unasked: int = 0
    prefix_cache: Literal["warm", "off"] = "warm"


class Bench(msgspec.Struct, kw_only=True):
    """bench.json: one benchmark.

    requests: measured requests on record.
    backends: what each server reports about itself.
    memory: by backend.
    aggregates, verdict: moved to run.json when that is written (write_run).
    """

    schema_version: int = SCHEMA_VERSION
    ended: Ended = field(default_factory=Ended)
    requests: int = 0
    environment: Environment = field(default_factory=Environment)
    config: BenchConfig = field(default_factory=BenchConfig)
    backends: dict[str, Identity] = {}
    memory: dict[str, MemoryLevels] = {}
    aggregates: Aggregates = field(default_factory=Aggregates)
    verdict: Verdict = field(default_factory=Verdict)


class Stage(msgspec.Struct, kw_only=True):
    """A finished stage of a run."""

    name: str
    seconds: float | None = None
    summary: str = ""


class Run(msgspec.Struct, kw_only=True):
    """run.json: command, machine, settings, results and verdict.

    It holds the only copy of the run's aggregates.
    """

    schema_version: int = SCHEMA_VERSION
    argv: list[str] = []
    environment: Environment = field(default_factory=Environment)
    config: dict[str, Any] = {}
    stages: list[Stage] = []
    aggregates: Aggregates = field(default_factory=Aggregates)
    verdict: Verdict = field(default_factory=Verdict)


def read_bench(folder: str | os.PathLike[str]) -> Bench:
    """Return bench.json of a run directory, with aggregates and verdict from run.json where they were moved there.

    Raises UsageError where the folder has no finished benchmark, EnvironmentFault for a file that
    cannot be read.
    """
    root = Path(folder)
    if not (root / "bench.json").is_file():
        message = f"{root} holds no finished benchmark (bench.json is missing)"
        raise UsageError(message, f"annie-quant bench ... --output {root}")
    bench = decode(Bench, root / "bench.json")
    if not bench.aggregates.served and (root / "run.json").is_file():
        run = decode(Run, root / "run.json")
        bench.aggregates = run.aggregates
        bench.verdict = run.verdict
    return bench


def write_run(folder: str | os.PathLike[str], run: Run) -> None:
    """Write run.json, then remove aggregates and verdict from bench.json, so that they are stored once."""
    root = Path(folder)
    write(root / "run.json", run)
    if (root / "bench.json").is_file():
        bench = msgspec.to_builtins(decode(Bench, root / "bench.json"))
        del bench["aggregates"], bench["verdict"]
        write(root / "bench.json", bench)
