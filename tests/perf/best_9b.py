"""Time `best` on layers of a 9B's shape: real widths, weights with outliers, 512 answers of 2,048 tokens; GPU and host memory.

    python tests/perf/best_9b.py DIR --layers 8 --seconds 150           # one JSON line; 32 layers are extrapolated from those
    python tests/perf/best_9b.py DIR --layers 2 --samples 8 --narrow 16 # the same on a CPU, widths divided by 16

The vocabulary has 4,096 tokens: embedding and head are not rounded. Weights are Student t (5 degrees of freedom), columns have
log-normal sizes, and one hidden channel in 500 is 8 times larger.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import resource
import shutil
import subprocess
import sys
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
PERIOD = 4  # every fourth layer has attention, the others DeltaNet
HEADS = {
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 4096,
}


def make(folder: Path, layers: int, narrow: int) -> None:
    """Write a checkpoint with `layers` layers of the 9B's shape, one file per layer, its widths and heads divided by `narrow`."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(TINY, trust_remote_code=False)
    for key, value in SHAPE.items():
        setattr(config, key, max(1, value // narrow))
    for key, value in HEADS.items():
        setattr(config, key, value)
    config.num_hidden_layers = PERIOD
    config.max_position_embeddings = 32768
    config.layer_types = [
        "full_attention" if i % PERIOD == PERIOD - 1 else "linear_attention" for i in range(layers)
    ]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    kinds = config.layer_types
    config.layer_types = (kinds * PERIOD)[:PERIOD]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    config.num_hidden_layers, config.layer_types = layers, kinds
    config.save_pretrained(folder)
    student = torch.distributions.StudentT(torch.tensor(5.0, device=device))

    def drawn(name: str, value: torch.Tensor) -> torch.Tensor:
        if value.ndim != 2:
            return value.cpu()
        size = torch.exp(0.4 * torch.randn(value.shape[1], device=device))
        heavy = student.sample((value.numel(),)).view_as(value)
        value = (heavy * 0.6 * size / value.shape[1] ** 0.5).bfloat16()
        if name.endswith(
            ("o_proj.weight", "out_proj.weight", "down_proj.weight", "embed_tokens.weight")
        ):
            rows = value if "embed" not in name else value.T
            rows[:: rows.shape[0] // max(1, rows.shape[0] // 500)] *= 8
        return value.cpu()

    names: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        waiting = []
        for i in range(-1, layers):
            part = {}
            for name, parameter in model.state_dict().items():
                layer = name.partition("layers.")[2].partition(".")[0]
                if (i < 0 and not layer) or (layer and int(layer) == i % PERIOD and i >= 0):
                    part[name.replace(f"layers.{layer}.", f"layers.{i}.")] = drawn(name, parameter)
            file = f"model-{i + 2:05d}-of-{layers + 1:05d}.safetensors"
            names |= dict.fromkeys(part, file)
            waiting.append(pool.submit(save_file, part, folder / file, {"format": "pt"}))
        for future in waiting:
            future.result()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ):
        shutil.copyfile(TINY / name, folder / name)


def make_text(folder: Path, samples: int, tokens: int) -> Path:
    """Write conversations whose answers fill `tokens` tokens each."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    source, target = folder / "short.jsonl", folder / "calibration.jsonl"
    generate("annie", teacher="offline", n=100, output=source)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    answers = [
        m["content"]
        for r in rows
        for m in r["messages"]
        if m["role"] == "assistant" and m.get("content")
    ]
    rng = random.Random(0)
    lengths = {a: len(tokenizer(a)["input_ids"]) + 1 for a in answers}
    with target.open("w") as file:
        for i in range(samples):
            row = {
                k: v
                for k, v in rows[i % len(rows)].items()
                if k in ("category", "thinking", "provenance")
            }
            text, length = [], 0
            while length < tokens:
                text.append(rng.choice(answers))
                length += lengths[text[-1]]
            messages = [
                {"role": "user", "content": "Go on."},
                {"role": "assistant", "content": " ".join(text)},
            ]
            file.write(json.dumps(row | {"id": f"long-{i}", "messages": messages}) + "\n")
    return target


class TimeIsOver(Exception):
    pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument(
        "--tokens",
        type=int,
        default=1900,
        help="of an answer; its prompt and the last sentence add up to 100",
    )
    parser.add_argument("--narrow", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop before a layer begins after this time"
    )
    parser.add_argument("--make", action="store_true", help="only write model and text")
    parser.add_argument(
        "--profile", type=int, metavar="LAYER", help="print this layer's time by operation"
    )
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    begin = time.monotonic()
    model, text = arguments.folder / "model", arguments.folder / "calibration.jsonl"
    if arguments.make:
        model.mkdir(parents=True, exist_ok=True)
        make(model, arguments.layers, arguments.narrow)
        make_text(arguments.folder, arguments.samples, arguments.tokens)
        return
    if not text.is_file():  # in another process: this one's peak memory is that of `best`
        subprocess.run([sys.executable, *sys.argv, "--make"], check=True)
    seconds_making = time.monotonic() - begin
    marks: list[float] = []
    cuda = torch.cuda.is_available()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    activities = [torch.profiler.ProfilerActivity.CPU] + [
        torch.profiler.ProfilerActivity.CUDA
    ] * cuda
    profiler = torch.profiler.profile(activities=activities)
    predicted = ""

    def report(line: str) -> None:
        nonlocal predicted
        print(f"{time.monotonic() - begin:7.1f} {line}", flush=True)
        if line.startswith("memory"):
            predicted = line
        if line.startswith("rounding: layer"):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            marks.append(time.monotonic())
            if marks[-1] - begin > arguments.seconds:
                raise TimeIsOver
            if arguments.profile is None:
                return
            if len(marks) - 1 == arguments.profile:
                profiler.start()
            elif len(marks) - 2 == arguments.profile:
                profiler.stop()
                print(
                    profiler.key_averages().table(
                        sort_by=order, row_limit=45, max_name_column_width=60
                    ),
                    flush=True,
                )

    start = time.monotonic()
    settings = dict(item.split("=", 1) for item in arguments.set)
    try:
        quantize.run("best", model, arguments.folder / "out", calib_data=text, calib_samples=arguments.samples,
                     force=True, report=report, allow_prompt_mismatch=True, **settings)  # fmt: skip
        marks.append(time.monotonic())
        whole = True
    except TimeIsOver:
        whole = False
    layers = np.diff(marks)
    full = [s for i, s in enumerate(layers) if i % 4 == 3]
    linear = [s for i, s in enumerate(layers) if i % 4 != 3]
    before = marks[0] - start
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
