"""Decoding with transformers' plain generate at a 9B shape: bf16 and NVFP4 on this package's kernel, in one process, in turn.

    python tests/perf/generate_9b.py --rounds 8

The model has serve_9b.py's shapes and random weights; both copies are on the device. generate runs with a static cache, which
transformers compiles on a GPU. Milliseconds per token are the difference of two lengths divided by their tokens, so the prompt
and the start do not count: mean and 95 % t-interval over rounds. On a CPU (--changes for a small shape) it only tries the script.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import serve_9b
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from annie_quant.offline.linears import NVFP4Linear

PROMPT, SHORT, LONG = 128, 16, 80
BF16 = (
    "lm_head",
    "in_proj_a",
    "in_proj_b",
)  # linears that stay bf16, as in serve_9b.py's checkpoints


def random_nvfp4(linear: nn.Linear) -> NVFP4Linear:
    """Return a W4A16 linear of the same shape and device with random codes and scales of a trained model's size."""
    device = linear.weight.device
    new = NVFP4Linear(linear.in_features, linear.out_features, activations=False, device=device)
    new.codes.data.random_(0, 256)
    new.block_scale.data.view(torch.uint8).random_(0x30, 0x48)
    getattr(new, new.NAMES.tensor_scale).data.fill_(0.0035)
    new.prepare()
    return new


def build(config: Any, quantized: bool, device: str) -> Any:
    """Return a model with random weights on the device."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    if quantized:
        linears = {
            name: m
            for name, m in model.named_modules()
            if isinstance(m, nn.Linear) and not name.endswith(BF16)
        }
        for name, linear in linears.items():
            model.set_submodule(name, random_nvfp4(linear))
        print(f"{len(linears)} linears are NVFP4", flush=True)
    return model


def seconds(model: Any, ids: torch.Tensor, tokens: int) -> float:
    """Return the seconds of one generate of `tokens` tokens."""
    begin = time.perf_counter()
    out = model.generate(
        ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, cache_implementation="static",
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    out.cpu()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--changes", default="{}", help="JSON of the model's configuration, for another shape"
    )
    parser.add_argument(
        "--tiny", type=Path, default=serve_9b.HERE.parent.parent / "annie_quant/assets/tiny-annie"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        changes = serve_9b.SHAPES["9b"] | json.loads(args.changes)
        config = AutoConfig.from_pretrained(
            serve_9b.write_config(Path(folder), args.tiny, False, changes)
        )
        models = {
            "bf16": build(config, False, args.device),
            "ours": build(config, True, args.device),
        }
        ids = torch.randint(2, 1000, (1, PROMPT), generator=torch.Generator().manual_seed(0)).to(
            args.device
        )
        times: dict[str, list[float]] = {name: [] for name in models}
        for name, model in models.items():
            begin = time.perf_counter()
            for tokens in (SHORT, LONG):  # compiles
                seconds(model, ids, tokens)
            print(f"{name}: compiled and ran in {time.perf_counter() - begin:.1f} s", flush=True)
        for number in range(args.rounds):
            for name in sorted(models, reverse=bool(number % 2)):
                both = [seconds(models[name], ids, tokens) for tokens in (SHORT, LONG)]
                times[name].append(1e3 * (both[1] - both[0]) / (LONG - SHORT))
        for name, values in times.items():
            mean, half = serve_9b.interval(values)
            print(f"{name}: {mean:.3f} +- {half:.3f} ms per token (n = {len(values)})", flush=True)
        mean, half = serve_9b.interval(
            [a / b for a, b in zip(times["ours"], times["bf16"], strict=True)]
        )
        print(f"ours / bf16: {mean:.3f} +- {half:.3f}", flush=True)


if __name__ == "__main__":
    main()
