"""The demo killed (SIGKILL) in the middle of every stage, and on a full disk: the files left, and the result of a second run.

    python tests/perf/demo_faults.py kill OUTPUT     about three minutes on two cores
    python tests/perf/demo_faults.py disk OUTPUT     needs root: OUTPUT becomes a small tmpfs that grows step by step

Results are in demo_faults.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIZES_MB = (4, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 96)


def command(output: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "annie_quant",
        "demo",
        "--output",
        str(output),
        "--n-offline",
        "3",
        "--n-served",
        "3",
    ]


def plan(run: Path) -> list[dict]:
    """Return the stages of a finished run in their order, with their seconds."""
    return json.loads((run / "run.json").read_text())["stages"]


def done(run: Path, stage: str) -> bool:
    return (run / "stages" / f"{stage}.json").is_file()


def left_running(run: Path) -> list[str]:
    result = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            if str(run) in words and "demo_faults" not in words:
                result.append(words[:80])
    return result


def outcome(run: Path) -> dict[str, object]:
    """Return what must not depend on kills: weights by hash, offline gates, the answered prompts."""
    hashes = {
        str(f.relative_to(run)): hashlib.sha256(f.read_bytes()).hexdigest()[:12]
        for f in sorted([*run.glob("models/*/*.safetensors"), *run.glob("gguf/*.gguf")])
    }
    gates = {
        f"{f.stem} {kind}": {g: (r["passes"], r["n"]) for g, r in side["gates"].items()}
        for f in sorted(run.glob("eval/*.json"))
        for kind, side in json.loads(f.read_text())["numerics"].items()
    }
    rows = [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]
    requests = sorted(
        (r["backend"], r["workload"], r["case"], str(r["turn"])) for r in rows if not r["warmup"]
    )
    return {"hashes": hashes, "gates": gates, "asked": requests}


def kill_everywhere(folder: Path) -> None:
    whole, broken = folder / "whole", folder / "broken"
    for run in (whole, broken):
        shutil.rmtree(run, ignore_errors=True)
    subprocess.run(command(whole), check=True, capture_output=True)
    stages = plan(whole)
    rng = random.Random(0)
    print("| killed in | after | state | left running | half files |\n|---|---|---|---|---|")
    for number, stage in enumerate(stages):
        process = subprocess.Popen(
            command(broken), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        before = stages[number - 1]["name"] if number else None
        while process.poll() is None and before and not done(broken, before):
            time.sleep(0.005)
        if number == 0:
            time.sleep(1.0)
        wait = rng.uniform(0.1, 0.7) * stage["seconds"]
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        time.sleep(2)
        state = "finished before the kill" if done(broken, stage["name"]) else "unfinished"
        half = (
            [p.name for p in broken.rglob("*") if p.name.endswith(".part")]
            if broken.exists()
            else []
        )
        print(
            f"| {stage['name']} | {wait:.2f} s | {state} | {len(left_running(broken))} | {', '.join(half[:2]) or 'none'} |",
            flush=True,
        )
    subprocess.run(command(broken), check=True, capture_output=True)
    a, b = outcome(whole), outcome(broken)
    for part in a:
        print(
            f"\n{part}: {'the same as the undisturbed run' if a[part] == b[part] else 'DIFFERENT'}"
        )
    remains = [str(p.relative_to(broken)) for p in broken.rglob("*") if p.name.endswith(".part")]
    print(f"half files at the end: {remains or 'none'}")


def fill_the_disk(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        print("| disk | exit code | stages done | message |\n|---|---|---|---|")
        for size in SIZES_MB:
            subprocess.run(["mount", "-o", f"remount,size={size}m", str(folder)], check=True)
            ended = subprocess.run(
                command(folder / "demo"), capture_output=True, text=True, check=False
            )
            lines = [
                line for line in ended.stderr.splitlines() if line and not line.startswith("✓")
            ]
            output = " ".join(lines[:2]) if ended.returncode else "the report"
            stamps = len(list((folder / "demo/stages").glob("*.json")))
            trace = " TRACEBACK" if "Traceback" in ended.stderr else ""
            print(
                f"| {size} MB | {ended.returncode} | {stamps} | {output.replace(str(folder), 'OUTPUT')}{trace} |",
                flush=True,
            )
            if ended.returncode == 0:
                break
    finally:
        subprocess.run(["umount", str(folder)], check=False)


if __name__ == "__main__":
    kinds = {"kill": kill_everywhere, "disk": fill_the_disk}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=kinds)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    kinds[options.kind](options.output.resolve())
