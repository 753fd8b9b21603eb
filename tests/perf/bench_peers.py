"""annie_quant, GuideLLM, AIPerf and `vllm bench serve` on one scheduled server in turns: do their medians agree?

    python tests/perf/bench_peers.py OUTPUT --peers VENV --vllm VENV [--rounds 3] [--requests 40]

--peers: an environment with guidellm and aiperf (pip install guidellm aiperf), --vllm: one with vllm. The server
(peer_server.py) leaves its first content after 40 ms and then one token per 8 ms, and logs when it wrote them, so that each
client's figure is compared with the server's for its own requests. Once its role event leaves at once ("early"), once directly
before the first content ("late"). Prints a Markdown table; OUTPUT keeps all reports, peers.json has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from annie_quant import bench  # noqa: E402
from annie_quant.bench.run_folder import read_records  # noqa: E402
from annie_quant.judge.library import build_workload  # noqa: E402

from read_reports import read  # noqa: E402  isort:skip

TOKENS = 64
TOOLS = ("annie-quant", "GuideLLM", "AIPerf", "vllm bench")
SNAPSHOT = "0" * 39 + "1"


def prompts(count: int) -> list[str]:
    return [
        f"Question {i}: what is the capital of Japan and why is it so well known?"
        for i in range(count)
    ]


def offline_hub(folder: Path) -> Path:
    """A Hugging Face cache with the embedded model's tokenizer as local/tiny: AIPerf takes no folder."""
    model = folder / "hub" / "models--local--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(SNAPSHOT)
    snapshot = model / "snapshots" / SNAPSHOT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "annie_quant" / "assets" / "tiny-annie" / name, snapshot / name)
    return folder


class Client:
    """Runs one tool against the server; `report` is what it wrote."""

    def __init__(self, options, url: str, folder: Path) -> None:
        self.options, self.url, self.folder = options, url, folder
        folder.mkdir(parents=True)
        texts = prompts(options.requests)
        for name, rows in {
            "guidellm.jsonl": [{"prompt": text, "output_tokens_count": TOKENS} for text in texts],
            "aiperf.jsonl": [{"text": text} for text in texts],
        }.items():
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(self, tool: str) -> Path:
        return {
            "annie-quant": self.ours,
            "GuideLLM": self.guidellm,
            "AIPerf": self.aiperf,
            "vllm bench": self.vllm,
        }[tool]()

    def ours(self) -> Path:
        cases = [
            {"id": str(i), "messages": [{"role": "user", "content": t}]}
            for i, t in enumerate(prompts(self.options.requests))
        ]
        workload = build_workload(
            {"name": "peers", "max_tokens": TOKENS, "gates": ["non_empty"], "cases": cases}
        )
        bench.run(
            [bench.Backend("scheduled", self.url)], [workload], self.folder / "ours", runs=1, warmup=2, noise_share=0.0,
            with_memory=False,
        )  # fmt: skip
        return self.folder / "ours"

    def guidellm(self) -> Path:
        report = self.folder / "guidellm.json"
        self.call(
            self.options.peers / "bin/guidellm", "run", "--backend", f"kind=openai_http,target={self.url},model=scheduled",
            "--profile", "kind=synchronous", "--constraint", f"kind=max_requests,count={self.options.requests}",
            "--data", f"kind=json_file,path={self.folder / 'guidellm.jsonl'}", "--output", f"kind=json,path={report}",
            "--disable-console-interactive",
        )  # fmt: skip
        return report

    def aiperf(self) -> Path:
        where = self.folder / "aiperf"
        self.call(
            self.options.peers / "bin/aiperf", "profile", "-m", "scheduled", "--url", self.url, "--endpoint-type", "chat",
            "--streaming", "--use-server-token-count", "--custom-dataset-type", "single_turn",
            "--input-file", self.folder / "aiperf.jsonl", "--request-count", self.options.requests, "--concurrency", 1,
            "--tokenizer", "local/tiny", "--output-artifact-dir", where, "--ui", "none", "--extra-inputs", f"max_tokens:{TOKENS}",
        )  # fmt: skip
        return where

    def vllm(self) -> Path:
        report = self.folder / "vllm.json"
        self.call(
            self.options.vllm / "bin/vllm", "bench", "serve", "--backend", "openai-chat", "--base-url", self.url,
            "--endpoint", "/v1/chat/completions", "--model", "scheduled",
            "--tokenizer", ROOT / "annie_quant" / "assets" / "tiny-annie", "--dataset-name", "random",
            "--random-input-len", 20, "--random-output-len", TOKENS, "--num-prompts", self.options.requests,
            "--max-concurrency", 1, "--save-result", "--result-filename", report, "--percentile-metrics", "ttft,tpot,itl,e2el",
        )  # fmt: skip
        return report

    def call(self, *words) -> None:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(self.options.hub)}
        environment.pop("PYTHONPATH", None)
        with (self.folder / "log.txt").open("a") as log:
            subprocess.run(
                list(map(str, words)),
                check=True,
                stdout=log,
                stderr=log,
                timeout=400,
                env=environment,
                cwd=self.folder,
            )


