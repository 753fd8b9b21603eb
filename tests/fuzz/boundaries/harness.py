"""Run one boundary's cases and check what holds for all of them.

    python -m fuzz.boundaries.harness NAME CASES [SEED]        (from tests/; `make fuzz-boundaries CASES=100000`)

A case runs commands in this process, through the entry point of the command line. Checked for each command: the exit code is
0 to 4; no exception leaves it and no traceback is printed; the terminal gets no escape sequence; the planted key is in no
output and no file; no file changes outside the output folder; it ends within LIMIT_S seconds. Per run: memory.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

NAMES = (
    "server_answers",
    "server_identity",
    "checkpoint",
    "adapters",
    "templates",
    "run_directory",
    "logs",
    "workloads",
    "personas",
    "traces",
)
LIMIT_S = 60
LIMIT_BYTES = 1 << 30
KEY = "sk-planted-0f3a9c77d1e84b62"
EXIT_CODES = (0, 1, 2, 3, 4)
SHARED = "/dev/shm"


class Finding(AssertionError):
    """A promise that a case broke."""


@dataclass
class Sandbox:
    """Folders of one run: `inputs` and `home` must not change, `output` may."""

    root: Path
    inputs: Path = field(init=False)
    output: Path = field(init=False)
    home: Path = field(init=False)

    def __post_init__(self) -> None:
        self.inputs, self.output, self.home = (
            self.root / name for name in ("inputs", "output", "home")
        )
        for folder in (self.inputs, self.output, self.home):
            folder.mkdir(parents=True, exist_ok=True)

    def clear_output(self) -> None:
        shutil.rmtree(self.output)
        self.output.mkdir()

    def run(self, *argv: Any, codes: tuple[int, ...] = EXIT_CODES) -> tuple[int, str, str]:
        """Run `annie-quant argv` in this process. Returns exit code, stdout, stderr."""
        from annie_quant import cli
        from annie_quant.cli.terminal import console

        console.__dict__.clear()  # its streams, which are made again
        out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
        before = listing(self.inputs) | listing(self.home) | listing(self.root, deep=False)
        code: Any = 0
        with (
            mock.patch.object(sys, "argv", ["annie-quant", *map(str, argv)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            contextlib.chdir(self.home)
            if hasattr(contextlib, "chdir")
            else contextlib.nullcontext(),
            limited_time(" ".join(map(str, argv))),
        ):
            try:
                cli.main()
            except SystemExit as end:
                code = end.code or 0
        console.__dict__.clear()  # its streams, which are made again
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))
        for text in texts:
            if "Traceback (most recent call last)" in text:
                raise Finding(f"a traceback was printed: {text[-500:]}")
            check_text(text)
        if code not in codes:
            raise Finding(f"exit code {code}: {texts[1][-500:]}")
        if before != listing(self.inputs) | listing(self.home) | listing(self.root, deep=False):
            raise Finding("files outside the output changed")
        check_files(self.output)
        return code, texts[0], texts[1]


def check_text(text: str) -> None:
    """A terminal gets no escape sequence; the key is not shown."""
    for character in "\x1b\x9b\x07\x08\u202e\u2066":
        if character in text:
            at = text.index(character)
            raise Finding(
                f"{character!r} reaches the terminal: {text[max(0, at - 60) : at + 20]!r}"
            )
    if KEY in text:
        raise Finding(f"the key is shown: {text[:200]!r}")


def check_files(folder: Path) -> None:
    """The key is in no file, not even in a compressed part."""
    for path in folder.rglob("*"):
        if not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        parts = [data]
        if data[:2] == b"PK":
            with zipfile.ZipFile(path) as archive:
                parts += [archive.read(name) for name in archive.namelist()]
        if any(KEY.encode() in part for part in parts):
            raise Finding(f"the key is in {path.name}")


def listing(folder: Path, deep: bool = True) -> dict[str, tuple[int, int]]:
    paths = folder.rglob("*") if deep else folder.iterdir()
    return {
        str(p): (p.lstat().st_size, p.lstat().st_mtime_ns) if p.is_file() else (0, 0) for p in paths
    }


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Accept an expected error, if it is one line that is safe to show."""
    from annie_quant.core.errors import AnnieError

    try:
        yield
    except AnnieError as error:
        check_text(error.message)
        if "\n" in error.message or len(error.message) > 2000:
            raise Finding(f"not one line: {error.message[:300]!r}") from error


@contextlib.contextmanager
def limited_time(what: str) -> Iterator[None]:
    def late(*_: object) -> None:
        raise Finding(f"not ended after {LIMIT_S} s: {what}")

    previous = signal.signal(signal.SIGALRM, late)
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def fuzz(name: str, cases: int, seed: int = 0, report: Any = None) -> list[str]:
    """Run `cases` cases of a boundary. Returns one line per distinct finding, with the seed that repeats it."""
    boundary = importlib.import_module(f"fuzz.boundaries.{name}")
    findings: dict[str, str] = {}
    root = Path(
        tempfile.mkdtemp(prefix="annie_quant_fuzz_", dir=SHARED if Path(SHARED).is_dir() else None)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    environment = {
        "HOME": str(root / "home"),
        "XDG_CACHE_HOME": str(root / "output/cache"),
        "ANNIE_FUZZ_KEY": KEY,
    }
    try:
        with mock.patch.dict(os.environ, environment), boundary.opened(Sandbox(root)) as case:
            done = 0
            while done < cases:
                try:
                    done += case(f"{seed}/{done}", cases - done)
                except Exception as error:
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    key = f"{type(error).__name__} {place.filename.rpartition('annie_quant/')[2]}:{place.lineno}"
                    key = str(error)[:60] if isinstance(error, Finding) else key
                    findings.setdefault(key, f"{name} {seed}/{done}: {key}: {str(error)[:300]!r}")
                    if report:
                        report(findings[key], error)
                    done += 1
    finally:
        shutil.rmtree(root, ignore_errors=True)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    if grown > LIMIT_BYTES:
        findings["memory"] = f"{name}: {grown >> 20} MB of memory"
    return list(findings.values())


def main() -> None:
    name, cases = sys.argv[1], int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else time.time_ns() % 10**9
    failed = False
    for boundary in NAMES if name == "all" else [name]:
        start = time.monotonic()
        findings = fuzz(boundary, cases, seed, lambda line, error: traceback.print_exception(error))
        print(
            f"{boundary}: {cases} cases, seed {seed}, {time.monotonic() - start:.1f} s, {len(findings)} findings"
        )
        print("".join(f"  {line}\n" for line in findings), end="", flush=True)
        failed |= bool(findings)
    sys.exit(failed)


if __name__ == "__main__":
    main()
