"""Time to the first token in the real vLLM on a GPU: formats, kernels and prompt lengths, cold and after a cached prefix.

    python tests/perf/first_token_gpu.py serve OUT --servers 0.5b:bf16=BF16,0.5b:marlin=NVFP4,0.5b:ours=NVFP4,9b:marlin=shape
    python tests/perf/first_token_gpu.py table OUT/rows.jsonl

A server is MODEL:KERNEL=FOLDER; "shape" is Qwen3.5-9B's shape with random weights (serve_9b.py). All start at the same time on one
GPU, then one after the other is measured with nothing else in flight: per length one request that is not counted, --repeats cold
ones with prompts that begin differently, and as many whose first half was just sent. One token per answer, by streamed chat
completions; prompt and cached tokens are those that the server reports. --go: measuring waits for this file; --hold: servers
stay until it is there. OUT gets rows.jsonl and a log per server.

`table` prints the medians, and fits one formula per GPU to them (first_token_gpu.md): with its errors, and with those of the
cells after a prefix when it is fitted to the cold ones alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

LENGTHS = (128, 512, 2048, 4096, 8192, 16384)
CONTEXT = 20480
CHUNK = 8192
READ_TB_S = 3.834  # of an H200 (doctor --measure)


@dataclass(frozen=True)
class Shape:
    """weights: of the linears. deltanet: layers. block: tokens of a cached state, 0 without DeltaNet."""

    layers: int
    attention_layers: int
    heads: int
    head_size: int
    weights: float
    hidden: int
    head_bytes: float
    deltanet: int = 0
    value_heads: int = 0
    block: int = 0


SHAPES = {
    "0.5b": Shape(24, 24, 14, 64, 357.9e6, 896, 272e6),
    "1.5b": Shape(28, 28, 12, 128, 1310e6, 1536, 467e6),
    "9b": Shape(32, 8, 16, 256, 6918.5e6, 4096, 2034e6, deltanet=24, value_heads=32, block=528),
}
# Constants of the formula, and where the fit starts: ms, TFLOP/s, ns, ps, µs per prompt token.
CONSTANTS = {
    "request_ms": 3.0,
    "layer_ms": 0.8,
    "deltanet_layer_ms": 2.0,
    "bf16": 700.0,
    "marlin": 350.0,
    "ours": 680.0,
    "attention.64": 50.0,
    "attention.128": 100.0,
    "attention.256": 150.0,
    "deltanet_ns": 5.0,
    "norms_ps": 20.0,
    "token_us": 1.0,
}
OVERLAP = 3  # power of the mean of the host's and the GPU's time


def words(count: int, seed: str) -> str:
    rng = random.Random(seed)
    return " ".join(
        f"{rng.choice('kmnprst')}{rng.choice('aeiou')}{rng.randint(0, 99)}" for _ in range(count)
    )


class Texts:
    """Texts of a number of tokens."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def of(self, tokens: int, seed: str) -> str:
        text = words(tokens, seed)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        if len(encoding.ids) <= tokens:
            return text
        return text[: encoding.offsets[tokens - 1][1]]


def start(name: str, folder: Path, port: int, out: Path, gigabytes: float) -> subprocess.Popen[Any]:
    import serve_9b

    model, kernel = name.split(":")
    options = ["--port", str(port), "--served-model-name", "m", "--max-model-len", str(CONTEXT)]
    options += ["--max-num-seqs", "4", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
    options += [
        "--gpu-memory-utilization",
        f"{gigabytes / 139:.3f}",
        "--kv-cache-memory-bytes",
        str(3 << 30),
    ]
    options += ["--attention-backend", "TRITON_ATTN", "--no-enable-log-requests"]
    if model == "9b":
        settings = serve_9b.GPU_OPTIONS["additional_config"]
        options += [
            "--additional-config",
            json.dumps(settings),
            "--mamba-ssm-cache-dtype",
            "float32",
        ]
        options += ["--load-format", "dummy"]
    environment = os.environ | {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "0",
        "ANNIE_QUANT_VLLM_KERNEL": "1" if kernel == "ours" else "0",
        "SERVE_9B_FOLDER": str(folder),
        "VLLM_CACHE_ROOT": str(out / "cache" / name.replace(":", "-")),
        "OMP_NUM_THREADS": "2",
    }
    plugins = "plugin-shape" if model == "9b" else "plugin"
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), str(out / plugins), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *options]
    log = (out / f"log.{name.replace(':', '-')}.txt").open("w")
    return subprocess.Popen(
        command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )


def write_plugins(out: Path) -> None:
    """Write the plug-ins that vLLM's processes load: ours, and for the shape the text-only class and random weights."""
    for folder, lines in {
        "plugin": ["annie_quant = annie_quant.ops.vllm_plugin:register"],
        "plugin-shape": [
            "annie_quant = annie_quant.ops.vllm_plugin:register",
            "serve_9b = serve_9b:plugin",
        ],
    }.items():
        info = out / folder / "first_token_gpu-1.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: first-token-gpu\nVersion: 1\n")
        (info / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines]) + "\n")


