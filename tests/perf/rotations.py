"""Do rotations that fold away help? A Llama or Qwen2 is rotated, quantized, and compared with the model as it was.

    python tests/perf/rotations.py DIR --output runs/rotations --results rotations.jsonl --strategies naive,gptq --samples 64
    python tests/perf/rotations.py --table rotations.jsonl

The weights of the two norms of a layer and of the last norm go into the linears after them, which leaves norms of ones; these
commute with an orthogonal matrix Q, so the residual stream can be turned without cost when the model runs: the embedding and all
that writes the stream get Q, all that reads it gets Q's transpose. Kinds of Q:

  none       the model as it is
  folded     Q = 1: norms folded alone
  blocks     Hadamard matrices of 16 with random signs on the diagonal: each NVFP4 block is mixed with itself
  full       a random orthogonal matrix
  heads      blocks of 16 for the values of each head instead of the stream: what o_proj reads
  full+heads both
  sorted     no rotation: channels of the stream, of each MLP and of the values of a head in the order of their mean magnitude, so
             that a block holds alike ones
  spread     the same, but the largest in different blocks

The rotated folder is float32 and computes what the source does to 1e-4 nats (row "bf16"). KL is over held-out answers as in
quantize_peers.py; conversations and answers are its files.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

import torch
from quantize_peers import HeldOut, calibration_text
from safetensors.torch import load_file, save_file

from annie_quant import quantize
from annie_quant.data import generate
from annie_quant.data.rows import read_conversations
from annie_quant.offline.loading import load
from annie_quant.quantize.calibration_text import samples_of_rows

KINDS = ("none", "folded", "blocks", "full", "heads", "full+heads")
ORDERS = ("sorted", "spread")


def hadamard(n: int) -> torch.Tensor:
    """Return the orthogonal Hadamard matrix of size n, a power of two, [n, n] float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / n**0.5


