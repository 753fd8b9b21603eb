"""Checkpoints of published sizes whose tensors are holes: headers, settings and a large vocabulary, and no space on the disk."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import checkpoint_zoo as zoo
import numpy as np
import published_models

from annie_quant.checkpoint import header
from annie_quant.checkpoint.shards import INDEX

SHARD_BYTES = 5_000_000_000
VOCABULARY_BYTES = 12_000_000  # of Qwen3.5's tokenizer.json


def write(
    folder: Path, table: published_models.Table, config: dict, shard_bytes: int = SHARD_BYTES
) -> Path:
    """Write a checkpoint with the tensors of a table: name → (dtype, shape)."""
    folder.mkdir(parents=True)
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, (dtype, shape) in table.items():
        tensor_bytes = header.DTYPES[dtype].itemsize * int(np.prod(shape, dtype=object))
        if shards[-1] and size + tensor_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, dtype, shape))
        size += tensor_bytes
    weight_map = {}
    for number, entries in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / file, entries)
        weight_map |= {name: file for name, _, _ in entries}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for name in zoo.TOKENIZER:
        shutil.copyfile(zoo.TINY_ANNIE / name, folder / name)
    vocabulary = folder / "tokenizer.json"  # as large as the published one: blanks are JSON
    with vocabulary.open("a") as file:
        file.write(" " * (VOCABULARY_BYTES - vocabulary.stat().st_size))
    return folder


def write_shard(path: Path, entries: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """Write a header, and a hole for the data that it describes."""
    content = header.build(entries, {"format": "pt"})
    data = sum(
        header.DTYPES[dtype].itemsize * int(np.prod(shape, dtype=object))
        for _, dtype, shape in entries
    )
    path.write_bytes(content)
    os.truncate(path, len(content) + data)


def published(name: str, folder: Path) -> Path:
    """Write a release of published_models at its published size."""
    return write(folder, published_models.table(name), published_models.config(name))
