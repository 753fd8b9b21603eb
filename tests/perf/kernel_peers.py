"""Time our W4A16 kernel and the NVFP4 kernels that vLLM has, Marlin and humming, on one GPU in one run (gemm.stack_times).

    python tests/perf/kernel_peers.py --output peers.json --tokens 1,4,16,64,256,2048 --shapes 24576x4096,...

humming-kernels needs pyelftools.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

from annie_quant.gemm import stack_times

SHAPES = "12288x4096,4096x4096,24576x4096,4096x12288,10240x4096,8192x8192"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default="1,4,16,64,256,2048")
    parser.add_argument("--repeats", type=int, default=stack_times.REPEATS)
    parser.add_argument("--seconds", type=float, default=60, help="after --go")
    parser.add_argument("--go", type=Path, help="prepare, then time when this file appears")
    args = parser.parse_args()
    from vllm.config import VllmConfig, set_current_vllm_config

    shapes = stack_times.read_shapes(args.shapes)
    tokens = [int(m) for m in args.tokens.split(",")]
    missing: dict[str, str] = {}
    with set_current_vllm_config(VllmConfig()):
        prepared = stack_times.prepare(shapes, tokens, stack_times.vllm_kernels(missing), missing)
    for name, reason in missing.items():
        print(f"{name} does not run: {reason}", flush=True)
    while args.go and not args.go.exists():
        time.sleep(0.1)
    rows = []
    for row in stack_times.measure(prepared, tokens, args.seconds, args.repeats):
        rows.append(asdict(row))
        print(f"{row.n}x{row.k} M={row.m}: {row.us}, fastest {row.fastest}", flush=True)
        args.output.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
