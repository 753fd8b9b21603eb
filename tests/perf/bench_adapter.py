"""Time, memory and bits of an adapter's merge, compared with peft's, on random weights in the shapes of Qwen2.5-1.5B.

    python tests/perf/bench_adapter.py --work FOLDER --runs 3

Each merge is a fresh process whose imports are not counted. Caches are warm: the first run of each is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from annie_quant.checkpoint import ModelFolder, Planned, write  # noqa: E402

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16", "hidden_size": 1536,
    "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
    "vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768, "hidden_act": "silu",
}  # fmt: skip
LINEARS = {
    "self_attn.q_proj": (1536, 1536),
    "self_attn.k_proj": (256, 1536),
    "self_attn.v_proj": (256, 1536),
    "self_attn.o_proj": (1536, 1536),
    "mlp.gate_proj": (8960, 1536),
    "mlp.up_proj": (8960, 1536),
    "mlp.down_proj": (1536, 8960),
}
OURS = """
from annie_quant import checkpoint
start = time.perf_counter()
checkpoint.merge(base, adapter, output)
"""
PEFT = """
import torch, transformers
from peft import PeftModel
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
start = time.perf_counter()
model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, "DTYPE"))
merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
merged.to(torch.bfloat16).save_pretrained(output)
"""
PEFT_FLOAT32 = PEFT.replace("DTYPE", "float32")
PEFT_BFLOAT16 = PEFT.replace("DTYPE", "bfloat16")
BEFORE = """
import json, os, sys, time
base, adapter, output = sys.argv[1:]
"""
AFTER = """
seconds = time.perf_counter() - start
status = open("/proc/self/status").read()  # ru_maxrss would have the parent's
peak_kb = int(status.partition("VmHWM:")[2].split()[0])
print(json.dumps({"seconds": seconds, "peak_mb": peak_kb / 1000}))
"""


def normal(seed: int, shape: tuple[int, ...], scale: float, dtype: type) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return (numbers * np.float32(scale)).astype(dtype)


def make(folder: Path, rank: int) -> tuple[Path, Path]:
    """Write base and adapter, where they are not there yet."""
    from safetensors.numpy import save_file

    base = folder / "base"
    adapter = folder / f"adapter-{rank}"
    shapes = {"model.embed_tokens.weight": (151936, 1536), "model.norm.weight": (1536,)}
    factors = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (1536,)
        for name, (rows, columns) in LINEARS.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            key = f"base_model.model.{prefix}.{name}"
            factors[f"{key}.lora_A.weight"] = normal(layer, (rank, columns), 0.02, np.float32)
            factors[f"{key}.lora_B.weight"] = normal(layer + 99, (rows, rank), 0.02, np.float32)
        for name in ("q_proj", "k_proj", "v_proj"):
            rows = LINEARS[f"self_attn.{name}"][0]
            shapes[f"{prefix}.self_attn.{name}.bias"] = (rows,)
    if not base.exists():
        plan = []
        for number, (name, shape) in enumerate(shapes.items()):
            load = partial(normal, number, shape, 0.02, ml_dtypes.bfloat16)
            plan.append(Planned(name, "BF16", shape, load))
        write(base, plan, 2_000_000_000)
        (base / "config.json").write_text(json.dumps(CONFIG))
    if not adapter.exists():
        adapter.mkdir()
        save_file(factors, adapter / "adapter_model.safetensors", {"format": "pt"})
        names = [name.rpartition(".")[2] for name in LINEARS]
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": names}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
    return base, adapter


def run(code: str, base: Path, adapter: Path, output: Path) -> dict[str, float]:
    shutil.rmtree(output, ignore_errors=True)
    environment = {"OMP_NUM_THREADS": "2"} | os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BEFORE + code + AFTER, base, adapter, output]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def differing(one: Path, other: Path) -> tuple[int, int]:
    """Return how many elements of two merged models differ, and of how many."""
    first = ModelFolder(one)
    second = ModelFolder(other)
    assert set(first) == set(second)
    count = 0
    for name in first:
        count += int(
            (first.tensor(name).view(np.int16) != second.tensor(name).view(np.int16)).sum()
        )
        first.release(name)
        second.release(name)
    return count, first.weight_bytes // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    base, adapter = make(arguments.work, arguments.rank)
    sides = {"annie_quant": OURS, "peft, float32": PEFT_FLOAT32, "peft, bf16": PEFT_BFLOAT16}
    measured: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(arguments.runs + 1):
        for side, code in sides.items():
            result = run(code, base, adapter, arguments.work / f"out-{side}")
            if number:
                measured[side].append(result)
                print(side, result, flush=True)
    print(
        f"| merge | seconds, median of {arguments.runs} (all) | peak RSS, MB | elements that differ |"
    )
    print("|---|---|---|---|")
    for side, results in measured.items():
        seconds = sorted(result["seconds"] for result in results)
        spread = ", ".join(f"{value:.1f}" for value in seconds)
        peak = max(result["peak_mb"] for result in results)
        count, total = differing(
            arguments.work / f"out-{side}", arguments.work / "out-peft, float32"
        )
        median = statistics.median(seconds)
        print(f"| {side} | {median:.1f} ({spread}) | {peak:,.0f} | {count:,} of {total:,} |")


if __name__ == "__main__":
    main()
