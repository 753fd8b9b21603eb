"""Faults: each one disturbs one run of a stage and returns what happened. run.py then runs the stage again, undisturbed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages import ROOT, Stage

NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
LIMIT_S = 300
LONG_S = 90.0
STAGE_BY_STAGE = ("search", "demo")  # a run directory with stages/


@dataclass
class Whole:
    """The undisturbed run: exit code, seconds, CPU seconds, bytes written, peak of virtual memory, outcome."""

    code: int
    seconds: float
    cpu_s: float
    size_bytes: int
    peak_bytes: int
    outcome: Any


@dataclass
class Ended:
    """A disturbed run. code is negative for a signal; None if the fault does not apply to the stage."""

    code: int | None
    stderr: str = ""  # and its output if there is none
    note: str = ""


def environment(stage: Stage, **more: str) -> dict[str, str]:
    home = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    return {**os.environ, "PYTHONPATH": home, "OMP_NUM_THREADS": "2", **stage.env, **more}


def begin(
    stage: Stage, inputs: Path, output: Path, prefix: list[str] | None = None, **more: Any
) -> subprocess.Popen:
    env = more.pop("env", environment(stage))
    return subprocess.Popen(
        [*(prefix or []), *stage.program, *stage.words(inputs, output)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd="/", **more,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> Ended:
    try:
        stdout, stderr = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return Ended(process.wait(), "", "HUNG")
    if not stderr and stdout.startswith("{"):  # audit --json
        findings = json.loads(stdout).get("findings", ())
        stderr = "; ".join(f"{f['code']}: {f['message']}" for f in findings)
    return Ended(process.returncode, stderr)


def cpu_s(pid: int) -> float:
    """Return the user and system time of a process, which other work on the machine does not change."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def undisturbed(stage: Stage, inputs: Path, output: Path) -> tuple[Ended, Whole]:
    process, start, peak, cpu = begin(stage, inputs, output), time.monotonic(), 0, 0.0
    while process.poll() is None and time.monotonic() - start < LIMIT_S:
        with contextlib.suppress(OSError, StopIteration):
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = next(
                int(line.split()[1]) * 1024
                for line in status.splitlines()
                if line.startswith("VmPeak")
            )
            cpu = cpu_s(process.pid)
        time.sleep(0.01)
    ended, seconds = finish(process), time.monotonic() - start
    size = sum(f.stat().st_size for f in output.rglob("*") if f.is_file())
    return ended, Whole(ended.code or 0, seconds, cpu, size, peak, stage.outcome(output))


