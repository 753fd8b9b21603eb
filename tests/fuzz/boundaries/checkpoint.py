"""Metadata of a checkpoint: config.json, hf_quant_config.json, the index, tokenizer files, safetensors headers."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Iterator
from typing import Any

import checkpoint_zoo
from fuzz.boundaries.grammar import Hostile, encode
from fuzz.boundaries.harness import Sandbox

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "vocab_size": 1536, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FILES = ("config.json", "config.json", "config.json", "hf_quant_config.json", "tokenizer.json", "tokenizer_config.json",
         "generation_config.json", "model.safetensors.index.json", "model.safetensors", "annie_quant.json")  # fmt: skip
COMMANDS = (
    ("convert", "{}", "--to", "gguf", "--output", "{out}/x.gguf"),
    ("convert", "{}", "--to", "gguf", "--output", "{out}/x.gguf"),
    ("convert", "{}", "--to", "compressed-tensors", "--output", "{out}/ct"),
    ("audit", "{}", "--json"),
    ("audit", "{}"),
    ("publish", "{}", "--repo", "a/b", "--dry-run"),
    ("serve", "{}", "--runtime", "vllm", "--dry-run"),
)


@contextlib.contextmanager
def opened(sandbox: Sandbox) -> Iterator[Any]:
    plain = checkpoint_zoo.bf16(sandbox.root / "plain", **SMALL)
    quantized = checkpoint_zoo.nvfp4(sandbox.root / "quantized", plain)
    sources = {}
    for folder in (plain, quantized):
        (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
        shards = sorted(folder.glob("*.safetensors"))
        if not (folder / "model.safetensors.index.json").exists() and len(shards) == 1:
            raw = shards[0].read_bytes()
            names = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
            names.pop("__metadata__", None)
            index = {
                "metadata": {"total_size": 1},
                "weight_map": dict.fromkeys(names, shards[0].name),
            }
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        sources[folder] = {p.name: p.read_bytes() for p in folder.iterdir()}

    target = sandbox.inputs / "model"

    def case(seed: str, left: int) -> int:
        hostile = Hostile(seed)
        source = hostile.random.choice(list(sources))
        if target.exists():
            shutil.rmtree(target)
        target.mkdir()
        sandbox.clear_output()
        for name in sources[source]:
            (target / name).hardlink_to(source / name)
        for name in hostile.random.choices(FILES, k=hostile.random.choice((1, 1, 2))):
            data = sources[source].get(name, b"{}")
            (target / name).unlink(missing_ok=True)
            (target / name).write_bytes(
                header(hostile, data) if name.endswith("tensors") else document(hostile, data)
            )
        command = hostile.random.choice(COMMANDS)
        sandbox.run(*(word.format(target, out=sandbox.output) for word in command))
        return 1

    yield case


def document(hostile: Hostile, data: bytes) -> bytes:
    return hostile.damaged(encode(hostile.changed(json.loads(data))))


def header(hostile: Hostile, data: bytes) -> bytes:
    length = struct.unpack("<Q", data[:8])[0]
    raw = document(hostile, data[8 : 8 + length])
    stated = (
        len(raw)
        if hostile.random.random() < 0.9
        else hostile.random.choice((0, 1, 2**40, 2**63, len(raw) + 1))
    )
    return struct.pack("<Q", stated) + raw + data[8 + length :]
