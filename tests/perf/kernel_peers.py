"""Time our W4A16 kernel and the NVFP4 kernels that vLLM has, Marlin and humming, on one GPU in one run.

    python tests/perf/kernel_peers.py --output peers.json --tokens 1,4,16,64,256,2048 --shapes 24576x4096,...

humming-kernels 0.1.10, which vLLM 0.26 takes, needs pyelftools. A newer humming by its own API, without vLLM:

    python tests/perf/kernel_peers.py --output humming.json --humming --tokens 1,4,16,64,256
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import stack_times

SHAPES = "12288x4096,4096x4096,24576x4096,4096x12288,10240x4096,8192x8192"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="the shapes of this checkpoint, as servers merge its linears",
    )
    parser.add_argument("--tokens", default="1,4,16,64,256,2048")
    parser.add_argument("--repeats", type=int, default=stack_times.REPEATS)
    parser.add_argument("--seconds", type=float, default=60, help="after --go")
    parser.add_argument(
        "--humming", action="store_true", help="ours and humming's own layer (0.1.20), without vLLM"
    )
    parser.add_argument("--go", type=Path, help="prepare, then time when this file appears")
    args = parser.parse_args()
    shapes = (
        stack_times.served_shapes(args.checkpoint)
        if args.checkpoint
        else stack_times.read_shapes(args.shapes)
    )
    tokens = [int(m) for m in args.tokens.split(",")]
    missing: dict[str, str] = {}
    if args.humming:
        name = f"humming {version('humming-kernels')}"
        prepared = stack_times.prepare(
            shapes, tokens, {name: stack_times.HummingKernel(tokens)}, missing
        )
    else:
        from vllm.config import VllmConfig, set_current_vllm_config

        with set_current_vllm_config(VllmConfig()):
            prepared = stack_times.prepare(
                shapes, tokens, stack_times.vllm_kernels(missing), missing
            )
            print(f"vLLM takes {stack_times.choices()}", flush=True)
    for weight in prepared:
        print(f"{weight.n}x{weight.k}: differences from float64 {weight.differences}", flush=True)
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
