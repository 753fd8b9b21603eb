"""inputs.json: the settings of a benchmark, written first and compared when the run is resumed."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import schema
from annie_quant.bench.backend import Backend
from annie_quant.errors import AnnieError, UsageError
from annie_quant.files import sha256_text
from annie_quant.judge.workloads import Workload
from annie_quant.schema import BackendSettings, BenchConfig, Inputs, SentCase, SentWorkload, WorkloadSettings


def backend_settings(backend: Backend) -> BackendSettings:
    """Return what a run records of a backend."""
    source = _plain(backend.meta.get("source"))
    return BackendSettings(name=backend.name, model=backend.model, source=source, endpoint=backend.endpoint)


def _plain(source: Any) -> str | int | float | bool | None:
    return source if isinstance(source, (int, float, type(None))) else str(source)[:1000]


def workload_settings(workload: Workload) -> WorkloadSettings:
    """Return what a run records of a workload, with a hash of all that is sent and expected."""
    content: list[Any] = [
        [list(c.turns) if c.turns else list(c.blocks) if c.blocks else workload.request(c), dict(c.expect)]
        for c in workload.cases
    ]
    if workload.context is not None:  # runs of versions without contexts stay resumable
        content.append(msgspec.to_builtins(workload.context))
    return WorkloadSettings(
        sha256=workload.sha256,
        asked_sha256=sha256_text(json.dumps([workload.name, workload.gates, content], sort_keys=True, default=str)),
        thinking=workload.thinking,
        max_tokens=workload.max_tokens,
        temperature=workload.temperature,
        gates=list(workload.gates),
    )


def prepare_folder(folder: Path, config: BenchConfig, workloads: Sequence[Workload], resume: bool) -> None:
    """Write inputs.json. Without `resume`, delete the earlier run in the folder.

    Raises UsageError where the folder has records of a benchmark with other settings and `resume` is set. A benchmark that
    ended before its first record (no server answered) left nothing to resume, so its settings are replaced.
    """
    folder.mkdir(parents=True, exist_ok=True)
    inputs = folder / "inputs.json"
    if not resume:
        shutil.rmtree(folder / "streams", ignore_errors=True)
        for name in (
            "records.jsonl",
            "unanswered.jsonl",
            "inputs.json",
            "bench.json",
            "memory.json",
            "reference.jsonl",
            "context.json",
            "memory_trace.json",
            "server_metrics.json",
        ):
            (folder / name).unlink(missing_ok=True)
    elif inputs.exists() and _has_records(folder / "records.jsonl"):
        try:
            changed = config.differences(schema.decode(Inputs, inputs).config)
        except AnnieError:
            changed = ["inputs.json cannot be read"]
        if changed:
            old = shlex.join(str(folder / name) for name in ("records.jsonl", "streams") if (folder / name).exists())
            raise UsageError(
                f"{folder} holds a benchmark with other settings ({', '.join(changed)})",
                f"choose another --output, or delete its records to start again: rm -r {old}",
            )
    schema.write(inputs, Inputs(config=config, workloads=[complete_workload(w) for w in workloads]))


def _has_records(records: Path) -> bool:
    return records.is_file() and records.stat().st_size > 0


def complete_workload(workload: Workload) -> SentWorkload:
    """Return all that a run sends and expects."""
    return SentWorkload(
        name=workload.name,
        description=workload.description,
        sha256=workload.sha256,
        system=workload.system_prompt,
        thinking=workload.thinking,
        max_tokens=workload.max_tokens,
        temperature=workload.temperature,
        gates=list(workload.gates),
        context=workload.context,
        cases=[
            SentCase(
                id=c.id,
                messages=[dict(m) for m in c.messages],
                turns=[turn if isinstance(turn, str) else dict(turn) for turn in c.turns],
                expect=dict(c.expect),
                tools=[dict(t) for t in tools] if (tools := workload.tools_for(c)) else None,
                system=c.system,
                max_tokens=c.max_tokens,
                arrival_s=c.arrival_s,
                blocks=list(c.blocks),
                prompt_tokens=c.prompt_tokens,
            )
            for c in workload.cases
        ],
    )
