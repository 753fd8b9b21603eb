"""A run directory: every stage's results in one folder, each stage done once, by one process at a time.

run.json  records.jsonl  streams/  inputs.json  results.csv  plots/  report.html  report.md
stages/<name>.json       what a finished stage gave, and the key (its inputs) that it was made from
models/  gguf/  eval/    what the stages leave for each other
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import schema
from annie_quant.errors import EnvironmentFault, UsageError
from annie_quant.files import owner, read_json, read_whole_json, take_lock, write_json

HALF = re.compile(r"^\..+\.\d+\.part$")  # .NAME.PID.part


def not_ours(folder: Path, path: Path, error: OSError) -> EnvironmentFault:
    """The fault of a folder that another user (often root, from a container) left behind."""
    whose = owner(path)
    return EnvironmentFault(
        f"{path}: cannot be made or written ({error.strerror}{whose})",
        f"sudo chown -R $(id -u):$(id -g) {folder}, or choose another --output" if whose else "choose another --output",
    )


class RunDirectory:
    """The folder, and what is finished in it."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = Path(path)
        try:
            (self.path / "stages").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_ours(self.path, self.path, error) from error

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder against a second command; the lock goes with the process, however it ends.

        Raises UsageError (held by another process, which is named), EnvironmentFault (not ours to write, cannot be
        locked, or made by a newer annie-quant, whose results would be lost).
        """
        try:
            file = (self.path / ".lock").open("a+")  # not "w": who waits must not wipe out the holder's name
        except OSError as error:
            raise not_ours(self.path, self.path / ".lock", error) from error
        with file:
            if not take_lock(file, self.path):
                file.seek(0)
                raise UsageError(
                    f"{self.path}: another annie-quant is working in this run directory ({file.read() or 'unnamed'})",
                    "wait for it, or choose another --output",
                )
            file.truncate(0)
            with contextlib.suppress(OSError):  # a full disk takes no name, and the lock holds without one
                file.write(f"process {os.getpid()}: {' '.join(['annie-quant', *sys.argv[1:]])[:300]}")
                file.flush()
            for name in ("run.json", "bench.json"):
                if (self.path / name).is_file():
                    with contextlib.suppress(ValueError):  # a torn one is made anew
                        schema.check_version(read_json(self.path / name), self.path / name)
            self.remove_half_files()
            yield

    def remove_half_files(self) -> None:
        """What a killed process was writing (files.replacing); the lock says that nobody writes now."""
        for half in self.path.rglob(".*.part"):
            if half.is_file() and HALF.search(half.name):
                try:
                    half.unlink(missing_ok=True)
                except OSError as error:
                    raise not_ours(self.path, half, error) from error

    def write_run(
        self,
        config: Any,
        aggregates: schema.Aggregates,
        verdict: schema.Verdict,
        environment: schema.Environment,
        stages: Sequence[schema.Stage] = (),
    ) -> None:
        """Write run.json, which then has the only copy of the aggregates."""
        run = schema.Run(
            argv=["annie-quant", *sys.argv[1:]],
            environment=environment,
            config=msgspec.to_builtins(config),
            stages=list(stages),
            aggregates=aggregates,
            verdict=verdict,
        )
        schema.write_run(self.path, run)

    def finished(self, stage: str, key: str) -> dict[str, Any] | None:
        """What the stage gave, if it finished from these very inputs."""
        found = read_whole_json(self.path / "stages" / f"{stage}.json")
        if not isinstance(found, dict) or "result" not in found or not isinstance(found.get("outputs"), list):
            return None
        if found.get("key") != key or not all(self.whole(str(p)) for p in found["outputs"]):
            return None
        return found

    def whole(self, output: str) -> bool:
        """Whether a stage's output is there; of JSON also, whether it can be read."""
        path = self.path / output
        return read_whole_json(path) is not None if path.suffix == ".json" else path.exists()

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
