"""A benchmark's folder: what was asked and how, written down first, and checked when a run goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from annie_quant.bench.backend import Backend
from annie_quant.bench.load_profile import Load
from annie_quant.errors import UsageError
from annie_quant.files import read_json, sha256_text, write_json
from annie_quant.judge.workloads import Workload


def config_of(
    backends: Sequence[Backend],
    workloads: Sequence[Workload],
    warmup: int,
    runs: int,
    n: int | None,
    seed: int,
    loads: Sequence[Load],
    prefix_cache: str,
    reference: str | None,
) -> dict[str, Any]:
    """All that decides what is asked of whom: a run may only go on where this is the same."""
    return {
        "backends": [{"name": b.name, "model": b.model, "source": b.meta.get("source")} for b in backends],
        "warmup": warmup,
        "runs": runs,
        "n": n,
        "seed": seed,
        "loads": [{"concurrency": load.concurrency, "rate_per_s": load.rate_per_s} for load in loads],
        "prefix_cache": prefix_cache,
        "reference": reference,
        "workloads": {
            w.name: {
                "sha256": w.sha256,
                "asked_sha256": _fingerprint(w),
                "thinking": w.thinking,
                "max_tokens": w.max_tokens,
                "temperature": w.temperature,
                "gates": list(w.gates),
            }
            for w in workloads
        },
    }


def _fingerprint(workload: Workload) -> str:
    asked = [[workload.request(c) if not c.turns else list(c.turns), dict(c.expect)] for c in workload.cases]
    return sha256_text(json.dumps([workload.name, workload.gates, asked], sort_keys=True, default=str))


def open_folder(folder: Path, config: dict[str, Any], workloads: Sequence[Workload], resume: bool) -> None:
    """Make the folder ready. Raises UsageError where it holds a benchmark with other settings, unless it may start over."""
    folder.mkdir(parents=True, exist_ok=True)
    inputs = folder / "inputs.json"
    if not resume:
        shutil.rmtree(folder / "streams", ignore_errors=True)
        for stale in ("records.jsonl", "inputs.json", "bench.json", "memory.json"):
            (folder / stale).unlink(missing_ok=True)
    elif inputs.exists() and (folder / "records.jsonl").exists():
        before = read_json(inputs).get("config")
        changed = [k for k in config if before is None or before.get(k) != json.loads(json.dumps(config[k]))]
        if changed:
            raise UsageError(
                f"{folder} holds a benchmark with other settings ({', '.join(changed)})",
                "choose another --output, or start it over with resume off",
            )
    write_json(inputs, {"config": config, "workloads": [_described(w) for w in workloads]})


def _described(workload: Workload) -> dict[str, Any]:
    """A workload as it was asked, whole, so that a run directory explains itself."""
    return {
        "name": workload.name,
        "description": workload.description,
        "sha256": workload.sha256,
        "system": workload.system_prompt,
        "thinking": workload.thinking,
        "max_tokens": workload.max_tokens,
        "temperature": workload.temperature,
        "gates": list(workload.gates),
        "cases": [
            {
                "id": c.id,
                "messages": list(c.messages),
                "turns": list(c.turns),
                "expect": dict(c.expect),
                "tools": workload.tools_for(c),
            }
            for c in workload.cases
        ],
    }
