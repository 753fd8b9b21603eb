"""A run directory that another party wrote: report, a resumed benchmark, the card of an upload."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
from collections.abc import Iterator
from typing import Any

from fuzz.boundaries.grammar import Hostile, encode
from fuzz.boundaries.harness import Finding, Sandbox
from paths import TESTS

RUNS = [TESTS / "data/runs" / name for name in ("schema_1", "schema_2")]
FILES = ("run.json", "run.json", "bench.json", "records.jsonl", "records.jsonl", "inputs.json")
ALLOWED = {"run.json", "bench.json", "records.jsonl", "inputs.json", "report.html", "report.md", "results.csv", "plots", "streams",
           "capitals.json", ".lock", "stages"}  # fmt: skip


@contextlib.contextmanager
def opened(sandbox: Sandbox) -> Iterator[Any]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = f"http://127.0.0.1:{taken.getsockname()[1]}"
    sources = [{name: (run / name).read_bytes() for name in set(FILES)} for run in RUNS]

    def case(seed: str, left: int) -> int:
        hostile = Hostile(seed)
        sandbox.clear_output()
        run = sandbox.output / "run"
        run.mkdir()
        source = hostile.random.choice(sources)
        changed = hostile.random.choices(FILES, k=hostile.random.choice((1, 1, 2)))
        for name, data in source.items():
            if name not in changed:
                (run / name).write_bytes(data)
            elif name.endswith("l"):
                (run / name).write_bytes(records(hostile, data))
            else:
                (run / name).write_bytes(hostile.damaged(encode(hostile.changed(json.loads(data)))))
        if hostile.random.random() < 0.8:
            sandbox.run("report", run)
        else:
            sandbox.run(
                "bench", "--backend-a", "a", closed, "--workloads", "greeting", "--output", run
            )
        if (
            more := {path.name for path in run.iterdir()}
            - ALLOWED
            - {path.name for path in run.glob("*.*")}
        ):
            raise Finding(f"unexpected entries: {sorted(more)[:5]}")
        shutil.rmtree(run)
        return 1

    yield case


def records(hostile: Hostile, data: bytes) -> bytes:
    lines = data.splitlines()
    for _ in range(hostile.random.choice((1, 1, 2, 5))):
        at = hostile.random.randrange(len(lines))
        lines[at] = encode(hostile.changed(json.loads(data.splitlines()[0])))
        if hostile.random.random() < 0.1:
            lines[at] = encode(hostile.value())
    return hostile.damaged(b"\n".join(lines) + b"\n")
