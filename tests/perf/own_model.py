"""From a system prompt, tools and 200 logged chats to a verdict: the commands for a model that is not Annie's, timed.

    python tests/perf/own_model.py FOLDER [--strategy gptq]

The model is tiny-annie with another chat template, the prompt Annie's with one more sentence. Prints seconds (wall and processor)
of `init`, `quantize` and `eval`, and the verdict. 2026-11-22, two idle cores of an AMD EPYC (Zen 4): 1.2, 33 and 103 s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "helpers"), str(Path(__file__).parents[2])]

import own_files  # noqa: E402


def timed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    before, start = os.times(), time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "annie_quant", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    after = os.times()
    used = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    print(
        f"{arguments[0]}: {time.monotonic() - start:.1f} s, {used:.1f} s of processor time, exit {done.returncode}",
        flush=True,
    )
    if done.returncode > 1:
        raise SystemExit(done.stderr)
    return done


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="to be made")
    parser.add_argument("--strategy", default="gptq")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    own_files.write_model(arguments.folder / "unseen")
    own_files.write_logs(arguments.folder)
    folder, rows = arguments.folder, "mine/calibration.jsonl"
    timed(
        folder,
        "init",
        "--prompt",
        "prompt.txt",
        "--tools",
        "tools.json",
        "--logs",
        "chats.jsonl",
        "--output",
        "mine",
    )
    quantize = (
        "--strategy",
        arguments.strategy,
        "--model",
        "unseen",
        "--calib-data",
        rows,
        "--persona",
        "mine",
    )
    timed(folder, "quantize", *quantize, "--output", "quantized")
    done = timed(
        folder, "eval", "quantized", "--reference", "unseen", "--persona", "mine", "--json"
    )
    print(json.loads(done.stdout)["verdict"]["sentence"])


if __name__ == "__main__":
    main()
