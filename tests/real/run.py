"""The whole line on a real model: fetch, init, quantize, audit, eval, convert, bench of two llama.cpp servers, report.

    make real                           # SmolLM2-135M
    make real MODEL=coder-0.5b
    python tests/real/run.py coder-0.5b --output build/real --strategy gptq --n 20

A step that ended is not repeated, so an interrupted run continues with the same command; steps.json has the seconds and the exit
code of each. Exit code 1 of audit, eval and bench is a verdict, not a failure. The persona is Annie's prompt and tools. A bf16
folder in OUTPUT/NAME/model (`hf download`) is used as it is; otherwise the GGUF file is dequantized into it, and tags that the
model never learned are split (split_tags.py).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from fetch import SOURCES, fetch  # noqa: E402
from split_tags import split_tags  # noqa: E402

from annie_quant.documents.persona import load_persona  # noqa: E402
from annie_quant.ops import serving  # noqa: E402


class Steps:
    """The steps of a run and their record, steps.json."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "steps.json"
        self.record = json.loads(self.file.read_text()) if self.file.exists() else {}

    def done(self, name: str, seconds: float, code: int) -> None:
        self.record[name] = {"seconds": round(seconds, 1), "exit": code}
        self.file.write_text(json.dumps(self.record, indent=1) + "\n")

    def command(
        self, name: str, *arguments: object, verdict: bool = False, report: str = ""
    ) -> None:
        """Run an annie-quant command once. verdict: exit code 1 is a result; report: file for its standard output."""
        if name in self.record:
            print(f"== {name}: done before ({self.record[name]['seconds']} s)", flush=True)
            return
        words = [str(a) for a in arguments]
        print(f"== {name}: annie-quant {' '.join(words)}", flush=True)
        began = time.monotonic()
        command = [sys.executable, "-m", "annie_quant", *words]
        done = subprocess.run(
            command, stdout=subprocess.PIPE if report else None, text=True, cwd=ROOT
        )
        if done.returncode > int(verdict):
            raise SystemExit(
                f"{name} ended with exit code {done.returncode}; after a fix, the same command continues here"
            )
        if report:
            (self.folder / report).write_text(done.stdout)
        self.done(name, time.monotonic() - began, done.returncode)


def summary(folder: Path, steps: Steps) -> str:
    """Return the seconds of each step, the sizes and the verdicts."""
    lines = [
        f"{name:10} {step['seconds']:8.1f} s   exit {step['exit']}"
        for name, step in steps.record.items()
    ]
    total = sum(step["seconds"] for step in steps.record.values())
    lines.append(f"{'all':10} {total:8.1f} s")
    for name in ("model", "quantized"):
        size = sum(f.stat().st_size for f in (folder / name).glob("*.safetensors"))
        lines.append(f"{name}: {size / 1e6:.0f} MB")
    audit, evaluation = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("audit", "eval")
    )
    lines.append(
        f"audit: {'sound' if audit['ok'] else 'not sound'}, {len(audit['findings'])} findings"
    )
    lines.append(f"eval: {evaluation['verdict']['sentence']}")
    lines.append(f"report: {folder / 'bench' / 'report.html'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=SOURCES)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "real")
    parser.add_argument("--strategy", default="naive")
    parser.add_argument("--rows", type=int, default=32, help="calibration conversations")
    parser.add_argument("--n", type=int, default=10, help="prompts per gate")
    parser.add_argument(
        "--numerics", default="w4a16", help="llama.cpp's arithmetic on a CPU is close to it"
    )
    parser.add_argument("--budget-s", type=float, default=120, help="of the benchmark")
    a = parser.parse_args()
    folder = a.output.resolve() / a.name
    folder.mkdir(parents=True, exist_ok=True)
    steps, model, quantized, mine = (
        Steps(folder),
        folder / "model",
        folder / "quantized",
        folder / "mine",
    )
    if not (model / "config.json").exists():
        file = fetch(a.name, a.output.resolve())
        steps.command("model", "convert", file, "--to", "hf", "--output", model)
    if "model" in steps.record:
        split_tags(model)
    annie = load_persona("annie")
    (folder / "prompt.txt").write_text(annie.system_prompt)
    (folder / "tools.json").write_text(json.dumps([dict(t) for t in annie.tools]))
    steps.command(
        "init",
        "init",
        "--prompt",
        folder / "prompt.txt",
        "--tools",
        folder / "tools.json",
        "--output",
        mine,
        "--force",
    )
    rows = mine / "calibration.jsonl"
    options = ("--persona", mine, "--calib-data", rows, "--calib-samples", a.rows)
    steps.command(
        "quantize",
        "quantize",
        "--strategy",
        a.strategy,
        "--model",
        model,
        *options,
        "--output",
        quantized,
        "--force",
    )
    steps.command(
        "audit", "audit", quantized, "--source", model, "--json", verdict=True, report="audit.json"
    )
    options = ("--persona", mine, "--n", a.n, "--numerics", a.numerics, "--json")
    steps.command(
        "eval", "eval", quantized, "--reference", model, *options, verdict=True, report="eval.json"
    )
    files = {"nvfp4": folder / "nvfp4.gguf", "bf16": folder / "bf16.gguf"}
    steps.command(
        "gguf", "convert", quantized, "--to", "gguf", "--output", files["nvfp4"], "--force"
    )
    steps.command(
        "gguf bf16",
        "convert",
        model,
        "--to",
        "gguf",
        "--type",
        "BF16",
        "--output",
        files["bf16"],
        "--force",
    )
    if "bench" not in steps.record:
        began, servers = time.monotonic(), []
        try:
            servers = [serving.start(file, runtime="llama.cpp") for file in files.values()]
            steps.done("serve", time.monotonic() - began, 0)
            sides = [
                word
                for flag, n, s in zip("ab", files, servers, strict=True)
                for word in (f"--backend-{flag}", n, s.url)
            ]
            options = (
                "--persona",
                mine,
                "--n",
                a.n,
                "--runs",
                1,
                "--warmup",
                1,
                "--budget-s",
                a.budget_s,
            )
            sides += ["--candidate", "nvfp4", "--reference", "bf16"]
            steps.command(
                "bench", "bench", *sides, *options, "--output", folder / "bench", verdict=True
            )
        finally:
            for server in servers:
                server.stop()
    steps.command("report", "report", folder / "bench", verdict=True)
    print(summary(folder, steps))


if __name__ == "__main__":
    main()
