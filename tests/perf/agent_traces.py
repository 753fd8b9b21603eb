"""Are agents' traces sent as they were recorded? WEKA's corpus against its JSON, and one session in the real llama.cpp.

    git clone https://github.com/callanjfox/kv-cache-tester
    python tests/perf/agent_traces.py kv-cache-tester/traces [--most 400] [--served]

Each request that annie_quant.bench.traces reads (time, prompt and answer tokens, block ids) is compared with the file's.
--served: a session of four requests by `bench --trace` and `--replay` with tiny-annie in the embedded server: prompt tokens, those
from the prefix cache, and the time between requests.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

IDS = list(range(200))
REQUESTS = [  # time, prompt and answer tokens, blocks
    (0.0, 900, 8, IDS[:14]), (2.0, 1100, 6, IDS[:17]), (3.5, 1400, 4, IDS[:21]), (5.0, 1300, 5, [*IDS[:10], *IDS[100:110]]),
]  # fmt: skip


def recorded(requests: list, start_s: float = 0.0) -> list[tuple]:
    """Return (time, prompt tokens, answer tokens, block ids) of a raw trace, subagents included."""
    rows = []
    for request in requests:
        if request["type"] == "subagent":
            rows += recorded(request["requests"], start_s + request["t"])
        else:
            rows.append(
                (start_s + request["t"], request["in"], max(1, request["out"]), request["hash_ids"])
            )
    return rows


def compare(folder: Path, most: int) -> None:
    from annie_quant.bench import traces

    files = sorted(folder.glob("*.json"))[:most]
    total, different = 0, 0
    for file in files:
        content = json.loads(file.read_text())
        cases = [case for agent in traces.agents_of(file) for case in agent]
        read = [
            (
                c.arrival_s,
                c.prompt_tokens,
                c.max_tokens,
                [int(b.rpartition("/")[2]) for b in c.blocks],
            )
            for c in cases
        ]
        total += len(read)
        different += sorted(read) != sorted(recorded(content["requests"]))
    print(f"{len(files)} traces, {total:,} requests: {different} traces read otherwise")


def serve() -> None:
    from paths import TINY_ANNIE

    import annie_quant
    from annie_quant import bench
    from annie_quant.bench import traces
    from annie_quant.bench.run_folder import read_records
    from annie_quant.ops import serving

    work = Path(tempfile.mkdtemp())
    rows = [
        {"type": "s", "t": t, "in": prompt, "out": answer, "hash_ids": ids, "think_time": 0.3}
        for t, prompt, answer, ids in REQUESTS
    ]
    file = work / "session.json"
    file.write_text(json.dumps({"id": "s", "block_size": 64, "requests": rows}))
    model = Path(
        annie_quant.checkpoint.convert(TINY_ANNIE, "gguf", work / "tiny.gguf", type="Q8_0").path
    )
    for workload in (traces.trace(file, 10), traces.replay([file], 10)):
        with serving.start(model) as server:
            sides = [bench.Backend("a", server.url)]
            bench.run(sides, [workload], work / workload.name, warmup=1, runs=1, with_memory=False)
        records = [
            r
            for r in read_records(work / workload.name / "records.jsonl")
            if r.workload == workload.name
        ]
        before = None
        for r in (r for r in records if not r.warmup):
            between = (
                ""
                if before is None
                else f", {r.timings.started_unix_s - before:.2f} s after the one before"
            )
            before = r.timings.started_unix_s + (
                r.timings.e2e_ms / 1e3 if workload.name == "replay" else 0.0
            )
            print(
                f"{workload.name}: {r.tokens.prompt_tokens} tokens, {r.tokens.cached_tokens} cached{between}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=int, default=400)
    parser.add_argument("--served", action="store_true")
    arguments = parser.parse_args()
    compare(arguments.folder, arguments.most)
    if arguments.served:
        serve()


if __name__ == "__main__":
    main()
