"""All commands with small inputs: arguments, inputs, and what must be equal after any disturbance.

A stage's commands read `inputs` (made once by prepare) and write only below the folder they are given.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
TINY = ROOT / "annie_quant/assets/tiny-annie"
ANNIE_QUANT = [sys.executable, "-m", "annie_quant"]
SMALL = [sys.executable, str(Path(__file__).with_name("small.py"))]
sys.path[:0] = [str(TESTS / "helpers"), str(TESTS / "data")]


@dataclass(frozen=True)
class Stage:
    """words(inputs, output): the command. outcome(output): what a second run must give again. start(output): preparation.

    main: the input that the fault "damaged input" changes. servers: the fake servers that it uses. program: the program to
    start; SMALL for stages in which a model answers, so that they take seconds.
    """

    name: str
    words: Callable[[Path, Path], list[str]]
    outcome: Callable[[Path], Any]
    main: Callable[[Path], Path] | None = None
    start: Callable[[Path, Path], None] = lambda inputs, output: None
    servers: bool = False
    program: list[str] = field(default_factory=lambda: ANNIE_QUANT)
    env: dict[str, str] = field(default_factory=dict)


def digest(*patterns: str) -> Callable[[Path], dict[str, str]]:
    """Return the hashes of the files below the output."""

    def result(output: Path) -> dict[str, str]:
        files = sorted({f for p in patterns for f in output.glob(p) if f.is_file()})
        return {
            str(f.relative_to(output)): hashlib.sha256(f.read_bytes()).hexdigest()[:12]
            for f in files
        }

    return result


def rows(output: Path) -> list[Any]:
    """Return conversations without their time of creation."""
    text = (output / "data.jsonl").read_text()
    return [[r["id"], r["messages"]] for r in map(json.loads, text.splitlines())]


def gates(pattern: str) -> Callable[[Path], Any]:
    def result(output: Path) -> Any:
        return {
            f"{f.name} {kind}": {g: (r["passes"], r["n"]) for g, r in side["gates"].items()}
            | {"kl": side["kl"]["mean"]}
            for f in sorted(output.glob(pattern))
            for kind, side in json.loads(f.read_text())["numerics"].items()
        }

    return result


def requests(output: Path) -> Any:
    text = (output / "records.jsonl").read_text()
    return sorted(
        (r["id"], r["text"]) for r in map(json.loads, text.splitlines()) if not r["warmup"]
    )


def quantize(strategy: str) -> Stage:
    def words(inputs: Path, output: Path) -> list[str]:
        data = [
            "--calib-data",
            str(inputs / "data.jsonl"),
            "--calib-samples",
            "8",
            "--allow-prompt-mismatch",
        ]
        # a finished output is never replaced by itself, so a second run over it needs --force
        return ["quantize", "--strategy", strategy, "--model", str(inputs / "bf16"), *data, "--output",
                str(output / strategy), "--force"]  # fmt: skip

    return Stage(
        f"quantize {strategy}", words, digest(f"{strategy}/*.safetensors", f"{strategy}/*.json"),
        lambda inputs: inputs / "bf16/model.safetensors",
    )  # fmt: skip


def run_folder(inputs: Path, output: Path) -> None:
    shutil.copytree(inputs / "run", output / "run", dirs_exist_ok=True)


def bench_words(inputs: Path, output: Path) -> list[str]:
    a, b = (inputs / "servers").read_text().split()
    return ["bench", "--backend-a", "a", a, "--backend-b", "b", b, "--runs", "4", "--warmup", "1", "--workloads",
            str(inputs / "run/capitals.json"), "--output", str(output / "run")]  # fmt: skip


def publish_words(inputs: Path, output: Path) -> list[str]:
    return ["publish", str(output / "run"), "--repo", "me/tiny", "--model", "a", "--checkpoint", str(inputs / "nvfp4"),
            "--base-model", "Qwen/Qwen3.5-9B", "--force", "a test", "--dry-run"]  # fmt: skip


STAGES = {
    s.name: s
    for s in (
        Stage(
            "data",
            lambda i, o: ["data", "--n", "400", "--output", str(o / "data.jsonl")],
            rows,
        ),
        quantize("naive"),
        quantize("mlp_only"),
        quantize("direct"),
        Stage(
            "audit",
            lambda i, o: ["audit", str(i / "nvfp4"), "--source", str(i / "bf16"), "--json"],
            lambda o: None,
            lambda i: i / "nvfp4/model.safetensors",
        ),
        Stage(
            "repair",
            lambda i, o: ["audit", str(i / "nvfp4"), "--repair", "--output", str(o / "mended"), "--force"],
            digest("mended/*"),
            lambda i: i / "nvfp4/model.safetensors",
        ),
        Stage(
            "convert gguf",
            lambda i, o: ["convert", str(i / "nvfp4"), "--to", "gguf", "--output", str(o / "x.gguf"), "--force"],
            digest("*.gguf"),
            lambda i: i / "nvfp4/model.safetensors",
        ),
        Stage(
            "convert compressed-tensors",
            lambda i, o: ["convert", str(i / "nvfp4"), "--to", "compressed-tensors", "--output", str(o / "ct"), "--force"],
            digest("ct/*"),
            lambda i: i / "nvfp4/model.safetensors",
        ),
        Stage(
            "eval",
            lambda i, o: ["eval", str(i / "nvfp4"), "--reference", str(i / "bf16"), "--n", "1", "--numerics", "w4a16",
                          "--output", str(o / "eval.json"), "--allow-prompt-mismatch"],
            gates("eval.json"),
            lambda i: i / "nvfp4/model.safetensors",
            program=SMALL,
        ),
        Stage(
            "search",
            lambda i, o: ["search", "--model", str(i / "bf16"), "--calib-data", str(i / "data.jsonl"), "--strategies",
                          "direct", "--n", "1", "--require", "w4a16", "--calib-samples", "8", "--anyway", "--output",
                          str(o / "run"), "--allow-prompt-mismatch"],
            lambda o: [digest("run/models/*/*.safetensors")(o), gates("run/eval/direct.json")(o)],
            lambda i: i / "bf16/model.safetensors",
            program=SMALL,
        ),
        Stage("bench", bench_words, lambda o: requests(o / "run"), servers=True),
        Stage(
            "report",
            lambda i, o: ["report", str(o / "run")],
            digest("run/report.*", "run/results.csv", "run/plots/*"),
            lambda i: i / "run/run.json",
            run_folder,
        ),
        Stage(
            "publish",
            publish_words,
            digest("run/publish/*/*"),
            lambda i: i / "nvfp4/model.safetensors",
            run_folder,
        ),
        Stage(
            "demo",
            lambda i, o: ["demo", "--n-offline", "1", "--n-served", "1", "--output", str(o / "run")],
            lambda o: [digest("run/models/*/*.safetensors", "run/gguf/*.gguf")(o), gates("run/eval/*.json")(o)],
            program=SMALL,
        ),
    )
}  # fmt: skip


def prepare(inputs: Path) -> None:
    """Make the inputs of all stages, once: a bf16 and an NVFP4 checkpoint, conversations, a small run."""
    if (inputs / "ready").exists():
        return
    shutil.rmtree(inputs, ignore_errors=True)
    inputs.mkdir(parents=True)
    shutil.copytree(TINY, inputs / "bf16")
    for words in (
        ["data", "--n", "20", "--output", str(inputs / "data.jsonl")],
        [
            "quantize",
            "--strategy",
            "direct",
            "--model",
            str(TINY),
            "--output",
            str(inputs / "nvfp4"),
        ],
    ):
        subprocess.run([*ANNIE_QUANT, *words], check=True, capture_output=True)
    shutil.copytree(sorted((TESTS / "data/runs").iterdir())[-1], inputs / "run")
    (inputs / "ready").write_text("")


@contextlib.contextmanager
def serving(inputs: Path, gap_s: float = 0.1) -> Iterator[list[Any]]:
    """Two scripted servers whose addresses are in inputs/servers."""
    import make_run_sample as sample
    from fake_server import FakeServer

    def slow(body: dict[str, Any]) -> Any:
        script = sample.answer(body)
        script.first_s = gap_s
        return script

    with FakeServer(slow) as a, FakeServer(slow) as b:
        (inputs / "servers").write_text(f"{a.url} {b.url}")
        yield [a, b]
