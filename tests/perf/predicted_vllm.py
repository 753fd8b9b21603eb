"""Predicted and measured time per token of one stream in vLLM on a GPU, from the results of serve_9b.py.

    python tests/perf/predicted_vllm.py DIR --device h200 3843:22.88 --engines ours,ours-head
    python tests/perf/predicted_vllm.py DIR --shape 35b-a3b --changes '{"num_hidden_layers": 20}' --device h200
    python tests/perf/predicted_vllm.py DIR --source BF16 --device h200

DIR is serve_9b.py's --output, and --shape, --changes and --source are as there. Bytes per token: of a shape from its configuration,
of a real model from BF16's headers (NVFP4: the linears of its decoder layers have 4.5 bits per weight). Measured: the least of the
rounds, and their median. Predicted in the middle of the answer by each --device. Results: decode_speed.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from serve_9b import HERE, SHAPES, write_config

from annie_quant import models
from annie_quant.checkpoint import ModelFolder, decode_speed
from annie_quant.checkpoint.decode_speed import TokenBytes
from annie_quant.checkpoint.size import AttentionShape, bytes_per_token, caches_of

NVFP4, BF16 = 9 / 16, 2.0  # bytes per weight


def shape_weights(config: Mapping[str, Any], linear: float, head: float) -> float:
    """Return the bytes that a token reads of a Qwen3.5 shape. linear, head: bytes per weight."""
    hidden, total = config["hidden_size"], config["vocab_size"] * config["hidden_size"] * head
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    queries = config["num_attention_heads"] * config["head_dim"]
    for kind in config["layer_types"]:
        if (
            kind == "linear_attention"
        ):  # in_proj_qkv, in_proj_z and out_proj; in_proj_a, in_proj_b and conv1d stay bf16
            rows = 2 * keys + 3 * values
            total += hidden * 2 * config["linear_num_value_heads"] * BF16
            total += (2 * keys + values) * config["linear_conv_kernel_dim"] * BF16
        else:  # q_proj with its gate, o_proj, k_proj and v_proj
            rows = 3 * queries + 2 * config["num_key_value_heads"] * config["head_dim"]
        if "num_experts" in config:
            inner = config["num_experts_per_tok"] * config["moe_intermediate_size"]
            inner += config["shared_expert_intermediate_size"]
            total += (
                hidden * (config["num_experts"] + 1) * BF16
            )  # router and the shared expert's gate
        else:
            inner = config["intermediate_size"]
        total += hidden * (rows + 3 * inner) * linear
    return float(total)


def shape_bytes(engine: str, shape: str, changes: Mapping[str, Any], tiny: Path) -> TokenBytes:
    """Return what a token reads of one of serve_9b.py's shapes in one of its engines."""
    with tempfile.TemporaryDirectory() as folder:
        written = write_config(Path(folder), tiny, False, SHAPES[shape] | dict(changes))
        config = json.loads((written / "config.json").read_text())
    weights = shape_weights(
        config, BF16 if engine == "bf16" else NVFP4, NVFP4 if "-head" in engine else BF16
    )
    return TokenBytes(
        weights, len(config["layer_types"]), caches_of(msgspec.convert(config, AttentionShape))
    )


def model_bytes(engine: str, source: Path) -> TokenBytes:
    """Return what a token reads of a dense bf16 model folder, or of its NVFP4 form."""
    folder = ModelFolder(source)

    def stored(name: str) -> float:
        info = folder.info(name)
        quantized = engine != "bf16" and models.in_layer(name) and len(info.shape) == 2
        return info.elements * (NVFP4 if quantized else BF16)

    return decode_speed.token_bytes(folder, bytes_per_token(folder, stored))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument(
        "--device", nargs="+", default=["h200"], help="as of annie-quant quantize --device"
    )
    parser.add_argument("--engines", default="", help="default: all")
    parser.add_argument("--shape", choices=SHAPES, default="9b")
    parser.add_argument("--changes", default="{}")
    parser.add_argument("--source", type=Path, help="the bf16 model of a real checkpoint")
    parser.add_argument(
        "--tiny", type=Path, default=HERE.parent.parent / "annie_quant/assets/tiny-annie"
    )
    a = parser.parse_args()
    devices = [decode_speed.find_device(name) for name in a.device]
    times: dict[tuple[str, int, int], list[float]] = {}
    for line in (a.results / "results.jsonl").read_text().splitlines():
        row = json.loads(line)
        if (
            row["job"] == "decode"
            and row["streams"] == 1
            and row["round"] >= 0
            and "error" not in row
        ):
            times.setdefault((row["engine"], row["prompt"], row["tokens"]), []).append(
                row["tpot_ms"]
            )
    columns = ["engine", "prompt", "GB per token", "measured, ms: least (median)", "n"]
    columns += [
        f"predicted, {d.read_bytes_s / 1e9:.0f} GB/s and {1e6 * d.layer_s:.1f} us per layer"
        for d in devices
    ]
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    for (engine, prompt, tokens), rounds in sorted(times.items()):
        if a.engines and engine not in a.engines.split(","):
            continue
        read = (
            model_bytes(engine, a.source)
            if a.source
            else shape_bytes(engine, a.shape, json.loads(a.changes), a.tiny)
        )
        depth, measured = prompt + tokens // 2, min(rounds)
        cells = [
            engine,
            f"{prompt:,}",
            f"{read.at(depth) / 1e9:.2f}",
            f"{measured:.2f} ({statistics.median(rounds):.2f})",
        ]
        cells.append(str(len(rounds)))
        for device in devices:
            predicted = 1e3 / decode_speed.tok_s(read, device, depth)
            cells.append(f"{predicted:.2f} ({100 * (predicted / measured - 1):+.1f} %)")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
