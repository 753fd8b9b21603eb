"""Speed of `direct` on a synthetic checkpoint with Qwen3.5-9B's shapes, compared with cp, the codec and llm-compressor.

    python tests/perf/bench_checkpoint.py --work /tmp/bench --layers 12 --runs 2
    python tests/perf/bench_checkpoint.py --work /tmp/bench --peer /tmp/llmc/bin/python     # a venv with llmcompressor

Caches cannot be dropped here, so everything is measured warm: the source is read once before. Each copy and each conversion
is followed by a sync, and both times are shown. The peer gets the same tensors in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import make_9b

from annie_quant import nvfp4

ROOT = Path(__file__).resolve().parent.parent.parent

OURS = """
import json, resource, sys, time
from annie_quant import quantize
start = time.perf_counter()
result = quantize.run("direct", sys.argv[1], sys.argv[2])
print(json.dumps({"seconds": time.perf_counter() - start, "size_bytes": result.size_bytes,
                  "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""
THEIRS = """
import json, resource, sys, time
import torch
torch.set_num_threads(2)
from llmcompressor.entrypoints.model_free import model_free_ptq
start = time.perf_counter()
model_free_ptq(sys.argv[1], sys.argv[2], scheme="NVFP4A16", device="cpu", max_workers=int(sys.argv[3]),
               ignore=["lm_head", "re:.*embed_tokens.*", "re:.*in_proj_[ab]$", "re:.*conv1d", "re:mtp.*", "re:.*visual.*"])
print(json.dumps({"seconds": time.perf_counter() - start,
                  "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def child(python: str, code: str, *argv: str) -> dict:
    """Run a script in a fresh process and return the JSON of its last line."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [python, "-c", code, *argv], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def synced(work) -> dict:
    """Return the seconds of `work` and of the sync after it; `work` may add more."""
    start = time.perf_counter()
    more = work() or {}
    middle = time.perf_counter()
    os.sync()
    return {"wall": middle - start, "with_sync": time.perf_counter() - start} | more


def codec_speed(megabytes: int = 256) -> float:
    """Return GB/s of bf16 that amax and pack together read from memory."""
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((megabytes << 19) // 4096 * 4096, np.float32) * 0.02).astype(
        ml_dtypes.bfloat16
    )
    w = w.reshape(-1, 4096)
    out = nvfp4.pack(w)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        nvfp4.pack(w, tensor_scale=float(nvfp4.tensor_scale(nvfp4.amax(w))), out=out)
        times.append(time.perf_counter() - start)
    return w.nbytes / statistics.median(times) / 1e9


def show(name: str, rows: list[dict]) -> dict:
    best = {k: statistics.median(r[k] for r in rows) for k in rows[0]}
    print(
        f"{name:>22}: "
        + ", ".join(
            f"{k} {v / 1e6:,.0f} MB" if "bytes" in k else f"{k} {v:.2f} s" for k, v in best.items()
        )
    )
    return best


def against_cp(work: Path, layers: int, runs: int) -> None:
    source = work / f"source-{layers}"
    if not source.exists():
        make_9b.make(source, layers)
    size = sum(f.stat().st_size for f in source.iterdir())
    for file in source.glob("*.safetensors"):  # warm
        with file.open("rb") as opened:
            while opened.read(1 << 25):
                pass
    os.sync()
    copies, ours = [], []
    for _ in range(runs):
        copies.append(
            synced(lambda: subprocess.run(["cp", "-r", source, work / "copy"], check=True) and None)
        )
        shutil.rmtree(work / "copy")
        os.sync()
        ours.append(synced(lambda: child(sys.executable, OURS, str(source), str(work / "ours"))))
        shutil.rmtree(work / "ours")
        os.sync()
    print(f"\nsource {size / 1e9:.2f} GB, {layers} layers, {runs} runs alternately, medians")
    cp, direct = show("cp -r", copies), show("direct", ours)
    print(
        f"direct / cp: {direct['wall'] / cp['wall']:.2f} as they return, {direct['with_sync'] / cp['with_sync']:.2f} synced"
    )
    print(
        f"direct: {size / direct['wall'] / 1e9:.2f} GB/s of source; the codec alone {codec_speed():.2f} GB/s"
    )


def against_peer(work: Path, peer: str, workers: int) -> None:
    """A few layers with a small vocabulary, so that little is only copied; the same tensors for both."""
    source = work / "source-peer"
    if not source.exists():
        make_9b.TEXT |= {"vocab_size": 4096, "mtp_num_hidden_layers": 0}
        make_9b.make(source, 4, shard_bytes=500_000_000)
    size = sum(f.stat().st_size for f in source.glob("*.safetensors"))
    ours = [child(sys.executable, OURS, str(source), str(work / "ours")) | {"_": shutil.rmtree(work / "ours") or 0}
            for _ in range(3)]  # fmt: skip
    theirs = child(peer, THEIRS, str(source), str(work / "theirs"), str(workers))
    ours.append(child(sys.executable, OURS, str(source), str(work / "ours")) | {"_": 0})
    same_size = [
        sum(f.stat().st_size for f in (work / k).glob("*.safetensors")) for k in ("ours", "theirs")
    ]
    for name in ("ours", "theirs"):
        shutil.rmtree(work / name)
    seconds = statistics.median(r["seconds"] for r in ours)
    print(
        f"\nsame {size / 1e9:.2f} GB, 4 layers; outputs {same_size[0] / 1e6:.0f} and {same_size[1] / 1e6:.0f} MB"
    )
    print(f"direct {seconds:.2f} s (n=4), {ours[0]['peak_rss_bytes'] / 1e6:.0f} MB peak; "
          f"model_free_ptq NVFP4A16 {theirs['seconds']:.1f} s (n=1, {workers} workers), "
          f"{theirs['peak_rss_bytes'] / 1e6:.0f} MB peak: {theirs['seconds'] / seconds:.0f}x")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("/tmp/bench_checkpoint"))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--peer", help="Python of an environment with llmcompressor; only that comparison is made"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="leave the synthetic checkpoint there")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(
        platform.processor() or platform.machine(), os.cpu_count(), "processors", platform.release()
    )
    against_peer(
        arguments.work, arguments.peer, arguments.workers
    ) if arguments.peer else against_cp(arguments.work, arguments.layers, arguments.runs)
    if not arguments.keep:
        shutil.rmtree(arguments.work)
