"""SIGKILL at random moments: nothing finished is lost, and the resumed run equals one that was never interrupted.

ANNIE_QUANT_KILLS sets how often (default 5; each is a new process).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from fake_server import FakeServer, words

from annie_quant import bench
from annie_quant.judge.library import build_workload

KILLS = int(os.environ.get("ANNIE_QUANT_KILLS", "5"))
CHILD = """
import json, sys
from annie_quant import bench
from annie_quant.judge.library import build_workload
asked = [build_workload(w) for w in json.loads({workloads!r})]
bench.run([bench.Backend("a", {a!r}), bench.Backend("b", {b!r})], asked, {output!r}, warmup=1, runs=1)
"""


def workloads():
    n = 5 * KILLS
    single = [
        {"id": f"c{i}", "messages": [{"role": "user", "content": f"Say {i}."}]} for i in range(n)
    ]
    talks = [{"id": f"t{i}", "turns": [f"one {i}", "two", "three"]} for i in range(n // 4)]
    base = {"max_tokens": 20, "gates": ["non_empty"]}
    return [{"name": "single", "cases": single, **base}, {"name": "talks", "cases": talks, **base}]


def echo(body):
    """An answer that depends on the whole conversation, so that a wrong history after resuming is detected."""
    history = "|".join(m["content"] for m in body["messages"])
    return words(f"{len(history)} letters, ending in {history[-12:]}", first_s=0.01)


def rows(folder: Path):
    whole = (folder / "records.jsonl").read_bytes() if (folder / "records.jsonl").exists() else b""
    return [json.loads(line) for line in whole[: whole.rfind(b"\n") + 1].splitlines()]


def measured(folder):
    return [
        (r["id"], r["text"], r["request_sha256"], r["checks"])
        for r in rows(folder)
        if not r["warmup"]
    ]


def test_kill_nine_and_resume_equals_an_uninterrupted_run(tmp_path):
    rng = random.Random(4)
    kills = 0
    with FakeServer(echo) as a, FakeServer(echo) as b:
        bench.run(
            [bench.Backend("a", a.url), bench.Backend("b", b.url)],
            [build_workload(w) for w in workloads()],
            tmp_path / "whole",
            warmup=1,
            runs=1,
        )
        killed = tmp_path / "killed"
        code = CHILD.format(a=a.url, b=b.url, workloads=json.dumps(workloads()), output=str(killed))
        while kills < KILLS:
            before = measured(killed)
            child = subprocess.Popen([sys.executable, "-c", code])
            while len(measured(killed)) < len(before) + rng.randint(1, 5) and child.poll() is None:
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 0.03))
            child.send_signal(signal.SIGKILL)
            if child.wait() == 0:
                break
            kills += 1
            assert measured(killed)[: len(before)] == before
        subprocess.run([sys.executable, "-c", code], check=True)
    assert kills == KILLS
    ids = [r["id"] for r in rows(killed)]
    assert len(ids) == len(set(ids))
    assert sorted(measured(killed), key=lambda r: r[0]) == sorted(
        measured(tmp_path / "whole"), key=lambda r: r[0]
    )
    whole, resumed = (
        json.loads((tmp_path / f / "bench.json").read_text()) for f in ("whole", "killed")
    )
    assert (
        whole["aggregates"]["served"]["a"]["gates"] == resumed["aggregates"]["served"]["a"]["gates"]
    )
