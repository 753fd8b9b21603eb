"""Strategies on a random Qwen3.5 with the 9B's shapes and fewer layers: time, peak memory, and their extrapolation.

python tests/perf/strategies_9b.py make DIR --layers 4
python tests/perf/strategies_9b.py make DIR --layers 2 --experts 256     # Qwen3.6-35B-A3B's shapes: 1.6 GB per layer of 40
python tests/perf/strategies_9b.py run DIR naive        # one JSON line: seconds, peaks; one process per measurement
python tests/perf/strategies_9b.py run DIR best --every 20 > LOG      # a progress line per 20 s; resumes after a kill
python tests/perf/strategies_9b.py extrapolate LINES    # of two layer counts, to the 9B and 27B
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import time
from pathlib import Path

import annie_quant
from annie_quant import quantize
from annie_quant.data import generate

TINY = Path(annie_quant.__file__).parent / "assets/tiny-annie"
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "vocab_size": 248320, "max_position_embeddings": 32768,
}  # fmt: skip
# Fields that differ in Qwen3.6-35B-A3B.
MIXTURE = {
    "hidden_size": 2048, "num_key_value_heads": 2, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
}  # fmt: skip
# Layers, and a layer's linear weights relative to the 9B's (from the published configurations: 27B is 5120 / 17408, 64 layers).
FULL = {"9B": (32, 1.0), "27B": (64, 1.74)}


def make(folder: Path, layers: int, experts: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5MoeTextConfig

    config = AutoConfig.from_pretrained(TINY, trust_remote_code=False)
    if experts:
        config = Qwen3_5MoeTextConfig(
            num_experts=experts, eos_token_id=config.eos_token_id, tie_word_embeddings=False
        )
    for key, value in (SHAPE | (MIXTURE if experts else {})).items():
        setattr(config, key, value)
    config.num_hidden_layers = layers
    config.layer_types = [
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)
    ]
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    model.save_pretrained(folder)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        shutil.copyfile(TINY / name, folder / name)
    generate("annie", teacher="offline", n=100, output=folder / "calibration.jsonl")


def run(folder: Path, strategy: str, every: float) -> None:
    import torch

    target = folder.with_name(f"{folder.name}-{strategy}")
    start = time.monotonic()
    last = -every

    def report(line: str) -> None:
        nonlocal last
        now = time.monotonic() - start
        if now - last >= every:
            last = now
            print(f"{now:7.1f} {line}", flush=True)

    result = quantize.run(
        strategy, folder, target, calib_data=folder / "calibration.jsonl", calib_samples=100, force=True,
        report=report if every else None,
    )  # fmt: skip
    cuda = torch.cuda.is_available()
    row = {
        "strategy": strategy,
        "layers": json.loads((folder / "config.json").read_text())["num_hidden_layers"],
        "seconds": round(time.monotonic() - start, 1),
        "gpu_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "host_peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "size_gb": round(result.size_bytes / 1e9, 3),
        "source_gb": round(result.source_bytes / 1e9, 3),
    }
    print(json.dumps(row), flush=True)
    shutil.rmtree(target)


def extrapolate(lines: Path) -> None:
    """A straight line through two layer counts: a fixed part (embedding, head, start) and a part per layer, at least 0."""
    rows = [json.loads(line) for line in lines.read_text().splitlines() if line.startswith("{")]
    print(
        "| strategy | measured (layers: s, GPU GB, host GB) | 9B: min, GPU GB, file GB | 27B: min, GPU GB, file GB |"
    )
    print("|---|---|---|---|")
    for strategy in dict.fromkeys(r["strategy"] for r in rows):
        mine = sorted((r for r in rows if r["strategy"] == strategy), key=lambda r: r["layers"])
        low, high = mine[0], mine[-1]
        if low is high:
            continue
        cells = [
            "; ".join(
                f"{r['layers']}: {r['seconds']}, {r['gpu_peak_gb']}, {r['host_peak_gb']}"
                for r in mine
            )
        ]
        for layers, weight in FULL.values():
            at = [
                line(low, high, key, layers * weight)
                for key in ("seconds", "gpu_peak_gb", "size_gb")
            ]
            cells.append(f"{at[0] / 60:.1f}, {at[1]:.0f}, {at[2]:.1f}")
        print(f"| {strategy} | {' | '.join(cells)} |")


def line(low: dict, high: dict, key: str, layers: float) -> float:
    a, b = low[key] or 0, high[key] or 0
    return a + max(0, b - a) / (high["layers"] - low["layers"]) * (layers - low["layers"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["make", "run", "extrapolate"])
    parser.add_argument("path", type=Path)
    parser.add_argument("strategy", nargs="?")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=0, help="0: dense; 256: Qwen3.6-35B-A3B's")
    parser.add_argument(
        "--every", type=float, default=0, metavar="SECONDS", help="print the progress; 0: not"
    )
    inputs = parser.parse_args()
    if inputs.what == "make":
        make(inputs.path, inputs.layers, inputs.experts)
    elif inputs.what == "run":
        run(inputs.path, inputs.strategy or sys.exit("which strategy?"), inputs.every)
    else:
        extrapolate(inputs.path)
