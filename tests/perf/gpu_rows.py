"""All measurements of the real models on GPUs, side by side as far as their memory allows: the jobs of gpu_rows.txt.

    python tests/perf/gpu_rows.py MODELS OUT                # MODELS/coder-0.5b, coder-1.5b: bf16 folders; it splits their tags
    python tests/perf/gpu_rows.py MODELS OUT --only 'annie.*' --vllm VENV/bin/python --gpus 0,1 --gb 134
    python tests/perf/gpu_rows.py MODELS OUT --list

A line of the plan: name | gigabytes of one GPU | names of the jobs that must have succeeded | command. {models}, {out}, {python},
{vllm}, {perf} (this folder) and the words that a line "word = text" before it defines are replaced. Of --only's jobs those that
they need run too. Jobs start in the plan's order, each on the GPU with most free memory; one
that does not fit lets later ones pass, unless the line begins with "!". A job's output is OUT/log/NAME, and OUT/done/NAME says that
it succeeded, so that it does not run again: the same command continues. One that fails is reported, and what needs it is left out.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Job:
    name: str
    gigabytes: float
    needs: tuple[str, ...]
    command: str
    important: bool


def expanded(text: str, values: dict[str, str]) -> str:
    """Return a plan with its words replaced and without the lines that define them."""
    values, lines = dict(values), []
    for line in text.splitlines():
        line = re.sub(r"\{([\w.]+)\}", lambda m: values.get(m[1], m[0]), line)
        if definition := re.fullmatch(r"([\w.]+) = (.*)", line):
            values[definition[1]] = definition[2]
            line = ""
        lines.append(line)
    return "\n".join(lines)


def read_plan(text: str) -> dict[str, Job]:
    """Return the jobs by name. Raises SystemExit for a line that is none, a name given twice, or a need that comes later."""
    jobs: dict[str, Job] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|", 3)]
        if len(parts) != 4 or not parts[1].replace(".", "", 1).isdigit():
            raise SystemExit(
                f"line {number} of the plan: expected name | GB | needs | command, got {line!r}"
            )
        name = parts[0].removeprefix("!")
        job = Job(name, float(parts[1]), tuple(parts[2].split()), parts[3], name != parts[0])
        if job.name in jobs or (unknown := [n for n in job.needs if n not in jobs]):
            why = (
                "its name is taken"
                if job.name in jobs
                else f"no job before it is {', '.join(unknown)}"
            )
            raise SystemExit(f"line {number} of the plan, {job.name}: {why}")
        jobs[job.name] = job
    return jobs


def chosen(jobs: dict[str, Job], pattern: str) -> list[Job]:
    """Return the jobs whose whole name matches, and all that they need, in the plan's order."""
    names = {name for name in jobs if re.fullmatch(pattern, name)}
    for job in reversed(jobs.values()):  # a need comes earlier
        names |= set(job.needs) if job.name in names else set()
    return [job for job in jobs.values() if job.name in names]


class Queue:
    """Runs jobs; `left` are those that did not start."""

    def __init__(
        self, jobs: Iterable[Job], out: Path, gpus: list[str], gigabytes: float, most: int
    ) -> None:
        """gigabytes, most: of each GPU, and jobs at a time there."""
        self.out, self.gpus, self.gigabytes, self.most = out, gpus, gigabytes, most
        for folder in ("log", "done"):
            (out / folder).mkdir(parents=True, exist_ok=True)
        self.jobs = tuple(jobs)
        self.left = [job for job in self.jobs if not self.succeeded(job.name)]
        self.running: dict[Job, tuple[subprocess.Popen[bytes], float, str]] = {}
        self.began = time.monotonic()

    def succeeded(self, name: str) -> bool:
        return (self.out / "done" / name).exists()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)

    def room(self, job: Job) -> str | None:
        """Return the GPU with most free memory, None where no GPU can take the job."""
        free = {}
        for gpu in self.gpus:
            own = [j.gigabytes for j, (*_, at) in self.running.items() if at == gpu and j.gigabytes]
            if len(own) < self.most or not job.gigabytes:
                free[gpu] = self.gigabytes - sum(own)
        best = max(free, key=lambda gpu: free[gpu], default=None)
        return best if best is not None and job.gigabytes <= free[best] else None

    def start(self) -> None:
        """Start what can start now."""
        for job in list(self.left):
            if not all(map(self.succeeded, job.needs)):
                continue
            if (gpu := self.room(job)) is not None:
                log = (self.out / "log" / job.name).open("wb")
                command, setting = (
                    ["bash", "-c", job.command],
                    environment() | {"CUDA_VISIBLE_DEVICES": gpu},
                )
                process = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env=setting
                )
                self.left.remove(job)
                self.running[job] = process, time.monotonic(), gpu
                self.say(f"start {job.name}, GPU {gpu}")
            elif job.important:
                return

    def collect(self) -> bool:
        """Report what ended. Returns whether anything did."""
        ended = [job for job, (process, *_) in self.running.items() if process.poll() is not None]
        for job in ended:
            process, began, _ = self.running.pop(job)
            lines = (self.out / "log" / job.name).read_text(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
            self.say(
                f"end   {job.name}, exit {process.returncode}, {time.monotonic() - began:.0f} s: {last[-120:]}"
            )
            if process.returncode == 0:
                (self.out / "done" / job.name).touch()
        return bool(ended)

    def run(self) -> int:
        """Run until nothing runs and nothing can start. Returns the number of jobs that did not succeed."""
        total = len(self.left)
        while True:
            self.start()
            if not self.running:
                break
            while not self.collect():
                time.sleep(0.2)
            done = total - len(self.left) - len(self.running)
            self.say(f"{done} of {total} ended, {len(self.running)} running")
        for job in self.left:
            missing = [name for name in job.needs if not self.succeeded(name)]
            self.say(
                f"left out: {job.name} ({', '.join(missing) + ' is missing' if missing else 'too large'})"
            )
        return sum(not self.succeeded(job.name) for job in self.jobs)


def environment() -> dict[str, str]:
    few = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "2")
    return (
        os.environ
        | few
        | {"TOKENIZERS_PARALLELISM": "false", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", type=Path, default=HERE / "gpu_rows.txt")
    parser.add_argument("--only", default=".*", metavar="REGEX", help="names")
    parser.add_argument("--vllm", default=sys.executable, help="the python of vLLM's environment")
    parser.add_argument(
        "--gpus", default=os.environ.get("CUDA_VISIBLE_DEVICES", "0"), metavar="0,1"
    )
    parser.add_argument("--gb", type=float, default=134, help="memory of one GPU")
    parser.add_argument(
        "--jobs",
        type=int,
        default=7,
        help="at a time on one GPU, at most; those of 0 GB do not count",
    )
    parser.add_argument("--list", action="store_true")
    a = parser.parse_args()
    folders = {"models": a.models.resolve(), "out": a.out.resolve(), "perf": HERE}
    values = {name: str(folder) for name, folder in folders.items()} | {
        "python": sys.executable,
        "vllm": a.vllm,
    }
    jobs = chosen(read_plan(expanded(a.plan.read_text(), values)), a.only)
    if a.list:
        print("\n".join(f"{job.name}: {job.command}" for job in jobs))
        return
    sys.exit(min(1, Queue(jobs, a.out.resolve(), a.gpus.split(","), a.gb, a.jobs).run()))


if __name__ == "__main__":
    main()