def served(log: Path, skip: int, count: int) -> dict[str, float]:
    """The server's own medians over the last `count` streams of a client."""
    rows = [json.loads(line) for line in log.read_text().splitlines()[skip:]]
    rows = [row for row in rows if row["stream"] and len(row["stamps"]) == TOKENS][-count:]
    gaps = [
        1e3 * (b - a)
        for row in rows
        for a, b in zip(row["stamps"], row["stamps"][1:], strict=False)
    ]
    return {
        "ttft_ms": statistics.median(1e3 * (row["stamps"][0] - row["received"]) for row in rows),
        "itl_ms": statistics.median(gaps),
        "tpot_ms": statistics.median(
            1e3 * (row["stamps"][-1] - row["stamps"][0]) / (TOKENS - 1) for row in rows
        ),
        "n": len(rows),
    }


def measure(options, role: str, round_: int) -> list[dict]:
    """One run of each tool, in an order that rotates with the round."""
    log = options.output / f"server-{role}-{round_}.jsonl"
    log.touch()
    command = [
        sys.executable,
        str(Path(__file__).with_name("peer_server.py")),
        str(log),
        "--role",
        role,
        "--tokens",
        str(TOKENS),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    rows = []
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        client = Client(options, url, options.output / f"{role}-{round_}")
        for tool in TOOLS[round_ % len(TOOLS) :] + TOOLS[: round_ % len(TOOLS)]:
            before = len(log.read_text().splitlines())
            load, start = os.getloadavg()[0], time.monotonic()
            report = client.run(tool)
            (row,) = read(report)
            figures = {
                name: getattr(row, name) for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")
            }
            if tool == "annie-quant":
                own = [r for r in read_records(report / "records.jsonl") if not r.warmup]
                figures["first_event_ms"] = statistics.median(
                    r.timings.first_event_ms for r in own if r.timings.first_event_ms is not None
                )
            truth = served(log, before, options.requests)
            rows.append({"tool": tool, "role": role, "round": round_, "load": load, "seconds": time.monotonic() - start,
                         **figures, "server": truth})  # fmt: skip
            print(f"{role} {round_} {tool}: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    finally:
        server.terminate()
        server.wait()
    return rows


def table(rows: list[dict]) -> str:
    """One row per tool and place of the role event: median of the rounds with the smallest and largest, less the server's own."""

    def cell(some: list[dict], name: str, less: str | None = None) -> str:
        values = [
            row[name] - (row["server"][less] if less else 0.0)
            for row in some
            if row.get(name) is not None
        ]
        if not values:
            return "–"
        sign = "+" if less else ""
        return f"{statistics.median(values):{sign}.2f} ({min(values):{sign}.2f} to {max(values):{sign}.2f})"

    lines = [
        "| role event | tool | TTFT − server's, ms | gap p50, ms | mean gap p50 − server's, ms | E2E, ms |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for role in ("late", "early"):
        for tool in TOOLS:
            some = [row for row in rows if row["tool"] == tool and row["role"] == role]
            if some:
                cells = [cell(some, "ttft_ms", "ttft_ms"), cell(some, "itl_ms") if tool != "GuideLLM" else "–",
                         cell(some, "tpot_ms", "tpot_ms"), cell(some, "e2e_ms")]  # fmt: skip
                lines.append(f"| {role} | {tool} | {' | '.join(cells)} |")
    early = [
        row["first_event_ms"]
        for row in rows
        if row["role"] == "early" and row["tool"] == "annie-quant"
    ]
    if early:
        lines.append(
            f"\nFirst event of the raw stream (role, early), by annie-quant: {statistics.median(early):.2f} ms."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40)
    arguments = parser.parse_args()
    arguments.output = arguments.output.resolve()
    arguments.output.mkdir(parents=True)
    arguments.hub = offline_hub(arguments.output / "huggingface")
    everything = [
        row
        for round_ in range(arguments.rounds)
        for role in ("late", "early")
        for row in measure(arguments, role, round_)
    ]
    (arguments.output / "peers.json").write_text(json.dumps(everything, indent=1))
    print(table(everything))
