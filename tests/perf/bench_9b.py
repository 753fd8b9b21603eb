"""This package's benchmark against real vLLM servers of a 9B shape: bf16, Marlin, this package's kernel and W4A4 emulation.

    python tests/perf/bench_9b.py --output DIR --servers marlin,ours,bf16,w4a4 --seconds 280

Each server is `vllm serve` with random weights of serve_9b.py's shapes, torch.compile and CUDA graphs; all start at the same time
and stay on one GPU. The loads of LOADS are then measured by bench.run with the C client, interleaved over all servers but w4a4,
which is measured afterwards. Prompts are random words, each a token. Rows of the head that are
not ASCII words of the tokenizer are zero, so that every token is text and each is an event. DIR gets a run directory per load,
start.json (seconds to ready) and a log per server.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import serve_9b

from annie_quant import bench, judge

HERE = Path(__file__).resolve().parent
GRAPHS = (1, 2, 4, 8, 16, 32, 64)
SERVERS = ("marlin", "ours", "bf16", "w4a4")
WORD = "Ġ?[a-z]{3,}"
LOADS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (  # name, workload, prompts, load
    ("streams_1", "decode", 8, {"concurrency": 1}),
    ("prefill", "prefill", 8, {"concurrency": 1}),
    ("streams_64", "decode", 192, {"concurrency": 64}),
    ("streams_16", "decode", 64, {"concurrency": 16}),
    ("streams_4", "decode", 16, {"concurrency": 4}),
    ("rate_6", "decode", 32, {"concurrency": (), "rates": (6.0,)}),
)
SLOW = (("w4a4_1", "decode", 2, {"concurrency": 1}), ("w4a4_16", "decode", 16, {"concurrency": 16}))


def plugin() -> None:
    """As serve_9b.plugin; and a head of which only ASCII words can win. Runs in each of vLLM's processes."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    serve_9b.plugin()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # vllm_answers switches it off
    random_weights = DummyModelLoader.load_weights
    words = json.loads(Path(os.environ["SERVE_9B_FOLDER"], "words.json").read_text())

    @torch.no_grad()
    def load_weights(self: Any, model: Any, *unused: Any) -> None:
        random_weights(self, model, *unused)
        for name, p in model.state_dict().items():
            if name.endswith("lm_head.weight"):
                rows = p[words].clone()
                p.zero_()
                p[words] = rows

    DummyModelLoader.load_weights = load_weights


def vocabulary(tiny: Path) -> dict[str, int]:
    return dict(json.loads((tiny / "tokenizer.json").read_text())["model"]["vocab"])


def model_folder(output: Path, tiny: Path, quantized: bool, changes: dict[str, Any]) -> Path:
    """Write a folder with the configuration of the shape, the small model's tokenizer, and words.json (token ids)."""
    folder = serve_9b.write_config(
        output / f"shape.{'nvfp4' if quantized else 'bf16'}", tiny, quantized, changes
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    (folder / "words.json").write_text(
        json.dumps([i for t, i in vocabulary(tiny).items() if re.fullmatch(WORD, t)])
    )
    return folder


def write_workload(path: Path, words: list[str], cases: int, length: int, max_tokens: int) -> None:
    """Write a workload of prompts of `length` random words."""
    rng = random.Random(path.name)
    name = path.stem
    texts = [" ".join(rng.choices(words, k=length)) for _ in range(cases)]
    document = {
        "name": name, "description": f"{length} random words in, {max_tokens} tokens out: speed alone", "persona": None,
        "system": None, "tools": None, "thinking": False, "max_tokens": max_tokens, "temperature": 0, "gates": [],
        "default": False, "extra": {"ignore_eos": True},
        "cases": [{"id": f"{name}-{i}", "messages": [{"role": "user", "content": t}]} for i, t in enumerate(texts)],
    }  # fmt: skip
    path.write_text(json.dumps(document))


class Server:
    """A server's process."""

    def __init__(self, name: str, folder: Path, port: int, args: argparse.Namespace) -> None:
        output: Path = args.output
        self.name, self.url, self.begin = name, f"http://127.0.0.1:{port}", time.monotonic()
        options: dict[str, Any] = {
            "model": str(folder), "host": "127.0.0.1", "port": port, "served_model_name": "shape-9b", "load_format": "dummy",
            "dtype": "bfloat16", "max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 8192,
            "gpu_memory_utilization": 0.2, "tensor_parallel_size": args.tensor_parallel,
        }  # fmt: skip
        if not args.cpu:
            graphs = {"cudagraph_capture_sizes": list(GRAPHS)}
            options |= {
                "kv_cache_memory_bytes": 8 << 30,
                "compilation_config": graphs,
                **serve_9b.GPU_OPTIONS,
            }
            options |= {"linear_backend": "emulation"} if name == "w4a4" else {}
        argv = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--no-enable-prefix-caching",
        ]
        argv += ["--disable-uvicorn-access-log", *(["--enforce-eager"] if args.cpu else [])]
        for option, value in options.items():
            argv += [
                "--" + option.replace("_", "-"),
                json.dumps(value) if isinstance(value, dict) else str(value),
            ]
        paths = os.pathsep.join(
            [str(HERE), str(output / "plugin"), os.environ.get("PYTHONPATH", "")]
        )
        settings = {
            "PYTHONPATH": paths,
            "SERVE_9B_FOLDER": str(folder),
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        settings["ANNIE_QUANT_VLLM_KERNEL"] = settings["ANNIE_QUANT_VLLM_EXPERTS"] = (
            "1" if name == "ours" else "0"
        )
        with (output / f"log.{name}.txt").open("w") as log:
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **settings},
            )  # fmt: skip

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=1) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        serve_9b.kill_session(self.process)