def shape_folder(out: Path, quantized: bool) -> Path:
    """Write Qwen3.5-9B's configuration with tiny-annie's tokenizer and template."""
    import serve_9b

    tiny = ROOT / "annie_quant/assets/tiny-annie"
    folder = out / f"shape-{'nvfp4' if quantized else 'bf16'}"
    serve_9b.write_config(folder, tiny, quantized, serve_9b.SHAPES["9b"])
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (tiny / name).exists():
            (folder / name).write_bytes((tiny / name).read_bytes())
    return folder


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def ask(port: int, text: str) -> dict[str, Any]:
    from annie_quant import stream

    body = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "temperature": 0,
        "logit_bias": {"100": 100},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = stream.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout_s=60
    )
    (answer,) = stream.run([request], concurrency=1).records()
    usage = answer["usage"] or {}
    details = usage.get("prompt_tokens_details") or {}
    times = [answer[key] for key in ("first_content_ms", "first_reasoning_ms") if answer[key]]
    return {
        "ms": min(times) if times else None,
        "e2e_ms": answer["e2e_ms"],
        "tokens": usage.get("prompt_tokens"),
        "cached": details.get("cached_tokens") or 0,
        "error": answer["error"],
    }


def measure(name: str, port: int, folder: Path, repeats: int, end: float) -> list[dict[str, Any]]:
    texts = Texts(folder)
    rows = []
    for tokens in LENGTHS:
        for repeat in range(-1, repeats):
            if time.monotonic() > end:
                return rows
            seed = f"{name} {tokens} {repeat} {time.time()}"
            text = texts.of(tokens, seed)
            cold = ask(port, text)
            half = texts.of(tokens // 2, seed + "half")
            rest = texts.of(tokens - tokens // 2, seed + "rest")
            if tokens >= 1024:
                ask(port, half)
                warm = ask(port, f"{half} {rest}")
            else:
                warm = None
            if repeat < 0:
                continue
            rows += [{"server": name, "length": tokens, "kind": "cold", **cold}]
            if warm:
                rows += [{"server": name, "length": tokens, "kind": "prefix", **warm}]
    return rows


def serve(arguments: argparse.Namespace) -> None:
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    write_plugins(out)
    processes = {}
    folders = {}
    begin = time.monotonic()
    for number, item in enumerate(arguments.servers.split(",")):
        name, _, path = item.partition("=")
        quantized = not name.endswith(":bf16")
        folders[name] = shape_folder(out, quantized) if path == "shape" else Path(path).resolve()
        gigabytes = 30.0 if name.startswith("9b") else 10.0
        processes[name] = start(name, folders[name], arguments.port + number, out, gigabytes)
    ports = {name: arguments.port + number for number, name in enumerate(processes)}
    try:
        waiting = set(processes)
        while waiting and time.monotonic() < begin + arguments.start_seconds:
            for name in sorted(waiting):
                if ready(ports[name]):
                    print(f"{name}: ready after {time.monotonic() - begin:.0f} s", flush=True)
                    waiting.discard(name)
                elif processes[name].poll() is not None:
                    print(f"{name}: ended with {processes[name].returncode}", flush=True)
                    waiting.discard(name)
            time.sleep(0.5)
        (out / "ready").write_text("")
        while arguments.go and not arguments.go.exists():
            time.sleep(0.2)
        end = time.monotonic() + arguments.seconds
        with (out / "rows.jsonl").open("a") as file:
            for name, port in ports.items():
                if not ready(port):
                    continue
                since = time.monotonic()
                rows = measure(name, port, folders[name], arguments.repeats, end)
                for row in rows:
                    file.write(json.dumps(row) + "\n")
                file.flush()
                print(f"{name}: {len(rows)} rows in {time.monotonic() - since:.0f} s", flush=True)
        (out / "done").write_text("")
        while arguments.hold and not arguments.hold.exists():
            time.sleep(0.2)
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


# ---- table


@dataclass(frozen=True)
class Cell:
    """Medians of one server, length and kind. computed, cached: tokens."""

    model: str
    kernel: str
    kind: str
    length: int
    ms: float
    computed: float
    cached: float

    @property
    def steps(self) -> int:
        """Return how many times the model runs: chunks of 8,192, and for DeltaNet the last block's end."""
        block = SHAPES[self.model].block
        chunks = math.ceil(self.computed / CHUNK)
        if not block:
            return chunks
        end = (self.computed + self.cached) // block * block
        if end <= self.cached or end == self.computed + self.cached:
            return chunks
        return math.ceil((end - self.cached) / CHUNK) + 1


def cells_of(file: Path) -> list[Cell]:
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        groups.setdefault((row["server"], row["kind"], row["length"]), []).append(row)
    cells = []
    for (server, kind, length), rows in groups.items():
        model, kernel = server.split(":")
        ms = statistics.median(row["ms"] or row["e2e_ms"] for row in rows)
        cached = statistics.median(row["cached"] for row in rows)
        computed = statistics.median(row["tokens"] for row in rows) - cached
        cells.append(Cell(model, kernel, kind, length, ms, computed, cached))
    return cells


def predicted_ms(cell: Cell, values: Sequence[float]) -> float:
    """Return the formula's milliseconds. values: logarithms of CONSTANTS."""
    c = {name: math.exp(value) for name, value in zip(CONSTANTS, values, strict=True)}
    shape = SHAPES[cell.model]
    bytes_per_weight = 2.0 if cell.kernel == "bf16" else 0.5625
    reads_s = shape.weights * bytes_per_weight * cell.steps / (READ_TB_S * 1e12)
    products_s = 2 * shape.weights * cell.computed / (c[cell.kernel] * 1e12)
    pairs = cell.computed * cell.cached + cell.computed * (cell.computed + 1) / 2
    attention = shape.attention_layers * 4 * shape.heads * shape.head_size * pairs
    attention_s = attention / (c[f"attention.{shape.head_size}"] * 1e12)
    head_s = shape.head_bytes / (READ_TB_S * 1e12)
    deltanet_ms = cell.computed * shape.deltanet * shape.value_heads * c["deltanet_ns"] * 1e-6
    norms_ms = cell.computed * shape.layers * shape.hidden * c["norms_ps"] * 1e-9
    gpu_ms = 1e3 * (math.hypot(reads_s, products_s) + attention_s + head_s) + deltanet_ms + norms_ms
    plain_layers = shape.layers - shape.deltanet
    step_ms = plain_layers * c["layer_ms"] + shape.deltanet * c["deltanet_layer_ms"]
    both_ms = (gpu_ms**OVERLAP + (cell.steps * step_ms) ** OVERLAP) ** (1 / OVERLAP)
    return c["request_ms"] + (cell.computed + cell.cached) * c["token_us"] * 1e-3 + both_ms


def fit(cells: Iterable[Cell]) -> Sequence[float]:
    """Return the logarithms of the constants, with a weak pull to where the fit starts."""
    from scipy.optimize import least_squares

    start = np.log(list(CONSTANTS.values()))
    fitted = list(cells)

    def residuals(values: np.ndarray) -> np.ndarray:
        errors = [math.log(predicted_ms(cell, values) / cell.ms) for cell in fitted]
        return np.array([*errors, *(0.05 * (values - start))])

    return least_squares(residuals, start, loss="soft_l1", f_scale=0.1).x


def print_errors(name: str, cells: Iterable[Cell], predict: Callable[[Cell], float]) -> None:
    errors = sorted(abs(predict(cell) / cell.ms - 1) for cell in cells)
    near = sum(error <= 0.15 for error in errors)
    largest = errors[int(0.9 * len(errors))]
    median = statistics.median(errors)
    print(f"{name}: median {median:.1%}, 90 % {largest:.1%}, {near} of {len(errors)} within 15 %")


def table(file: Path) -> None:
    cells = cells_of(file)
    for kind in ("cold", "prefix"):
        lengths = sorted({cell.length for cell in cells if cell.kind == kind})
        print(f"\n| {kind} | {' | '.join(f'{length:,}' for length in lengths)} |")
        print("|---" * (len(lengths) + 1) + "|")
        for model in SHAPES:
            for kernel in ("bf16", "marlin", "ours"):
                ms = {
                    c.length: c.ms
                    for c in cells
                    if (c.model, c.kernel, c.kind) == (model, kernel, kind)
                }
                print(f"| {model} {kernel} | {' | '.join(f'{ms[n]:.0f}' for n in lengths)} |")
    values = fit(cells)
    shown = (f"{name} {math.exp(v):.4g}" for name, v in zip(CONSTANTS, values, strict=True))
    print(f"\n{', '.join(shown)}")
    print_errors("all cells", cells, lambda cell: predicted_ms(cell, values))
    cold = fit(cell for cell in cells if cell.kind == "cold")
    after_prefix = [cell for cell in cells if cell.kind == "prefix"]
    print_errors("prefix from cold", after_prefix, lambda cell: predicted_ms(cell, cold))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("serve", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--servers", default="")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--start-seconds", type=float, default=300)
    parser.add_argument("--go", type=Path)
    parser.add_argument("--hold", type=Path)
    parser.add_argument("--port", type=int, default=8100)
    arguments = parser.parse_args()
    if arguments.command == "table":
        table(arguments.out)
    else:
        serve(arguments)


if __name__ == "__main__":
    main()