def blocks_of(size: int, generator: torch.Generator) -> torch.Tensor:
    """Return block-diagonal Hadamard matrices of 16 with random signs, [size, size]."""
    signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    return torch.block_diag(*[hadamard(16)] * (size // 16)) * signs


def copy_all_but_weights(source: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, target / file.name)


def magnitudes(model: Path, conversations: Path, n: int) -> dict[str, torch.Tensor]:
    """Return the mean |input| of each channel of a model's linears [K], over the text of n conversations."""
    sums: dict[str, torch.Tensor] = {}

    def observe(name: str, args: tuple[torch.Tensor, ...]) -> None:
        total = args[0].abs().flatten(0, -2).sum(0)
        sums[name] = sums.get(name, torch.zeros_like(total)) + total

    network = load(model, dtype=torch.float32)
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: observe(name, args))
    with torch.inference_mode():
        for sample in samples_of_rows(model, read_conversations(conversations, n)):
            network(input_ids=torch.tensor([sample.ids]), use_cache=False)
    return {name: total / total.mean() for name, total in sums.items()}


def reorder(source: Path, target: Path, kind: str, inputs: dict[str, torch.Tensor]) -> None:
    """Write the folder of a Llama or Qwen2 whose channels are in another order. inputs: of magnitudes()."""
    config = json.loads((source / "config.json").read_text())
    w = load_file(source / "model.safetensors")
    heads, hidden = config["num_key_value_heads"], config["hidden_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]

    def order(values: torch.Tensor) -> torch.Tensor:
        descending = values.argsort(descending=True)
        return descending.view(16, -1).T.flatten() if kind == "spread" else descending

    readers = [inputs[n] for n in inputs if n.endswith(("q_proj", "gate_proj"))]
    stream = order(torch.stack(readers).mean(0))
    for name, x in w.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")) or (x.ndim == 1 and "norm" in name):
            w[name] = x[stream]
        elif x.ndim == 2:
            w[name] = x[:, stream]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        own = order(inputs[f"{layer}mlp.down_proj"])
        for name in ("gate", "up"):
            w[f"{layer}mlp.{name}_proj.weight"] = w[f"{layer}mlp.{name}_proj.weight"][own]
        w[f"{layer}mlp.down_proj.weight"] = w[f"{layer}mlp.down_proj.weight"][:, own]
        values = [
            order(x) for x in inputs[f"{layer}self_attn.o_proj"].view(heads, -1, size).amax(1)
        ]
        for part in ("weight", "bias"):
            if (v := w.get(f"{layer}self_attn.v_proj.{part}")) is not None:
                w[f"{layer}self_attn.v_proj.{part}"] = torch.cat(
                    [x[o] for x, o in zip(v.chunk(heads), values, strict=True)]
                )
        out = w[f"{layer}self_attn.o_proj.weight"].view(hidden, heads, -1, size)
        w[f"{layer}self_attn.o_proj.weight"] = torch.stack(
            [out[:, h][..., o] for h, o in enumerate(values)], 1
        ).reshape(hidden, -1)
    copy_all_but_weights(source, target)
    save_file(
        {k: x.contiguous() for k, x in w.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )


def rotate(source: Path, target: Path, kind: str, seed: int) -> None:
    """Write the folder of a Llama or Qwen2 whose residual stream or values are turned, in float32."""
    config = json.loads((source / "config.json").read_text())
    w = {k: v.double() for k, v in load_file(source / "model.safetensors").items()}
    hidden, heads = config["hidden_size"], config["num_key_value_heads"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    generator = torch.Generator().manual_seed(seed)
    q = torch.eye(hidden, dtype=torch.float64)
    if "full" in kind:
        q = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator, dtype=torch.float64)).Q
    elif kind == "blocks":
        q = blocks_of(hidden, generator)
    v = blocks_of(size, generator) if "heads" in kind else torch.eye(size, dtype=torch.float64)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    w["lm_head.weight"] = head * w["model.norm.weight"] @ q
    w["model.norm.weight"] = torch.ones(hidden)
    w["model.embed_tokens.weight"] = w["model.embed_tokens.weight"] @ q
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        readers = {
            "input_layernorm": [f"self_attn.{x}_proj" for x in "qkv"],
            "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
        }
        for norm, names in readers.items():
            for name in names:
                w[f"{layer}{name}.weight"] = (
                    w[f"{layer}{name}.weight"] * w[f"{layer}{norm}.weight"] @ q
                )
            w[f"{layer}{norm}.weight"] = torch.ones(hidden)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            w[f"{layer}{name}.weight"] = q.T @ w[f"{layer}{name}.weight"]
            if f"{layer}{name}.bias" in w:
                w[f"{layer}{name}.bias"] = w[f"{layer}{name}.bias"] @ q
        for part in ("weight", "bias"):  # values of a head: V becomes V v, which o_proj undoes
            if (value := w.get(f"{layer}self_attn.v_proj.{part}")) is not None:
                w[f"{layer}self_attn.v_proj.{part}"] = torch.cat(
                    [v.T @ x for x in value.chunk(heads)]
                )
        out = w[f"{layer}self_attn.o_proj.weight"]
        w[f"{layer}self_attn.o_proj.weight"] = torch.cat(
            [x @ v for x in out.chunk(out.shape[1] // size, 1)], 1
        )
    copy_all_but_weights(source, target)
    changed = config | {"tie_word_embeddings": False, "dtype": "float32"}
    (target / "config.json").write_text(json.dumps(changed))
    save_file(
        {k: x.float().contiguous() for k, x in w.items()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--output", type=Path, default=Path("runs/rotations"))
    parser.add_argument("--results", type=Path, default=Path("runs/rotations.jsonl"))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--strategies", default="bf16,naive,gptq")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--answers", type=int, default=120)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the calibration conversations and the rotation"
    )
    parser.add_argument("--table", type=Path)
    a = parser.parse_args()
    if a.table:
        print(
            "| model | seed | rotation | strategy | KL W4A4, W4A16 (1e-3 nats) | flips |\n|---|---|---|---|---|---|"
        )
        for r in map(json.loads, a.table.read_text().splitlines()):
            kl = ", ".join(f"{1e3 * r[f'{n}_kl']:.1f}" for n in ("w4a4", "w4a16") if f"{n}_kl" in r)
            flips = ", ".join(str(r[f"{n}_flips"]) for n in ("w4a4", "w4a16") if f"{n}_kl" in r)
            print(
                f"| {r['model']} | {r['seed']} | {r['kind']} | {r['strategy']} | {kl} | {flips} of {r['tokens']:,} |"
            )
        return
    a.output.mkdir(parents=True, exist_ok=True)
    gate = a.output / "gate.jsonl"
    if not gate.is_file():
        generate("annie", teacher="offline", n=400, output=gate, seed=77, split="gate")
    conversations, _ = calibration_text(a.model, a.seed, a.samples, a.output)
    held_out = HeldOut.of(a.model, gate, a.answers)
    for kind in a.kinds.split(","):
        rotated = a.model
        if kind != "none":
            rotated = a.output / f"{a.model.name}-{kind}-{a.seed}"
            shutil.rmtree(rotated, ignore_errors=True)
            if kind in ORDERS:
                reorder(a.model, rotated, kind, magnitudes(a.model, conversations, a.samples))
            else:
                rotate(a.model, rotated, kind, a.seed)
        for strategy in a.strategies.split(","):
            start, target = time.monotonic(), a.output / "checkpoint"
            shutil.rmtree(target, ignore_errors=True)
            line = {
                "model": a.model.name,
                "seed": a.seed,
                "kind": kind,
                "strategy": strategy,
                "tokens": held_out.tokens,
            }
            if strategy == "bf16":
                line |= held_out.compare(rotated, "w4a16")
            else:
                quantize.run(
                    strategy,
                    rotated,
                    target,
                    calib_data=conversations,
                    calib_samples=a.samples,
                    seed=a.seed,
                )
                line |= held_out.compare(target, "w4a4") | held_out.compare(target, "w4a16")
            line["seconds"] = round(time.monotonic() - start)
            with a.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
        if kind != "none":
            shutil.rmtree(rotated)


if __name__ == "__main__":
    sys.exit(main())