def wait_for(servers: list[Server], until: float) -> dict[str, float]:
    """Return name -> seconds from start to ready, of the servers that are ready by `until`."""
    seconds: dict[str, float] = {}
    while time.monotonic() < until:
        open_ones = [s for s in servers if s.name not in seconds and s.process.poll() is None]
        if not open_ones:
            break
        for server in open_ones:
            if server.ready():
                seconds[server.name] = round(time.monotonic() - server.begin, 1)
                print(f"{server.name} ready after {seconds[server.name]} s", flush=True)
        time.sleep(0.2)
    return seconds


def measure(
    args: argparse.Namespace,
    load: tuple[str, str, int, dict[str, Any]],
    servers: list[Server],
    end: float,
) -> None:
    name, workload, prompts, levels = load
    left = end - time.monotonic()
    if left < 4 or len(servers) < 1:
        print(f"{name}: skipped, {left:.0f} s left, {len(servers)} servers", flush=True)
        return
    begin = time.monotonic()
    try:
        result = bench.run(
            [bench.Backend(s.name, s.url) for s in servers], judge.load_workloads([str(args.output / f"{workload}.json")]),
            args.output / name, n=max(1, prompts // args.divide), runs=1, warmup=1, noise_share=0.0, budget_s=left, **levels,
        )  # fmt: skip
        print(
            f"{name}: {result.requests} requests, {result.ended}, {time.monotonic() - begin:.1f} s",
            flush=True,
        )
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}"[:400], flush=True)


def coordinate(args: argparse.Namespace) -> None:
    end = time.monotonic() + args.seconds
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end, too
    output = args.output
    output.mkdir(parents=True, exist_ok=True)
    serve_9b.install_plugin(output / "plugin", "bench_9b:plugin")
    words = [
        token[1:]
        for token in vocabulary(args.tiny)
        if token[0] == "Ġ" and re.fullmatch(WORD, token)
    ]
    write_workload(output / "decode.json", words, max(load[2] for load in LOADS), 120, 128)
    write_workload(
        output / "prefill.json",
        words,
        max(load[2] for load in LOADS if load[1] == "prefill"),
        2040,
        2,
    )
    changes = serve_9b.SHAPES[args.shape] | json.loads(args.changes)
    folders = {q: model_folder(output, args.tiny, q, changes) for q in (True, False)}
    servers = [
        Server(name, folders[name != "bf16"], args.port + i, args)
        for i, name in enumerate(args.servers.split(","))
    ]
    try:
        seconds = wait_for(servers, min(end, time.monotonic() + args.start_seconds))
        (output / "start.json").write_text(json.dumps(seconds))
        if args.ready:
            args.ready.touch()
        while (
            args.go and not args.go.exists() and time.monotonic() < end
        ):  # others may still use the GPU
            time.sleep(0.1)
        end = min(end, time.monotonic() + args.measure_seconds)
        ready = [s for s in servers if s.name in seconds]
        fast = [s for s in ready if s.name != "w4a4"]
        for load in LOADS:
            measure(args, load, fast, end)
        for load in SLOW:
            measure(args, load, [s for s in ready if s.name == "w4a4"], end)
        print("measured", flush=True)
        if args.hold:
            while not args.hold.exists() and time.monotonic() < end + 40:
                time.sleep(0.1)
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--servers", default=",".join(SERVERS))
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument(
        "--start-seconds", type=float, default=200, help="for the servers to become ready"
    )
    parser.add_argument("--measure-seconds", type=float, default=90, help="for all loads")
    parser.add_argument("--divide", type=int, default=1, help="this fraction of the prompts")
    parser.add_argument("--shape", choices=serve_9b.SHAPES, default="9b")
    parser.add_argument(
        "--changes",
        default="{}",
        help="JSON of fields of the configuration that differ from the shape",
    )
    parser.add_argument(
        "--tiny", type=Path, default=HERE.parent.parent / "annie_quant/assets/tiny-annie"
    )
    parser.add_argument("--ready", type=Path, help="a file written when the servers are ready")
    parser.add_argument("--go", type=Path, help="a file for whose appearance the timing waits")
    parser.add_argument("--hold", type=Path, help="keep the servers until this file appears")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of each server")
    parser.add_argument("--port", type=int, default=8200, help="of the first server")
    parser.add_argument("--cpu", action="store_true", help="try the script on a CPU")
    args = parser.parse_args()
    if unknown := set(args.servers.split(",")) - set(SERVERS):
        parser.error(f"--servers: {', '.join(sorted(unknown))}; choose of {', '.join(SERVERS)}")
    coordinate(args)


if __name__ == "__main__":
    main()
