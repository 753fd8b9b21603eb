"""Make a synthetic bf16 checkpoint with Qwen3.5-9B's real shapes: multimodal names, embedding, head, MTP, some vision.

    python tests/perf/make_9b.py /tmp/synthetic-9b --layers 12      # 9.6 GB; 32 layers are the whole model
    python tests/perf/make_9b.py /tmp/synthetic-35b --layers 2 --mixture   # 35B-A3B: 256 experts, 1.7 GB per layer of 40

Weights are bf16 numbers of a normal distribution that repeat every 32 MB: their values do not affect the measured times, their
size and position do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "helpers"))
import checkpoint_zoo as zoo
from paths import TINY_ANNIE

from annie_quant.checkpoint import Planned, write

TEXT = zoo.CONFIG | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "vocab_size": 248320,
    "mtp_num_hidden_layers": 1,
    "max_position_embeddings": 262144,
}
MIXTURE = (
    TEXT
    | {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "intermediate_size": 512,  # of the shared expert, for the shapes; the published config.json has no such field
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_key_value_heads": 2,
        "mtp_num_hidden_layers": 0,
    }
)
VISION = {
    "model.visual.patch_embed.proj.weight": (1152, 3, 2, 16, 16),
    "model.visual.pos_embed.weight": (2304, 1152),
}
BLOCK = 1 << 24


def mixture_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a mixture's tensors, with the merged experts of the published checkpoint."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    plain = zoo.shapes(MIXTURE | {"layer_types": kinds})
    count, width, hidden = (
        MIXTURE["num_experts"],
        MIXTURE["moe_intermediate_size"],
        MIXTURE["hidden_size"],
    )
    named = {}
    for name, shape in plain.items():
        deeper = (
            name.replace("model.", "model.language_model.", 1)
            if name.startswith("model.")
            else name
        )
        named[deeper.replace(".mlp.", ".mlp.shared_expert.")] = shape
    for i in range(layers):
        base = f"model.language_model.layers.{i}.mlp"
        named |= {
            f"{base}.experts.gate_up_proj": (count, 2 * width, hidden),
            f"{base}.experts.down_proj": (count, hidden, width),
            f"{base}.gate.weight": (count, hidden),
            f"{base}.shared_expert_gate.weight": (1, hidden),
        }
    return named | VISION


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors of the model with this number of layers, with the names of the published checkpoint."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    plain = zoo.shapes(TEXT | {"layer_types": kinds})
    named = {
        n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n: s
        for n, s in plain.items()
    }
    return named | VISION


def make(folder: Path, layers: int, shard_bytes: int = 5_000_000_000, mixture: bool = False) -> int:
    """Write the checkpoint and return the bytes of its weights."""
    rng = np.random.default_rng(0)
    block = (rng.standard_normal(BLOCK, np.float32) * 0.02).astype(ml_dtypes.bfloat16)

    def values(elements: int) -> Iterator[np.ndarray]:
        for start in range(0, elements, BLOCK):
            yield block[: min(BLOCK, elements - start)]

    plan = [
        Planned(n, "BF16", s, partial(values, int(np.prod(s))))
        for n, s in (mixture_shapes if mixture else shapes)(layers).items()
    ]
    write(folder, plan, shard_bytes)
    text = (MIXTURE if mixture else TEXT) | {
        "num_hidden_layers": layers,
        "layer_types": [
            "full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)
        ],
    }
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
    }
    if mixture:
        config |= {"architectures": MIXTURE["architectures"], "model_type": "qwen3_5_moe"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in zoo.TOKENIZER:
        shutil.copyfile(TINY_ANNIE / name, folder / name)
    return sum(p.size_bytes for p in plan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--mixture", action="store_true", help="Qwen3.5-35B-A3B's shapes")
    arguments = parser.parse_args()
    size_bytes = make(arguments.folder, arguments.layers, mixture=arguments.mixture)
    print(f"{size_bytes / 1e9:.2f} GB in {arguments.folder}")