def signalled(number: int) -> Callable[..., Ended]:
    def fault(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
        """Send a signal at three times during the work (once for a long stage); each run resumes from the last one."""
        rng, codes, last = random.Random(stage.name), [], Ended(None)
        # with finished stages there is less to do each time
        moments = (0.4, 0.35, 0.25) if stage.name in STAGE_BY_STAGE else (0.35, 0.6, 0.85)
        for part in moments if whole.seconds < LONG_S else (0.6,):
            process, moment = (
                begin(stage, inputs, output),
                whole.cpu_s * (part + rng.uniform(-0.1, 0.1)),
            )
            while process.poll() is None and cpu_s(process.pid) < moment:
                time.sleep(0.005)
            process.send_signal(number)
            ended = finish(process)
            codes.append(str(ended.code))
            # -2: Python's own message, before annie-quant has started
            if last.code is None or ("Traceback" in ended.stderr and ended.code != -signal.SIGINT):
                last = ended
        last.note = f"codes {', '.join(codes)}"
        return last

    return fault


@contextlib.contextmanager
def tmpfs(folder: Path, size_bytes: int) -> Iterator[None]:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=777", "tmpfs", str(folder)],
        check=True,
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def full_disk(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
    """A tmpfs with space for the inputs and half of the stage's output; then with enough space, and the stage again."""
    before = sum(f.stat().st_size for f in output.rglob("*") if f.is_file())
    built = whole.size_bytes - before
    if built < 4096:
        return Ended(None)
    stored = output.with_name("kept")
    shutil.copytree(output, stored)
    with tmpfs(output, max(64 << 10, before + before // 8 + built // 2)):
        shutil.copytree(stored, output, dirs_exist_ok=True)
        ended = finish(begin(stage, inputs, output))
        shutil.rmtree(stored)
        shutil.copytree(output, stored)
    shutil.rmtree(output)  # the stage resumes from what the full disk has
    stored.rename(output)
    return ended


def read_only(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
    if whole.size_bytes < 4096 and not any(output.iterdir()):
        return Ended(None)
    subprocess.run(["mount", "--bind", str(output), str(output)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(output)], check=True)
        return finish(begin(stage, inputs, output))
    finally:
        subprocess.run(["umount", "-l", str(output)], check=False)


def no_memory(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
    """ulimit -v at 90, 70 and 50 % of the undisturbed peak (70 % for a long stage)."""
    text, codes = Ended(None), []
    for share in (0.9, 0.7, 0.5) if whole.seconds < LONG_S else (0.7,):
        limit = int(whole.peak_bytes * share)
        ended = finish(
            begin(
                stage,
                inputs,
                output,
                preexec_fn=lambda n=limit: resource.setrlimit(resource.RLIMIT_AS, (n, n)),
            )
        )
        codes.append(str(ended.code))
        if ended.code != whole.code:
            text = ended if text.code is None or "Traceback" in ended.stderr else text
    if text.code is None:
        return Ended(None)
    text.note = f"codes {', '.join(codes)}"
    return text


def unreadable(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
    """Another user, for whom the input file is not readable."""
    if stage.main is None:
        return Ended(None)
    source = stage.main(inputs)
    source = (
        output / source.relative_to(inputs)
        if (output / source.relative_to(inputs)).exists()
        else source
    )
    mode = source.stat().st_mode
    output.chmod(0o777)
    source.chmod(0o600)
    try:
        return finish(begin(stage, inputs, output, NOBODY, env=environment(stage, HOME="/tmp")))
    finally:
        source.chmod(mode)


def files_of_root(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
    """Run once as root, as containers do, then again as an ordinary user."""
    if whole.size_bytes < 4096:
        return Ended(None)
    finish(begin(stage, inputs, output))
    output.chmod(0o755)
    return finish(begin(stage, inputs, output, NOBODY, env=environment(stage, HOME="/tmp")))


def two_at_once(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
    if whole.size_bytes < 4096:
        return Ended(None)
    first = begin(stage, inputs, output)
    time.sleep(whole.seconds * 0.4)
    second = finish(begin(stage, inputs, output))
    ended = finish(first)
    second.note = f"the first {'ended well' if ended.code == whole.code else f'ENDED WITH {ended.code}: {ended.stderr[-300:]}'}"
    return second


def clock_steps(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
    """The clock goes back an hour, then forward a day, during the work."""
    shim = inputs / "clock.so"
    if not shim.exists():
        source = Path(__file__).with_name("clock.c")
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl"], check=True
        )
    ended = finish(begin(stage, inputs, output, env=environment(stage, LD_PRELOAD=str(shim))))
    same = ended.code == whole.code and stage.outcome(output) == whole.outcome
    return Ended(ended.code, ended.stderr, "the same result" if same else "ANOTHER RESULT")


def damaged(cut: bool) -> Callable[..., Ended]:
    def fault(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
        """The main input is truncated to half, or removed."""
        if stage.main is None:
            return Ended(None)
        source = stage.main(inputs)
        inside = output / source.relative_to(inputs)
        source = inside if inside.exists() else source
        stored = source.read_bytes()
        try:
            if cut:
                source.write_bytes(stored[: len(stored) // 2])
            else:
                source.unlink()
            return finish(begin(stage, inputs, output))
        finally:
            source.write_bytes(stored)

    return fault


def damaged_run(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
    """A finished run with some stage results removed and some truncated."""
    run = output / "run"
    if stage.name not in STAGE_BY_STAGE:
        return Ended(None)
    finish(begin(stage, inputs, output))
    stamps = sorted((run / "stages").glob("*.json"))
    stamps[0].write_text('{"key": "cut')
    stamps[-1].unlink()
    for file in (*run.glob("eval/*.json"), run / "run.json"):
        if file.exists():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            break
    return finish(begin(stage, inputs, output))


def servers_die(stage: Stage, inputs: Path, output: Path, whole: Whole) -> Ended:
    """One server stops answering during the benchmark; for the second run both answer."""
    if not stage.servers:
        return Ended(None)
    from stages import serving

    address = (inputs / "servers").read_text()
    with serving(inputs) as servers:
        records, process = output / "run/records.jsonl", begin(stage, inputs, output)
        while process.poll() is None and not (
            records.exists() and records.read_bytes().count(b"\n") >= 6
        ):
            time.sleep(0.01)
        servers[1].stop()
        ended = finish(process)
    (inputs / "servers").write_text(address)
    return ended


FAULTS: dict[str, Callable[..., Ended]] = {
    "kill -9": signalled(signal.SIGKILL),
    "Ctrl-C": signalled(signal.SIGINT),
    "full disk": full_disk,
    "read-only output": read_only,
    "no memory": no_memory,
    "unreadable input": unreadable,
    "files of root": files_of_root,
    "two at once": two_at_once,
    "clock steps": clock_steps,
    "truncated input": damaged(cut=True),
    "missing input": damaged(cut=False),
    "damaged stage results": damaged_run,
    "a server dies": servers_die,
}

if sys.platform != "linux":
    raise SystemExit("these faults need Linux")
