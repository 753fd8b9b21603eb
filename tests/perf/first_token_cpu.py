"""Time to the first token of llama.cpp (the xllamacpp wheel) on a CPU over 128 to 2,048 prompt tokens, per format.

    python tests/perf/first_token_cpu.py NAME=MODEL.gguf ... --repeats 2 > rows.jsonl
    python tests/perf/first_token_cpu.py NAME=MODEL.gguf ... --table rows.jsonl

One server per file, one thread each, one request in flight, one token per answer, prompts in random order, each with its own
beginning and without the prefix cache. Next to the client's time stands the processor time of the server, which a shared
machine changes less.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import gguf
import psutil

from annie_quant import stream
from annie_quant.judge.workloads import context_text
from annie_quant.ops import serving

LENGTHS = (128, 256, 512, 1024, 2048)
WORDS_PER_TOKEN = 0.65


def ask(url: str, tokens: int, unique: str) -> tuple[int, float]:
    """Return (prompt tokens, milliseconds to the first token)."""
    text = context_text(round(tokens * WORDS_PER_TOKEN), unique)
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_prompt": False,
        "ignore_eos": True,
    }
    request = stream.Request(f"{url}/v1/chat/completions", json=body, timeout_s=600)
    (answer,) = stream.run([request], concurrency=1).records()
    if answer["error"] or answer["server_timings"].get("cache_n"):
        sys.exit(f"{url}: {answer['error'] or 'a prompt was cached'}")
    first_ms = answer["first_content_ms"] or answer["e2e_ms"]
    return answer["usage"]["prompt_tokens"], first_ms


def cpu_ms(process: psutil.Process) -> float:
    times = process.cpu_times()
    return 1e3 * (times.user + times.system)


def measure(files: dict[str, Path], repeats: int) -> None:
    servers = {name: serving.start(path, threads=1) for name, path in files.items()}
    rng = random.Random(0)
    try:
        processes = {name: psutil.Process(server.pid) for name, server in servers.items()}
        for name, server in servers.items():
            for tokens in LENGTHS[:3]:
                ask(server.url, tokens, f"warm {name} {tokens} {time.time()}")
        plan = [(name, tokens) for name in files for tokens in LENGTHS] * repeats
        rng.shuffle(plan)
        for number, (name, tokens) in enumerate(plan):
            before = cpu_ms(processes[name])
            prompt, ms = ask(servers[name].url, tokens, f"{number} {time.time()}")
            row = {
                "model": name,
                "length": tokens,
                "tokens": prompt,
                "ms": round(ms, 1),
                "cpu_ms": round(cpu_ms(processes[name]) - before, 1),
                "load": round(psutil.getloadavg()[0], 1),
            }
            print(json.dumps(row), flush=True)
    finally:
        for server in servers.values():
            server.stop()


def flops_of(path: Path) -> Callable[[float], float]:
    """Return the function that counts a prompt's FLOPs, in linears and attention, from a GGUF file's shapes."""
    reader = gguf.GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    layers = reader.fields[f"{arch}.block_count"].contents()
    hidden = reader.fields[f"{arch}.embedding_length"].contents()
    linears = [t for t in reader.tensors if t.name.startswith("blk.") and len(t.shape) == 2]
    weights = sum(int(t.n_elements) for t in linears)
    return lambda tokens: 2 * weights * tokens + 2 * layers * hidden * tokens**2


def table(rows_file: Path, files: dict[str, Path]) -> None:
    """Print medians per length, and the errors of one rate: FLOPs per second as at 512 tokens."""
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    by_model: dict[str, dict[int, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_model[row["model"]][row["length"]].append(row)
    print(f"| model | {' | '.join(f'{n:,}' for n in LENGTHS)} | errors of one rate |")
    print("|---" * (len(LENGTHS) + 2) + "|")
    for model, lengths in by_model.items():
        flops = flops_of(files[model])
        cells = []
        seconds_per_flop = {}
        for length in LENGTHS:
            own = lengths[length]
            tokens = statistics.median(r["tokens"] for r in own)
            cpu = statistics.median(r["cpu_ms"] for r in own)
            wall = statistics.median(r["ms"] for r in own)
            seconds_per_flop[length] = cpu / flops(tokens)
            cells.append(f"{tokens:.0f}: {cpu:,.0f} ({wall:,.0f})")
        errors = [seconds_per_flop[512] / value - 1 for value in seconds_per_flop.values()]
        cells.append(f"{min(errors):+.0%} to {max(errors):+.0%}")
        print(f"| {model} | {' | '.join(cells)} |")
    loads = [row["load"] for row in rows]
    print(f"\nLoad average {min(loads)} to {max(loads)}, n = {len(rows)}.")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="NAME=MODEL.gguf")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    pairs = (item.partition("=") for item in arguments.files)
    files = {name: Path(path) for name, _, path in pairs}
    if arguments.table:
        table(arguments.table, files)
    else:
        measure(files, arguments.repeats)


if __name__ == "__main__":
    main()
