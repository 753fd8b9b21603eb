"""Time to the first token of llama.cpp (the xllamacpp wheel) on a CPU over 128 to 2,048 prompt tokens, per format.

    python tests/perf/first_token_cpu.py NAME=MODEL.gguf ... --repeats 2 > rows.jsonl
    python tests/perf/first_token_cpu.py --table rows.jsonl

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
from pathlib import Path

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


def table(path: Path) -> None:
    """Print medians per length, and the error of a rate that one length of the same file gives."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    by_model: dict[str, dict[int, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_model[row["model"]][row["length"]].append(row)
    print(f"| model | {' | '.join(f'{n:,}' for n in LENGTHS)} | of one rate |\n|---|" + "---|" * 6)
    for model, lengths in by_model.items():
        cells = []
        rates = {}
        for length in LENGTHS:
            own = lengths[length]
            tokens = statistics.median(r["tokens"] for r in own)
            cpu = statistics.median(r["cpu_ms"] for r in own)
            wall = statistics.median(r["ms"] for r in own)
            rates[length] = cpu / tokens
            cells.append(f"{cpu:,.0f} ({wall:,.0f}) ms, {tokens:.0f} tokens")
        errors = [rates[512] / rate - 1 for rate in rates.values()]
        cells.append(f"{min(errors):+.0%} to {max(errors):+.0%}")
        print(f"| {model} | {' | '.join(cells)} |")
    loads = [row["load"] for row in rows]
    print(f"\nload average {min(loads)} to {max(loads)}, n = {len(rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="NAME=MODEL.gguf")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments.table)
        return
    pairs = (item.partition("=") for item in arguments.files)
    measure({name: Path(path) for name, _, path in pairs}, arguments.repeats)


if __name__ == "__main__":
    main()
