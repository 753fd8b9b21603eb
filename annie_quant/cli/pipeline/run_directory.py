"""A run directory: all results of a run in one folder. Each stage is done once, by one process at a time.

run.json  records.jsonl  streams/  inputs.json  results.csv  plots/  report.html  report.md
stages/<name>.json       the result of a finished stage, with the inputs that it was made from
models/  gguf/  eval/    files that stages leave for later ones
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from annie_quant import documents
from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.core.files import owner, read_json, read_whole_json, take_lock
from annie_quant.core.resume import KeyedJson

PARTIAL_FILE = re.compile(r"^\..+\.\d+\.part$")  # .NAME.PID.part, from files.replacing


class StageStamp(msgspec.Struct):
    """A finished stage.

    outputs: paths in the run directory, which must still exist.
    result: what its work returned.
    """

    stage: str
    seconds: float
    outputs: list[str]
    result: Any


def not_writable(folder: Path, path: Path, error: OSError) -> EnvironmentFault:
    """Return the error for a run directory that cannot be written, with the owner if that is another user."""
    note = owner(path)
    return EnvironmentFault(
        f"{path}: cannot be created or written ({error.strerror}{note})",
        f"sudo chown -R $(id -u):$(id -g) {folder}, or choose another --output"
        if note
        else "choose another --output",
    )


class RunDirectory:
    """The folder and its finished stages."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            (self.path / "stages").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise not_writable(self.path, self.path, error) from error

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against a second command, until the context or the process ends.

        Raises UsageError if another process, which is named, holds the lock; EnvironmentFault if the folder cannot be
        written or locked, or has results of a newer annie-quant.
        """
        try:
            file = (self.path / ".lock").open("a+")  # not "w", which would erase the holder's name
        except OSError as error:
            raise not_writable(self.path, self.path / ".lock", error) from error
        with file:
            if not take_lock(file, self.path):
                file.seek(0)
                raise UsageError(
                    f"{self.path}: another annie-quant is working in this run directory ({file.read() or 'unnamed'})",
                    "wait for it, or choose another --output",
                )
            file.truncate(0)
            with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
                file.write(
                    f"process {os.getpid()}: {' '.join(['annie-quant', *sys.argv[1:]])[:300]}"
                )
                file.flush()
            for name in ("run.json", "bench.json"):
                if (self.path / name).is_file():
                    with contextlib.suppress(ValueError):  # a torn file is written again
                        documents.check_version(read_json(self.path / name), self.path / name)
            self.remove_partial_files()
            yield

    def remove_partial_files(self) -> None:
        """Remove what a killed process was writing; the lock ensures that no other process writes now."""
        for path in self.path.rglob(".*.part"):
            if path.is_file() and PARTIAL_FILE.search(path.name):
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise not_writable(self.path, path, error) from error

    def write_run(
        self,
        config: object,
        aggregates: documents.Aggregates,
        verdict: documents.Verdict,
        environment: documents.Environment,
        stages: Sequence[documents.Stage] = (),
    ) -> None:
        """Write run.json, which then has the only copy of the aggregates."""
        run = documents.Run(
            argv=["annie-quant", *sys.argv[1:]],
            environment=environment,
            config=msgspec.to_builtins(config),
            stages=list(stages),
            aggregates=aggregates,
            verdict=verdict,
        )
        documents.write_run(self.path, run)

    def finished(self, stage: str, inputs: object) -> StageStamp | None:
        """Return the stamp of a stage that finished with these inputs and whose outputs still exist."""
        try:
            stamp = msgspec.convert(self._stamp(stage, inputs).load(), StageStamp)
        except msgspec.ValidationError:
            return None
        return stamp if all(self.is_complete(output) for output in stamp.outputs) else None

    def is_complete(self, output: str) -> bool:
        """Return whether a stage's output exists and, if it is JSON, can be read."""
        path = self.path / output
        return read_whole_json(path) is not None if path.suffix == ".json" else path.exists()

    def stage(
        self, name: str, inputs: object, outputs: list[str], work: Callable[[], object]
    ) -> tuple[StageStamp, bool]:
        """Do `work` unless the stage has finished with these inputs. Return its stamp, and whether it was finished before.

        work: returns the stage's result, a value that JSON can hold or a msgspec.Struct.
        """
        stamp = self.finished(name, inputs)
        if stamp is not None:
            return stamp, True
        start = time.monotonic()
        result = msgspec.to_builtins(work())
        stamp = StageStamp(name, round(time.monotonic() - start, 2), outputs, result)
        self._stamp(name, inputs).save(msgspec.to_builtins(stamp))
        return stamp, False

    def _stamp(self, stage: str, inputs: object) -> KeyedJson:
        return KeyedJson(self.path / "stages" / f"{stage}.json", inputs)
