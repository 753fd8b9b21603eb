"""Time `best` on layers of a 9B's shape: real widths, weights with outliers, 512 answers of 2,048 tokens; GPU and host memory.

    python tests/perf/best_9b.py DIR --layers 8 --seconds 150           # one JSON line; 32 layers are extrapolated from those
    python tests/perf/best_9b.py DIR --layers 2 --samples 8 --narrow 16 # the same on a CPU, widths divided by 16

The vocabulary has 4,096 tokens: embedding and head are not rounded. Weights are Student t (5 degrees of freedom), columns have
log-normal sizes, and one hidden channel in 500 is 8 times larger.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import torch

import annie_quant
from annie_quant import quantize
from annie_quant.data import generate

TINY = Path(annie_quant.__file__).parent / "assets/tiny-annie"
SHAPE = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16, "num_key_value_heads": 4,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
HEADS = {"head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 4096}


def make(folder: Path, layers: int, narrow: int) -> None:
    """Write a checkpoint with `layers` layers of the 9B's shape, its widths and heads divided by `narrow`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(TINY, trust_remote_code=False)
    for key, value in SHAPE.items():
        setattr(config, key, max(1, value // narrow))
    for key, value in HEADS.items():
        setattr(config, key, value)
    config.num_hidden_layers = layers
    config.max_position_embeddings = 32768
    config.layer_types = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
    student = torch.distributions.StudentT(torch.tensor(5.0, device=device))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim != 2:
                continue
            size = torch.exp(0.4 * torch.randn(parameter.shape[1], device=device))
            heavy = student.sample((parameter.numel(),)).view_as(parameter)
            parameter.copy_(heavy * 0.6 * size / parameter.shape[1] ** 0.5)
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "embed_tokens.weight")):
                rows = parameter if "embed" not in name else parameter.T
                rows[:: rows.shape[0] // max(1, rows.shape[0] // 500)] *= 8
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(TINY / name, folder / name)


def make_text(folder: Path, samples: int, tokens: int) -> Path:
    """Write conversations whose answers fill `tokens` tokens each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    source, target = folder / "short.jsonl", folder / "calibration.jsonl"
    generate("annie", teacher="offline", n=100, output=source)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    answers = [m["content"] for r in rows for m in r["messages"] if m["role"] == "assistant" and m.get("content")]
    rng = random.Random(0)
    lengths = {a: len(tokenizer(a)["input_ids"]) + 1 for a in answers}
    with target.open("w") as file:
        for i in range(samples):
            row = {k: v for k, v in rows[i % len(rows)].items() if k in ("category", "thinking", "provenance")}
            text, length = [], 0
            while length < tokens:
                text.append(rng.choice(answers))
                length += lengths[text[-1]]
            messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": " ".join(text)}]
            file.write(json.dumps(row | {"id": f"long-{i}", "messages": messages}) + "\n")
    return target


class TimeIsOver(Exception):
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument(
        "--tokens", type=int, default=1900, help="of an answer; its prompt and the last sentence add up to 100"
    )
    parser.add_argument("--narrow", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop before a layer begins after this time")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    begin = time.monotonic()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    make(arguments.folder, arguments.layers, arguments.narrow)
    text = make_text(arguments.folder, arguments.samples, arguments.tokens)
    seconds_making = time.monotonic() - begin
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    marks: list[float] = []
    predicted = ""

    def report(line: str) -> None:
        nonlocal predicted
        print(f"{time.monotonic() - begin:7.1f} {line}", flush=True)
        if line.startswith("memory"):
            predicted = line
        if line.startswith("rounding"):
            marks.append(time.monotonic())
            if marks[-1] - begin > arguments.seconds:
                raise TimeIsOver

    start = time.monotonic()
    settings = dict(item.split("=", 1) for item in arguments.set)
    try:
        quantize.run("best", arguments.folder, arguments.folder / "out", calib_data=text, calib_samples=arguments.samples,
                     force=True, report=report, allow_prompt_mismatch=True, **settings)  # fmt: skip
        marks.append(time.monotonic())
        whole = True
    except TimeIsOver:
        whole = False
    layers = np.diff(marks)
    full = [s for i, s in enumerate(layers) if i % 4 == 3]
    linear = [s for i, s in enumerate(layers) if i % 4 != 3]
    before = marks[0] - start
    cuda = torch.cuda.is_available()
    row = {
        "settings": settings,
        "whole": whole,
        "seconds_before": round(before, 1),
        "seconds_per_layer": [round(float(s), 2) for s in layers],
        "extrapolated_32_layers_s": round(
            before + 24 * float(np.mean(linear)) + 8 * float(np.mean(full or linear)), 1
        ) if len(layers) else None,
        "gpu_peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if cuda else None,
        "host_peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "predicted": predicted,
        "seconds_making": round(seconds_making, 1),
    }  # fmt: skip
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
