"""A run directory: every stage's results in one folder, each stage done once, by one process at a time.

run.json  records.jsonl  streams/  inputs.json  results.csv  plots/  report.html  report.md
stages/<name>.json       what a finished stage gave, and the key (its inputs) that it was made from
models/  gguf/  eval/    what the stages leave for each other
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.files import read_json, write_json

SCHEMA_VERSION = 1
HALF = re.compile(r"^\..+\.\d+\.part$")  # .NAME.PID.part


class RunDirectory:
    """The folder, and what is finished in it."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        try:
            (self.path / "stages").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFault(
                f"{self.path}: cannot be made or written ({error.strerror})", "choose another --output"
            ) from error

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against a second command; the lock goes with the process, however it ends."""
        with (self.path / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UsageError(
                    f"{self.path}: another annie-quant is working in this run directory",
                    "wait for it, or choose another --output",
                ) from None
            self.remove_half_files()
            yield

    def remove_half_files(self) -> None:
        """What a killed process was writing (files.replacing); the lock says that nobody writes now."""
        for half in self.path.rglob(".*.part"):
            if half.is_file() and HALF.search(half.name):
                half.unlink(missing_ok=True)

    def write_run(
        self, config: Any, aggregates: Any, verdict: Any, environment: Any, stages: list[Any] | None = None
    ) -> None:
        """run.json: what was asked, where it ran, what came out, what it means."""
        write_json(
            self.path / "run.json",
            {
                "schema_version": SCHEMA_VERSION,
                "argv": ["annie-quant", *sys.argv[1:]],
                "environment": environment,
                "config": config,
                "stages": stages or [],
                "aggregates": aggregates,
                "verdict": verdict,
            },
        )

    def finished(self, stage: str, key: str) -> dict[str, Any] | None:
        """What the stage gave, if it finished from these very inputs."""
        stamp = self.path / "stages" / f"{stage}.json"
        if not stamp.is_file():
            return None
        try:
            found = read_json(stamp)
        except json.JSONDecodeError:
            return None
        if found.get("key") != key or any(not (self.path / p).exists() for p in found.get("outputs", ())):
            return None
        return found

    def finish(self, stage: str, key: str, seconds: float, result: Any, outputs: list[str]) -> dict[str, Any]:
        stamp = {"stage": stage, "key": key, "seconds": round(seconds, 2), "outputs": outputs, "result": result}
        write_json(self.path / "stages" / f"{stage}.json", stamp)
        return stamp

    def stage(self, name: str, inputs: Any, outputs: list[str], work: Callable[[], Any]) -> tuple[dict[str, Any], bool]:
        """Do `work` unless it is done; returns its stamp and whether it was done before."""
        key = hashlib.sha256(json.dumps(inputs, sort_keys=True, default=str).encode()).hexdigest()[:16]
        found = self.finished(name, key)
        if found is not None:
            return found, True
        start = time.monotonic()
        result = work()
        return self.finish(name, key, time.monotonic() - start, result, outputs), False
