"""An adapter's folder: adapter_config.json, tokenizer files, the names and shapes of its tensors."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_zoo
import numpy as np
from fuzz.boundaries.checkpoint import SMALL, document
from fuzz.boundaries.grammar import Hostile
from fuzz.boundaries.harness import Sandbox
from safetensors.numpy import save_file

PREFIX = "base_model.model.model."
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 64}
FILES = ("adapter_config.json", "adapter_config.json", "adapter_model.safetensors", "adapter_model.safetensors",
         "tokenizer.json", "tokenizer_config.json", "README.md")  # fmt: skip
SETTINGS = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 3, "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"up_proj": 1.5},
    "use_rslora": False, "use_dora": False, "lora_bias": False, "bias": "none", "fan_in_fan_out": False,
    "init_lora_weights": True, "target_modules": ["up_proj", "embed_tokens"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "modules_to_save": ["norm"],
    "trainable_token_indices": [3, 5], "base_model_name_or_path": "owner/base", "peft_version": "0.21.2",
    "lora_B_layout": None, "auto_mapping": {"base_model_class": "X"}, "layer_replication": None, "revision": None,
}  # fmt: skip


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32) / 50


def tensors(is_mixture: bool) -> dict[str, np.ndarray]:
    """Return tensors of every kind that the base takes."""
    hidden = SMALL["hidden_size"]
    layer = f"{PREFIX}layers.1."
    made = {
        f"{layer}self_attn.o_proj.lora_A.weight": random(2, 64),
        f"{layer}self_attn.o_proj.lora_B.weight": random(hidden, 2),
        f"{PREFIX}norm.weight": random(hidden),
        f"{PREFIX}embed_tokens.token_adapter.trainable_tokens_delta": random(2, hidden),
        "base_model.model.lm_head.modules_to_save.weight": random(1536, hidden),
        "base_model.model.lm_head.original_module.weight": random(1536, hidden),
    }
    if is_mixture:
        inner = f"{layer}mlp.experts.base_layer."
        outer = f"{layer}mlp.experts."
        made |= {
            f"{inner}lora_A.weight": random(4, hidden),
            f"{inner}lora_B.weight": random(128, 4),
        }
        made |= {f"{outer}lora_A.weight": random(4, 64), f"{outer}lora_B.weight": random(hidden, 4)}
        return made
    made[f"{layer}mlp.up_proj.lora_A.default.weight"] = random(2, hidden)
    made[f"{layer}mlp.up_proj.lora_B.default.weight"] = random(128, 2)
    return made


def mixture(folder: Path, dense: Path) -> Path:
    """Write the base with merged experts in place of its MLPs."""
    config = json.loads((dense / "config.json").read_text()) | EXPERTS
    config |= {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    weights = checkpoint_zoo.weights(checkpoint_zoo.CONFIG | SMALL, 0)
    kept = {name: tensor for name, tensor in weights.items() if ".mlp." not in name}
    for layer in range(SMALL["num_hidden_layers"]):
        module = f"model.layers.{layer}.mlp"
        for name, shape in (("gate_up_proj", (2, 128, 64)), ("down_proj", (2, 64, 64))):
            kept[f"{module}.experts.{name}"] = random(*shape).astype(checkpoint_zoo.BF16)
        kept[f"{module}.gate.weight"] = random(2, 64).astype(checkpoint_zoo.BF16)
    return checkpoint_zoo.save(folder, kept, config)


def renamed(hostile: Hostile, head: dict[str, Any]) -> dict[str, Any]:
    """Return a header with parts of some names exchanged for parts of others, and other shapes of as many elements."""
    names = list(head)
    pieces = [piece for name in names for piece in name.split(".")]
    changed = {}
    for name, entry in head.items():
        parts = name.split(".")
        if hostile.random.random() < 0.2:
            parts[hostile.random.randrange(len(parts))] = hostile.random.choice(pieces)
        if hostile.random.random() < 0.1:
            parts.insert(hostile.random.randrange(len(parts)), hostile.random.choice(pieces))
        if hostile.random.random() < 0.15:
            count = int(np.prod(entry["shape"]))
            shapes = ([count], [1, count], [count, 1], [2, count // 2], [1, count, 1])
            entry = entry | {"shape": hostile.random.choice(shapes)}
        changed[".".join(parts)] = entry
    return changed


@contextlib.contextmanager
def opened(sandbox: Sandbox) -> Iterator[Any]:
    dense = checkpoint_zoo.bf16(sandbox.root / "dense", **SMALL)
    bases = {False: dense, True: mixture(sandbox.root / "mixture", dense)}
    sources: dict[bool, dict[str, bytes]] = {}
    for is_mixture in bases:
        folder = sandbox.root / f"adapter-{is_mixture}"
        folder.mkdir()
        save_file(tensors(is_mixture), folder / "adapter_model.safetensors")
        sources[is_mixture] = {
            "adapter_config.json": json.dumps(SETTINGS).encode(),
            "adapter_model.safetensors": (folder / "adapter_model.safetensors").read_bytes(),
            "tokenizer.json": (dense / "tokenizer.json").read_bytes(),
            "tokenizer_config.json": b'{"chat_template": "x", "eos_token": "y"}',
            "README.md": b"load_in_4bit: true",
        }
    target = sandbox.inputs / "adapter"
    target.mkdir()

    def case(seed: str, left: int) -> int:
        hostile = Hostile(seed)
        is_mixture = hostile.random.random() < 0.5
        files = dict(sources[is_mixture])
        for name in hostile.random.choices(FILES, k=hostile.random.choice((0, 1, 1, 2))):
            files[name] = changed_file(hostile, name, sources[is_mixture][name])
        for name, data in files.items():
            (target / name).write_bytes(data)
        sandbox.clear_output()
        base = bases[is_mixture if hostile.random.random() < 0.9 else not is_mixture]
        output = ("--output", sandbox.output / "merged")
        code, _, _ = sandbox.run("convert", base, "--adapter", target, *output)
        assert code == 0 or not list(sandbox.output.iterdir()), "a refused merge wrote something"
        return 1

    yield case


def changed_file(hostile: Hostile, name: str, data: bytes) -> bytes:
    if name.endswith(".md"):
        return hostile.text().encode(errors="replace")
    if not name.endswith(".safetensors"):
        return document(hostile, data)
    length = struct.unpack("<Q", data[:8])[0]
    head = json.loads(data[8 : 8 + length])
    head.pop("__metadata__", None)
    if hostile.random.random() < 0.2:
        raw = document(hostile, json.dumps(head).encode())
    else:
        raw = json.dumps(renamed(hostile, head)).encode()
    return struct.pack("<Q", len(raw)) + raw + data[8 + length :]
