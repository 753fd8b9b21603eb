"""bench.json and run.json: the two documents that hold a run's results."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import field

from annie_quant.errors import UsageError
from annie_quant.schema.machine import Environment, Identity, MemoryLevels, limited_identity
from annie_quant.schema.reading import SCHEMA_VERSION, UPGRADES, decode, write
from annie_quant.schema.results import Aggregates, Verdict
from annie_quant.schema.settings import BenchConfig


class EarlyStop(msgspec.Struct, kw_only=True):
    """The planned look at which everything was decided. level: the significance level of each look."""

    look: int
    looks: int
    level: float


class Ended(msgspec.Struct, kw_only=True):
    """How a benchmark ended. unasked: visits that a time budget or an early stop left out."""

    unasked: int = 0
    stopped: EarlyStop | None = None
    prefix_cache: Literal["warm", "off"] = "warm"


class Bench(msgspec.Struct, kw_only=True):
    """bench.json: one benchmark.

    requests: measured requests on record. backends: what each server reports about itself. memory: by backend. aggregates
    and verdict are moved to run.json when that is written (write_run).
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
    """A finished stage of a run. ok: of an audit, whether the checkpoint is sound; None of other stages, and in older runs."""

    name: str
    seconds: float | None = None
    summary: str = ""
    ok: bool | None = None


class Run(msgspec.Struct, kw_only=True):
    """run.json: command, machine, settings, results and verdict. It holds the only copy of the run's aggregates."""

    schema_version: int = SCHEMA_VERSION
    argv: list[str] = []
    environment: Environment = field(default_factory=Environment)
    config: dict[str, Any] = {}
    stages: list[Stage] = []
    aggregates: Aggregates = field(default_factory=Aggregates)
    verdict: Verdict = field(default_factory=Verdict)


def _upgrade(document: dict[str, Any]) -> None:
    """Version 1 → 2: what servers report was not limited, both files had the aggregates, KL without tokens was {"n_tokens": 0}."""
    aggregates = document.get("aggregates")
    for sides in _mappings(aggregates.get("offline") if isinstance(aggregates, dict) else None):
        for side in _mappings(sides):
            side.update(
                {key: None for key in ("kl", "kl_conversations", "kl_text") if side.get(key) == {"n_tokens": 0}}
            )
    identities = document.get("backends")
    if isinstance(identities, dict):
        document["backends"] = {
            name: msgspec.to_builtins(limited_identity({"name": name, **fields}))
            if isinstance(fields, dict)
            else fields
            for name, fields in identities.items()
        }


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [item for item in value.values() if isinstance(item, dict)] if isinstance(value, dict) else []


UPGRADES |= {Bench: _upgrade, Run: _upgrade}


def read_bench(folder: str | os.PathLike[str]) -> Bench:
    """bench.json of a run directory, with aggregates and verdict from run.json where they were moved there.

    Raises UsageError where the folder holds no finished benchmark, EnvironmentFault for a file that cannot be read.
    """
    root = Path(folder)
    if not (root / "bench.json").is_file():
        raise UsageError(
            f"{root} holds no finished benchmark (bench.json is missing)", f"annie-quant bench ... --output {root}"
        )
    bench = decode(Bench, root / "bench.json")
    if not bench.aggregates.served and (root / "run.json").is_file():
        run = decode(Run, root / "run.json")
        bench.aggregates, bench.verdict = run.aggregates, run.verdict
    return bench


def write_run(folder: str | os.PathLike[str], run: Run) -> None:
    """Write run.json, then remove aggregates and verdict from bench.json, so that they are stored once."""
    root = Path(folder)
    write(root / "run.json", run)
    if (root / "bench.json").is_file():
        bench = msgspec.to_builtins(decode(Bench, root / "bench.json"))
        del bench["aggregates"], bench["verdict"]
        write(root / "bench.json", bench)
