"""An agent's conversations at a depth on real servers: 52 tools, 6 requests each, 16k tokens, gates and times of both sides.

    python tests/perf/agent_depth.py FOLDER [--vllm BIN/vllm] [--context 10000] [--cases 2] [--threads 1]

Sides: llama.cpp with Q4_K_M and, with --vllm (a vLLM for CPUs with this package, tests/integration/vllm_cpu.py makes one), vLLM
with NVFP4; without it, llama.cpp with Q8_0. The model is tiny-annie with 32,768 positions in its configuration: it was trained on
4,096, so beyond them its answers mean nothing, and gates show that they are judged, not how well a model of this size does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

POSITIONS, REQUESTS = 32768, 6


def model(folder: Path) -> Path:
    """tiny-annie with more positions."""
    source, target = ROOT / "annie_quant/assets/tiny-annie", folder / "model"
    if not target.exists():
        shutil.copytree(source, target)
        config = json.loads((target / "config.json").read_text())
        config["max_position_embeddings"] = POSITIONS
        (target / "config.json").write_text(json.dumps(config))
    return target


def start_vllm(program: Path, checkpoint: Path, port: int, log: Path):
    """Serve a checkpoint with vLLM on the CPU, with more positions than its recipe `cpu` and with a prefix cache."""
    from annie_quant.ops import server

    command = [program, "serve", checkpoint, "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port),
               "--quantization", "modelopt", "--enforce-eager", "--max-num-seqs", "4", "--max-model-len", str(POSITIONS),
               "--max-num-batched-tokens", "2048", "--enable-prefix-caching", "--enable-prompt-tokens-details",
               "--reasoning-parser", "qwen3", "--enable-auto-tool-choice", "--tool-call-parser", "qwen3_coder"]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.pop("PYTHONPATH", None)
    server.check_port(port)
    process = server.spawn(list(map(str, command)), log, "vLLM", environment)
    server.wait_ready(process, lambda: f"http://127.0.0.1:{port}", 600)
    return process


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm", type=Path)
    parser.add_argument(
        "--context",
        type=int,
        default=10000,
        help="tokens of notes before the tools and the conversation",
    )
    parser.add_argument("--cases", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--port", type=int, default=8190)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)

    import msgspec

    from annie_quant import bench, checkpoint, judge, quantize
    from annie_quant.bench.run_folder import read_records
    from annie_quant.ops import serving

    source = model(arguments.folder)
    agent = judge.load_workloads(["agent_loop"])[0]
    agent = replace(
        agent,
        cases=tuple(replace(c, turns=c.turns[:REQUESTS]) for c in agent.cases[: arguments.cases]),
        context=msgspec.structs.replace(agent.context, tokens=arguments.context),
    )
    kinds = ["Q4_K_M"] if arguments.vllm else ["Q8_0", "Q4_K_M"]
    servers, sides = [], []
    with (arguments.folder / "progress.log").open("a") as progress:
        try:
            for kind in kinds:
                file = arguments.folder / f"{kind}.gguf"
                if not file.exists():
                    checkpoint.convert(source, to="gguf", output=file, type=kind)
                log = arguments.folder / f"{kind}.log"
                servers.append(
                    serving.start(
                        file,
                        runtime="llama.cpp",
                        log=log,
                        context=POSITIONS,
                        threads=arguments.threads,
                    )
                )
                meta = {"source": "tiny-annie", "pid": servers[-1].pid}
                sides.append(bench.Backend(f"llama.cpp-{kind}", servers[-1].url, meta=meta))
            if arguments.vllm:
                target = arguments.folder / "nvfp4"
                if not target.exists():
                    quantize.run("direct", source, target)
                servers.append(
                    start_vllm(
                        arguments.vllm, target, arguments.port, arguments.folder / "vllm.log"
                    )
                )
                meta = {"source": "tiny-annie", "pid": servers[-1].pid}
                sides.insert(0, bench.Backend("vLLM-NVFP4", servers[-1].url, meta=meta))
            run(arguments, bench, agent, sides, progress)
        finally:
            for server in servers:
                server.stop()
    rows = [
        r
        for r in read_records(arguments.folder / "run/records.jsonl")
        if not r.warmup and r.workload == agent.name
    ]
    print(
        f"{len(agent.tools)} tools, {REQUESTS} requests per conversation, {arguments.cases} conversations per side"
    )
    print(
        "side                 request  prompt tokens  cached  TTFT ms  ms per token  errors  tool call"
    )
    for side in sides:
        for turn in range(REQUESTS):
            own = [r for r in rows if r.backend == side.name and r.turn == turn]
            cached = [r.tokens.cached_tokens for r in own if r.tokens.cached_tokens is not None]
            first = [r.timings.first_token_ms for r in own if r.timings.first_token_ms is not None]
            tpot = [r.timings.tpot_ms for r in own if r.timings.tpot_ms is not None]
            checks = [
                r.judgement.checks["tool_call"] for r in own if "tool_call" in r.judgement.checks
            ]
            print(
                f"{side.name:20} {turn + 1:7} {statistics.median(r.tokens.prompt_tokens for r in own):14.0f}"
                f" {statistics.median(cached) if cached else float('nan'):7.0f}"
                f" {statistics.median(first) if first else float('nan'):8.0f}"
                f" {statistics.median(tpot) if tpot else float('nan'):13.2f} {sum(bool(r.answer.error) for r in own):7}"
                f"  {sum(checks)}/{len(checks)}"
            )


def run(arguments: argparse.Namespace, bench, agent, sides, progress) -> None:
    """Measure, and print the gates and findings."""

    def watch(r) -> None:
        print(
            r.id,
            r.answer.error,
            r.tokens.prompt_tokens,
            r.tokens.cached_tokens,
            r.timings.e2e_ms,
            file=progress,
            flush=True,
        )

    done = bench.run(
        sides, [agent], arguments.folder / "run", warmup=1, runs=1, timeout_s=600.0, watch=watch
    )
    for name, side in done.aggregates.served.items():
        print(
            name, {gate: f"{row.passes}/{row.n} {row.verdict}" for gate, row in side.gates.items()}
        )
    for finding in done.aggregates.confounds:
        print(f"  {finding.code}: {finding.message}")
    print(done.verdict.sentence)


if __name__ == "__main__":
    main()
